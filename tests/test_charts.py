"""Charts draw what the numbers say, at one value and at 100,000, and their tables say the same."""

import itertools
import math
import re
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given

from pipeline.page import STYLE, Mark, Markup, Series, bars, flow, lines, ranked, shares
from pipeline.page.charts import COLUMNS, thinned
from pipeline.page.scales import linear, logarithmic, nice_step, tick_text
from tests.parsed import Parsed, cells, percent

finite = st.floats(-1e38, 1e38) | st.sampled_from([5.0, 5.0 + 1e-15, 5.0 + 1e-8])


# ----------------------------------------------------------------------------------------------- scales


@given(a=finite, b=finite, most=st.integers(3, 8), rounded=st.booleans())
def test_ticks_are_nice_few_and_rise_evenly_over_the_values(a: float, b: float, most: int, *, rounded: bool) -> None:
    scale = linear([a, b], most=most, rounded=rounded)
    dust = 1e-9 * (scale.high - scale.low)
    assert scale.low - dust <= min(a, b) <= max(a, b) <= scale.high + dust
    assert all(-1e-6 <= scale.at(tick) <= 100 + 1e-6 for tick in scale.ticks)
    assert len(scale.ticks) <= most + 2 * rounded
    steps = np.diff(scale.ticks)
    if len(steps):
        mantissa = float(f"{steps[0]:.3e}".partition("e")[0])
        assert mantissa in (1, 2, 5)
        assert np.allclose(steps, steps[0], rtol=1e-3, atol=0)
    assert len(set(scale.labels())) == len(scale.ticks)


@given(st.floats(1e-9, 1e9), st.floats(1e-9, 1e9))
def test_a_logarithmic_scale_holds_its_values_between_round_numbers(a: float, b: float) -> None:
    scale = logarithmic([a, b])
    assert scale.low <= min(a, b) * 1.0001
    assert scale.high >= max(a, b) * 0.9999
    assert 2 <= len(scale.ticks) <= 8
    assert all(f"{tick:.6e}"[0] in "125" for tick in scale.ticks)
    assert [round(scale.at(v), 6) for v in (scale.low, scale.high)] == [0, 100]


@pytest.mark.parametrize(
    ("span", "most", "step"), [(10, 6, 2), (8192, 6, 2000), (1, 5, 0.5), (0.3, 4, 0.1), (7e-6, 6, 2e-6), (3, 4, 1)]
)
def test_steps_are_one_two_or_five_times_a_power_of_ten(span: float, most: int, step: float) -> None:
    assert nice_step(span, most=most) == step


@pytest.mark.parametrize(
    ("value", "top", "text"),
    [(0, 5, "0"), (20000, 80000, "20,000"), (1.5e6, 2e6, "1.5M"), (0.25, 1, "0.25"), (2e-5, 1e-4, "2e-5"),
     (-5, 5, "-5"), (3e9, 4e9, "3B"), (2e16, 4e16, "2e16"), (0.3, 0.4, "0.3"),
     (100000, 100000, "100,000"), (1.5e-5, 2e-5, "1.5e-5")],
)  # fmt: skip
def test_ticks_are_written_in_one_form(value: float, top: float, text: str) -> None:
    assert tick_text(value, top=top) == text


def test_counts_have_no_fractions_beside_them() -> None:
    assert linear([0, 1], rounded=True, whole=True).ticks == (0, 1)
    assert linear([1, 3], whole=True).ticks == (1, 2, 3)


# ------------------------------------------------------------------------------------------- histograms


def drawn_bars(markup: str) -> list[dict[str, str]]:
    return Parsed(markup).all("rect", "s1")


def test_bars_are_as_high_as_their_counts_and_stand_over_their_edges() -> None:
    made = bars([0, 10, 20, 30, 40], [10, 0, 5, 20], title="t", x_name="x", y_name="y")
    held = [(percent(r["x"]), percent(r["width"]), percent(r["y"]), percent(r["height"])) for r in drawn_bars(made)]
    assert held == [(1.25, 22.5, 50, 50), (51.25, 22.5, 75, 25), (76.25, 22.5, 0, 100)]
    assert cells(made) == [["x", "y"], ["0 to 10", "10"], ["10 to 20", "0"], ["20 to 30", "5"], ["30 to 40", "20"]]


