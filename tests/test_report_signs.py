"""Which rows a report shows first, which documents it calls the same, and how strips are drawn."""

from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.report.figures import Figures, measure
from pipeline.report.signs import (
    LEAST_COUNT,
    NUM_ROWS,
    RULES,
    Extremes,
    Reason,
    check_asked,
    choose,
    random_rows,
    suspicious,
    to_look_at,
)  # fmt: skip
from pipeline.report.strips import COLUMNS, NUM_STRIPS, PADDING, columns, picture, strip_rows, strips
from pipeline.shards import PackedDataset, Row
from tests.packed import Piece, make_packed, with_byte_tokenizer
from tests.parsed import Parsed, cells
from tests.talk import chat, document, make_talk, turn
from trainer.plan import epoch_order


def figures_of(path: Path) -> Figures:
    return measure(PackedDataset.open(path))


def told(reasons: list[Reason]) -> list[tuple[int, str, list[float]]]:
    """Row, why and values."""
    return [(reason.row, reason.why, reason.values) for reason in reasons]


# ------------------------------------------------------------------------------------------------ signs


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> Figures:
    """A row for each sign, and one without any."""
    answer = "the seed of a star is in no map of light, and who knows how many of them grow"
    lines = b'{"detail":"1 control strings as text, 0 of them tool tags","doc_id":70,"reason":"","what":"escaped"}\n'
    rows: list[list[Piece]] = [
        [chat(0, "why?", answer)],
        [chat(1, "w" * 8 + "abcdefghij " * 20, "y")],
        [chat(2, "why?", answer), document(3, turn("user", "alone"))],
        [chat(4, "why?", "no" + "z" * 90)],
        [chat(5, "why \ufffd", f"\ufffd\ufffd {answer}")],
        [chat(6, "why?", "same"), chat(7, "why?", answer), chat(8, "why?", "same")],
        [chat(70, "why?", answer)],
    ]
    return figures_of(make_talk(tmp_path_factory.mktemp("marked"), rows, max_tokens=320, rejects=lines))


@pytest.mark.parametrize(
    ("name", "row", "why", "value"),
    [
        ("a piece without a target", 2, "pieces without a target: 1", 1),
        ("replacement characters", 4, "tokens with U+FFFD: 3", 3),
        ("identical pieces", 5, "pieces that are identical: 2", 2),
        ("control strings", 6, "documents with control strings: 1", 1),
    ],
)
def test_each_sign_names_its_row_how_many_have_it_and_how_much(
    marked: Figures, name: str, row: int, why: str, value: int
) -> None:
    (sign,) = [sign for sign in marked.signs if sign.name == name]
    assert sign.num_rows == 1
    assert told(sign.rows) == [(row, why, [value])]
    assert name in RULES


def test_few_targets_and_one_token_over_and_over_are_shares_of_the_row(marked: Figures) -> None:
    signs = {sign.name: told(sign.rows) for sign in marked.signs}
    mask, ids = chat(1, "w" * 8 + "abcdefghij " * 20, "y")[2], chat(4, "why?", "no" + "z" * 90)[1]
    few, one = sum(mask) / len(mask), 90 / len(ids)
    assert signs["few targets"] == [(1, f"{few:.1%} of its tokens are targets", [few])]
    assert signs["one token over and over"] == [(3, f"{one:.1%} of its tokens are the same one", [one])]
    assert LEAST_COUNT <= 90
    assert told(marked.ends.extreme) == [
        (1, f"the least of all rows: {few:.1%} targets", [few]),
        (3, f"the most of one token of all rows: {one:.1%}", [one]),
    ]


def test_suspicious_rows_are_the_worst_of_each_sign_in_turn_each_once_and_clean_rows_are_none(tmp_path: Path) -> None:
    rows = [[chat(i, "why?", "\ufffd" * i + "the seed of a star")] for i in range(9)]
    rows[2].append(document(90, turn("user", "alone")))
    f = figures_of(make_talk(tmp_path, rows, max_tokens=160))
    found = suspicious(f.signs)
    assert [row for row, _ in found] == [2, 8, 7, 6, 5, 4, 3]
    assert found[:2] == [(2, "pieces without a target: 1"), (8, "tokens with U+FFFD: 8")]
    listed = to_look_at(f.ends, f.signs)
    assert [row for kind, row, _ in listed if kind == "suspicious"] == [2, 8, 7, 6, 5, 4]
    assert [kind for kind, _, _ in listed[-2:]] == ["extreme"] * 2
    clean = figures_of(make_talk(tmp_path / "clean", [[chat(0, "why?", "the seed of a star")]], max_tokens=160))
    assert suspicious(clean.signs) == []
    assert [reason.row for reason in clean.ends.extreme] == [0, 0]


