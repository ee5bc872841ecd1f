"""Measure the offline stage on this machine, beside what people use today, and write a record of it.

    python -m pipeline.bench --source CHATS.parquet --tokenizer FOLDER --record-dir data/records

One run, one machine: packs into a temporary folder with an empty cache, verifies every invariant, packs again at
another row length from the cache, recognises the finished dataset, reports on it (with the extra "report"), opens and
reads it, and takes the usual path (``pipeline.reference``) with one process and with as many as there are cores. Each
is a process of its own. Chats a second are the difference between a large and a small run, so that start-up cancels.
Peak memory is the sum over all processes, sampled five times a second: of their resident sets (a shared page counts in
each), and of their proportional ones. Takes some 4 minutes on 2 cores at ultrachat's size.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from pipeline.binpack import pack
from pipeline.bounds import lower_bound
from pipeline.cli import refuse_repeats
from pipeline.manifest import Manifest
from pipeline.provenance import cores, find_commit, versions
from pipeline.shards import Int64, PackedDataset

PACKAGES = ("datasets", "fastokens", "numpy", "polars", "pyarrow", "tokenizers", "transformers", "trl")
ROWS_TO_READ = 4096

Figures = dict[str, tuple[float, str]]
"""Name -> (value, unit)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Measure packing, packing again from the cache, recognising, opening, reading, and the usual path beside it."""

    source: str
    """As in pipeline.pack; the usual path is measured where it is one parquet file."""
    tokenizer: str
    """As in pipeline.pack."""
    max_tokens: int = 8192
    """Row length of the first run."""
    again_tokens: int = 4096
    """Row length of the run from the cache."""
    workers: int = len(os.sched_getaffinity(0))
    """As in pipeline.pack; also the processes of the usual path at its fastest."""
    reference_chats: tuple[int, int] = (1000, 4000)
    """Chats of the usual path's small and large run; 0 0 leaves it out."""
    scratch: Path | None = None
    """Where the temporary folder is made; it needs some 6 GB at ultrachat's size."""
    record_dir: Path = Path("data/records")
    """Where the record is written."""
    notes: str = ""
    """What a reader should know of the source."""


def main() -> int:
    """The command line. Returns the exit status."""
    settings = tyro.cli(Settings, prog="python -m pipeline.bench")
    refuse_repeats(Settings)
    if find_spec("polars") is None:
        raise SystemExit('the report is measured too: install the extra "report", python -m pip install ".[report]"')
    with tempfile.TemporaryDirectory(dir=settings.scratch) as scratch:
        figures = measure(settings, Path(scratch))
    has_trl = "reference_fill" in figures or not settings.reference_chats[1]
    missing = "" if has_trl else "TRL is not installed: the usual path is datasets.map alone, without its packing. "
    record = {
        "what": "pack",
        "date": datetime.now(UTC).date().isoformat(),
        "command": "python -m pipeline.bench " + " ".join(sys.argv[1:]),
        "commit": find_commit(),
        "machine": cores(),
        "num_gpus": 0,
        "versions": {"python": platform.python_version(), **versions(PACKAGES)},
        "figures": {name: {"value": value, "unit": unit} for name, (value, unit) in figures.items()},
        "notes": missing + settings.notes,
    }
    settings.record_dir.mkdir(parents=True, exist_ok=True)
    path = settings.record_dir / f"{record['date']}-pack-{os.cpu_count()}-cores.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{path}\n{json.dumps(record['figures'], indent=1)}")
    return 0


