"""The page of one run, or of several laid over one another.

    as_page([(run, figures), ...], traces=[...], now=time.time()) -> bytes

Guarantees: everything of the log and of ``config.json`` is escaped; the page loads nothing and runs nothing.
Costs: 2 s and 0.2 MB for a run of 100,000 steps.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from pipeline.page import Markup, element, facts, page, section, shares, table, tiles, warning
from trainer.report.charts import courses, drawn, missing, roomy, series, side_by_side, unbroken
from trainer.report.figures import GIB, Figures
from trainer.report.log import FIELDS, Run
from trainer.report.text import (
    NOT_RECORDED,
    SHOWN_WIDTH,
    Pair,
    concerns,
    differing,
    headlines,
    moment,
    projected_end,
    short,
    span,
    waiting,
    written,
)
from trainer.report.traces import Trace, trace_section

IDENTITIES = {
    "dataset_id": "dataset", "fingerprint": "its fingerprint", "eval_dataset_id": "evaluation dataset",
    "eval_fingerprint": "evaluation's fingerprint",
}  # fmt: skip
"""Fields of ``config.json`` that say which data were used, and what they are called."""


def as_page(pairs: Sequence[Pair], *, traces: Sequence[Trace], now: float, troubles: Sequence[str] = ()) -> bytes:
    """The page as bytes.

    Args:
        pairs: one run, or several.
        traces: none, one, or two.
        now: seconds since 1970.
        troubles: what else the reader should look into.
    """
    names = [f.name for _, f in pairs]
    several = len(pairs) > 1
    title = f"Runs {', '.join(names)}" if several else f"Run {names[0]}"
    alerts = [warning(f"{f.name}: {text}" if several else text) for run, f in pairs for text in concerns(run, f)]
    alerts += map(warning, troubles)
    parts = [
        section("At a glance", *_glance(pairs, alerts), note=f"As of {moment(now)}.", id="glance"),
        *([_differing(pairs)] if several else []),
        *(courses(pairs) if any(run.step.size or run.eval_step.size for run, _ in pairs) else []),
        *([trace_section(traces)] if traces else []),
        section("Memory", *_memory(pairs), id="memory"),
        _kernels(pairs),
        *([_every_number(pairs)] if any(f.quantities for _, f in pairs) else []),
        section("What was run", *_identity(pairs), id="run"),
    ]
    return page(title=title, parts=parts)


# ---------------------------------------------------------------------------------------------- glance


def _glance(pairs: Sequence[Pair], alerts: Sequence[Markup]) -> list[Markup]:
    """What the terminal shows: of one run tiles first, of several side by side."""
    columns = [headlines(f) for _, f in pairs]
    if len(pairs) == 1:
        return [_tiles(pairs[0][1]), *alerts, _in_two(columns[0])]
    return [_beside(pairs, columns, caption="Runs side by side"), *alerts]


def _tiles(f: Figures) -> Markup:
    return tiles([
        ("state", f.state, ("told by when it was last written, " if f.is_guessed else "last written ") +
         moment(f.written)),
        ("steps", f"{f.last_step:,}", _of_total(f)),
        ("loss", _last(f, "loss"), _note(f, "loss", "from {first}, least {least}")),
        *([("evaluation loss", _last(f, "eval_loss"), _note(f, "eval_loss", "from {first}, least {least}"))]
          if "eval_loss" in f.quantities else []),
        ("tokens a second", _median(f, "tokens_per_s"), _note(f, "tokens_per_s", "median; {least} to {greatest}")),
        ("MFU", _median(f, "mfu"), _hardware(f)),
        ("memory", "–" if f.peak_gib is None else f"{f.peak_gib:,.1f} GiB", _planned(f)),
        ("waiting for data", "–" if f.data_wait_share is None else f"{f.data_wait_share:.2%}",
         waiting(f) if f.data_wait_share is None else "of the time, but for each start's first wait"),
        ("projected end", *_end(f)),
    ])  # fmt: skip


def _of_total(f: Figures) -> str:
    if f.total_steps is None:
        return "of a number that is not known"
    return f"of {f.total_steps:,}" + (f", {f.last_step / f.total_steps:.1%}" if f.total_steps else "")


def _last(f: Figures, name: str) -> str:
    return written(name, f.quantities[name].last) if name in f.quantities else "–"


def _median(f: Figures, name: str) -> str:
    return written(name, f.quantities[name].median) if name in f.quantities else "–"


def _note(f: Figures, name: str, form: str) -> str:
    found = f.quantities.get(name)
    if found is None:
        return NOT_RECORDED
    return form.format(**{key: written(name, getattr(found, key)) for key in ("first", "least", "greatest")})


def _hardware(f: Figures) -> str:
    if "mfu" not in f.quantities:
        return NOT_RECORDED
    if "hfu" not in f.quantities:
        return "median"
    note = f"median; hardware {_median(f, 'hfu')}"
    is_less = f.quantities["hfu"].median < f.quantities["mfu"].median
    return note + (", whose head is at targets alone" if is_less else "")


def _planned(f: Figures) -> str:
    if f.estimate_gib is None:
        return NOT_RECORDED
    return f"estimated {f.estimate_gib:,.1f} GiB" + ("" if f.peak_gib is not None else ", peak not recorded")


def _end(f: Figures) -> tuple[str, str]:
    if f.state == "finished":
        return "done", "" if f.seconds is None else f"{span(f.seconds)} in steps"
    if f.projection is None:
        return "–", "not known"
    return span(f.projection.seconds_left), f"left; {projected_end(f)}" if f.projection.end else "left, if resumed"


def _differing(pairs: Sequence[Pair]) -> Markup:
    rows = [
        (name, *(text if len(text) <= SHOWN_WIDTH else roomy(text) for text in map(short, row)))
        for name, row in differing([run for run, _ in pairs]).items()
    ]
    body = table(("", *(f.name for _, f in pairs)), rows, caption="Recorded values that differ") if rows else \
        element("p", "Nothing that is recorded differs.")  # fmt: skip
    return section("What differs", body, id="differs")


# ----------------------------------------------------------------------------------- memory and kernels


def _beside(pairs: Sequence[Pair], columns: Sequence[Sequence[tuple[str, str]]], *, caption: str) -> Markup:
    """Names and texts of each run: a list for one, a table for several."""
    if len(columns) == 1:
        return facts(columns[0])
    held = [dict(column) for column in columns]
    names = dict.fromkeys(name for column in held for name in column)
    rows = [(name, *(column.get(name, "") for column in held)) for name in names]
    return table(("", *(f.name for _, f in pairs)), rows, caption=caption)


def _memory(pairs: Sequence[Pair]) -> Iterator[Markup]:
    """The plan beside the peak; of one run the peak's course too."""
    yield _beside(pairs, [_plan(f, parts=len(pairs) > 1) for _, f in pairs], caption="Plan and peak")
    run, f = pairs[0]
    if len(pairs) == 1 and f.estimate_parts:
        parts = [(name, round(num / GIB, 4)) for name, num in f.estimate_parts.items()]
        yield shares(parts, title="What the estimate is made of", unit="GiB")
    if len(pairs) == 1 and run.has("peak_gib"):
        most = series(f.name, run.step, np.fmax.accumulate(run.column("peak_gib")))
        yield drawn([most], title="Most memory so far, on rank 0's GPU", y_name="GiB", form="{:,.4g}")


