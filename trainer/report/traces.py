"""A page's part about traces: five tables, a picture of one step, the longest kernels, where the CPU waits.

    traces = [load(path, name=...) for ...]      one, or two
    section = trace_section(traces)

Guarantees: the tables hold the numbers that ``python -m trainer.timeline --json`` prints.
Costs: what reading a trace costs: 2 s for the 64 layers of a 27B, 15 s and 1.6 GB for 280 MB of JSON.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.page import Markup, element, facts, section, table
from trainer import events, timeline
from trainer.report.charts import roomy, side_by_side, unbroken
from trainer.report.lanes import Lanes, draw, picture

TOP = 15
"""Kernels listed."""
NAME = 90
"""Characters shown of a kernel's name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """What one trace says."""

    name: str
    """What it is called: its run, "before" or "after"."""
    path: Path
    """Where it lies."""
    summary: Mapping[str, Any]
    """As ``timeline.summary`` makes it: the mean step."""
    lanes: Lanes
    """The picture of its middle step."""


def load(path: Path, *, name: str) -> Trace:
    """Read and analyse one trace.

    Raises:
        ValueError: it is none, or holds no work.
    """
    works = events.split(events.read(path))
    if not works:
        raise ValueError(f"{path} has no operation and no kernel in it: was the profiler given activities?")
    steps = [timeline.measure(work) for work in works]
    return Trace(name=name, path=path, summary=timeline.summary(steps, top=TOP), lanes=picture(works))


def trace_section(traces: Sequence[Trace]) -> Markup:
    """The section of one trace, or of two."""
    on_gpu = any(trace.summary["num_gpu_ops"] for trace in traces)
    shown = timeline.TABLES if on_gpu else timeline.TABLES[:2]
    ratio = f"; a ratio is {traces[1].name} / {traces[0].name}" if len(traces) == 2 else ""
    return section(
        "Where the time goes",
        facts((trace.name, f"{trace.path}, {_steps(trace.summary['num_steps'])}") for trace in traces),
        draw({trace.name: trace.lanes for trace in traces}),
        side_by_side(*(_table(title, form, rows, traces) for title, form, rows in shown)),
        element("p", timeline.UNNAMED if on_gpu else "Nothing ran on a GPU.", class_="note"),
        *(_kernels(trace) for trace in traces if on_gpu),
        *(_waits(trace) for trace in traces),
        note="From the profiler's trace. The profiler slows the CPU down, so times are for comparing; the charts above "
        f"hold every step of a run, those that were traced too. Numbers are those of the mean step{ratio}. "
        "Kinds are told apart by the kernels' names.",
        id="time",
    )


def _steps(num: int) -> str:
    return "one step" if num == 1 else f"{num:,} steps"


def _table(title: str, form: str, rows: Sequence[tuple[str, str]], traces: Sequence[Trace]) -> Markup:
    """A row each with its number in every trace, and what the second is of the first."""
    header = ("", *(trace.name for trace in traces), *(("ratio",) if len(traces) == 2 else ()))
    body = []
    for label, name in rows:
        values = [timeline.number(trace.summary, name) for trace in traces]
        ratio = [_ratio(*values)] if len(values) == 2 else []
        body.append((label, *map(form.format, values), *ratio))
    return table(header, body, caption=title, numeric=range(1, len(header)))


def _ratio(before: float, after: float) -> str:
    """Two digits behind the point, or one that says something."""
    if not before:
        return ""
    return f"{after / before:,.2f}" if after >= before / 100 or not after else f"{after / before:.1g}"


def _kernels(trace: Trace) -> Markup:
    rows = [
        (
            f"{k['ms']:,.1f}",
            f"{k['share']:.1%}",
            f"{k['count']:,.0f}",
            unbroken(timeline.kind(k["name"])),
            roomy(_short(k["name"])),
        )
        for k in trace.summary["top_kernels"]
    ]
    title = f"Kernels by time: {trace.name}"
    if not rows:
        return element("p", f"{title}: none ran.", class_="note")
    return table(("ms", "share", "times", "kind", "name"), rows, caption=title, numeric=(0, 1, 2))


def _short(name: str) -> str:
    """A kernel's name without what every template brings along: ``void at::native::(anonymous namespace)::f<...>``."""
    plain = name.removeprefix("void ").replace("(anonymous namespace)::", "").replace("at::native::", "")
    return plain if len(plain) <= NAME else plain[: NAME - 1] + "…"


def _waits(trace: Trace) -> Markup:
    rows = [(f"{count:,.1f}", roomy(where)) for where, count in list(trace.summary["waits"].items())[:TOP]]
    title = f"Where the CPU waits for the GPU or reads a value: {trace.name}"
    if not rows:
        return element("p", f"{title}: nowhere.", class_="note")
    return table(("times", "operations around it, outermost first"), rows, caption=title, numeric=(0,))
