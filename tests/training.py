"""Whole runs of a tiny model: how they are started, and what they leave."""

import contextlib
import hashlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

from tests.packed import make_packed, random_rows, with_byte_tokenizer
from tests.tiny import tiny_config
from trainer import checkpoint, train
from trainer.metrics import Metrics

ROOT = Path(__file__).resolve().parents[1]
VOCAB = 300
T = 32

LONG = ("--eval-shards", "EVAL", "--epochs", "3", "--save-every", "2", "--eval-every", "3", "--warmup-steps", "2")
"""8 steps, the last of 2 rows; checkpoints after 2, 4, 6, 8; evaluations at 0, 3, 6, 8."""

SHORT = ("--steps", "4", "--save-every", "2", "--warmup-steps", "1")
BF16 = ("--precision", "bf16", "--recompute", "1")
LORA = ("--method", "lora", "--lora-rank", "4", "--lora-alpha", "8")

OF_TIME_AND_MEMORY = ("tokens_per_s", "step_s", "data_wait_s")
"""Fields of a CPU's metrics that no two runs have in common."""


def packed(path: Path, *, num_rows: int = 10, max_tokens: int = T, seed: int = 0, **options: Any) -> Path:
    """A dataset whose tokenizer transformers can load: 256 bytes, no merges."""
    rows = random_rows(num_rows=num_rows, max_tokens=max_tokens, vocab_size=VOCAB, seed=seed)
    make_packed(path, rows, max_tokens=max_tokens, **({"vocab_size": VOCAB} | options))
    return with_byte_tokenizer(path)


def make_base(folder: Path) -> Path:
    """Rows to train on, rows to evaluate on and a configuration in ``folder``."""
    packed(folder / "packed")
    packed(folder / "eval", num_rows=3, max_tokens=48, seed=1)
    config = tiny_config(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, head_dim=16, num_hidden_layers=2,
                         layer_types=["linear_attention", "full_attention"])  # fmt: skip
    (folder / "tiny.json").write_text(json.dumps(config.to_dict()))
    return folder


def arguments(base: Path, out: Path, *more: str) -> list[str]:
    """The command's options with those of ``more`` in place of what they repeat."""
    return once(
        "--shards", str(base / "packed"), "--model", f"random:{base / 'tiny.json'}", "--rows-per-step", "4",
        "--lr", "1e-2", "--out", str(out), *more,
    )  # fmt: skip


def once(*words: str) -> list[str]:
    """A command line in which the last of each option counts, as the commands refuse to have it twice."""
    starts = [i for i, word in enumerate(words) if word.startswith("--")]
    options = [words[i:j] for i, j in zip(starts, [*starts[1:], len(words)], strict=True)]
    last = {" ".join(option) if option[0] == "--track" else option[0]: option for option in options}
    return [*words[: starts[0]], *(word for option in last.values() for word in option)]


def long(base: Path) -> list[str]:
    return [str(base / "eval") if word == "EVAL" else word for word in LONG]


def run(base: Path, out: Path, *more: str) -> int:
    return train.main(arguments(base, out, *more))


def trainer(*words: str) -> subprocess.Popen[str]:
    """The command in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "trainer.train", *words],
        cwd=ROOT, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def wait_for_checkpoint(process: subprocess.Popen[str], out: Path, *, step: int) -> None:
    """Wait until there is one of that step or a later one, or the process has ended."""
    deadline = time.monotonic() + 600
    while process.poll() is None and time.monotonic() < deadline:
        if any(path.name >= f"step-{step:08d}" for path in checkpoint.steps(out)):
            return
        time.sleep(0.005)


def on_two_ranks(words: list[str]) -> list[int]:
    """The exit statuses of the command on two ranks that train together."""
    port = free_port()
    with mp.get_context("spawn").Pool(2) as pool:
        found = pool.starmap_async(_rank, [(rank, words, port) for rank in range(2)], chunksize=1)
        return found.get(timeout=600)


def free_port() -> int:
    """A port that nobody uses, below those that the system hands out: nothing takes it before rank 0 does."""
    for attempt in range(100):
        port = 10_000 + (97 * os.getpid() + attempt) % 20_000
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
            return port
    raise OSError("no free port")


def _rank(rank: int, words: list[str], port: int) -> int:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", LOCAL_RANK=str(rank),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    return train.main(words)


def interrupt_after(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    original = Metrics.step

    def interrupted(self: Metrics, result: Any, *, rows_seen: int) -> None:
        original(self, result, rows_seen=rows_seen)
        if result.step == step:
            raise KeyboardInterrupt

    monkeypatch.setattr(Metrics, "step", interrupted)


def metrics(out: Path) -> list[dict[str, Any]]:
    """What is the same in every run of the same settings."""
    found = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in OF_TIME_AND_MEMORY} for line in found]


def final_bytes(out: Path) -> dict[str, str]:
    """Hashes of the newest checkpoint and of the export: weights, moments, place in the data."""
    newest = checkpoint.latest(out)
    assert newest is not None
    files = [newest / name for name in ("model.safetensors", "optimizer.safetensors", "state.json")]
    files.append(out / "export" / "model.safetensors")
    return {f"{file.parent.name}/{file.name}": hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
