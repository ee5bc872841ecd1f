"""A page's part about traces: four tables, a picture of one step, the longest kernels, where the CPU waits.

    traces = [load(path) for path in paths]      one, or two: before and after
    section = trace_section(traces)

Guarantees: the tables hold the numbers that ``python -m trainer.timeline --json`` prints.
Costs: what reading a trace costs: 2 s for the 64 layers of a 27B, 15 s and 1.6 GB for 280 MB of JSON.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.page import Markup, element, facts, section, table
from trainer import timeline
from trainer.report.charts import roomy, side_by_side
from trainer.report.lanes import KINDS, Lanes, draw, picture

TOP = 15
"""Kernels listed."""
NAME = 90
"""Characters shown of a kernel's name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """What one trace says."""

    path: Path
    """Where it lies."""
    summary: Mapping[str, Any]
    """As ``timeline.summary`` makes it: the mean step."""
    lanes: Lanes
    """The picture of its middle step."""


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
"""The four tables: title, form of the numbers, then rows of a label and a number of the summary."""


def load(path: Path) -> Trace:
    """Read and analyse one trace.

    Raises:
        ValueError: it is none, or holds no work.
    """
    works = timeline.split(timeline.read(path))
    if not works:
        raise ValueError(f"{path} has no operation and no kernel in it: was the profiler given activities?")
    steps = [timeline.measure(work) for work in works]
    return Trace(path=path, summary=timeline.summary(steps, top=TOP), lanes=picture(works))


def number(summary: Mapping[str, Any], name: str) -> float:
    """A number of a summary; one of a kind as ``kind_ms.matrix``, 0 where nothing of the kind ran."""
    group, _, inner = name.partition(".")
    return float(summary[group].get(inner, 0.0) if inner else summary[group])


def trace_section(traces: Sequence[Trace]) -> Markup:
    """The section of one trace, or of two: before and after."""
    names = ["before", "after"] if len(traces) == 2 else ["the step"]
    named = list(zip(names, traces, strict=True))
    on_gpu = any(trace.summary["num_gpu_ops"] for trace in traces)
    shown = TABLES if on_gpu else TABLES[:2]
    return section(
        "Where the time goes",
        facts((name, f"{trace.path}, {_steps(trace.summary['num_steps'])}") for name, trace in named),
        *([] if on_gpu else [element("p", "Nothing ran on a GPU.", class_="note")]),
        draw({name: trace.lanes for name, trace in named}),
        side_by_side(*(_table(title, form, rows, names, traces) for title, form, rows in shown)),
        *(_kernels(name, trace) for name, trace in named if on_gpu),
        *(_waits(name, trace) for name, trace in named),
        note="From the profiler's trace. It slows the CPU down: its times are for comparing, the true ones are above. "
        "Numbers are those of the mean step, a ratio is after / before; kinds are told apart by the kernels' names.",
        id="time",
    )


def _steps(num: int) -> str:
    return "one step" if num == 1 else f"{num:,} steps"


def _table(
    title: str, form: str, rows: Sequence[tuple[str, str]], names: Sequence[str], traces: Sequence[Trace]
) -> Markup:
    """A row each with its number in every trace, and what the last is of the first."""
    header = ("", *names, *(("ratio",) if len(traces) == 2 else ()))
    body = []
    for label, name in rows:
        values = [number(trace.summary, name) for trace in traces]
        ratio = [_ratio(*values)] if len(values) == 2 else []
        body.append((label, *map(form.format, values), *ratio))
    return table(header, body, caption=title, numeric=range(1, len(header)))


def _ratio(before: float, after: float) -> str:
    """Two digits behind the point, or one that says something."""
    if not before:
        return ""
    return f"{after / before:,.2f}" if after >= before / 100 or not after else f"{after / before:.1g}"


def _kernels(name: str, trace: Trace) -> Markup:
    rows = [
        (
            f"{k['ms']:,.1f}",
            f"{k['share']:.1%}",
            f"{k['count']:,.0f}",
            _unbroken(timeline.kind(k["name"])),
            roomy(_short(k["name"])),
        )
        for k in trace.summary["top_kernels"]
    ]
    title = f"Kernels by time: {name}"
    if not rows:
        return element("p", f"{title}: none ran.", class_="note")
    return table(("ms", "share", "times", "kind", "name"), rows, caption=title, numeric=(0, 1, 2))


def _unbroken(text: str) -> str:
    return text.replace(" ", "\u00a0")


def _short(name: str) -> str:
    """A kernel's name without what every template brings along: ``void at::native::(anonymous namespace)::f<...>``."""
    plain = name.removeprefix("void ").replace("(anonymous namespace)::", "").replace("at::native::", "")
    return plain if len(plain) <= NAME else plain[: NAME - 1] + "…"


def _waits(name: str, trace: Trace) -> Markup:
    rows = [(f"{count:,.1f}", roomy(where)) for where, count in list(trace.summary["waits"].items())[:TOP]]
    title = f"Where the CPU waits for the GPU or reads a value: {name}"
    if not rows:
        return element("p", f"{title}: nowhere.", class_="note")
    return table(("times", "operations around it, outermost first"), rows, caption=title, numeric=(0,))
