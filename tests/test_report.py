"""What a report says is counted by hand here, agrees with the manifest, and its page is inert."""

import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from pipeline.figures import TOKENS_AT_ONCE, Figures, measure
from pipeline.manifest import DatasetError
from pipeline.report import as_html, as_text, looks_odd, main, report
from pipeline.shards import PackedDataset
from pipeline.verify import verify_hashes, verify_semantics
from tests.forge import forge, make_dataset
from tests.packed import Piece, make_packed, random_rows

LONG, SHORT, FULL = (
    (7, [5] * 6, [False, True] * 3),
    (9, [6] * 3, [False, False, True]),
    (4, [7] * 10, [False] + [True] * 9),
)
BY_HAND: list[list[Piece]] = [[LONG, SHORT], [FULL], [SHORT]]
"""Three rows of 10 tokens: 9 with a tail of 1, 10, 3 with a tail of 7."""


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Split, escaped and rejected chats in rows of 200 tokens, packed by the pipeline."""
    return make_dataset(tmp_path_factory.mktemp("packed"))


def figures_of(path: Path) -> Figures:
    return measure(PackedDataset.open(path))


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["report", *arguments])
    return main()


class Tags(HTMLParser):
    """Names, attributes and text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes += attrs
        self.open += [] if tag == "meta" else [tag]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


# --------------------------------------------------------------------------------------------- figures


def test_pieces_and_their_targets_are_those_laid_down_by_hand(tmp_path: Path) -> None:
    pieces = figures_of(make_packed(tmp_path / "d", BY_HAND, max_tokens=10)).pieces
    assert pieces.rows() == [(0, 7, 0, 6, 3), (0, 9, 0, 3, 1), (1, 4, 0, 10, 9), (2, 9, 0, 3, 1)]


def test_totals_limits_histograms_and_the_bound_are_those_counted_by_hand(tmp_path: Path) -> None:
    f = figures_of(make_packed(tmp_path / "d", BY_HAND, max_tokens=10))
    rows = {"rows": 3, "pieces": 4, "documents": 3, "tokens": 22, "targets": 14, "padding": 8}
    assert f.totals == rows | {"truncated": 0, "split": 0, "escaped": 0, "rejected": {}}
    assert f.limits == {"max_segments_per_row": 3, "max_segment_tokens": 10, "sum_of_squared_lengths": 154}
    assert f.histograms["piece_tokens"] == {"width": 1, "counts": [0, 0, 0, 2, 0, 0, 1, 0, 0, 0, 1]}
    assert f.histograms["pieces_per_row"] == {"width": 1, "counts": [0, 2, 1]}
    assert f.least_rows == 3


