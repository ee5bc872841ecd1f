"""Small notes in the cache that prove themselves: a damaged one is as good as none.

What a run remembers (digests of sources, what a block or a shard holds) goes into the manifest without being computed
again, so that a flipped bit in a note would be a wrong number in a dataset.
"""

import json
from pathlib import Path
from typing import Any

import xxhash

from pipeline.shards import publish


def write_note(path: Path, body: dict[str, Any]) -> None:
    """Write a note, whole or not at all. Raises OSError."""
    publish(path, json.dumps({"body": body, "xxh3_128": _hash(body)}).encode())


def read_note(path: Path) -> dict[str, Any] | None:
    """What ``write_note`` wrote; None if there is nothing, or something else."""
    try:
        note = json.loads(path.read_bytes())
        body = note["body"]
        return body if isinstance(body, dict) and note["xxh3_128"] == _hash(body) else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _hash(body: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True).encode())
