"""The plan of rows: the overflow rules against a slow reading of them, nothing lost, rows full, places random."""

from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.binpack import PackPlan, lower_bound, pack, plan_packing
from pipeline.cut import ASSISTANT, SYSTEM, TOOL, USER, Documents, Int64, Overflow


class Turn(NamedTuple):
    """A turn, token by token: which of them are targets."""

    role: int
    mask: tuple[bool, ...]


Chat = list[Turn]


def turn(role: int, num_header: int, num_targets: int, num_after: int = 1) -> Turn:
    return Turn(role, (False,) * num_header + (True,) * num_targets + (False,) * num_after)


def ask(size: int) -> Turn:
    return turn(USER, size, 0, 0)


def answer(size: int) -> Turn:
    """Header of 2 tokens, targets, line break."""
    return turn(ASSISTANT, 2, size - 3)


def documents_of(chats: list[Chat]) -> Documents:
    ends = [np.cumsum([len(t.mask) for t in chat]) for chat in chats]
    turns = [
        (t, end - len(t.mask))
        for chat, stops in zip(chats, ends, strict=True)
        for t, end in zip(chat, stops, strict=True)
    ]
    return Documents(
        doc_ids=np.arange(len(chats), dtype=np.int64) * 10,
        lengths=np.array([stops[-1] for stops in ends], np.int64),
        turn_offsets=np.append(0, np.cumsum([len(chat) for chat in chats])).astype(np.int64),
        turn_ends=np.concatenate([*ends, np.zeros(0)]).astype(np.int32),
        roles=np.array([t.role for t, _ in turns], np.uint8),
        turn_targets=np.array([sum(t.mask) for t, _ in turns], np.int32),
        turn_first_target=np.array([start + t.mask.index(True) if any(t.mask) else -1 for t, start in turns], np.int32),
    )


def plan_of(chats: list[Chat], max_tokens: int, overflow: Overflow = "truncate", seed: int = 0) -> PackPlan:
    return plan_packing(documents_of(chats), max_tokens=max_tokens, overflow=overflow, seed=seed)


def pieces_of(plan: PackPlan) -> list[tuple[int, int, int, int, int]]:
    return sorted(
        zip(*(a.tolist() for a in (plan.docs, plan.numbers, plan.starts, plan.stops, plan.targets)), strict=True)
    )


turns = st.builds(
    turn,
    st.sampled_from([SYSTEM, USER, USER, ASSISTANT, ASSISTANT, ASSISTANT, TOOL]),
    st.integers(1, 6),
    st.sampled_from([0, 0, 1, 2, 5, 9]),
    st.integers(0, 1),
).filter(lambda t: t.role == ASSISTANT or not any(t.mask)) | st.builds(
    turn, st.just(USER), st.just(0), st.integers(1, 5)
)
"""Mostly what encode makes; now and then a turn whose very first token is a target, as when all tokens are."""
chats = st.lists(st.lists(turns, min_size=1, max_size=8), max_size=12)


# ------------------------------------------------------------------- the rules again, slowly, token by token


def num_targets(mask: list[bool]) -> int:
    return sum(mask[1:])


def slowly_truncated(chat: Chat, max_tokens: int) -> list[tuple[int, int]] | str:
    mask = [target for t in chat for target in t.mask]
    prefixes = [(t, sum(len(u.mask) for u in chat[: i + 1])) for i, t in enumerate(chat)]
    for t, end in reversed(prefixes):
        if t.role == ASSISTANT and end <= max_tokens and num_targets(mask[:end]):
            return [(0, end)]
    for t, end in prefixes:
        start = end - len(t.mask)
        if t.role == ASSISTANT and start < max_tokens < end and any(mask[max(1, start) : max_tokens]):
            return [(0, max_tokens)]
    return "prompt_longer_than_row"


def slow_rounds(chat: Chat) -> list[tuple[int, int]]:
    starts = [i for i, t in enumerate(chat) if i == 0 or (t.role == USER and chat[i - 1].role in (ASSISTANT, TOOL))]
    tokens = [sum(len(t.mask) for t in chat[:i]) for i in [*starts, len(chat)]]
    return list(pairwise(tokens))


