"""What a run tells while it goes: ``metrics.jsonl``, one object a line, a live line on stderr, and trackers.

A step's line has ``step, rows_seen, tokens, targets, loss, lr, grad_norm``, then what differs from run to run:
``tokens_per_s``; ``step_s``, the seconds from step to step; ``data_wait_s``, those of them in which the loop waited for
the step's rows. On a GPU it has ``peak_gib`` too, the most memory that tensors took on rank 0's GPU since this start,
and where the GPU's speed is known and weights are bf16, ``mfu`` and ``hfu``: the shares of that speed which the model's
arithmetic and what was computed of it, some again, come to (``trainer.flops``). An evaluation's line has
``step, eval_loss``.

Guarantees: rank 0 alone writes; each line is whole or, after a kill, dropped on resume together with all that come
after the checkpoint, so that the file reads as if the run had never stopped; the same settings give the same lines
but for what comes of time and memory. Tokens are those of documents, not padding; evaluations and checkpoints are in
no step's time.
Python's warnings come above the live line while this is open.
Costs: the device is not waited for.
"""

import json
import math
import os
import resource
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO, TypeVar

from trainer.batches import StepBatches
from trainer.flops import Arithmetic
from trainer.liveline import LiveLine
from trainer.memory import GIB
from trainer.step import StepResult
from trainer.trackers import Trackers

T = TypeVar("T")


class Metrics:
    """The metrics file, the live line and the trackers of one run; only keeps time where ``path`` is None."""

    def __init__(
        self,
        path: Path | None,
        *,
        step: int,
        total_steps: int,
        work: Arithmetic | None = None,
        line: LiveLine | None = None,
        trackers: Trackers | None = None,
    ) -> None:
        """Open the file behind ``step``.

        Args:
            path: ``metrics.jsonl``; None on ranks other than 0.
            step: last step that counts, 0 for a new run; lines of later ones are dropped.
            total_steps: steps at the end of the run.
            work: what a token costs; None leaves out the shares of a GPU's speed.
            line: where progress goes, by default stderr; closed with this.
            trackers: take every line too; closed with this.
        """
        self._file = None if path is None else _open_after(path, step)
        self._work = work
        self._line = line or LiveLine(sys.stderr)
        self._trackers = trackers
        self._total_steps = total_steps
        self._first_step = step
        self._begun = self._since = time.perf_counter()
        self._waited = 0.0
        self._showwarning = warnings.showwarning

    def time_steps(self, source: Iterable[T]) -> Iterator[T]:
        """The items of ``source``, one a step. A step's time begins when its item is asked for: what lies between
        ``step`` and the next item (evaluation, saving) is nobody's.
        """
        items = iter(source)
        self._begun = time.perf_counter()
        while True:
            self._since = time.perf_counter()
            try:
                item = next(items)
            except StopIteration:
                return
            self._waited = time.perf_counter() - self._since
            yield item

    def step(self, result: StepResult, *, rows_seen: int) -> None:
        """Write the line of a finished step and renew the live line."""
        elapsed = time.perf_counter() - self._since
        rate = result.num_tokens / elapsed
        figures = self._work.figures(result, elapsed) if self._work else {}
        self._write({
            "step": result.step,
            "rows_seen": rows_seen,
            "tokens": result.num_tokens,
            "targets": result.num_targets,
            "loss": result.loss,
            "lr": result.lr,
            "grad_norm": result.grad_norm,
            "tokens_per_s": round(rate, 1),
            "step_s": _rounded(elapsed),
            "data_wait_s": _rounded(self._waited),
            **figures,
        })  # fmt: skip
        if result.loss is None:
            self.say(f"step {result.step}: none of its rows has a target; nothing was updated")
        if self._file is not None:
            self._line.renew(self._parts(result, rate, figures), last=result.step == self._total_steps)

    def evaluating(self, source: Iterable[StepBatches], *, num_rows: int) -> Iterator[StepBatches]:
        """The items of an evaluation of ``num_rows`` rows; the live line counts them and is gone afterwards."""
        begun, done = time.perf_counter(), 0
        try:
            for batches in source:
                if self._file is not None:
                    left = (time.perf_counter() - begun) / done * (num_rows - done) if done else None
                    self._line.renew([
                        f"evaluating row {done:,}/{num_rows:,}",
                        *([] if left is None else [f"{duration(left)} left"]),
                    ])  # fmt: skip
                yield batches
                done += len(batches.rows)
        finally:
            if self._file is not None:
                self._line.clear()

    def evaluation(self, *, step: int, loss: float | None) -> None:
        """Write the line of an evaluation."""
        self._write({"step": step, "eval_loss": loss})
        shown = "no target in the evaluation rows" if loss is None else f"{loss:.4f}"
        self.say(f"step {step}: evaluation loss {shown}")

    def say(self, text: str) -> None:
        """Print one line of its own on rank 0."""
        if self._file is not None:
            self._line.say(text)

    def sync(self) -> None:
        """Make what was written durable: before a checkpoint that counts on it."""
        if self._file is not None:
            os.fsync(self._file.fileno())
            if self._trackers is not None:
                self._trackers.flush()

    def close(self) -> None:
        """Close the file, end the live line, then the trackers' logs, which may take a while."""
        if self._file is not None and not self._file.closed:
            self._line.close()
            self._file.close()
            if self._trackers is not None:
                self._trackers.close()

    def __enter__(self) -> Self:
        if self._file is not None:
            warnings.showwarning = self._warn  # type: ignore[assignment]  # or it breaks the live line
        return self

    def _warn(self, message: Warning | str, category: type[Warning], *_place: Any) -> None:
        self.say(f"warning: {message} ({category.__name__})")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        warnings.showwarning = self._showwarning
        self.close()

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(line, allow_nan=False) + "\n")
            self._file.flush()
            if self._trackers is not None:
                self._trackers.log(line)

    def _parts(self, result: StepResult, rate: float, figures: dict[str, float]) -> list[str]:
        """Words of the live line. Evaluations and checkpoints so far are in the time that is left."""
        a_step = (time.perf_counter() - self._begun) / (result.step - self._first_step)
        loss = "-" if result.loss is None else f"{result.loss:.4f}"
        gib = figures["peak_gib"] if "peak_gib" in figures else _resident_bytes() / GIB
        return [
            f"step {result.step}/{self._total_steps}",
            f"loss {loss}",
            f"{rate:,.0f} tokens/s",
            *([f"MFU {figures['mfu']:.1%}"] if "mfu" in figures else []),
            f"{gib:.1f} GiB",
            f"{duration(a_step * (self._total_steps - result.step))} left",
        ]


def _rounded(seconds: float) -> float:
    """To 4 significant digits."""
    return float(f"{seconds:.4g}")


def _resident_bytes() -> int:
    """Memory of this process now; its most so far where the system tells no more (anywhere but on Linux)."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024


def _open_after(path: Path, step: int) -> TextIO:
    """The file, opened for appending, with the whole lines up to ``step`` in it and nothing else.

    From the beginning nothing is kept: the evaluation before the first step is done again.
    """
    kept = [line for line in _lines(path) if step > 0 and _step_of(line) <= step]
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text("".join(kept), encoding="utf-8")
    temporary.replace(path)
    return path.open("a", encoding="utf-8")


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []


def _step_of(line: str) -> float:
    """The step of a line; infinite for one that a kill cut short."""
    try:
        return float(json.loads(line)["step"]) if line.endswith("\n") else math.inf
    except (ValueError, KeyError, TypeError):
        return math.inf


def duration(seconds: float) -> str:
    """``75`` -> ``1m15s``; ``8000`` -> ``2h13m``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
