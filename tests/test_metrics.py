"""The metrics file: whole lines, continuous over resumes; the progress line."""

import io
import json
from pathlib import Path
from typing import Any

import pytest

from trainer.metrics import Metrics, duration
from trainer.step import StepResult


def result(step: int, **changes: Any) -> StepResult:
    fields = {
        "step": step, "num_rows": 2, "num_targets": 10, "num_tokens": 20, "sum_squared_lengths": 200, "loss": 1.5,
        "lr": 0.1, "grad_norm": 2.0,
    }  # fmt: skip
    return StepResult(**(fields | changes))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path: Path, *, step: int, last: int, stream: io.StringIO | None = None) -> None:
    with Metrics(path, step=step, total_steps=4, stream=stream or io.StringIO()) as metrics:
        for number in range(step + 1, last + 1):
            metrics.step(result(number), rows_seen=2 * number)
            if number % 2 == 0:
                metrics.evaluation(step=number, loss=0.5)


def test_a_step_and_an_evaluation_have_their_fields(tmp_path: Path) -> None:
    write(tmp_path / "m.jsonl", step=0, last=2)
    step, _, evaluation = lines(tmp_path / "m.jsonl")
    assert step.pop("tokens_per_s") > 0
    assert step == {"step": 1, "rows_seen": 2, "targets": 10, "loss": 1.5, "lr": 0.1, "grad_norm": 2.0}
    assert evaluation == {"step": 2, "eval_loss": 0.5}


def test_lines_after_the_checkpoint_are_dropped_on_resume(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write(path, step=0, last=3)
    write(path, step=2, last=4)
    assert [(line["step"], "loss" in line) for line in lines(path)] == [
        (1, True), (2, True), (2, False), (3, True), (4, True), (4, False),
    ]  # fmt: skip


@pytest.mark.parametrize("torn", ['{"step": 2, "lo', '{"step": 2}', "null\n", '"x"\n', '{"loss": 1}\n'])
def test_a_line_that_a_kill_cut_short_is_dropped(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "m.jsonl"
    write(path, step=0, last=1)
    whole = path.read_text()
    path.write_text(whole + torn)
    write(path, step=3, last=3)
    assert path.read_text() == whole


def test_beginning_again_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_text('{"step": 0, "eval_loss": 5.0}\n')
    write(tmp_path / "m.jsonl", step=0, last=0)
    assert (tmp_path / "m.jsonl").read_text() == ""


def test_a_step_without_a_target_is_written_as_null_and_said(tmp_path: Path) -> None:
    stream = io.StringIO()
    with Metrics(tmp_path / "m.jsonl", step=0, total_steps=1, stream=stream) as metrics:
        metrics.step(result(1, loss=None, grad_norm=None, num_targets=0), rows_seen=2)
        metrics.evaluation(step=1, loss=None)
    first, second = lines(tmp_path / "m.jsonl")
    assert first["loss"] is first["grad_norm"] is second["eval_loss"] is None
    assert "step 1: none of its rows has a target; nothing was updated" in stream.getvalue()


def test_other_ranks_write_nothing() -> None:
    stream = io.StringIO()
    with Metrics(None, step=0, total_steps=1, stream=stream) as metrics:
        metrics.step(result(1), rows_seen=2)
        metrics.evaluation(step=1, loss=0.5)
        metrics.say("something")
        metrics.sync()
    assert stream.getvalue() == ""


def test_progress_has_loss_rate_and_time_left(tmp_path: Path) -> None:
    stream = io.StringIO()
    write(tmp_path / "m.jsonl", step=0, last=4, stream=stream)
    printed = stream.getvalue().splitlines()
    assert printed[0].startswith("step 1/4  loss 1.5000  ")
    assert printed[0].endswith("s left")
    assert "tokens/s" in printed[0]
    assert printed[-2].startswith("step 4/4")  # the last one is always there
    assert "\r" not in stream.getvalue()


def test_a_terminal_renews_one_line(tmp_path: Path) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    write(tmp_path / "m.jsonl", step=0, last=3, stream=stream)
    text = stream.getvalue()
    assert text.count("\r") == 3
    assert "\nstep 2: evaluation loss 0.5000\n" in text
    assert text.endswith("\n")


def test_durations_are_short() -> None:
    assert [duration(s) for s in (0.4, 59.6, 75, 3600, 8000)] == ["0s", "1m00s", "1m15s", "1h00m", "2h13m"]