def slowly_split(chat: Chat, max_tokens: int) -> list[tuple[int, int]] | str:
    mask = [target for t in chat for target in t.mask]
    rounds = slow_rounds(chat)
    found, i = [], 0
    while i < len(rounds):
        num = max(
            (n for n in range(1, len(rounds) - i + 1) if rounds[i + n - 1][1] - rounds[i][0] <= max_tokens), default=0
        )
        if num:
            found.append((rounds[i][0], rounds[i + num - 1][1]))
        i += max(1, num)
    kept = [(start, stop) for start, stop in found if num_targets(mask[start:stop])]
    too_long = any(stop - start > max_tokens for start, stop in rounds)
    return kept or ("round_longer_than_row" if too_long else "no_target")


def slowly(chat: Chat, max_tokens: int, overflow: Overflow) -> list[tuple[int, int]] | str:
    mask = [target for t in chat for target in t.mask]
    if not num_targets(mask):
        return "no_target"
    # The one token after the last turn's targets is its line break.
    has_line_break = chat[-1].mask[-2:] == (True, False) and (len(chat) > 1 or sum(chat[-1].mask[1:]) > 0)
    if len(mask) <= max_tokens or (len(mask) == max_tokens + 1 and has_line_break):
        return [(0, min(len(mask), max_tokens))]
    if overflow == "drop":
        return "longer_than_row"
    return slowly_truncated(chat, max_tokens) if overflow == "truncate" else slowly_split(chat, max_tokens)


@settings(max_examples=400, deadline=None)
@given(chats, st.integers(2, 40), st.sampled_from(["truncate", "split", "drop"]), st.integers(0, 2**63 - 1))
def test_every_document_is_cut_or_rejected_as_the_rules_say(
    chats: list[Chat], max_tokens: int, overflow: Overflow, seed: int
) -> None:
    plan = plan_of(chats, max_tokens, overflow, seed)
    wanted = [slowly(chat, max_tokens, overflow) for chat in chats]
    masks = [[target for t in chat for target in t.mask] for chat in chats]
    assert pieces_of(plan) == [
        (doc, number, start, stop, num_targets(masks[doc][start:stop]))
        for doc, found in enumerate(wanted)
        if not isinstance(found, str)
        for number, (start, stop) in enumerate(found)
    ]
    assert dict(zip(plan.rejected.tolist(), plan.reasons, strict=True)) == {
        doc: found for doc, found in enumerate(wanted) if isinstance(found, str)
    }
    rounds_left_out = [
        sum(all(stop <= a or start >= b for a, b in found) for start, stop in slow_rounds(chat))
        for chat, found in zip(chats, wanted, strict=True)
        if not isinstance(found, str)
    ]
    assert plan.rounds_cut == sum(rounds_left_out)


@settings(max_examples=200, deadline=None)
@given(chats, st.integers(2, 40), st.sampled_from(["truncate", "split", "drop"]), st.integers(0, 2**63 - 1))
def test_nothing_disappears_and_no_row_overflows(
    chats: list[Chat], max_tokens: int, overflow: Overflow, seed: int
) -> None:
    plan = plan_of(chats, max_tokens, overflow, seed)
    lengths = documents_of(chats).lengths
    sizes = plan.stops - plan.starts
    assert int(lengths.sum()) == int(sizes.sum()) + plan.tokens_cut + plan.tokens_rejected
    assert plan.tokens_rejected == lengths[plan.rejected].sum()
    assert sorted({*plan.docs.tolist()} | {*plan.rejected.tolist()}) == list(range(len(chats)))
    assert plan.row_offsets[0] == 0
    assert plan.row_offsets[-1] == len(plan.docs)
    assert (np.diff(plan.row_offsets) > 0).all()
    assert all(0 < sizes[a:b].sum() <= max_tokens for a, b in pairwise(plan.row_offsets.tolist()))
    fits = np.flatnonzero(lengths <= max_tokens)
    whole = [(doc, 0, int(lengths[doc])) for doc in np.setdiff1d(fits, plan.rejected).tolist()]
    assert [(d, a, b) for d, _, a, b, _ in pieces_of(plan) if d in fits] == whole
    assert (plan.targets > 0).all()
    for doc, _, start, _, _ in pieces_of(plan):
        assert start in [0, *np.cumsum([len(t.mask) for t in chats[doc]]).tolist()]


