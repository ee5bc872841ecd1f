"""From cached blocks and a plan to shards and their account.

A shard is built in memory from slices of blocks, in any worker, in any order: its bytes depend on the plan alone. Only
the slices are read, a block's all at once: mapped pages would count as memory of every process that touched them.
Costs: about 0.5 GB a worker at any row length and any size of the cache.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.binpack import PackPlan
from pipeline.cut import Documents
from pipeline.encode import BlockRecord, open_block, token_positions
from pipeline.manifest import REJECT_REASONS, canonical_bytes
from pipeline.shards import Bool, Int32, Int64, ShardRows, publish, shard_bytes, shard_name, unpack_bits
from pipeline.source import Reject


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedSet:
    """Every document of a source, encoded: lengths and turns in memory, tokens in blocks on disk."""

    documents: Documents
    """What planning needs."""
    paths: tuple[str, ...]
    """The block files."""
    ids_at: Int64
    """[B] byte of each block file at which its flat ids begin."""
    masks_at: Int64
    """[B] byte at which its flat mask, one bit a token, begins."""
    block_of: Int64
    """[D] block that holds each document."""
    offset_in_block: Int64
    """[D] its first token in the block's flat ids."""
    rejects: tuple[Reject, ...]
    """Rejected and escaped chats, in order."""
    num_chats: int
    """Rows of the source."""
    tokens_rejected: int
    """Tokens of chats that were encoded and then rejected."""


def open_encoded(folder: Path, records: Sequence[BlockRecord]) -> EncodedSet:
    """Gather the blocks' columns, all but the tokens."""
    batches = [open_block(folder, record) for record in records]
    positions = np.array([token_positions(folder, record) for record in records], np.int64).reshape(-1, 2)

    def column(name: str, dtype: Any) -> Any:
        parts = [np.asarray(batch.column(name).flatten(), dtype) for batch in batches]
        return np.concatenate(parts) if parts else np.zeros(0, dtype)

    def sizes(name: str) -> list[Int64]:
        offsets = [np.asarray(batch.column(name).offsets, np.int64) for batch in batches]
        return [ends[1:] - ends[:-1] for ends in offsets]

    tokens, turns = sizes("input_ids"), sizes("turn_ends")
    no_sizes = [np.zeros(0, np.int64)]
    ids = [np.asarray(batch.column("doc_id"), np.int64) for batch in batches]
    return EncodedSet(
        documents=Documents(
            doc_ids=np.concatenate(ids or no_sizes),
            lengths=np.concatenate(tokens or no_sizes),
            turn_offsets=np.cumsum(np.concatenate([[0], *turns])),
            turn_ends=column("turn_ends", np.int32),
            roles=column("roles", np.uint8),
            turn_targets=column("turn_targets", np.int32),
            turn_first_target=column("turn_first_target", np.int32),
        ),
        paths=tuple(str(folder / record.name) for record in records),
        ids_at=positions[:, 0],
        masks_at=positions[:, 1],
        block_of=np.repeat(np.arange(len(batches)), [batch.num_rows for batch in batches]),
        offset_in_block=np.concatenate([np.cumsum(n) - n for n in tokens] or no_sizes),
        rejects=tuple(reject for record in records for reject in record.rejects),
        num_chats=sum(record.num_chats for record in records),
        tokens_rejected=sum(record.tokens_rejected for record in records),
    )


# --------------------------------------------------------------------------------------------- shards


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardJob:
    """All that a worker needs to build one shard: R rows of P pieces."""

    index: int
    """Number of the shard."""
    paths: tuple[str, ...]
    """The block files."""
    ids_at: Int64
    """[B] as in EncodedSet."""
    masks_at: Int64
    """[B] as in EncodedSet."""
    blocks: Int64
    """[P] block of each piece."""
    offsets: Int64
    """[P] its first token in the block."""
    lengths: Int64
    """[P] its tokens."""
    doc_ids: Int64
    """[P] source row of its document."""
    numbers: Int32
    """[P] its number within the document."""
    row_offsets: Int64
    """[R + 1] first piece of each row."""


