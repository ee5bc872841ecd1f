"""The figures of a run, from its log and its ``config.json``: what the report says, whatever it is printed on.

    figures(read(path), now=time.time()) -> Figures

Guarantees: every figure is arithmetic over the logged numbers; what was not recorded is None, never 0. Percentiles of
steps' times are times that a step took (nearest rank); medians, and the projection's quartiles, are interpolated.
Costs: milliseconds; where only epochs are known, opening the dataset to count its rows.
"""

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pipeline.shards import PackedDataset
from trainer.plan import Plan
from trainer.report.log import COLUMNS, Floats, Run, number, whole

State = Literal["finished", "running", "stopped"]

GIB = 2**30
PERCENTILES = (0, 5, 25, 50, 75, 95, 99, 100)
RECENT = 200
"""Steps that the projection is made of: the last so many."""
QUIET_SECONDS, QUIET_STEPS = 300.0, 20
"""Where no process can be asked, a run that wrote nothing for so long and for so many of its steps has stopped."""
EXPORTS = ("export", "adapter")
"""Folders that a run writes at its very end."""
LISTED = 20
"""So many numbers of steps are listed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """One field of the log over all steps that have it."""

    num: int
    """How many steps have a number there."""
    first: float
    """The first."""
    last: float
    """The last."""
    least: float
    """The least."""
    least_step: int
    """Step of it, the first where there are several."""
    greatest: float
    """The greatest."""
    greatest_step: int
    """Step of it, the first where there are several."""
    mean: float
    """Sum over number."""
    median: float
    """As many are greater as are less."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Projection:
    """What is left of a run at the speed of its last steps."""

    num_recent: int
    """Steps that it is made of."""
    step_s: float
    """Their median time, seconds."""
    seconds_left: float
    """Steps left times the median; evaluations and checkpoints to come are not in it."""
    seconds_low: float
    """The same with their lower quartile."""
    seconds_high: float
    """The same with their upper quartile."""
    end: float | None
    """When that is over, seconds since 1970, counted from the log's last line; None for a run that has stopped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Count:
    """Steps of some kind."""

    num: int
    """How many."""
    first: tuple[int, ...]
    """The first 20 of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalChange:
    """A resumption brought another evaluation set: losses before and after it are of other rows."""

    last_step: int | None
    """Step of the former set's last evaluation; None where the log does not tell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """One run."""

    name: str
    """Its folder's name."""
    state: State
    """finished: the last step is done, or where their number is not known, an export is there; running: its process
    lives, or where that cannot be told, it wrote lately; stopped: neither."""
    is_guessed: bool
    """Whether ``running`` or ``stopped`` is told by when it last wrote alone."""
    last_step: int
    """Number of the last step done; 0 before the first."""
    total_steps: int | None
    """Steps at the end of the run."""
    written: float
    """When the log was last written, seconds since 1970."""
    quantities: Mapping[str, Summary]
    """By field of a step's line; ``eval_loss`` too."""
    step_seconds: Mapping[str, float] | None
    """Times from step to step: of the first, in which much is compiled, then percentiles of the others (where there is
    none: of it) from p0 (least) to p100 (greatest)."""
    seconds: float | None
    """Of all steps together, without evaluation and saving."""
    tokens: float | None
    """Tokens of documents; where a step has no number of them, tokens a second times seconds."""
    is_tokens_exact: bool
    """Whether every step has one."""
    data_wait_share: float | None
    """Share of the steps' time in which the loop waited for the next batch, but for the longest wait of each start: the
    first rows are read then."""
    peak_gib: float | None
    """Most memory that tensors took on rank 0's GPU."""
    estimate_gib: float | None
    """Memory that was expected of one process."""
    estimate_parts: Mapping[str, int]
    """Bytes by part of the estimate."""
    recomputed: tuple[int, int] | None
    """Layers that compute their activations again, and layers of the model."""
    skipped: Count
    """Steps without a target."""
    not_finite: Count
    """Steps with a value that is no finite number."""
    num_clipped: int | None
    """Steps whose gradient was longer than ``--clip`` and scaled down to it; None where nothing is clipped."""
    num_missing: int
    """Steps between the first and the last that have no line."""
    eval_change: EvalChange | None
    """None where all evaluations are of one set, as far as is recorded."""
    projection: Projection | None
    """None for a finished run, and where steps' times or their number are not known."""


