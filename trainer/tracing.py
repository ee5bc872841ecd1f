"""Traces of some steps by torch's profiler, while a program runs; `trainer.timeline` reads them.

    with tracer(path, first=3, num_steps=2) as trace:
        for ... :
            ...
            trace.step()

Guarantees: the file is whole or not there; the profiler itself prints nothing. Costs: nothing without a path; traced
steps are slower on the CPU.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch


class Tracer(Protocol):
    """What the loop calls."""

    def step(self) -> None:
        """A step has ended."""


class _Nothing:
    def step(self) -> None:
        """Nothing is traced."""


@contextmanager
def tracer(path: Path | None, *, first: int, num_steps: int) -> Iterator[Tracer]:
    """Trace ``num_steps`` steps after the ``first`` ones and write them to ``path``, as soon as they are done.

    Args:
        path: `*.json` or `*.json.gz`; None traces nothing and costs nothing.
        first: steps before the first one traced, at least 1: the profiler warms up in the last of them.
        num_steps: how many are traced. Fewer where the loop ends before; no file where it never got there.
    """
    if path is None or num_steps < 1:
        yield _Nothing()
        return
    target = path
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or its own messages break the live line; read when it starts
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)

    def write(profiler: torch.profiler.profile) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".tmp-{target.name}")
        profiler.export_chrome_trace(str(temporary))
        temporary.replace(target)

    schedule = torch.profiler.schedule(wait=max(0, first - 1), warmup=1, active=num_steps, repeat=1)
    with torch.profiler.profile(
        activities=activities,
        schedule=schedule,
        on_trace_ready=write,
        acc_events=True,  # without it torch warns
    ) as profiler:
        yield profiler
