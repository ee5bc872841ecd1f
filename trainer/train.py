"""Train a Qwen on packed shards.

    python -m trainer.train --shards data/packed --model random:0.8B --epochs 1
    torchrun --nproc-per-node 2 -m trainer.train --shards data/packed ...

1. open     shards, checked; the model's configuration; what does not fit together or into memory is refused here
2. build    kernels, model, optimizer; weights random, from a checkpoint folder, or from the run that is resumed
3. loop     plan -> batches (read ahead) -> step -> metrics; evaluation and checkpoints where they are due
4. export   a Hugging Face folder that transformers loads

Guarantees: on the CPU two runs of the same settings are equal bit by bit, and so is one that was interrupted, at any
moment and any number of times, and resumed; Ctrl-C or a kill leaves no half-written checkpoint.
Costs: memory as ``trainer.memory`` says before it begins; 12 bytes a parameter on disk for each checkpoint.
"""

import dataclasses
import datetime
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import tyro

from pipeline.shards import PackedDataset
from trainer import checkpoint, memory, record, weights
from trainer.batches import Prefetch, Reader, StepBatches
from trainer.inputs import alternatives, check_vocabulary, choose_model, open_evaluation
from trainer.kernels import Kernels, select
from trainer.metrics import Metrics, duration
from trainer.model import Qwen3_5ForCausalLM
from trainer.plan import Cursor, Plan
from trainer.sizes import ModelConfig
from trainer.step import Precision, Schedule, evaluate, learning_rate, make_optimizer, train_step
from trainer.world import World, barrier, join_world, say

