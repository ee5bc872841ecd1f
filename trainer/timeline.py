"""Where the time of a step goes, from a trace of torch's profiler: ours or any other program's.

    python -m trainer.train ... --trace 3              writes RUN/trace.json.gz
    python -m trainer.timeline RUN/trace.json.gz       what each step did on the CPU and on the GPU
    python -m trainer.timeline STOCK OURS              two of them side by side; --json for programs

    trace ── read ──▶ events ── split ──▶ Work, Work ... ── measure ──▶ Step, Step ... ── mean ──▶ table

A step is an annotation `ProfilerStep#N`; a trace without one counts as one step. Work on the GPU belongs to the step
that launched it, whenever it ran. A step lasts until its own last work on the GPU or CPU has ended, whichever is
later, but no longer than to the next step's first work on the GPU; then the next one begins.

Guarantees: overlapping streams count once in busy time; nested operations count once in CPU time. What was called
outside of every step, as while the profiler starts, is in no number.
Costs: the whole trace in memory, some 2 KB an event; a few seconds for a million events. The profiler itself slows the
CPU: its times are for comparing, those of a run without it are the true ones.
"""

from pipeline.interrupt import hear, quiet_imports

if __name__ == "__main__":
    quiet_imports("\ninterrupted")

import bisect
import gzip
import json
import math
import re
import sys
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import tyro

from pipeline.cli import refuse_repeats

Event = dict[str, Any]
Interval = tuple[float, float]

RUNTIME = ("cuda_runtime", "cuda_driver")
"""Categories of calls from the CPU into CUDA."""

GPU = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of work on the GPU."""

KINDS = ("matrix", "attention", "delta rule", "other", "copies")
"""Of work on the GPU, as it is shown."""

WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cuStreamSynchronize")
"""Calls in which the CPU waits for the GPU."""

SCALAR_READ = "aten::_local_scalar_dense"
"""The operation behind `.item()`, `.tolist()` of one value, `if tensor`: on a GPU it waits."""

PATTERNS = (
    ("copies", re.compile(r"^Mem(cpy|set)\b")),
    ("attention", re.compile(r"flash_(fwd|bwd|attn)|flash::|fmha|attention|sdpa|cudnn.*mha", re.I)),
    ("delta rule", re.compile(r"delta|chunk_|fused_gdr|kkt|solve_tril|recompute_w_u|local_cumsum|tilelang", re.I)),
    ("other", re.compile("trsm")),  # cuBLAS's triangular solver: none of the model's products
    ("matrix", re.compile(r"gemm|gemv|wgmma|cutlass|nvjet|cublas|xmma|splitKreduce|sm\d\d_.*(mma|tn|nt|nn)", re.I)),
)
"""Kind of work on the GPU by its name, the first that fits; the rest is `other`."""

UNNAMED = "A delta rule made of torch's general operations has no kernel of its own: its time is in other and matrix."
"""What a reader of times by kind has to know."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """What one step did; times in milliseconds."""

    wall_ms: float
    """From its begin to the next one's."""
    cpu_ms: float
    """Time in which the CPU was in some operation or CUDA call, each thread for itself, nested ones once."""
    num_ops: int
    """Operations called on the CPU, nested ones too."""
    num_runtime_calls: int
    """Calls into CUDA."""
    num_launches: int
    """Those of them that launch a kernel or a graph."""
    gpu_busy_ms: float
    """Time in which at least one thing ran on the GPU."""
    num_gpu_ops: int
    """Kernels, copies and sets."""
    num_kernels: int
    """Kernels alone."""
    gpu_idle_ms: float
    """Time of the step in which nothing ran on the GPU."""
    largest_gap_ms: float
    """The longest such time without a break."""
    kind_ms: dict[str, float]
    """Time on the GPU by kind, the sum over streams: matrix, attention, delta rule, other, copies."""
    kernels: dict[str, tuple[float, int]]
    """Time and number by name of the kernel, copies and sets too."""
    num_waits: int
    """Calls in which the CPU waited for the GPU."""
    num_scalar_reads: int
    """Values read from a tensor into Python."""
    num_copies_to_host: int
    """Copies from the GPU's memory to the CPU's."""
    waits: dict[str, int]
    """Number of waits and scalar reads by call and the operations around it, outermost first."""


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
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, RecursionError, zlib.error) as error:
        raise ValueError(
            f"{path} is no trace of torch's profiler ({type(error).__name__}: {error}). Pass what "
            "export_chrome_trace wrote, for example with python -m trainer.train --trace 3"
        ) from None


def _checked(event: Event) -> Event:
    """The event, if what is read of it is there and of its type."""
    texts = isinstance(event["name"], str) and isinstance(event.get("cat", ""), str)
    if not (texts and isinstance(event.get("args", {}), dict) and math.isfinite(event["ts"] + event.get("dur", 0))):
        raise ValueError(f"an event at {event['ts']!r} is none of the profiler's")
    return event


