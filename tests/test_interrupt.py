"""Ctrl-C while modules are still being loaded."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.interrupt import hear, quiet_imports
from tests.scene import ROOT

# Short sleeps: a signal that comes just before a long one would be heard after it only.
SLOW = "import pathlib, time\npathlib.Path({flag!r}).touch()\nfor _ in range(18_000): time.sleep(0.05)\n"


def started(tmp_path: Path, module: str, disposition: Any) -> subprocess.Popen[str]:
    """A command that waits in the import of its first package from elsewhere."""
    flag = tmp_path / "importing"
    (tmp_path / "tyro.py").write_text(SLOW.format(flag=str(flag)))
    (tmp_path / "numpy.py").write_text(SLOW.format(flag=str(flag)))
    process = subprocess.Popen(
        [sys.executable, "-m", module, "--help"],
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, disposition),
    )
    deadline = time.monotonic() + 300
    while not flag.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return process


COMMANDS = (
    "pipeline.pack", "pipeline.verify", "pipeline.report", "trainer.train", "trainer.doctor", "trainer.bench",
    "trainer.timeline", "trainer.adapters", "trainer.report",
)  # fmt: skip


@pytest.mark.parametrize("module", COMMANDS)
def test_ctrl_c_during_imports_exits_130_without_a_traceback(tmp_path: Path, module: str) -> None:
    process = started(tmp_path, module, signal.SIG_DFL)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=300)
    assert process.returncode == 130, error
    assert error.startswith("\ninterrupted")
    assert error.count("\n") == 2


def test_ctrl_c_that_a_background_job_ignores_stays_ignored(tmp_path: Path) -> None:
    process = started(tmp_path, "pipeline.pack", signal.SIG_IGN)
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=0.5)
    process.kill()
    process.communicate()


@pytest.fixture
def restored() -> Any:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_once_the_command_runs_ctrl_c_is_an_exception_again(restored: None) -> None:
    quiet_imports("bye")
    assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    hear()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_another_handler_is_left_alone(restored: None) -> None:
    def handler(*_: object) -> None:
        pass

    signal.signal(signal.SIGINT, handler)
    quiet_imports("bye")
    hear()
    assert signal.getsignal(signal.SIGINT) is handler
