"""Runs that are interrupted, killed and resumed: the same bits as a run that never stopped; one process at a time."""

import errno
import fcntl
import hashlib
import json
import os
import platform
import random
import re
import shlex
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

from tests.training import (
    BF16,
    LORA,
    SHORT,
    arguments,
    final_bytes,
    interrupt_after,
    long,
    make_base,
    metrics,
    on_two_ranks,
    once,
    run,
    trainer,
    wait_for_checkpoint,
)
from trainer import checkpoint, train
from trainer.kernels import Kernels, select
from trainer.record import locked, read, require_folder
from trainer.step import learning_rate


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("train"))


@pytest.fixture(scope="module")
def uninterrupted(base: Path) -> Path:
    out = base / "uninterrupted"
    assert run(base, out, *long(base)) == 0
    return out


def test_two_runs_of_the_same_settings_are_equal_bit_by_bit(base: Path, uninterrupted: Path, tmp_path: Path) -> None:
    assert run(base, tmp_path / "again", *long(base)) == 0
    assert metrics(tmp_path / "again") == metrics(uninterrupted)
    assert final_bytes(tmp_path / "again") == final_bytes(uninterrupted)


def test_another_seed_is_another_run(base: Path, uninterrupted: Path, tmp_path: Path) -> None:
    assert run(base, tmp_path / "seed", *long(base), "--seed", "1") == 0
    assert metrics(tmp_path / "seed") != metrics(uninterrupted)