def measure(settings: Settings, scratch: Path) -> Figures:
    """Every figure."""
    one, two, cache = scratch / "one", scratch / "two", scratch / "cache"
    pack_ = ["pipeline.pack", "--source", settings.source, "--tokenizer", settings.tokenizer,
             "--workers", str(settings.workers)]  # fmt: skip
    first = [*pack_, "--cache-dir", str(cache), "--out", str(one), "--max-tokens", str(settings.max_tokens)]
    full = _run(first)
    manifest = PackedDataset.open(one).manifest
    num_chats = manifest.totals["chats_read"]
    small = max(1, num_chats // 10)
    part = _run([*pack_, "--limit", str(small), "--cache-dir", str(scratch / "c2"), "--out", str(scratch / "part")])
    again = _run([*pack_, "--cache-dir", str(cache), "--out", str(two), "--max-tokens", str(settings.again_tokens)])
    report = _run(["pipeline.report", str(one), "--out", str(scratch / "report.html")])
    if full.seconds - part.seconds < 1:
        raise SystemExit(f"{num_chats} chats take hardly longer than {small} do: measure with a larger --source")
    rate = (num_chats - small) / (full.seconds - part.seconds)
    figures: Figures = {
        "chats": (num_chats, "chats"),
        "tokens": (manifest.totals["tokens"], "tokens"),
        "pack_seconds": (round(full.seconds, 1), "s, start-up included"),
        "pack_chats_per_s": (round(rate), f"chats/s, {num_chats:,} chats less {small:,}"),
        "pack_peak_rss_gib": (_gib(full.rss), "GiB, sum over processes, shared pages counted in each"),
        "pack_peak_pss_gib": (_gib(full.pss), "GiB, sum over processes, shared pages counted once"),
        "repack_seconds": (round(again.seconds, 1), f"s, at {settings.again_tokens} from the cache"),
        "repack_peak_rss_gib": (_gib(again.rss), "GiB, sum over processes"),
        "recognise_seconds": (round(statistics.median(_run(first).seconds for _ in range(3)), 2), "s, median of 3"),
        "verify_semantic_seconds": (round(_run(["pipeline.verify", str(one), "--semantic"]).seconds, 1), "s"),
        "report_seconds": (round(report.seconds, 1), "s, table and page"),
        "report_peak_rss_gib": (_gib(report.rss), "GiB, mapped files and libraries counted"),
        "report_page_bytes": ((scratch / "report.html").stat().st_size, "bytes"),
        "cache_bytes": (_size(cache), "bytes"),
    }
    figures |= _dataset_figures(one, manifest)
    if settings.reference_chats[1]:
        figures |= _reference_figures(settings, rate)
    return figures


def _dataset_figures(path: Path, manifest: Manifest) -> Figures:
    """Fill, opening, reading and planning, in this process."""
    totals, max_tokens = manifest.totals, manifest.max_tokens
    least = -(-totals["tokens"] // max_tokens)
    before = _bytes_read()
    PackedDataset.open(path)
    opened = _bytes_read() - before
    times = []
    for _ in range(9):
        started = time.monotonic()
        dataset = PackedDataset.open(path)
        times.append(time.monotonic() - started)
    order = np.random.default_rng(0).permutation(len(dataset))[:ROWS_TO_READ].tolist()
    ids, positions = np.empty((2, max_tokens), np.int32)
    mask = np.empty(max_tokens, np.bool_)
    reads = []
    for _ in range(2):  # the first time pages are mapped
        started = time.monotonic()
        for row in map(dataset.__getitem__, order):  # copied, as a batch would
            ids[:], positions[:], mask[:] = row.input_ids, row.position_ids, row.loss_mask
        reads.append(len(order) * max_tokens / (time.monotonic() - started))
    lengths = _many_lengths(manifest, 1_000_000)
    started = time.monotonic()
    num_rows = len(pack(lengths, max_tokens=max_tokens, seed=0)[1]) - 1
    return {
        "rows": (totals["rows"], "rows"),
        "fill": (round(totals["tokens"] / (totals["rows"] * max_tokens), 5), "of all tokens in rows"),
        "rows_above_bound": (totals["rows"] - least, "rows above tokens / T rounded up"),
        "shard_bytes": (_size(path), "bytes"),
        "open_ms": (round(statistics.median(times) * 1000, 2), "ms, median of 9"),
        "open_bytes": (opened, "bytes read to open"),
        "read_tokens_per_s": (round(reads[1]), "tokens/s on one core, random rows, copied"),
        "read_first_tokens_per_s": (round(reads[0]), "tokens/s the first time, while pages are mapped"),
        "plan_million_seconds": (round(time.monotonic() - started, 2), "s, a million lengths of this distribution"),
        "plan_million_rows_above_bound": (
            num_rows - lower_bound(lengths, max_tokens=max_tokens), "rows above the lower bound"
        ),
    }  # fmt: skip


def _many_lengths(manifest: Manifest, num: int) -> Int64:
    """Lengths drawn from the dataset's histogram, evenly within each bar."""
    rng, bars = np.random.default_rng(0), manifest.histograms["piece_tokens"]
    counts, width = np.array(bars["counts"]), bars["width"]
    chosen = rng.choice(len(counts), num, p=counts / counts.sum())
    lengths: Int64 = np.clip(chosen * width + rng.integers(0, width, num), 1, manifest.max_tokens)
    return lengths


def _reference_figures(settings: Settings, rate: float) -> Figures:
    """The usual path, with one process and with as many as there are workers."""
    figures: Figures = {}
    small, large = settings.reference_chats
    for name, processes in (("reference", 1), ("reference_parallel", settings.workers)):
        few, many = (_reference(settings, chats, processes) for chats in (small, large))
        seconds = [run["map_seconds"] + run.get("pack_seconds", 0) for run in (few, many)]
        per_s = (many["chats"] - few["chats"]) / max(1e-9, seconds[1] - seconds[0])
        unit = f"chats/s, {processes} processes, {many['chats']:,} chats less {few['chats']:,}"
        figures[f"{name}_chats_per_s"] = (round(per_s), unit)
        figures[f"pack_over_{name}"] = (round(rate / per_s, 1), "times as many chats a second")
        if "rows" in many:
            capacity = many["rows"] * settings.max_tokens
            figures["reference_fill"] = (round(many["packed_tokens"] / capacity, 5), "of all tokens in rows")
            lost = 1 - many["packed_tokens"] / many["tokens"]
            figures["reference_tokens_lost"] = (round(lost, 5), "of the tokens, truncated away without a word")
    return figures


def _reference(settings: Settings, chats: int, processes: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "pipeline.reference", "--source", settings.source, "--tokenizer",
               settings.tokenizer, "--chats", str(chats), "--processes", str(processes), "--max-tokens",
               str(settings.max_tokens)]  # fmt: skip
    quiet = os.environ | {"HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=quiet)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed with exit status {done.returncode}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """What a command took."""

    seconds: float
    """Wall clock."""
    rss: int
    """Peak bytes, sum of resident sets."""
    pss: int
    """Peak bytes, sum of proportional sets."""


def _run(module: list[str]) -> _Run:
    """Run ``python -m ...`` to its end, its processes watched."""
    started, rss, pss = time.monotonic(), 0, 0
    process = subprocess.Popen([sys.executable, "-m", *module], stdout=subprocess.DEVNULL)
    done = threading.Event()

    def watch() -> None:
        nonlocal rss, pss
        while not done.wait(0.2):
            found = [_memory(pid) for pid in _tree(process.pid)]
            rss, pss = max(rss, sum(r for r, _ in found)), max(pss, sum(p for _, p in found))

    watcher = threading.Thread(target=watch)
    watcher.start()
    status = process.wait()
    seconds = time.monotonic() - started
    done.set()
    watcher.join()
    if status:
        raise SystemExit(f"python -m {' '.join(module)} failed with exit status {status}")
    return _Run(seconds=seconds, rss=rss, pss=pss)


def _tree(pid: int) -> list[int]:
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return [pid]
    return [pid, *(p for child in text.split() for p in _tree(int(child)))]


def _memory(pid: int) -> tuple[int, int]:
    """Resident and proportional bytes of a process; 0 if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0, 0
    found = {line.split(":")[0]: line.split()[1] for line in lines[1:]}
    return int(found.get("Rss", 0)) * 1024, int(found.get("Pss", 0)) * 1024


def _bytes_read() -> int:
    """Bytes that this process has read by system calls."""
    return int(Path("/proc/self/io").read_text().split()[1])


def _gib(num_bytes: int) -> float:
    return round(num_bytes / 2**30, 2)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


if __name__ == "__main__":
    sys.exit(main())
