"""Traces of a real loop."""

import subprocess
import sys
from pathlib import Path

import torch

from trainer.events import read
from trainer.timeline import analyse, summary
from trainer.tracing import tracer

ROOT = Path(__file__).resolve().parents[1]


def test_a_real_trace_has_the_steps_that_were_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "run" / "trace.json.gz"
    weight = torch.randn(32, 32, requires_grad=True)
    with tracer(path, first=2, num_steps=2) as trace:
        for _ in range(6):
            (torch.randn(8, 32) @ weight).sum().backward()
            float(weight.detach().sum())
            trace.step()
    assert [p.name for p in path.parent.iterdir()] == ["trace.json.gz"]
    steps = analyse(read(path))
    assert len(steps) == 2
    for step in steps:
        assert step.num_ops > 4
        assert 0 < step.cpu_ms <= 2 * step.wall_ms  # forward and backward threads
        assert step.num_scalar_reads == 1
        assert list(step.waits) == ["aten::item > aten::_local_scalar_dense"]
    assert summary(steps)["num_gpu_ops"] == 0


def test_the_profiler_prints_nothing(tmp_path: Path) -> None:
    code = (
        "import torch; from pathlib import Path; from trainer.tracing import tracer\n"
        f"with tracer(Path({str(tmp_path / 't.json')!r}), first=1, num_steps=1) as trace:\n"
        "    for _ in range(3): torch.ones(1).sum(); trace.step()"
    )
    done = subprocess.run([sys.executable, "-W", "always", "-c", code], capture_output=True, check=True, cwd=ROOT)
    assert (done.stdout, done.stderr) == (b"", b"")
    assert (tmp_path / "t.json").exists()


def test_tracing_nothing_costs_nothing_and_writes_nothing(tmp_path: Path) -> None:
    for path, num_steps in ((None, 3), (tmp_path / "trace.json", 0)):
        with tracer(path, first=1, num_steps=num_steps) as trace:
            trace.step()
    assert list(tmp_path.iterdir()) == []
