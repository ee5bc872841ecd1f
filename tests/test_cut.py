"""From documents to pieces: the overflow rules against a slow reading of them, and nothing lost in a plan."""

from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.binpack import PackPlan, plan_packing
from pipeline.cut import ASSISTANT, SYSTEM, TOOL, USER, Documents, Overflow


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


def test_doc_ids_do_not_change_the_plan() -> None:
    documents = documents_of([[ask(5), answer(size)] for size in range(5, 60)])
    other = replace(documents, doc_ids=documents.doc_ids + 1000)
    plans = [plan_packing(d, max_tokens=64, overflow="drop", seed=0) for d in (documents, other)]
    assert pieces_of(plans[0]) == pieces_of(plans[1])
