"""A run's figures in TensorBoard and Weights & Biases, beside ``metrics.jsonl``.

    python -m trainer.train ... --track tensorboard --track wandb
    tensorboard --logdir RUN/tensorboard

    a line of metrics.jsonl ── SCALARS ──▶ RUN/tensorboard    event files
                                       └──▶ W&B               its files in RUN/wandb, the run's id in RUN/wandb-id

W&B takes its own variables: WANDB_API_KEY, WANDB_MODE=offline, WANDB_ENTITY, WANDB_PROJECT.

Guarantees: rank 0 alone writes; a resumed run goes on in the same log, no step twice: TensorBoard drops what came after
the checkpoint, W&B keeps the first figures of a step that is done again. A tracker that fails costs one warning, never
the run; that its package is missing is said before anything begins.
Costs: some 0.5 ms a step for TensorBoard; it is in no step's time.
"""

import contextlib
import importlib
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from trainer.report.log import FIELDS

TrackerName = Literal["tensorboard", "wandb"]

SCALARS = tuple(name for name in FIELDS if name not in ("rows_seen", "tokens", "targets"))
"""Fields of ``metrics.jsonl`` that are tracked, under the same names."""

MODULES: dict[TrackerName, str] = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}
"""What each tracker imports."""

PROJECT = "qwen-packed-finetune"
"""Project in W&B, where WANDB_PROJECT names none."""

WANDB_ID = "wandb-id"
"""File that keeps the identity of a run in W&B."""


def require(names: Iterable[TrackerName]) -> None:
    """Check that trackers can be imported.

    Raises:
        ValueError: naming the extra to install.
    """
    for name in names:
        try:
            importlib.import_module(MODULES[name])
        except Exception as error:  # not there, or not for the versions of what it needs
            raise ValueError(
                f"--track {name} cannot be served: {type(error).__name__}: {error}. "
                f'Install it with: python -m pip install ".[{name}]", or leave the option out.'
            ) from None


class Tracker(Protocol):
    """A place where scalars go."""

    def log(self, scalars: Mapping[str, float], *, step: int) -> None:
        """Take the figures of a step; a step can come in several parts."""

    def flush(self) -> None:
        """Keep over a kill what was logged so far."""

    def close(self) -> None:
        """End the log."""


class Trackers:
    """Every tracker of a run; those that fail leave it one by one."""

    def __init__(
        self,
        names: Iterable[TrackerName],
        *,
        out: Path,
        step: int,
        settings: Mapping[str, Any],
        say: Callable[[str], None],
    ) -> None:
        """Open them.

        Args:
            names: which, each once.
            out: the run's folder.
            step: last step that counts, 0 for a new run; what they have of later ones does not.
            settings: of the run, as JSON values.
            say: takes the warnings.
        """
        self._say = say
        self._open: dict[TrackerName, Tracker] = {}
        for name in dict.fromkeys(names):
            with self._survive(name):
                self._open[name] = TensorBoard(out, step) if name == "tensorboard" else WandB(out, settings)

    def log(self, line: Mapping[str, Any]) -> None:
        """Hand on a line of ``metrics.jsonl``."""
        scalars = {name: line[name] for name in SCALARS if line.get(name) is not None}
        self._each(lambda tracker: tracker.log(scalars, step=line["step"]))

    def flush(self) -> None:
        """Keep over a kill what was logged so far: before a checkpoint that counts on it."""
        self._each(lambda tracker: tracker.flush())

    def close(self) -> None:
        """End all logs."""
        self._each(lambda tracker: tracker.close())

    def _each(self, act: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._open.items()):
            with self._survive(name):
                act(tracker)

    @contextlib.contextmanager
    def _survive(self, name: TrackerName) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever a network, a disk or another's program does
            self._open.pop(name, None)
            self._say(
                f"warning: --track {name} failed, so nothing more is tracked there; training goes on "
                f"({type(error).__name__}: {error})"
            )


class TensorBoard:
    """Event files in ``RUN/tensorboard``."""

    def __init__(self, out: Path, step: int) -> None:
        module = importlib.import_module(MODULES["tensorboard"])  # only those who ask for it have it
        folder = out / "tensorboard"
        # Files are read in the order of their names, which begin with whole seconds: of two starts within one second
        # the later could be read first, and what it drops of the earlier would come back.
        while any(folder.glob(f"events.out.tfevents.{int(time.time()):010d}.*")):
            time.sleep(0.05)
        # From the beginning nothing is kept, an evaluation before the first step neither.
        self._writer = module.SummaryWriter(str(folder), purge_step=step + 1 if step else 0)

    def log(self, scalars: Mapping[str, float], *, step: int) -> None:
        """Add one event a scalar."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        """Write what a background thread still holds."""
        self._writer.flush()

    def close(self) -> None:
        """Write the rest."""
        self._writer.close()


class WandB:
    """A run in Weights & Biases."""

    def __init__(self, out: Path, settings: Mapping[str, Any]) -> None:
        module = importlib.import_module(MODULES["wandb"])
        file = out / WANDB_ID
        if not file.exists():
            file.write_text(secrets.token_hex(4) + "\n")
        self._run = module.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT), name=out.name, id=file.read_text().strip(),
            resume="allow", dir=str(out), config=dict(settings),
        )  # fmt: skip
        self._first = int(self._run.step)  # it refuses steps before those it has

    def log(self, scalars: Mapping[str, float], *, step: int) -> None:
        """Add the scalars to the step's, unless an earlier start of the run has logged it."""
        if step >= self._first:
            self._run.log(dict(scalars), step=step)

    def flush(self) -> None:
        """Nothing: another process has it already."""

    def close(self) -> None:
        """Wait for the last upload."""
        self._run.finish()