# ----------------------------------------------------------------------------------------- the rules, by example


def test_a_long_document_is_truncated_after_the_last_assistant_turn_that_fits() -> None:
    plan = plan_of([[ask(10), answer(20), ask(10), answer(20), ask(10)]], 65)
    assert pieces_of(plan) == [(0, 0, 0, 60, 34)]
    plan = plan_of([[ask(10), answer(20), ask(10), answer(20), ask(10)]], 59)
    assert pieces_of(plan) == [(0, 0, 0, 30, 17)]
    assert (plan.truncated.tolist(), plan.tokens_cut, plan.rounds_cut) == ([0], 40, 2)


def test_a_first_round_that_does_not_fit_is_cut_inside_its_answer() -> None:
    plan = plan_of([[ask(10), answer(20)]], 13)
    assert pieces_of(plan) == [(0, 0, 0, 13, 1)]
    assert plan_of([[ask(10), answer(20)]], 12).reasons == ("prompt_longer_than_row",)


def test_an_answer_is_cut_though_an_earlier_one_without_targets_fits() -> None:
    only_last = [ask(10), turn(ASSISTANT, 20, 0), ask(10), answer(20)]  # as with targets in the last turn alone
    assert pieces_of(plan_of([only_last], 50)) == [(0, 0, 0, 50, 7)]
    assert plan_of([only_last], 35).reasons == ("prompt_longer_than_row",)


def test_a_document_that_fits_but_for_its_line_break_loses_that_and_is_not_called_truncated() -> None:
    for overflow in ("truncate", "split", "drop", "error"):
        plan = plan_of([[ask(10), answer(20)]], 29, overflow)
        assert pieces_of(plan) == [(0, 0, 0, 29, 17)]
        assert (plan.tokens_cut, len(plan.truncated), len(plan.split)) == (1, 0, 0)


def test_a_split_document_goes_by_whole_rounds_and_counts_what_it_leaves_out() -> None:
    small, big = [ask(5), answer(10)], [ask(5), answer(90)]
    plan = plan_of([[*small, *small, *small, *big, *small]], 40, "split")
    assert pieces_of(plan) == [(0, 0, 0, 30, 14), (0, 1, 30, 45, 7), (0, 2, 140, 155, 7)]
    assert (plan.split.tolist(), plan.tokens_cut, plan.rounds_cut) == ([0], 95, 1)
    assert plan_of([big], 40, "split").reasons == ("round_longer_than_row",)


def test_tool_results_stay_in_the_round_of_their_call() -> None:
    chat = [ask(5), answer(10), turn(TOOL, 5, 0, 0), answer(10), ask(5), answer(10)]
    assert [piece[2:4] for piece in pieces_of(plan_of([chat], 35, "split"))] == [(0, 30), (30, 45)]


def test_the_error_policy_names_the_first_long_document() -> None:
    with pytest.raises(ValueError, match=r"document 10 has 30 tokens, more than a row of 20.*raise --max-tokens"):
        plan_of([[ask(5), answer(10)], [ask(10), answer(20)]], 20, "error")
    assert plan_of([[ask(10), answer(20)]], 20, "drop").reasons == ("longer_than_row",)


