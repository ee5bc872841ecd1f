"""The metrics file: whole lines, continuous over resumes; what the live line says."""

import io
import json
import mmap
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny import tiny_config
from trainer import metrics as module
from trainer.batches import StepBatches
from trainer.flops import PEAK, Arithmetic, hardware_flops, model_flops
from trainer.liveline import LiveLine
from trainer.metrics import Metrics, duration
from trainer.step import StepResult


def result(step: int, **changes: Any) -> StepResult:
    fields = {
        "step": step, "num_rows": 2, "num_targets": 7, "num_tokens": 20, "sum_squared_lengths": 200, "loss": 1.5,
        "lr": 0.1, "grad_norm": 2.0,
    }  # fmt: skip
    return StepResult(**(fields | changes))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path: Path, *, step: int, last: int, stream: io.StringIO | None = None) -> None:
    with Metrics(path, step=step, total_steps=4, line=LiveLine(stream or io.StringIO())) as metrics:
        for number in metrics.time_steps(range(step + 1, last + 1)):
            metrics.step(result(number), rows_seen=2 * number)
            if number % 2 == 0:
                metrics.evaluation(step=number, loss=0.5)


def test_a_step_and_an_evaluation_have_their_fields(tmp_path: Path) -> None:
    write(tmp_path / "m.jsonl", step=0, last=2)
    step, _, evaluation = lines(tmp_path / "m.jsonl")
    assert min(step.pop(name) for name in ("tokens_per_s", "step_s", "data_wait_s")) > 0
    assert step == {"step": 1, "rows_seen": 2, "tokens": 20, "targets": 7, "loss": 1.5, "lr": 0.1, "grad_norm": 2.0}
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
    with Metrics(tmp_path / "m.jsonl", step=0, total_steps=1, line=LiveLine(stream)) as metrics:
        metrics.step(result(1, loss=None, grad_norm=None, num_targets=0), rows_seen=2)
        metrics.evaluation(step=1, loss=None)
    first, second = lines(tmp_path / "m.jsonl")
    assert first["loss"] is first["grad_norm"] is second["eval_loss"] is None
    assert "step 1: none of its rows has a target; nothing was updated" in stream.getvalue()


def test_other_ranks_write_nothing() -> None:
    stream = io.StringIO()
    with Metrics(None, step=0, total_steps=1, line=LiveLine(stream)) as metrics:
        metrics.step(result(1), rows_seen=2)
        metrics.evaluation(step=1, loss=0.5)
        metrics.say("something")
        metrics.sync()
    assert stream.getvalue() == ""


def test_a_warning_stands_above_the_live_line_while_the_file_is_open(tmp_path: Path) -> None:
    stream, before = io.StringIO(), warnings.showwarning
    with warnings.catch_warnings(), Metrics(tmp_path / "m", step=0, total_steps=1, line=LiveLine(stream)):
        warnings.simplefilter("always")
        warnings.warn("something is odd", UserWarning, stacklevel=1)
    assert stream.getvalue() == "warning: something is odd (UserWarning)\n"
    assert warnings.showwarning is before


