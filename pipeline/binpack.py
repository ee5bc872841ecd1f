"""Decide which piece of which document goes into which row, from lengths alone.

    plan = plan_packing(documents, max_tokens=8192, overflow="truncate", seed=0)
    for row in range(plan.num_rows):
        span = slice(plan.row_offsets[row], plan.row_offsets[row + 1])
        ... plan.docs[span], plan.starts[span], plan.stops[span] ...

Two steps: ``cut`` turns documents into pieces (a module of its own), ``pack`` puts every piece into exactly one row.
Equal lengths are interchangeable, so packing works on a histogram: a row is seeded with the longest piece left, filled
with random ones, and completed exactly by the one, two or few lengths whose sum is the space left (integers as bit
sets: bit L is set while a piece of L tokens is left). Where that falls short of the bound, other ways are tried: the
longest piece that fits, again and again; short pieces in rows of their own; a linear programme for few lengths.

Guarantees: every piece is in exactly one row; the same input and seed give the same plan on any machine; the place of a
row, and of a piece in its row, is random.
Costs (one core): about a second for 200,000 chats, a few seconds for a million lengths, most where they fit badly and T
is large; memory is a few arrays of that length.
Fill: chats much shorter than a row fill all rows but a few to the last token; elsewhere rows are within 0.3 % of
``bounds.lower_bound`` as a rule, and tests/test_binpack.py says for which lengths.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import get_args

import numpy as np
import numpy.typing as npt

from pipeline.bounds import dual_bound, martello_toth_l2
from pipeline.cut import REASONS, START, STOP, Documents, Int32, Int64, Overflow, cut
from pipeline.cutting_stock import Pattern, cutting_stock

ALGORITHM = "exact-fit-2"
"""Name and version of the packing; part of the recipe. Any change of any plan is a new name."""

UInt64 = npt.NDArray[np.uint64]

MAX_CANDIDATES = 160  # pieces that the subset sum of one row looks at: 160 shifts of a T-bit integer, some 0.1 ms
MAX_SUM_BITS = 2**25  # T times the number of rows that get a subset sum: under 1 s where lengths fit badly
MAX_BALANCED_SUMS = 3000  # the same for balanced rows: a number of rows, as lengths are sparse where T is large
NUM_TRIES = 16  # drawn pairs of which a balanced row takes the one that is the most plentiful
NEAR = 1000  # ways are tried until one is within 1/1000 of the bound
REPEAT_SHARE = 8  # a pattern is repeated for at most 1/8 of its scarcest length, so that lengths stay varied

# ---------------------------------------------------------------------------------------------- values


@dataclass(frozen=True, kw_only=True, slots=True)
class PackPlan:
    """R rows of P pieces, in row order, and an account of what is in none."""

    row_offsets: Int64
    """[R + 1] the pieces of row r are row_offsets[r] to row_offsets[r + 1]."""
    docs: Int64
    """[P] document of each piece: a place in ``Documents``, not a doc_id."""
    starts: Int32
    """[P] first token of the piece in its document; a turn starts there."""
    stops: Int32
    """[P] token after the last."""
    numbers: Int32
    """[P] 0 for a whole or truncated document; 0, 1, 2 ... for the pieces of a split one."""
    targets: Int32
    """[P] targets in the piece, its first token never being one; at least 1."""
    rejected: Int64
    """Documents without a piece, ascending."""
    reasons: tuple[str, ...]
    """Why each of them was rejected."""
    truncated: Int64
    """Documents that lost their end, ascending; a lost last line break alone does not count."""
    split: Int64
    """Documents longer than a row that were split by rounds, ascending, even if one piece is left."""
    tokens_cut: int
    """Tokens of packed documents that are in no row, lost line breaks included."""
    tokens_rejected: int
    """Tokens of rejected documents."""
    rounds_cut: int
    """Rounds of packed documents of which no token is in a row."""

    @property
    def num_rows(self) -> int:
        """R, the number of rows."""
        return len(self.row_offsets) - 1


def plan_packing(documents: Documents, *, max_tokens: int, overflow: Overflow, seed: int) -> PackPlan:
    """Cut what is longer than a row and pack all pieces.

    Args:
        documents: at least one turn each.
        max_tokens: T, the length of a row, at least 2.
        overflow: the rule for documents longer than T.
        seed: 0 to 2**63 - 1; decides which of the equal lengths goes where, and the order of rows.

    Raises:
        ValueError: a setting is out of range, or a document is longer than a row and overflow is "error".
    """
    _check(documents, max_tokens=max_tokens, overflow=overflow, seed=seed)
    pieces, rounds_cut, reasons, long = cut(documents, max_tokens=max_tokens, overflow=overflow)
    order, row_offsets = pack(pieces[:, STOP] - pieces[:, START], max_tokens=max_tokens, seed=seed)
    docs, starts, stops, numbers, targets = pieces[order].T
    rejected = np.flatnonzero(reasons)
    long = long[reasons[long] == 0]
    tokens_rejected = int(documents.lengths[rejected].sum())
    return PackPlan(
        row_offsets=row_offsets,
        docs=docs.copy(),
        starts=starts.astype(np.int32),
        stops=stops.astype(np.int32),
        numbers=numbers.astype(np.int32),
        targets=targets.astype(np.int32),
        rejected=rejected,
        reasons=tuple(REASONS[code] for code in reasons[rejected].tolist()),
        truncated=long if overflow == "truncate" else long[:0],
        split=long if overflow == "split" else long[:0],
        tokens_cut=int(documents.lengths.sum() - (stops - starts).sum()) - tokens_rejected,
        tokens_rejected=tokens_rejected,
        rounds_cut=rounds_cut,
    )


def _check(documents: Documents, *, max_tokens: int, overflow: Overflow, seed: int) -> None:
    """Refuse settings out of range."""
    if max_tokens < 2:
        raise ValueError(f"--max-tokens is {max_tokens}: a row needs a token and a target after it; use at least 2")
    if overflow not in get_args(Overflow):
        raise ValueError(f"--overflow is {overflow!r}: use one of {', '.join(get_args(Overflow))}")
    if not 0 <= seed < 2**63:
        raise ValueError(f"--seed is {seed}: use a number from 0 to 2**63 - 1")
    num_docs = len(documents.lengths)
    assert len(documents.turn_offsets) == num_docs + 1
    assert num_docs == 0 or int(np.diff(documents.turn_offsets).min()) > 0


# ---------------------------------------------------------------------------------------------- packing


class _Pool:
    """The pieces still to be packed, as a count for each length and two bit sets of the lengths left.

    Bit L of ``left`` and bit ``longest - L`` of ``mirror`` are set while a piece of L tokens is left. Lengths a, b with
    a + b == space, when longest is 9 and space 7: mirror >> 2 has bit 7 - b set, so ``left & mirror >> 2`` holds a.
    """

    def __init__(self, counts: Int64) -> None:
        self.counts: list[int] = counts.tolist()
        self.longest = len(counts) - 1
        self.num_pieces = int(counts.sum())
        self.left = int.from_bytes(np.packbits(counts > 0, bitorder="little").tobytes(), "little")
        self.mirror = int.from_bytes(np.packbits(counts[::-1] > 0, bitorder="little").tobytes(), "little")

    def take(self, length: int, copies: int = 1) -> None:
        """Remove pieces of one length; fewer than 0 copies puts some back."""
        before = self.counts[length]
        self.counts[length] -= copies
        self.num_pieces -= copies
        if before in (0, copies):
            self.left ^= 1 << length
            self.mirror ^= 1 << (self.longest - length)

    def longest_up_to(self, space: int) -> int:
        """The longest length left that fits into ``space``; -1 if none does."""
        return (self.left & ((2 << space) - 1)).bit_length() - 1

    def shortest(self) -> int:
        """The shortest length left."""
        return (self.left & -self.left).bit_length() - 1

    def furthest_from(self, mean: float) -> int:
        """The shortest or the longest length left."""
        shortest, longest = self.shortest(), self.left.bit_length() - 1
        return shortest if mean - shortest > longest - mean else longest

    def exact(self, space: int) -> list[int]:
        """One length, or the two most alike, that fill ``space`` exactly; else an empty list."""
        if space <= self.longest and self.counts[space]:
            return [space]
        shift = self.longest - space
        pairs = self.left & (self.mirror >> shift if shift >= 0 else self.mirror << -shift)
        short = (pairs & ((2 << space // 2) - 1)).bit_length() - 1
        if short * 2 == space and self.counts[short] < 2:
            short = (pairs & ((1 << short) - 1)).bit_length() - 1
        return [short, space - short] if short > 0 else []

    def plentiful(self, space: int, draws: Iterator[int]) -> list[int]:
        """Of a few drawn pairs that fill ``space`` exactly the one of which most is left; else an empty list."""
        most, pair = 0, []
        for length in islice(draws, NUM_TRIES):
            other = space - length
            if 0 < other != length and max(length, other) <= self.longest:
                left = self.counts[length] * self.counts[other]
                if left > most:
                    most, pair = left, [length, other]
        return pair

    def descending(self, space: int) -> list[int]:
        """The longest length that fits, again and again."""
        chosen: list[int] = []
        length = self.longest_up_to(space)
        while length > 0:
            copies = min(self.counts[length], space // length)
            chosen += [length] * copies
            space -= length * copies
            length = self.longest_up_to(min(space, length - 1))
        return chosen

    def fullest(self, space: int) -> list[int]:
        """Lengths whose sum is the largest possible in ``space``, over candidates of every size that fits."""
        fitting = (self.left & ((2 << space) - 1)).to_bytes(space // 8 + 1, "little")
        lengths = np.flatnonzero(np.unpackbits(np.frombuffer(fitting, np.uint8), bitorder="little"))[::-1]
        lengths = lengths[:: -(-len(lengths) // MAX_CANDIDATES) or 1]
        copies = MAX_CANDIDATES // max(1, len(lengths))
        candidates = [n for n in lengths.tolist() for _ in range(min(self.counts[n], space // n, copies))]
        mask = (2 << space) - 1
        sums = [1]  # bit s of sums[i]: some of the first i candidates have the sum s
        for length in candidates:
            sums.append(sums[-1] | (sums[-1] << length & mask))
            if sums[-1] >> space:
                break
        total, chosen = sums[-1].bit_length() - 1, []
        for i in range(len(sums) - 1, 0, -1):
            if not sums[i - 1] >> total & 1:
                chosen.append(candidates[i - 1])
                total -= candidates[i - 1]
        return chosen


def _exact_fit(counts: Int64, draws: Sequence[int], *, max_tokens: int, balanced: bool = False) -> list[Pattern]:
    """Rows that are seeded with the longest piece, filled with drawn ones and completed exactly where that is possible.

    Args:
        counts: [longest + 1] number of pieces of each length.
        draws: every length at least as often as there are pieces of it, in random order.
        max_tokens: T, the length of a row.
        balanced: use up all lengths evenly: seed with the least average piece, complete with plentiful ones. Better
            where all rows must hold the same number of pieces, worse where short pieces have to be kept for the end.
    """
    pool = _Pool(counts)
    mean = int(np.arange(len(counts)) @ counts) / max(1, pool.num_pieces)
    # Two average pieces complete a row: there the lengths, and so the exact pairs, are densest.
    reach = int(2 * mean)
    sums_left = MAX_BALANCED_SUMS if balanced else MAX_SUM_BITS // max_tokens
    drawn, tried = iter(draws), cycle(draws)
    patterns = []
    while pool.num_pieces:
        row = [pool.furthest_from(mean) if balanced else pool.left.bit_length() - 1]
        pool.take(row[0])
        space = max_tokens - row[0]
        while space > reach and (length := next(drawn, 0)):
            if length <= space and length <= pool.longest and pool.counts[length]:
                pool.take(length)
                row.append(length)
                space -= length
        rest = (pool.plentiful(space, tried) if balanced else []) or pool.exact(space)
        for length in row[1:]:
            pool.take(length, -1)
        if space and not rest:
            row, space = row[:1], max_tokens - row[0]
            one = space < 2 * pool.shortest()  # a subset sum finds no more than the longest piece that fits
            rest = pool.descending(space) if one or sums_left <= 0 else pool.fullest(space)
            sums_left -= not one
        pool.take(row[0], -1)
        row += rest
        patterns.append((row, _repeat(pool, row, share=REPEAT_SHARE)))
    return patterns


def _descending(counts: Int64, *, max_tokens: int) -> list[Pattern]:
    """Rows of the longest piece that fits, again and again: better where most pieces exceed half a row."""
    pool = _Pool(counts)
    patterns = []
    while pool.num_pieces:
        row = pool.descending(max_tokens)
        patterns.append((row, _repeat(pool, row, share=1)))
    return patterns


def _short_first(counts: Int64, draws: Sequence[int], *, max_tokens: int, parameter: int) -> list[Pattern]:
    """Rows of k + 1 short pieces first, then the rest: better where no row holds k + 1 average pieces.

    ``parameter`` is that of the best dual feasible function: k pieces of it fit into a row, and lengths up to
    T - k * parameter weigh nothing there. Short are the others, from below, while their mean is at most T / (k + 1).
    """
    k, weightless = divmod(max_tokens, parameter)
    lengths = np.repeat(np.arange(weightless + 1, len(counts)), counts[weightless + 1 :])
    num_short = np.count_nonzero(np.cumsum(max_tokens - (k + 1) * lengths) >= 0)
    found = _exact_fit(np.bincount(lengths[:num_short]), draws, max_tokens=max_tokens, balanced=True)
    kept = [(row, rows) for row, rows in found if len(row) > k]
    return kept + _descending(_without(counts, kept), max_tokens=max_tokens)


def _without(counts: Int64, patterns: Sequence[Pattern]) -> Int64:
    """What the patterns leave."""
    rest = counts.copy()
    for row, rows in patterns:
        np.subtract.at(rest, row, rows)
    return rest


def _repeat(pool: _Pool, row: list[int], *, share: int) -> int:
    """Take the lengths of ``row``, once or for 1 / share of the scarcest of them; return how often."""
    times = Counter(row)
    repeats = max(1, min(pool.counts[length] // num for length, num in times.items()) // share)
    for length, num in times.items():
        pool.take(length, num * repeats)
    return repeats


def _num_rows(patterns: Sequence[Pattern]) -> int:
    """Rows of all patterns together."""
    return sum(rows for _, rows in patterns)


def _is_near(patterns: Sequence[Pattern], bound: int) -> bool:
    """Whether no way can be much better."""
    return _num_rows(patterns) <= bound + bound // NEAR


def _fewest_rows(lengths: Int64, *, max_tokens: int) -> list[Pattern]:
    """The best of a few ways to pack lengths in random order; the later ones only where the first falls short."""
    counts, draws = np.bincount(lengths), lengths.tolist()
    best = _exact_fit(counts, draws, max_tokens=max_tokens)
    bound = martello_toth_l2(lengths, max_tokens=max_tokens)
    if _is_near(best, bound):  # and so it is to any greater bound, of which some cost seconds where T is large
        return best
    dual, parameter = dual_bound(counts, max_tokens=max_tokens)
    least, some_rows = cutting_stock(counts, max_tokens=max_tokens)
    bound = max(bound, dual, least)
    ways: tuple[Callable[[], list[Pattern]], ...] = (
        lambda: some_rows + _descending(_without(counts, some_rows), max_tokens=max_tokens),
        lambda: _short_first(counts, draws, max_tokens=max_tokens, parameter=parameter),
        lambda: _exact_fit(counts, draws, max_tokens=max_tokens, balanced=True),
    )
    for way in ways:
        if _is_near(best, bound):
            break
        best = min(best, way(), key=_num_rows)
    return best


# ---------------------------------------------------------------------------------------------- rows


def pack(lengths: Int64, *, max_tokens: int, seed: int) -> tuple[Int64, Int64]:
    """Put every piece into exactly one row of at most ``max_tokens``.

    Args:
        lengths: [P] tokens of each piece, 1 to T.
        max_tokens: T, the length of a row.
        seed: 0 to 2**63 - 1.

    Returns:
        order [P]: the pieces in row order; row_offsets [R + 1]: where each row starts in it. Both the order of
        rows and that of the pieces in a row are random.
    """
    if not len(lengths):
        return np.zeros(0, np.int64), np.zeros(1, np.int64)
    assert 1 <= int(lengths.min()) <= int(lengths.max()) <= max_tokens
    shuffled = np.argsort(_random(seed, stream=0, size=len(lengths)), kind="stable")
    patterns = _fewest_rows(lengths[shuffled], max_tokens=max_tokens)
    slots, row_sizes = _lay_out(patterns)
    # Slots and pieces by length: the n-th slot of a length gets the n-th piece of that length in the shuffled order.
    piece_of_slot = np.empty(len(lengths), np.int64)
    piece_of_slot[np.argsort(slots, kind="stable")] = shuffled[np.argsort(lengths[shuffled], kind="stable")]
    num_rows = len(row_sizes)
    place = np.argsort(_random(seed, stream=1, size=num_rows), kind="stable")  # place[n]: the row that comes n-th
    rank = np.empty(num_rows, np.int64)
    rank[place] = np.arange(num_rows)
    within = _random(seed, stream=2, size=len(lengths))
    order = piece_of_slot[np.lexsort((within, np.repeat(rank, row_sizes)))]
    return order, np.append(0, np.cumsum(row_sizes[place]))


def _lay_out(patterns: Sequence[Pattern]) -> tuple[Int64, Int64]:
    """Patterns as the length of every slot, row after row, and the number of slots of every row."""
    rows = np.array([rows for _, rows in patterns])
    sizes = np.array([len(row) for row, _ in patterns])
    flat = np.array([length for row, _ in patterns for length in row])
    row_sizes = np.repeat(sizes, rows)
    first = np.repeat(np.cumsum(sizes) - sizes, rows)  # where a row's pattern starts in flat
    slot_in_row = np.arange(row_sizes.sum()) - np.repeat(np.cumsum(row_sizes) - row_sizes, row_sizes)
    return flat[np.repeat(first, row_sizes) + slot_in_row], row_sizes


def _random(seed: int, *, stream: int, size: int) -> UInt64:
    """[size] random integers that depend on seed and stream alone."""
    return np.random.Philox(key=np.array([seed, stream], np.uint64)).random_raw(size)
