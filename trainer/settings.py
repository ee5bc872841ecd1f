"""The settings of a run: what each means, which values none can have, what the defaults stand for.

Guarantees: a value that no run can have is refused before anything is read, naming its flag.
"""

import dataclasses
import datetime
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import tyro

from trainer import record
from trainer.memory import Method
from trainer.optimizer import OptimizerKind
from trainer.step import Precision, Schedule
from trainer.trackers import TrackerName

STEPS_BEFORE_TRACE = 3
"""Compilation, caches and the allocator settle in the first steps, so ``--trace`` begins after them."""

LEAST = {
    "micro_rows": 1, "warmup_steps": 0, "eval_every": 0, "save_every": 0, "keep": 1, "lora_rank": 1, "trace": 0,
}  # fmt: skip
"""Smallest value of each setting that counts something."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Train a Qwen on packed shards, and write metrics, checkpoints and a Hugging Face folder."""

    shards: Path
    """The packed dataset to train on, as python -m pipeline.pack wrote it."""
    eval_shards: Path | None = None
    """A packed dataset to evaluate on; the same tokenizer, any row length. Each evaluation reads all of it."""
    model: str | None = None
    """A hub id (OWNER/NAME or OWNER/NAME@REVISION) or a folder with weights, or random:SIZE or random:CONFIG.json for
    random ones. By default the model whose tokenizer packed the shards. The run keeps the hub's commit."""
    method: Method = "full"
    """full trains every weight, lora adapters on every linear layer but the head."""
    lora_rank: int = 16
    """Inner width of an adapter."""
    lora_alpha: float = 32.0
    """An adapter's product is scaled by this over --lora-rank."""
    precision: Precision | None = None
    """What weights, activations and gradients are: by default fp32 on a CPU, bf16 on a GPU; there too the optimizer
    updates weights in fp32."""
    optimizer: OptimizerKind = "adamw"
    """adamw, or adamw_bf16: torchao's, without fp32 weights and moments, rounding stochastically to make up for it."""
    recompute: str = "none"
    """How many layers compute their activations again in the backward pass instead of keeping them: a number, none or
    all. Less memory, more time; the gradient stays the same."""
    rows_per_step: int = 8
    """Rows of one optimizer step, over all ranks and micro-steps."""
    micro_rows: int = 1
    """Most rows that one rank works on at a time: more need more memory; the gradient stays the same."""
    steps: int | None = None
    """Number of steps, all of them full, over as many epochs as it takes; replaces --epochs."""
    epochs: int = 1
    """How often each row is seen; the last step may be smaller."""
    lr: float = 1e-5
    """Highest learning rate. 1e-5 suits a trained model; random weights want about 1e-3."""
    schedule: Schedule = "cosine"
    """How the learning rate falls after the warm-up: towards 0 (cosine, linear), or not (constant)."""
    warmup_steps: int = 0
    """Steps in which the learning rate rises to --lr."""
    weight_decay: float = 0.0
    """AdamW's weight decay of the matrices; norms, biases and the like never decay."""
    clip: float = 1.0
    """Largest norm of the gradient; longer ones are scaled down to it. 0 leaves all as they are."""
    seed: int = 0
    """Seed of the order of rows and of random weights, 0 to 2**63 - 1."""
    eval_every: int = 0
    """Steps between evaluations, beside those before the first and after the last step; 0 for these two alone."""
    save_every: int = 500
    """Steps between checkpoints, beside the one after the last step; 0 for that one alone."""
    keep: int = 2
    """How many of the newest checkpoints stay."""
    trace: int = 0
    """Trace that many steps after the first ones with torch's profiler; read it with python -m trainer.timeline."""
    track: tyro.conf.UseAppendAction[tuple[TrackerName, ...]] = ()
    """Log to TensorBoard, in the run's folder, or to Weights & Biases as well; may be given once for each."""
    out: Path | None = None
    """Folder of the run. By default runs/DATE-MODEL-DATASET."""
    resume: bool = False
    """Go on from the newest checkpoint in --out, with the same settings. --lr, --warmup-steps and --clip may change;
    the schedule goes on from the step reached as if they had always been so. So may --steps, --epochs, --micro-rows,
    --recompute, --keep, --track, --trace, the paths of the datasets, and how often to evaluate and to save."""
    accept_slow_kernels: bool = False
    """Train on a GPU even where only the slow torch references are available for some operation."""


