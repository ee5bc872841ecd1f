"""One step of a trace as lanes of a picture: what the CPU did, what the GPU did by kind, when nothing ran.

    lanes = picture(split(read(path)))     one trace
    draw({"before": lanes, "after": lanes})  one figure, all traces on one time scale

Guarantees: a lane's height at a place is the share of that stretch of time in which something of its kind ran, so
kernels narrower than a pixel are in it; overlapping streams count once. A lane's time is that of the whole step.
Costs: some 50 kB of page a trace, whatever the trace's size.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.page import Markup, element, figure, table
from pipeline.page.scales import linear
from trainer.events import Event, Interval, Work, union
from trainer.report.log import Floats
from trainer.timeline import KINDS, UNNAMED, kind

LANES = {"CPU": 6, "matrix": 1, "attention": 2, "delta rule": 3, "other": 7, "copies": 5, "idle": 8}
"""Lanes from top to bottom, and the colour of each."""

COLUMNS = 720
"""Stretches of time along the picture."""

LANE, GAP, TITLE, SPACE = 30, 5, 28, 20
"""Heights in pixels: of a lane, between two, of a trace's name, above the next one's."""

LABELS = "margin-left:2.9rem;width:calc(100% - 2.9rem)"
"""Room for the lanes' names and times beside what the page leaves to a chart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lanes:
    """One step's picture."""

    wall_ms: float
    """How long the step lasted."""
    busy: Mapping[str, Sequence[Interval]]
    """By lane: when something ran, in milliseconds from the step's begin, without overlaps, ascending."""

    @property
    def on_gpu(self) -> bool:
        """Whether anything ran on a GPU."""
        return any(self.busy[name] for name in KINDS)

    def milliseconds(self, lane: str) -> float:
        """Time in which something of a lane ran."""
        return sum(end - begin for begin, end in self.busy[lane])


