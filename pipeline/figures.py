"""What the rows of a packed dataset add up to, measured by polars.

    figures = measure(PackedDataset.open("data/packed"))

Guarantees: every figure comes from the rows and from ``rejects.jsonl``, none from the manifest.
Costs: boundaries and masks of one shard at a time, never token ids; 40 bytes of memory a piece. Needs polars.
"""

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from pipeline.accounts import read_lines
from pipeline.assemble import piece_width
from pipeline.bounds import lower_bound
from pipeline.manifest import Manifest, damaged
from pipeline.progress import Progress
from pipeline.shards import PackedDataset
from pipeline.source import Reject

if TYPE_CHECKING:
    import polars as pl

_BYTES = (OSError, UnicodeError)  # what wrong bytes raise beside the libraries' own; polars panics on some
TOKENS_AT_ONCE = 1 << 21  # of which the running sum of targets is held


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """What the rows and ``rejects.jsonl`` give, beside what the manifest says."""

    manifest: Manifest
    """The dataset's."""
    pieces: "pl.DataFrame"
    """One line a piece: row, doc_id, piece, tokens, targets (int64)."""
    kinds: list[tuple[str, int, list[int]]]
    """What happened to documents: kind with its reason, how many, the first few doc_ids."""
    tool_tags: int
    """Chats with tool tags as text."""
    least_rows: int
    """No packing of these pieces has fewer rows."""
    totals: dict[str, Any]
    """rows, pieces, documents, tokens, targets, padding; truncated, split, escaped; rejected by reason."""
    limits: dict[str, int]
    """max_segments_per_row, max_segment_tokens, sum_of_squared_lengths."""
    histograms: dict[str, dict[str, Any]]
    """piece_tokens and pieces_per_row."""


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
    manifest, pieces = dataset.manifest, read_pieces(dataset)
    rows = pieces.group_by("row").agg(pl.len().cast(pl.Int64).alias("pieces"), pl.col("tokens").sum())
    tails = manifest.max_tokens - rows["tokens"]
    tokens, lines = pieces["tokens"], read_lines(dataset.path / "rejects.jsonl")
    kinds, tool_tags = _kinds(lines)
    total = int(tokens.sum())
    return Figures(
        manifest=manifest, pieces=pieces, kinds=kinds, tool_tags=tool_tags,
        least_rows=lower_bound(tokens.to_numpy(), max_tokens=manifest.max_tokens),
        totals={
            "rows": len(dataset), "pieces": len(pieces), "documents": pieces["doc_id"].n_unique(), "tokens": total,
            "targets": int(pieces["targets"].sum()), "padding": len(dataset) * manifest.max_tokens - total,
            **{kind: sum(line.what == kind for line in lines) for kind in ("truncated", "split", "escaped")},
            "rejected": dict(Counter(line.reason for line in lines if line.what == "rejected")),
        },
        limits={
            "max_segments_per_row": _most(rows["pieces"] + (tails > 0).cast(pl.Int64)),
            "max_segment_tokens": max(_most(tokens), _most(tails)),
            "sum_of_squared_lengths": int((tokens * tokens).sum()),
        },
        histograms={
            "piece_tokens": _histogram(tokens, piece_width(manifest.max_tokens)),
            "pieces_per_row": _histogram(rows["pieces"], 1),
        },
    )  # fmt: skip


def read_pieces(dataset: PackedDataset) -> "pl.DataFrame":
    """One line a piece, in row order: row, doc_id, piece, tokens, targets.

    Raises:
        DatasetError: naming a shard that cannot be read, or whose pieces do not go together.
    """
    import polars as pl

    names = ("row", "doc_id", "piece", "tokens", "targets")
    parts, first_row, max_tokens = [pl.DataFrame(schema=dict.fromkeys(names, pl.Int64))], 0, dataset.manifest.max_tokens
    progress = Progress("report", len(dataset), "rows")
    for number, shard in enumerate(dataset.manifest.files["shards"]):
        path = dataset.path / shard["name"]
        try:
            dataset._open_shard(number)  # its footer
            held = pl.read_ipc(path, columns=["loss_mask", "boundaries", "doc_ids", "pieces"])
            if held.height != shard["rows"]:
                raise damaged(str(path), f"{shard['rows']} rows", str(held.height))
            for part in held.iter_slices(max(1, TOKENS_AT_ONCE // max_tokens)):
                parts.append(_pieces_of(part, first_row, max_tokens))
                first_row += part.height
                if not parts[-1]["tokens"].is_between(1, max_tokens).all():
                    raise damaged(str(path), f"pieces of 1 to {max_tokens} tokens", "others")
        except (pl.exceptions.PolarsError, pl.exceptions.PanicException, pa.ArrowException, *_BYTES) as error:
            raise damaged(str(path), "rows of pieces", f"unreadable bytes ({type(error).__name__})") from None
        progress.add(shard["rows"])
    progress.close()
    return pl.concat(parts)


def _pieces_of(part: "pl.DataFrame", first_row: int, max_tokens: int) -> "pl.DataFrame":
    """The pieces of some rows.

    A piece's targets are a difference of the running sum of the mask. Worked example, T = 4: masks 0101 0111 sum up to
    0 0 1 1 2 2 3 4 5; row 1's piece from token 1 to 3 has sums[4 + 3] - sums[4 + 1] = 4 - 2 = 2.
    """
    import polars as pl

    num, bounds = pl.col("doc_ids").list.len(), pl.col("boundaries")
    lists = part.select(
        pl.int_range(pl.len()).alias("row"), pl.col("doc_ids").alias("doc_id"), pl.col("pieces").alias("piece"),
        bounds.list.head(num).alias("start"), bounds.list.slice(1, num).alias("stop"),
    )  # fmt: skip
    pieces = lists.explode("doc_id", "piece", "start", "stop").drop_nulls().cast(pl.Int64)
    sums = pl.concat([pl.Series([0], dtype=pl.Int64), part["loss_mask"].explode().cast(pl.Int64).cum_sum()])
    offset = pieces["row"] * max_tokens
    targets = sums.gather(offset + pieces["stop"]) - sums.gather(offset + pieces["start"])
    tokens = pl.col("stop") - pl.col("start")
    return pieces.select(pl.col("row") + first_row, "doc_id", "piece", tokens.alias("tokens"), targets.alias("targets"))


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


def _histogram(values: "pl.Series", width: int) -> dict[str, Any]:
    """As the manifest's: counts from bar 0 to the last that holds anything."""
    held = dict((values // width).value_counts(name="num").iter_rows())
    return {"width": width, "counts": [held.get(i, 0) for i in range(max(held, default=-1) + 1)]}
