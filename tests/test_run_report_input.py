"""trainer.report of what runs leave behind in good and bad times: one run, several, damaged ones."""

import math
import os
import re
import shutil
import subprocess
import sys
import time
from html import escape
from pathlib import Path
from typing import Any

import pytest

from tests import runs
from tests.runs import as_json, report, tables, tiles
from trainer.report.__main__ import REPORT, main
from trainer.report.log import read
from trainer.report.text import differing


def test_a_run_without_metrics_has_a_page_that_says_so(tmp_path: Path) -> None:
    page = report(runs.write(tmp_path / "r", None, runs.config()))
    assert "There are no metrics yet" in page
    assert tiles(page)["steps"] == ["0", "of 10, 0.0%"]
    assert tables(page)["What serves each operation, and why"][1][0] == "attention"


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.json", "checkpoints/page.html", "."])
def test_a_page_replaces_nothing_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    one, two = (runs.write(tmp_path / n, [runs.step(1)], runs.config()) for n in "ab")
    before = {file: file.read_bytes() for file in two.iterdir()}
    assert main([str(one), str(two), "--out", str(two / name)]) == 2
    assert f"in a run's folder the page is called {REPORT}" in capsys.readouterr().err
    assert {file: file.read_bytes() for file in two.iterdir()} == before
    assert main([str(one), str(two), "--out", str(two / REPORT)]) == 0


def test_a_page_replaces_no_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.json"
    trace.write_text('[{"ph": "X", "name": "op", "cat": "cpu_op", "ts": 1, "dur": 1, "tid": 1}]')
    run = runs.write(tmp_path / "r", [runs.step(1)], runs.config())
    assert main([str(run), "--trace", str(trace), "--out", str(trace)]) == 2
    assert "is one of the traces" in capsys.readouterr().err
    assert trace.read_text().startswith("[")


def test_a_terminal_that_cannot_spell_a_name_shows_the_rest(tmp_path: Path) -> None:
    run = runs.write(tmp_path / "läuft…", [runs.step(1)], runs.config())
    command = [sys.executable, "-m", "trainer.report", str(run)]
    done = subprocess.run(
        command, capture_output=True, cwd=Path(__file__).parents[1], check=False,
        env=os.environ | {"PYTHONIOENCODING": "latin-1"},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, b"")
    assert "läuft?".encode("latin-1") in done.stdout


def test_ctrl_c_ends_without_a_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("trainer.report.__main__.open_runs", interrupted)
    assert main(["runs/x"]) == 130
    assert capsys.readouterr().err == "\ninterrupted\n"


def test_who_reads_no_further_makes_no_error(tmp_path: Path) -> None:
    run = runs.write(tmp_path / "r", [runs.step(1)], runs.config())
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "trainer.report", str(run)]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, cwd=Path(__file__).parents[1], check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")
    assert (run / "report.html").exists()


def test_a_log_without_its_config_has_a_page_that_says_so(tmp_path: Path) -> None:
    page = report(runs.write(tmp_path / "r", [runs.step(1), runs.step(2)]))
    assert "There is no config.json" in page
    assert tiles(page)["steps"] == ["2", "of a number that is not known"]


def test_an_old_log_says_what_was_not_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [runs.step(i, step_s=None, data_wait_s=None, tokens=None) for i in (1, 2)]
    folder = runs.write(tmp_path / "r", lines, runs.config())
    page = report(folder)
    assert re.search(r"later steps, s, p5 p50 p95 +not recorded\n", capsys.readouterr().out)
    assert tiles(page)["waiting for data"] == ["–", "not recorded"]
    assert tiles(page)["projected end"] == ["–", "not known"]
    (found,) = as_json(capsys, folder)["runs"]
    assert found["step_seconds"] is found["seconds"] is found["tokens"] is found["projection"] is None