SAMPLE_TOKENIZER_SHA256 = "ea5234817e8cd4d3f69f5198f378d6abc2fe319597459b014c0168a0a5467d22"
"""tokenizer_sha256 of ``data/sample``: its shards train a small built-in configuration without ``--model``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Train a Qwen on packed shards, and write metrics, checkpoints and a Hugging Face folder."""

    shards: Path
    """The packed dataset to train on, as python -m pipeline.pack wrote it."""
    eval_shards: Path | None = None
    """A packed dataset to evaluate on; the same tokenizer, any row length. Each evaluation reads all of it."""
    model: str | None = None
    """A hub id or a folder with weights, or random:SIZE or random:CONFIG.json for random ones. By default the model
    whose tokenizer packed the shards."""
    method: memory.Method = "full"
    """full trains every weight. lora is not available in this version."""
    precision: Precision | None = None
    """What matrix products are computed in: by default fp32 on a CPU, bf16 on a GPU. Weights are updated in fp32."""
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
    out: Path | None = None
    """Folder of the run. By default runs/DATE-MODEL-DATASET."""
    resume: bool = False
    """Go on from the newest checkpoint in --out, with the same settings; --steps, --epochs and how often to evaluate
    and to save may change."""
    accept_slow_kernels: bool = False
    """Train on a GPU even where only the slow torch references are available for some operation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """Everything that is known before any weight is read."""

    settings: Settings
    """All of them resolved."""
    world: World
    """This process."""
    dataset: PackedDataset
    """Rows to train on."""
    eval_dataset: PackedDataset | None
    """Rows to evaluate on."""
    config: ModelConfig
    """The model's configuration."""
    plan: Plan
    """Which rows each step takes."""
    estimate: memory.Estimate
    """Memory that was found to fit."""
    out: Path
    """Folder of the run."""
    precision: Precision
    """What matrix products are computed in."""


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0, 2 for an error of the input, 130 after Ctrl-C."""
    try:
        settings = tyro.cli(Settings, prog="python -m trainer.train", args=args, config=(tyro.conf.FlagCreatePairsOff,))
        with join_world() as world:
            train(prepare(settings, world))
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return 2
    return 0


# ----------------------------------------------------------------------------------------------- 1. open


def prepare(settings: Settings, world: World) -> Inputs:
    """Open and check everything that needs no weight.

    Raises:
        ValueError: for settings, shards or a model that are wrong, do not fit together, or not into memory.
    """
    check_settings(settings)
    dataset = PackedDataset.open(settings.shards)
    spec = settings.model or dataset.manifest.recipe["tokenizer"]["model"]
    settings = resolve(settings, spec=spec, dataset_id=dataset.manifest.dataset_id, device=world.device)
    assert settings.out is not None
    assert settings.precision is not None
    record.require_folder(settings.out, resume=settings.resume)
    eval_dataset = open_evaluation(settings.eval_shards, dataset) if settings.eval_shards else None
    plan = Plan.build(
        num_rows=len(dataset),
        seed=settings.seed,
        rows_per_step=settings.rows_per_step,
        epochs=settings.epochs,
        steps=settings.steps,
    )
    config = choose_model(spec, dataset, sample_sha256=SAMPLE_TOKENIZER_SHA256)
    check_vocabulary(config, dataset, spec or "the sample's model")
    manifest = dataset.manifest
    estimate = memory.require(
        memory.Workload(
            config=config,
            max_tokens=manifest.max_tokens,
            micro_rows=min(settings.micro_rows, settings.rows_per_step),
            max_segments_per_row=manifest.limits["max_segments_per_row"],
            method=settings.method,
            precision=settings.precision,
            processes=1 if world.device.type == "cuda" else world.local_size,
        ),
        available=memory.available_bytes(world.device),
        where="this GPU" if world.device.type == "cuda" else "this machine",
        alternatives=alternatives(spec),
    )
    return Inputs(
        settings=settings, world=world, dataset=dataset, eval_dataset=eval_dataset, config=config, plan=plan,
        estimate=estimate, out=settings.out, precision=settings.precision,
    )  # fmt: skip


def check_settings(settings: Settings) -> None:
    """Refuse values that no run can have. Raises ValueError naming the flag."""
    if settings.method == "lora":
        raise ValueError("--method lora is not available in this version; leave it out to train every weight")
    if settings.resume and settings.out is None:
        raise ValueError("--resume needs --out: the folder of the run to go on with")
    for name, least in (("micro_rows", 1), ("warmup_steps", 0), ("eval_every", 0), ("save_every", 0), ("keep", 1)):
        if (value := getattr(settings, name)) < least:
            raise ValueError(f"--{name.replace('_', '-')} {value} is too small; it has to be at least {least}")
    for name in ("lr", "weight_decay", "clip"):
        if not 0 <= (value := getattr(settings, name)) < float("inf"):
            raise ValueError(f"--{name.replace('_', '-')} {value} has to be a number of at least 0")


def resolve(settings: Settings, *, spec: str | None, dataset_id: str, device: torch.device) -> Settings:
    """The settings with every default filled in, equal on all ranks."""
    today = [datetime.date.today()]
    if dist.is_initialized():
        dist.broadcast_object_list(today)
    out = settings.out or record.default_folder(model=spec or "sample", dataset_id=dataset_id, today=today[0])
    precision = settings.precision or ("bf16" if device.type == "cuda" else "fp32")
    return dataclasses.replace(settings, model=spec, out=out, precision=precision)


# ---------------------------------------------------------------------------------------------- 2. build


def train(inputs: Inputs) -> None:
    """Build, train, export.

    Raises:
        ValueError: damaged or unfitting weights, other settings than those of the run to resume, divergence.
        KeyboardInterrupt: after having said how to go on.
    """
    settings, world = inputs.settings, inputs.world
    kernels = select(world.device, accept_slow=settings.accept_slow_kernels)
    begin_record(inputs, kernels)
    try:
        torch.manual_seed(settings.seed)  # nothing draws from it yet; checkpoints hold its state
        model = Qwen3_5ForCausalLM(inputs.config, kernels=kernels).to(world.device)
        optimizer = make_optimizer(model, lr=settings.lr, weight_decay=settings.weight_decay)
        step, cursor = start(inputs, model, optimizer)
        total_steps = step + inputs.plan.steps_left(rows_seen=cursor.rows_seen)
        if step == total_steps and settings.resume:
            say(world, f"nothing is left to train: all {total_steps} steps are done")
        path = inputs.out / "metrics.jsonl" if world.rank == 0 else None
        with Metrics(path, step=step, total_steps=total_steps) as metrics:
            loop(inputs, model, optimizer, cursor, metrics, step=step, total_steps=total_steps)
        finish(inputs, model)
    except KeyboardInterrupt:
        again = dataclasses.replace(settings, resume=True)
        say(world, f"\nstopped. {record.how_to_resume(inputs.out, again)}")
        raise


def begin_record(inputs: Inputs, kernels: Kernels) -> None:
    """Write ``config.json``, or check that it is this run's, and print the table of kernels."""
    settings, world = inputs.settings, inputs.world
    found = record.describe(
        settings=record.plain(settings),
        manifest=inputs.dataset.manifest,
        eval_manifest=inputs.eval_dataset.manifest if inputs.eval_dataset else None,
        model_config=inputs.config.to_dict(),
        device=world.device,
        world_size=world.size,
        kernels=[dataclasses.asdict(choice) for choice in kernels.table],
        memory={part.name: part.num_bytes for part in inputs.estimate.parts},
    )
    if settings.resume:
        record.require_same_run(record.read(inputs.out), found)
    if world.rank == 0:
        record.write(inputs.out, found)
    barrier()
    for choice in kernels.table:
        say(world, f"  {choice.operation:<17} {choice.implementation} {choice.version} ({choice.why})")
    gib = inputs.estimate.num_bytes / memory.GIB
    say(
        world,
        f"{memory.num_parameters(inputs.config):,} parameters, about {gib:.2f} GiB of memory; run folder {inputs.out}",
    )