def test_the_longest_segment_may_be_padding(tmp_path: Path) -> None:
    assert figures_of(make_packed(tmp_path / "d", [[SHORT]], max_tokens=10)).limits["max_segment_tokens"] == 7


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("max_tokens", [64, 61])
def test_pieces_of_many_shards_are_those_that_the_rows_hold(
    tmp_path: Path, max_tokens: int, compression: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.figures.TOKENS_AT_ONCE", 3 * max_tokens)  # slices end within shards
    rows = random_rows(num_rows=21, max_tokens=max_tokens, vocab_size=90)
    path = make_packed(tmp_path / "d", rows, max_tokens=max_tokens, rows_in_shard=8, compression=compression)
    found = figures_of(path).pieces.rows()
    assert found == [
        (i, int(row.doc_ids[j]), int(row.pieces[j]), int(stop - start), int(row.loss_mask[start:stop].sum()))
        for i, row in enumerate(PackedDataset.open(path))
        for j, (start, stop) in enumerate(zip(row.boundaries[: len(row.doc_ids)], row.boundaries[1:], strict=False))
    ]
    assert TOKENS_AT_ONCE >= 1 << 20


@pytest.mark.parametrize("overflow", ["split", "truncate", "drop"])
def test_statistics_of_a_packed_dataset_are_its_manifests(tmp_path: Path, overflow: str) -> None:
    f = figures_of(make_dataset(tmp_path, overflow=overflow))
    assert f.histograms == f.manifest.histograms
    assert f.totals == {name: f.manifest.totals[name] for name in f.totals}
    assert f.limits == {name: f.manifest.limits[name] for name in f.limits}
    counts = {kind: num for kind, num, _ in f.kinds}
    for kind in ("truncated", "split", "escaped"):
        assert counts.get(kind, 0) == f.manifest.totals[kind]
    reasons = {kind.removeprefix("rejected: "): num for kind, num in counts.items() if kind.startswith("rejected")}
    assert reasons == f.manifest.totals["rejected"]
    assert not any("differ" in sentence or "add up" in sentence for sentence in looks_odd(f))


def test_percentiles_are_values_that_occur(tmp_path: Path) -> None:
    rows: list[list[Piece]] = [[(n, [5] * n, [False] + [True] * (n - 1))] for n in range(2, 102)]
    f = figures_of(make_packed(tmp_path / "d", rows, max_tokens=101))
    lines = dict(next(section.lines for section in report(f) if section.title == "Piece lengths, tokens"))
    lengths = np.arange(2, 102)
    assert (lines["least"], lines["most"], lines["mean"]) == ("2", "101", "51.5")
    for name, p in (("5 %", 5), ("median", 50), ("95 %", 95)):
        assert abs(int(lines[name]) - np.percentile(lengths, p)) <= 0.5


def test_shards_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    path = make_packed(tmp_path / "d", BY_HAND, max_tokens=10) / "shard-00000.arrow"
    path.chmod(0o644)
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(DatasetError, match="shard-00000"):
        figures_of(path.parent)


def test_boundaries_that_fall_are_an_error_rather_than_a_figure(tmp_path: Path, packed: Path) -> None:
    def swap(rows: list[dict[str, list[int]]]) -> None:
        rows[0]["boundaries"][1] += 1000

    with pytest.raises(DatasetError, match="shard-00000"):
        figures_of(forge(packed, tmp_path / "d", rows=swap))


# ----------------------------------------------------------------------------------------- what is said


def test_a_full_dataset_with_many_targets_has_nothing_odd(tmp_path: Path) -> None:
    assert list(looks_odd(figures_of(make_packed(tmp_path / "d", [[FULL]] * 3, max_tokens=10)))) == []


def test_few_targets_and_padding_look_odd(tmp_path: Path) -> None:
    piece = (1, [5] * 30, [False] * 29 + [True])
    odd = list(looks_odd(figures_of(make_packed(tmp_path / "d", [[piece]], max_tokens=40))))
    assert odd == [
        "Only 3.3% of the tokens are targets: look at the roles of the messages and at --targets.",
        "The fill is only 75.00%: no packing of these pieces needs fewer rows.",
    ]


def test_rows_above_the_bound_are_given_as_the_reason_for_a_low_fill(tmp_path: Path) -> None:
    path = make_packed(tmp_path / "d", [[SHORT], [SHORT]], max_tokens=10)
    assert "rows above the bound: 1." in " ".join(looks_odd(figures_of(path)))


def test_a_piece_without_a_target_looks_odd(tmp_path: Path) -> None:
    path = make_packed(tmp_path / "d", [[FULL], [(5, [5] * 10, [False] * 10)]], max_tokens=10)
    assert list(looks_odd(figures_of(path))) == ["Pieces without a target: 1. Nothing is learned from them."]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("truncated", 2, "% of the chats are truncated"),
        ("split", 9, "% of the chats are split"),
        ("rejected", {"no_target": 5}, "% of the chats are rejected"),
        ("tokens_cut", 10**6, "% of the tokens are cut"),
        ("escaped", 77, "manifest -> rows): totals.escaped: 77 -> 1"),
        ("rejected", {"no_target": 5}, "totals.rejected"),
        ("tokens", 5, "manifest -> rows): totals.tokens: 5 -> "),
        ("chats_read", 10**6, "The account does not add up: 1,000,000 read ≠ "),
    ],
)
def test_totals_that_lose_much_or_are_wrong_look_odd(
    tmp_path: Path, packed: Path, name: str, value: object, said: str
) -> None:
    path = forge(packed, tmp_path / "d", body=lambda body: body["totals"].update({name: value}))
    assert said in " ".join(looks_odd(figures_of(path)))