def check_settings(settings: Settings) -> None:
    """Refuse values that no run can have. Raises ValueError naming the flag."""
    if settings.resume and settings.out is None:
        raise ValueError("--resume needs --out: the folder of the run to go on with")
    for name, least in LEAST.items():
        if (value := getattr(settings, name)) < least:
            raise ValueError(f"--{name.replace('_', '-')} {value} is too small; it has to be at least {least}")
    for name in ("lr", "weight_decay", "clip"):
        if not 0 <= (value := getattr(settings, name)) < float("inf"):
            raise ValueError(f"--{name.replace('_', '-')} {value} has to be a number of at least 0")
    if not 0 < settings.lora_alpha < float("inf"):
        raise ValueError(f"--lora-alpha {settings.lora_alpha} has to be a number above 0")
    if settings.recompute not in ("none", "all") and not settings.recompute.isdecimal():
        raise ValueError(f"--recompute {settings.recompute}: pass a number of layers, none or all")


def resolve(settings: Settings, *, spec: str | None, dataset_id: str, device: torch.device) -> Settings:
    """The settings with every default filled in, equal on all ranks.

    Raises:
        ValueError: for an optimizer that the precision has no use for, or fp32 on a GPU.
    """
    today = [datetime.date.today()]
    if dist.is_initialized():
        dist.broadcast_object_list(today)
    out = settings.out or record.default_folder(model=spec or "sample", dataset_id=dataset_id, today=today[0])
    precision = settings.precision or ("bf16" if device.type == "cuda" else "fp32")
    if precision == "fp32" and device.type == "cuda":
        raise ValueError(
            "--precision fp32: a GPU's kernels compute in bf16; leave it out, or hide the GPU (CUDA_VISIBLE_DEVICES=) "
            "to train in fp32 on the CPU"
        )
    if settings.optimizer == "adamw_bf16" and precision != "bf16":
        raise ValueError("--optimizer adamw_bf16 rounds bf16 weights; with fp32 ones use adamw, or --precision bf16")
    return dataclasses.replace(settings, model=spec, out=out, precision=precision)


def without_effect(settings: Settings, *, total_steps: int) -> list[str]:
    """What of the settings does nothing in a run of so many steps, or less than it says; a line each."""
    defaults = {field.name: field.default for field in dataclasses.fields(settings)}
    found = []
    if settings.warmup_steps >= total_steps:
        found.append(f"--warmup-steps {settings.warmup_steps}, but {total_steps} steps: the learning rate never falls")
    if settings.eval_every and settings.eval_shards is None:
        found.append(f"--eval-every {settings.eval_every}, but no --eval-shards: nothing is evaluated")
    if settings.trace > (most := max(0, total_steps - STEPS_BEFORE_TRACE)):
        found.append(f"--trace {settings.trace}, but {most} steps are left after the first {STEPS_BEFORE_TRACE}")
    given = {name: getattr(settings, name) for name in ("lora_rank", "lora_alpha")}
    return found + [
        f"--{name.replace('_', '-')} {value}, but no --method lora: every weight is trained"
        for name, value in given.items()
        if settings.method != "lora" and value != defaults[name]
    ]


def recompute_layers(settings: Settings, *, num_layers: int) -> int:
    """Number of layers that compute again. Raises ValueError for more than there are."""
    if settings.recompute in ("none", "all"):
        return num_layers if settings.recompute == "all" else 0
    if int(settings.recompute) > num_layers:
        raise ValueError(f"--recompute {settings.recompute}: the model has {num_layers} layers; pass at most these")
    return int(settings.recompute)