def test_a_run_interrupted_and_resumed_twice_equals_an_uninterrupted_one(
    base: Path, uninterrupted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    words = arguments(base, out, *long(base))
    for step in (5, 7):  # the first lies between checkpoints, the second is reached from the one after step 4
        with pytest.MonkeyPatch.context() as patch:
            interrupt_after(patch, step)
            assert train.main(words) == 130
        said = capsys.readouterr().err
        line = re.findall(r"go on with:\n  python -m trainer.train (.*)", said)[0]
        words = shlex.split(line)  # what it says is what works
        assert "--resume" in words
    assert train.main(words) == 0
    assert metrics(out) == metrics(uninterrupted)
    assert final_bytes(out) == final_bytes(uninterrupted)
    assert not [path for path in (out / "checkpoints").iterdir() if not path.name.startswith("step-")]


def test_a_run_interrupted_before_its_first_checkpoint_begins_again(
    base: Path, uninterrupted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        interrupt_after(patch, 1)
        assert run(base, out, *long(base)) == 130
    assert "There is no checkpoint yet" in capsys.readouterr().err
    assert run(base, out, *long(base), "--resume") == 0
    assert metrics(out) == metrics(uninterrupted)


def test_a_run_killed_at_any_moment_equals_an_uninterrupted_one(
    base: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    words = arguments(base, out, *long(base))
    rng = random.Random(time.time_ns())
    for wanted, more in ((1, ()), (3, ("--resume",))):
        process = trainer(*once(*words, "--save-every", "1", *more))
        wait_for_checkpoint(process, out, step=wanted)
        time.sleep(rng.random() * 0.2)
        process.kill()
        process.communicate()
    assert run(base, out, *long(base), "--resume") == 0
    assert metrics(out) == metrics(uninterrupted)
    assert final_bytes(out) == final_bytes(uninterrupted)


@pytest.mark.parametrize("more", [BF16, LORA + BF16], ids=["bf16", "lora"])
def test_in_bf16_and_with_adapters_too_an_interrupted_run_equals_an_uninterrupted_one(
    base: Path, tmp_path: Path, more: tuple[str, ...]
) -> None:
    assert run(base, tmp_path / "one", *SHORT, *more) == 0
    with pytest.MonkeyPatch.context() as patch:
        interrupt_after(patch, 3)
        assert run(base, tmp_path / "two", *SHORT, *more) == 130
    assert [path.name for path in checkpoint.steps(tmp_path / "two")] == ["step-00000002"]
    torch.manual_seed(3)  # the state of the generator is restored too
    assert run(base, tmp_path / "two", *SHORT, *more, "--resume") == 0
    assert metrics(tmp_path / "one") == metrics(tmp_path / "two")
    first, second = (every_file(tmp_path / name) for name in ("one", "two"))
    assert first == second
    assert len(first) >= 8


def every_file(out: Path) -> dict[str, str]:
    """Hashes of all that a run leaves but of what tells times, places and settings."""
    files = [file for name in ("checkpoints", "export", "adapter") for file in sorted((out / name).rglob("*.*"))]
    return {str(file.relative_to(out)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def test_a_checkpoint_of_another_method_or_optimizer_is_not_resumed(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(base, tmp_path / "run", "--steps", "1") == 0
    assert run(base, tmp_path / "run", "--steps", "2", "--resume", *LORA) == 2
    said = capsys.readouterr().err
    assert "--method: 'full' -> 'lora'" in said
    assert "--lora-rank: 16 -> 4" in said


def test_recomputation_changes_nothing_and_may_change_on_resume(base: Path, tmp_path: Path) -> None:
    steady = ("--schedule", "constant")
    assert run(base, tmp_path / "none", *steady, "--steps", "2") == 0
    assert run(base, tmp_path / "all", *steady, "--steps", "1", "--recompute", "all") == 0
    assert run(base, tmp_path / "all", *steady, "--steps", "2", "--recompute", "1", "--resume", "--keep", "1") == 0
    assert metrics(tmp_path / "all") == metrics(tmp_path / "none")
    assert final_bytes(tmp_path / "all") == final_bytes(tmp_path / "none")


def test_what_a_divergence_asks_to_change_may_change_on_resume_and_is_recorded(base: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        interrupt_after(patch, 3)
        assert run(base, out, *SHORT) == 130
    changed = {"lr": 0.004, "warmup_steps": 3, "clip": 0.01}
    words = [word for name, value in changed.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    assert run(base, out, *SHORT, *words, "--resume") == 0
    rates = [line["lr"] for line in metrics(out) if "lr" in line]
    wanted = [(0.01, 1), (0.01, 1), (0.004, 3), (0.004, 3)]  # it goes on as if the later values had always been so
    for step, (peak, warmup_steps) in enumerate(wanted, start=1):
        expected = learning_rate(step, peak=peak, schedule="cosine", warmup_steps=warmup_steps, total_steps=4)
        assert rates[step - 1] == pytest.approx(expected), step
    record = read(out)
    assert {name: record["settings"][name] for name in changed} == changed
    assert record["earlier"][0]["settings"]["lr"] == 0.01


def test_resuming_a_finished_run_says_that_nothing_is_left(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert run(base, out) == 0
    before = (metrics(out), final_bytes(out))
    assert run(base, out, "--resume") == 0
    assert "nothing is left to train: all 3 steps are done" in capsys.readouterr().err
    assert (metrics(out), final_bytes(out)) == before
    assert run(base, out, "--resume", "--steps", "2") == 0
    assert json.loads((out / "config.json").read_text())["total_steps"] == 3, "not fewer than are done"


def test_where_nothing_is_left_to_train_a_smaller_keep_still_counts(base: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert run(base, out, "--steps", "3", "--save-every", "1", "--keep", "3") == 0
    assert [checkpoint.step_of(path) for path in checkpoint.steps(out)] == [1, 2, 3]
    assert run(base, out, "--steps", "3", "--save-every", "1", "--keep", "1", "--resume") == 0
    assert [checkpoint.step_of(path) for path in checkpoint.steps(out)] == [3]


@pytest.mark.parametrize("method", ["full", "lora"])
def test_an_export_that_may_not_be_replaced_is_refused_before_the_first_step(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], method: str
) -> None:
    out, words = tmp_path / "run", ("--method", method, "--schedule", "constant")
    assert run(base, out, *words, "--steps", "2") == 0
    (notes,) = [folder / "README.md" for folder in (out / "export", out / "adapter") if folder.exists()]
    notes.write_text("mine")
    before = metrics(out)
    assert run(base, out, *words, "--steps", "4", "--resume") == 2
    assert f"{notes.parent} exists and is not an" in capsys.readouterr().err
    assert (metrics(out), notes.read_text()) == (before, "mine")
    notes.unlink()
    assert run(base, out, *words, "--steps", "4", "--resume") == 0
    assert len(metrics(out)) == 4


def test_the_base_of_adapters_may_have_been_moved(
    base: Path, uninterrupted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (*LORA, "--schedule", "constant")
    before, now = tmp_path / "before", tmp_path / "now"
    shutil.copytree(uninterrupted / "export", before)
    assert run(base, tmp_path / "run", "--model", str(before), *words, "--steps", "2") == 0
    before.rename(now)
    assert run(base, tmp_path / "run", "--model", str(now), *words, "--steps", "4", "--resume") == 0
    assert f"changed since the last start: --model: '{before}' -> '{now}'" in capsys.readouterr().err
    assert run(base, tmp_path / "whole", "--model", str(now), *words, "--steps", "4") == 0
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
    assert run(base, tmp_path / "second", "--steps", "1", "--seed", "3") == 0
    (tmp_path / "second" / "export").rename(tmp_path / "other")
    before = (tmp_path / "run" / "config.json").read_bytes()
    assert run(base, tmp_path / "run", "--model", str(tmp_path / "other"), *words, "--steps", "6", "--resume") == 2
    assert (tmp_path / "run" / "config.json").read_bytes() == before, "a start that failed is none"


def test_a_finished_run_can_be_extended_past_the_end_of_an_epoch(base: Path, tmp_path: Path) -> None:
    steady = ("--schedule", "constant", "--rows-per-step", "5")  # the last of the words counts
    assert run(base, tmp_path / "one", *steady, "--epochs", "1") == 0
    assert run(base, tmp_path / "one", *steady, "--epochs", "2", "--resume", "--keep", "1") == 0
    assert run(base, tmp_path / "two", *steady, "--epochs", "2") == 0
    assert metrics(tmp_path / "one") == metrics(tmp_path / "two")
    assert final_bytes(tmp_path / "one") == final_bytes(tmp_path / "two")
    assert len(checkpoint.steps(tmp_path / "one")) == 1


def test_other_settings_or_data_are_not_resumed(
    base: Path, uninterrupted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(base, uninterrupted, *long(base), "--resume", "--weight-decay", "0.5", "--seed", "9") == 2
    said = capsys.readouterr().err
    assert "--weight-decay: 0.0 -> 0.5" in said
    assert "--seed: 0 -> 9" in said
    assert run(base, uninterrupted, *long(base), "--resume", "--shards", str(base / "eval")) == 2
    assert "dataset_id: " in capsys.readouterr().err


def test_the_place_of_a_resumed_run_is_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no run began there"):
        require_folder(tmp_path, resume=True)
    require_folder(tmp_path, resume=False)
    require_folder(tmp_path / "new", resume=False)


def test_a_second_process_is_refused_until_the_first_has_ended_by_ctrl_c_or_a_kill(base: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = arguments(base, out, "--schedule", "constant", "--steps", "1000000", "--save-every", "1")
    first = trainer(*words)
    wait_for_checkpoint(first, out, step=1)
    second = trainer(*words, "--resume")
    _, said = second.communicate(timeout=600)
    assert second.returncode == 2
    assert f"another process is training there (process {first.pid} on {platform.node()})" in said
    assert first.poll() is None
    first.send_signal(signal.SIGINT)
    _, said = first.communicate(timeout=600)
    assert first.returncode == 130
    assert "go on with:" in said

    newest = checkpoint.latest(out)
    assert newest is not None
    third = trainer(*words, "--resume")
    wait_for_checkpoint(third, out, step=int(newest.name.removeprefix("step-")) + 1)
    third.kill()
    _, said = third.communicate(timeout=600)
    assert f"going on after step {int(newest.name.removeprefix('step-'))}" in said
    assert run(base, out, "--schedule", "constant", "--steps", "1", "--resume") == 0  # all of them are done


def test_a_new_run_does_not_begin_where_another_just_does(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    with locked(out, say=print):
        assert run(base, out) == 2
    assert "another process is training there" in capsys.readouterr().err
    assert [path.name for path in out.iterdir()] == [".lock"]
    assert run(base, out, "--steps", "1") == 0


def test_every_rank_ends_where_another_process_holds_the_folder(base: Path, tmp_path: Path) -> None:
    with locked(tmp_path / "run", say=print):
        assert on_two_ranks(arguments(base, tmp_path / "run")) == [2, 2]


def test_a_new_run_does_not_begin_where_another_has_ended_meanwhile(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"

    def look_then_lose(device: torch.device, *, accept_slow: bool) -> Kernels:
        (out / "export").mkdir(parents=True)
        return select(device, accept_slow=accept_slow)

    monkeypatch.setattr(train, "select", look_then_lose)
    assert run(base, out) == 2
    assert "is not empty. Add --resume" in capsys.readouterr().err
    assert sorted(path.name for path in out.iterdir()) == [".lock", "export"]


def test_a_file_system_without_locks_costs_a_warning(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert run(base, tmp_path / "run", "--steps", "1") == 0
    assert "see to it that no other process trains there" in capsys.readouterr().err


def test_what_a_diverged_run_is_told_to_change_may_change_and_is_said(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert run(base, out, "--steps", "2", "--save-every", "1") == 0
    capsys.readouterr()
    changed = ("--lr", "1e-4", "--warmup-steps", "1", "--clip", "0.5")
    assert run(base, out, "--steps", "3", "--save-every", "1", "--resume", *changed) == 0
    said = capsys.readouterr().err
    for line in ("--lr: 0.01 -> 0.0001", "--clip: 1.0 -> 0.5", "--warmup-steps: 0 -> 1"):
        assert f"changed since the last start: {line}" in said
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert steps[-1]["lr"] < 1e-4
