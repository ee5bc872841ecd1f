"""What a run left behind, read without torch: ``config.json`` and ``metrics.jsonl`` of one folder.

    read(Path("runs/NAME")) -> Run(config, steps: columns of numbers, evaluations, what could not be read)

Guarantees: a log is read whatever a kill, an older version or an editor made of it; every line that is not used is
counted, with its number. A step that was logged twice counts once, as it was logged last.
Costs: 2 s for 100,000 steps.
"""

import json
import math
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

CONFIG, METRICS, TRACE, LOCK = "config.json", "metrics.jsonl", "trace.json.gz", ".lock"
"""Names of the files in a run's folder, for those who write them too."""

VERSIONS = (1,)
"""Versions of ``config.json`` that are understood."""

FIELDS: Mapping[str, tuple[str, str, float]] = {
    "loss": ("loss, nats", "{:,.4f}", 1),
    "eval_loss": ("evaluation loss, nats", "{:,.4f}", 1),
    "lr": ("learning rate", "{:.3g}", 1),
    "grad_norm": ("gradient norm", "{:,.4g}", 1),
    "tokens_per_s": ("tokens a second", "{:,.0f}", 1),
    "mfu": ("MFU", "{:.2%}", 1),
    "hfu": ("HFU", "{:.2%}", 1),
    "peak_gib": ("peak memory, GiB", "{:,.2f}", 1),
    "step_s": ("step time, s", "{:,.4g}", 1),
    "data_wait_s": ("data wait, ms", "{:,.3f}", 1e3),
    "tokens": ("tokens a step", "{:,.0f}", 1),
    "targets": ("targets a step", "{:,.0f}", 1),
    "rows_seen": ("rows seen", "{:,.0f}", 1),
}
"""Fields of the log's lines as they are shown: what each is, its form, and what it is multiplied by before."""

COLUMNS = tuple(name for name in FIELDS if name != "eval_loss")
"""Fields of a step's line; an evaluation's has ``eval_loss``."""

TIMES = ("step_s", "data_wait_s")
"""Those of them that are no number below 0."""

MOST_STEPS = 10**12
"""A larger number of a step is no number of a step."""

GREATEST = 1e100
"""A number beyond it counts as none: sums and products of the others are finite."""

PARTS: Mapping[str, type] = {
    "settings": dict, "model": dict, "versions": dict, "machine": dict, "memory_estimate_bytes": dict, "kernels": list,
    "earlier": list,
}  # fmt: skip
"""Fields of ``config.json`` and what each has to be, where there is one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One run's folder."""

    path: Path
    """The folder."""
    name: str
    """The folder's own name."""
    config: dict[str, Any]
    """``config.json``, with every field of ``PARTS``; the other fields may lack, as all do where there is no file."""
    has_config: bool
    """Whether there is one."""
    step: Ints
    """Numbers of the steps, ascending, [S]."""
    columns: dict[str, Floats]
    """By name of the field, [S]: the numbers, NaN where a line has none; fields that some line has."""
    skipped: Ints
    """Steps without a target: nothing was updated in them."""
    not_finite: Ints
    """Steps with a value that is no finite number where one belongs."""
    eval_step: Ints
    """Steps after which an evaluation was made, ascending, [E]; 0 for before the first."""
    eval_loss: Floats
    """Its loss, [E]; NaN for none."""
    unused_lines: tuple[int, ...]
    """Numbers, from 1, of lines that are neither a step nor an evaluation."""
    cut: bool
    """The last line was cut, as by a kill; it is none of ``unused_lines``."""
    changed: float
    """When either file was last written, seconds since 1970."""
    is_alive: bool | None
    """Whether the process that writes here lives; None where this machine cannot tell."""

    def has(self, name: str) -> bool:
        """Whether some line has the field."""
        return name in self.columns

    def column(self, name: str) -> Floats:
        """The numbers of a field, [S]; NaN where it was not recorded."""
        return self.columns.get(name, np.full(self.step.size, math.nan))


