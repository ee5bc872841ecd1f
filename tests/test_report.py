"""What a report says is counted by hand here and agrees with the manifest; the command does what its help says."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.manifest import DatasetError
from pipeline.report.__main__ import as_text, main
from pipeline.report.figures import Figures, measure
from pipeline.report.oddities import looks_odd
from pipeline.report.sections import Part, account, limits, parts
from pipeline.shards import PackedDataset
from pipeline.verify import verify_hashes, verify_semantics
from tests.forge import forge, make_dataset
from tests.packed import Piece, make_packed, with_byte_tokenizer

LONG, SHORT, FULL = (
    (7, [5] * 6, [False, True] * 3),
    (9, [6] * 3, [False, False, True]),
    (4, [7] * 10, [False] + [True] * 9),
)
ROOT = Path(__file__).resolve().parent.parent
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


def by_hand(path: Path, rows: list[list[Piece]], *, max_tokens: int = 10, **settings: Any) -> Path:
    """A dataset of these rows with a tokenizer of bytes."""
    return with_byte_tokenizer(make_packed(path, rows, max_tokens=max_tokens, **settings))


# --------------------------------------------------------------------------------------------- figures


def test_pieces_and_their_targets_are_those_laid_down_by_hand(tmp_path: Path) -> None:
    pieces = figures_of(by_hand(tmp_path / "d", BY_HAND)).pieces
    assert pieces.select("row", "doc_id", "piece", "tokens", "targets").rows() == [
        (0, 7, 0, 6, 3),
        (0, 9, 0, 3, 1),
        (1, 4, 0, 10, 9),
        (2, 9, 0, 3, 1),
    ]


def test_totals_limits_histograms_and_the_bound_are_those_counted_by_hand(tmp_path: Path) -> None:
    f = figures_of(by_hand(tmp_path / "d", BY_HAND))
    rows = {"rows": 3, "pieces": 4, "documents": 3, "tokens": 22, "targets": 14, "padding": 8}
    assert f.totals == rows | {"truncated": 0, "split": 0, "escaped": 0, "rejected": {}}
    assert f.limits == {"max_segments_per_row": 3, "max_segment_tokens": 10, "max_token_id": 7,
                        "sum_of_squared_lengths": 154}  # fmt: skip
    assert f.histograms["piece_tokens"] == {"width": 1, "counts": [0, 0, 0, 2, 0, 0, 1, 0, 0, 0, 1]}
    assert f.histograms["pieces_per_row"] == {"width": 1, "counts": [0, 2, 1]}
    assert f.least_rows == 3


def test_the_longest_segment_may_be_padding(tmp_path: Path) -> None:
    assert figures_of(by_hand(tmp_path / "d", [[SHORT]])).limits["max_segment_tokens"] == 7


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
    f = figures_of(by_hand(tmp_path / "d", rows, max_tokens=101))
    lines = dict(next(part.lines for part in parts(f) if part.title == "Piece lengths, tokens"))
    lengths = np.arange(2, 102)
    assert (lines["least"], lines["most"], lines["mean"]) == ("2", "101", "51.5")
    for name, p in (("5%", 5), ("median", 50), ("95%", 95)):
        assert abs(int(lines[name]) - np.percentile(lengths, p)) <= 0.5


def test_other_ways_to_fill_rows_cost_what_laying_them_out_costs(tmp_path: Path) -> None:
    f = figures_of(by_hand(tmp_path / "d", BY_HAND))
    # By doc_id: 10 tokens, 6, 3, 3: the second row of concatenation is 6 + 3 + 1, so one document is cut.
    assert [(w.name, w.rows, w.padding, w.cut) for w in f.ways] == [
        ("these rows", 3, 8, 0),
        ("one piece a row", 4, 18, 0),
        ("concatenation", 3, 8, 1),
    ]
    assert [w.fill for w in f.ways] == [22 / 30, 22 / 40, 22 / 30]


@pytest.mark.parametrize("part", [{"source": [{}]}, {"tokenizer": {}}, {"encode": {}}, {"pack": 1}, {"shards": []}])
def test_a_recipe_that_lacks_a_field_is_an_error(tmp_path: Path, packed: Path, part: dict[str, Any]) -> None:
    f = figures_of(forge(packed, tmp_path / "d", body=lambda body: body["recipe"].update(part)))
    with pytest.raises(DatasetError, match="a recipe with every field"):
        parts(f)


def test_rejected_chats_are_those_of_the_lines_whatever_the_manifest_holds(tmp_path: Path, packed: Path) -> None:
    f = figures_of(forge(packed, tmp_path / "d", body=lambda body: body["totals"].update(rejected={"no_target": "x"})))
    num = sum(PackedDataset.open(packed).manifest.totals["rejected"].values())
    assert f" packed + {num} rejected" in as_text(parts(f))
    assert "(manifest -> rows): totals.rejected." in " ".join(looks_odd(f))


# ----------------------------------------------------------------------------------------- what is said


def test_a_full_dataset_with_many_targets_has_nothing_odd(tmp_path: Path) -> None:
    assert list(looks_odd(figures_of(by_hand(tmp_path / "d", [[FULL]] * 3)))) == []


def test_few_targets_and_padding_look_odd(tmp_path: Path) -> None:
    piece = (1, [5] * 30, [False] * 29 + [True])
    few = "Only 3.3% of the tokens are targets: look at the roles of the messages and at --targets."
    odd = list(looks_odd(figures_of(by_hand(tmp_path / "one", [[piece]], max_tokens=40))))
    assert odd == [few]  # less padding than a row has: what is left of the last one
    odd = list(looks_odd(figures_of(by_hand(tmp_path / "three", [[piece]] * 3, max_tokens=59))))
    assert odd == [
        few,
        "The fill is only 50.85%: no packing of these pieces needs fewer rows.",
    ]


def test_rows_above_the_bound_are_given_as_the_reason_for_a_low_fill(tmp_path: Path) -> None:
    path = by_hand(tmp_path / "d", [[SHORT], [SHORT]])
    assert "rows above the bound: 1." in " ".join(looks_odd(figures_of(path)))


def test_a_piece_without_a_target_looks_odd(tmp_path: Path) -> None:
    path = by_hand(tmp_path / "d", [[FULL], [(5, [5] * 10, [False] * 10)]])
    assert list(looks_odd(figures_of(path))) == ["Pieces without a target: 1. Nothing is learned from them."]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
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


@pytest.mark.parametrize(("overflow", "kind"), [("split", "split"), ("truncate", "truncated"), ("drop", "rejected")])
def test_the_share_of_chats_that_are_not_whole_looks_odd(tmp_path: Path, overflow: str, kind: str) -> None:
    f = figures_of(make_dataset(tmp_path, overflow=overflow))
    num, read = f.totals[kind], f.manifest.totals["chats_read"]
    num = sum(num.values()) if kind == "rejected" else num
    assert num / read > 0.01
    assert any(sentence.startswith(f"{num / read:.1%} of the chats are {kind}: ") for sentence in looks_odd(f))


def test_tool_tags_in_contents_look_odd(tmp_path: Path, packed: Path) -> None:
    lines = b'{"detail":"1 control strings as text, 1 of them tool tags","doc_id":3,"reason":"","what":"escaped"}\n'
    f = figures_of(forge(packed, tmp_path / "d", files={"rejects.jsonl": lines}))
    assert (f.tool_tags, f.kinds) == (1, [("escaped", 1, [3])])
    assert "Chats with tool tags as plain text: 1." in " ".join(looks_odd(f))
    assert "tool tags" not in " ".join(looks_odd(figures_of(packed)))


def test_the_account_adds_up_in_the_text(packed: Path) -> None:
    text = as_text(parts(figures_of(packed)))
    for name, left in (("chats", "read"), ("tokens", "rendered")):
        numbers = [int(n.replace(",", "")) for n in re.findall("[0-9,]+", re.search(f"{name} .* {left} = .*", text)[0])]
        assert numbers[0] == sum(numbers[1:])
    totals = PackedDataset.open(packed).manifest.totals
    for reason, num in totals["rejected"].items():
        assert re.search(rf"rejected: {reason} +{num}; doc_ids [0-9]", text)


def test_what_is_said_of_rows_cut_rounds_and_attention_is_counted_by_hand(tmp_path: Path) -> None:
    body = {"rounds_cut": 5, "tokens_cut": 70, "tokens_rejected": 30, "tokens_rendered": 122}
    path = by_hand(tmp_path / "d", BY_HAND)
    f = figures_of(forge(path, tmp_path / "forged", body=lambda held: held["totals"].update(body)))
    size = (tmp_path / "forged" / "shard-00000.arrow").stat().st_size
    said = dict(account(f))
    assert said["tokens"] == "122 rendered = 22 in rows + 70 cut + 30 rejected"
    assert said["cut"] == "5 rounds left out whole"
    assert said["rows"] == (
        f"3 in 1 shard, {size:,} bytes; no packing of these pieces has fewer than 3: 0 above that bound"
    )
    share = 154 / (3 * 10**2)
    assert dict(limits(f))["attention"] == (
        f"sum of squared lengths 154: {share:.1%} of what a document per full row costs"
    )
    above = dict(account(figures_of(by_hand(tmp_path / "two", [[SHORT], [SHORT]]))))["rows"]
    assert above.endswith("has fewer than 1: 1 above that bound")


def test_one_of_a_kind_is_not_said_in_the_plural(tmp_path: Path) -> None:
    path = by_hand(tmp_path / "d", [[(0, [5, 6], [False, True])]])
    said = as_text(parts(figures_of(path)))
    for words in ("10 in 1 row of 10", "in 1 shard", "1 of 1 document", "1 target, 50.0%", "1 row, 8 of padding"):
        assert words in said
    assert not re.findall(r"(?<![\d,.])1 (?:rows|shards|files|documents|turns|groups|targets)\b", said)


def test_a_terminal_of_any_width_is_not_overrun(packed: Path) -> None:
    bars = {"width": 1, "counts": [1, 0, 40, 20]}
    part = Part(title="Lengths", lines=[("mean", "one two three four five six"), ("id", "x" * 70)], bars=bars)
    head = ["Lengths", "  mean  one two three four five", "        six", f"  id    {'x' * 70}"]
    for width, longest in ((31, 8), (60, 31), (100, 40), (200, 40)):
        lines = as_text([part], width=width).splitlines()
        assert width > 31 or lines[:4] == head
        drawn = [-(-count * longest // 40) for count in bars["counts"]]
        assert [line.count("█") for line in lines[-4:]] == drawn
        assert lines[-2].split()[:2] == ["2", "40"]
    for width in (60, 80):
        for line in as_text(parts(figures_of(packed)), width=width).splitlines():
            assert len(line) <= width or re.search(r"\S{50}$", line)


def test_copies_look_odd(tmp_path: Path) -> None:
    rows: list[list[Piece]] = [[(i, [5] + [i] * 9, [False] + [True] * 9)] for i in range(1, 10)]
    path = by_hand(tmp_path / "d", [*rows, [(40, rows[0][0][1], rows[0][0][2])]])
    said = "10.0% of the documents are copies of another one: they weigh more in training."
    assert said in list(looks_odd(figures_of(path)))


# ----------------------------------------------------------------------------------------------- command


def test_the_page_lies_beside_the_shards_verify_passes_and_a_second_one_replaces_it(
    packed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        assert run(monkeypatch, str(packed)) == 0
        out = capsys.readouterr().out
        assert "What looks odd" in out
        assert str(packed / "report.html") in out
    dataset = PackedDataset.open(packed)
    verify_hashes(dataset)
    verify_semantics(dataset)
    assert not list(packed.glob(".*"))
    (packed / "report.html").unlink()


def test_out_names_another_file_and_the_dataset_stays_as_it_is(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(packed.rglob("*"))
    assert run(monkeypatch, str(packed), "--out", str(tmp_path / "page.html")) == 0
    assert sorted(packed.rglob("*")) == before
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")


def test_json_prints_one_object_alone_and_writes_nothing(
    packed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(packed.rglob("*"))
    assert run(monkeypatch, str(packed), "--json") == 0
    assert json.loads(capsys.readouterr().out)["dataset_id"] == PackedDataset.open(packed).manifest.dataset_id
    assert sorted(packed.rglob("*")) == before


def test_rows_asked_for_are_in_the_viewer_and_others_are_refused(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, str(packed), "--json", "--row", "1", "--row", "0") == 0
    shown = json.loads(capsys.readouterr().out)["viewer"]
    assert [(entry["row"], entry["why"].partition(";")[0]) for entry in shown[:2]] == [
        (1, "asked for"),
        (0, "asked for"),
    ]
    assert run(monkeypatch, str(packed), "--row", "999", "--out", str(tmp_path / "p")) == 1
    assert "error: --row 999: no such row; this dataset has rows 0 to" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_page_that_cannot_be_written_is_an_error_that_says_what_to_do(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, str(packed), "--out", str(tmp_path / "no" / "page.html")) == 1
    error = capsys.readouterr().err
    assert "cannot be written" in error
    assert "--out FILE writes it to another place" in error


def test_without_polars_the_extra_is_named(
    packed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "polars", None)
    for arguments in ([str(packed)], [str(packed), "--json"], [str(packed), str(packed)]):
        assert run(monkeypatch, *arguments) == 1
        assert 'pip install ".[report]"' in capsys.readouterr().err


def test_a_folder_that_is_no_dataset_is_an_error(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in ([str(tmp_path)], [str(packed), str(tmp_path)]):
        assert run(monkeypatch, *arguments) == 1
        assert "is not a packed dataset" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["manifest.json", "shard-00000.arrow", "rejects.jsonl", "tokenizer/x.html", "p.html"])
def test_a_page_never_replaces_a_file_of_a_dataset_or_lies_among_them(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    link = tmp_path / "link"
    link.symlink_to(packed)
    before = {path: path.read_bytes() for path in packed.rglob("*") if path.is_file()}
    other = by_hand(tmp_path / "other", BY_HAND)
    for arguments in ([str(packed)], [str(other), str(packed)]):
        assert run(monkeypatch, *arguments, "--out", str(link / name)) == 1
        assert (
            f"error: --out {link / name}: in a dataset's folder a page is called report.html" in capsys.readouterr().err
        )
    assert before == {path: path.read_bytes() for path in packed.rglob("*") if path.is_file()}


def command(*arguments: str, **settings: Any) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-m", "pipeline.report", *arguments], cwd=ROOT, check=False, **settings)


def test_whoever_stops_reading_gets_the_page_and_no_complaint(packed: Path, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = command(str(packed), "--out", str(tmp_path / "p.html"), stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert done.returncode == 0
    assert b"rror" not in done.stderr
    assert (tmp_path / "p.html").read_text().endswith("</html>\n")


def test_a_terminal_that_cannot_spell_every_sign_gets_all_others(packed: Path, tmp_path: Path) -> None:
    env = os.environ | {"PYTHONIOENCODING": "latin-1"}
    done = command(str(packed), "--out", str(tmp_path / "p.html"), env=env, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert "What looks odd" in done.stdout.decode("latin-1")
    assert b"???" in done.stdout  # bars
    done = command(str(packed), "--json", env=env, capture_output=True)
    assert json.loads(done.stdout)["format"] == "packed-report"
