"""These tests need a CUDA device and the extra `gpu`; elsewhere they are skipped, and say so.

`python -m pytest tests/gpu --record data/records` writes how many passed there.
"""

import shlex
import sys
import time
from pathlib import Path

import pytest
import torch

from trainer.measured import describe, record_path, write_whole

BEGUN = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Known where the command names this folder."""
    parser.addoption("--record", type=Path, default=None, help="folder for a record of the outcome")
    parser.addoption("--commit", default="", help="the commit tested, or a file that holds it")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Write the record, if it is asked for."""
    folder: Path | None = config.getoption("--record", default=None)
    if folder is None:
        return
    kinds = ("passed", "failed", "error", "skipped")
    figures = {
        **{kind: {"value": len(terminalreporter.stats.get(kind, [])), "unit": "tests"} for kind in kinds},
        "seconds": {"value": round(time.monotonic() - BEGUN, 1), "unit": "s"},
    }
    device = "cuda" if torch.cuda.is_available() else "cpu"
    command = shlex.join(["python", "-m", "pytest", *sys.argv[1:]])
    commit = config.getoption("--commit")
    record = describe("tests/gpu", figures, command=command, commit=commit, device=device, notes="")
    write_whole(record_path(folder, "gpu-tests", device), record)


@pytest.fixture(scope="session")
def gpu() -> torch.device:
    """The device. Skips where there is none."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here: the fused kernels cannot run")
    return torch.device("cuda")
