"""The charts of a run's page: the table behind each one holds what was logged, field by field."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests import runs
from tests.runs import report, tables

CHARTS: dict[str, tuple[str, float, str]] = {
    "Learning rate": ("lr", 1, "{:,.4g}"),
    "Gradient norm, unclipped": ("grad_norm", 1, "{:,.4g}"),
    "Tokens of documents a second": ("tokens_per_s", 1, "{:,.0f}"),
    "MFU, the model's share of the GPUs' arithmetic": ("mfu", 100, "{:,.4g}"),
    "HFU, with what is computed again": ("hfu", 100, "{:,.4g}"),
    "Time of each step": ("step_s", 1, "{:,.4g}"),
    "Of it, waiting for the next batch": ("data_wait_s", 1000, "{:,.4g}"),
}
"""By title: the field, what it is multiplied by, its form."""


def steps(num: int, *, seed: int = 0) -> list[dict[str, Any]]:
    """Lines in which no two fields have a number in common."""
    return [
        runs.step(i, loss=4 - i / 64 + seed, lr=0.003 / (i + seed), grad_norm=1.5 + i / 32 + seed,
                  tokens_per_s=7000.0 + 11 * i + seed, step_s=0.7 + i / 128 + seed, data_wait_s=0.02 + i / 4096,
                  mfu=0.31 + i / 256, hfu=0.53 + i / 512, peak_gib=20.25 + i + seed)
        for i in range(1, num + 1)
    ]  # fmt: skip


@pytest.mark.parametrize("title", CHARTS)
def test_a_chart_of_one_run_draws_its_field_of_every_step(tmp_path: Path, title: str) -> None:
    lines = steps(9)
    (name, factor, form), found = CHARTS[title], tables(report(runs.write(tmp_path / "r", lines, runs.config())))
    assert found[title][1:] == [[str(line["step"]), form.format(line[name] * factor)] for line in lines]


@pytest.mark.parametrize("title", CHARTS)
def test_a_chart_of_two_runs_draws_the_field_of_both(tmp_path: Path, title: str) -> None:
    one, two = steps(5), steps(7, seed=1)
    folders = [runs.write(tmp_path / name, lines, runs.config()) for name, lines in (("a", one), ("b", two))]
    name, factor, form = CHARTS[title]
    values = [[form.format(line[name] * factor) for line in lines] for lines in (one, two)]
    rows = [[str(i + 1), values[0][i] if i < 5 else "", values[1][i]] for i in range(7)]
    assert tables(report(*folders))[title] == [["step", "a", "b"], *rows]


def test_the_loss_is_drawn_with_the_evaluation(tmp_path: Path) -> None:
    lines = [{"step": 0, "eval_loss": 6.5}, *steps(4), {"step": 3, "eval_loss": 2.25}]
    page = report(runs.write(tmp_path / "r", lines, runs.config()))
    assert tables(page)["Training and evaluation loss"] == [
        ["step", "training", "evaluation"], ["0", "", "6.5000"], ["1", "3.9844", ""], ["2", "3.9688", ""],
        ["3", "3.9531", "2.2500"], ["4", "3.9375", ""],
    ]  # fmt: skip


def test_the_evaluations_of_several_runs_are_those_of_the_runs_that_have_one(tmp_path: Path) -> None:
    evaluations = [{"step": 0, "eval_loss": 6.5}, {"step": 3, "eval_loss": 2.25}]
    folders = [runs.write(tmp_path / name, steps(4) + found, runs.config())
               for name, found in (("a", []), ("b", evaluations), ("c", []))]  # fmt: skip
    assert tables(report(*folders))["Evaluation loss"][1:] == [["0", "6.5000"], ["3", "2.2500"]]
    assert "<strong>Evaluation loss</strong>: not recorded." in report(folders[0], folders[2])


def test_the_most_memory_so_far_never_falls_though_a_resumed_run_counts_anew(tmp_path: Path) -> None:
    lines = [runs.step(i, peak_gib=gib) for i, gib in enumerate((5.0, 9.0, None, 4.0, 11.0), start=1)]
    found = tables(report(runs.write(tmp_path / "r", lines, runs.config())))
    assert [row[1] for row in found["Most memory so far, on rank 0's GPU"][1:]] == ["5", "9", "9", "9", "11"]


@pytest.mark.parametrize(("warmup_steps", "is_marked"), [(0, False), (1, False), (4, True), (9, False)])
def test_the_end_of_the_warm_up_is_marked_where_it_lies_within(
    tmp_path: Path, *, warmup_steps: int, is_marked: bool
) -> None:
    folder = runs.write(tmp_path / "r", steps(9), runs.config(settings={"warmup_steps": warmup_steps}))
    marks = re.findall(r'<line class="mark" x1="([\d.]+)%"', report(folder).split('id="gradient"')[0])
    assert [float(mark) for mark in marks] == ([pytest.approx(100 * 3 / 8)] if is_marked else [])


@pytest.mark.parametrize(("greatest", "is_log"), [(900.0, True), (9.0, False)])
def test_a_scale_is_logarithmic_where_the_greatest_would_press_the_others_down(
    tmp_path: Path, *, greatest: float, is_log: bool
) -> None:
    lines = [runs.step(i, grad_norm=greatest if i == 5 else 1.0 + i / 10) for i in range(1, 10)]
    page = report(runs.write(tmp_path / "r", lines, runs.config()))
    picture = page[page.index("<title>Gradient norm, unclipped</title>") :].split("</figure>")[0]
    ticks = re.findall(r'<text class="end"[^>]*>([\d.,]+)</text>', picture)
    assert ({"1", "10", "100", "1,000"} <= set(ticks)) is is_log


def test_fields_that_were_never_logged_are_said_to_lack_chart_by_chart(tmp_path: Path) -> None:
    lines = [{"step": i, "rows_seen": 8 * i} for i in (1, 2, 3)]
    page = report(runs.write(tmp_path / "r", lines, runs.config()))
    assert page.count(": not recorded.</p>") == 7
    assert "<strong>Training loss</strong>" in page


def test_a_time_below_0_is_no_time(tmp_path: Path) -> None:
    lines = [runs.step(1, step_s=-1.0, data_wait_s=-2.0), runs.step(2, step_s=0.25)]
    found = tables(report(runs.write(tmp_path / "r", lines, runs.config())))
    assert found["Time of each step"][1:] == [["1", ""], ["2", "0.25"]]
    assert found["How long steps took"][1:] == [["0.25 to 0.275", "1"]]


def test_it_is_said_why_hfu_can_be_below_mfu_where_it_is(tmp_path: Path) -> None:
    page = report(runs.write(tmp_path / "r", [runs.step(1, mfu=0.15, hfu=0.13)], runs.config()))
    assert "median; hardware 13.00%, whose head is at targets alone" in page
    assert "whose head" not in report(runs.write(tmp_path / "s", [runs.step(1, mfu=0.13, hfu=0.15)], runs.config()))
