"""The charts of a run's page that go from step to step, or show how steps' times are spread.

Guarantees: values are drawn as they were logged, every spike included, unless a title says that they are means.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from pipeline.page import Mark, Markup, Series, bars, element, lines, section, table
from pipeline.page.scales import nice_step
from trainer.report.figures import PERCENTILES, Figures
from trainer.report.log import Floats, Ints, Run, whole
from trainer.report.text import NOT_RECORDED, Pair, written

SMOOTH_FROM = 200
"""From so many steps on, means are drawn where single steps would hide the course."""
WINDOWS = 50
"""A mean is over the steps' number by this."""
WIDE = 10.0
"""A chart whose greatest value is so many medians has a logarithmic scale."""
SHARES = (
    "MFU counts the model's arithmetic, with the head at every token. HFU counts what is computed: recomputed layers "
    "again, but the head at targets alone, so it can be the smaller one."
)
"""How the two shares of a GPU's speed differ."""
SLOW = 3.0
"""A histogram of steps' times ends at so many medians; how many took longer is said."""


def courses(pairs: Sequence[Pair]) -> list[Markup]:
    """The sections whose charts go from step to step."""
    return [
        section("Loss", *_loss(pairs), id="loss"),
        section(
            "Learning rate and gradient",
            side_by_side(
                chart(pairs, "lr", title="Learning rate", y_name="rate"),
                chart(pairs, "grad_norm", title="Gradient norm, unclipped", y_name="norm",
                      log_y=_is_wide(pairs, "grad_norm")),
            ),
            id="gradient",
        ),
        section(
            "Speed",
            chart(pairs, "tokens_per_s", title="Tokens of documents a second", y_name="tokens/s", smooth=True,
                  form="{:,.0f}"),
            side_by_side(
                chart(pairs, "mfu", title="MFU, the model's share of the GPUs' arithmetic", y_name="%", factor=100,
                      smooth=True),
                chart(pairs, "hfu", title="HFU, with what is computed again", y_name="%", factor=100, smooth=True),
            ),
            note=SHARES,
            id="speed",
        ),
        section("Step time", *_step_time(pairs), id="steps"),
    ]  # fmt: skip


def _loss(pairs: Sequence[Pair]) -> Iterator[Markup]:
    """One run: training and evaluation in one chart, single steps of a long one apart; several: a chart each."""
    if len(pairs) > 1:
        yield chart(pairs, "loss", title="Training loss", y_name="nats a target", smooth=True, form="{:,.4f}")
        held = [series(f.name, run.eval_step, run.eval_loss) for run, f in pairs if run.eval_step.size]
        yield drawn(held, title="Evaluation loss", y_name="nats a target", form="{:,.4f}")
        return
    run, f = pairs[0]
    means, num = smoothed(run.column("loss"))
    name = f"training, mean of {num:,} steps" if num > 1 else "training"
    held = [series(name, run.step, means)] if run.has("loss") else []
    held += _evaluations(run, f)
    warm = [Mark(at=float(at), name="warm-up ends")] if (at := _warmup(run)) else []
    title = "Training and evaluation loss" if run.eval_step.size else "Training loss"
    yield drawn(held, title=title, y_name="nats a target", marks=warm, form="{:,.4f}")
    if num > 1:
        yield chart(pairs, "loss", title="Training loss of each step", y_name="nats a target", form="{:,.4f}")


def _evaluations(run: Run, f: Figures) -> Iterator[Series]:
    """A line, or one for each evaluation set, where it is known which evaluation is whose."""
    last = f.eval_change.last_step if f.eval_change else None
    former = run.eval_step <= (-1 if last is None else last)
    for name, ours in (("evaluation, former set", former), ("evaluation", ~former)):
        if ours.any():
            yield series(name, run.eval_step[ours], run.eval_loss[ours])


def _warmup(run: Run) -> int:
    num = whole(run.config["settings"].get("warmup_steps"))
    return num if num and run.step.size and run.step[0] < num < run.step[-1] else 0


def smoothed(values: Floats) -> tuple[Floats, int]:
    """The values, or from 200 of them on their running means; and over how many each is."""
    num = values.size // WINDOWS // 2 * 2 + 1 if values.size >= SMOOTH_FROM else 1
    return (running_mean(values, num) if num > 1 else values), num


