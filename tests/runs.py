"""Folders of made-up runs, and the pages that trainer.report makes of them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.parsed import Parsed, cells
from trainer.report.__main__ import main

LAYERS = 4


def config(**changes: Any) -> dict[str, Any]:
    """The ``config.json`` of a small run; ``settings`` are merged."""
    settings = {"shards": "nowhere", "steps": 10, "epochs": 1, "lr": 0.001, "clip": 1.0, "recompute": "2",
                "warmup_steps": 0, "out": "runs/x"}  # fmt: skip
    base: dict[str, Any] = {
        "version": 1,
        "time": "2026-01-02T03:04:05+00:00",
        "settings": settings | changes.pop("settings", {}),
        "dataset_id": "d" * 64,
        "fingerprint": "f" * 64,
        "eval_dataset_id": None,
        "eval_fingerprint": None,
        "model": {"num_hidden_layers": LAYERS, "rope_parameters": {"rope_theta": 1e7}},
        "versions": {"python": "3.11.7", "torch": "2.13.0"},
        "commit": "c" * 40,
        "machine": {"device": "NVIDIA H200", "ranks": 1},
        "kernels": [kernel("attention"), kernel("loss")],
        "memory_estimate_bytes": {"weights": 3 * 2**30, "activations": 5 * 2**30},
        "earlier": [],
    }
    return base | changes


def kernel(operation: str, **changes: Any) -> dict[str, Any]:
    base = {"operation": operation, "implementation": "torch reference", "version": "2.13.0", "why": "first choice"}
    return base | changes


def step(number: int, **changes: Any) -> dict[str, Any]:
    """A step's line; None as a change leaves the field out."""
    line: dict[str, Any] = {
        "step": number, "rows_seen": 8 * number, "tokens": 500 + number, "targets": 400 + number,
        "loss": 5 - 0.01 * number, "lr": 0.001,
        "grad_norm": 0.5 + (number % 3), "tokens_per_s": 1000.0 + number, "step_s": 0.5 + 0.01 * (number % 7),
        "data_wait_s": 0.001, "mfu": 0.5, "hfu": 0.6, "peak_gib": 6.5,
    }  # fmt: skip
    return {name: value for name, value in (line | changes).items() if value is not None or name not in changes}


def write(folder: Path, lines: list[Any] | None, written: dict[str, Any] | None = None) -> Path:
    """A run's folder; ``lines`` are JSON values, or text as it is. None leaves a file out."""
    folder.mkdir(parents=True, exist_ok=True)
    if written is not None:
        (folder / "config.json").write_text(json.dumps(written))
    if lines is not None:
        texts = [line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines]
        (folder / "metrics.jsonl").write_text("".join(texts))
    return folder


def report(*arguments: str | Path) -> str:
    """Run the command; the page."""
    assert main([str(a) for a in arguments]) == 0
    words = [str(a) for a in arguments]
    out = Path(words[words.index("--out") + 1]) if "--out" in words else Path(words[0]) / "report.html"
    page = out.read_bytes()
    Parsed(page)  # every element is closed
    return page.decode()


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, Any]:
    """What ``--json`` prints."""
    capsys.readouterr()
    assert main([*map(str, arguments), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def tables(page: str) -> dict[str, list[list[str]]]:
    """Rows of each table by its caption, the header first."""
    parts = re.findall(r"<table.*?</table>", page, re.S)
    return {"".join(Parsed(re.findall(r"<caption>.*?</caption>", part)[0]).texts): cells(part) for part in parts}


def tiles(page: str) -> dict[str, list[str]]:
    """Texts of each headline number by its name."""
    block = page[page.index('<dl class="tiles">') :].split("</dl>")[0]
    return {
        name: re.findall(r"<dd>(.*?)</dd>", rest)
        for name, rest in re.findall(r"<div><dt>(.*?)</dt>(.*?)</div>", block, re.S)
    }
