"""Where the time of a step goes, from a trace of torch's profiler: ours or any other program's.

    python -m trainer.train ... --trace 3              writes RUN/trace.json.gz
    python -m trainer.timeline RUN/trace.json.gz       what each step did on the CPU and on the GPU
    python -m trainer.timeline STOCK OURS              two of them side by side; --json for programs

    trace ── trainer.events ──▶ Work, Work ... ── measure ──▶ Step, Step ... ── summary ──▶ the mean step ──▶ table

Guarantees: overlapping streams count once in busy time; nested operations count once in CPU time. What was called
outside of every step, as while the profiler starts, is in no number.
Costs: the whole trace in memory, some 2 KB an event; a few seconds for a million events. The profiler itself slows the
CPU: its times are for comparing, those of a run without it are the true ones.
"""

from pipeline.interrupt import hear, quiet_imports

if __name__ == "__main__":
    quiet_imports("\ninterrupted")

import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import tyro

from pipeline.cli import refuse_repeats
from trainer.events import SCALAR_READ, WAITS, Event, Interval, Work, interval, read, split, union

KINDS = ("matrix", "attention", "delta rule", "other", "copies")
"""Of work on the GPU, as it is shown."""

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


def analyse(events: Sequence[Event]) -> list[Step]:
    """Every step of a trace, in order. A trace without work has none."""
    return [measure(work) for work in split(events)]


def measure(work: Work) -> Step:
    """The figures of one step."""
    window, ops, calls, gpu = work.window, work.ops, work.calls, work.gpu
    busy = union(interval(event) for event in gpu)
    edges = [window[0], *(t for span in busy for t in span), window[1]]
    gaps = [max(0.0, edges[i + 1] - edges[i]) for i in range(0, len(edges), 2)]
    threads: dict[Any, list[Interval]] = defaultdict(list)
    for event in [*ops, *calls]:
        threads[event.get("tid")].append(interval(event))
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


@lru_cache(maxsize=4096)  # a trace has tens of thousands of kernels under some hundred names
def kind(kernel: str) -> str:
    """One of ``KINDS``, by the name of a kernel, copy or set."""
    return next((name for name, pattern in PATTERNS if pattern.search(kernel)), "other")


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
    ("GPU time, shares", "{:.1%}", (
        ("busy, of the step", "gpu_busy_share"), ("matrix, of all kinds", "matrix_share"),
        ("attention, of all kinds", "attention_share"),
    )),
    ("GPU operations", "{:,.0f}", (
        ("all", "num_gpu_ops"), ("kernels", "num_kernels"), ("copies to the host", "num_copies_to_host"),
    )),
)  # fmt: skip
"""Five tables of a step, the CPU's first: title, form of the numbers, rows of a label and a number of the summary."""


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
