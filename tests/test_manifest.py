"""The manifest: canonical bytes, identities, and clear errors for anything else."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.manifest import DatasetError, Manifest, canonical_bytes, differing_fields, fingerprint
from tests.packed import make_packed, random_rows


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    rows = random_rows(num_rows=3, max_tokens=32, vocab_size=100)
    path = make_packed(tmp_path_factory.mktemp("m") / "d", rows, max_tokens=32)
    return (path / "manifest.json").read_bytes()


def test_a_manifest_is_its_canonical_bytes_and_one_line_break(data: bytes) -> None:
    manifest = Manifest.from_bytes(data)
    assert manifest.to_bytes() == data
    assert data.endswith(b"}\n")
    assert b'": ' not in data


def test_every_changed_byte_is_found(data: bytes) -> None:
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 1
        with pytest.raises(DatasetError, match=r"manifest\.json"):
            Manifest.from_bytes(bytes(changed))


def test_a_truncated_or_extended_manifest_is_refused(data: bytes) -> None:
    for broken in (b"", data[:-1], data[:-2], data + b"\n", data + b" ", b"\xff" + data, b"[" * 100_000):
        with pytest.raises(DatasetError):
            Manifest.from_bytes(broken)


def test_an_unknown_version_is_refused_and_says_what_to_do(data: bytes) -> None:
    with pytest.raises(DatasetError, match="format_version is 2; this program reads 1"):
        Manifest.from_bytes(data.replace(b'"format_version":1', b'"format_version":2'))


def test_content_changes_the_dataset_id_and_creation_does_not(data: bytes) -> None:
    one = Manifest.from_bytes(data)
    parts = {name: getattr(one, name) for name in ("totals", "limits", "histograms", "files")}
    again = Manifest.build(recipe=one.recipe, created={"time": "later"}, **parts)
    other = Manifest.build(recipe=one.recipe, created=one.created, **{**parts, "histograms": {"x": 1}})
    assert again.dataset_id == one.dataset_id
    assert again.checksum != one.checksum
    assert other.dataset_id != one.dataset_id
    assert other.fingerprint == one.fingerprint


def _forge(data: bytes, **changes: Any) -> bytes:
    """A manifest whose checksum and identities are right, whatever its content."""
    body = json.loads(data) | changes
    body["fingerprint"] = fingerprint(body["recipe"]) if isinstance(body["recipe"], dict) else "?"
    identity = {k: v for k, v in body.items() if k not in ("dataset_id", "created", "checksum")}
    body["dataset_id"] = hashlib.sha256(canonical_bytes(identity)).hexdigest()
    body.pop("checksum")
    body["checksum"] = xxhash.xxh3_128_hexdigest(canonical_bytes(body))
    return canonical_bytes(body) + b"\n"


def test_forged_manifests_cannot_lead_out_of_their_folder(data: bytes) -> None:
    files = json.loads(data)["files"]
    assert Manifest.from_bytes(_forge(data)).max_tokens == 32  # the forgery as such passes
    for name in ("../secret", "/etc/passwd", "tokenizer/../../x", "tokenizer/", "report.html", ".hidden"):
        others = [{"name": name, "bytes": 1, "xxh3_128": "0" * 32}]
        with pytest.raises(DatasetError, match=r"tokenizer/NAME"):
            Manifest.from_bytes(_forge(data, files={**files, "others": others}))


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    field=st.sampled_from(["max_tokens", "recipe", "totals", "limits", "histograms", "files", "created", "extra"]),
    value=_JSON,
)
def test_any_structure_is_read_or_refused_with_a_dataset_error(data: bytes, field: str, value: Any) -> None:
    try:
        manifest = Manifest.from_bytes(_forge(data, **{field: value}))
    except DatasetError:
        return
    assert getattr(manifest, field) == value


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_with_a_dataset_error(junk: bytes) -> None:
    with pytest.raises(DatasetError):
        Manifest.from_bytes(junk)


def test_floats_have_no_place_in_a_manifest() -> None:
    with pytest.raises(TypeError, match=r"0\.5"):
        canonical_bytes({"a": [{"b": 0.5}]})


def test_differing_fields_are_named_by_their_path() -> None:
    a = {"pack": {"seed": 0, "max_tokens": 8}, "source": [{"id": "x"}], "same": 1}
    b = {"pack": {"seed": 1, "max_tokens": 8}, "source": [{"id": "y"}], "same": 1}
    assert differing_fields(a, b) == ["pack.seed: 0 -> 1", "source[0].id: 'x' -> 'y'"]


def test_a_folder_without_a_manifest_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"python -m pipeline\.pack"):
        Manifest.read(tmp_path)
