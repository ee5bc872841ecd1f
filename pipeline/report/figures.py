"""What the rows of a packed dataset add up to, measured by polars.

    figures = measure(PackedDataset.open("data/packed"))

Guarantees: every figure comes from the rows and from ``rejects.jsonl``, none from the manifest: what only that knows
(chats read, tokens rendered, cut and rejected, rounds cut) is read from ``manifest``.
Costs: one pass over the rows (``pipeline.report.scan``) and 150 bytes of memory a piece. Needs polars.
"""

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pipeline.accounts import read_lines
from pipeline.assemble import piece_width
from pipeline.bounds import lower_bound
from pipeline.manifest import Manifest
from pipeline.report.copies import Copies, documents, identical_documents, repeated_openings
from pipeline.report.scan import ROLES, open_dataset_tokenizer, scan
from pipeline.report.signs import Extremes, Sign, extremes, find_signs
from pipeline.shards import PackedDataset
from pipeline.source import Reject

if TYPE_CHECKING:
    import polars as pl
    from tokenizers import Tokenizer

PERCENTILES = (0, 1, 5, 25, 50, 75, 95, 99, 100)


@dataclass(frozen=True, kw_only=True, slots=True)
class Role:
    """What is said in the turns of one role."""

    name: str
    """One of ``pipeline.report.scan.ROLES``."""
    turns: int
    """How many."""
    tokens: int
    """Of those turns, header and line break behind them included."""
    targets: int
    """Of the tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """What one way to lay the same pieces into rows of T tokens costs."""

    name: str
    """How they are laid."""
    rows: int
    """It needs."""
    padding: int
    """rows * T - tokens."""
    cut: int
    """Pieces that the end of a row cuts in two."""
    fill: float
    """tokens / (rows * T); 0 without rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """How values are spread."""

    mean: float
    """Their mean."""
    percentiles: dict[int, float]
    """Percentile -> the value of that rank; 0 is the least, 100 the greatest. Whole numbers stay whole."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """What the rows and ``rejects.jsonl`` give, beside what the manifest says."""

    manifest: Manifest
    """The dataset's."""
    tokenizer: "Tokenizer"
    """The same."""
    pieces: "pl.DataFrame"
    """One line a piece, as ``scan`` gives them."""
    rows: "pl.DataFrame"
    """One line a row, the same."""
    kinds: list[tuple[str, int, list[int]]]
    """What happened to documents: kind with its reason, how many, the first few doc_ids."""
    tool_tags: int
    """Chats with tool tags as text."""
    least_rows: int
    """No packing of these pieces has fewer rows."""
    totals: dict[str, Any]
    """rows, pieces, documents, tokens, targets, padding; truncated, split, escaped; rejected by reason."""
    limits: dict[str, int]
    """max_segments_per_row, max_segment_tokens, max_token_id, sum_of_squared_lengths."""
    histograms: dict[str, dict[str, Any]]
    """piece_tokens and pieces_per_row."""
    spreads: dict[str, Spread]
    """piece_tokens, pieces_per_row and target_share (of a piece's tokens); none where there is no piece."""
    roles: list[Role]
    """Those that occur."""
    ways: list[Way]
    """These rows, one piece a row, concatenation."""
    identical: Copies
    """Documents of the same token ids."""
    repeated: Copies
    """Documents that open alike."""
    signs: list[Sign]
    """What makes rows suspicious."""
    ends: Extremes
    """The rows that are longest, shortest, and the ends of all in another way."""


def measure(dataset: PackedDataset) -> Figures:
    """Every figure of a dataset.

    Raises:
        ValueError: polars is not installed.
        DatasetError: a file cannot be read, or its rows have no pieces that go together.
    """
    try:
        import polars as pl
    except ImportError:
        raise ValueError(
            'a report needs polars: install the extra "report", python -m pip install ".[report]"'
        ) from None
    tokenizer = open_dataset_tokenizer(dataset)
    found, lines = scan(dataset, tokenizer), read_lines(dataset.path / "rejects.jsonl")
    pieces, rows, max_tokens = found.pieces, found.rows, dataset.manifest.max_tokens
    tokens, tails, whole = pieces["tokens"], max_tokens - rows["tokens"], documents(pieces)
    kinds, tool_tags = _kinds(lines)
    return Figures(
        manifest=dataset.manifest, tokenizer=tokenizer, pieces=pieces, rows=rows, kinds=kinds, tool_tags=tool_tags,
        least_rows=lower_bound(tokens.to_numpy(), max_tokens=max_tokens),
        totals=_totals(pieces, lines, num_rows=len(dataset), num_documents=whole.height, max_tokens=max_tokens),
        limits={
            "max_segments_per_row": _most(rows["pieces"] + (tails > 0).cast(pl.Int64)),
            "max_segment_tokens": max(_most(tokens), _most(tails)),
            "max_token_id": found.max_token_id,
            "sum_of_squared_lengths": int((tokens * tokens).sum()),
        },
        histograms={
            "piece_tokens": histogram(tokens, piece_width(max_tokens)),
            "pieces_per_row": histogram(rows["pieces"], 1),
        },
        spreads=_spreads(pieces, rows),
        roles=[Role(name=name, turns=turns, tokens=num, targets=targets)
               for name, (turns, num, targets) in zip(ROLES, found.roles.tolist(), strict=True) if num],
        ways=_ways(pieces, num_rows=len(dataset), max_tokens=max_tokens),
        identical=identical_documents(whole), repeated=repeated_openings(whole),
        signs=find_signs(rows, pieces, [line.doc_id for line in lines if line.what == "escaped"]),
        ends=extremes(rows, pieces),
    )  # fmt: skip


