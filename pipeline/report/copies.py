"""Documents that occur more than once, whole or by their opening.

    identical, repeated = identical_documents(pieces), repeated_openings(pieces)

Identical: the same token ids throughout, piece by piece (xxh3_128 over the ids of each). Repeated: the same 64 token
ids from the first user turn on (from the document's begin without one), though what follows differs; of identical
documents only the first counts, and documents with fewer tokens than that are left out. Needs polars.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import polars as pl

NUM_GROUPS, NUM_DOC_IDS = 5, 5  # that are listed


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Documents that are the same."""

    num_documents: int
    """How many."""
    doc_ids: list[int]
    """The first five."""
    tokens: int
    """Of the first document, in rows."""
    row: int
    """That holds its first piece."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Copies:
    """What occurs more than once."""

    num_groups: int
    """Sets of two or more documents that are the same."""
    num_documents: int
    """In all of them."""
    num_spare: int
    """But for the first of each."""
    spare_tokens: int
    """Tokens of those."""
    largest: list[Group]
    """The five largest: most documents, then most tokens, then the least doc_id."""


def documents(pieces: "pl.DataFrame") -> "pl.DataFrame":
    """One line a document, by doc_id: tokens, digest (those of its pieces, joined), opening and row of its first."""
    import polars as pl

    return (
        pieces.sort("doc_id", "piece")
        .group_by("doc_id", maintain_order=True)
        .agg(pl.col("tokens").sum(), pl.col("digest").str.join(), pl.col("opening", "row").first())
    )


def identical_documents(documents: "pl.DataFrame") -> Copies:
    """Documents of the same token ids throughout."""
    return _copies(documents, "digest")


def repeated_openings(documents: "pl.DataFrame") -> Copies:
    """Documents that differ, yet open alike."""
    distinct = documents.unique("digest", keep="first", maintain_order=True)
    return _copies(distinct.drop_nulls("opening"), "opening")


def _copies(documents: "pl.DataFrame", key: str) -> Copies:
    import polars as pl

    doc_id, tokens = pl.col("doc_id"), pl.col("tokens")
    groups = (
        documents.group_by(key, maintain_order=True)
        .agg(
            pl.len().cast(pl.Int64).alias("num"),
            doc_id.head(NUM_DOC_IDS).alias("doc_ids"), doc_id.first().alias("first"),
            (tokens.sum() - tokens.first()).alias("spare"), tokens.first(), pl.col("row").first(),
        )
        .filter(pl.col("num") > 1)
        .sort("num", "tokens", "first", descending=[True, True, False])
    )  # fmt: skip
    num = int(groups["num"].sum())
    columns = groups.select("num", "doc_ids", "tokens", "row").head(NUM_GROUPS)
    return Copies(
        num_groups=groups.height, num_documents=num, num_spare=num - groups.height,
        spare_tokens=int(groups["spare"].sum()),
        largest=[Group(num_documents=n, doc_ids=ids, tokens=t, row=row) for n, ids, t, row in columns.iter_rows()],
    )  # fmt: skip