def figures(run: Run, *, now: float) -> Figures:
    """All figures of a run as of ``now``, seconds since 1970."""
    last = int(run.step[-1]) if run.step.size else 0
    total = total_steps(run.config)
    seconds = run.column("step_s")
    timed = seconds[np.isfinite(seconds)]
    tokens, is_exact = _tokens(run)
    state, is_guessed = _state(run, last=last, total=total, seconds=timed, now=now)
    peak, parts = _summary(run.step, run.column("peak_gib")), _parts(run.config["memory_estimate_bytes"])
    return Figures(
        name=run.name,
        state=state,
        is_guessed=is_guessed,
        last_step=last,
        total_steps=total,
        written=run.changed,
        quantities=_quantities(run),
        step_seconds=_step_seconds(timed) if timed.size else None,
        seconds=float(timed.sum()) if timed.size else None,
        tokens=tokens,
        is_tokens_exact=is_exact,
        data_wait_share=_wait_share(seconds, run.column("data_wait_s"), num_starts=1 + len(run.config["earlier"])),
        peak_gib=peak.greatest if peak else None,
        estimate_gib=sum(parts.values()) / GIB if parts else None,
        estimate_parts=parts,
        recomputed=_recomputed(run.config),
        skipped=Count(num=run.skipped.size, first=tuple(run.skipped[:LISTED].tolist())),
        not_finite=Count(num=run.not_finite.size, first=tuple(run.not_finite[:LISTED].tolist())),
        num_clipped=_clipped(run.column("grad_norm"), run.config["settings"].get("clip")),
        num_missing=int(run.step[-1] - run.step[0]) + 1 - run.step.size if run.step.size else 0,
        eval_change=_eval_change(run),
        projection=_project(timed, last=last, total=total, state=state, written=run.changed),
    )


def as_json(found: Figures) -> dict[str, Any]:
    """The figures as JSON values."""
    return dataclasses.asdict(found)


def total_steps(config: dict[str, Any]) -> int | None:
    """Steps at the end of the run; of old runs that were given ``--epochs``, where their dataset can be opened."""
    settings = config["settings"]
    for recorded in (config.get("total_steps"), settings.get("steps")):
        if (steps := whole(recorded)) is not None:
            return steps
    folder = Path(str(settings.get("shards")))
    try:
        if not folder.is_dir():
            return None
        dataset = PackedDataset.open(folder)
        if dataset.manifest.dataset_id != config.get("dataset_id"):
            return None
        plan = Plan.build(
            num_rows=len(dataset), seed=0, rows_per_step=settings["rows_per_step"], epochs=settings["epochs"],
            steps=None,
        )  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return plan.steps_left(rows_seen=0)


def _state(run: Run, *, last: int, total: int | None, seconds: Floats, now: float) -> tuple[State, bool]:
    """The state, and whether it is told by the time of the last writing alone."""
    if total is not None and last >= total:
        return "finished", False
    if run.is_alive:
        return "running", False
    if total is None and any((run.path / name).is_dir() for name in EXPORTS):
        return "finished", False
    if run.is_alive is not None:
        return "stopped", False
    quiet = max(QUIET_SECONDS, QUIET_STEPS * float(np.median(seconds)) if seconds.size else 0.0)
    return "running" if now - run.changed <= quiet else "stopped", True


def _quantities(run: Run) -> dict[str, Summary]:
    """Of every field of which there is a number."""
    found = {name: _summary(run.step, run.column(name)) for name in COLUMNS}
    found["eval_loss"] = _summary(run.eval_step, run.eval_loss)
    return {name: summary for name, summary in found.items() if summary is not None}


def _summary(steps: Any, values: Floats) -> Summary | None:
    known = np.isfinite(values)
    if not known.any():
        return None
    held, at = values[known], steps[known]
    return Summary(
        num=held.size,
        first=float(held[0]),
        last=float(held[-1]),
        least=float(held.min()),
        least_step=int(at[held.argmin()]),
        greatest=float(held.max()),
        greatest_step=int(at[held.argmax()]),
        mean=float(held.mean()),
        median=float(np.median(held)),
    )


