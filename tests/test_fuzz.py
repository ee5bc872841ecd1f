"""The readers of sources and manifests, fed what nobody would write: found by ``tests.fuzz``, and a short run of it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.manifest import MANIFEST, DatasetError, Manifest
from pipeline.source import Conversation, Reject, open_source, read_block
from tests.chatml import chat
from tests.forge import sealed
from tests.packed import make_packed, random_rows

ROOT = Path(__file__).resolve().parent.parent


def read(path: Path) -> list[Conversation | Reject]:
    more: dict[str, Any] = {"revision": None, "messages_column": "messages", "tools_column": None, "limit": None}
    source = open_source(str(path), split="train", cache_dir=path.parent / "cache", **more)
    return [row for block in source.blocks() for row in read_block(block)]


def test_a_few_hundred_examples_of_fuzzing_find_nothing_but_clear_errors_and_typed_rejects(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", "--minutes", "0", "--batch", "120", "--keep", str(tmp_path)],
        capture_output=True, text=True, cwd=ROOT, timeout=1800,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    counts = [int(line.split(" examples")[0].split()[-1].replace(",", "")) for line in done.stdout.splitlines()]
    assert counts == [120] * 5  # the same ones every time, however quick the machine is


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.struct([("role", pa.string()), ("role", pa.string())]), [("role", "user"), ("role", "x")]),
        (pa.struct([("role", pa.timestamp("ms"))]), {"role": 2**62}),
        (pa.struct([("role", pa.timestamp("us", "Nowhere/Here"))]), {"role": 1}),
        (pa.struct([("role", pa.date32())]), {"role": 2**31 - 1}),
    ],
)
def test_a_value_that_python_cannot_hold_rejects_its_row(tmp_path: Path, kind: pa.DataType, value: Any) -> None:
    messages = pa.array([[value], None], pa.list_(kind))
    pq.write_table(pa.table({"messages": messages}), tmp_path / "x.parquet")
    first, second = read(tmp_path / "x.parquet")
    assert isinstance(first, Reject)
    assert (first.reason, first.detail) == ("bad_type", "a value that Python cannot hold")
    assert isinstance(second, Conversation)


def good_parquet(path: Path) -> bytes:
    pq.write_table(pa.table({"messages": [chat("hello", "hi")] * 9}), path, row_group_size=5)
    return path.read_bytes()


def test_a_column_name_that_is_not_utf8_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    data = good_parquet(path)
    at = data.index(b"content", len(data) - 8 - int.from_bytes(data[-8:-4], "little"))  # in the footer's schema
    path.write_bytes(data[:at] + b"c\xffntent" + data[at + 7 :])
    with pytest.raises(ValueError, match=r"x\.parquet: not a readable parquet file"):
        read(path)


def test_a_footer_whose_numbers_of_rows_contradict_each_other_is_an_error_that_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pipeline.rows

    path = tmp_path / "x.parquet"
    good_parquet(path)
    real = pipeline.rows.parquet_file

    class Promising:
        """A file whose first row group promises more rows than memory could list."""

        def __init__(self, metadata: Any) -> None:
            self.num_rows, self.num_row_groups = metadata.num_rows, metadata.num_row_groups
            self._metadata = metadata

        def row_group(self, i: int) -> Any:
            group = self._metadata.row_group(i)
            rows = 2**60 if i == 0 else group.num_rows
            return type("Group", (), {"num_rows": rows, "total_byte_size": group.total_byte_size})

    def opened(name: Path) -> Any:
        file = real(name)
        return type("File", (), {"metadata": Promising(file.metadata), "schema_arrow": file.schema_arrow})

    monkeypatch.setattr(pipeline.rows, "parquet_file", opened)
    with pytest.raises(ValueError, match=r"x\.parquet: not a readable parquet file"):
        pipeline.rows.EXTENTS["parquet"](path)


@pytest.fixture(scope="module")
def body(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A valid manifest's content."""
    path = tmp_path_factory.mktemp("m") / "d"
    make_packed(path, random_rows(num_rows=3, max_tokens=8, vocab_size=9), max_tokens=8)
    found: dict[str, Any] = json.loads((path / MANIFEST).read_bytes())
    return found


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize("levels", [101, 500, 980])
def test_a_manifest_nested_deeply_is_refused_with_a_dataset_error(body: dict[str, Any], levels: int) -> None:
    text = json.dumps(body | {"created": {"x": 0}}, sort_keys=True, separators=(",", ":"))
    deep = text.replace('{"x":0}', '{"x":' + "[" * levels + "]" * levels + "}").encode() + b"\n"
    with pytest.raises(DatasetError, match=r"more than 100 levels|unreadable bytes"):
        Manifest.from_bytes(deep)
    Manifest.from_bytes(sealed(body | {"created": {"x": nested(90)}}))


@pytest.mark.parametrize("value", [2**63, 10**30, -1])
@pytest.mark.parametrize("name", ["rows", "pieces", "tokens", "targets", "bytes"])
def test_numbers_beyond_64_bits_in_a_manifest_are_refused_with_a_dataset_error(
    body: dict[str, Any], name: str, value: int
) -> None:
    files = body["files"] | {"shards": [body["files"]["shards"][0] | {name: value}]}
    with pytest.raises(DatasetError, match=name):
        Manifest.from_bytes(sealed(body | {"files": files}))


@pytest.mark.parametrize("value", [0, 1, 2**31, 2**63])
def test_a_row_length_that_arrow_cannot_hold_is_refused_with_a_dataset_error(body: dict[str, Any], value: int) -> None:
    with pytest.raises(DatasetError, match="max_tokens"):
        Manifest.from_bytes(sealed(body | {"max_tokens": value}))
