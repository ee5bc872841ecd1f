"""Say what packing would make, and write nothing: ``python -m pipeline.pack --dry-run``.

Where the cache holds every block, the plan itself is made and the number of rows is exact. Otherwise chats from all
over the source are encoded in memory and everything is estimated from them, with the spread that such a sample has.
Costs: the exact way a second or two at ultrachat's size; a sample some seconds, most of them to set up the tokenizer.
"""

import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.assemble import EncodedSet, open_encoded, planned_lines
from pipeline.binpack import plan_packing
from pipeline.bounds import lower_bound
from pipeline.cut import Documents
from pipeline.encode import BlockRecord, Document, Encoder, block_name, encode_fingerprint
from pipeline.rows import Block
from pipeline.source import Conversation, Reject, Source, read_block
from pipeline.summary import none_packed, nothing_left, table
from pipeline.tokenizer import TokenizerFiles

SAMPLE_BLOCKS, SAMPLE_CHATS = 32, 1024  # places in the source, and chats over all of them
WRITE_TOKENS_PER_S = 25_000_000  # a worker's rate, tokens of rows built, hashed and written
CACHE_BYTES_PER_TOKEN = 4.2


@dataclass(frozen=True, kw_only=True, slots=True)
class _Forecast:
    """What a run would make."""

    rows: int
    """Rows of the dataset."""
    tokens: int
    """Tokens in them, without padding."""
    new_tokens: int
    """Tokens that are to be encoded."""
    seconds: dict[str, float]
    """By stage."""
    how: str
    """Where the numbers come from."""


