"""Two datasets side by side: what is said to differ does, and the numbers are each one's own."""

import json
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from pipeline.report.__main__ import as_text, main
from pipeline.report.compare import Comparison, compare, comparison_page
from pipeline.report.figures import Figures, measure
from pipeline.shards import PackedDataset
from tests.forge import make_dataset
from tests.packed import make_packed, with_byte_tokenizer
from tests.parsed import cells


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same chats, split at 200 tokens and truncated at 400."""
    root = tmp_path_factory.mktemp("both")
    first = make_dataset(root, out=root / "a")
    return first, make_dataset(root, out=root / "b", max_tokens=400, overflow="truncate")


@pytest.fixture(scope="module")
def found(both: tuple[Path, Path]) -> Comparison:
    return compare(*(measure(PackedDataset.open(path)) for path in both))


def rows_of(path: Path) -> list[tuple[int, int, tuple[int, ...]]]:
    """(doc_id, piece, ids) of every piece, by plain loops."""
    return [
        (int(doc_id), int(row.pieces[j]), tuple(row.input_ids[row.boundaries[j] : row.boundaries[j + 1]].tolist()))
        for row in PackedDataset.open(path)
        for j, doc_id in enumerate(row.doc_ids)
    ]


def test_fields_of_the_recipes_that_differ_are_named(found: Comparison) -> None:
    assert found.recipe == [
        "pack.max_tokens: 200 -> 400",
        "pack.overflow: 'split' -> 'truncate'",
    ]
    assert found.recipe_lines()[0] == ("pack.max_tokens", "200 -> 400")


def test_totals_and_limits_are_each_ones_own(both: tuple[Path, Path], found: Comparison) -> None:
    a, b = (PackedDataset.open(path).manifest for path in both)
    numbers = found.numbers()
    for name in ("rows", "documents", "tokens", "targets", "padding", "split", "truncated", "tokens_cut", "chats_read"):
        assert numbers["totals"][name] == (a.totals[name], b.totals[name])
    for reason in {*a.totals["rejected"], *b.totals["rejected"]}:
        pair = (a.totals["rejected"].get(reason, 0), b.totals["rejected"].get(reason, 0))
        assert numbers["totals"][f"rejected: {reason}"] == pair
    assert numbers["limits"] == {name: (a.limits[name], b.limits[name]) for name in a.limits}


def test_lengths_have_bars_of_the_same_width_in_both(both: tuple[Path, Path], found: Comparison) -> None:
    assert len(found.lengths[0]) == len(found.lengths[1])
    for path, counts in zip(both, found.lengths, strict=True):
        lengths = [len(ids) for *_, ids in rows_of(path)]
        assert counts == [sum(n // found.width == i for n in lengths) for i in range(len(counts))]


def test_documents_in_both_are_those_whose_tokens_are_the_same(both: tuple[Path, Path], found: Comparison) -> None:
    def whole(path: Path) -> list[tuple[tuple[int, ...], ...]]:
        rows = sorted(rows_of(path))
        return [tuple(ids for held, _, ids in rows if held == doc_id) for doc_id in sorted({row[0] for row in rows})]

    a, b = whole(both[0]), whole(both[1])
    assert found.shared == (sum(ids in b for ids in a), sum(ids in a for ids in b))
    assert 0 < found.shared[0] < len(a)


def test_differences_are_b_less_a_and_lengths_are_per_cent_of_the_pieces_of_each(tmp_path: Path) -> None:
    def laid(name: str, lengths: list[int]) -> Figures:
        rows = [[(i, [5] * num, [False] + [True] * (num - 1))] for i, num in enumerate(lengths)]
        return measure(PackedDataset.open(with_byte_tokenizer(make_packed(tmp_path / name, rows, max_tokens=10))))

    found = compare(laid("a", [2, 3, 3, 4]), laid("b", [3, 4, 4, 4, 4]))
    assert dict(found.parts()[1].lines)["tokens"] == "12 -> 19 (+7)"
    page = comparison_page(found, names=["a", "b"]).decode()
    totals = cells(page.split('id="totals"')[1])
    assert ["rows", "4", "5", "+1"] in totals
    assert ["tokens", "12", "19", "+7"] in totals
    assert ["fill", "30.000%", "38.000%", ""] in totals
    backwards = compare(found.b, found.a)
    assert dict(backwards.parts()[1].lines)["tokens"] == "19 -> 12 (-7)"
    drawn = {float(row[0]): row[1:] for row in cells(page.split('id="lengths"')[1])[1:]}
    assert drawn == {0.5: ["0", "0"], 1.5: ["0", "0"], 2.5: ["25", "0"], 3.5: ["50", "20"], 4.5: ["25", "80"]}


def test_a_dataset_equals_itself(both: tuple[Path, Path]) -> None:
    f = measure(PackedDataset.open(both[0]))
    same = compare(f, f)
    assert same.recipe == []
    assert all(a == b for a, b in (*same.totals.values(), *same.limits.values()))
    assert same.shared == (f.totals["documents"],) * 2
    assert "Nothing." in as_text(same.parts())


def test_an_empty_dataset_can_be_compared(both: tuple[Path, Path], tmp_path: Path) -> None:
    empty = measure(PackedDataset.open(with_byte_tokenizer(make_packed(tmp_path / "d", [], max_tokens=10))))
    for pair in ((empty, measure(PackedDataset.open(both[0]))), (empty, empty)):
        found = compare(*pair)
        assert as_text(found.parts())
        json.dumps(found.numbers())
        assert comparison_page(found, names=["a", "b"]).startswith(b"<!doctype html>")


def test_the_command_prints_writes_only_where_told_and_gives_json(
    both: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [str(path) for path in both]
    before = [sorted(path.rglob("*")) for path in both]
    monkeypatch.setattr(sys, "argv", ["report", *paths])
    assert main() == 0
    assert "pack.max_tokens  200 -> 400" in capsys.readouterr().out
    out = tmp_path / "c.html"
    monkeypatch.setattr(sys, "argv", ["report", *paths, "--json", "--out", str(out)])
    assert main() == 0
    assert json.loads(capsys.readouterr().out)["format"] == "packed-comparison"
    assert [sorted(path.rglob("*")) for path in both] == before
    names: list[str] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attrs: names.append(tag)
    parser.feed(out.read_text())
    assert "script" not in names
    assert names.count("svg") >= 1


def test_rows_cannot_be_asked_for_in_a_comparison(
    both: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["report", *map(str, both), "--row", "1"])
    assert main() == 1
    assert "--row is for the report of one dataset" in capsys.readouterr().err
