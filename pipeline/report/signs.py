"""Which rows to look at first: the longest, the shortest, those with a sign that something is wrong, the extreme ones.

    signs = find_signs(rows, pieces, escaped)
    chosen = choose(extremes(rows, pieces), signs, asked=[12])

Guarantees: a row is suspicious for one of the reasons listed in ``RULES`` and for no other; the same dataset gives the
same rows. Needs polars.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import polars as pl

FEW_TARGETS = 0.10
"""Of a row's tokens: fewer targets are a sign."""
ONE_TOKEN, LEAST_COUNT = 0.20, 64
"""Of a row's tokens, and how often: one token that fills more is a sign."""
NUM_ROWS, NUM_EACH = 24, 6
"""Rows in the viewer, which loads them all at once; of each kind, and listed for each sign."""

RULES = {
    "few targets": f"fewer than {FEW_TARGETS:.0%} of the row's tokens are targets",
    "a piece without a target": "nothing is learned from it",
    "one token over and over": f"more than {ONE_TOKEN:.0%} of the row's tokens are the same one",
    "replacement characters": "tokens that hold U+FFFD: text that was decoded wrongly before it came here",
    "identical pieces": "the row holds the same piece twice or more",
    "control strings": "a document of the row has control strings in its text, packed as plain text",
}
"""Every sign and what it means."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reason:
    """Why to look at a row."""

    row: int
    """Its number."""
    why: str
    """In words, with the values, rounded."""
    values: list[float]
    """Those, unrounded; shares as parts of 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sign:
    """One thing that may be wrong with rows."""

    name: str
    """A key of RULES."""
    num_rows: int
    """That have it."""
    rows: list[Reason]
    """The worst of them first, up to six."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Extremes:
    """Rows at the ends, up to six of each; of equal ones the least row number first."""

    longest: list[Reason]
    """Rows with the longest pieces."""
    shortest: list[Reason]
    """Rows with the fewest tokens, of equal ones those with the shortest piece."""
    extreme: list[Reason]
    """The row with the least share of targets, and the one with the greatest share of one token: some row always is."""


def find_signs(rows: "pl.DataFrame", pieces: "pl.DataFrame", escaped: Sequence[int]) -> list[Sign]:
    """Every sign, in the order of RULES.

    Args:
        rows: as ``scan`` gives them.
        pieces: the same.
        escaped: doc_ids of documents with control strings.
    """
    import polars as pl

    full, num = _with_shares(rows), pl.len().cast(pl.Int64).alias("num")
    bare = pieces.filter(pl.col("targets") == 0).group_by("row").agg(num)
    twins = pieces.group_by("row", "digest").agg(num).filter(pl.col("num") > 1).group_by("row").agg(pl.col("num").sum())
    held = pieces.filter(pl.col("doc_id").is_in(list(escaped))).group_by("row").agg(pl.col("doc_id").n_unique())
    often = (pl.col("share") > ONE_TOKEN) & (pl.col("count") >= LEAST_COUNT)
    found = [
        (full.filter(pl.col("targets_share") < FEW_TARGETS), ["targets_share"], "{:.1%} of its tokens are targets"),
        (bare, ["-num"], "pieces without a target: {:,}"),
        (full.filter(often), ["-share"], "{:.1%} of its tokens are the same one"),
        (full.filter(pl.col("replaced") > 0), ["-replaced"], "tokens with U+FFFD: {:,}"),
        (twins, ["-num"], "pieces that are identical: {:,}"),
        (held, ["-doc_id"], "documents with control strings: {:,}"),
    ]
    return [
        Sign(name=name, num_rows=frame.height, rows=_first(frame, columns, form))
        for name, (frame, columns, form) in zip(RULES, found, strict=True)
    ]


def _with_shares(rows: "pl.DataFrame") -> "pl.DataFrame":
    import polars as pl

    targets, share = pl.col("targets") / pl.col("tokens"), pl.col("count") / pl.col("tokens")
    return rows.with_columns(targets.alias("targets_share"), share.alias("share"))


def _first(frame: "pl.DataFrame", columns: list[str], form: str, *, num: int = NUM_EACH) -> list[Reason]:
    """The first rows by some columns, a "-" before one for the greatest first, and what is said of these values."""
    names = [name.lstrip("-") for name in columns]
    first = frame.sort(*names, "row", descending=[*(name.startswith("-") for name in columns), False]).head(num)
    return [
        Reason(row=row, why=form.format(*values), values=values)
        for row, *values in first.select("row", *names).iter_rows()
    ]


def extremes(rows: "pl.DataFrame", pieces: "pl.DataFrame") -> Extremes:
    """The rows at the ends."""
    import polars as pl

    tokens = pl.col("tokens")
    ends = pieces.group_by("row").agg(tokens.max().alias("longest"), tokens.min().alias("least"))
    full = _with_shares(rows).join(ends, on="row")
    return Extremes(
        longest=_first(full, ["-longest"], "a piece of {:,} tokens"),
        shortest=_first(full, ["tokens", "least"], "{:,} tokens, its shortest piece {:,}"),
        extreme=[
            *_first(full, ["targets_share"], "the least of all rows: {:.1%} targets", num=1),
            *_first(full, ["-share"], "the most of one token of all rows: {:.1%}", num=1),
        ],
    )


def suspicious(signs: Sequence[Sign]) -> list[tuple[int, str]]:
    """Rows with a sign, each once with its listed reasons: the worst of each sign, then the second of each ..."""
    reasons: dict[int, list[str]] = {}
    for tier in zip_longest(*(sign.rows for sign in signs)):
        for entry in tier:
            if entry is not None:
                reasons.setdefault(entry.row, []).append(entry.why)
    return [(row, ", ".join(whys)) for row, whys in reasons.items()]


def to_look_at(ends: Extremes, signs: Sequence[Sign]) -> list[tuple[str, int, str]]:
    """Kind, row, why: up to six each of the longest, the shortest and the suspicious rows, then the extreme ones."""
    kinds = {
        "longest": [(reason.row, reason.why) for reason in ends.longest],
        "shortest": [(reason.row, reason.why) for reason in ends.shortest],
        "suspicious": suspicious(signs)[:NUM_EACH],
        "extreme": [(reason.row, reason.why) for reason in ends.extreme],
    }
    return [(kind, row, why) for kind, rows in kinds.items() for row, why in rows]


def random_rows(num_rows: int) -> list[int]:
    """All rows in the order in which training takes them with seed 0."""
    raw = np.random.Philox(key=np.zeros(2, np.uint64)).random_raw(num_rows)
    return list(map(int, np.argsort(raw, kind="stable")))


def check_asked(asked: Sequence[int], num_rows: int) -> None:
    """Refuse rows that the viewer cannot show.

    Raises:
        ValueError: there is no such row, or there are more than 24.
    """
    for row in asked:
        if not 0 <= row < num_rows:
            there = f"has rows 0 to {num_rows - 1:,}" if num_rows else "has no rows"
            raise ValueError(f"--row {row}: no such row; this dataset {there}.")
    if len(set(asked)) > NUM_ROWS:
        raise ValueError(f"--row is given {len(set(asked))} times: the viewer holds {NUM_ROWS} rows. Name fewer.")


def choose(ends: Extremes, signs: Sequence[Sign], *, num_rows: int, asked: Sequence[int] = ()) -> list[tuple[int, str]]:
    """Up to 24 rows and why each is shown: asked for, longest, shortest, suspicious, extreme, then random ones."""
    wanted = [("asked for", row, "") for row in dict.fromkeys(asked)] + to_look_at(ends, signs)
    chosen: dict[int, list[str]] = {}
    for kind, row, why in wanted:
        if row in chosen or len(chosen) < NUM_ROWS:
            chosen.setdefault(row, []).append(f"{kind}: {why}" if why else kind)
    others = [row for row in random_rows(num_rows) if row not in chosen][: NUM_ROWS - len(chosen)]
    return [(row, "; ".join(reasons)) for row, reasons in chosen.items()] + [(row, "random") for row in others]
