"""Measure the offline stage on this machine and write a record of it.

    python -m pipeline.bench --source CHATS.parquet --tokenizer FOLDER --record-dir data/records

Packs into a temporary folder with an empty cache, verifies every invariant, packs again at another row length from the
cache, recognises the finished dataset, each in a process of its own, and takes the wall clock and the peak of the
resident memory of all processes together.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tyro

from pipeline.shards import PackedDataset

PACKAGES = ("datasets", "fastokens", "numpy", "pyarrow", "tokenizers")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Measure packing, verifying, packing again from the cache and recognising a finished dataset."""

    source: str
    """As in pipeline.pack."""
    tokenizer: str
    """As in pipeline.pack."""
    max_tokens: int = 8192
    """Row length of the first run."""
    again_tokens: int = 4096
    """Row length of the run from the cache."""
    workers: int = 2
    """As in pipeline.pack."""
    scratch: Path | None = None
    """Where the temporary folder is made; it needs some 4 GB at ultrachat's size."""
    record_dir: Path = Path("data/records")
    """Where the record is written."""
    notes: str = ""
    """What a reader should know of the source."""


def main() -> int:
    """The command line. Returns the exit status."""
    settings = tyro.cli(Settings, prog="python -m pipeline.bench")
    with tempfile.TemporaryDirectory(dir=settings.scratch) as scratch:
        figures = measure(settings, Path(scratch))
    record = {
        "what": "pack",
        "date": datetime.now(UTC).date().isoformat(),
        "command": "python -m pipeline.bench " + " ".join(sys.argv[1:]),
        "commit": _commit(),
        "machine": f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}, {platform.system()}",
        "num_gpus": 0,
        "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
        "figures": {name: {"value": value, "unit": unit} for name, (value, unit) in figures.items()},
        "notes": settings.notes,
    }
    settings.record_dir.mkdir(parents=True, exist_ok=True)
    path = settings.record_dir / f"{record['date']}-pack-{os.cpu_count()}-cores.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{path}\n{json.dumps(record['figures'], indent=1)}")
    return 0


def measure(settings: Settings, scratch: Path) -> dict[str, tuple[float, str]]:
    """Name -> (value, unit) of every figure."""
    one, two = scratch / "one", scratch / "two"
    pack = [
        "pipeline.pack", "--source", settings.source, "--tokenizer", settings.tokenizer,
        "--workers", str(settings.workers), "--cache-dir", str(scratch / "cache"),
    ]  # fmt: skip
    first = [*pack, "--out", str(one), "--max-tokens", str(settings.max_tokens)]
    seconds, peak = _run(first)
    again, _ = _run([*pack, "--out", str(two), "--max-tokens", str(settings.again_tokens)])
    recognised, _ = _run(first)
    semantic, _ = _run(["pipeline.verify", str(one), "--semantic"])
    manifest = PackedDataset.open(one).manifest
    totals = manifest.totals
    capacity = totals["rows"] * manifest.max_tokens
    least = -(-totals["tokens"] // manifest.max_tokens)
    return {
        "chats": (totals["chats_read"], "chats"),
        "tokens": (totals["tokens"], "tokens"),
        "pack_seconds": (round(seconds, 1), "s"),
        "pack_chats_per_s": (round(totals["chats_read"] / seconds), "chats/s"),
        "pack_peak_gib": (round(peak / 2**30, 2), "GiB, all processes, shared pages counted in each"),
        "repack_seconds": (round(again, 1), f"s, at {settings.again_tokens} from the cache"),
        "recognise_seconds": (round(recognised, 2), "s"),
        "verify_semantic_seconds": (round(semantic, 1), "s"),
        "rows": (totals["rows"], "rows"),
        "fill": (round(totals["tokens"] / capacity, 5), "of all tokens in rows"),
        "rows_above_bound": (totals["rows"] - least, "rows above tokens / T rounded up"),
        "shard_bytes": (_size(one), "bytes"),
        "cache_bytes": (_size(scratch / "cache"), "bytes"),
    }


def _run(module: list[str]) -> tuple[float, int]:
    """Run ``python -m ...`` to its end; its wall seconds and the peak bytes of its process tree."""
    started, peak = time.monotonic(), 0
    process = subprocess.Popen([sys.executable, "-m", *module], stdout=subprocess.DEVNULL)
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.2):
            peak = max(peak, sum(map(_resident, _tree(process.pid))))

    watcher = threading.Thread(target=watch)
    watcher.start()
    status = process.wait()
    done.set()
    watcher.join()
    if status:
        raise SystemExit(f"python -m {' '.join(module)} failed with exit status {status}")
    return time.monotonic() - started, peak


def _tree(pid: int) -> list[int]:
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return [pid]
    return [pid, *(p for child in text.split() for p in _tree(int(child)))]


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _commit() -> Any:
    """The commit measured, with -dirty behind it if files differ; None outside a repository."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or None


if __name__ == "__main__":
    sys.exit(main())
