"""trainer.report: its numbers equal those of a plain loop over the log, whatever a run left behind."""

import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import runs
from tests.packed import make_packed, random_rows
from tests.runs import as_json, report, tables, tiles
from trainer.record import locked
from trainer.report.charts import SMOOTH_FROM, running_mean, smoothed
from trainer.report.figures import figures, total_steps
from trainer.report.log import read
from trainer.report.text import headlines, moment, span

STEP_SECONDS = "Seconds of the first step, and percentiles of the others"


def rank(values: list[float], percent: int) -> float:
    """The least value that is not below so many per cent of all."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def quantile(values: list[float], percent: int) -> float:
    """Between the two neighbours of that place, along a line."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@pytest.fixture
def logged(tmp_path: Path) -> tuple[Path, list[dict[str, Any]]]:
    """A run of 23 of 40 steps, and the lines of its steps."""
    rng = np.random.default_rng(0)
    lines = [
        runs.step(i, loss=float(rng.normal(3, 1)), grad_norm=float(rng.gamma(2, 1)), mfu=float(rng.random()),
                  tokens_per_s=float(rng.integers(900, 1200)), step_s=round(float(rng.gamma(5, 0.1)), 4),
                  data_wait_s=round(float(rng.random() / 1000), 6), peak_gib=6.5 if i > 4 else 5.25)
        for i in range(1, 24)
    ]  # fmt: skip
    evaluations = [{"step": 0, "eval_loss": 6.25}, {"step": 10, "eval_loss": 3.5}, {"step": 20, "eval_loss": 3.75}]
    folder = runs.write(tmp_path / "r", [*lines, *evaluations], runs.config(settings={"steps": 40}))
    return folder, lines


# ---------------------------------------------------------------------------------------------- numbers


def test_every_number_of_the_page_is_that_of_a_plain_loop_over_the_log(
    logged: tuple[Path, list[dict[str, Any]]],
) -> None:
    folder, lines = logged
    rows = {row[0]: row[1:] for row in tables(report(folder))["Over the logged steps"]}
    forms = {"loss, nats": ("loss", "{:,.4f}", 1), "gradient norm": ("grad_norm", "{:,.4g}", 1),
             "tokens a second": ("tokens_per_s", "{:,.0f}", 1), "MFU": ("mfu", "{:.2%}", 1),
             "step time, s": ("step_s", "{:,.4g}", 1), "data wait, ms": ("data_wait_s", "{:,.3f}", 1000),
             "peak memory, GiB": ("peak_gib", "{:,.2f}", 1), "targets a step": ("targets", "{:,.0f}", 1)}  # fmt: skip
    for label, (name, form, factor) in forms.items():
        values = [line[name] * factor for line in lines]
        least, greatest = min(values), max(values)
        expected = [values[0], values[-1], sum(values) / len(values), statistics.median(values)]
        extremes = [f"{form.format(value)} at {values.index(value) + 1}" for value in (least, greatest)]
        assert rows[label] == [*map(form.format, expected), *extremes, "23"]
    assert rows["evaluation loss, nats"] == [
        "6.2500", "3.7500", "4.5000", "3.7500", "3.5000 at 10", "6.2500 at 0", "3",
    ]  # fmt: skip


def test_percentiles_and_the_histogram_of_step_times_are_those_of_the_log(
    logged: tuple[Path, list[dict[str, Any]]],
) -> None:
    folder, lines = logged
    seconds = [line["step_s"] for line in lines]
    found = tables(report(folder))
    expected = [seconds[0], *(rank(seconds[1:], p) for p in (0, 5, 25, 50, 75, 95, 99, 100))]
    assert found[STEP_SECONDS][1] == ["seconds", *(f"{s:,.4g}" for s in expected)]
    bars = found["How long steps took"][1:]
    for between, count in bars:
        low, high = map(float, between.split(" to "))
        assert int(count) == sum(low - 1e-9 <= s < high - 1e-9 for s in seconds)
    assert sum(int(count) for _, count in bars) == 23