def test_bars_of_whole_numbers_stand_around_them_and_are_named_by_what_they_hold() -> None:
    made = bars([4, 5, 6, 8], [1, 0, 2], title="t", x_name="x", y_name="y", whole=True)
    assert [row[0] for row in cells(made)] == ["x", "4", "5", "6 to 7"]
    assert [(percent(r["x"]), percent(r["width"])) for r in drawn_bars(made)] == [(1.25, 22.5), (52.5, 45)]
    ticks = {held["text"]: held["x"] for held in Parsed(made).all("text", "middle")}
    assert ticks == {"4": "12.5%", "5": "37.5%", "6": "62.5%", "7": "87.5%"}
    assert "3 in all; most, 2, at 6 to 7." in made


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=2000))
@example([1] * 100_000)
@example([0, 0, 7])
def test_any_number_of_bars_is_grouped_to_at_most_120_and_no_count_is_lost(counts: list[int]) -> None:
    made = bars(range(len(counts) + 1), counts, title="t", x_name="x", y_name="y")
    if not any(counts):
        assert "nothing to draw" in made
        return
    rows = [[int(part) for part in (*span.split(" to "), count)] for span, count in cells(made.replace(",", ""))[1:]]
    assert len(drawn_bars(made)) <= len(rows) <= 120
    assert sum(row[2] for row in rows) == sum(counts)
    assert (rows[0][0], rows[-1][1]) == (0, len(counts))
    assert all(a[1] == b[0] for a, b in itertools.pairwise(rows))


def test_one_bar_and_one_value_are_drawn_inside_the_plot() -> None:
    for edges in ([0, 100], [5, 5], [0, 0]):
        (bar,) = drawn_bars(bars(edges, [3], title="t", x_name="x", y_name="y"))
        assert percent(bar["x"]) > 0
        assert percent(bar["width"]) > 2
        assert percent(bar["x"]) + percent(bar["width"]) < 100


def test_a_count_beside_far_greater_ones_can_still_be_seen() -> None:
    made = bars([0, 1, 2], [1_000_000, 1], title="t", x_name="x", y_name="y")
    assert percent(drawn_bars(made)[1]["height"]) > 0.5


@pytest.mark.parametrize(
    ("at", "place", "name"), [(100, "100%", "T"), (50, "50%", "T"), (1000, "100%", "T →"), (-1000, "0%", "← T")]
)
def test_a_mark_stands_where_it_belongs_or_says_where_it_lies(at: float, place: str, name: str) -> None:
    made = bars([0, 100], [1], title="t", x_name="x", y_name="y", marks=[Mark(at=at, name="T")])
    (label,) = Parsed(made).all("text", "marked")
    assert (label["x"], label["text"]) == (place, name)
    assert len(Parsed(made).all("line", "mark")) == ("→" not in name and "←" not in name)


def test_the_axis_grows_for_a_mark_nearby() -> None:
    made = bars([0, 100], [1], title="t", x_name="x", y_name="y", marks=[Mark(at=125, name="T")])
    assert percent(drawn_bars(made)[0]["width"]) == pytest.approx(72)


def test_labels_of_neighbouring_marks_stand_in_different_rows() -> None:
    marks = [Mark(at=i, name="resumed") for i in (50, 51, 52)]
    labels = Parsed(bars([0, 100], [1], title="t", x_name="x", y_name="y", marks=marks)).all("text", "marked")
    assert len({label["dy"] for label in labels}) == 3


# ------------------------------------------------------------------------------------------------ lines


def places(markup: str, kind: str = "line") -> list[list[tuple[float, float]]]:
    """Points of every part of every path, in a box of 1000 by 1000 with y downwards."""
    paths = [p["d"] for p in Parsed(markup).all("path", kind)]
    parts = [part for path in paths for part in path.split("M") if part]
    return [[tuple(map(float, p.split(","))) for p in part.removesuffix("h0").split("L")] for part in parts]


