"""Charts as inline SVG: histograms, lines, shares, ranked bars, what flows away from step to step.

Places are per cent of the plot, so a chart fits any width while its text keeps its size. Every chart is named, has its
numbers as a table, and tells its parts apart without colour. Colours are classes (s1 to s8) of page.css.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from pipeline.page.markup import Markup, element, figure, table
from pipeline.page.scales import Scale, linear, logarithmic

NUM_COLOURS = 8
MOST_BARS = 120
COLUMNS = 500
"""Of a line's points, the least and the greatest in each of so many columns are drawn."""
TABLE_ROWS = 40
MARK_ROWS = 3
LETTER = 2.0
"""Width of a letter of a mark's label in per cent of the plot on a narrow screen; wider ones have room to spare."""

Point = tuple[float, float | None]
"""x and y; None is a gap."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One line."""

    name: str
    """As the legend says."""
    x: Sequence[float]
    """Finite, rising."""
    y: Sequence[float | None]
    """As many; None, NaN and infinities are gaps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """A vertical line with a label."""

    at: float
    """Where on the x axis."""
    name: str
    """The label."""


# -------------------------------------------------------------------------------------------- histogram


def bars(
    edges: Sequence[float],
    counts: Sequence[int],
    *,
    title: str,
    x_name: str,
    y_name: str,
    marks: Sequence[Mark] = (),
    whole: bool = False,
) -> Markup:
    """A histogram; neighbours are added up until there are at most 120 bars.

    Args:
        edges: one more than counts, rising; bar i reaches from edges[i] to edges[i + 1].
        counts: at least 0.
        title: what is counted.
        x_name: the quantity along the axis, with its unit.
        y_name: what a bar's height counts.
        marks: vertical lines; one far beyond the last bar is named at the right end.
        whole: the quantity has whole numbers alone: bar i holds edges[i] to edges[i + 1] - 1.
    """
    assert len(edges) == len(counts) + 1, (len(edges), len(counts))
    if not any(counts):
        return _nothing(title)
    held = _grouped(edges, counts)
    shift = 0.5 if whole else 0.0  # the bar of 5 alone reaches from 4.5 to 5.5
    x = linear([edges[0] - shift, edges[-1] - shift, *_near(marks, edges[0], edges[-1])], whole=whole)
    y = linear([0, max(count for *_, count in held)], most=5, rounded=True, whole=True)
    names = [_span(low, high, whole=whole) for low, high, _ in held]
    drawn = [
        _bar(x, y, low - shift, high - shift, count, name)
        for name, (low, high, count) in zip(names, held, strict=True)
        if count
    ]
    most = max(range(len(held)), key=lambda i: held[i][2])
    text = f"{sum(counts):,} in all; most, {held[most][2]:,}, at {names[most]}."
    rows = [(name, f"{count:,}") for name, (*_, count) in zip(names, held, strict=True)]
    listed = table((x_name, y_name), rows, caption=title, numeric=(0, 1))
    plot = _plot(x, y, Markup("".join(drawn)), x_name=x_name, y_name=y_name, marks=marks)
    return figure(plot, title=title, text=text, fallback=listed, fluid=True)


def _grouped(edges: Sequence[float], counts: Sequence[int]) -> list[tuple[float, float, int]]:
    """From, to and count of at most 120 bars."""
    step = -(-len(counts) // MOST_BARS)
    firsts = range(0, len(counts), step)
    return [(edges[i], edges[min(i + step, len(counts))], sum(counts[i : i + step])) for i in firsts]


def _bar(x: Scale, y: Scale, low: float, high: float, count: int, name: str) -> Markup:
    """One bar, at least so high that it can be seen, with a tenth of its width as a gap."""
    left, right = x.at(low), x.at(high)
    left, wide = (left, right - left) if right > left else (left - 2, 4.0)
    tall = max(y.at(count), 0.7)
    return element("rect", element("title", f"{name}: {count:,}"), class_="s1", x=_percent(left + wide * 0.05),
                   y=_percent(100 - tall), width=_percent(wide * 0.9), height=_percent(tall))  # fmt: skip


def _span(low: float, high: float, *, whole: bool) -> str:
    """What a bar holds: "5", "128 to 255"; "0.5 to 1" where numbers are not whole."""
    last = high - 1 if whole else high
    return _edge(low) if low == last else f"{_edge(low)} to {_edge(last)}"


def _edge(value: float) -> str:
    return f"{value:,.6g}" if abs(value) < 1e6 else f"{value:,.0f}"


# ------------------------------------------------------------------------------------------------ lines


def lines(
    series: Sequence[Series],
    *,
    title: str,
    x_name: str,
    y_name: str,
    log_y: bool = False,
    marks: Sequence[Mark] = (),
    form: str = "{:,.4g}",
) -> Markup:
    """Lines over one another; a legend where there are several; every spike is drawn, however many points there are.

    Args:
        series: at most 8.
        title: what is shown.
        x_name: the quantity along the axis, with its unit.
        y_name: the quantity upwards, with its unit.
        log_y: equal factors are equal heights; what is not above 0 cannot be drawn, which the caption says.
        marks: vertical lines.
        form: of y in the table.
    """
    assert len(series) <= NUM_COLOURS, f"{len(series)} lines in one chart"
    held = [_points(s, log_y=log_y) for s in series]
    drawn = [y for points in held for _, y in points if y is not None]
    if not drawn:
        return _nothing(title)
    x, y = _line_scales(held, drawn, marks, log_y=log_y)
    paths = [_path(points, x, y, i + 1) for i, points in enumerate(held)]
    inner = element("svg", *paths, viewBox="0 0 1000 1000", preserveAspectRatio="none", width="100%", height="100%")
    lost = sum(_is_lost(value) for s in series for value in s.y) if log_y else 0
    text = f"{lost:,} values that are not above 0 cannot be drawn on this scale." if lost else ""
    return figure(
        _plot(x, y, inner, x_name=x_name, y_name=y_name, marks=marks),
        title=title,
        text=text,
        fallback=_lines_table(series, held, title=title, x_name=x_name, y_name=y_name, form=form),
        legend=_legend([s.name for s in series]) if len(series) > 1 else None,
        fluid=True,
    )


def _line_scales(
    held: Sequence[Sequence[Point]], drawn: Sequence[float], marks: Sequence[Mark], *, log_y: bool
) -> tuple[Scale, Scale]:
    xs = [x for points in held for x, _ in points]
    whole = all(value.is_integer() for value in xs)
    x = linear([min(xs), max(xs), *_near(marks, min(xs), max(xs))], whole=whole)
    least, most = min(drawn), max(drawn)
    return x, logarithmic([least, most]) if log_y else linear(_height(least, most), most=5, rounded=True)


def _points(series: Series, *, log_y: bool) -> list[Point]:
    least = 0.0 if log_y else -math.inf
    return [
        (float(x), float(y) if y is not None and math.isfinite(y) and y > least else None)
        for x, y in zip(series.x, series.y, strict=True)
    ]


def _is_lost(value: float | None) -> bool:
    return value is not None and math.isfinite(value) and value <= 0


def _height(least: float, most: float) -> tuple[float, ...]:
    """What the y axis holds: 0 too, where that costs less than half of the height."""
    return (0.0, least, most) if 0 < 2 * least <= most or most <= 2 * least < 0 else (least, most)


def thinned(points: Sequence[Point], x: Scale) -> list[Point]:
    """The least and the greatest of each column, in their order; a gap stays where a column begins or ends with one."""
    if len(points) <= 2 * COLUMNS:
        return list(points)
    out: list[Point] = []
    for _, group in groupby(points, key=lambda point: int(x.at(point[0]) * COLUMNS / 100)):
        column = list(group)
        held = [(y, i) for i, (_, y) in enumerate(column) if y is not None]
        kept = {min(held)[1], max(held)[1]} if held else set()
        kept |= {i for i in (0, len(column) - 1) if column[i][1] is None}
        out += [column[i] for i in sorted(kept)]
    return [out[i] for i in range(len(out)) if out[i][1] is not None or i == 0 or out[i - 1][1] is not None]


def _path(points: Sequence[Point], x: Scale, y: Scale, colour: int) -> Markup:
    """A path in a box of 1000 by 1000; a point between two gaps is a dot."""
    line: list[str] = []
    dots: list[str] = []
    for is_gap, group in groupby(thinned(points, x), key=lambda point: point[1] is None):
        if is_gap:
            continue
        places = [f"{x.at(px) * 10:.1f},{1000 - y.at(py) * 10:.0f}" for px, py in group if py is not None]
        (line if len(places) > 1 else dots).append("M" + "L".join(places) + ("" if len(places) > 1 else "h0"))
    drawn = [(f"line s{colour} d{colour}", line), (f"line dot s{colour}", dots)]
    return Markup("".join(element("path", class_=name, d="".join(parts)) for name, parts in drawn if parts))


def _lines_table(
    series: Sequence[Series], held: Sequence[Sequence[Point]], *, title: str, x_name: str, y_name: str, form: str
) -> Markup:
    """At most 40 rows: first, last, least and greatest of each line, then evenly between."""
    known = [{x: y for x, y in points if y is not None} for points in held]
    every = sorted({x for points in held for x, _ in points})
    chosen = {x for points in known if points for x in (min(points), max(points), *_extremes(points))}
    room = TABLE_ROWS - len(chosen | {every[0], every[-1]})
    if room > 1:
        chosen |= {every[round(i * (len(every) - 1) / (room - 1))] for i in range(room)}
    chosen |= {every[0], every[-1]}
    rows = [(_edge(x), *(form.format(points[x]) if x in points else "" for points in known)) for x in sorted(chosen)]
    names = [s.name for s in series] if len(series) > 1 else [y_name]
    caption = f"{title}: {len(rows)} of {len(every):,} places" if len(rows) < len(every) else title
    return table((x_name, *names), rows, caption=caption, numeric=range(len(series) + 1))


def _extremes(points: dict[float, float]) -> tuple[float, float]:
    return min(points, key=points.__getitem__), max(points, key=points.__getitem__)


# ------------------------------------------------------------------------------------------ shares, ranks


def shares(parts: Sequence[tuple[str, float]], *, title: str, unit: str) -> Markup:
    """One bar cut into parts, with their numbers and percentages.

    Args:
        parts: names and amounts, at least 0; from the eighth on they are one part in the bar, not in the table.
        title: what the whole is.
        unit: of the amounts.
    """
    whole = sum(amount for _, amount in parts)
    if whole <= 0:
        return _nothing(title)
    drawn, left = [], 0.0
    for i, (name, amount) in enumerate(_folded(parts)):
        label = element("title", f"{name}: {amount:,.6g} {unit}, {amount / whole:.1%}")
        drawn.append(element("rect", label, class_=f"s{i + 1}", x=_percent(left), width=_percent(100 * amount / whole),
                             height="100%"))  # fmt: skip
        left += 100 * amount / whole
    rows = [
        (Markup.of(_swatch(min(i + 1, NUM_COLOURS)), name), f"{amount:,.12g}", f"{amount / whole:.1%}")
        for i, (name, amount) in enumerate(parts)
    ]
    rows.append((Markup("all"), f"{whole:,.12g}", "100.0%"))
    listed = element("div", table(("part", unit, "share"), rows, caption=title, numeric=(1, 2)), class_="parts")
    return figure(element("svg", *drawn, class_="shares"), title=title, below=listed, fluid=True)


def _folded(parts: Sequence[tuple[str, float]]) -> list[tuple[str, float]]:
    if len(parts) <= NUM_COLOURS:
        return list(parts)
    first, rest = parts[: NUM_COLOURS - 1], parts[NUM_COLOURS - 1 :]
    return [*first, (f"{len(rest)} others", sum(amount for _, amount in rest))]


def ranked(values: Sequence[tuple[str, float]], *, title: str, unit: str, form: str = "{:,.0f}") -> Markup:
    """Horizontal bars in the order given, each with its name and number."""
    if not values:
        return _nothing(title)
    top = max(value for _, value in values)
    rows = [(name, _level(value, top), form.format(value)) for name, value in values]
    return element("div", table(("name", "", unit), rows, caption=title, numeric=(2,)), class_="ranked")


def flow(steps: Sequence[tuple[str, int, str]], *, title: str, unit: str) -> Markup:
    """What is left after each step of those before: bars, the part that left drawn hollow.

    Args:
        steps: name, how many are left, what left here (or "").
        title: what flows.
        unit: of the counts.
    """
    if not steps:
        return _nothing(title)
    top = max(count for _, count, _ in steps)
    before = [top, *(count for _, count, _ in steps[:-1])]
    rows = [
        (name, _level(count, top, before=was), f"{count:,}", f"{count / top:.1%}" if top else "", left)
        for (name, count, left), was in zip(steps, before, strict=True)
    ]
    header = ("step", "", unit, "share", "what left here")
    return element("div", table(header, rows, caption=title, numeric=(2, 3)), class_="ranked flow")


def _level(value: float, top: float, *, before: float = 0) -> Markup:
    """A bar of a table's row; the number stands beside it."""
    wide, was = (100 * max(v, 0) / top if top > 0 else 0.0 for v in (value, before))
    parts = [element("rect", class_="s1", width=_percent(max(wide, 0.3 if value > 0 else 0)), height="100%")]
    if was > wide:
        parts.append(element("rect", class_="gone", x=_percent(wide), width=_percent(was - wide), height="100%"))
    return element("svg", *parts, class_="level", aria_hidden="true")


