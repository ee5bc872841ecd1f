"""The events of a trace of torch's profiler, sorted into the steps they belong to.

    trace ── read ──▶ events ── split ──▶ Work, Work ...

A step is an annotation `ProfilerStep#N`; a trace without one counts as one step. Work on the GPU belongs to the step
that launched it, whenever it ran. A step lasts until its own last work on the GPU or CPU has ended, whichever is
later, but no longer than to the next step's first work on the GPU; then the next one begins.

Guarantees: every event is checked before anything is made of it; what was called outside of every step, as while the
profiler starts, is in none. Costs: the whole trace in memory, some 2 KB an event.
"""

import bisect
import gzip
import json
import math
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Event = dict[str, Any]
Interval = tuple[float, float]

RUNTIME = ("cuda_runtime", "cuda_driver")
"""Categories of calls from the CPU into CUDA."""

GPU = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of work on the GPU."""

WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cuStreamSynchronize")
"""Calls in which the CPU waits for the GPU."""

SCALAR_READ = "aten::_local_scalar_dense"
"""The operation behind `.item()`, `.tolist()` of one value, `if tensor`: on a GPU it waits."""


def read(path: Path) -> list[Event]:
    """The events with a duration of a chrome trace, plain or gzipped.

    Raises:
        ValueError: it is no such file.
    """
    try:
        raw = path.read_bytes()
        found = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
        events = found["traceEvents"] if isinstance(found, dict) else found
        return [_checked(event) for event in events if event.get("ph") == "X"]
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError,
            zlib.error) as error:  # fmt: skip
        raise ValueError(
            f"{path} is no trace of torch's profiler ({type(error).__name__}: {error}). Pass what "
            "export_chrome_trace wrote, for example with python -m trainer.train --trace 3"
        ) from None


def _checked(event: Event) -> Event:
    """The event, if what is read of it is there and of its type."""
    texts = isinstance(event["name"], str) and isinstance(event.get("cat", ""), str)
    plain = isinstance(event.get("args", {}), dict) and all(
        isinstance(found, int | float | str | None) for found in (event.get("tid"), _correlation(event))
    )
    if not (texts and plain and math.isfinite(event["ts"] + event.get("dur", 0))):
        raise ValueError(f"an event at {event['ts']!r} is none of the profiler's")
    return event


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """The events of one step."""

    window: Interval
    """Its begin and end, microseconds of the trace's clock."""
    ops: list[Event]
    """Operations on the CPU."""
    calls: list[Event]
    """Calls into CUDA."""
    gpu: list[Event]
    """Kernels, copies and sets."""
    waits: list[Event]
    """Calls that wait and scalar reads, each with `where`: the operations around it."""


def split(events: Sequence[Event]) -> list[Work]:
    """The work of every step, in order; none where the trace has none."""
    by_category: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        by_category[event.get("cat", "")].append(event)
    ops = by_category["cpu_op"]
    calls = [event for name in RUNTIME for event in by_category[name]]
    gpu = [event for name in GPU for event in by_category[name]]
    if not (ops or calls or gpu):
        return []
    marks = sorted(
        interval(e) for e in by_category["user_annotation"] if str(e.get("name", "")).startswith("ProfilerStep")
    ) or [(min(e["ts"] for e in [*ops, *calls, *gpu]), max(interval(e)[1] for e in [*ops, *calls, *gpu]))]
    named = [e for e in by_category["user_annotation"] if not str(e.get("name", "")).startswith("ProfilerStep")]
    launched = {_correlation(e): float(e["ts"]) for e in calls if _correlation(e) is not None}
    ops_of, calls_of = (_by_step(found, marks, lambda e: float(e["ts"])) for found in (ops, calls))
    gpu_of = _by_step(gpu, marks, lambda e: launched.get(_correlation(e), float(e["ts"])))
    windows = _windows(marks, gpu_of)
    waits_of = _by_step(_waits(calls, ops, [*ops, *named]), marks, lambda e: float(e["ts"]))
    return [
        Work(window=windows[i], ops=ops_of[i], calls=calls_of[i], gpu=gpu_of[i], waits=waits_of[i])
        for i in range(len(marks))
    ]


def interval(event: Event) -> Interval:
    """Begin and end, microseconds of the trace's clock."""
    return float(event["ts"]), float(event["ts"]) + float(event.get("dur", 0))


def _correlation(event: Event) -> Any:
    return event.get("args", {}).get("correlation")


def _by_step(events: Iterable[Event], marks: list[Interval], when: Callable[[Event], float]) -> list[list[Event]]:
    """Events by the step in whose annotation their time lies; those outside of any are left out."""
    found: list[list[Event]] = [[] for _ in marks]
    for event in events:
        time = when(event)
        index = bisect.bisect_right(marks, time, key=lambda mark: mark[0]) - 1
        if index >= 0 and time <= marks[index][1]:
            found[index].append(event)
    return found


def _windows(marks: list[Interval], gpu_of: list[list[Event]]) -> list[Interval]:
    """Begin and end of each step, one after the other without overlap."""
    windows: list[Interval] = []
    begin = marks[0][0]
    for i, (_, end) in enumerate(marks):
        last = max((interval(e)[1] for e in gpu_of[i]), default=end)
        if i + 1 < len(marks) and gpu_of[i + 1]:
            end = min(end, min(interval(e)[0] for e in gpu_of[i + 1]))
        windows.append((begin, max(end, last, begin)))
        begin = windows[-1][1]
    return windows


def _waits(calls: list[Event], ops: list[Event], around: list[Event]) -> list[Event]:
    """Waiting calls and scalar reads, each with `where`: the operations around it, outermost first."""
    found = [e for e in calls if e["name"] in WAITS] + [e for e in ops if e["name"] == SCALAR_READ]
    threads: dict[Any, list[tuple[Interval, str]]] = defaultdict(list)
    for event in around:
        threads[event.get("tid")].append((interval(event), event["name"]))
    located = []
    open_ops: dict[Any, list[tuple[Interval, str]]] = defaultdict(list)
    position: dict[Any, int] = defaultdict(int)
    for spans in threads.values():
        spans.sort(key=lambda span: (span[0][0], -span[0][1]))
    for event in sorted(found, key=lambda e: (str(e.get("tid")), float(e["ts"]))):
        tid, (begin, end) = event.get("tid"), interval(event)
        spans, stack = threads[tid], open_ops[tid]
        while position[tid] < len(spans) and spans[position[tid]][0][0] <= begin:
            span = spans[position[tid]]
            while stack and stack[-1][0][1] < span[0][1]:
                stack.pop()  # ended before this one, or cannot hold it
            stack.append(span)
            position[tid] += 1
        chain = [name for (first, last), name in stack if first <= begin and last >= end and name != event["name"]]
        located.append({**event, "where": " > ".join([*chain, event["name"]])})
    return located


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time without overlaps: (0, 2) (1, 3) (5, 6) -> (0, 3) (5, 6)."""
    merged: list[list[float]] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([begin, end])
    return [(begin, end) for begin, end in merged]
