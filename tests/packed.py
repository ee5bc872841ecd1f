"""Small packed datasets for tests, written through the format's own functions."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pipeline.manifest import MANIFEST, Manifest, fingerprint
from pipeline.shards import PackedDataset, ShardRows, publish, rows_per_shard, shard_bytes, shard_name

Piece = tuple[int, list[int], list[bool]]
"""(doc_id, token ids, loss mask)."""


def random_rows(
    *, num_rows: int, max_tokens: int, vocab_size: int, seed: int = 0, padding: bool = True
) -> list[list[Piece]]:
    """Rows of random pieces; about every second target, never a first token. Some rows end in padding."""
    rng = np.random.default_rng(seed)
    rows: list[list[Piece]] = []
    doc_id = 0
    for _ in range(num_rows):
        room = max_tokens - (int(rng.integers(0, max(1, max_tokens // 4))) if padding else 0)
        row: list[Piece] = []
        while room >= 2:
            length = min(room, int(rng.integers(2, max(3, max_tokens // 2))))
            length = room if room - length < 2 else length
            mask = rng.random(length) < 0.5
            mask[0], mask[-1] = False, True
            row.append((doc_id, rng.integers(1, vocab_size, length).tolist(), mask.tolist()))
            doc_id += 1
            room -= length
        rows.append(row)
    return rows


def make_packed(
    path: Path,
    rows: Sequence[Sequence[Piece]],
    *,
    max_tokens: int,
    vocab_size: int = 512,
    pad_token_id: int = 0,
    eos_token_ids: Sequence[int] = (1,),
    tokenizer_sha256: str = "0" * 64,
    model: str | None = None,
    rows_in_shard: int | None = None,
    compression: str | None = None,
) -> Path:
    """Write ``rows`` as a dataset at ``path`` and return it."""
    recipe = small_recipe(
        max_tokens=max_tokens, vocab_size=vocab_size, pad_token_id=pad_token_id, eos_token_ids=list(eos_token_ids),
        tokenizer_sha256=tokenizer_sha256, model=model, compression=compression,
    )  # fmt: skip
    per_shard = rows_in_shard or rows_per_shard(max_tokens)
    shards = (
        shard_rows(rows[first : first + per_shard], max_tokens=max_tokens, pad_token_id=pad_token_id)
        for first in range(0, len(rows), per_shard)
    )
    tokenizer = json.dumps({"test": vocab_size}).encode()
    return write_dataset(path, shards, recipe=recipe, tokenizer=tokenizer, **_summary(rows, max_tokens=max_tokens))


def write_dataset(
    path: Path, shards: Iterable[ShardRows], *, recipe: dict[str, Any], tokenizer: bytes, **account: dict[str, Any]
) -> Path:
    """Write a dataset and return its folder; ``account`` are the manifest's totals, limits and histograms."""
    (path / "tokenizer").mkdir(parents=True)
    entries = []
    for number, rows in enumerate(shards):
        data = shard_bytes(
            rows, fingerprint=fingerprint(recipe), shard=number, compression=recipe["shards"]["compression"]
        )
        entries.append(publish(path / shard_name(number), data) | {
            "rows": len(rows.row_offsets) - 1, "pieces": len(rows.pieces), "tokens": int(rows.piece_lengths.sum()),
            "targets": int(rows.loss_mask.sum()),
        })  # fmt: skip
    others = [
        publish(path / "rejects.jsonl", b""),
        publish(path / "tokenizer" / "tokenizer.json", tokenizer) | {"name": "tokenizer/tokenizer.json"},
    ]
    manifest = Manifest.build(
        recipe=recipe,
        created={"time": "2026-01-01T00:00:00+00:00", "versions": {}},
        files={"shards": entries, "others": others},
        **account,
    )
    publish(path / MANIFEST, manifest.to_bytes())
    PackedDataset.open(path)
    return path


def shard_rows(rows: Sequence[Sequence[Piece]], *, max_tokens: int, pad_token_id: int = 0) -> ShardRows:
    """Lay rows of pieces out as the arrays of one shard."""
    input_ids = np.full((len(rows), max_tokens), pad_token_id, np.int32)
    loss_mask = np.zeros((len(rows), max_tokens), np.bool_)
    for i, row in enumerate(rows):
        ids = [token for piece in row for token in piece[1]]
        input_ids[i, : len(ids)] = ids
        loss_mask[i, : len(ids)] = [m for piece in row for m in piece[2]]
    pieces = [piece for row in rows for piece in row]
    return ShardRows(
        input_ids=input_ids,
        loss_mask=loss_mask,
        piece_lengths=np.array([len(p[1]) for p in pieces], np.int64),
        row_offsets=np.cumsum([0, *map(len, rows)]),
        doc_ids=np.array([p[0] for p in pieces], np.int64),
        pieces=np.zeros(len(pieces), np.int32),
    )


def small_recipe(*, max_tokens: int, compression: str | None = None, **tokenizer: Any) -> dict[str, Any]:
    """A recipe with the fields of a real one."""
    return {
        "source": [],
        "tokenizer": {"template_sha256": "0" * 64, "template_kwargs": {}, **tokenizer},
        "encode": {"version": 1, "targets": "assistant"},
        "pack": {"version": 1, "max_tokens": max_tokens, "overflow": "truncate", "algorithm": "test", "seed": 0,
                 "partitions": 1},
        "shards": {"rows_per_shard": 8, "rows_per_batch": 8, "compression": compression},
    }  # fmt: skip


def _summary(rows: Sequence[Sequence[Piece]], *, max_tokens: int) -> dict[str, dict[str, Any]]:
    pieces = [piece for row in rows for piece in row]
    tokens = sum(len(p[1]) for p in pieces)
    tails = [max_tokens - sum(len(p[1]) for p in row) for row in rows]
    docs = len({p[0] for p in pieces})
    totals = {
        "chats_read": docs, "documents": docs, "rejected": {}, "truncated": 0, "split": 0, "escaped": 0,
        "pieces": len(pieces), "rows": len(rows), "targets": sum(sum(p[2]) for p in pieces), "rounds_cut": 0,
        "tokens_rendered": tokens, "tokens": tokens, "tokens_cut": 0, "tokens_rejected": 0,
        "padding": len(rows) * max_tokens - tokens,
    }  # fmt: skip
    limits = {
        "max_segments_per_row": max((len(r) + (t > 0) for r, t in zip(rows, tails, strict=True)), default=0),
        "max_segment_tokens": max([*(len(p[1]) for p in pieces), *tails], default=0),
        "max_token_id": max((max(p[1]) for p in pieces), default=0),
        "sum_of_squared_lengths": sum(len(p[1]) ** 2 for p in pieces),
    }
    return {"totals": totals, "limits": limits, "histograms": {"piece_tokens": {}, "pieces_per_row": {}}}


def with_byte_tokenizer(path: Path) -> Path:
    """Give a dataset a tokenizer that transformers can load: 256 bytes, no merges."""
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    entry = publish(path / "tokenizer" / "tokenizer.json", tokenizer.to_str().encode())
    old = Manifest.read(path)
    others = [
        entry | {"name": "tokenizer/tokenizer.json"} if "tokenizer" in e["name"] else e for e in old.files["others"]
    ]
    manifest = Manifest.build(
        recipe=old.recipe, created=old.created, totals=old.totals, limits=old.limits, histograms=old.histograms,
        files=old.files | {"others": others},
    )  # fmt: skip
    publish(path / MANIFEST, manifest.to_bytes())
    return path
