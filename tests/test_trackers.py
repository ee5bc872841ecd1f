"""TensorBoard and W&B get what metrics.jsonl gets, over interruptions too; none of them can stop a run."""

import json
import os
import sys
import time
import types
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from tests.training import (
    arguments,
    final_bytes,
    interrupt_after,
    long,
    make_base,
    metrics,
    run,
    trainer,
    wait_for_checkpoint,
)
from trainer import checkpoint, train
from trainer.inputs import Inputs
from trainer.trackers import SCALARS, TensorBoard, Trackers

Points = dict[str, list[tuple[int, float]]]
"""By name, (step, value)."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("trackers"))


def in_metrics(out: Path) -> Points:
    """What metrics.jsonl holds of each scalar."""
    found: Points = defaultdict(list)
    for line in (out / "metrics.jsonl").read_text().splitlines():
        fields = json.loads(line)
        for name in SCALARS:
            if fields.get(name) is not None:
                found[name].append((fields["step"], fields[name]))
    assert found.keys() == {"loss", "eval_loss", "lr", "grad_norm", "tokens_per_s", "step_s", "data_wait_s"}
    return dict(found)


# ---------------------------------------------------------------------------------------------- TensorBoard


@pytest.fixture(scope="module")
def tensorboard() -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: its event files cannot be read back")


def in_tensorboard(out: Path) -> Points:
    """What TensorBoard itself reads from the event files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(out / "tensorboard"), size_guidance={"scalars": 0})
    read.Reload()
    return {name: [(event.step, event.value) for event in read.Scalars(name)] for name in read.Tags()["scalars"]}


def rounded(points: Points) -> Points:
    """As narrow as event files hold values."""
    return {name: [(step, float(np.float32(value))) for step, value in found] for name, found in points.items()}