def start(inputs: Inputs, model: Qwen3_5ForCausalLM, optimizer: torch.optim.Optimizer) -> tuple[int, Cursor]:
    """Set every weight; returns the steps done and the place in the data."""
    settings, dataset_id = inputs.settings, inputs.dataset.manifest.dataset_id
    if settings.resume:
        state = checkpoint.load_latest(
            inputs.out, model=model, optimizer=optimizer, say=lambda text: say(inputs.world, text)
        )
        if state is not None:
            say(inputs.world, f"going on after step {state.step}, from {state.path}")
            return state.step, Cursor.from_state(state.cursor, dataset_id=dataset_id, seed=settings.seed)
        say(inputs.world, "there is no checkpoint yet: beginning at the first step")
    folder = None if settings.model is None else weights.weights_folder(settings.model)
    if folder is None:
        model.init_weights(seed=settings.seed)
    else:
        weights.load_weights(model, folder)
    return 0, Cursor(dataset_id=dataset_id, seed=settings.seed)


# ----------------------------------------------------------------------------------------------- 3. loop


def loop(
    inputs: Inputs,
    model: Qwen3_5ForCausalLM,
    optimizer: torch.optim.Optimizer,
    cursor: Cursor,
    metrics: Metrics,
    *,
    step: int,
    total_steps: int,
) -> None:
    """Do the steps that are left; evaluation comes before the checkpoint of the same step."""
    settings, world = inputs.settings, inputs.world
    begun, first, tokens = time.perf_counter(), step, 0
    if step == 0:
        evaluate_all(inputs, model, metrics, step=0)
    source = reader(inputs, inputs.dataset).read_all(inputs.plan, rows_seen=cursor.rows_seen)
    with Prefetch(source) as prefetched:
        metrics.start_clock()
        for batches in prefetched:
            step += 1
            lr = learning_rate(
                step, peak=settings.lr, schedule=settings.schedule, warmup_steps=settings.warmup_steps,
                total_steps=total_steps,
            )  # fmt: skip
            result = train_step(
                model, optimizer, batches, step=step, lr=lr, clip=settings.clip, device=world.device,
                precision=inputs.precision,
            )  # fmt: skip
            cursor.advance(result.num_rows)
            tokens += result.num_tokens
            metrics.step(result, rows_seen=cursor.rows_seen)
            if due(step, settings.eval_every, total_steps):
                evaluate_all(inputs, model, metrics, step=step)
            if due(step, settings.save_every, total_steps):
                save(inputs, model, optimizer, cursor, metrics, step=step)
            metrics.start_clock()
    if step > first:
        elapsed = duration(time.perf_counter() - begun)
        metrics.say(f"{step - first} steps, {tokens:,} tokens of documents in {elapsed}")


def due(step: int, every: int, last: int) -> bool:
    """Whether something is done after ``step``: every so many steps, and after the last."""
    return step == last or (every > 0 and step % every == 0)


def reader(inputs: Inputs, dataset: PackedDataset) -> Reader:
    """This rank's reader of a dataset."""
    world = inputs.world
    return Reader(
        dataset=dataset,
        rank=world.rank,
        world_size=world.size,
        micro_rows=inputs.settings.micro_rows,
        pin=world.device.type == "cuda",
    )


def evaluate_all(inputs: Inputs, model: Qwen3_5ForCausalLM, metrics: Metrics, *, step: int) -> None:
    """Evaluate on every row of the evaluation set once, if there is one."""
    if inputs.eval_dataset is None:
        return
    rows = inputs.plan.evaluation_rows(num_rows=len(inputs.eval_dataset))
    at_once = inputs.world.size * inputs.settings.micro_rows
    read = reader(inputs, inputs.eval_dataset).read
    source: Iterator[StepBatches] = (read(rows[i : i + at_once]) for i in range(0, len(rows), at_once))
    with Prefetch(source) as prefetched:
        loss = evaluate(model, prefetched, device=inputs.world.device, precision=inputs.precision)
    metrics.evaluation(step=step, loss=loss)


def save(
    inputs: Inputs,
    model: Qwen3_5ForCausalLM,
    optimizer: torch.optim.Optimizer,
    cursor: Cursor,
    metrics: Metrics,
    *,
    step: int,
) -> None:
    """Write a checkpoint and remove those that are too old."""
    if inputs.world.rank == 0:
        metrics.sync()
        checkpoint.save(inputs.out, step=step, model=model, optimizer=optimizer, cursor=cursor.state())
        checkpoint.prune(inputs.out, keep=inputs.settings.keep)
    barrier()


# --------------------------------------------------------------------------------------------- 4. export


def finish(inputs: Inputs, model: Qwen3_5ForCausalLM) -> None:
    """Export the model and say where everything lies."""
    if inputs.world.rank == 0:
        weights.export(
            inputs.out / "export",
            model=model,
            tokenizer_dir=inputs.dataset.path / "tokenizer",
            eos_token_ids=inputs.dataset.manifest.recipe["tokenizer"]["eos_token_ids"],
            dtype=torch.bfloat16 if inputs.precision == "bf16" else None,
        )
    barrier()
    say(
        inputs.world,
        f"done\n  metrics      {inputs.out / 'metrics.jsonl'}\n  checkpoints  {inputs.out / 'checkpoints'}\n"
        f"  record       {inputs.out / record.CONFIG}\n  export       {inputs.out / 'export'}",
    )


if __name__ == "__main__":
    sys.exit(main())