def picture(works: Sequence[Work]) -> Lanes:
    """The step of middle length, with all that ran meanwhile, whichever step it belongs to.

    Args:
        works: of one trace, at least one.
    """
    order = sorted(works, key=lambda work: work.window[1] - work.window[0])
    begin, end = order[len(order) // 2].window

    def inside(events: Iterable[Event]) -> list[Interval]:
        spans = ((float(e["ts"]) - begin, float(e["ts"]) + float(e.get("dur", 0)) - begin) for e in events)
        clipped = ((max(0.0, a), min(end - begin, b)) for a, b in spans)
        return union((a / 1e3, b / 1e3) for a, b in clipped if b > a)

    gpu = [event for work in works for event in work.gpu]
    by_kind: dict[str, list[Event]] = {name: [] for name in KINDS}
    for event in gpu:
        by_kind[kind(event["name"])].append(event)
    busy = {"CPU": inside(event for work in works for event in (*work.ops, *work.calls))}
    busy |= {name: inside(events) for name, events in by_kind.items()}
    wall = (end - begin) / 1e3
    edges = [0.0, *(time for interval in inside(gpu) for time in interval), wall]
    idle = [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if b > a]
    return Lanes(wall_ms=wall, busy=busy | {"idle": idle})


def coverage(intervals: Sequence[Interval], *, until: float, num: int) -> Floats:
    """Share of each of ``num`` equal stretches from 0 to ``until`` that intervals without overlaps cover.

    Worked example: (1, 2) and (3, 6) over 3 stretches up to 6: 0.5, 0.5, 1.
    """
    if not intervals or until <= 0:
        return np.zeros(num)
    begins, ends = np.array(intervals).T
    before = np.concatenate([[0.0], np.cumsum(ends - begins)])
    edges = np.linspace(0, until, num + 1)
    index = np.searchsorted(begins, edges, side="right")  # intervals that have begun
    latest = np.maximum(index - 1, 0)
    open_part = np.where(index > 0, np.clip(edges - begins[latest], 0, (ends - begins)[latest]), 0.0)
    covered = before[latest] + open_part
    return np.clip(np.diff(covered) * num / until, 0, 1)


def draw(traces: Mapping[str, Lanes]) -> Markup:
    """Every trace's lanes, one below the other on one time scale; a table beside."""
    until = max(lanes.wall_ms for lanes in traces.values())
    shown = LANES if any(lanes.on_gpu for lanes in traces.values()) else {"CPU": LANES["CPU"]}
    block = TITLE + len(shown) * (LANE + GAP) + SPACE
    bottom = len(traces) * block - SPACE
    parts = [
        part for i, (name, lanes) in enumerate(traces.items()) for part in _block(name, lanes, shown, until, i * block)
    ]
    svg = element("svg", *_axis(until, bottom), *parts, class_="chart", style=f"height:{bottom}px;{LABELS}")
    return figure(
        svg,
        title="One step, by kind of operation",
        text="A lane is filled as high as the share of that moment spent on it. CPU: in any operation or call. "
        + (UNNAMED if len(shown) > 1 else ""),
        fallback=_table(traces, shown),
        fluid=True,
    )


def _block(name: str, lanes: Lanes, shown: Mapping[str, int], until: float, top: int) -> list[Markup]:
    """One trace: its name, then its lanes, each with its name and time to the left."""
    parts = [element("text", f"{name}, {lanes.wall_ms:,.0f} ms", class_="name", x="0", y=top + 16)]
    wide = _percent(100 * lanes.wall_ms / until) if until else "0"
    for i, (lane, colour) in enumerate(shown.items()):
        y = top + TITLE + i * (LANE + GAP)
        shares = coverage(lanes.busy[lane], until=until, num=COLUMNS)
        area = element("path", class_=f"s{colour}", style="stroke:none", d=_area(shares))
        parts += [
            element("rect", y=y, width=wide, height=LANE, style="fill:var(--raised)"),
            element(
                "svg", area, y=y, width="100%", height=LANE, viewBox=f"0 0 {COLUMNS} 100", preserveAspectRatio="none"
            ),
            element("text", lane, class_="name end", x="-8", y=y + 13),
            element("text", f"{lanes.milliseconds(lane):,.1f} ms", class_="end", x="-8", y=y + 27),
        ]
    return parts


def _area(shares: Floats) -> str:
    """Steps above the lower edge, one for each stretch; equal neighbours are one step."""
    heights = np.round(100 * (1 - shares)).astype(int)
    parts, before = ["M0 100"], 100
    for i, height in enumerate([*heights.tolist(), 100]):
        if height != before:
            parts.append(f"H{i}V{height}")
            before = height
    return "".join(parts) + "Z"


def _axis(until: float, top: int) -> list[Markup]:
    scale = linear([0.0, until])
    parts = []
    for value, label in zip(scale.ticks, scale.labels(), strict=True):
        at = _percent(scale.at(value))
        parts.append(element("line", class_="grid", x1=at, x2=at, y1=TITLE, y2=top))
        parts.append(element("text", label, class_="middle", x=at, y=top + 18))
    return [*parts, element("text", "milliseconds", class_="name end", x="100%", y=top + 38)]


def _table(traces: Mapping[str, Lanes], shown: Iterable[str]) -> Markup:
    header = ("lane", *(part for name in traces for part in (f"{name}, ms", f"{name}, share of the step")))
    rows = [
        (lane, *(cell for lanes in traces.values() for cell in _cells(lanes.milliseconds(lane), lanes.wall_ms)))
        for lane in shown
    ]
    return table(header, rows, caption="Time of each lane in that step", numeric=range(1, len(header)))


def _cells(milliseconds: float, wall: float) -> tuple[str, str]:
    return f"{milliseconds:,.2f}", f"{milliseconds / wall:.1%}" if wall else ""


def _percent(value: float) -> str:
    return f"{value:.3f}".rstrip("0").rstrip(".") + "%"
