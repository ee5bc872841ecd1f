"""A run in words: how its numbers are written, what stands in the terminal, what a reader should look into.

    print(as_text([(run, figures), ...]))

Guarantees: the terminal, the page's tables and its tiles write a number in the same way, from the same figures.
"""

import datetime
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trainer.report.figures import LISTED, Count, Figures, Summary
from trainer.report.log import FIELDS, METRICS, Run

Pair = tuple[Run, Figures]

NOT_RECORDED = "not recorded"
WAIT_SHARE = 0.02
"""Waiting longer than this share of the time for data is worth a look."""
SERVES = ("implementation", "version")
"""What of a line of the kernel table can make runs differ."""
SHOWN_WIDTH = 34
"""Widest column of a run in the terminal, unless its text would be that of another."""


def written(name: str, value: float) -> str:
    """A number of a field as text."""
    _, form, factor = FIELDS[name]
    return form.format(value * factor)


def span(seconds: float) -> str:
    """``0.25`` -> ``0.25 s``; ``75`` -> ``1 min 15 s``; ``8000`` -> ``2 h 13 min``; ``200000`` -> ``2 d 7 h``."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days:,} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def moment(seconds: float) -> str:
    """Seconds since 1970 in this machine's zone: ``2026-11-30 14:05 UTC``."""
    try:
        return datetime.datetime.fromtimestamp(seconds, tz=datetime.UTC).astimezone().strftime("%Y-%m-%d %H:%M %Z")
    except (ValueError, OverflowError, OSError):
        return "beyond any calendar"


def headlines(f: Figures) -> list[tuple[str, str]]:
    """The headline figures, a name and a text each; the same names for every run."""
    return [
        ("state", f"{f.state}, by its log" if f.is_guessed else f.state),
        ("steps", progress(f)),
        ("time in steps", NOT_RECORDED if f.seconds is None else span(f.seconds)),
        ("time left", time_left(f)),
        ("time left, by quartiles", time_range(f)),
        ("projected end", projected_end(f)),
        ("loss, first to last", _from_to(f.quantities.get("loss"), "loss")),
        ("least loss", _least(f.quantities.get("loss"), "loss")),
        ("evaluation loss, first to last", _from_to(f.quantities.get("eval_loss"), "eval_loss")),
        ("least evaluation loss", _least(f.quantities.get("eval_loss"), "eval_loss")),
        ("gradient norm, median", median(f, "grad_norm")),
        ("clipped steps", "none is clipped" if f.num_clipped is None else f"{f.num_clipped:,}"),
        ("tokens a second, median", median(f, "tokens_per_s")),
        ("tokens of documents", tokens(f)),
        ("MFU, median", median(f, "mfu")),
        ("HFU, median", median(f, "hfu")),
        ("memory, peak", NOT_RECORDED if f.peak_gib is None else f"{f.peak_gib:,.2f} GiB"),
        ("memory, estimated", NOT_RECORDED if f.estimate_gib is None else f"{f.estimate_gib:,.2f} GiB"),
        ("recomputed layers", NOT_RECORDED if f.recomputed is None else "{:,} of {:,}".format(*f.recomputed)),
        ("first step, s", step_times(f, "first")),
        ("later steps, s, p5 p50 p95", step_times(f, "p5", "p50", "p95")),
        ("waiting for data", waiting(f)),
        ("steps without a target", listed(f.skipped)),
        ("values not finite", listed(f.not_finite)),
    ]


def progress(f: Figures) -> str:
    """How far a run is."""
    return f"{f.last_step:,}" if f.total_steps is None else f"{f.last_step:,} of {f.total_steps:,}"


def median(f: Figures, name: str) -> str:
    """The median of a field over the steps."""
    found = f.quantities.get(name)
    return NOT_RECORDED if found is None else written(name, found.median)