@pytest.mark.parametrize(
    ("setting", "message"),
    [({"max_tokens": 1}, "--max-tokens is 1"), ({"seed": -1}, "--seed"), ({"overflow": "x"}, "--overflow")],
)
def test_a_setting_out_of_range_is_refused(setting: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_packing(documents_of([]), **{"max_tokens": 8, "overflow": "drop", "seed": 0, **setting})  # type: ignore[arg-type]


def test_no_documents_make_no_rows() -> None:
    for overflow in ("truncate", "split", "drop", "error"):
        plan = plan_of([], 8192, overflow)
        assert (plan.num_rows, len(plan.docs), plan.tokens_cut) == (0, 0, 0)


def test_a_row_shorter_than_every_document_works_by_the_same_rules() -> None:
    plan = plan_of([[ask(40), answer(100)]] * 50 + [[ask(90), answer(100)]] * 50, 64)
    assert plan.num_rows == 50
    assert (plan.stops == 64).all()
    assert set(plan.reasons) == {"prompt_longer_than_row"}


# -------------------------------------------------------------------------------------------------- full rows


def chat_lengths(num: int, seed: int = 0) -> Int64:
    """Like ultrachat: lognormal, mean 1,240, one in 2,000 far longer."""
    rng = np.random.default_rng(seed)
    lengths = np.where(rng.random(num) < 1 / 2000, 50_000, rng.lognormal(np.log(1120), 0.44, num))
    return np.maximum(20, lengths).astype(np.int64)


def rows_of(lengths: Int64, max_tokens: int, seed: int = 0) -> int:
    order, offsets = pack(lengths, max_tokens=max_tokens, seed=seed)
    assert np.array_equal(np.sort(order), np.arange(len(lengths)))
    assert int(np.add.reduceat(lengths[order], offsets[:-1]).max()) <= max_tokens
    return len(offsets) - 1


@pytest.mark.parametrize("num", [2_000, 50_000])
@pytest.mark.parametrize("max_tokens", [8192, 8193, 16384, 32768])
def test_rows_of_chats_are_full(num: int, max_tokens: int) -> None:
    lengths = np.minimum(chat_lengths(num), max_tokens)
    assert rows_of(lengths, max_tokens) - -(-int(lengths.sum()) // max_tokens) <= 3


DISTRIBUTIONS = {
    "all equal": np.full(20_000, 1000),
    "all equal, a bad divisor": np.full(20_000, 3000),
    "all equal, just over half": np.full(1000, 4097),
    "all of a row": np.full(100, 8192),
    "two sizes": np.repeat([700, 2900], [9000, 6000]),
    "two sizes that fit together": np.repeat([2731, 2730], [4000, 8000]),
    "heavy tail": np.minimum(8192, 60 / np.random.default_rng(0).random(30_000) ** 1.2).astype(np.int64),
    "uniform": np.random.default_rng(1).integers(1, 8193, 20_000),
    "narrow": np.random.default_rng(2).integers(1000, 1025, 20_000),
    "a third to a half": np.random.default_rng(3).integers(2731, 4097, 20_000),
    "tiny and huge": np.append(np.random.default_rng(4).integers(5, 40, 20_000), np.full(500, 8000)),
    "single tokens": np.ones(20_000, np.int64),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_rows_are_within_three_thousandths_of_the_bound(name: str) -> None:
    lengths = DISTRIBUTIONS[name]
    bound = lower_bound(lengths, max_tokens=8192)
    assert bound <= rows_of(lengths, 8192) <= bound + max(1, bound * 0.003)


@pytest.mark.parametrize(("max_tokens", "margin"), [(2048, 0.004), (4096, 0.001)])
def test_rows_of_a_few_chats_are_near_the_bound(max_tokens: int, margin: float) -> None:
    lengths = np.minimum(chat_lengths(50_000), max_tokens)
    bound = lower_bound(lengths, max_tokens=max_tokens)
    assert bound <= rows_of(lengths, max_tokens) <= bound * (1 + margin)


def fewest_rows(lengths: list[int], max_tokens: int) -> int:
    """By trying every assignment, the longest first."""
    best = len(lengths)

    def place(i: int, rows: list[int]) -> None:
        nonlocal best
        if len(rows) >= best:
            return
        if i == len(lengths):
            best = len(rows)
            return
        for r in {space: r for r, space in enumerate(rows) if space >= lengths[i]}.values():
            place(i + 1, [space - lengths[i] * (n == r) for n, space in enumerate(rows)])
        place(i + 1, [*rows, max_tokens - lengths[i]])

    lengths = sorted(lengths, reverse=True)
    place(0, [])
    return best


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=9))
def test_tiny_sets_are_packed_within_a_row_of_the_optimum(lengths: list[int]) -> None:
    best = fewest_rows(lengths, 20)
    array = np.array(lengths)
    assert lower_bound(array, max_tokens=20) <= best <= rows_of(array, 20) <= best + 1


def test_the_bound_counts_what_cannot_share_a_row() -> None:
    assert lower_bound(np.array([60, 60, 60]), max_tokens=100) == 3
    assert lower_bound(np.array([70, 70, 40, 40]), max_tokens=100) == 3  # 220 tokens: 3 by number, not by tokens
    assert lower_bound(np.array([34] * 6), max_tokens=100) == 3  # two a row
    assert lower_bound(np.zeros(0, np.int64), max_tokens=100) == 0


# ---------------------------------------------------------------------------------------------- seeds and places


def test_the_same_seed_gives_the_same_plan_and_another_seed_another() -> None:
    lengths = np.minimum(chat_lengths(3000), 8192)
    first, again, other = (pack(lengths, max_tokens=8192, seed=seed) for seed in (7, 7, 8))
    assert np.array_equal(first[0], again[0])
    assert np.array_equal(first[1], again[1])
    assert not np.array_equal(first[0], other[0])


def test_a_plan_is_the_same_on_every_machine() -> None:
    order, offsets = pack(np.array([5, 3, 8, 2, 7, 4, 1, 6]), max_tokens=9, seed=3)
    assert (order.tolist(), offsets.tolist()) == ([0, 5, 6, 2, 7, 1, 4, 3], [0, 2, 4, 6, 8])


def test_equal_documents_change_places_with_the_seed() -> None:
    plans = [pack(np.full(100, 10), max_tokens=40, seed=seed)[0] for seed in range(200)]
    first_rows = np.array([plan[:4] for plan in plans])
    assert 35 < first_rows.mean() < 65
    assert len(np.unique(first_rows)) > 90


def test_the_place_of_a_row_and_of_a_piece_tells_nothing_about_lengths() -> None:
    lengths = np.minimum(chat_lengths(6000), 8192)
    scores = []
    for seed in range(30):
        order, offsets = pack(lengths, max_tokens=8192, seed=seed)
        counts = np.diff(offsets)
        longest = np.maximum.reduceat(lengths[order], offsets[:-1])
        row = np.arange(len(counts))
        filled = np.add.reduceat(lengths[order], offsets[:-1])
        assert filled.min() < 8192  # the row that is not full moves about, too
        within = np.arange(len(order)) - np.repeat(offsets[:-1], counts)
        centred = within - np.repeat((counts - 1) / 2, counts)  # place in the row, whatever the number of pieces
        scores.append(
            [
                np.corrcoef(row, counts)[0, 1] * np.sqrt(len(row)),
                np.corrcoef(row, longest)[0, 1] * np.sqrt(len(row)),
                np.corrcoef(centred, lengths[order])[0, 1] * np.sqrt(len(order)),
                (filled.argmin() / (len(row) - 1) - 0.5) * np.sqrt(12),
            ]
        )
    # If the places are random, a score has mean 0 and deviation 1, and the mean of 30 stays below 4 / sqrt(30).
    assert (np.abs(np.mean(scores, axis=0)) < 4 / np.sqrt(30)).all()
    assert (np.abs(scores) < 5).all()


def test_rows_of_the_first_half_hold_as_many_pieces_as_those_of_the_second() -> None:
    lengths = np.minimum(chat_lengths(20_000), 8192)
    _, offsets = pack(lengths, max_tokens=8192, seed=0)
    counts = np.diff(offsets)
    first, second = np.array_split(counts, 2)
    assert abs(first.mean() - second.mean()) < 4 * counts.std() * np.sqrt(4 / len(counts))


def test_doc_ids_do_not_change_the_plan() -> None:
    documents = documents_of([[ask(5), answer(size)] for size in range(5, 60)])
    other = replace(documents, doc_ids=documents.doc_ids + 1000)
    plans = [plan_packing(d, max_tokens=64, overflow="drop", seed=0) for d in (documents, other)]
    assert pieces_of(plans[0]) == pieces_of(plans[1])
