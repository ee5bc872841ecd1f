"""Every invariant that verify recomputes is broken once and found."""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import pipeline.accounts
import pipeline.verify
from pipeline.manifest import MANIFEST, DatasetError, Manifest
from pipeline.pack import Settings, pack
from pipeline.shards import PackedDataset, Row
from pipeline.verify import RowRules, main, show, verify_semantics
from tests.chatml import write_tokenizer
from tests.chats import small_chats, write_parquet
from tests.forge import sealed


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of 200 tokens of split chats."""
    root = tmp_path_factory.mktemp("packed")
    source = write_parquet(root / "train.parquet", small_chats(40))
    tokenizer = write_tokenizer(root / "tok")
    pack(Settings(source=str(source), tokenizer=str(tokenizer), max_tokens=200, overflow="split", workers=1,
                  out=root / "out", cache_dir=root / "cache"))  # fmt: skip
    return root / "out"


def padded_row(dataset: PackedDataset) -> Row:
    """A row of at least two pieces and a padding tail, its arrays writable copies."""
    row = next(r for r in dataset if len(r.doc_ids) == len(r.boundaries) - 2 >= 2)
    return Row(**{name: np.array(getattr(row, name)) for name in Row.__dataclass_fields__})


def at(name: str, index: int, value: Any) -> Callable[[Row], Row]:
    def change(row: Row) -> Row:
        getattr(row, name)[index] = value
        return row

    return change


def header_target(row: Row) -> Row:
    row.loss_mask[int(np.flatnonzero(row.loss_mask)[0]) - 1] = True
    return row


def user_target(row: Row) -> Row:
    end = row.input_ids[int(np.flatnonzero(row.loss_mask & ~np.roll(row.loss_mask, -1))[0])]
    row.loss_mask[int(np.flatnonzero(row.input_ids == end)[0])] = True  # the user's own end-of-turn
    return row


def no_targets(row: Row) -> Row:
    row.loss_mask[: row.boundaries[1]] = False
    return row


def hole_at_the_end(row: Row) -> Row:
    row.loss_mask[int(np.flatnonzero(~row.loss_mask & np.roll(row.loss_mask, 1))[0]) - 1] = False
    return row


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (at("boundaries", 0, 1), "boundaries must rise"),
        (at("boundaries", -1, 199), "boundaries must rise"),
        (at("boundaries", 1, 0), "boundaries must rise"),
        (lambda r: replace(r, doc_ids=r.doc_ids[:-1]), "do not go together"),
        (lambda r: replace(r, pieces=r.pieces[:-1]), "do not go together"),
        (at("position_ids", 7, 9), "position_ids are wrong from token 7"),
        (at("position_ids", -1, 0), "position_ids are wrong from token 199"),
        (at("input_ids", 3, -1), "a token id is not below"),
        (at("input_ids", 3, 10**6), "a token id is not below"),
        (at("loss_mask", 0, 1), "first token is a target"),
        (at("input_ids", -1, 1), "the padding from token"),
        (at("loss_mask", -1, 1), "the padding from token"),
        (at("input_ids", 0, 1), "does not start with"),
        (no_targets, "a piece has no target"),
        (header_target, "header of a turn|outside the assistant turns"),
        (user_target, "outside the assistant turns"),
        (hole_at_the_end, "does not end with"),
    ],
)
def test_a_row_that_breaks_a_rule_is_found(packed: Path, damage: Callable[[Row], Row], words: str) -> None:
    dataset = PackedDataset.open(packed)
    rules = RowRules(pipeline.verify._tokenizer(dataset), dataset.manifest)
    row = padded_row(dataset)
    assert rules.fault(row) is None
    assert (fault := rules.fault(damage(row)))
    assert any(part in fault for part in words.split("|")), fault


def forged(packed: Path, section: str, name: str, value: Any) -> PackedDataset:
    """The dataset with another entry in its manifest, identities and checksum right."""
    manifest = Manifest.read(packed)
    parts = {part: dict(getattr(manifest, part)) for part in ("totals", "limits", "histograms", "files")}
    parts[section][name] = value
    return PackedDataset(packed, Manifest.build(recipe=manifest.recipe, created={}, **parts))


SECTIONS = {
    "totals": ("chats_read", "documents", "truncated", "split", "escaped", "pieces", "rows", "targets",
               "tokens_rendered", "tokens", "tokens_cut", "tokens_rejected", "padding"),
    "limits": ("max_segments_per_row", "max_segment_tokens", "max_token_id", "sum_of_squared_lengths"),
}  # fmt: skip


@pytest.mark.parametrize(("section", "name"), [(part, name) for part, names in SECTIONS.items() for name in names])
def test_a_total_or_limit_that_the_rows_do_not_give_is_found(packed: Path, section: str, name: str) -> None:
    value = getattr(Manifest.read(packed), section)[name] + 1
    with pytest.raises(DatasetError, match=r"the rows give"):
        verify_semantics(forged(packed, section, name, value))


@pytest.mark.parametrize("name", ["piece_tokens", "pieces_per_row"])
def test_a_histogram_that_the_rows_do_not_give_is_found(packed: Path, name: str) -> None:
    with pytest.raises(DatasetError, match="histograms"):
        verify_semantics(forged(packed, "histograms", name, {"width": 1, "counts": []}))


def test_rejections_without_a_line_are_found(packed: Path) -> None:
    with pytest.raises(DatasetError, match="rejected"):
        verify_semantics(forged(packed, "totals", "rejected", {"no_target": 1}))


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every field of a recipe, inner ones too."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from leaves(inner, (*path, key))


def with_recipe(dataset: Path, change: Callable[[dict[str, Any]], None]) -> PackedDataset:
    """The dataset with another recipe, identities and checksum right; the manifest as a reader gets it."""
    body = json.loads((dataset / MANIFEST).read_bytes())
    change(body["recipe"])
    return PackedDataset(dataset, Manifest.from_bytes(sealed(body)))


def test_a_recipe_that_lacks_a_field_or_holds_another_type_is_refused_by_the_fields_name(packed: Path) -> None:
    paths = list(leaves(Manifest.read(packed).recipe))
    assert ("tokenizer", "pad_token_id") in paths
    for path in paths:
        if path[:2] in {("tokenizer", "template_kwargs"), ("tokenizer", "special_tokens")} or isinstance(path[-1], int):
            continue

        def lose(recipe: dict[str, Any], path: tuple[Any, ...] = path) -> None:
            del reduce(getitem, path[:-1], recipe)[path[-1]]

        def mistype(recipe: dict[str, Any], path: tuple[Any, ...] = path) -> None:
            reduce(getitem, path[:-1], recipe)[path[-1]] = True

        for change, words in ((lose, "is missing"), (mistype, "must be")):
            with pytest.raises(DatasetError, match=rf"recipe\.\S*{path[-1]} {words}"):
                verify_semantics(with_recipe(packed, change))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@hypothesis_settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_recipe_is_verified_or_refused_with_a_dataset_error(packed: Path, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(list(leaves(Manifest.read(packed).recipe))))
    value = data.draw(JSON)

    def change(recipe: dict[str, Any]) -> None:
        reduce(getitem, path[:-1], recipe)[path[-1]] = value

    with contextlib.suppress(DatasetError):
        verify_semantics(with_recipe(packed, change))


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("pack", "max_tokens"), 100, r"recipe\.pack\.max_tokens: 100 -> 200"),
        (("shards", "rows_per_batch"), 16, r"recipe\.shards\.rows_per_batch: 16 -> 8"),
        (("tokenizer", "pad_token_id"), 3, r"recipe\.tokenizer\.pad_token_id: 3 -> "),
        (("tokenizer", "vocab_size"), 10**6, r"recipe\.tokenizer\.vocab_size: 1000000 -> "),
        (("tokenizer", "eos_token_ids"), [], r"recipe\.tokenizer\.eos_token_ids: \[\] -> "),
        (("pack", "overflow"), "stretch", r"recipe\.pack\.overflow must be one of"),
        (("encode", "targets"), 0, r"recipe\.encode\.targets must be one of"),
    ],
)
def test_a_recipe_that_contradicts_the_dataset_is_refused(packed: Path, path: Any, value: Any, words: str) -> None:
    def change(recipe: dict[str, Any]) -> None:
        reduce(getitem, path[:-1], recipe)[path[-1]] = value

    with pytest.raises(DatasetError, match=words):
        verify_semantics(with_recipe(packed, change))


def test_pieces_that_are_not_numbered_once_each_are_found() -> None:
    assert pipeline.accounts.misnumbered([(3, 1), (3, 0), (9, 0)]) == []
    assert pipeline.accounts.misnumbered([(1, 1), (2, 0), (2, 0), (3, 0), (3, 2)]) == [1, 2, 3]


def run(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["verify", *args])
    return main()


def test_quick_looks_at_sizes_full_at_hashes(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in packed.rglob("*"):
        if path.is_file():
            copy = tmp_path / path.relative_to(packed)
            copy.parent.mkdir(exist_ok=True)
            copy.write_bytes(path.read_bytes())
    out = str(tmp_path)
    assert [run(monkeypatch, out, *level) for level in ([], ["--quick"], ["--semantic"])] == [0, 0, 0]
    (tmp_path / "foreign").touch()  # found by the full check, which a semantic one includes
    assert [run(monkeypatch, out, *level) for level in (["--quick"], [], ["--semantic"])] == [0, 1, 1]
    (tmp_path / "foreign").unlink()
    capsys.readouterr()
    shard = tmp_path / "shard-00000.arrow"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    assert run(monkeypatch, out, "--quick") == 0
    assert run(monkeypatch, out) == 1
    assert "shard-00000.arrow" in capsys.readouterr().err
    shard.write_bytes(data[:-1])
    assert run(monkeypatch, out, "--quick") == 1
    (tmp_path / MANIFEST).unlink()
    assert run(monkeypatch, out, "--quick") == 1


def test_quick_and_semantic_exclude_each_other(
    packed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, str(packed), "--quick", "--semantic") == 2
    out, error = capsys.readouterr()
    assert not out
    assert "--quick" in error
    assert "--semantic" in error


def test_a_shown_row_has_its_boundaries_and_targets_marked(
    packed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = PackedDataset.open(packed)
    text = show(dataset, 0, colour=False)
    assert text.count("──── document") == len(dataset[0].doc_ids)
    assert "<|im_start|>assistant\n«" in text
    assert "<|im_end|>»" in text
    assert "\x1b[32m" in show(dataset, 0, colour=True)
    assert run(monkeypatch, str(packed), "--show", "100000") == 1
    assert "this dataset has rows 0 to" in capsys.readouterr().err
