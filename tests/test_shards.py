"""The shard format: what is written is read, and what is damaged is found and named."""

import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.shards import (
    DatasetError,
    PackedDataset,
    publish,
    rows_per_shard,
    schema,
    shard_bytes,
    verify_hashes,
)
from tests.packed import make_packed, random_rows, shard_rows


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("max_tokens", [2, 9, 64, 8193])
def test_rows_come_back_as_they_were_written(tmp_path: Path, max_tokens: int, compression: str | None) -> None:
    rows = random_rows(num_rows=37, max_tokens=max_tokens, vocab_size=500, seed=max_tokens)
    path = make_packed(tmp_path / "d", rows, max_tokens=max_tokens, rows_in_shard=16, compression=compression)
    dataset = PackedDataset.open(path)
    verify_hashes(dataset)
    assert len(dataset) == 37
    for i, row in enumerate(rows):
        got = dataset[i]
        ids = [token for piece in row for token in piece[1]]
        ends = np.cumsum([len(piece[1]) for piece in row]).tolist()
        bounds = [0, *ends] + ([max_tokens] if ends[-1] < max_tokens else [])
        assert got.input_ids.tolist() == ids + [0] * (max_tokens - len(ids))
        assert got.loss_mask.tolist() == [m for p in row for m in p[2]] + [False] * (max_tokens - len(ids))
        assert got.boundaries.tolist() == bounds
        assert got.position_ids.tolist() == [n for a, b in pairwise(bounds) for n in range(b - a)]
        assert got.doc_ids.tolist() == [piece[0] for piece in row]
        assert got.pieces.tolist() == [0] * len(row)


def test_rows_are_read_only_views(tmp_path: Path) -> None:
    path = make_packed(tmp_path / "d", random_rows(num_rows=3, max_tokens=16, vocab_size=9), max_tokens=16)
    row = PackedDataset.open(path)[1]
    for array in (row.input_ids, row.position_ids, row.loss_mask, row.boundaries, row.doc_ids, row.pieces):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_a_row_outside_is_an_index_error(tmp_path: Path) -> None:
    path = make_packed(tmp_path / "d", random_rows(num_rows=3, max_tokens=16, vocab_size=9), max_tokens=16)
    dataset = PackedDataset.open(path)
    for index in (-1, 3):
        with pytest.raises(IndexError, match="rows 0 to 2"):
            dataset[index]


def test_the_schema_is_version_1() -> None:
    lines = schema(max_tokens=5, fingerprint="f", shard=3).to_string(show_schema_metadata=True).splitlines()
    assert lines == [
        "input_ids: fixed_size_list<item: int32 not null>[5] not null",
        "  child 0, item: int32 not null",
        "position_ids: fixed_size_list<item: int32 not null>[5] not null",
        "  child 0, item: int32 not null",
        "loss_mask: fixed_size_list<item: bool not null>[5] not null",
        "  child 0, item: bool not null",
        "boundaries: list<item: int32 not null> not null",
        "  child 0, item: int32 not null",
        "doc_ids: list<item: int64 not null> not null",
        "  child 0, item: int64 not null",
        "pieces: list<item: int32 not null> not null",
        "  child 0, item: int32 not null",
        "-- schema metadata --",
        "format: 'packed-arrow'",
        "format_version: '1'",
        "fingerprint: 'f'",
        "shard: '3'",
        "max_tokens: '5'",
    ]


@pytest.mark.parametrize(("max_tokens", "rows"), [(64, 2048), (8192, 2016), (8193, 2016), (32768, 504), (10**7, 8)])
def test_rows_per_shard_is_128_mib_in_whole_batches(max_tokens: int, rows: int) -> None:
    assert rows_per_shard(max_tokens) == rows


def test_a_shard_is_an_arrow_file_that_any_reader_opens(tmp_path: Path) -> None:
    rows = random_rows(num_rows=11, max_tokens=16, vocab_size=99)
    path = make_packed(tmp_path / "d", rows, max_tokens=16)
    table = pa.ipc.open_file(path / "shard-00000.arrow").read_all()
    table.validate(full=True)
    assert table["input_ids"].to_pylist()[5] == PackedDataset.open(path)[5].input_ids.tolist()


def test_bytes_depend_on_the_rows_alone() -> None:
    rows = random_rows(num_rows=20, max_tokens=33, vocab_size=99)
    data = [shard_bytes(shard_rows(rows, max_tokens=33), fingerprint="f", shard=0) for _ in range(2)]
    assert data[0].equals(data[1])
    other = shard_bytes(shard_rows(rows[8:], max_tokens=33), fingerprint="f", shard=0)
    batch = pa.ipc.open_file(data[0]).get_batch(1)
    assert batch.equals(pa.ipc.open_file(other).get_batch(0))


