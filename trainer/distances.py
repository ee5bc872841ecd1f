"""How far loss curves lie apart: the figures and the table of a record of curves.

    found = figures({name: losses(path) for ...})    # lengths, ends, distances from ours
    table(record)                                    # Markdown

Guarantees: curves of different lengths are compared over the steps that both have.
Costs: nothing; what a curve is, and which there are, says ``trainer.curves``.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

WINDOW = 10
"""Steps that a smoothed loss is the mean of."""

NOTES = (
    "The same first weights for all; losses in nats a target. Differences are from ours_packed over the steps that "
    f"both have, smoothed over {WINDOW} steps; those of fp32 curves from ours_packed_fp32, step by step. stock_padded: "
    "transformers' model and loss on padded batches, torch's AdamW over fp32 copies of the weights; its `fused` says "
    "whether fla and causal-conv1d served. Those named noise start from weights moved by one rounding (bf16, fp32). "
    "sorted_padded trains on documents sorted by length, so its steps hold other documents and it is not expected to "
    "agree."
)


def losses(path: Path) -> list[float]:
    """The losses of a curve; a line that was cut short is left out."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            found.append(float(json.loads(line)["loss"]))
        except (ValueError, KeyError):
            break
    return found


def smooth(values: Sequence[float], window: int = WINDOW) -> list[float]:
    """Means of ``window`` neighbours; one mean of all where there are fewer."""
    window = min(window, len(values))
    return [sum(values[i : i + window]) / window for i in range(len(values) - window + 1)] if values else []


def figures(curves: dict[str, list[float]]) -> dict[str, dict[str, Any]]:
    """Length, ends and distances of the curves."""
    found: dict[str, dict[str, Any]] = {}
    for name, curve in curves.items():
        if not curve:
            continue
        found[f"{name}_steps"] = {"value": len(curve), "unit": "steps"}
        found[f"{name}_first_loss"] = {"value": round(curve[0], 5), "unit": "nats a target"}
        found[f"{name}_last_loss"] = {"value": round(smooth(curve)[-1], 5), "unit": f"nats a target, last {WINDOW}"}
        if len(late := curve[len(curve) // 2 :]) > 1:
            jump = float(np.abs(np.diff(late)).mean())
            found[f"{name}_jump"] = {"value": round(jump, 4), "unit": "nats from step to step, mean of the second half"}
        exact = name.endswith("_fp32")
        other = "ours_packed_fp32" if exact else "ours_packed"
        count = min(len(curve), len(curves.get(other, [])))
        if name == other or not count:
            continue
        window = 1 if exact else WINDOW
        ours, theirs = (np.array(smooth(c[:count], window)) for c in (curves[other], curve))
        unit = f"nats a target, from {other} over {count} steps" + ("" if exact else ", smoothed")
        for kind, value in (("mean", np.abs(ours - theirs).mean()), ("max", np.abs(ours - theirs).max())):
            found[f"{name}_{kind}_difference"] = {"value": float(f"{value:.4g}"), "unit": unit}
    return found | sides(curves)


def sides(curves: dict[str, list[float]]) -> dict[str, dict[str, Any]]:
    """How far runs of one side lie apart that differ by one rounding of the first weights, and how far the two sides.

    Smoothed curves over the steps that all of them have; a side is the mean of its runs.
    """
    groups = [[c for name, c in curves.items() if name.removesuffix("_2").removesuffix("_noise") == side and c]
              for side in ("ours_packed", "stock_padded")]  # fmt: skip
    if any(len(group) < 2 for group in groups):
        return {}
    count = min(len(curve) for group in groups for curve in group)
    ours, stock = (np.array([smooth(curve[:count]) for curve in group]) for group in groups)
    within = [np.abs(a - b) for side in (ours, stock) for i, a in enumerate(side) for b in side[:i]]
    between = np.abs(ours.mean(0) - stock.mean(0))
    unit = f"nats a target over {count} steps, smoothed"
    return {
        f"{name}_{kind}_difference": {"value": float(f"{value:.4g}"), "unit": f"{unit}, {what}"}
        for name, what, distances in (
            ("one_rounding", "pairs of runs of one side", np.array(within)),
            ("sides", f"means of {len(ours)} runs of ours and {len(stock)} of transformers", between),
        )
        for kind, value in (("mean", distances.mean()), ("max", distances.max()))
    }


def table(record: dict[str, Any]) -> str:
    """A record of curves as a Markdown table."""
    fields = ("steps", "first_loss", "last_loss", "jump", "mean_difference", "max_difference")
    lines = ["| curve | " + " | ".join(field.replace("_", " ") for field in fields) + " |", "|---" * 7 + "|"]
    for name, result in record["variants"].items():
        cells = [str(record["figures"].get(f"{name}_{field}", {}).get("value", "")) for field in fields]
        cells[0] += "" if result["status"] == "ok" else f" ({result['status']})"
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", record["notes"]])