def test_longest_and_shortest_rows_are_sorted_and_ties_go_to_the_first_row(tmp_path: Path) -> None:
    rows = [[chat(i, "?", "a" * num)] for i, num in enumerate((5, 30, 30, 2, 2, 9))]
    ends = figures_of(make_talk(tmp_path, rows, max_tokens=160)).ends
    assert [reason.row for reason in ends.longest] == [1, 2, 5, 0, 3, 4]
    assert [reason.row for reason in ends.shortest] == [3, 4, 0, 5, 1, 2]
    num = len(chat(0, "?", "a" * 30)[1])
    assert told(ends.longest)[0] == (1, f"a piece of {num} tokens", [num])
    least = len(chat(0, "?", "aa")[1])
    assert told(ends.shortest)[0] == (3, f"{least} tokens, its shortest piece {least}", [least, least])


# --------------------------------------------------------------------------------------------- the viewer


def test_random_rows_are_those_that_training_takes_first() -> None:
    assert random_rows(10) == epoch_order(num_rows=10, seed=0, epoch=0).tolist() == [0, 2, 9, 1, 8, 5, 4, 3, 6, 7]
    assert random_rows(0) == []


def reasons(rows: range, why: str) -> list[Reason]:
    return [Reason(row=row, why=why, values=[]) for row in rows]


ENDS = Extremes(longest=reasons(range(6), "l"), shortest=reasons(range(4, 10), "s"), extreme=reasons(range(9, 11), "e"))


def test_rows_asked_for_come_first_and_each_row_once_with_all_of_its_reasons() -> None:
    chosen = choose(ENDS, [], num_rows=1000, asked=[77, 5, 77])
    assert chosen[:3] == [(77, "asked for"), (5, "asked for; longest: l; shortest: s"), (0, "longest: l")]
    assert len(chosen) == len({row for row, _ in chosen}) == NUM_ROWS
    assert [why for _, why in chosen[-5:]] == ["random"] * 5
    assert chosen[10:12] == [(9, "shortest: s; extreme: e"), (10, "extreme: e")]


def test_more_rows_asked_for_leave_fewer_others() -> None:
    assert [row for row, _ in choose(ENDS, [], num_rows=1000, asked=range(100, 124))] == list(range(100, 124))