# ------------------------------------------------------------------------------------------- their parts


def _plot(x: Scale, y: Scale, inner: Markup, *, x_name: str, y_name: str, marks: Sequence[Mark]) -> Markup:
    """Grid, ticks and names around what is drawn; text lies outside the plot, in the margin that page.css leaves."""
    drawn: list[Markup] = []
    for value, label in zip(y.ticks, y.labels(), strict=True):
        at = _percent(100 - y.at(value))
        drawn.append(element("line", class_="grid", x2="100%", y1=at, y2=at))
        drawn.append(element("text", label, class_="end", x="-8", y=at, dy="0.35em"))
    for i, (value, label) in enumerate(zip(x.ticks, x.labels(), strict=True)):
        drawn.append(
            element(
                "text", label, class_="middle odd" if i % 2 else "middle", x=_percent(x.at(value)), y="100%", dy="1.5em"
            )
        )
    labels, num_rows = _marks(marks, x)
    drawn.append(
        element("text", y_name, class_="name", x="0", y="0", dx="-3.2rem", dy=f"{-1.1 - 1.4 * num_rows:.1f}em")
    )
    drawn.append(element("text", x_name, class_="name end", x="100%", y="100%", dy="2.9em"))
    return element("svg", *drawn, inner, *labels, class_=f"chart above{num_rows}")


