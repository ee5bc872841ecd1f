"""Which rows to look at first: the longest, the shortest, those with a sign that something is wrong, random ones.

    signs = find_signs(rows, pieces, escaped)
    chosen = choose(extremes(rows, pieces), signs, asked=[12])

Guarantees: a row is suspicious for one of the reasons listed in ``RULES`` and for no other; the same dataset gives the
same rows. Needs polars.
"""

from collections.abc import Iterable, Sequence
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
"""Rows in the viewer; of them the longest, the shortest, the suspicious, as many as are listed for each sign."""

RULES = {
    "few targets": f"fewer than {FEW_TARGETS:.0%} of the row's tokens are targets",
    "a document without a target": "nothing is learned from it",
    "one token over and over": f"more than {ONE_TOKEN:.0%} of the row's tokens are the same one",
    "replacement characters": "tokens that hold U+FFFD: text that was decoded wrongly before it came here",
    "identical documents": "the row holds the same document twice or more",
    "control strings": "a document of the row has control strings in its text, packed as plain text",
    "fewest targets": "the least share of targets of all rows",
    "most of one token": "the greatest share of one token of all rows",
}
"""Every sign and what it means; the last two name one row each, whatever the dataset."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sign:
    """One reason to look at rows."""

    name: str
    """A key of RULES."""
    num_rows: int
    """That have it."""
    rows: list[tuple[int, str]]
    """The worst of them first, up to six: row, how much of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Extremes:
    """Rows at the ends; of equal ones the least row number first."""

    longest: list[tuple[int, str]]
    """Rows with the longest documents: row, how long."""
    shortest: list[tuple[int, str]]
    """Rows with the fewest tokens, of equal ones those with the shortest document: row, how many."""


def find_signs(rows: "pl.DataFrame", pieces: "pl.DataFrame", escaped: Sequence[int]) -> list[Sign]:
    """Every sign, in the order of RULES.

    Args:
        rows: as ``scan`` gives them.
        pieces: the same.
        escaped: doc_ids of documents with control strings.
    """
    import polars as pl

    targets, share = pl.col("targets") / pl.col("tokens"), pl.col("count") / pl.col("tokens")
    full = rows.with_columns(targets.alias("targets_share"), share.alias("share"))
    num = pl.len().cast(pl.Int64).alias("num")
    bare = pieces.filter(pl.col("targets") == 0).group_by("row").agg(num)
    twins = pieces.group_by("row", "digest").agg(num).filter(pl.col("num") > 1).group_by("row").agg(pl.col("num").sum())
    held = pieces.filter(pl.col("doc_id").is_in(list(escaped))).group_by("row").agg(pl.col("doc_id").n_unique())
    often = (pl.col("share") > ONE_TOKEN) & (pl.col("count") >= LEAST_COUNT)
    target_form, token_form = "{:.1%} of its tokens are targets", "{:.1%} of its tokens are the same one"
    by_targets, by_token = ("targets_share", False, target_form), ("share", True, token_form)
    found = [
        (full.filter(pl.col("targets_share") < FEW_TARGETS), *by_targets),
        (bare, "num", True, "documents without a target: {:,}"),
        (full.filter(often), *by_token),
        (full.filter(pl.col("replaced") > 0), "replaced", True, "tokens with U+FFFD: {:,}"),
        (twins, "num", True, "documents that are identical: {:,}"),
        (held, "doc_id", True, "documents with control strings: {:,}"),
        (_worst(full, "targets_share", descending=False), *by_targets),
        (_worst(full, "share", descending=True), *by_token),
    ]
    return [
        _sign(name, frame, column, form, descending=down)
        for name, (frame, column, down, form) in zip(RULES, found, strict=True)
    ]


def _worst(rows: "pl.DataFrame", column: str, *, descending: bool) -> "pl.DataFrame":
    return rows.sort(column, "row", descending=[descending, False]).head(1)


def _sign(name: str, frame: "pl.DataFrame", column: str, form: str, *, descending: bool) -> Sign:
    worst = frame.sort(column, "row", descending=[descending, False]).head(NUM_EACH)
    rows = [(row, form.format(value)) for row, value in worst.select("row", column).iter_rows()]
    return Sign(name=name, num_rows=frame.height, rows=rows)


def extremes(rows: "pl.DataFrame", pieces: "pl.DataFrame") -> Extremes:
    """The longest and the shortest rows."""
    import polars as pl

    tokens = pl.col("tokens")
    ends = pieces.group_by("row").agg(tokens.max().alias("longest"), tokens.min().alias("least"))
    full = rows.select("row", "tokens").join(ends, on="row")
    longest = full.sort("longest", "row", descending=[True, False]).head(NUM_EACH)
    shortest = full.sort("tokens", "least", "row").head(NUM_EACH)
    return Extremes(
        longest=[(row, f"a document of {n:,} tokens") for row, n in longest.select("row", "longest").iter_rows()],
        shortest=[
            (row, f"{n:,} tokens, its shortest document {least:,}")
            for row, n, least in shortest.select("row", "tokens", "least").iter_rows()
        ],
    )


def suspicious(signs: Sequence[Sign]) -> list[tuple[int, str]]:
    """Rows with a sign, each once with its listed reasons: the worst of each sign, then the second of each ..."""
    reasons: dict[int, list[str]] = {}
    for tier in zip_longest(*(sign.rows for sign in signs)):
        for entry in tier:
            if entry is not None:
                reasons.setdefault(entry[0], []).append(entry[1])
    return [(row, ", ".join(dict.fromkeys(texts))) for row, texts in reasons.items()]


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
    """Up to 24 rows and why each is shown: asked for, longest, shortest, most suspicious, then random ones."""
    wanted: list[tuple[str, Iterable[tuple[int, str]]]] = [
        ("asked for", ((row, "") for row in dict.fromkeys(asked))),
        ("longest", ends.longest),
        ("shortest", ends.shortest),
        ("suspicious", suspicious(signs)[:NUM_EACH]),
        ("random", ((row, "") for row in random_rows(num_rows))),
    ]
    chosen: dict[int, list[str]] = {}
    for kind, entries in wanted:
        for row, detail in entries:
            if kind == "random" and row in chosen:
                continue
            if row in chosen or len(chosen) < NUM_ROWS:
                chosen.setdefault(row, []).append(f"{kind}: {detail}" if detail else kind)
    return [(row, "; ".join(reasons)) for row, reasons in chosen.items()]