@pytest.mark.parametrize(
    ("asked", "num_rows", "said"),
    [([4], 4, "--row 4: no such row; this dataset has rows 0 to 3"), ([-1], 4, "--row -1: no such row"),
     ([0], 0, "--row 0: no such row; this dataset has no rows"), (range(25), 30, "the viewer holds 24 rows")],
)  # fmt: skip
def test_rows_that_cannot_be_shown_are_refused(asked: list[int], num_rows: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_asked(asked, num_rows)


# ----------------------------------------------------------------------------------------- the same again


def test_identical_and_repeated_documents_are_grouped_and_counted(tmp_path: Path) -> None:
    long = "how does a star grow from a seed " * 3
    rows: list[list[Piece]] = [
        [chat(9, long, "one"), chat(2, "why?", "because"), chat(3, long, "two")],
        [chat(1, "why?", "because"), chat(4, long, "one"), chat(7, "why?", "because"), chat(5, "why?", "yes")],
    ]
    f = figures_of(make_talk(tmp_path, rows, max_tokens=600))
    why, one = len(chat(1, "why?", "because")[1]), len(chat(4, long, "one")[1])
    assert (f.identical.num_groups, f.identical.num_documents, f.identical.num_spare) == (2, 5, 3)
    assert f.identical.spare_tokens == 2 * why + one
    assert [(g.num_documents, g.doc_ids, g.tokens, g.row) for g in f.identical.largest] == [
        (3, [1, 2, 7], why, 1),
        (2, [4, 9], one, 1),
    ]
    assert (f.repeated.num_groups, f.repeated.num_documents) == (1, 2)
    assert [(g.doc_ids, g.tokens, g.row) for g in f.repeated.largest] == [([3, 4], one, 0)]


def test_split_documents_are_identical_if_all_of_their_pieces_are(tmp_path: Path) -> None:
    rows = [[chat(0, "a", "b")], [chat(0, "c", "d")], [chat(1, "a", "b")], [chat(1, "c", "d")], [chat(2, "a", "b")]]

    def number(held: list[dict[str, list[int]]]) -> None:
        held[1]["pieces"] = held[3]["pieces"] = [1]

    f = figures_of(make_talk(tmp_path, rows, max_tokens=80, rows=number))
    assert [g.doc_ids for g in f.identical.largest] == [[0, 1]]
    assert isinstance(f.pieces, pl.DataFrame)


# ----------------------------------------------------------------------------------------------- strips


def row_of(max_tokens: int, bounds: list[int], num_pieces: int, mask: np.ndarray) -> Row:
    whole = np.array([0, *bounds, max_tokens], np.int32)
    ids = np.zeros(max_tokens, np.int32)
    return Row(input_ids=ids, position_ids=ids, loss_mask=mask, boundaries=whole,
               doc_ids=np.arange(num_pieces), pieces=np.zeros(num_pieces, np.int32))  # fmt: skip


@pytest.mark.parametrize("max_tokens", [2, 16, 479, 480, 481, 8192, 8193, 131072])
def test_a_strip_shows_the_document_of_each_columns_middle_token_and_whether_most_are_targets(max_tokens: int) -> None:
    rng = np.random.default_rng(max_tokens)
    bounds = sorted(set(rng.integers(1, max_tokens, 5).tolist()))
    mask = np.repeat(rng.random(-(-max_tokens // 3)) < 0.5, 3)[:max_tokens]
    row = row_of(max_tokens, bounds, len(bounds), mask)  # the last segment is padding
    place, strong = columns(row, max_tokens)
    num = min(COLUMNS, max_tokens)
    assert len(place) == len(strong) == num
    for i in range(num):
        start, stop = i * max_tokens // num, (i + 1) * max_tokens // num
        token = (start + stop) // 2
        document = sum(bound <= token for bound in bounds)
        assert place[i] == (document if document < len(bounds) else PADDING)
        assert strong[i] == (2 * mask[start:stop].sum() >= stop - start)


@given(st.integers(0, 300_000))
def test_strips_are_at_most_64_rows_evenly_spaced_from_the_first_to_the_last(num_rows: int) -> None:
    rows = strip_rows(num_rows)
    assert len(rows) == len(set(rows)) == min(num_rows, NUM_STRIPS)
    assert rows == sorted(rows)
    if num_rows:
        assert (rows[0], rows[-1]) == (0, num_rows - 1)
        steps = np.diff(rows)
        assert len(steps) == 0 or steps.max() - steps.min() <= 1


def test_the_picture_is_the_same_every_time_and_its_table_tells_the_rows(tmp_path: Path) -> None:
    f = figures_of(path := make_talk(tmp_path, [[chat(i, "?", "a" * i)] for i in range(70)], max_tokens=160))
    dataset = PackedDataset.open(path)
    drawn = picture(dataset, strips(f))
    assert drawn == picture(dataset, strips(f))
    assert drawn.count("<tr>") == 65
    num = len(chat(69, "?", "a" * 69)[1])
    assert strips(f)[-1] == {"row": 69, "pieces": 1, "targets": 70, "padding": 160 - num}
    assert cells(drawn)[-1] == ["69", "1", "70", f"{160 - num}"]
    assert "Every token is drawn." in drawn


def test_targets_are_drawn_full_other_tokens_at_half_height_and_padding_as_an_outline(tmp_path: Path) -> None:
    rows: list[list[Piece]] = [
        [(0, [5, 6], [False, True]), (1, [5, 6, 7], [False, False, True])],
        [(2, [5, 6, 7, 8, 9, 5, 6, 7], [False] * 7 + [True])],
    ]
    path = with_byte_tokenizer(make_packed(tmp_path / "d", rows, max_tokens=8))
    f = figures_of(path)
    drawn = Parsed(picture(PackedDataset.open(path), strips(f)))
    shapes = {path["class"]: path["d"] for path in drawn.all("path")}
    assert shapes == {  # a token is 120 wide, from 20 on
        "s1": "M140 20H260V30H140z" + "M860 33H980V43H860z",
        "s1 other": "M20 25H140V30H20z" + "M20 38H860V43H20z",
        "s2": "M500 20H620V30H500z",
        "s2 other": "M260 25H500V30H260z",
        "padding": "M620.5 20.5H979.5V29.5H620.5z",
    }
    assert [text["text"] for text in drawn.all("text")] == ["0", "T = 8 tokens", "0"]
    assert drawn.all("text")[1]["x"] == "980"


def test_a_picture_of_no_rows_is_no_fault(tmp_path: Path) -> None:
    path = with_byte_tokenizer(make_packed(tmp_path / "d", [], max_tokens=8))
    assert Parsed(picture(PackedDataset.open(path), strips(figures_of(path)))).all("path") == []