def tokens(f: Figures) -> str:
    """Tokens of documents: 4 digits of them where a step's line has its speed alone."""
    if f.tokens is None:
        return NOT_RECORDED
    return f"{f.tokens:,.0f}" if f.is_tokens_exact else f"about {float(f'{f.tokens:.4g}'):,.0f}"


def waiting(f: Figures) -> str:
    """How much of the time the loop waited for data."""
    if f.data_wait_share is None:
        return "too few steps" if "data_wait_s" in f.quantities else NOT_RECORDED
    return f"{f.data_wait_share:.2%} of the time"


def time_left(f: Figures) -> str:
    """How long a run will take from its last line."""
    return _none_left(f) if f.projection is None else span(f.projection.seconds_left)


def time_range(f: Figures) -> str:
    """Between what and what that lies."""
    p = f.projection
    return _none_left(f) if p is None else f"{span(p.seconds_low)} to {span(p.seconds_high)}"


def _none_left(f: Figures) -> str:
    return "none" if f.state == "finished" else "not known"


def projected_end(f: Figures) -> str:
    """When a run that goes on will be done."""
    end = f.projection.end if f.projection else None
    return moment(end) if end is not None else f.state if f.state != "running" else "not known"


def step_times(f: Figures, *names: str) -> str:
    """Some of the figures of steps' times."""
    if f.step_seconds is None:
        return NOT_RECORDED
    return " ".join(written("step_s", f.step_seconds[name]) for name in names)


def listed(count: Count, *, what: str = "step") -> str:
    """How many steps, and which."""
    if not count.num:
        return "0"
    more = " ..." if count.num > len(count.first) else ""
    return f"{count.num:,} ({what} {', '.join(map(str, count.first))}{more})"


def _from_to(found: Summary | None, name: str) -> str:
    return NOT_RECORDED if found is None else f"{written(name, found.first)} to {written(name, found.last)}"


def _least(found: Summary | None, name: str) -> str:
    return NOT_RECORDED if found is None else f"{written(name, found.least)} at step {found.least_step:,}"


def concerns(run: Run, f: Figures) -> list[str]:
    """One sentence for each thing that a reader should look into."""
    found = []
    if not run.has_config:
        found.append("There is no config.json: settings, dataset, kernels and the plan of memory are not known.")
    if not run.step.size:
        found.append(f"There are no metrics yet: {METRICS} has no line of a step.")
    if run.cut:
        found.append("The last line of the log was cut, as by a kill; it is left out.")
    if run.unused_lines:
        listed_lines = listed(Count(num=len(run.unused_lines), first=run.unused_lines[:LISTED]), what="line")
        found.append(f"Lines of the log that are neither a step nor an evaluation: {listed_lines}.")
    if f.num_missing:
        found.append(f"{f.num_missing:,} steps between the first and the last have no line.")
    if f.not_finite.num:
        found.append(f"Values that are no finite number: {listed(f.not_finite)}.")
    if f.skipped.num:
        found.append(f"Steps without a target, in which nothing was updated: {listed(f.skipped)}.")
    if f.eval_change is not None:
        found.append(_other_rows(f.eval_change.last_step))
    if f.peak_gib is not None and f.estimate_gib is not None and f.peak_gib > f.estimate_gib:
        found.append(f"The peak of {f.peak_gib:,.2f} GiB is above the estimate of {f.estimate_gib:,.2f} GiB.")
    if f.data_wait_share is not None and f.data_wait_share > WAIT_SHARE:
        found.append(f"{f.data_wait_share:.1%} of the steps' time was waiting for data.")
    if f.state == "stopped":
        why = "nothing was written" if f.is_guessed else "its process has ended, and nothing was written"
        found.append(f"The run has stopped: {why} since {moment(f.written)}.")
    return found


def _other_rows(last_step: int | None) -> str:
    change = "The evaluation set changed on a resume"
    if last_step is None:
        return f"{change}, and the log does not tell at which step: losses before and after it are of other rows."
    return f"{change}: evaluations up to step {last_step:,} are of other rows than later ones."


# ------------------------------------------------------------------------------------------ what differs


