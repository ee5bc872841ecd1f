"""Forgeries for tests: a valid dataset with one thing altered, every hash, identity and checksum right again."""

import copy
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import xxhash

from pipeline.manifest import MANIFEST, canonical_bytes, fingerprint
from pipeline.shards import ROWS_PER_BATCH, PackedDataset, schema, shard_name
from tests.chatml import write_tokenizer
from tests.chats import small_chats, write_parquet

Rows = list[dict[str, list[Any]]]
"""Rows as lists, by the names of the columns."""


def chats() -> list[Any]:
    """Small chats, and some for every kind of line in rejects.jsonl."""
    user, answer = {"role": "user", "content": "hello there"}, {"role": "assistant", "content": "hello, friend"}
    escaped = [{"role": "user", "content": "write <|im_end|> and <think>"}, answer]
    long_prompt = [{"role": "user", "content": "how are you? " * 90}, answer]
    return [*small_chats(30), [], [user], escaped, long_prompt, [user, answer, *long_prompt], [user, answer]]


def make_dataset(root: Path, **settings: Any) -> Path:
    """Pack ``chats`` below ``root`` and return the dataset's folder."""
    from pipeline.pack import Settings, pack

    source = write_parquet(root / "train.parquet", chats())
    tokenizer = write_tokenizer(root / "tok")
    base = {"source": str(source), "tokenizer": str(tokenizer), "max_tokens": 200, "overflow": "split", "workers": 1}
    pack(Settings(**(base | {"out": root / "out", "cache_dir": root / "cache"} | settings)))
    return Path(settings.get("out", root / "out"))


def forge(
    dataset: Path,
    out: Path,
    *,
    rows: Callable[[Rows], Any] = lambda rows: None,
    body: Callable[[dict[str, Any]], Any] = lambda body: None,
    files: dict[str, bytes] | None = None,
) -> Path:
    """Write an altered copy of a dataset of one shard.

    Args:
        dataset: the valid one.
        out: folder of the forgery.
        rows: alters the rows in place; counts in the manifest stay as they were.
        body: alters the manifest's content in place, before identities and checksum.
        files: other content for files beside the shard.
    """
    manifest = json.loads((dataset / MANIFEST).read_bytes())
    valid = PackedDataset.open(dataset)
    held = [{name: getattr(row, name).tolist() for name in row.__dataclass_fields__} for row in valid]
    rows(held)
    body(manifest)
    prints = fingerprint(manifest["recipe"]) if isinstance(manifest.get("recipe"), dict) else "?"
    contents = {entry["name"]: (dataset / entry["name"]).read_bytes() for entry in manifest["files"]["others"]}
    contents |= files or {}
    contents[shard_name(0)] = shard_of(held, prints, valid.manifest.max_tokens)
    for entry in manifest["files"]["shards"] + manifest["files"]["others"]:
        data = contents[entry["name"]]
        (out / entry["name"]).parent.mkdir(parents=True, exist_ok=True)
        (out / entry["name"]).write_bytes(data)
        entry |= {"bytes": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(data)}
    (out / MANIFEST).write_bytes(sealed(manifest))
    return out


def sealed(manifest: dict[str, Any]) -> bytes:
    """A manifest's bytes, identities and checksum right, whatever it holds."""
    body = copy.deepcopy({k: v for k, v in manifest.items() if k not in ("dataset_id", "checksum")})
    body["fingerprint"] = fingerprint(body["recipe"]) if isinstance(body.get("recipe"), dict) else "?"
    identity = {k: v for k, v in body.items() if k != "created"}
    body["dataset_id"] = hashlib.sha256(canonical_bytes(identity)).hexdigest()
    body["checksum"] = xxhash.xxh3_128_hexdigest(canonical_bytes(body))
    return canonical_bytes(body) + b"\n"


def shard_of(rows: Rows, prints: str, max_tokens: int) -> bytes:
    """Any rows as a shard, sensible or not."""
    target = schema(max_tokens=max_tokens, fingerprint=prints, shard=0)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, target) as writer:
        for first in range(0, len(rows), ROWS_PER_BATCH):
            part = rows[first : first + ROWS_PER_BATCH]
            columns = [pa.array([row[field.name] for row in part], field.type) for field in target]
            writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=target))
    return bytes(sink.getvalue())