def _totals(
    pieces: "pl.DataFrame", lines: list[Reject], *, num_rows: int, num_documents: int, max_tokens: int
) -> dict[str, Any]:
    tokens = int(pieces["tokens"].sum())
    return {
        "rows": num_rows, "pieces": len(pieces), "documents": num_documents, "tokens": tokens,
        "targets": int(pieces["targets"].sum()), "padding": num_rows * max_tokens - tokens,
        **{kind: sum(line.what == kind for line in lines) for kind in ("truncated", "split", "escaped")},
        "rejected": dict(Counter(line.reason for line in lines if line.what == "rejected")),
    }  # fmt: skip


def histogram(values: "pl.Series", width: int) -> dict[str, Any]:
    """As the manifest's: counts from bar 0 to the last that holds anything."""
    held = dict((values // width).value_counts(name="num").iter_rows())
    return {"width": width, "counts": [held.get(i, 0) for i in range(max(held, default=-1) + 1)]}


def _spreads(pieces: "pl.DataFrame", rows: "pl.DataFrame") -> dict[str, Spread]:
    if not len(pieces):
        return {}
    shares = pieces["targets"] / pieces["tokens"]
    named = {"piece_tokens": pieces["tokens"], "pieces_per_row": rows["pieces"], "target_share": shares}
    return {name: _spread(values.to_numpy()) for name, values in named.items()}


def _spread(values: npt.NDArray[Any]) -> Spread:
    found = np.percentile(values, PERCENTILES, method="nearest").tolist()
    return Spread(mean=float(np.mean(values)), percentiles=dict(zip(PERCENTILES, found, strict=True)))


def _ways(pieces: "pl.DataFrame", *, num_rows: int, max_tokens: int) -> list[Way]:
    """What these rows, one piece a row, and cutting all of them end to end every T tokens cost.

    Worked example of the last, T = 8: pieces of 5, 4 and 6 tokens, in the order of their documents, hold the places
    0 to 4, 5 to 8 and 9 to 14: 2 rows; the second piece begins in row 5 // 8 = 0 and ends in row 8 // 8 = 1: 1 is cut.
    """
    tokens = pieces.sort("doc_id", "piece")["tokens"].to_numpy()
    total, ends = int(tokens.sum()), np.cumsum(tokens)
    cut = int(((ends - tokens) // max_tokens != (ends - 1) // max_tokens).sum())

    def way(name: str, rows: int, cut: int) -> Way:
        capacity = rows * max_tokens
        fill = total / capacity if rows else 0.0
        return Way(name=name, rows=rows, padding=capacity - total, cut=cut, fill=fill)

    return [
        way("these rows", num_rows, 0),
        way("one piece a row", len(tokens), 0),
        way("concatenation", -(-total // max_tokens), cut),
    ]


def _kinds(lines: list[Reject]) -> tuple[list[tuple[str, int, list[int]]], int]:
    """Lines of ``rejects.jsonl`` by kind and reason, with the first doc_ids; and how many tell of tool tags."""
    import polars as pl

    columns = {name: [getattr(line, name) for line in lines] for name in ("what", "reason", "detail", "doc_id")}
    frame = pl.DataFrame(columns, schema={**dict.fromkeys(("what", "reason", "detail"), pl.String), "doc_id": pl.Int64})
    grouped = frame.group_by("what", "reason").agg(pl.len().alias("num"), pl.col("doc_id").sort().head(5))
    kinds = [
        (f"{what}: {reason}" if reason else what, num, doc_ids)
        for what, reason, num, doc_ids in grouped.sort("what", "reason").iter_rows()
    ]
    tags = pl.col("detail").str.extract("([0-9]+) of them tool tags").cast(pl.Int64) > 0
    return kinds, int(frame.filter(tags).height)


def _most(values: "pl.Series") -> int:
    return max(values.to_list(), default=0)
