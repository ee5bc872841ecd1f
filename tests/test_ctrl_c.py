"""Ctrl-C while a command works: exit status 130 and no traceback."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainer import adapters, bench, demo, doctor, timeline


def interrupted(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


COMMANDS: dict[str, tuple[Any, str, list[str], Callable[[], int]]] = {
    "doctor": (doctor, "_examine_all", ["--device", "cpu"], lambda: doctor.main(sys.argv[1:])),
    "timeline": (timeline, "read", ["trace.json"], lambda: timeline.main(sys.argv[1:])),
    "adapters": (adapters, "merge", ["merge", "--source", ".", "--adapter", ".", "--out", "merged"], adapters.main),
    "demo": (demo, "final_loss", [".", "--shards", ".", "--eval-shards", "."], demo.main),
    "bench": (bench, "run_ladder", ["ladder", "--shards", "."], lambda: bench.main(sys.argv[1:])),
}
"""Module, what is at work in it when Ctrl-C comes, arguments, how it is called."""


@pytest.mark.parametrize("name", COMMANDS)
def test_ctrl_c_ends_a_command_with_130(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module, working, arguments, call = COMMANDS[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [f"trainer.{name}", *arguments])
    monkeypatch.setattr(module, working, interrupted)
    assert call() == 130
    assert "Traceback" not in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