def _plan(f: Figures, *, parts: bool) -> list[tuple[str, str]]:
    return [
        ("peak", NOT_RECORDED if f.peak_gib is None else f"{f.peak_gib:,.2f} GiB of tensors on rank 0's GPU"),
        ("estimate", NOT_RECORDED if f.estimate_gib is None else f"{f.estimate_gib:,.2f} GiB in one process"),
        ("peak / estimate", f"{f.peak_gib / f.estimate_gib:.1%}" if f.peak_gib and f.estimate_gib else NOT_RECORDED),
        ("recomputed", NOT_RECORDED if f.recomputed is None else "{:,} of {:,} layers".format(*f.recomputed)),
        *((name, f"{num / GIB:,.4f} GiB") for name, num in f.estimate_parts.items() if parts),
    ]


def _kernels(pairs: Sequence[Pair]) -> Markup:
    """One table, where every run has the same kernels; else one each."""
    kernels = [run.config["kernels"] for run, _ in pairs]
    if all(one == kernels[0] for one in kernels):
        parts = [_kernel_table("What serves each operation, and why", kernels[0])]
    else:
        parts = [_kernel_table(f.name, one) for (_, f), one in zip(pairs, kernels, strict=True)]
    return section("Kernels", *parts, id="kernels")


def _kernel_table(name: str, kernels: Sequence[dict[str, Any]]) -> Markup:
    columns = ("operation", "implementation", "version", "why")
    rows = [[roomy(text) if i == 3 else text for i, text in enumerate(_texts(line, columns))] for line in kernels]
    return table(columns, rows, caption=name) if rows else missing(name)