def flat(config: Mapping[str, Any]) -> dict[str, str]:
    """Everything that can make two runs differ, by a dotted name, as text."""
    parts: dict[str, Any] = {
        **{name: config.get(name) for name in ("dataset_id", "fingerprint", "eval_dataset_id", "eval_fingerprint")},
        "commit": config.get("commit"),
        **{name: config[name] for name in ("settings", "model", "versions", "machine")},
        "kernels": {str(k.get("operation")): {n: k.get(n) for n in SERVES} for k in config["kernels"]},
    }
    return {name: text for name, text in _leaves("", parts) if name not in ("settings.out", "settings.resume")}


def _leaves(prefix: str, value: Any) -> list[tuple[str, str]]:
    if isinstance(value, dict):
        return [leaf for name, inner in value.items() for leaf in _leaves(f"{prefix}.{name}".lstrip("."), inner)]
    return [(prefix, value if isinstance(value, str) else json.dumps(value))]


def differing(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Name -> its text in each run, of all that is not the same in every one; "" where a run lacks it."""
    held = [flat(run.config) for run in runs]
    names = dict.fromkeys(name for one in held for name in one)
    return {name: row for name in names if len(set(row := [one.get(name, "") for one in held])) > 1}


def short(text: str) -> str:
    """With 16 digits of each identity and commit."""
    return re.sub(r"([0-9a-f]{16})[0-9a-f]{16,}", r"\1", text)


# --------------------------------------------------------------------------------------------- terminal


def as_text(pairs: Sequence[Pair]) -> str:
    """The table for the terminal: runs side by side, then kernels of one or what differs between several."""
    columns = [[f.name, *(text for _, text in headlines(f))] for _, f in pairs]
    labels = ["", *(name for name, _ in headlines(pairs[0][1]))]
    found = [*_blocks(labels, columns)]
    for run, f in pairs:
        found += [f"{f.name}: look into this: {text}" for text in concerns(run, f)]
    if len(pairs) > 1:
        rows = differing([run for run, _ in pairs])
        cells = [_fitting([short(text) for text in row]) for row in rows.values()]
        held = [[f.name, *(row[i] for row in cells)] for i, (_, f) in enumerate(pairs)]
        found += ["", "what differs", *(_blocks(["", *rows], held) if rows else ["  nothing that is recorded"])]
    elif kernels := pairs[0][0].config["kernels"]:
        names = ("operation", "implementation", "version", "why")
        found += ["", "kernels", *_aligned([[str(k.get(name, "")) for k in kernels] for name in names])]
    return "\n".join(found)


def _fitting(row: Sequence[str]) -> list[str]:
    """Texts cut to the width of a column: of what all begin with, 8 letters stay. Whole, if two would then be equal."""
    is_long = max(map(len, row)) > SHOWN_WIDTH
    begin = max(0, len(os.path.commonprefix(list(row))) - 8) if is_long else 0  # noqa: RUF071
    held = [f"…{text[begin:]}" if begin else text for text in row]
    cut = [text if len(text) <= SHOWN_WIDTH else f"{text[: SHOWN_WIDTH - 1]}…" for text in held]
    return cut if len(set(cut)) == len(set(row)) else list(row)


def _blocks(labels: Sequence[str], columns: Sequence[Sequence[str]]) -> Iterator[str]:
    """As many columns side by side as the terminal holds, then the others below, each time with their labels."""
    room = shutil.get_terminal_size().columns
    left = list(columns)
    while left:
        num = 1
        while num < len(left) and max(map(len, _aligned([labels, *left[: num + 1]]))) <= room:
            num += 1
        yield from _aligned([labels, *left[:num]])
        left = left[num:]
        yield from [""] if left else []


def _aligned(columns: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column), default=0) + 2 for column in columns]
    return [
        "  " + "".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in zip(*columns, strict=True)
    ]


def printable(text: str) -> str:
    """Without characters that move a terminal's cursor, but for line breaks."""
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)