def test_bytes_a_token_stay_within_the_promise() -> None:
    rows = random_rows(num_rows=256, max_tokens=2048, vocab_size=99)
    data = shard_bytes(shard_rows(rows, max_tokens=2048), fingerprint="f", shard=0)
    assert data.size <= 8.2 * 256 * 2048 + 16 * sum(map(len, rows))


@pytest.fixture
def dataset_path(tmp_path: Path) -> Path:
    rows = random_rows(num_rows=40, max_tokens=24, vocab_size=99)
    return make_packed(tmp_path / "d", rows, max_tokens=24, rows_in_shard=16)


@pytest.fixture(scope="module")
def flipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = random_rows(num_rows=40, max_tokens=24, vocab_size=99)
    return make_packed(tmp_path_factory.mktemp("flip") / "d", rows, max_tokens=24, rows_in_shard=16)


def _files(path: Path) -> list[Path]:
    return sorted(p for p in path.rglob("*") if p.is_file() and p.stat().st_size)


@given(st.data())
def test_every_bit_flip_in_any_file_is_found_and_named(flipped: Path, data: st.DataObject) -> None:
    files = _files(flipped)
    file = files[data.draw(st.integers(0, len(files) - 1))]
    whole = file.read_bytes()
    at, bit = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(0, 7))
    changed = bytearray(whole)
    changed[at] ^= 1 << bit
    file.chmod(0o644)
    try:
        file.write_bytes(bytes(changed))
        with pytest.raises(DatasetError, match=file.name):
            verify_hashes(PackedDataset.open(flipped))
    finally:
        file.write_bytes(whole)


def test_truncated_and_missing_files_are_found_when_opening(dataset_path: Path) -> None:
    for file in _files(dataset_path):
        whole = file.read_bytes()
        file.chmod(0o644)
        file.write_bytes(whole[:-1])
        with pytest.raises(DatasetError, match=file.name):
            PackedDataset.open(dataset_path)
        file.unlink()
        with pytest.raises(DatasetError, match=file.name):
            PackedDataset.open(dataset_path)
        file.write_bytes(whole)
    verify_hashes(PackedDataset.open(dataset_path))


def test_swapped_shards_are_found_and_named(dataset_path: Path) -> None:
    one, two = dataset_path / "shard-00000.arrow", dataset_path / "shard-00001.arrow"
    kept = two.read_bytes()
    two.unlink()
    shutil.move(one, two)
    one.write_bytes(kept)
    with pytest.raises(DatasetError, match="shard-0000"):
        verify_hashes(PackedDataset.open(dataset_path))


def test_a_shard_of_another_dataset_is_found_at_first_touch(dataset_path: Path) -> None:
    rows = random_rows(num_rows=40, max_tokens=24, vocab_size=99)[:16]
    file = dataset_path / "shard-00000.arrow"
    foreign = shard_bytes(shard_rows(rows, max_tokens=24), fingerprint="0" * 64, shard=0).to_pybytes()
    assert len(foreign) == file.stat().st_size
    file.unlink()
    file.write_bytes(foreign)
    with pytest.raises(DatasetError, match="schema and metadata of shard 0"):
        PackedDataset.open(dataset_path)[0]


def test_a_zeroed_page_is_found(dataset_path: Path) -> None:
    file = dataset_path / "shard-00001.arrow"
    whole = file.read_bytes()
    file.chmod(0o644)
    for at in range(0, len(whole), 512):
        zeroed = whole[:at] + bytes(min(512, len(whole) - at)) + whole[at + 512 :]
        file.write_bytes(zeroed)
        if zeroed != whole:
            with pytest.raises(DatasetError, match="shard-00001"):
                verify_hashes(PackedDataset.open(dataset_path))


def test_a_damaged_footer_is_never_another_error_than_ours(dataset_path: Path) -> None:
    file = dataset_path / "shard-00000.arrow"
    whole, messages = file.read_bytes(), []
    file.unlink()
    for at in range(len(whole) - 1500, len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 8
        file.write_bytes(damaged)
        try:
            PackedDataset.open(dataset_path)[0]
        except DatasetError as error:
            messages.append(str(error))
    assert len(messages) > 500
    assert all(file.name in message for message in messages)


def test_a_foreign_file_is_found_and_the_report_tolerated(dataset_path: Path) -> None:
    (dataset_path / "report.html").write_text("<p>")
    verify_hashes(PackedDataset.open(dataset_path))
    (dataset_path / "shard-00009.arrow").write_text("x")
    with pytest.raises(DatasetError, match=r"shard-00009\.arrow: a foreign file"):
        verify_hashes(PackedDataset.open(dataset_path))


def test_publishing_leaves_the_whole_file_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "x.arrow"
    entry = publish(target, b"first")
    assert (entry["name"], entry["bytes"], target.read_bytes()) == ("x.arrow", 5, b"first")
    assert target.stat().st_mode & 0o777 == 0o444

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        publish(target, b"second")
    assert target.read_bytes() == b"first"
    assert [p.name for p in tmp_path.iterdir()] == ["x.arrow"]