def _texts(line: dict[str, Any], names: Sequence[str]) -> list[str]:
    return [str(line.get(name, "")) for name in names]


# -------------------------------------------------------------------------------------- numbers, identity


def _every_number(pairs: Sequence[Pair]) -> Markup:
    header = ("", "first", "last", "mean", "median", "least", "greatest", "steps")
    parts = []
    for _, f in pairs:
        found = [(name, f.quantities[name]) for name in FIELDS if name in f.quantities]
        rows = [
            (FIELDS[name][0], *(written(name, value) for value in (s.first, s.last, s.mean, s.median)),
             _at(written(name, s.least), s.least_step), _at(written(name, s.greatest), s.greatest_step), f"{s.num:,}")
            for name, s in found
        ]  # fmt: skip
        caption = f.name if len(pairs) > 1 else "Over the logged steps"
        if rows:
            parts.append(table(header, rows, caption=caption, numeric=range(1, len(header))))
    return section("Every number", *parts, id="numbers")


def _at(text: str, step: int) -> Markup:
    """A number, and below it the step that it is of."""
    return Markup.of(text, element("span", f" at {step:,}", class_="note", style="display:block"))


def _identity(pairs: Sequence[Pair]) -> Iterator[Markup]:
    """What was run on what with what."""
    yield _beside(pairs, [_origin(run, is_short=len(pairs) > 1) for run, _ in pairs], caption="Identity")
    for run, f in pairs:
        if len(pairs) == 1 or run.config["earlier"]:
            yield _starts(run.config, name="" if len(pairs) == 1 else f"{f.name}: ")
    for title, name in (("Settings", "settings"), ("The model's configuration", "model")):
        columns = [[(key, _plain(value)) for key, value in run.config[name].items()] for run, _ in pairs]
        if any(columns):
            yield element(
                "details", element("summary", title), _listing(pairs, columns, caption=title), open=name == "settings"
            )


def _listing(pairs: Sequence[Pair], columns: Sequence[Sequence[tuple[str, str]]], *, caption: str) -> Markup:
    """As ``_beside``; the long list of one run in two columns."""
    return _in_two(columns[0]) if len(columns) == 1 else _beside(pairs, columns, caption=caption)


def _in_two(found: Sequence[tuple[str, str]]) -> Markup:
    """A long list in two columns where the screen is wide enough."""
    half = -(-len(found) // 2)
    return side_by_side(facts(found[:half]), facts(found[half:]))


def _origin(run: Run, *, is_short: bool) -> list[tuple[str, str]]:
    """Identities are cut to what tells them apart where several stand side by side."""
    config = run.config
    found = [
        ("folder", str(run.path)),
        ("began", str([*config["earlier"], config][0].get("time", NOT_RECORDED))),
        *((label, str(config.get(name) or "none")) for name, label in IDENTITIES.items()),
        ("commit", str(config.get("commit") or NOT_RECORDED)),
        *((name, _plain(value)) for name, value in config["machine"].items()),
        *((f"version of {name}", _plain(value)) for name, value in config["versions"].items()),
    ]
    return [(name, short(text)) for name, text in found] if is_short else found


def _starts(config: dict[str, Any], *, name: str) -> Markup:
    """Every start of the run: what each changed against the one before."""
    earlier = config["earlier"]
    if not earlier:
        return element("p", "Never resumed.", class_="note")
    starts = [*earlier, config]
    changes = ["", *(_changes(before, after) for before, after in pairwise(starts))]
    rows = [
        (f"{i:,}", unbroken(str(start.get("time", ""))), roomy(str(start.get("commit") or "")), roomy(change))
        for i, (start, change) in enumerate(zip(starts, changes, strict=True), start=1)
    ]
    times = f"resumed {len(earlier):,} times" if len(earlier) > 1 else "resumed once"
    caption = name + times if name else times.capitalize()
    return table(("start", "time", "commit", "settings that changed"), rows, caption=caption, numeric=(0,))


def _changes(before: dict[str, Any], after: dict[str, Any]) -> str:
    old, new = (start["settings"] if isinstance(start.get("settings"), dict) else {} for start in (before, after))
    return ", ".join(
        f"{name}: {_plain(old.get(name))} to {_plain(new.get(name))}"
        for name in dict.fromkeys([*old, *new])
        if name != "resume" and old.get(name) != new.get(name)
    )


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
