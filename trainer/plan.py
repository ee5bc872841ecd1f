"""Which rows a step takes: a pure function of (number of rows, seed, rows seen). Pure numpy.

Epoch after epoch, each in its own random order, the rows form one endless stream of positions. A step
takes the next ``rows_per_step`` of it and may span two epochs; rank r of W takes positions r, r + W, ...
of the step.

Guarantees: each epoch is a permutation of all rows; world size and micro-batch never enter the order; the
number of steps is known before the first; resuming at any position is the same as never having stopped.
Costs: one sort an epoch (about 0.1 s for a million rows); resuming skips nothing and reads nothing.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]

PLAN_VERSION = 1
"""Version of the order below: a state that was written under another one cannot be continued."""

STATE_VERSION = 1
"""Version of the fields of ``Cursor.state``."""

MAX_SEED = 2**63 - 1


@lru_cache(maxsize=4)  # a step may span two epochs, and evaluation has an order of its own
def epoch_order(*, num_rows: int, seed: int, epoch: int) -> Int64:
    """The order of one epoch.

    Args:
        num_rows: R, at least 1.
        seed: from 0 to 2**63 - 1.
        epoch: from 0.

    Returns:
        int64[R], read-only: a permutation of 0 ... R-1. Seed 0, epoch 0, R = 10 gives 0 2 9 1 8 5 4 3 6 7.

    Raises:
        ValueError: for an empty dataset or a seed outside the range.
    """
    if num_rows < 1:
        raise ValueError("the dataset has 0 rows: there is nothing to train on. Pack a source that has targets.")
    if not 0 <= seed <= MAX_SEED:
        raise ValueError(f"seed {seed} is outside 0 to 2**63 - 1; choose another --seed")
    bits = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(num_rows)
    order = np.argsort(bits, kind="stable").astype(np.int64)
    order.flags.writeable = False
    return order


def stream_rows(*, num_rows: int, seed: int, first: int, count: int) -> Int64:
    """Row ids at positions ``first`` ... ``first + count - 1`` of the endless stream.

    Worked example: R = 10, first = 8, count = 4: the last two rows of epoch 0, then the first two of epoch 1.

    Returns:
        int64[count].
    """
    pieces = [np.empty(0, np.int64)]
    position, end = first, first + count
    while position < end:
        epoch, offset = divmod(position, num_rows)
        stop = min(num_rows, offset + end - position)
        pieces.append(epoch_order(num_rows=num_rows, seed=seed, epoch=epoch)[offset:stop])
        position += stop - offset
    return np.concatenate(pieces)


def rank_share(rows: Int64, *, rank: int, world_size: int, micro_rows: int) -> list[Int64]:
    """One rank's part of a step (or of an evaluation), cut into micro-steps.

    Every rank gets the same number of micro-steps. A rank's last ones may hold fewer rows than
    ``micro_rows``, or none: it then runs one row of padding, so that no other rank waits for it.

    Worked example: rows a b c d e, W = 2, micro_rows = 2: 2 micro-steps; rank 0 [a c] [e], rank 1 [b d] [].

    Returns:
        ceil(len(rows) / (W * micro_rows)) arrays of row ids.
    """
    mine = rows[rank::world_size]
    num_micro_steps = -(-len(rows) // (world_size * micro_rows))
    return [mine[i * micro_rows : (i + 1) * micro_rows] for i in range(num_micro_steps)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The order of one run: what each step takes, and when the run ends."""

    num_rows: int
    """R, rows of the dataset."""
    seed: int
    """Seed of the order, from 0 to 2**63 - 1."""
    rows_per_step: int
    """Rows of one optimizer step over all ranks and micro-batches."""
    total_rows: int
    """Positions of the stream that the run takes: E * R for E epochs."""

    @classmethod
    def build(cls, *, num_rows: int, seed: int, rows_per_step: int, epochs: int, steps: int | None) -> Self:
        """A run of ``steps`` full steps where given, else of ``epochs`` epochs with a smaller last step.

        Raises:
            ValueError: for a number below 1, an empty dataset or a seed outside the range.
        """
        for name, value in (("--rows-per-step", rows_per_step), ("--epochs", epochs), ("--steps", steps)):
            if value is not None and value < 1:
                raise ValueError(f"{name} {value} is too small; it has to be at least 1")
        epoch_order(num_rows=num_rows, seed=seed, epoch=0)  # refuses what has no order
        total_rows = epochs * num_rows if steps is None else steps * rows_per_step
        return cls(num_rows=num_rows, seed=seed, rows_per_step=rows_per_step, total_rows=total_rows)

    def rows(self, *, rows_seen: int) -> Int64:
        """Row ids of the step that follows ``rows_seen`` rows: int64, empty when the run is over."""
        count = min(self.rows_per_step, max(0, self.total_rows - rows_seen))
        return stream_rows(num_rows=self.num_rows, seed=self.seed, first=rows_seen, count=count)

    def steps_left(self, *, rows_seen: int) -> int:
        """Steps from there to the end, the last one possibly smaller."""
        return -(-max(0, self.total_rows - rows_seen) // self.rows_per_step)

    def evaluation_rows(self, *, num_rows: int) -> Int64:
        """Every row of an evaluation set of ``num_rows`` once, in the order of its epoch 0."""
        return epoch_order(num_rows=num_rows, seed=self.seed, epoch=0)


@dataclass(kw_only=True, slots=True)
class Cursor:
    """How far a run has come in its stream: the only mutable data state, the same on all ranks."""

    dataset_id: str
    """Identity of the dataset that the positions refer to."""
    seed: int
    """Seed of the order."""
    rows_seen: int = 0
    """Positions taken so far; moved on after the optimizer step."""

    def advance(self, num_rows: int) -> None:
        """Count the rows of a finished step."""
        self.rows_seen += num_rows

    def state(self) -> dict[str, Any]:
        """What a checkpoint stores: {version, dataset_id, seed, plan_version, rows_seen}."""
        return {
            "version": STATE_VERSION,
            "dataset_id": self.dataset_id,
            "seed": self.seed,
            "plan_version": PLAN_VERSION,
            "rows_seen": self.rows_seen,
        }

    @classmethod
    def from_state(cls, state: dict[str, Any], *, dataset_id: str, seed: int) -> Self:
        """Continue a stored position.

        Raises:
            ValueError: if it was written for another dataset, seed or version of the order.
        """
        expected = cls(dataset_id=dataset_id, seed=seed).state()
        differing = [
            f"{name}: {state.get(name)!r} in the checkpoint, {value!r} here"
            for name, value in expected.items()
            if name != "rows_seen" and state.get(name) != value
        ]
        if differing:
            raise ValueError(
                "the data position of this checkpoint cannot be continued; these fields differ:\n  "
                + "\n  ".join(differing)
                + "\nResume with the dataset and seed it was written with, or start anew in another --out."
            )
        return cls(dataset_id=dataset_id, seed=seed, rows_seen=int(state["rows_seen"]))
