"""How few rows can there be? Proven lower bounds, from lengths alone.

    rows_needed = lower_bound(lengths, max_tokens=8192)

Guarantees: no packing has fewer rows; the arithmetic is of integers alone, so the bound is the same on any machine.
Costs: a pass over the histogram of lengths for each of some 250 parameters, 30 ms at T = 8192 and 0.1 s at 32768; for
few lengths, what ``cutting_stock`` costs, which grows with T.
"""

import numpy as np

from pipeline.cut import Int64
from pipeline.cutting_stock import cutting_stock

MAX_PARAMETERS = 128  # dual feasible functions of each family that are tried, coarsely and then finely


def lower_bound(lengths: Int64, *, max_tokens: int, rows: int | None = None) -> int:
    """The greatest of the bounds: L2, that of a dual feasible function, and a linear programme's for few lengths.

    Args:
        lengths: tokens of each piece.
        max_tokens: T, the length of a row.
        rows: of a packing that there is. Where L2 reaches it, no bound is greater and the costly ones are left out.
    """
    if not len(lengths):
        return 0
    bound = martello_toth_l2(lengths, max_tokens=max_tokens)
    if bound == rows:
        return bound
    counts = np.bincount(lengths)
    dual, _ = dual_bound(counts, max_tokens=max_tokens)
    least, _ = cutting_stock(counts, max_tokens=max_tokens)
    return max(bound, dual, least)


def martello_toth_l2(lengths: Int64, *, max_tokens: int) -> int:
    """Martello and Toth's bound L2 (1990): tokens, but for what cannot share a row.

    For a threshold a <= T / 2, pieces longer than T - a share no row with any of at least a. L2 adds those that own a
    row (longer than T / 2) and the tokens of the others that flow over from the space beside those.
    """
    counts = np.bincount(lengths, minlength=max_tokens + 1)
    number = np.append(0, np.cumsum(counts))  # number[n], tokens[n]: of the pieces shorter than n
    tokens = np.append(0, np.cumsum(counts * np.arange(max_tokens + 1)))
    half = max_tokens // 2 + 1
    a = np.arange(1, half)
    over = tokens[max_tokens - a + 1] - tokens[a] - (number[max_tokens - a + 1] - number[half]) * max_tokens
    return int((number[-1] - number[half] + np.maximum(0, -(-over // max_tokens))).max())


def dual_bound(counts: Int64, *, max_tokens: int) -> tuple[int, int]:
    """The greatest bound that a few dual feasible functions give, and the parameter of the one that gives it.

    A dual feasible function weighs every length such that no row weighs more than 1: the weight of all pieces is a
    bound. Two families of Clautiaux, Alves and Valerio de Carvalho's survey (2010) are tried, both with a parameter u:
    T = k * u + rest, length = q * u + r. Burdet and Johnson's weight is (q + max(0, r - rest) / (u - rest)) / k;
    Carlier, Clautiaux and Moukrim's is q / k below T / 2, and 1 minus that of T - length above.
    """
    lengths = np.flatnonzero(counts)
    num = counts[lengths]

    def bound(u: int) -> int:
        k, rest = divmod(max_tokens, u)
        q, r = np.divmod(lengths, u)
        first = int(num @ (q * (u - rest) + np.maximum(0, r - rest)))
        twice = np.where(2 * lengths < max_tokens, 2 * q, 2 * (k - (max_tokens - lengths) // u))
        twice[2 * lengths == max_tokens] = k
        return max(-(-first // (k * (u - rest))), -(-int(num @ twice) // (2 * k)))

    coarse = np.union1d(_thinned(lengths), max_tokens // np.arange(2, 10) + 1)
    best = int(np.argmax([bound(u) for u in coarse.tolist()]))
    around = coarse[max(0, best - 1) : best + 2]  # a better one may be between its neighbours
    fine = _thinned(np.arange(around[0], around[-1] + 1))
    return max((bound(u), u) for u in [*fine.tolist(), int(coarse[best])])


def _thinned(parameters: Int64) -> Int64:
    """At most ``MAX_PARAMETERS`` of them, evenly spaced."""
    return parameters[:: -(-len(parameters) // MAX_PARAMETERS)]