def read(path: Path) -> Run:
    """Read a run's folder.

    Raises:
        ValueError: there is no such folder, neither file is in it, or its ``config.json`` is damaged.
    """
    config, log = path / CONFIG, path / METRICS
    if not path.is_dir():
        raise ValueError(f"{path} is no folder. Pass the folder of a run, as python -m trainer.train printed it")
    if not config.exists() and not log.exists():
        raise ValueError(f"{path} holds neither {CONFIG} nor {METRICS}, so no run began there. Pass a run's folder")
    has_config = config.exists()
    found = read_config(config) if has_config else {}
    steps, evaluations, unused, cut = _lines(log)
    step = np.array(sorted(steps), np.int64)
    lines = [steps[number] for number in step.tolist()]
    columns, is_broken = _columns(lines)
    return Run(
        path=path,
        name=path.resolve().name,
        config={name: kind() for name, kind in PARTS.items()} | found,
        has_config=has_config,
        step=step,
        columns=columns,
        skipped=step[np.array(["loss" in line and line["loss"] is None for line in lines], bool)],
        not_finite=step[is_broken],
        eval_step=np.array(sorted(evaluations), np.int64),
        eval_loss=np.array([number(evaluations[after]) for after in sorted(evaluations)], np.float64),
        unused_lines=unused,
        cut=cut,
        changed=max(file.stat().st_mtime for file in (config, log) if file.exists()),
        is_alive=_is_alive(path / LOCK),
    )


def _is_alive(lock: Path) -> bool | None:
    """Whether the process named in a run's lock lives, if it is this machine's; the lock itself is not touched.

    Another process that has its number by now is taken for it.
    """
    try:
        found = re.fullmatch(r"process ([1-9]\d{0,8}) on (.+)\n", lock.read_text(encoding="utf-8"))
        if found is None or found[2] != platform.node():
            return None
        os.kill(int(found[1]), 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    except (OSError, ValueError):
        return None
    return True


def _columns(lines: list[dict[str, Any]]) -> tuple[dict[str, Floats], npt.NDArray[np.bool_]]:
    """The numbers of every field that some line has; which lines have something else where a number belongs."""
    columns, is_broken = {}, np.zeros(len(lines), bool)
    for name in COLUMNS:
        if any(name in line for line in lines):
            values = [line.get(name) for line in lines]
            held = np.array([number(value) for value in values])
            columns[name] = np.where(held < 0, math.nan, held) if name in TIMES else held
            is_broken |= np.isnan(columns[name]) & np.array([value is not None for value in values])
    return columns, is_broken


def read_config(path: Path) -> dict[str, Any]:
    """``config.json`` as far as its parts are what they have to be.

    Raises:
        ValueError: naming what is wrong with it.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("it holds no object")
        if found.get("version") not in VERSIONS:
            raise ValueError(f"version {found.get('version')!r} is not one of {VERSIONS}")
        for name, kind in PARTS.items():
            if not isinstance(found.get(name, kind()), kind):
                raise ValueError(f"its field {name!r} is {type(found[name]).__name__}, not {kind.__name__}")
        for name in ("kernels", "earlier"):
            if not all(isinstance(item, dict) for item in found.get(name, [])):
                raise ValueError(f"its field {name!r} holds something else than objects")
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} cannot be read ({type(error).__name__}: {error}). Restore it, or move it away to see the metrics "
            "alone"
        ) from None
    return found


def _lines(path: Path) -> tuple[dict[int, dict[str, Any]], dict[int, Any], tuple[int, ...], bool]:
    """Lines of steps and losses of evaluations by step; numbers of other lines; whether the last one was cut."""
    steps: dict[int, dict[str, Any]] = {}
    evaluations: dict[int, Any] = {}
    unused: list[int] = []
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    lines = text.split("\n")
    for place, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        found = _object(line)
        step = whole(found.get("step"))
        if step is None:
            unused.append(place)
        elif "eval_loss" in found:
            evaluations[step] = found["eval_loss"]
        else:
            steps[step] = found
    cut = bool(unused) and unused[-1] == len(lines)  # a whole line has a line break, and nothing after it
    return steps, evaluations, tuple(unused[:-1] if cut else unused), cut


def _object(line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def number(value: Any) -> float:
    """A number that can be counted with, or NaN for anything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and -GREATEST <= value <= GREATEST else math.nan


def whole(value: Any) -> int | None:
    """A count of steps or layers, or None for anything else."""
    is_count = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_STEPS
    return value if is_count else None