def test_what_is_odd_in_a_log_is_said_with_its_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [runs.step(1), runs.step(2) | {"loss": None, "grad_norm": None}, "broken\n",
             runs.step(5, grad_norm=math.inf), runs.step(6, data_wait_s=0.3, peak_gib=9.0),
             runs.step(7, data_wait_s=0.4), '{"step": 8']  # fmt: skip
    folder = runs.write(tmp_path / "r", lines, runs.config())
    os.utime(folder / "metrics.jsonl", (15 * 86400,) * 2)  # the 15th or 16th in every zone
    os.utime(folder / "config.json", (15 * 86400,) * 2)
    page = report(folder)
    for text in ("Steps without a target, in which nothing was updated: 1 (step 2).",
                 "Values that are no finite number: 1 (step 5).",
                 "Lines of the log that are neither a step nor an evaluation: 1 (line 3).",
                 "The last line of the log was cut", "2 steps between the first and the last have no line.",
                 "The peak of 9.00 GiB is above the estimate of 8.00 GiB.",
                 "% of the steps&#x27; time was waiting for data.",
                 "The run has stopped: nothing was written since 1970-01-1"):  # fmt: skip
        assert text in page
    (found,) = as_json(capsys, folder)["runs"]
    assert (found["skipped"], found["not_finite"]) == ({"num": 1, "first": [2]}, {"num": 1, "first": [5]})
    assert (found["state"], found["num_missing"], len(found["look_into"])) == ("stopped", 2, 8)


@pytest.mark.parametrize("value", [1e300, -1e300, 10**400, "1", True, [], {}])
def test_absurd_values_anywhere_leave_the_report_standing(tmp_path: Path, value: Any) -> None:
    settings = dict.fromkeys(("steps", "epochs", "clip", "recompute", "warmup_steps", "lr", "shards"), value)
    written = runs.config(settings=settings, dataset_id=value, commit=value, time=value, eval_dataset_id=value)
    written |= {"model": {"num_hidden_layers": value}, "memory_estimate_bytes": {"weights": value}}
    written |= {"kernels": [{"operation": value}], "earlier": [{"settings": value}, {"time": value}]}
    fields = {name: value for name in runs.step(1) if name != "step"}
    lines = [runs.step(1, **fields), runs.step(2), {"step": 2, "eval_loss": value}]
    page = report(runs.write(tmp_path / "r", lines, written))
    assert "Values that are no finite number: 1 (step 1)." in page


