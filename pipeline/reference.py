"""What people do today, for ``pipeline.bench`` to compare with: tokenize row by row, then pack with TRL.

    python -m pipeline.reference --source CHATS.parquet --tokenizer FOLDER --chats 4000 --processes 2

``datasets.map`` with ``apply_chat_template(tokenize=True)``, then ``trl.pack_dataset(strategy="bfd")`` where TRL is
installed (pip install "qwen-packed-finetune[bench]"). Prints one JSON object. Nothing else imports this module.
"""

import json
import sys
import time
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import tyro

from pipeline.cli import refuse_repeats


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Measure the usual path: datasets.map over rows, then TRL's pack_dataset."""

    source: Path
    """A parquet file with a column "messages"."""
    tokenizer: str
    """What AutoTokenizer reads."""
    chats: int
    """Rows from the front."""
    processes: int = 1
    """num_proc of datasets.map; 1 for none."""
    max_tokens: int = 8192
    """T of packing."""


def main() -> int:
    """The command line. Returns the exit status."""
    settings = tyro.cli(Settings, prog="python -m pipeline.reference")
    refuse_repeats(Settings)
    print(json.dumps(measure(settings)))
    return 0


def measure(settings: Settings) -> dict[str, Any]:
    """Seconds of both steps; chats, tokens, and with TRL the tokens and rows that it makes of them."""
    import datasets
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(settings.tokenizer)

    def encode(row: dict[str, Any]) -> dict[str, Any]:
        return {"input_ids": tokenizer.apply_chat_template(row["messages"], tokenize=True, return_dict=False)}

    rows = datasets.Dataset(_front(settings.source, settings.chats))
    processes = settings.processes if settings.processes > 1 else None
    started = time.monotonic()
    encoded = rows.map(encode, remove_columns=rows.column_names, num_proc=processes)
    figures: dict[str, Any] = {"map_seconds": time.monotonic() - started, "chats": len(encoded)}
    figures["tokens"] = _num_tokens(encoded)
    if find_spec("trl") is None:
        return figures
    trl: Any = import_module("trl")
    started = time.monotonic()
    packed = trl.pack_dataset(encoded, seq_length=settings.max_tokens, strategy="bfd")
    figures["pack_seconds"] = time.monotonic() - started
    return figures | {"rows": len(packed), "packed_tokens": _num_tokens(packed)}


def _num_tokens(dataset: Any) -> int:
    return sum(len(column.flatten()) for column in dataset.data.column("input_ids").chunks)


def _front(path: Path, num_rows: int) -> pa.Table:
    """The first rows of the messages column."""
    batches, left = [], num_rows
    for batch in pq.ParquetFile(path).iter_batches(columns=["messages"]):
        batches.append(batch.slice(0, left))
        left -= len(batches[-1])
        if not left:
            break
    return pa.Table.from_batches(batches)


if __name__ == "__main__":
    sys.exit(main())
