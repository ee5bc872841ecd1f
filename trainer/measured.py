"""Records of measurements, which lie in data/records: what was measured, by which command, where, with which figures.

    path = record_path(folder, "ladder", "cuda")      # FOLDER/DATE-ladder-nvidia-h200.json
    write_whole(path, describe("ladder", figures, command=command, commit="", device="cuda", notes=""))

Costs: asks git for the commit, and nvidia-smi for the card: no memory of the GPU is taken.
"""

import json
import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from pipeline.provenance import cores, find_commit, versions

Figures = dict[str, dict[str, Any]]
"""By name, {value, unit}."""

PACKAGES = (
    "torch", "triton", "transformers", "flash-linear-attention", "causal-conv1d", "flash-qla",
    "torchao", "numpy",
)  # fmt: skip
"""Their versions go into a record."""


def record_path(folder: Path, what: str, device: str) -> Path:
    """Where a record of today, of this machine, lies; the folder is made."""
    name = re.sub(r"[^a-z0-9]+", "-", machine(device).lower()).strip("-")
    slug = name if device == "cuda" else f"{os.cpu_count()}-cores"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{datetime.now(UTC).date().isoformat()}-{what}-{slug}.json"


def describe(
    what: str, figures: Figures, *, command: str, commit: str, device: str, notes: str, num_gpus: int = 1
) -> dict[str, Any]:
    """A record.

    Args:
        what: was measured.
        figures: in its order.
        command: that measured it.
        commit: the one measured, or a file that holds it; by default the one here.
        device: cuda or cpu.
        notes: for readers.
        num_gpus: used, where there are any.
    """
    return {
        "what": what,
        "date": datetime.now(UTC).date().isoformat(),
        "command": command,
        "commit": find_commit(commit),
        "machine": machine(device),
        "num_gpus": num_gpus if device == "cuda" else 0,
        "versions": {"python": platform.python_version(), "cuda": torch.version.cuda, **versions(PACKAGES)},
        "figures": figures,
        "notes": notes,
    }


def machine(device: str) -> str:
    """Name of the machine; takes no memory of the GPU."""
    if device == "cuda":
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        found = subprocess.run(query, capture_output=True, text=True, check=False).stdout.splitlines()
        return found[0].strip() if found else "cuda"
    return cores()


def write_whole(path: Path, record: dict[str, Any]) -> None:
    """Write a record, or what one is made of, as JSON: whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)