class Clock:
    """A clock that stands still unless it is told otherwise."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module.time, "perf_counter", clock)
    monkeypatch.setattr(module.time, "monotonic", clock)
    return clock


def timed_steps(path: Path, clock: Clock, stream: io.StringIO, *, last: int = 4) -> None:
    """Steps that wait 0.5 s for their rows and compute for 1.5 s; after the second, 7 s of something else."""

    def rows() -> Iterator[int]:
        for number in range(1, last + 1):
            clock.now += 0.5
            yield number

    with Metrics(path, step=0, total_steps=4, line=LiveLine(stream)) as metrics:
        for number in metrics.time_steps(rows()):
            clock.now += 1.5
            metrics.step(result(number), rows_seen=2 * number)
            clock.now += 7.0 if number == 2 else 0.0


def test_a_step_lasts_from_asking_for_its_rows_to_its_end_and_says_how_long_they_took(
    tmp_path: Path, clock: Clock
) -> None:
    timed_steps(tmp_path / "m.jsonl", clock, io.StringIO())
    found = lines(tmp_path / "m.jsonl")
    assert [(line["step_s"], line["data_wait_s"], line["tokens_per_s"]) for line in found] == [(2.0, 0.5, 10.0)] * 4


def test_seconds_have_four_significant_digits(tmp_path: Path, clock: Clock) -> None:
    with Metrics(tmp_path / "m", step=0, total_steps=1, line=LiveLine(io.StringIO())) as metrics:
        for _ in metrics.time_steps([1]):
            clock.now += 0.0012345678
            metrics.step(result(1), rows_seen=2)
    assert lines(tmp_path / "m")[0]["step_s"] == 0.001235


def test_progress_in_a_file_is_a_whole_line_every_ten_seconds_and_at_the_end(tmp_path: Path, clock: Clock) -> None:
    stream = io.StringIO()
    timed_steps(tmp_path / "m.jsonl", clock, stream)
    first, third, fourth = stream.getvalue().splitlines()  # after 2, 4, 13 and 15 seconds
    assert re.fullmatch(r"step 1/4  loss 1\.5000  10 tokens/s  \d\.\d GiB  6s left", first)
    assert third.startswith("step 3/4  ")
    assert third.endswith("  4s left")  # 13 seconds for 3 steps, what came between them too
    assert fourth.endswith("  0s left")
    assert "\r" not in stream.getvalue()


def test_an_evaluation_counts_its_rows_and_leaves_nothing_behind(tmp_path: Path, clock: Clock) -> None:
    def source() -> Iterator[StepBatches]:
        for number in range(4):
            clock.now += 6.0
            yield StepBatches(rows=tuple(range(100 * number, 100 * number + 100)), doc_ids=(), micro=())

    for path in (tmp_path / "m.jsonl", None):
        stream = io.StringIO()
        with Metrics(path, step=0, total_steps=4, line=LiveLine(stream)) as metrics:
            found = list(metrics.evaluating(source(), num_rows=400))
        assert [batches.rows[0] for batches in found] == [0, 100, 200, 300]
        # After 6, 12, 18 and 24 seconds, the rows before them done.
        expected = ["evaluating row 0/400", "evaluating row 200/400  18s left"]
        assert stream.getvalue().splitlines() == (expected if path else [])


def test_what_an_interrupted_run_has_reached_is_printed(tmp_path: Path, clock: Clock) -> None:
    stream = io.StringIO()
    timed_steps(tmp_path / "m.jsonl", clock, stream, last=2)
    assert [line[:9] for line in stream.getvalue().splitlines()] == ["step 1/4 ", "step 2/4 "]


def test_a_resumed_run_reckons_with_its_own_steps_alone(tmp_path: Path, clock: Clock) -> None:
    stream = io.StringIO()
    with Metrics(tmp_path / "m", step=7, total_steps=10, line=LiveLine(stream)) as metrics:
        for _ in metrics.time_steps([8]):
            clock.now += 30.0
            metrics.step(result(8), rows_seen=16)
    assert stream.getvalue().endswith("  1m00s left\n")


def test_the_memory_of_this_process_is_known() -> None:
    before = module._resident_bytes()
    with mmap.mmap(-1, 64 * 2**20) as held:  # new to this process, whatever torch has kept of earlier tests
        for page in range(0, len(held), mmap.PAGESIZE):
            held[page] = 1
        assert module._resident_bytes() - before > 0.9 * len(held)


def test_durations_are_short() -> None:
    assert [duration(s) for s in (0.4, 59.6, 75, 3600, 8000)] == ["0s", "1m00s", "1m15s", "1h00m", "2h13m"]


def work(**changes: Any) -> Arithmetic:
    fields: dict[str, Any] = {
        "config": tiny_config(), "method": "full", "lora_rank": 16, "recompute_layers": 2,
        "device": torch.device("cuda"), "peak": PEAK,
    }  # fmt: skip
    return Arithmetic(**(fields | changes))


def test_a_cpu_has_no_share_of_a_gpus_speed(tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    stream = io.StringIO()
    with Metrics(
        tmp_path / "m", step=0, total_steps=1, work=work(device=cpu, peak=None), line=LiveLine(stream)
    ) as metrics:
        metrics.step(result(1), rows_seen=2)
    assert lines(tmp_path / "m")[0].keys() & {"mfu", "hfu", "peak_gib"} == set()
    assert "MFU" not in stream.getvalue()


def test_a_gpus_line_has_both_shares_and_the_peak_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 * 2**30)
    stream = io.StringIO()
    peak = 1e9
    with Metrics(tmp_path / "m", step=0, total_steps=1, work=work(peak=peak), line=LiveLine(stream)) as metrics:
        clock.now += 2
        metrics.step(result(1), rows_seen=2)
    (line,) = lines(tmp_path / "m")
    useful = model_flops(tiny_config(), num_tokens=20, sum_squared_lengths=200, method="full")
    assert line["mfu"] == pytest.approx(useful / 2 / peak, abs=1e-4)
    done = hardware_flops(
        tiny_config(), num_tokens=20, sum_squared_lengths=200, method="full", recompute_layers=2, tokens_without_head=13
    )
    assert line["hfu"] == pytest.approx(done / 2 / peak, abs=1e-4)
    assert abs(line["hfu"] - line["mfu"]) > 0.001
    assert line["peak_gib"] == 3.0
    assert f"  MFU {line['mfu']:.1%}  3.0 GiB  " in stream.getvalue()
