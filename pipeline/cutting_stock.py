"""The best rows where there are few different lengths: the linear programme of Gilmore and Gomory (1961).

    bound, patterns = cutting_stock(np.bincount(lengths), max_tokens=8192)

A pattern is the lengths of a row; the programme asks how often to use each so that all pieces are packed in the fewest
rows, fractions of rows allowed. Patterns are found as they are needed: the row that is worth most at current prices.
Guarantees: no packing has fewer rows than the bound; arithmetic is exact, so both are the same on any machine.
Costs: 0.1 s for ten lengths at T = 8192, some 0.5 s for 16.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from pipeline.cut import Int64

Pattern = tuple[list[int], int]
"""The lengths in a row, and how many rows are filled that way."""

MAX_LENGTHS = 24  # different ones: fractions grow, and time with more than the square of their number
MAX_STEPS = 300  # new patterns; 60 are usual
MAX_PRICE = 2**45  # denominator of prices: the worth of a row stays below 2**63


def cutting_stock(counts: Int64, *, max_tokens: int) -> tuple[int, list[Pattern]]:
    """Pack nearly all pieces into the fewest rows.

    Args:
        counts: [longest + 1] number of pieces of each length.
        max_tokens: T, the length of a row.

    Returns:
        a number of rows that no packing can go below; patterns, which leave out less than one
        row for each length. 0 and no patterns if there are more than ``MAX_LENGTHS`` lengths.
    """
    lengths = np.flatnonzero(counts).tolist()
    if len(lengths) > MAX_LENGTHS:
        return 0, []
    num = counts[lengths].tolist()
    # The basis: one pattern for each length, at first rows of that length alone, and the inverse of their matrix.
    patterns = [[max_tokens // length * (a == b) for b in range(len(lengths))] for a, length in enumerate(lengths)]
    inverse = [
        [Fraction(a == b, max_tokens // length) for b in range(len(lengths))] for a, length in enumerate(lengths)
    ]
    amounts = [Fraction(n, max_tokens // length) for n, length in zip(num, lengths, strict=True)]
    bound = 0
    for _ in range(MAX_STEPS):
        prices = [sum(column, Fraction(0)) for column in zip(*inverse, strict=True)]
        one = math.lcm(*(price.denominator for price in prices))
        if one > MAX_PRICE:
            break
        weights = [max(0, int(price * one)) for price in prices]
        pattern, worth = _worthiest(lengths, weights, max_tokens=max_tokens)
        # Weights over the worth of the best row are a dual feasible function (Farley's bound, 1990).
        bound = max(bound, -(-sum(w * n for w, n in zip(weights, num, strict=True)) // worth))
        if worth <= one:
            break
        patterns[_enter(pattern, inverse, amounts)] = pattern
    rows = [[length for length, n in zip(lengths, pattern, strict=True) for _ in range(n)] for pattern in patterns]
    return bound, [(row, int(amount)) for row, amount in zip(rows, amounts, strict=True) if amount >= 1]


def _worthiest(lengths: Sequence[int], weights: Sequence[int], *, max_tokens: int) -> tuple[list[int], int]:
    """How many of each length the row of the greatest weight holds, and that weight."""
    tables = [
        np.zeros(max_tokens + 1, np.int64)
    ]  # tables[i][s]: the greatest weight of the first i lengths in s tokens
    for length, weight in zip(lengths, weights, strict=True):
        table, copies = tables[-1].copy(), 1
        while weight and copies * length <= max_tokens:  # 1, 2, 4 ... copies more: any number is a sum of these
            table[copies * length :] = np.maximum(table[copies * length :], table[: -copies * length] + copies * weight)
            copies *= 2
        tables.append(table)
    space, pattern = max_tokens, [0] * len(lengths)
    for i in reversed(range(len(lengths))):
        while tables[i + 1][space] > tables[i][space]:
            pattern[i] += 1
            space -= lengths[i]
    return pattern, int(tables[-1][max_tokens])


def _enter(pattern: Sequence[int], inverse: list[list[Fraction]], amounts: list[Fraction]) -> int:
    """Take a pattern into the basis, as much of it as possible; return the place of the one that it replaces."""
    change = [sum((a * n for a, n in zip(row, pattern, strict=True) if n), Fraction(0)) for row in inverse]
    place = min((i for i, c in enumerate(change) if c > 0), key=lambda i: amounts[i] / change[i])
    inverse[place] = [a / change[place] for a in inverse[place]]
    amounts[place] /= change[place]
    for i, c in enumerate(change):
        if i != place and c:
            inverse[i] = [a - c * b for a, b in zip(inverse[i], inverse[place], strict=True)]
            amounts[i] -= c * amounts[place]
    return place
