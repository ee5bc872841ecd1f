"""The rows of a plan: as few as can be, the same for the same seed, and at places that tell nothing."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pipeline.binpack
import pipeline.bounds
from pipeline.binpack import pack
from pipeline.bounds import dual_bound, lower_bound, martello_toth_l2
from pipeline.cut import Int64
from pipeline.cutting_stock import cutting_stock

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


Draw = Callable[[int, int, np.random.Generator], Int64]

DISTRIBUTIONS: dict[str, Draw] = {
    "chats": lambda num, _, rng: chat_lengths(num, int(rng.integers(100))),
    "lognormal about T / 4": lambda num, T, rng: rng.lognormal(np.log(T / 4), 1.0, num).astype(np.int64),
    "lognormal about T / 2": lambda num, T, rng: rng.lognormal(np.log(T / 2), 0.3, num).astype(np.int64),
    "heavy tail": lambda num, T, rng: (T / 136 / rng.random(num) ** 1.2).astype(np.int64),
    "exponential": lambda num, T, rng: rng.exponential(T / 6, num).astype(np.int64),
    "uniform": lambda num, T, rng: rng.integers(1, T + 1, num),
    "1,000 to 1,099 of 8,192": lambda num, T, rng: rng.integers(T * 1000 // 8192, T * 1100 // 8192, num),
    "1,600 to 1,749 of 8,192": lambda num, T, rng: rng.integers(T * 1600 // 8192, T * 1750 // 8192, num),
    "a quarter to a half": lambda num, T, rng: rng.integers(T // 4 + 1, T // 2 + 1, num),
    "a third to a half": lambda num, T, rng: rng.integers(T // 3 + 1, T // 2 + 1, num),
    "over half, and fillers": lambda num, T, rng: np.append(
        rng.integers(T // 2 + 1, T * 11 // 20, num - num // 3), rng.integers(20, T // 6, num // 3)
    ),
    "under a third, and over half": lambda num, T, rng: np.append(
        rng.normal(T * 0.3, T * 0.02, num // 2), rng.normal(T * 0.55, T * 0.05, num - num // 2)
    ).astype(np.int64),
    "tiny and huge": lambda num, T, rng: np.append(rng.integers(5, 40, num), np.full(num // 40, T * 41 // 42)),
    "all equal": lambda num, T, _: np.full(num, T * 3 // 8),
    "all just over half": lambda num, T, _: np.full(num, T // 2 + 1),
    "all of a row": lambda num, T, _: np.full(num, T),
    "single tokens": lambda num, _, __: np.ones(num, np.int64),
    "two sizes": lambda num, T, _: np.repeat([T * 700 // 8192, T * 2900 // 8192], [num // 2, num // 3]),
    "two sizes that fit together": lambda num, T, _: np.repeat([T // 3 + 1, T // 3 - 1], [num // 3, num // 2]),
    "powers of two": lambda num, T, rng: 2 ** rng.integers(0, 11, num),
    "ten lengths": lambda num, T, rng: rng.choice(rng.integers(T // 20, T // 2, 10), num),
    "forty pieces": lambda num, T, rng: rng.integers(1, T // 4, 40),
}


@pytest.mark.parametrize("max_tokens", [2048, 4096, 8192, 8193, 16384, 32768])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_rows_are_within_three_thousandths_of_the_bound(name: str, max_tokens: int) -> None:
    lengths = np.clip(DISTRIBUTIONS[name](20_000, max_tokens, np.random.default_rng(0)), 1, max_tokens)
    l2, bound = martello_toth_l2(lengths, max_tokens=max_tokens), lower_bound(lengths, max_tokens=max_tokens)
    rows = rows_of(lengths, max_tokens)
    applies = "L2" if bound == l2 else "a stronger bound"
    print(f"{name}, T = {max_tokens}: {rows} rows, L2 {l2}, {applies} {bound}, {rows / bound - 1:.3%} above")
    assert l2 <= bound <= rows <= bound + max(1, bound * 0.003)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(100, 700), min_size=1, max_size=12), st.integers(0, 100))
def test_rows_of_few_lengths_are_the_fewest_but_for_one_a_length(sizes: list[int], seed: int) -> None:
    lengths = np.random.default_rng(seed).choice(sizes, 3000)
    bound, patterns = cutting_stock(np.bincount(lengths), max_tokens=1024)
    assert all(sum(row) <= 1024 for row, _ in patterns)
    packed = np.bincount(np.repeat([n for row, _ in patterns for n in row], [k for row, k in patterns for _ in row]))
    assert (packed <= np.bincount(lengths)[: len(packed)]).all()
    assert bound <= rows_of(lengths, 1024) <= bound + max(1, min(len(set(sizes)), bound * 0.003))


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
    counts = np.bincount(array)
    for bound in (
        martello_toth_l2(array, max_tokens=20),
        dual_bound(counts, max_tokens=20)[0],
        cutting_stock(counts, max_tokens=20)[0],
    ):
        assert bound <= best
    assert best <= rows_of(array, 20) <= best + 1


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


# ------------------------------------------------------------------------------------------- rows of millions of tokens


def test_few_pieces_in_a_row_of_millions_of_tokens_are_planned_without_the_linear_programme(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (pipeline.binpack, pipeline.bounds):
        monkeypatch.setattr(module, "cutting_stock", lambda *_, **__: pytest.fail("its tables grow with T"))
    lengths, max_tokens = np.array([300, 1200, 777]), 2**24
    assert rows_of(lengths, max_tokens) == 1
    assert lower_bound(lengths, max_tokens=max_tokens, rows=1) == 1


@settings(max_examples=100)
@given(st.lists(st.integers(1, 64), min_size=1, max_size=40))
def test_a_known_packing_changes_no_bound(lengths: list[int]) -> None:
    found, rows = np.array(lengths), rows_of(np.array(lengths), 64)
    assert lower_bound(found, max_tokens=64, rows=rows) == lower_bound(found, max_tokens=64)