def _tokens(run: Run) -> tuple[float | None, bool]:
    """Tokens of all steps, and whether each one's number was logged."""
    logged = run.column("tokens")
    known = np.isfinite(logged)
    tokens = np.where(known, logged, run.column("tokens_per_s") * run.column("step_s"))
    return (float(np.nansum(tokens)) if np.isfinite(tokens).any() else None), bool(known.all())


def _step_seconds(seconds: Floats) -> dict[str, float]:
    others = seconds[1:] if seconds.size > 1 else seconds
    found = np.percentile(others, PERCENTILES, method="inverted_cdf").tolist()
    return {"first": float(seconds[0])} | {f"p{p}": value for p, value in zip(PERCENTILES, found, strict=True)}


def _wait_share(seconds: Floats, waits: Floats, *, num_starts: int) -> float | None:
    both = np.isfinite(seconds) & np.isfinite(waits)
    order = np.argsort(waits[both])[: max(0, both.sum() - num_starts)]
    total = float(seconds[both][order].sum())
    return float(waits[both][order].sum()) / total if total else None


def _clipped(norms: Floats, clip: Any) -> int | None:
    return int((norms > number(clip)).sum()) if np.isfinite(norms).any() and number(clip) > 0 else None


def _eval_change(run: Run) -> EvalChange | None:
    """Whether the log holds losses of several evaluation sets, and where one ends.

    A line of the log does not say whose it is: every start's schedule says which evaluations it can have made. As a
    resumption drops the lines behind its first step, the former set's come first.
    """
    starts = list(enumerate([*run.config["earlier"], run.config]))
    named = [(str(name), i, start) for i, start in starts if (name := start.get("eval_dataset_id")) is not None]
    sets = [[(i, start) for _, i, start in group] for _, group in itertools.groupby(named, key=lambda item: item[0])]
    if len(sets) < 2 or run.eval_step.size < 2:
        return None
    if len(sets) > 2:
        return EvalChange(last_step=None)
    former, latter = (
        np.array(
            [any(_may_evaluate(start, after, num_earlier=i) for i, start in one) for after in run.eval_step.tolist()]
        )
        for one in sets
    )
    most = int(np.logical_and.accumulate(former).sum())  # evaluations that can be the former set's, from the first on
    least = run.eval_step.size - int(np.logical_and.accumulate(latter[::-1]).sum())
    if most != least:
        return EvalChange(last_step=None)
    return EvalChange(last_step=int(run.eval_step[most - 1])) if 0 < most < run.eval_step.size else None


def _may_evaluate(start: dict[str, Any], after: int, *, num_earlier: int) -> bool:
    """Whether one start of a run can have evaluated after a step; it can where its schedule is not known."""
    settings = start.get("settings")
    every = whole(settings.get("eval_every")) if isinstance(settings, dict) else None
    total = whole(start.get("total_steps"))
    if every is None or total is None or after == 0:
        return True
    # Each resumption can add a step to what was recorded: an epoch that was the last one ended with a smaller step.
    return after <= total + num_earlier and (after >= total or (every > 0 and after % every == 0))


def _parts(estimate: dict[str, Any]) -> dict[str, int]:
    return {str(name): value for name, value in estimate.items() if whole(value) is not None}


def _recomputed(config: dict[str, Any]) -> tuple[int, int] | None:
    asked, layers = config["settings"].get("recompute"), whole(config["model"].get("num_hidden_layers"))
    if layers is None or asked is None:
        return None
    known = {"none": 0, "all": layers} | {str(num): num for num in range(layers + 1)}
    return (known[str(asked)], layers) if str(asked) in known else None


def _project(seconds: Floats, *, last: int, total: int | None, state: State, written: float) -> Projection | None:
    if state == "finished" or total is None or not seconds.size:
        return None
    recent = seconds[-RECENT:]
    low, median, high = ((total - last) * float(np.percentile(recent, p)) for p in (25, 50, 75))
    return Projection(
        num_recent=recent.size,
        step_s=float(np.median(recent)),
        seconds_left=median,
        seconds_low=low,
        seconds_high=high,
        end=written + median if state == "running" else None,
    )