def shard_jobs(encoded: EncodedSet, plan: PackPlan, *, rows_per_shard: int) -> list[ShardJob]:
    """Cut a plan into shards."""
    jobs = []
    for index, first in enumerate(range(0, plan.num_rows, rows_per_shard)):
        row_offsets = plan.row_offsets[first : min(first + rows_per_shard, plan.num_rows) + 1]
        pieces = slice(row_offsets[0], row_offsets[-1])
        docs = plan.docs[pieces]
        jobs.append(
            ShardJob(
                index=index,
                paths=encoded.paths,
                ids_at=encoded.ids_at,
                masks_at=encoded.masks_at,
                blocks=encoded.block_of[docs],
                offsets=encoded.offset_in_block[docs] + plan.starts[pieces],
                lengths=(plan.stops[pieces] - plan.starts[pieces]).astype(np.int64),
                doc_ids=encoded.documents.doc_ids[docs],
                numbers=plan.numbers[pieces],
                row_offsets=row_offsets - row_offsets[0],
            )
        )
    return jobs


def _read_pieces(job: ShardJob, *, max_tokens: int, pad: int) -> tuple[Int32, Bool]:
    """[R, T] ids and mask of a shard; each block is opened once and read from front to back."""
    num_rows = len(job.row_offsets) - 1
    input_ids = np.full(num_rows * max_tokens, pad, np.int32)
    loss_mask = np.zeros(num_rows * max_tokens, np.bool_)
    flat = input_ids.data.cast("B")
    # A piece goes to its row, behind the pieces before it: pieces of 3 and 4, then one of 5 in the next row of T = 8,
    # end at 3 7 12 counted through and start at 0 3 7; less the 0 0 7 before their rows, plus 0 0 8: 0 3 8.
    row_of = np.repeat(np.arange(num_rows), np.diff(job.row_offsets))
    starts = np.cumsum(job.lengths) - job.lengths
    places = row_of * max_tokens + starts - starts[job.row_offsets[row_of]]
    order = np.lexsort((job.offsets, job.blocks))
    for pieces in np.split(order, np.flatnonzero(np.diff(job.blocks[order])) + 1):
        block = int(job.blocks[pieces[0]])
        with Path(job.paths[block]).open("rb", buffering=0) as file:
            columns = (places[pieces].tolist(), job.offsets[pieces].tolist(), job.lengths[pieces].tolist())
            for at, first, length in zip(*columns, strict=True):
                into = flat[4 * at : 4 * (at + length)]
                num_bytes = os.preadv(file.fileno(), [into], int(job.ids_at[block]) + 4 * first)
                size = -(-(first + length) // 8) - first // 8
                packed = os.pread(file.fileno(), size, int(job.masks_at[block]) + first // 8)
                if num_bytes != 4 * length or len(packed) != size:
                    raise OSError(f"{job.paths[block]}: shorter than it was; delete it and run the same command again")
                loss_mask[at : at + length] = unpack_bits(np.frombuffer(packed, np.uint8), first % 8, length)
    loss_mask[places] = False  # a split document's piece may begin with what was a target in the whole
    return input_ids.reshape(num_rows, max_tokens), loss_mask.reshape(num_rows, max_tokens)


def build_shard(job: ShardJob, out: Path, recipe: dict[str, Any], fingerprint: str) -> dict[str, Any]:
    """Build, write and publish one shard.

    Returns:
        Its entry in the manifest, and ``max_token_id``.

    Raises:
        OSError: disk full and the like; nothing half-written is left.
    """
    max_tokens, num_rows = recipe["pack"]["max_tokens"], len(job.row_offsets) - 1
    pad = recipe["tokenizer"]["pad_token_id"]
    input_ids, loss_mask = _read_pieces(job, max_tokens=max_tokens, pad=pad)
    rows = ShardRows(
        input_ids=input_ids,
        loss_mask=loss_mask,
        piece_lengths=job.lengths,
        row_offsets=job.row_offsets,
        doc_ids=job.doc_ids,
        pieces=job.numbers,
    )
    compression = recipe["shards"]["compression"]
    data = shard_bytes(rows, fingerprint=fingerprint, shard=job.index, compression=compression)
    return {
        **publish(out / shard_name(job.index), data),
        "rows": num_rows,
        "pieces": len(job.lengths),
        "tokens": int(job.lengths.sum()),
        "targets": int(loss_mask.sum()),
        "max_token_id": int(input_ids.max()),
    }


# -------------------------------------------------------------------------------------------- account


def account(encoded: EncodedSet, plan: PackPlan, shards: list[dict[str, Any]], *, max_tokens: int) -> dict[str, Any]:
    """The manifest's totals, limits and histograms."""
    lengths = (plan.stops - plan.starts).astype(np.int64)
    pieces_per_row = np.diff(plan.row_offsets)
    tokens_in_row = np.add.reduceat(lengths, plan.row_offsets[:-1]) if len(lengths) else np.zeros(0, np.int64)
    tails = max_tokens - tokens_in_row
    lines = reject_lines(encoded, plan)
    rejected = Counter(line.reason for line in lines if line.what == "rejected")
    tokens, tokens_rejected = int(lengths.sum()), encoded.tokens_rejected + plan.tokens_rejected
    rendered = int(encoded.documents.lengths.sum()) + encoded.tokens_rejected
    assert rendered == tokens + plan.tokens_cut + tokens_rejected, "tokens disappeared"
    return {
        "totals": {
            "chats_read": encoded.num_chats,
            "documents": encoded.num_chats - rejected.total(),
            "rejected": {reason: rejected[reason] for reason in REJECT_REASONS if rejected[reason]},
            "truncated": len(plan.truncated),
            "split": len(plan.split),
            "escaped": sum(line.what == "escaped" for line in lines),
            "pieces": len(lengths),
            "rows": plan.num_rows,
            "targets": sum(shard["targets"] for shard in shards),
            "rounds_cut": plan.rounds_cut,
            "tokens_rendered": rendered,
            "tokens": tokens,
            "tokens_cut": plan.tokens_cut,
            "tokens_rejected": tokens_rejected,
            "padding": int(tails.sum()),
        },
        "limits": {
            "max_segments_per_row": int((pieces_per_row + (tails > 0)).max(initial=0)),
            "max_segment_tokens": max(int(lengths.max(initial=0)), int(tails.max(initial=0))),
            "max_token_id": max((shard["max_token_id"] for shard in shards), default=0),
            "sum_of_squared_lengths": int((lengths**2).sum()),
        },
        "histograms": {
            "piece_tokens": histogram(lengths, piece_width(max_tokens)),
            "pieces_per_row": histogram(pieces_per_row, 1),
        },
    }


def piece_width(max_tokens: int) -> int:
    """Tokens a bar of the histogram of piece lengths: some 64 bars at any row length."""
    return max(1, max_tokens // 64)


def histogram(values: Sequence[int] | Int64, width: int) -> dict[str, Any]:
    """Bar i counts the values from i * width to (i + 1) * width - 1."""
    return {"width": width, "counts": np.bincount(np.asarray(values, np.int64) // width).tolist()}


def reject_lines(encoded: EncodedSet, plan: PackPlan) -> list[Reject]:
    """One line per (doc_id, what), sorted: what is rejected, truncated, split or escaped."""
    lines = [*encoded.rejects, *planned_lines(encoded.documents, plan)]
    return sorted(lines, key=lambda line: (line.doc_id, line.what))


def planned_lines(documents: Documents, plan: PackPlan) -> Iterator[Reject]:
    """What the plan rejects, truncates or splits."""
    kept = np.bincount(plan.docs, plan.stops - plan.starts, minlength=len(documents.lengths)).astype(np.int64)
    num_pieces = np.bincount(plan.docs, minlength=len(documents.lengths))
    for doc, reason in zip(plan.rejected.tolist(), plan.reasons, strict=True):
        detail = f"{documents.lengths[doc]} tokens"
        yield Reject(doc_id=int(documents.doc_ids[doc]), what="rejected", reason=reason, detail=detail)
    for what, docs in (("truncated", plan.truncated), ("split", plan.split)):
        for doc in docs.tolist():
            detail = f"{kept[doc]} of {documents.lengths[doc]} tokens kept in {num_pieces[doc]} pieces"
            yield Reject(doc_id=int(documents.doc_ids[doc]), what=what, reason="", detail=detail)


def reject_bytes(lines: list[Reject]) -> bytes:
    """The content of ``rejects.jsonl``."""
    fields = ("doc_id", "what", "reason", "detail")
    return b"".join(canonical_bytes({name: getattr(line, name) for name in fields}) + b"\n" for line in lines)


def parse_rejects(data: bytes) -> list[Reject]:
    """Read ``rejects.jsonl`` back. Raises ValueError where it is not what ``reject_bytes`` writes."""
    try:
        lines = [Reject(**json.loads(line)) for line in data.splitlines()]
    except TypeError:
        raise ValueError("a line has other fields than doc_id, what, reason, detail") from None
    if reject_bytes(lines) != data:
        raise ValueError("not in canonical form")
    return lines