def line_of(y: list[float | None], **more: Any) -> Markup:
    return lines([Series(name="a", x=range(len(y)), y=y)], title="t", x_name="x", y_name="y", **more)


def test_a_line_goes_through_its_points() -> None:
    assert places(line_of([0, 10, 5])) == [[(0, 1000), (500, 0), (1000, 500)]]


def test_one_point_is_a_dot_in_the_middle() -> None:
    assert places(line_of([3.0]), "dot") == [[(500, 500)]]


@pytest.mark.parametrize("gap", [None, math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_a_gap_and_a_point_alone_is_a_dot(gap: float | None) -> None:
    made = line_of([1, 2, gap, 4, gap])
    assert [len(part) for part in places(made)] == [2, 1]
    assert [len(part) for part in places(made, "dot")] == [1]
    assert cells(made)[3] == ["2", ""]


def test_of_100_000_points_every_spike_is_drawn_and_the_chart_stays_small() -> None:
    y: list[float | None] = [5.0 + (i % 7) / 100 for i in range(100_000)]
    y[43_210], y[77_777], y[50_000] = 20.0, 0.0, None
    made = line_of(y)
    drawn = [place for part in places(made) for place in part]
    assert (432.1, 0) in drawn
    assert (777.8, 1000) in drawn
    assert len(drawn) <= 2 * COLUMNS + 2
    assert len(made) < 30_000
    rows = {row[0]: row[1] for row in cells(made)[1:]}
    assert len(rows) <= 40
    assert (rows["0"], rows["43,210"], rows["77,777"], rows["99,999"]) == ("5", "20", "0", "5.04")


@given(st.integers(0, 2**32), st.integers(2 * COLUMNS + 1, 4 * COLUMNS), st.sampled_from([0.0, 0.1, 0.9, 1.0]))
def test_thinning_keeps_the_least_and_the_greatest_of_every_column(seed: int, length: int, gaps: float) -> None:
    rng = np.random.default_rng(seed)
    y = [None if gap < gaps else float(value) for gap, value in rng.random((length, 2))]
    points = [(float(i), value) for i, value in enumerate(y)]
    x = linear([0, len(y) - 1])
    kept = thinned(points, x)
    assert set(kept) <= set(points)
    assert kept == sorted(kept, key=lambda point: point[0])

    def extremes(held: list[tuple[float, float | None]]) -> dict[int, tuple[float, float]]:
        columns: dict[int, list[float]] = {}
        for px, py in held:
            if py is not None:
                columns.setdefault(int(x.at(px) * COLUMNS / 100), []).append(py)
        return {column: (min(values), max(values)) for column, values in columns.items()}

    assert extremes(kept) == extremes(points)


def test_a_gap_wider_than_a_column_stays_a_gap() -> None:
    y: list[float | None] = [None if 5000 < i < 5100 else 1.0 for i in range(10_000)]
    assert len(places(line_of(y))) == 2


def test_a_logarithmic_chart_says_what_it_cannot_draw() -> None:
    made = line_of([100, 10, 0, -1, 1, None], log_y=True)
    assert "2 values that are not above 0 cannot be drawn" in made
    assert [y for part in places(made) for _, y in part] == [0, 500, 1000]


def test_eight_lines_differ_without_colour_and_a_ninth_is_our_own_mistake() -> None:
    eight = [Series(name=f"run {i}", x=[0, 1], y=[i, i]) for i in range(8)]
    made = lines(eight, title="t", x_name="x", y_name="y")
    kinds = [p["class"].split() for p in Parsed(made).all("path")]
    assert kinds == [["line", f"s{i}", f"d{i}"] for i in range(1, 9)]
    dashes = re.findall(r"\.d(\d) \{ stroke-dasharray: ([\d ]+);", STYLE.read_text())
    assert [name for name, _ in dashes] == [str(i) for i in range(2, 9)]
    assert len({dash for _, dash in dashes}) == 7
    assert [li["text"] for li in Parsed(made).all("li")] == [f"run {i}" for i in range(8)]
    assert [li["class"] for li in Parsed(made).all("line", "line")] == [f"line s{i} d{i}" for i in range(1, 9)]
    with pytest.raises(AssertionError):
        lines([*eight, eight[0]], title="t", x_name="x", y_name="y")


def test_the_table_of_several_lines_holds_first_last_least_and_greatest_of_each() -> None:
    rng = np.random.default_rng(0)
    many = [Series(name=f"run {i}", x=range(i, 5000), y=rng.normal(size=5000 - i).tolist()) for i in range(8)]
    rows = cells(lines(many, title="t", x_name="step", y_name="loss"))
    assert rows[0] == ["step", *(f"run {i}" for i in range(8))]
    assert len(rows) - 1 <= 40
    for i, series in enumerate(many):
        column = {row[0]: row[i + 1] for row in rows[1:]}
        ys = [value for value in series.y if value is not None]
        for place in (0, len(ys) - 1, int(np.argmin(ys)), int(np.argmax(ys))):
            assert column[f"{series.x[place]:,}"] == f"{ys[place]:,.4g}"


def test_nothing_to_draw_is_said() -> None:
    for made in (
        bars([0, 1], [0], title="t", x_name="x", y_name="y"), line_of([]), line_of([None]), line_of([0.0], log_y=True),
        lines([], title="t", x_name="x", y_name="y"), shares([("a", 0)], title="t", unit="u"),
        ranked([], title="t", unit="u"), flow([], title="t", unit="u"),
    ):  # fmt: skip
        assert "nothing to draw" in made


# ---------------------------------------------------------------------------------------- shares, ranks


def test_parts_fill_their_bar_and_the_table_holds_amounts_and_shares() -> None:
    made = shares([("a", 30), ("b", 50), ("c", 20)], title="t", unit="tokens")
    parts = [(percent(r["x"]), percent(r["width"])) for r in Parsed(made).all("rect") if "x" in r]
    assert parts == [(0, 30), (30, 50), (80, 20)]
    assert cells(made)[1:] == [
        ["a", "30", "30.0%"], ["b", "50", "50.0%"], ["c", "20", "20.0%"], ["all", "100", "100.0%"],
    ]  # fmt: skip


def test_more_parts_than_colours_share_the_last_one_in_the_bar_not_in_the_table() -> None:
    made = shares([(f"p{i}", 10) for i in range(10)], title="t", unit="tokens")
    parts = [percent(r["width"]) for r in Parsed(made).all("rect") if "x" in r]
    assert parts == [10] * 7 + [30]
    assert [row[0] for row in cells(made)[1:]] == [*(f"p{i}" for i in range(10)), "all"]


def test_ranked_bars_are_as_long_as_their_values() -> None:
    made = ranked([("a", 200), ("b", 50), ("c", 0)], title="t", unit="ms", form="{:.1f}")
    assert [percent(r["width"]) for r in drawn_bars(made)] == [100, 25, 0]
    assert cells(made)[1:] == [["a", "", "200.0"], ["b", "", "50.0"], ["c", "", "0.0"]]


def test_a_flow_shows_what_is_left_and_what_left_at_each_step() -> None:
    made = flow([("read", 200, ""), ("kept", 150, "50 rejected"), ("used", 50, "")], title="t", unit="chats")
    assert [percent(r["width"]) for r in drawn_bars(made)] == [100, 75, 25]
    assert [(percent(r["x"]), percent(r["width"])) for r in Parsed(made).all("rect", "gone")] == [(75, 25), (25, 50)]
    assert cells(made)[2] == ["kept", "", "150", "75.0%", "50 rejected"]


def test_a_flow_of_nothing_divides_by_nothing() -> None:
    assert cells(flow([("read", 0, "")], title="t", unit="chats"))[1] == ["read", "", "0", "", ""]