@pytest.mark.usefixtures("tensorboard")
def test_event_files_hold_what_metrics_hold(base: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert run(base, out, *long(base), "--track", "tensorboard") == 0
    found = in_tensorboard(out)
    assert found == rounded(in_metrics(out))
    assert [step for step, _ in found["loss"]] == list(range(1, 9))
    assert [step for step, _ in found["eval_loss"]] == [0, 3, 6, 8]


@pytest.mark.usefixtures("tensorboard")
@pytest.mark.parametrize("step", [1, 5], ids=["before the first checkpoint", "after one"])
def test_event_files_of_an_interrupted_run_have_no_step_twice(base: Path, tmp_path: Path, step: int) -> None:
    out = tmp_path / "run"
    words = (*long(base), "--track", "tensorboard")
    with pytest.MonkeyPatch.context() as patch:
        interrupt_after(patch, step)
        assert run(base, out, *words) == 130
    assert len(in_tensorboard(out)["loss"]) == step
    assert run(base, out, *words, "--resume") == 0
    assert in_tensorboard(out) == rounded(in_metrics(out))


@pytest.mark.usefixtures("tensorboard")
def test_event_files_of_a_killed_run_have_every_step_up_to_its_checkpoint(base: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    steady = ("--schedule", "constant", "--eval-shards", str(base / "eval"), "--track", "tensorboard")
    process = trainer(*arguments(base, out, *steady, "--steps", "1000000", "--save-every", "3"))
    wait_for_checkpoint(process, out, step=6)
    time.sleep(0.1)
    process.kill()
    process.communicate()
    assert run(base, out, *steady, "--steps", "1", "--resume") == 0  # all of them are done
    done = metrics(out)[-1]["step"]
    assert done >= 6
    found = in_tensorboard(out)
    assert found == rounded(in_metrics(out))
    assert [step for step, _ in found["loss"]] == list(range(1, done + 1))


@pytest.mark.usefixtures("tensorboard")
def test_a_second_start_within_a_second_is_read_after_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Event files are read by name: whole second, host, process as text, so that "10" comes before "9"."""
    monkeypatch.setattr(os, "getpid", lambda: 9)
    time.sleep(1 - time.time() % 1)  # both starts fit into the second that begins
    first = TensorBoard(tmp_path, step=0)
    for step in range(1, 8):
        first.log({"loss": 1.0}, step=step)
    first.close()
    monkeypatch.setattr(os, "getpid", lambda: 10)
    second = TensorBoard(tmp_path, step=3)
    second.log({"loss": 2.0}, step=4)
    second.close()
    assert in_tensorboard(tmp_path)["loss"] == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0)]


@pytest.mark.usefixtures("tensorboard")
def test_what_trackers_still_hold_is_written_before_each_checkpoint(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    save = checkpoint.save

    def saved(*args: Any, **options: Any) -> Any:
        done.append("checkpoint")
        return save(*args, **options)

    monkeypatch.setattr(TensorBoard, "flush", lambda self: done.append("flush"))
    monkeypatch.setattr(checkpoint, "save", saved)
    assert run(base, tmp_path / "run", "--steps", "4", "--save-every", "2", "--track", "tensorboard") == 0
    assert done == ["flush", "checkpoint"] * 2


@pytest.mark.usefixtures("tensorboard")
def test_a_run_is_the_same_with_and_without_trackers_and_may_change_them(base: Path, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        interrupt_after(patch, 5)
        assert run(base, tmp_path / "one", *long(base)) == 130
    assert run(base, tmp_path / "one", *long(base), "--resume", "--track", "tensorboard") == 0
    assert run(base, tmp_path / "two", *long(base)) == 0
    assert metrics(tmp_path / "one") == metrics(tmp_path / "two")
    assert final_bytes(tmp_path / "one") == final_bytes(tmp_path / "two")
    assert not (tmp_path / "two" / "tensorboard").exists()
    assert [step for step, _ in in_tensorboard(tmp_path / "one")["loss"]] == [5, 6, 7, 8]


# ------------------------------------------------------------------------------------------------------ W&B


class Wandb(types.ModuleType):
    """A stand-in for the package and its server: runs by their id, which refuse earlier steps as the real ones do."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.begun: list[dict[str, Any]] = []
        self.rows: dict[str, dict[int, dict[str, float]]] = defaultdict(dict)
        self.finished = 0
        self.broken = ""
        self.down = False

    def init(self, **options: Any) -> "WandbRun":
        self.fail("init")
        self.begun.append(options)
        return WandbRun(self, self.rows[options["id"]])

    def fail(self, where: str) -> None:
        """From the call that is broken on, all are."""
        self.down = self.down or where == self.broken
        if self.down:
            raise ConnectionError(f"no network in {where}")


class WandbRun:
    def __init__(self, module: Wandb, rows: dict[int, dict[str, float]]) -> None:
        self.module, self.rows = module, rows
        self.step = max(rows, default=-1) + 1

    def log(self, scalars: dict[str, float], *, step: int) -> None:
        self.module.fail(f"log {step}")
        assert step >= self.step, "the real one drops it with a warning"
        self.step = step
        row = self.rows.setdefault(step, {})
        assert not row.keys() & scalars.keys()
        row.update(scalars)

    def finish(self) -> None:
        self.module.fail("finish")
        self.module.finished += 1


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Wandb:
    module = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return module


def in_wandb(module: Wandb) -> Points:
    (rows,) = module.rows.values()
    found: Points = defaultdict(list)
    for step, row in sorted(rows.items()):
        for name, value in row.items():
            found[name].append((step, value))
    return dict(found)


def test_wandb_gets_what_metrics_hold_and_the_settings(base: Path, tmp_path: Path, wandb: Wandb) -> None:
    out = tmp_path / "run"
    assert run(base, out, *long(base), "--track", "wandb") == 0
    assert in_wandb(wandb) == in_metrics(out)
    (options,) = wandb.begun
    config = json.loads((out / "config.json").read_text())["settings"]
    assert json.loads(json.dumps(options.pop("config"))) == config
    assert options == {
        "project": "qwen-packed-finetune", "name": "run", "id": (out / "wandb-id").read_text().strip(),
        "resume": "allow", "dir": str(out),
    }  # fmt: skip
    assert wandb.finished == 1


def test_a_resumed_run_goes_on_in_the_same_run_of_wandb_without_a_step_twice(
    base: Path, tmp_path: Path, wandb: Wandb, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    out = tmp_path / "run"
    words = (*long(base), "--track", "wandb")
    with pytest.MonkeyPatch.context() as patch:
        interrupt_after(patch, 5)
        assert run(base, out, *words) == 130
    assert wandb.finished == 1
    assert run(base, out, *words, "--resume") == 0
    first, second = wandb.begun
    assert first["id"] == second["id"]
    assert first["project"] == "mine"
    found, expected = in_wandb(wandb), in_metrics(out)
    assert {name: found[name] for name in ("loss", "eval_loss", "lr", "grad_norm")} == {
        name: expected[name] for name in ("loss", "eval_loss", "lr", "grad_norm")
    }  # step 5 was done twice: what time it took the second time is in metrics.jsonl alone
    assert [step for step, _ in found["step_s"]] == list(range(1, 9))


# -------------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize("where", ["init", "log 0", "log 4", "finish"])
def test_a_tracker_that_fails_costs_one_warning_and_the_others_go_on(
    base: Path, tmp_path: Path, wandb: Wandb, capsys: pytest.CaptureFixture[str], tensorboard: None, where: str
) -> None:
    out = tmp_path / "run"
    wandb.broken = where
    assert run(base, out, *long(base), "--track", "wandb", "--track", "tensorboard") == 0
    said = capsys.readouterr().err
    assert said.count("warning: --track wandb failed") == said.count("warning") == 1
    assert f"training goes on (ConnectionError: no network in {where})" in said
    assert [line["step"] for line in metrics(out) if "loss" in line] == list(range(1, 9))
    assert in_tensorboard(out) == rounded(in_metrics(out))


def test_ctrl_c_in_a_tracker_is_ctrl_c(base: Path, tmp_path: Path, wandb: Wandb) -> None:
    def interrupted(**_: Any) -> None:
        raise KeyboardInterrupt

    wandb.init = interrupted
    assert run(base, tmp_path / "run", "--track", "wandb") == 130


@pytest.mark.parametrize(("name", "module"), [("wandb", "wandb"), ("tensorboard", "torch.utils.tensorboard")])
def test_a_tracker_that_is_not_installed_is_an_error_before_anything_begins(
    base: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    module: str,
) -> None:
    monkeypatch.setitem(sys.modules, module, cast(Any, None))
    assert run(base, tmp_path / "run", "--track", name) == 2
    said = capsys.readouterr().err
    assert f"error: --track {name} cannot be served: ModuleNotFoundError: " in said
    assert f'python -m pip install ".[{name}]"' in said
    assert not (tmp_path / "run").exists()


def test_a_tracker_that_does_not_exist_is_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        run(base, tmp_path / "run", "--track", "notebook")
    assert not (tmp_path / "run").exists()


def test_other_ranks_open_no_tracker(wandb: Wandb, tmp_path: Path) -> None:
    inputs = SimpleNamespace(world=SimpleNamespace(rank=1), settings=SimpleNamespace(track=("wandb",)), out=tmp_path)
    with train.open_metrics(cast(Inputs, inputs), step=0, total_steps=1) as found:
        found.evaluation(step=0, loss=1.0)
        found.sync()
    assert not wandb.begun
    assert not list(tmp_path.iterdir())


def test_a_tracker_named_twice_is_one(wandb: Wandb, tmp_path: Path) -> None:
    trackers = Trackers(["wandb", "wandb"], out=tmp_path, step=0, settings={}, say=print)
    trackers.log({"step": 1, "rows_seen": 4, "loss": None, "lr": 0.5})
    trackers.close()
    assert wandb.finished == 1
    assert in_wandb(wandb) == {"lr": [(1, 0.5)]}