def _marks(marks: Sequence[Mark], x: Scale) -> tuple[list[Markup], int]:
    """The lines, their labels above the plot, and how many rows these take so that none covers another."""
    drawn: list[Markup] = []
    taken = [-math.inf] * MARK_ROWS  # where the last label of each row ends, per cent
    num_rows = 0
    for mark in sorted(marks, key=lambda mark: mark.at):
        beyond = not x.low <= mark.at <= x.high
        at = min(max(x.at(mark.at), 0.0), 100.0)
        name = f"{mark.name} →" if beyond and at else f"← {mark.name}" if beyond else mark.name
        wide = len(name) * LETTER
        side, left = ("end", at - wide) if at > 50 else ("", at)
        row = next((i for i in range(MARK_ROWS) if taken[i] <= left), MARK_ROWS - 1)
        taken[row], num_rows = left + wide, max(num_rows, row + 1)
        if not beyond:
            drawn.append(element("line", class_="mark", x1=_percent(at), x2=_percent(at), y1="0", y2="100%"))
        drawn.append(element("text", name, class_=f"marked {side}".strip(), x=_percent(at), y="0",
                             dy=f"{-0.5 - 1.4 * row:.1f}em"))  # fmt: skip
    return drawn, num_rows


def _near(marks: Iterable[Mark], low: float, high: float) -> list[float]:
    """Marks that the axis is made longer for: those no farther away than half of its length."""
    reach = (high - low) / 2
    return [mark.at for mark in marks if low - reach <= mark.at <= high + reach]


def _legend(names: Sequence[str]) -> Markup:
    return element("ul", *(element("li", _sample(i + 1), name) for i, name in enumerate(names)), class_="legend")


def _sample(colour: int) -> Markup:
    line = element("line", class_=f"line s{colour} d{colour}", x2="100%", y1="50%", y2="50%")
    return element("svg", line, class_="sample", aria_hidden="true")


def _swatch(colour: int) -> Markup:
    return element("svg", element("rect", class_=f"s{colour}", width="100%", height="100%"), class_="swatch",
                   aria_hidden="true")  # fmt: skip


def _nothing(title: str) -> Markup:
    return element("p", element("strong", title), ": nothing to draw.", class_="note")


def _percent(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") + "%"