@pytest.mark.parametrize(
    ("name", "words"),
    [("gone", "is no folder"), ("empty", "neither config.json nor metrics.jsonl"), ("bad", "cannot be read")],
)
def test_a_run_that_cannot_be_read_is_an_error_that_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, words: str
) -> None:
    (tmp_path / "empty").mkdir()
    (runs.write(tmp_path / "bad", [runs.step(1)]) / "config.json").write_text("{")
    assert main([str(tmp_path / name)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert words in said
    assert str(tmp_path / name) in said
    assert not (tmp_path / name / "report.html").exists()


def test_no_run_too_many_and_the_same_one_twice_are_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [str(runs.write(tmp_path / str(i), [runs.step(1)], runs.config())) for i in range(9)]
    for arguments, words in (([], "no run given"), (folders, "9 runs are too many"),
                             ([folders[0], folders[0] + "/."], "given twice")):  # fmt: skip
        assert main(arguments) == 2
        assert words in capsys.readouterr().err


def test_hostile_text_is_escaped_on_the_page_and_harmless_in_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = "</table><script>alert(1)</script>\x1b[2J\u202e\ud800"
    written = runs.config(settings={bad: bad, "shards": bad}, dataset_id=bad, commit=bad, machine={bad: bad})
    written |= {"kernels": [runs.kernel(bad, why=bad, version=bad)], "memory_estimate_bytes": {bad: 5}}
    written |= {"versions": {bad: bad}, "model": {bad: bad}, "earlier": [{"time": bad, "commit": bad, "settings": {}}]}
    one = runs.write(tmp_path / "<b>&", [runs.step(1)], written)
    two = runs.write(tmp_path / "two", [runs.step(1)], runs.config())
    for arguments in ((one,), (one, two)):
        page = report(*arguments)
        assert "<script" not in page
        assert "<b>&" not in page
        assert escape("</table><script>alert(1)</script>") in page
        printed = capsys.readouterr().out
        assert "\x1b" not in printed
        assert "\u202e" not in printed


# ------------------------------------------------------------------------------------- what is recorded


def test_kernels_settings_versions_commit_and_dataset_are_on_the_page(tmp_path: Path) -> None:
    page = report(runs.write(tmp_path / "r", [runs.step(1)], runs.config(settings={"weight_decay": 0.125})))
    assert tables(page)["What serves each operation, and why"] == [
        ["operation", "implementation", "version", "why"],
        ["attention", "torch reference", "2.13.0", "first choice"],
        ["loss", "torch reference", "2.13.0", "first choice"],
    ]
    expected = {
        "weight_decay": "0.125", "version of torch": "2.13.0", "commit": "c" * 40, "dataset": "d" * 64,
        "device": "NVIDIA H200", "recomputed": "2 of 4 layers", "peak / estimate": "81.2%", "num_hidden_layers": "4",
    }  # fmt: skip
    for name, text in expected.items():
        assert f"<dt>{name}</dt><dd>{text}</dd>" in page
    assert [row[:2] for row in tables(page)["What the estimate is made of"][1:]] == [
        ["weights", "3"], ["activations", "5"], ["all", "8"],
    ]  # fmt: skip


def test_every_start_of_a_resumed_run_is_listed_with_what_it_changed(tmp_path: Path) -> None:
    first = runs.config(time="2026-01-01", commit="a" * 40) | {"earlier": []}
    second = runs.config(time="2026-01-02", settings={"steps": 20})
    written = runs.config(time="2026-01-03", settings={"steps": 20, "resume": True}, earlier=[first, second])
    page = report(runs.write(tmp_path / "r", [runs.step(1)], written))
    assert tables(page)["Resumed 2 times"][1:] == [
        ["1", "2026-01-01", "a" * 40, ""],
        ["2", "2026-01-02", "c" * 40, "steps: 10 to 20"],
        ["3", "2026-01-03", "c" * 40, ""],
    ]
    assert "<dt>began</dt><dd>2026-01-01</dd>" in page
    assert "Never resumed" in report(runs.write(tmp_path / "s", [runs.step(1)], runs.config()))


# --------------------------------------------------------------------------------------- several runs


def test_several_runs_are_laid_over_one_another_with_what_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = runs.write(tmp_path / "a", [runs.step(1, loss=4.0), runs.step(2, loss=3.0)], runs.config())
    changed = runs.config(settings={"lr": 0.5, "out": "elsewhere"}, dataset_id="e" * 64)
    changed["kernels"] = [runs.kernel("attention", version="9"), runs.kernel("loss")]
    b = runs.write(tmp_path / "b", [runs.step(1, loss=2.0), {"step": 1, "eval_loss": 1.5}], changed)
    page = report(a, b)
    found = tables(page)
    expected = [["settings.lr", "0.001", "0.5"], ["kernels.attention.version", "2.13.0", "9"]]
    ids = ["dataset_id", "d" * 16, "e" * 16]
    assert found["Recorded values that differ"] == [["", "a", "b"], ids, *expected]
    assert found["Training loss"] == [["step", "a", "b"], ["1", "4.0000", "2.0000"], ["2", "3.0000", ""]]
    assert ["steps", "2 of 10", "1 of 10"] in found["Runs side by side"]
    assert found["a"][1][0] == "loss, nats"
    assert (a / "report.html").exists()
    assert not (b / "report.html").exists()
    whole = {"dataset_id": ["d" * 64, "e" * 64]}
    assert as_json(capsys, a, b)["differing"] == whole | {row[0]: row[1:] for row in expected}


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    one, two = (runs.write(tmp_path / part / "same", [runs.step(1)], runs.config()) for part in ("x", "y"))
    assert tables(report(one, two))["Runs side by side"][0] == ["", str(one), str(two)]


def test_seven_runs_fit_into_a_terminal_of_80_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [
        runs.write(tmp_path / f"run-{i}", [runs.step(1), runs.step(2)], runs.config(settings={"lr": i}))
        for i in range(7)
    ]
    for columns in (80, 200):
        monkeypatch.setenv("COLUMNS", str(columns))
        report(*folders, "--out", tmp_path / "page.html")
        printed = capsys.readouterr().out.splitlines()[:-1]
        assert columns // 2 < max(map(len, printed)) <= columns
        for i in range(7):
            assert sum(f"run-{i}" in line.split() for line in printed) == 2
        assert sum(line.count(" 2 of 10") for line in printed) == 7


def test_values_that_differ_are_never_cut_to_equal_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = "/data/somewhere/deep/below/another/ultrachat-packed/"
    groups = ((long + "A", long + "B"), (long + "A", long + "B", "short"), ("x" * 50 + "A" + "y" * 50, "x" * 101))
    for group in groups:
        folders = [runs.write(tmp_path / str(i), [runs.step(1)], runs.config(settings={"shards": text}))
                   for i, text in enumerate(group)]  # fmt: skip
        report(*folders)
        printed = capsys.readouterr().out
        words = [word for line in printed.splitlines() if "settings.shards" in line for word in line.split()[1:]]
        assert len(set(words)) == len(words) == len(group)
        assert all(word in group or "…" in word for word in words)


def test_what_is_planned_in_bytes_is_in_no_list_of_what_differs(tmp_path: Path) -> None:
    one = runs.write(tmp_path / "a", [runs.step(1)], runs.config())
    two = runs.write(tmp_path / "b", [runs.step(1)], runs.config(memory_estimate_bytes={"weights": 1504786048}))
    page = report(one, two)
    assert "Nothing that is recorded differs." in page
    assert "1504786048" not in page


def test_eight_runs_fit_on_one_page_and_equal_ones_differ_in_nothing(tmp_path: Path) -> None:
    folders = [runs.write(tmp_path / str(i), [runs.step(1), runs.step(2)], runs.config()) for i in range(8)]
    page = report(*folders)
    assert "Nothing that is recorded differs." in page
    assert differing([read(folder) for folder in folders]) == {}


# ------------------------------------------------------------------------------------------------ files


def test_the_page_goes_where_it_is_asked_to_and_nothing_else_is_touched(tmp_path: Path) -> None:
    folder = runs.write(tmp_path / "r", [runs.step(1)], runs.config())
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    report(folder, "--out", tmp_path / "new" / "page.html")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["page.html"]


def test_a_page_that_cannot_be_written_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = runs.write(tmp_path / "r", [runs.step(1)], runs.config())
    assert main([str(folder), "--out", str(folder / "metrics.jsonl" / "page.html")]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_a_folder_in_the_place_of_the_page_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = runs.write(tmp_path / "r", [runs.step(1)], runs.config())
    (tmp_path / "pages").mkdir()
    (folder / "report.html").mkdir()
    for words, place in (
        (["--out", str(tmp_path / "pages")], tmp_path / "pages"),
        ([], folder / "report.html"),
    ):
        assert main([str(folder), *words]) == 2
        expected = f"error: --out {place} is a folder: name the file that the page becomes, such as {place}/report.html"
        assert capsys.readouterr().err == f"{expected}\n"
    assert sorted(path.name for path in tmp_path.rglob("*")) == [
        "config.json", "metrics.jsonl", "pages", "r", "report.html",
    ]  # fmt: skip


@pytest.mark.parametrize("fails", ["write_bytes", "replace"])
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_page_that_is_not_finished_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fails: str, error: Any
) -> None:
    folder = runs.write(tmp_path / "r", [runs.step(1)], runs.config())
    report(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def fail(path: Path, *_: Any) -> None:
        path.write_text("half a page")
        raise error(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, fails, fail)
        assert main([str(folder)]) == (2 if error is OSError else 130)
    if error is OSError:
        assert capsys.readouterr().err == f"error: [Errno 28] No space left on device: '{folder / 'report.html'}'\n"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_two_reports_of_one_moment_are_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = runs.write(tmp_path / "r", [runs.step(1), runs.step(2)], runs.config())
    now = read(folder).changed + 5
    monkeypatch.setattr(time, "time", lambda: now)
    first = report(folder)
    shutil.rmtree(folder / "report.html", ignore_errors=True)
    assert report(folder) == first