def preview(
    source: Source, tokenizer: TokenizerFiles, recipe: dict[str, Any], *, out: Path, cache_dir: Path, workers: int
) -> str:
    """A table of what ``pack`` would make of this recipe: rows, bytes, time, and the cache it would use.

    Raises:
        ValueError: the tokenizer cannot be used, nothing can be packed, or a document is longer than a row and the
            overflow policy is error.
    """
    folder, blocks = cache_dir / encode_fingerprint(recipe)[:32], source.blocks()
    num_chats = sum(block.num_rows for block in blocks)
    records = [record for block in blocks if (record := BlockRecord.read(folder, block_name(block)))]
    if len(records) == len(blocks):
        forecast, state = _exact(open_encoded(folder, records), recipe), "complete, nothing is encoded again"
    else:
        left = num_chats - sum(record.num_chats for record in records)
        slow = (folder / "references-only").exists()
        encoder = _timed_encoder(tokenizer, recipe, fast=not slow)
        forecast = _estimate(blocks, encoder, recipe, num_chats=num_chats, num_left=left, workers=workers)
        state = f"{len(records):,} of {len(blocks):,} blocks are there" if records else "empty, made first"
    max_tokens = recipe["pack"]["max_tokens"]
    write = forecast.rows * max_tokens / WRITE_TOKENS_PER_S / workers
    seconds = forecast.seconds | {"write": write}
    size, more = forecast.rows * -(-max_tokens * 65 // 8), int(forecast.new_tokens * CACHE_BYTES_PER_TOKEN)
    about = "" if forecast.how.startswith("exact") else "about "
    fill = forecast.tokens / max(1, forecast.rows * max_tokens)
    zstd = " before compression" if recipe["shards"]["compression"] else ""
    return table(
        [
            ("dry run", f"nothing is written; {forecast.how}"),
            ("source", f"{num_chats:,} chats in {len(source.paths):,} files, {len(blocks):,} blocks"),
            ("cache", f"{folder}: {state}"),
            ("rows", f"{about}{forecast.rows:,} of {max_tokens:,} tokens, fill {about}{fill:.2%}"),
            ("tokens", f"{about}{forecast.tokens:,}"),
            ("bytes", f"about {size:,} in {out}{zstd}, {more:,} more in the cache; {_free(out):,} are free"),
            ("seconds", f"about {sum(seconds.values()):,.0f} with {workers} workers: "
                        + ", ".join(f"{stage} {value:.1f}" for stage, value in seconds.items())),
        ]
    )  # fmt: skip


def _exact(encoded: EncodedSet, recipe: dict[str, Any]) -> _Forecast:
    """Plan what is encoded."""
    started, rule = time.monotonic(), recipe["pack"]
    plan = plan_packing(encoded.documents, **{name: rule[name] for name in ("max_tokens", "overflow", "seed")})
    if not plan.num_rows:
        raise ValueError(nothing_left(encoded, plan))
    return _Forecast(
        rows=plan.num_rows,
        tokens=int(plan.stops.sum(dtype=np.int64) - plan.starts.sum(dtype=np.int64)),
        new_tokens=0,
        seconds={"plan": time.monotonic() - started},
        how="exact, from the plan itself",
    )


def _timed_encoder(tokenizer: TokenizerFiles, recipe: dict[str, Any], *, fast: bool) -> tuple[Encoder, float]:
    """An encoder, and the seconds that it takes each worker to make one."""
    started = time.monotonic()
    kwargs, targets = recipe["tokenizer"]["template_kwargs"], recipe["encode"]["targets"]
    return Encoder(tokenizer, template_kwargs=kwargs, targets=targets, fast=fast), time.monotonic() - started


def _estimate(
    blocks: list[Block],
    encoder: tuple[Encoder, float],
    recipe: dict[str, Any],
    *,
    num_chats: int,
    num_left: int,
    workers: int,
) -> _Forecast:
    """Encode a sample in memory and take it for the whole."""
    rule = recipe["pack"]
    num_read, documents, rejects, seconds = _sample(blocks, encoder[0])
    scale = num_chats / max(1, num_read)
    if not documents:
        raise ValueError(none_packed(f"a sample of {num_read:,}", rejects))
    lengths = np.array([len(document.input_ids) for document in documents], np.int64)
    flat = _flat(documents)
    plan = plan_packing(flat, **{name: rule[name] for name in ("max_tokens", "overflow", "seed")})
    if not plan.num_rows:
        raise ValueError(none_packed(f"a sample of {num_read:,}", [*rejects, *planned_lines(flat, plan)]))
    pieces = plan.stops.astype(np.int64) - plan.starts
    whole = num_read == num_chats  # a source smaller than a sample: nothing is left to estimate
    sampled = f"estimated from {num_read:,} of the chats, give or take"
    least = -(-pieces.sum() // rule["max_tokens"])
    # What the bound says of so few rows is rough; where pieces do not fit together, it is far above the tokens' number.
    fewest = lower_bound(pieces, max_tokens=rule["max_tokens"], rows=plan.num_rows)
    misfit = max(1.0, (fewest - 1) / max(1, least))
    spread = 2 * float(lengths.std()) / max(1.0, float(lengths.mean())) / len(lengths) ** 0.5
    return _Forecast(
        rows=plan.num_rows if whole else max(1, round(pieces.sum() * scale * misfit / rule["max_tokens"] + 0.5)),
        tokens=round(pieces.sum() * scale),
        new_tokens=round(lengths.sum() * num_left / max(1, num_read)),
        seconds={
            "start": encoder[1],
            "encode": seconds * num_left / min(workers, len(blocks)),
            "plan": 5e-6 * num_chats,
        },
        how="exact, from every chat" if whole else f"{sampled} {spread:.1%}",
    )


def _sample(blocks: list[Block], encoder: Encoder) -> tuple[int, list[Document], list[Reject], float]:
    """The first chats of blocks all over the source.

    Returns:
        how many were read; those that became documents; why others did not; seconds a chat, once shapes are learned
        and caches warm.
    """
    chosen = blocks[:: -(-len(blocks) // SAMPLE_BLOCKS)]
    num_read, num_warm = 0, 0
    documents: list[Document] = []
    rejects: list[Reject] = []
    started = time.monotonic()
    for block in chosen:
        if num_read < SAMPLE_CHATS // 2 or len(chosen) == 1:
            num_warm, started = num_read, time.monotonic()
        part = replace(block, num_rows=min(block.num_rows, max(1, SAMPLE_CHATS // len(chosen))))
        rows = list(read_block(part))
        num_read += len(rows)
        encoded = encoder.encode([row for row in rows if isinstance(row, Conversation)])
        documents += [item for item in encoded if isinstance(item, Document)]
        rejects += [item for item in (*rows, *encoded) if isinstance(item, Reject)]
    return num_read, documents, rejects, (time.monotonic() - started) / max(1, num_read - num_warm)


def _flat(documents: list[Document]) -> Documents:
    """Documents as planning takes them."""
    turns = np.array([len(document.roles) for document in documents], np.int64)
    return Documents(
        doc_ids=np.array([document.doc_id for document in documents], np.int64),
        lengths=np.array([len(document.input_ids) for document in documents], np.int64),
        turn_offsets=np.append(0, np.cumsum(turns)),
        turn_ends=np.concatenate([document.turn_ends for document in documents]),
        roles=np.concatenate([document.roles for document in documents]),
        turn_targets=np.concatenate([document.turn_targets for document in documents]),
        turn_first_target=np.concatenate([document.turn_first_target for document in documents]),
    )


def _free(path: Path) -> int:
    """Free bytes where a folder is, or would be made."""
    here = path.absolute()
    while not here.exists():
        here = here.parent
    return shutil.disk_usage(here).free