def test_the_json_and_the_tiles_hold_the_same_numbers(
    logged: tuple[Path, list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, lines = logged
    (found,) = as_json(capsys, folder)["runs"]
    total = sum(line["step_s"] for line in lines)
    assert found["seconds"] == pytest.approx(total)
    assert found["tokens"] == sum(line["tokens"] for line in lines)
    usual = sorted(lines, key=lambda line: line["data_wait_s"])[:-1]  # one start
    waited, of = (sum(line[name] for line in usual) for name in ("data_wait_s", "step_s"))
    assert found["data_wait_share"] == pytest.approx(waited / of)
    assert found["num_clipped"] == sum(line["grad_norm"] > 1 for line in lines)
    assert found["quantities"]["loss"]["mean"] == pytest.approx(sum(line["loss"] for line in lines) / 23)
    assert (found["peak_gib"], found["estimate_gib"], found["recomputed"]) == (6.5, 8, [2, 4])
    assert (found["last_step"], found["total_steps"], found["num_missing"]) == (23, 40, 0)
    shown = tiles(report(folder))
    assert shown["steps"] == ["23", "of 40, 57.5%"]
    assert shown["loss"][0] == f"{lines[-1]['loss']:,.4f}"
    assert shown["tokens a second"][0] == f"{statistics.median(line['tokens_per_s'] for line in lines):,.0f}"
    assert shown["MFU"] == [f"{statistics.median(line['mfu'] for line in lines):.2%}", "median; hardware 60.00%"]
    assert shown["memory"] == ["6.5 GiB", "estimated 8.0 GiB"]
    assert shown["waiting for data"][0] == f"{found['data_wait_share']:.2%}"


def test_tokens_are_exact_where_they_were_logged_and_else_to_the_digits_of_their_speed(tmp_path: Path) -> None:
    lines = [runs.step(1, tokens=16384, step_s=0.5, tokens_per_s=32767.1), runs.step(2, tokens=16383)]
    exact, old = (runs.write(tmp_path / name, found, runs.config())
                  for name, found in (("exact", lines), ("old", [lines[0] | {"tokens": None}, lines[1]])))  # fmt: skip
    for folder, text in ((exact, "32,767"), (old, "about 32,770")):
        assert dict(headlines(figures(read(folder), now=0)))["tokens of documents"] == text


def test_each_starts_longest_wait_for_data_is_no_reason_for_alarm(tmp_path: Path) -> None:
    lines = [runs.step(i, step_s=1.0, data_wait_s=0.9 if i in (1, 5) else 0.01) for i in range(1, 9)]
    resumed = runs.write(tmp_path / "r", lines, runs.config(earlier=[{}]))
    once = runs.write(tmp_path / "o", lines, runs.config())
    assert figures(read(resumed), now=0).data_wait_share == pytest.approx(0.01)
    assert figures(read(once), now=0).data_wait_share == pytest.approx((0.9 + 6 * 0.01) / 7)
    assert "was waiting for data" not in report(resumed)
    assert "13.7% of the steps&#x27; time was waiting for data." in report(once)


def test_a_page_of_one_run_holds_what_the_terminal_shows(logged: tuple[Path, list[dict[str, Any]]]) -> None:
    page = report(logged[0])
    for name, text in headlines(figures(read(logged[0]), now=time.time())):
        assert name == "state" or f"<dt>{name}</dt><dd>{text}</dd>" in page


def test_the_terminal_shows_the_figures(
    logged: tuple[Path, list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, lines = logged
    report(folder)
    printed = capsys.readouterr().out
    assert re.search(r"steps +23 of 40\n", printed)
    assert re.search(rf"loss, first to last +{lines[0]['loss']:.4f} to {lines[-1]['loss']:.4f}\n", printed)
    assert re.search(r"memory, peak +6.50 GiB\n", printed)
    assert re.search(r"attention +torch reference +2.13.0 +first choice\n", printed)
    assert printed.endswith(f"{folder / 'report.html'}\n")


# ------------------------------------------------------------------------------------ state, projection


def test_a_run_goes_on_stops_or_is_finished(tmp_path: Path) -> None:
    folder = runs.write(tmp_path / "r", [runs.step(i) for i in range(1, 6)], runs.config())
    run = read(folder)
    now = run.changed
    assert figures(run, now=now + 10).state == "running"
    assert figures(run, now=now + 10_000).state == "stopped"
    slow = read(runs.write(tmp_path / "slow", [runs.step(i, step_s=1000.0) for i in (1, 2)], runs.config()))
    assert figures(slow, now=slow.changed + 10_000).state == "running"
    done = read(runs.write(tmp_path / "d", [runs.step(i) for i in range(1, 11)], runs.config()))
    assert figures(done, now=now + 10_000).state == "finished"
    assert figures(done, now=now).projection is None


def test_without_a_process_to_ask_five_silent_minutes_stop_a_run_of_quick_steps(tmp_path: Path) -> None:
    run = read(runs.write(tmp_path / "r", [runs.step(i) for i in range(1, 6)], runs.config()))
    assert [figures(run, now=run.changed + s).state for s in (299, 301)] == ["running", "stopped"]
    assert dict(headlines(figures(run, now=run.changed)))["state"] == "running, by its log"
    assert "told by when it was last written" in tiles(report(run.path))["state"][1]


def test_a_process_of_this_machine_is_asked_whether_it_lives(tmp_path: Path) -> None:
    """However long it is silent, and however lately it was ended."""
    folder = runs.write(tmp_path / "r", [runs.step(1)], runs.config())
    with locked(folder, say=print):
        held = read(folder)
    code = f"from pathlib import Path; from trainer.record import locked; locked(Path({str(folder)!r}), say=print)"
    subprocess.run([sys.executable, "-c", f"{code}.__enter__()"], check=True)
    ended = read(folder)
    for run, state in ((held, "running"), (ended, "stopped")):
        for silent in (1, 400, 1e6):
            found = figures(run, now=run.changed + silent)
            assert (found.state, found.is_guessed, dict(headlines(found))["state"]) == (state, False, state)
    assert ended.is_alive is False
    assert "its process has ended, and nothing was written since" in report(folder)


@pytest.mark.parametrize(
    "lock", ["", "process 1 on elsewhere\n", "process 0 on HERE\n", "process 1234567890123 on HERE\n", "\udcff"]
)
def test_a_process_that_cannot_be_asked_is_not_taken_for_one_that_lives(tmp_path: Path, lock: str) -> None:
    folder = runs.write(tmp_path / "r", [runs.step(1)], runs.config())
    (folder / ".lock").write_bytes(lock.replace("HERE", platform.node()).encode(errors="surrogateescape"))
    assert read(folder).is_alive is None


def test_an_export_of_an_earlier_start_does_not_finish_a_run_that_goes_on(tmp_path: Path) -> None:
    folder = runs.write(tmp_path / "r", [runs.step(1)], runs.config(settings={"steps": None}))
    (folder / "export").mkdir()
    (folder / ".lock").write_text(f"process {os.getpid()} on {platform.node()}\n")
    assert figures(read(folder), now=0).state == "running"
    (folder / ".lock").unlink()
    runs.write(folder, None, runs.config(settings={"steps": None}, total_steps=5))
    run = read(folder)
    assert (figures(run, now=run.changed).state, figures(run, now=0).total_steps) == ("running", 5)


def test_an_export_finishes_a_run_whose_number_of_steps_is_not_known_and_no_other(tmp_path: Path) -> None:
    for steps, state in ((None, "finished"), (9, "stopped")):
        folder = runs.write(tmp_path / str(steps), [runs.step(1)], runs.config(settings={"steps": steps}))
        (folder / "export").mkdir()
        run = read(folder)
        assert figures(run, now=run.changed + 1e6).state == state


def test_the_end_is_projected_from_the_median_of_the_last_200_steps(tmp_path: Path) -> None:
    seconds = [9.0] * 50 + [1.0] * 50 + [2.0] * 100 + [4.0] * 50
    lines = [runs.step(i + 1, step_s=s) for i, s in enumerate(seconds)]
    run = read(runs.write(tmp_path / "r", lines, runs.config(settings={"steps": 1250})))
    found = figures(run, now=run.changed + 1).projection
    assert found is not None
    assert (found.num_recent, found.step_s) == (200, 2.0)
    assert found.seconds_left == 1000 * 2.0
    assert (found.seconds_low, found.seconds_high) == (
        1000 * quantile(seconds[50:], 25),
        1000 * quantile(seconds[50:], 75),
    )
    assert found.end == run.changed + 2000
    shown = dict(headlines(figures(run, now=run.changed + 1)))
    assert (shown["time left"], shown["time left, by quartiles"]) == ("33 min 20 s", "29 min 10 s to 41 min 40 s")
    stopped = figures(run, now=run.changed + 1e6).projection
    assert stopped is not None
    assert stopped.end is None


def test_steps_of_whole_epochs_are_counted_from_the_dataset_if_it_is_the_runs_own(tmp_path: Path) -> None:
    rows = random_rows(num_rows=7, max_tokens=32, vocab_size=99)
    packed = make_packed(tmp_path / "p", rows, max_tokens=32, vocab_size=99)
    dataset_id = json.loads((packed / "manifest.json").read_text())["dataset_id"]
    settings = {"steps": None, "epochs": 3, "rows_per_step": 4, "shards": str(packed)}
    assert total_steps(runs.config(settings=settings, dataset_id=dataset_id)) == math.ceil(3 * 7 / 4)
    assert total_steps(runs.config(settings=settings)) is None
    assert total_steps(runs.config(settings=settings | {"shards": "gone"}, dataset_id=dataset_id)) is None
    assert total_steps(runs.config(settings=settings | {"shards": "gone"}, total_steps=6)) == 6
    assert total_steps(runs.config(settings=settings | {"epochs": "x"}, dataset_id=dataset_id)) is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (0.25, "0.25 s"), (59.4, "59.4 s"), (75, "1 min 15 s"), (8000, "2 h 13 min"), (200_000, "2 d 7 h")],
)
def test_times_are_written_for_people(seconds: float, text: str) -> None:
    assert span(seconds) == text


def test_a_moment_beyond_any_calendar_is_said() -> None:
    assert moment(1e40) == "beyond any calendar"


# ------------------------------------------------------------------------------------------------ sizes


def test_a_run_of_one_step_has_its_page(tmp_path: Path) -> None:
    page = report(runs.write(tmp_path / "r", [runs.step(1)], runs.config()))
    assert tables(page)[STEP_SECONDS][1][1:] == ["0.51"] * 9
    assert tiles(page)["loss"][0] == "4.9900"


def test_a_run_of_100_000_steps_is_quick_and_its_page_small_and_no_spike_vanishes(tmp_path: Path) -> None:
    lines = [runs.step(i) for i in range(1, 100_001)]
    lines[41_234] |= {"loss": 12_345.5, "step_s": 77.0}
    folder = runs.write(tmp_path / "r", lines, runs.config(settings={"steps": 100_000}))
    text, begun = (folder / "metrics.jsonl").read_text(), time.process_time()
    for line in text.splitlines():
        json.loads(line)
    parsing, begun = time.process_time() - begun, time.process_time()
    page = report(folder)
    assert time.process_time() - begun < 30 * parsing  # 5 times as long as that on any machine, slow or busy
    assert len(page) < 1_000_000
    found = tables(page)
    (each,) = [rows for title, rows in found.items() if title.startswith("Training loss of each step")]
    assert ["41,235", "12,345.5000"] in each
    assert len(each) <= 1 + 40
    assert "Steps that took longer than 1.59 s: 1; the longest took 77 s." in page
    rows = {row[0]: row[1:] for row in found["Over the logged steps"]}
    assert rows["step time, s"][5:] == ["77 at 41,235", "100,000"]


def test_long_runs_are_drawn_as_means_that_say_so_and_short_ones_as_they_are(tmp_path: Path) -> None:
    long = report(runs.write(tmp_path / "l", [runs.step(i) for i in range(1, SMOOTH_FROM + 1)], runs.config()))
    short = report(runs.write(tmp_path / "s", [runs.step(i) for i in range(1, SMOOTH_FROM)], runs.config()))
    assert "Tokens of documents a second, mean of 5 steps" in long
    assert "mean of" not in short


@given(st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), min_size=1, max_size=40), st.sampled_from([1, 3, 5, 9]))
def test_a_running_mean_is_the_mean_of_the_numbers_around(values: list[float | None], num: int) -> None:
    found = running_mean(np.array([math.nan if v is None else v for v in values]), num)
    for i, mean in enumerate(found):
        around = [v for v in values[max(0, i - num // 2) : i + num // 2 + 1] if v is not None]
        assert mean == pytest.approx(statistics.fmean(around), abs=1e-6) if around else math.isnan(mean)


def test_a_mean_is_over_an_odd_number_of_steps() -> None:
    assert [smoothed(np.zeros(n))[1] for n in (199, 200, 249, 300, 1000)] == [1, 5, 5, 7, 21]