def running_mean(values: Floats, num: int) -> Floats:
    """Mean of the ``num`` values around each place (odd), fewer at the ends; NaN where none is a number.

    Worked example, num = 3: 1 3 NaN 5 gives 2 2 4 5.
    """
    known = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    places = np.arange(values.size)
    begins, ends = np.maximum(0, places - num // 2), np.minimum(values.size, places + num // 2 + 1)
    held = counts[ends] - counts[begins]
    return np.where(held > 0, (sums[ends] - sums[begins]) / np.maximum(held, 1), np.nan)


def chart(
    pairs: Sequence[Pair],
    field: str,
    *,
    title: str,
    y_name: str,
    factor: float = 1.0,
    log_y: bool = False,
    smooth: bool = False,
    form: str = "{:,.4g}",
) -> Markup:
    """A field over the steps, a line for each run that has it.

    Args:
        pairs: the runs.
        field: of a step's line.
        title: what is shown.
        y_name: its unit.
        factor: from the log's unit to ``y_name``.
        log_y: equal factors are equal heights.
        smooth: draw running means of long runs.
        form: of the values in the table.
    """
    held, most = [], 1
    for run, f in pairs:
        if run.has(field):
            values, num = smoothed(run.column(field)) if smooth else (run.column(field), 1)
            most = max(most, num)
            held.append(series(f.name, run.step, values * factor))
    shown = title if most == 1 else f"{title}, mean of {most:,} steps" if len(pairs) == 1 else f"{title}, running mean"
    return drawn(held, title=shown, y_name=y_name, log_y=log_y, form=form)


def drawn(
    held: Sequence[Series], *, title: str, y_name: str, log_y: bool = False, marks: Sequence[Mark] = (), form: str
) -> Markup:
    """Lines over the steps, or that there is none."""
    if not held:
        return missing(title)
    return lines(held, title=title, x_name="step", y_name=y_name, log_y=log_y, marks=marks, form=form)


def side_by_side(*parts: Markup) -> Markup:
    """Two in a row where the screen is wide enough."""
    style = "display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,20rem),1fr));gap:0 2.5rem"
    return element("div", *(element("div", part) for part in parts), style=style)


def roomy(text: str) -> Markup:
    """A sentence in a cell: on a phone the table scrolls rather than breaking it after every word."""
    return element("span", text, style="display:inline-block;min-width:14rem;overflow-wrap:anywhere")


def unbroken(text: str) -> Markup:
    """On one line, however narrow its cell."""
    return element("span", text, style="white-space:nowrap")


def missing(title: str) -> Markup:
    """In place of what was not recorded."""
    return element("p", element("strong", title), f": {NOT_RECORDED}.", class_="note")


def _is_wide(pairs: Sequence[Pair], field: str) -> bool:
    """Whether the greatest values would press all others to the ground."""
    found = [f.quantities[field] for _, f in pairs if field in f.quantities]
    return bool(found) and min(s.least for s in found) > 0 and max(s.greatest / s.median for s in found) > WIDE


def series(name: str, steps: Ints, values: Floats) -> Series:
    """A line over steps."""
    return Series(name=name, x=steps.astype(float).tolist(), y=values.tolist())


def _step_time(pairs: Sequence[Pair]) -> Iterator[Markup]:
    rows = [
        (f.name if len(pairs) > 1 else "seconds", *(written("step_s", s) for s in f.step_seconds.values()))
        for _, f in pairs
        if f.step_seconds
    ]
    if not rows:
        yield missing("Seconds from step to step")
        return
    header = ("", "first", *(_percentile_name(p) for p in PERCENTILES))
    caption = "Seconds of the first step, and percentiles of the others"
    yield table(header, rows, caption=caption, numeric=range(1, len(header)))
    if len(pairs) == 1:
        yield from _histogram(pairs[0][0].column("step_s"))
    yield side_by_side(
        chart(pairs, "step_s", title="Time of each step", y_name="seconds", smooth=len(pairs) > 1,
              log_y=_is_wide(pairs, "step_s")),
        chart(pairs, "data_wait_s", title="Of it, waiting for the next batch", y_name="ms", factor=1e3,
              smooth=len(pairs) > 1),
    )  # fmt: skip


def _percentile_name(p: int) -> str:
    return {0: "least", 50: "median", 100: "greatest"}.get(p, str(p))


def _histogram(seconds: Floats) -> Iterator[Markup]:
    """Bars of a round width up to three medians; what took longer is counted below."""
    held = seconds[np.isfinite(seconds)]
    end = min(float(held.max()), SLOW * float(np.median(held)))
    shown = held[held <= end]
    low, high = float(shown.min()), float(shown.max())
    width = nice_step(high - low, most=40) if high > low else max(low, 1e-3) / 10
    first, last = int(np.floor(low / width + 1e-9)), int(np.floor(high / width + 1e-9)) + 1
    bins = np.clip(np.floor(shown / width + 1e-9).astype(int) - first, 0, last - first - 1)
    counts = np.bincount(bins, minlength=last - first).tolist()
    edges = [round(i * width, 12) for i in range(first, last + 1)]
    yield bars(edges, counts, title="How long steps took", x_name="seconds", y_name="steps",
               marks=[Mark(at=float(np.median(held)), name="median")])  # fmt: skip
    if num := held.size - shown.size:
        said = f"Steps that took longer than {end:.4g} s: {num:,}; the longest took {held.max():,.4g} s."
        yield element("p", said, class_="note")
