"""From what the rungs measured to figures: lines through numbers of layers, rates, projections, the README's table.

Full rungs are measured at a few numbers of layers, because the whole model with its optimizer does not fit one GPU; a
straight line through them gives the time at all layers. The optimizer's time, fitted alike, counts by its share: on N
GPUs each updates 1/N of the weights. Communication and sharding are in no figure.

Worked example: 4 layers 0.3 s, 8 layers 0.5 s: a layer takes 0.05 s, 64 layers take 3.3 s.
"""

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np

from trainer import flops
from trainer.rungs import RUNGS, Rung
from trainer.sizes import ModelConfig

ULTRACHAT_TOKENS = 257.7e6
"""Tokens of ultrachat_200k, which the projections pass over once."""

NUM_GPUS = 8
"""GPUs whose share of the optimizer's time counts in the rates."""

PROJECTED_GPUS = (8, 32)

Run = dict[str, Any]
Figures = dict[str, dict[str, Any]]


def figures(name: str, result: dict[str, Any], config: ModelConfig) -> Figures:
    """What a rung's measurements say of the whole model; empty where they do not suffice.

    Args:
        name: of the rung.
        result: as trainer.rungs handed it over, with `device`.
        config: the whole model, whose number of layers is extrapolated to.
    """
    rung, runs = RUNGS[name], result.get("runs", [])
    if not runs:
        return {}
    largest = runs[-1]
    found: Figures = {
        f"{name}_peak_gib": {"value": round(largest["peak_gib"], 2), "unit": f"GiB at {largest['layers']} layers"}
    }
    target = config.num_hidden_layers
    if len(runs) < 2 and largest["layers"] != target:
        return found
    how = f"{target} layers" if largest["layers"] == target else f"{target} layers, {_by_line(runs)}"
    compute = _at(target, runs, lambda run: typical(rung, run, "seconds") - typical(rung, run, "optimizer_seconds"))
    optimizer = _at(target, runs, lambda run: typical(rung, run, "optimizer_seconds"))
    tokens = _mean(largest["steps"], "tokens")
    seconds = compute + optimizer / _sharing(rung, NUM_GPUS)
    found |= {
        f"{name}_tokens_per_s": {"value": round(tokens / seconds, 1), "unit": f"tokens of documents, {how}"},
        f"{name}_optimizer_ms": {"value": round(optimizer * 1e3, 2), "unit": f"ms an update on one GPU, {how}"},
        f"{name}_document_share": {
            "value": round(tokens / _mean(largest["steps"], "slots"), 4), "unit": "of all tokens, padding included",
        },
    }  # fmt: skip
    if rung.method == "full" and "held_gib" in largest:
        gib = _at(target, runs, lambda run: float(run["held_gib"]) + float(run["state_gib"]) / NUM_GPUS)
        found[f"{name}_gib_of_{NUM_GPUS}_gpus"] = {"value": round(gib, 1), "unit": f"GiB a GPU, {how}"}
    for number in PROJECTED_GPUS:
        hours = ULTRACHAT_TOKENS * (compute + optimizer / _sharing(rung, number)) / tokens / number / 3600
        found[f"{name}_ultrachat_hours_{number}_gpus"] = {"value": round(hours, 2), "unit": f"h, projected from {how}"}
    return found | _utilisation(name, result, config, seconds, how) | _operations(name, runs, target)


def typical(rung: Rung, run: Run, name: str) -> float:
    """The time of a step: the median where all have one shape, the mean of padded batches of different shapes."""
    values = [float(step[name]) for step in run["steps"]]
    return median(values) if rung.order == "packed" else sum(values) / len(values)


def _sharing(rung: Rung, num_gpus: int) -> int:
    """GPUs that share an update: adapters are too small to be worth it."""
    return 1 if rung.method == "lora" else num_gpus


def _mean(steps: Sequence[dict[str, Any]], name: str) -> float:
    return sum(float(step[name]) for step in steps) / len(steps)


def _at(layers: int, runs: Sequence[Run], value: Callable[[Run], float]) -> float:
    """The value at this number of layers: measured, or on the line through those measured."""
    for run in runs:
        if run["layers"] == layers:
            return value(run)
    slope, intercept = np.polyfit([run["layers"] for run in runs], [value(run) for run in runs], 1)
    return float(slope * layers + intercept)


def _by_line(runs: Sequence[Run]) -> str:
    return "extrapolated from " + " and ".join(str(run["layers"]) for run in runs)


def _utilisation(name: str, result: dict[str, Any], config: ModelConfig, seconds: float, how: str) -> Figures:
    """Share of the GPU's peak that the step's work is: the model's own, and all that the hardware did."""
    if result.get("device") != "cuda":
        return {}
    rung, steps = RUNGS[name], result["runs"][-1]["steps"]
    useful = flops.model_flops(
        config,
        num_tokens=round(_mean(steps, "tokens")),
        sum_squared_lengths=round(_mean(steps, "sum_squared_lengths")),
        method=rung.method,
    )
    done = flops.hardware_flops(
        config,
        num_tokens=round(_mean(steps, "slots")),
        sum_squared_lengths=round(_mean(steps, "slots_sum_squared_lengths")),
        method=rung.method,
        recompute_layers=_recomputed(result, config),
        tokens_without_head=round(_mean(steps, "slots") - _mean(steps, "targets")) if rung.ours else 0,
    )
    unit = f"of {flops.PEAK / 1e12:.0f} TFLOP/s, {how}"
    return {
        f"{name}_mfu": {"value": round(useful / seconds / flops.PEAK, 4), "unit": unit},
        f"{name}_hardware_mfu": {"value": round(done / seconds / flops.PEAK, 4), "unit": unit + ", all work done"},
    }


