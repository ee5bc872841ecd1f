"""What a run tells while it goes: ``metrics.jsonl``, one object a line, and a progress line on stderr.

A step's line has ``step, rows_seen, targets, loss, lr, grad_norm, tokens_per_s``; an evaluation's ``step, eval_loss``.

Guarantees: rank 0 alone writes; each line is whole or, after a kill, dropped on resume together with all that come
after the checkpoint, so that the file reads as if the run had never stopped; the same settings give the same lines
but for ``tokens_per_s`` (tokens of documents, not padding, over the time from step to step).
"""

import json
import math
import os
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from trainer.step import StepResult

SECONDS_BETWEEN_LINES = 10.0
"""How often progress is printed where stderr is a file; a terminal's line is renewed every step."""


class Metrics:
    """The metrics file and the progress line of one run; does nothing but keep time where ``path`` is None."""

    def __init__(self, path: Path | None, *, step: int, total_steps: int, stream: TextIO | None = None) -> None:
        """Open the file behind ``step``.

        Args:
            path: ``metrics.jsonl``; None on ranks other than 0.
            step: last step that counts, 0 for a new run; lines of later ones are dropped.
            total_steps: steps at the end of the run.
            stream: where progress goes, by default stderr.
        """
        self._file = None if path is None else _open_after(path, step)
        self._stream = stream or sys.stderr
        self._total_steps = total_steps
        self._first_step = step
        self._seconds = 0.0
        self._printed = -math.inf
        self._shown = 0
        self.start_clock()

    def start_clock(self) -> None:
        """Measure the next step from here: what lay between (evaluation, saving) is not its time."""
        self._since = time.perf_counter()

    def step(self, result: StepResult, *, rows_seen: int) -> None:
        """Write the line of a finished step and renew the progress line."""
        elapsed = time.perf_counter() - self._since
        self._seconds += elapsed
        rate = result.num_tokens / elapsed
        self._write({
            "step": result.step,
            "rows_seen": rows_seen,
            "targets": result.num_targets,
            "loss": result.loss,
            "lr": result.lr,
            "grad_norm": result.grad_norm,
            "tokens_per_s": round(rate, 1),
        })  # fmt: skip
        if result.loss is None:
            self.say(f"step {result.step}: none of its rows has a target; nothing was updated")
        self._progress(result, rate)
        self.start_clock()

    def evaluation(self, *, step: int, loss: float | None) -> None:
        """Write the line of an evaluation."""
        self._write({"step": step, "eval_loss": loss})
        shown = "no target in the evaluation rows" if loss is None else f"{loss:.4f}"
        self.say(f"step {step}: evaluation loss {shown}")

    def say(self, text: str) -> None:
        """Print one line of its own on rank 0."""
        if self._file is not None:
            self._end_line()
            print(text, file=self._stream, flush=True)

    def sync(self) -> None:
        """Make what was written durable: before a checkpoint that counts on it."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file and end the progress line."""
        if self._file is not None and not self._file.closed:
            self._end_line()
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(line, allow_nan=False) + "\n")
            self._file.flush()

    def _progress(self, result: StepResult, rate: float) -> None:
        if self._file is None:
            return
        last = result.step == self._total_steps
        on_terminal = self._stream.isatty()
        now = time.perf_counter()
        if not (on_terminal or last or now - self._printed >= SECONDS_BETWEEN_LINES):
            return
        self._printed = now
        done = result.step - self._first_step
        left = duration(self._seconds / done * (self._total_steps - result.step))
        loss = "-" if result.loss is None else f"{result.loss:.4f}"
        text = f"step {result.step}/{self._total_steps}  loss {loss}  {rate:,.0f} tokens/s  {left} left"
        if on_terminal:
            self._stream.write("\r" + text.ljust(self._shown))
            self._shown = len(text)
            self._stream.flush()
        else:
            print(text, file=self._stream, flush=True)

    def _end_line(self) -> None:
        if self._shown:
            print(file=self._stream)
            self._shown = 0


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