def analyse(events: Sequence[Event]) -> list[Step]:
    """Every step of a trace, in order. A trace without work has none."""
    return [measure(work) for work in split(events)]


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
        _interval(e) for e in by_category["user_annotation"] if str(e.get("name", "")).startswith("ProfilerStep")
    ) or [(min(e["ts"] for e in [*ops, *calls, *gpu]), max(_interval(e)[1] for e in [*ops, *calls, *gpu]))]
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


def _interval(event: Event) -> Interval:
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
        last = max((_interval(e)[1] for e in gpu_of[i]), default=end)
        if i + 1 < len(marks) and gpu_of[i + 1]:
            end = min(end, min(_interval(e)[0] for e in gpu_of[i + 1]))
        windows.append((begin, max(end, last, begin)))
        begin = windows[-1][1]
    return windows


def measure(work: Work) -> Step:
    """The figures of one step."""
    window, ops, calls, gpu = work.window, work.ops, work.calls, work.gpu
    busy = union(_interval(event) for event in gpu)
    edges = [window[0], *(t for interval in busy for t in interval), window[1]]
    gaps = [max(0.0, edges[i + 1] - edges[i]) for i in range(0, len(edges), 2)]
    threads: dict[Any, list[Interval]] = defaultdict(list)
    for event in [*ops, *calls]:
        threads[event.get("tid")].append(_interval(event))
    kernels: dict[str, tuple[float, int]] = {}
    kinds: dict[str, float] = defaultdict(float)
    for event in gpu:
        milliseconds = float(event.get("dur", 0)) / 1e3
        time, count = kernels.get(event["name"], (0.0, 0))
        kernels[event["name"]] = (time + milliseconds, count + 1)
        kinds[kind(event["name"])] += milliseconds
    return Step(
        wall_ms=(window[1] - window[0]) / 1e3,
        cpu_ms=sum(end - begin for found in threads.values() for begin, end in union(found)) / 1e3,
        num_ops=len(ops),
        num_runtime_calls=len(calls),
        num_launches=sum("Launch" in event["name"] for event in calls),
        gpu_busy_ms=sum(end - begin for begin, end in busy) / 1e3,
        num_gpu_ops=len(gpu),
        num_kernels=sum(event["cat"] == "kernel" for event in gpu),
        gpu_idle_ms=sum(gaps) / 1e3,
        largest_gap_ms=max(gaps) / 1e3,
        kind_ms=dict(kinds),
        kernels=kernels,
        num_waits=sum(event["name"] in WAITS for event in work.waits),
        num_scalar_reads=sum(event["name"] == SCALAR_READ for event in work.waits),
        num_copies_to_host=sum("DtoH" in event["name"] for event in gpu),
        waits=dict(Counter(event["where"] for event in work.waits)),
    )


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time without overlaps: (0, 2) (1, 3) (5, 6) -> (0, 3) (5, 6)."""
    merged: list[list[float]] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([begin, end])
    return [(begin, end) for begin, end in merged]


@lru_cache(maxsize=4096)  # a trace has tens of thousands of kernels under some hundred names
def kind(kernel: str) -> str:
    """One of ``KINDS``, by the name of a kernel, copy or set."""
    return next((name for name, pattern in PATTERNS if pattern.search(kernel)), "other")


def _waits(calls: list[Event], ops: list[Event], around: list[Event]) -> list[Event]:
    """Waiting calls and scalar reads, each with `where`: the operations around it, outermost first."""
    found = [e for e in calls if e["name"] in WAITS] + [e for e in ops if e["name"] == SCALAR_READ]
    threads: dict[Any, list[tuple[Interval, str]]] = defaultdict(list)
    for event in around:
        threads[event.get("tid")].append((_interval(event), event["name"]))
    located = []
    open_ops: dict[Any, list[tuple[Interval, str]]] = defaultdict(list)
    position: dict[Any, int] = defaultdict(int)
    for spans in threads.values():
        spans.sort(key=lambda span: (span[0][0], -span[0][1]))
    for event in sorted(found, key=lambda e: (str(e.get("tid")), float(e["ts"]))):
        tid, (begin, end) = event.get("tid"), _interval(event)
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


def summary(steps: Sequence[Step], *, top: int = 12) -> dict[str, Any]:
    """The mean step as JSON values; kernels and waits of all steps together, divided by their number."""
    count = len(steps)
    numbers = [name for name, value in asdict(steps[0]).items() if isinstance(value, int | float)]
    mean: dict[str, Any] = {name: sum(getattr(s, name) for s in steps) / count for name in numbers}
    mean["num_cpu_calls"] = mean["num_ops"] + mean["num_runtime_calls"]
    kinds: dict[str, float] = defaultdict(float)
    kernels: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    waits: dict[str, float] = defaultdict(float)
    for step in steps:
        for name, time in step.kind_ms.items():
            kinds[name] += time / count
        for name, (time, number) in step.kernels.items():
            kernels[name][0] += time / count
            kernels[name][1] += number / count
        for name, number in step.waits.items():
            waits[name] += number / count
    total = sum(kinds.values())
    return {
        "num_steps": count,
        **{name: round(value, 3) for name, value in mean.items()},
        "gpu_busy_share": _share(mean["gpu_busy_ms"], mean["wall_ms"]),
        "kind_ms": {name: round(value, 3) for name, value in kinds.items()},
        "matrix_share": _share(kinds.get("matrix", 0.0), total),
        "attention_share": _share(kinds.get("attention", 0.0), total),
        "top_kernels": [
            {"name": name, "ms": round(time, 3), "count": round(number, 1), "share": _share(time, total)}
            for name, (time, number) in sorted(kernels.items(), key=lambda item: -item[1][0])[:top]
        ],
        "waits": {name: round(number, 2) for name, number in sorted(waits.items(), key=lambda item: -item[1])},
        "steps": [{name: round(getattr(step, name), 3) for name in numbers} for step in steps],
    }


def _share(part: float, whole: float) -> float:
    return round(part / whole, 4) if whole else 0.0


TABLES = (
    ("CPU time, ms", "{:,.1f}", (("in operations and calls", "cpu_ms"), ("the whole step", "wall_ms"))),
    ("CPU calls", "{:,.0f}", (
        ("all", "num_cpu_calls"), ("operations", "num_ops"), ("calls into CUDA", "num_runtime_calls"),
        ("of them launches", "num_launches"), ("waits for the GPU", "num_waits"), ("values read", "num_scalar_reads"),
    )),
    ("GPU time, ms", "{:,.1f}", (
        ("busy", "gpu_busy_ms"), ("idle", "gpu_idle_ms"), ("longest gap", "largest_gap_ms"),
        *((kind, f"kind_ms.{kind}") for kind in KINDS),
    )),
    ("GPU operations", "{:,.0f}", (
        ("all", "num_gpu_ops"), ("kernels", "num_kernels"), ("copies to the host", "num_copies_to_host"),
    )),
)  # fmt: skip
"""Four tables of a step: title, form of the numbers, then rows of a label and a number of the summary."""


def number(summary: Mapping[str, Any], name: str) -> float:
    """A number of a summary; one of a kind as ``kind_ms.matrix``, 0 where nothing of the kind ran."""
    group, _, inner = name.partition(".")
    return float(summary[group].get(inner, 0.0) if inner else summary[group])


def table(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Traces side by side, then each one's kernels and waits; ``found`` is summary by name."""
    width = max(14, *(len(name) + 2 for name in found))
    lines = ["the mean step".ljust(26) + "".join(name.rjust(width) for name in found)]
    lines.append("steps in the trace".ljust(26) + "".join(f"{s['num_steps']:,}".rjust(width) for s in found.values()))
    for title, form, rows in TABLES:
        lines.append(title)
        lines += [f"  {label}".ljust(26) + "".join(form.format(number(s, name)).rjust(width) for s in found.values())
                  for label, name in rows]  # fmt: skip
    lines += [UNNAMED] if any(s["num_gpu_ops"] for s in found.values()) else []
    for name, one in found.items():
        lines.append(f"\n{name}: kernels by time")
        lines += [f"  {k['ms']:10.3f} ms {k['share']:6.1%} {k['count']:9,.0f} x  {k['name'][:90]}"
                  for k in one["top_kernels"]]  # fmt: skip
        lines.append(f"{name}: where the CPU waits or reads a value" + ("" if one["waits"] else ": nowhere"))
        lines += [f"  {number:7,.1f} x  {where}" for where, number in list(one["waits"].items())[:20]]
    return "\n".join(lines)


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What the steps of a torch program did on CPU and GPU, from traces of torch's profiler."""

    traces: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """One trace, or several to be put side by side."""
    top: int = 12
    """How many kernels are listed."""
    json: bool = False
    """Print JSON."""


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0, 2 for a file that is no trace, 130 after Ctrl-C."""
    hear()
    settings = tyro.cli(Settings, prog="python -m trainer.timeline", args=args, config=(tyro.conf.FlagCreatePairsOff,))
    refuse_repeats(Settings, arguments=args)
    found: dict[str, dict[str, Any]] = {}
    try:
        if not settings.traces:
            raise ValueError("no trace given: pass one or several files")
        for path in settings.traces:
            steps = analyse(read(path))
            if not steps:
                raise ValueError(f"{path} has no operation and no kernel in it: was the profiler given activities?")
            name = path.name if path.name not in found else str(path)
            found[name] = summary(steps, top=settings.top)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    print(json.dumps(found, indent=1) if settings.json else table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