def _recomputed(result: dict[str, Any], config: ModelConfig) -> int:
    """Layers of the whole model that are computed again; a result has as many as were asked for, which may be more."""
    return min(int(result.get("recompute", 0)), config.num_hidden_layers)


def _operations(name: str, runs: Sequence[Run], target: int) -> Figures:
    """GPU operations, CPU calls and waits of a step, from the traces."""
    traced = [run for run in runs if "profile" in run]
    if not traced:
        return {}
    found: Figures = {}
    for figure, field, unit in (
        ("gpu_ops", "num_gpu_ops", "operations on the GPU a step"),
        ("cpu_calls", "num_cpu_calls", "operations and CUDA calls on the CPU a step"),
    ):
        if len(traced) == 1 and traced[0]["layers"] != target:
            value = traced[0]["profile"][field] * target / traced[0]["layers"]
            how = f"{target} layers, in proportion to {traced[0]['layers']}"
        else:
            value = _at(target, traced, lambda run, field=field: float(run["profile"][field]))  # type: ignore[misc]
            how = f"{target} layers" if traced[-1]["layers"] == target else f"{target} layers, {_by_line(traced)}"
        found[f"{name}_{figure}"] = {"value": round(value), "unit": f"{unit}, {how}"}
    last = traced[-1]["profile"]
    found[f"{name}_host_waits"] = {"value": round(last["num_waits"], 1), "unit": "times a step that the CPU waits"}
    return found


COLUMNS = (
    ("tokens/s", "tokens_per_s", "{:,.0f}"), ("MFU", "mfu", "{:.1%}"), ("hardware MFU", "hardware_mfu", "{:.1%}"),
    ("documents", "document_share", "{:.0%}"), ("peak GiB", "peak_gib", "{:.1f}"),
    ("GiB of 8 GPUs", "gib_of_8_gpus", "{:,.0f}"),
    ("GPU operations", "gpu_ops", "{:,.0f}"), ("CPU calls", "cpu_calls", "{:,.0f}"),
    ("update, ms", "optimizer_ms", "{:,.0f}"), ("8 GPUs, h", "ultrachat_hours_8_gpus", "{:,.1f}"),
    ("32 GPUs, h", "ultrachat_hours_32_gpus", "{:,.1f}"),
)  # fmt: skip


def table(record: dict[str, Any]) -> str:
    """A record's rungs as a Markdown table, with what limits it below."""
    rungs: dict[str, dict[str, Any]] = record["rungs"]
    found: Figures = record["figures"]
    lines = ["| rung | " + " | ".join(title for title, _, _ in COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for name in [name for name in RUNGS if name in rungs]:
        cells = []
        for _, suffix, form in COLUMNS:
            figure = found.get(f"{name}_{suffix}")
            cells.append("" if figure is None else form.format(figure["value"]))
        status = rungs[name]["status"]
        if status != "ok":
            cells[0] = f"{cells[0]} ({status})".strip()
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", record["notes"]])


def notes(config: ModelConfig, rungs: dict[str, dict[str, Any]], extra: str) -> str:
    """What a reader has to know of the figures."""
    layers = sorted({run["layers"] for result in rungs.values() for run in result.get("runs", [])})
    again = ", ".join(f"{name} {num}" for name, r in rungs.items() if (num := _recomputed(r, config)))
    padded = ", ".join(f"{name} {r['padded_documents']}" for name, r in rungs.items() if "padded_documents" in r)
    parts = [
        f"Random weights at the width of {config.hidden_size}; measured at {' and '.join(map(str, layers))} layers and "
        f"extrapolated along a straight line to {config.num_hidden_layers} where that was not measured itself "
        "(GPU operations of rungs on torch's fallbacks: in proportion from the fewest layers).",
        f"Layers computed again in the backward pass: {again}." if again else "",
        "fused_packed_stock: transformers has no variable-length attention without another package, so its attention "
        "runs over a dense mask of the whole row."
        if "fused_packed_stock" in rungs
        else "",
        "Peak memory is that of the most layers measured on one GPU, not of the whole model; GiB of 8 GPUs is what one "
        "of them would hold of all layers: 1/8 of weights, gradients and optimizer, and what a forward pass leaves for "
        "the backward pass, along the same line; an H200 has 139.",
        "One GPU, one packed row or one padded batch a step, one update a step; "
        f"full rungs count 1/{NUM_GPUS} of the update's time (sharded over {NUM_GPUS} GPUs), LoRA all of it.",
        f"Documents of a padded batch: {padded}." if padded else "",
        "Communication and sharding are excluded. Hours: one pass over ultrachat_200k's "
        f"{ULTRACHAT_TOKENS / 1e6:.1f} million tokens at this rate on each of 8 or 32 GPUs, each with its share of the "
        "update, no loss in scaling, rows filled as here.",
        "Tokens are those of documents.",
        "full_bf16_nomaster has no fp32 master weights, unlike this trainer's defaults."
        if "full_bf16_nomaster" in rungs
        else "",
        extra,
    ]
    return " ".join(part for part in parts if part)