def test_tool_tags_in_contents_look_odd(tmp_path: Path, packed: Path) -> None:
    lines = b'{"detail":"1 control strings as text, 1 of them tool tags","doc_id":3,"reason":"","what":"escaped"}\n'
    f = figures_of(forge(packed, tmp_path / "d", files={"rejects.jsonl": lines}))
    assert (f.tool_tags, f.kinds) == (1, [("escaped", 1, [3])])
    assert "Chats with tool tags as plain text: 1." in " ".join(looks_odd(f))
    assert "tool tags" not in " ".join(looks_odd(figures_of(packed)))


def test_the_account_adds_up_in_the_text(packed: Path) -> None:
    text = as_text(report(figures_of(packed)))
    for name, left in (("chats", "read"), ("tokens", "rendered")):
        numbers = [int(n.replace(",", "")) for n in re.findall("[0-9,]+", re.search(f"{name} .* {left} = .*", text)[0])]  # type: ignore[index]
        assert numbers[0] == sum(numbers[1:])
    totals = PackedDataset.open(packed).manifest.totals
    for reason, num in totals["rejected"].items():
        assert re.search(rf"rejected: {reason} +{num}; doc_ids [0-9]", text)


# ------------------------------------------------------------------------------------------ command, page


def test_the_page_lies_beside_the_shards_verify_passes_and_a_second_one_replaces_it(
    packed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        assert run(monkeypatch, str(packed), "--html") == 0
        assert "What looks odd" in capsys.readouterr().out
    dataset = PackedDataset.open(packed)
    verify_hashes(dataset)
    verify_semantics(dataset)
    assert not list(packed.glob(".*"))
    (packed / "report.html").unlink()


def test_without_html_nothing_is_written(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = sorted(packed.rglob("*"))
    assert run(monkeypatch, str(packed)) == 0
    assert sorted(packed.rglob("*")) == before


def test_the_page_loads_and_runs_nothing_and_is_well_formed(packed: Path) -> None:
    page = as_html(report(figures_of(packed)), title="packed")
    tags = Tags(page)
    assert tags.open == []
    assert not {"script", "link", "img", "iframe", "object", "a"} & set(tags.names)
    assert not [n for n, _ in tags.attributes if n in ("src", "href", "xlink:href", "style") or n.startswith("on")]
    assert "url(" not in page
    assert "@import" not in page
    assert tags.names.count("svg") == 2
    assert page.isascii() or '<meta charset="utf-8">' in page


def test_what_a_recipe_holds_is_text_in_the_page(tmp_path: Path) -> None:
    evil = "</title><script>alert('1')</script>\"&"
    path = make_packed(tmp_path / "d", BY_HAND, max_tokens=10, model=evil)
    page = as_html(report(figures_of(path)), title=evil)
    assert "script" not in Tags(page).names
    assert page.count("&lt;script&gt;alert(&#x27;1&#x27;)&lt;/script&gt;&quot;&amp;") == 3


def test_bars_of_the_page_add_up_to_the_pieces(packed: Path) -> None:
    f = figures_of(packed)
    page = as_html(report(f), title="packed")
    lengths, per_row = (re.findall("<title>[0-9, to]+: ([0-9,]+)</title>", svg) for svg in page.split("<svg")[1:])
    assert sum(int(n.replace(",", "")) for n in lengths) == f.totals["pieces"]
    assert sum(int(n.replace(",", "")) for n in per_row) == f.totals["rows"]


def test_without_polars_the_extra_is_named(
    packed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "polars", None)
    assert run(monkeypatch, str(packed)) == 1
    assert 'pip install ".[report]"' in capsys.readouterr().err


def test_a_folder_that_is_no_dataset_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, str(tmp_path)) == 1
    assert "is not a packed dataset" in capsys.readouterr().err
