"""Train a Qwen on packed shards.

    python -m trainer.train --shards data/packed --model random:0.8B --epochs 1
    torchrun --nproc-per-node 2 -m trainer.train --shards data/packed ...

1. prepare  shards, checked; the model's configuration; what does not fit together or into memory is refused
2. build    kernels, model, optimizer; weights random, from a checkpoint folder, or from the run that is resumed
3. loop     plan -> batches (read ahead) -> step -> metrics; evaluation and checkpoints where they are due
4. finish   an export that transformers loads, or an adapter (``trainer.outputs``)

Guarantees: on the CPU two runs of the same settings are equal bit by bit, and so is one that was interrupted, at any
moment and any number of times, and resumed; Ctrl-C or a kill leaves no half-written checkpoint.
Costs: memory as ``trainer.memory`` says before it begins; 12 bytes a trained parameter on disk for each checkpoint.
"""

from pipeline.interrupt import hear, quiet_imports

if __name__ == "__main__":
    quiet_imports("\ninterrupted")

import contextlib
import dataclasses
import math
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import tyro

from pipeline.cli import refuse_repeats
from pipeline.shards import PackedDataset
from trainer import checkpoint, lora, memory, record, trackers, weights
from trainer.batches import Prefetch, Reader, StepBatches
from trainer.flops import Arithmetic, peak_flops
from trainer.inputs import Inputs, prepare
from trainer.kernels import Kernels, select
from trainer.liveline import LiveLine
from trainer.metrics import Metrics, duration
from trainer.model import Qwen3_5ForCausalLM
from trainer.optimizer import make_optimizer, masters
from trainer.outputs import finish, require_replaceable
from trainer.plan import Cursor
from trainer.report.log import METRICS, TRACE
from trainer.settings import STEPS_BEFORE_TRACE, Settings
from trainer.step import DivergedError, Precision, evaluate, learning_rate, require_finite, train_step
from trainer.tracing import tracer
from trainer.warmup import Use, warm_up_all
from trainer.world import barrier, join_world, on_rank_0, say

DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0, 2 for an error of the input, 130 after Ctrl-C."""
    hear()
    try:
        settings = tyro.cli(Settings, prog="python -m trainer.train", args=args, config=(tyro.conf.FlagCreatePairsOff,))
        refuse_repeats(Settings, arguments=args)
        with join_world() as world:
            train(prepare(settings, world))
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return 2
    return 0


# ---------------------------------------------------------------------------------------------- 2. build


def train(inputs: Inputs) -> None:
    """Build, train, export.

    Raises:
        ValueError: another process trains in the folder, damaged or unfitting weights, other settings than those of
            the run to resume, divergence.
        KeyboardInterrupt: after having said how to go on.
    """
    settings, world = inputs.settings, inputs.world
    kernels = select(world.device, accept_slow=settings.accept_slow_kernels)
    prove(kernels, world.device)
    with hold_folder(inputs):
        on_rank_0(world, lambda: require_replaceable(inputs))
        found = begin_record(inputs, kernels)
        try:
            torch.manual_seed(settings.seed)  # nothing draws from it yet; checkpoints hold its state
            model = build_model(inputs, kernels)
            optimizer = fit(inputs, model, found)
            finish(inputs, model, masters(optimizer))
        except DivergedError as error:
            raise ValueError(f"{error}\n{record.how_to_calm_down(inputs.out, again(settings))}") from error
        except KeyboardInterrupt:
            say(world, f"\nstopped. {record.how_to_resume(inputs.out, again(settings))}")
            raise


def again(settings: Settings) -> Settings:
    """The settings that go on with the same run."""
    return dataclasses.replace(settings, resume=True)


@contextlib.contextmanager
def hold_folder(inputs: Inputs) -> Iterator[None]:
    """Keep other processes out of the run's folder. Raises ValueError if one is there, or was a moment ago."""
    with contextlib.ExitStack() as held:

        def take() -> None:
            holds = held.enter_context(record.locked(inputs.out, say=lambda text: say(inputs.world, text)))
            record.require_folder(inputs.out, resume=inputs.settings.resume, held=holds)

        barrier()  # no rank is still looking whether the folder is empty
        on_rank_0(inputs.world, take)
        yield


def prove(kernels: Kernels, device: torch.device) -> None:
    """Let the doctor prove a GPU's kernels; the references of a CPU are proven by the tests."""
    if device.type == "cuda":
        from trainer import doctor  # a run on a CPU needs nothing of it

        doctor.require(kernels, device)


def begin_record(inputs: Inputs, kernels: Kernels) -> dict[str, Any]:
    """Write ``config.json``, or check that it is this run's, and print the table of kernels; returns its content."""
    settings, world = inputs.settings, inputs.world
    found = record.describe(
        settings=record.plain(settings),
        manifest=inputs.dataset.manifest,
        eval_manifest=inputs.eval_dataset.manifest if inputs.eval_dataset else None,
        model_config=inputs.config.to_dict(),
        device=world.device,
        world_size=world.size,
        total_steps=max(inputs.plan.steps_left(rows_seen=0), steps_done(inputs)),
        kernels=[dataclasses.asdict(choice) for choice in kernels.table],
        memory={part.name: part.num_bytes for part in inputs.estimate.parts},
    )
    if settings.resume:
        for line in record.require_same_run(record.read(inputs.out), found):
            say(world, f"changed since the last start: {line}")
    elif world.rank == 0:
        record.write(inputs.out, found, resume=False)
    barrier()
    for choice in kernels.table:
        say(world, f"  {choice.operation:<17} {choice.implementation} {choice.version} ({choice.why})")
    for line in kernels.warnings():
        say(world, f"warning: {line}")
    gib = inputs.estimate.num_bytes / memory.GIB
    say(
        world,
        f"{memory.num_parameters(inputs.config):,} parameters, about {gib:.2f} GiB of memory; run folder {inputs.out}",
    )
    return found


def steps_done(inputs: Inputs) -> int:
    """Steps that the run to be resumed has saved."""
    newest = checkpoint.latest(inputs.out) if inputs.settings.resume else None
    return checkpoint.step_of(newest) if newest else 0


def build_model(inputs: Inputs, kernels: Kernels) -> Qwen3_5ForCausalLM:
    """The model on its device with its weights, adapters too; empty where a checkpoint will set every weight."""
    settings = inputs.settings
    with torch.device("meta"):  # no first values, no copy in host memory
        model = Qwen3_5ForCausalLM(inputs.config, kernels=kernels)
    model.to_dtype(DTYPES[inputs.precision]).to_empty(device=inputs.world.device)
    model.tie_weights()
    if settings.method == "lora" or not (settings.resume and checkpoint.latest(inputs.out)):
        if inputs.source is None:
            model.init_weights(seed=settings.seed)
        else:
            weights.load_weights(model, inputs.source)
    if settings.method == "lora":
        lora.add_adapters(model, rank=settings.lora_rank, alpha=settings.lora_alpha, seed=settings.seed)
    if inputs.recompute_layers:
        model.set_recompute(inputs.recompute_layers)
    return model


def start(inputs: Inputs, model: Qwen3_5ForCausalLM, optimizer: torch.optim.Optimizer) -> tuple[int, Cursor]:
    """Go on from the newest checkpoint, if that is asked for; returns the steps done and the place in the data."""
    settings, dataset_id = inputs.settings, inputs.dataset.manifest.dataset_id
    if settings.resume:
        state = checkpoint.load_latest(
            inputs.out, model=model, optimizer=optimizer, say=lambda text: say(inputs.world, text)
        )
        if state is not None:
            say(inputs.world, f"going on after step {state.step}, from {state.path}")
            return state.step, Cursor.from_state(state.cursor, dataset_id=dataset_id, seed=settings.seed)
        say(inputs.world, "there is no checkpoint yet: beginning at the first step")
    return 0, Cursor(dataset_id=dataset_id, seed=settings.seed)


def compile_kernels(inputs: Inputs, model: Qwen3_5ForCausalLM, *, rows_seen: int) -> None:
    """Compile what a GPU's kernels need for the rows of training and evaluation, before the first step."""
    world, plan, micro_rows = inputs.world, inputs.plan, inputs.settings.micro_rows
    if world.device.type != "cuda":
        return
    begun = time.perf_counter()
    uses = [Use(dataset=inputs.dataset, num_rows=plan.total_rows - rows_seen, at_once=plan.rows_per_step)]
    if (rows := inputs.eval_dataset) is not None:
        uses.append(Use(dataset=rows, num_rows=len(rows), at_once=world.size * micro_rows, training=False))
    warm_up_all(model, uses, rank=world.rank, world_size=world.size, micro_rows=micro_rows, device=world.device)
    lengths = ", ".join(str(length) for length in sorted({use.dataset.manifest.max_tokens for use in uses}))
    say(world, f"kernels are compiled for rows of {lengths} tokens: {duration(time.perf_counter() - begun)}")


# ----------------------------------------------------------------------------------------------- 3. loop


def fit(inputs: Inputs, model: Qwen3_5ForCausalLM, found: dict[str, Any]) -> torch.optim.Optimizer:
    """Train from the newest checkpoint, or from the beginning, to the last step; returns what holds the masters.

    ``found`` is the record of this start: of a run that is resumed it is written once everything was loaded.
    """
    settings = inputs.settings
    optimizer = make_optimizer(model, lr=settings.lr, weight_decay=settings.weight_decay, kind=settings.optimizer)
    step, cursor = start(inputs, model, optimizer)
    if settings.resume:
        on_rank_0(inputs.world, lambda: record.write(inputs.out, found, resume=True))
    total_steps = step + inputs.plan.steps_left(rows_seen=cursor.rows_seen)
    if step == total_steps and settings.resume:
        say(inputs.world, f"nothing is left to train: all {total_steps} steps are done")
        prune(inputs, last=step)  # --keep may be smaller by now
    compile_kernels(inputs, model, rows_seen=cursor.rows_seen)
    with open_metrics(inputs, step=step, total_steps=total_steps) as metrics:
        loop(inputs, model, optimizer, cursor, metrics, step=step, total_steps=total_steps)
    return optimizer


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
    path = inputs.out / TRACE if settings.trace and world.rank == 0 else None
    traced = tracer(path, first=STEPS_BEFORE_TRACE, num_steps=settings.trace)
    saved = False
    with Prefetch(source) as prefetched, traced as trace:
        for batches in metrics.time_steps(prefetched):
            step += 1
            lr = learning_rate(
                step, peak=settings.lr, schedule=settings.schedule, warmup_steps=settings.warmup_steps,
                total_steps=total_steps,
            )  # fmt: skip
            result = train_step(model, optimizer, batches, step=step, lr=lr, clip=settings.clip, device=world.device)
            if saved:  # older checkpoints go once a step from the newest came out finite
                prune(inputs, last=step)
            cursor.advance(result.num_rows)
            tokens += result.num_tokens
            metrics.step(result, rows_seen=cursor.rows_seen)
            trace.step()
            if due(step, settings.eval_every, total_steps):
                evaluate_all(inputs, model, metrics, step=step)
            if saved := due(step, settings.save_every, total_steps):
                save(inputs, model, optimizer, cursor, metrics, step=step)
    if saved:
        prune(inputs, last=step)
    if step > first:
        metrics.say(f"{step - first} steps, {tokens:,} tokens of documents in {duration(time.perf_counter() - begun)}")
    say_peak(inputs, metrics)


def say_peak(inputs: Inputs, metrics: Metrics) -> None:
    """Compare a GPU's memory that was taken with what was estimated."""
    if inputs.world.device.type != "cuda":
        return
    found, expected = torch.cuda.max_memory_allocated(inputs.world.device), inputs.estimate.num_bytes
    metrics.say(f"most memory {found / memory.GIB:.2f} GiB, estimated {expected / memory.GIB:.2f}")


def open_metrics(inputs: Inputs, *, step: int, total_steps: int) -> Metrics:
    """The metrics file, the live line and the trackers on rank 0; the others only keep time."""
    if inputs.world.rank != 0:
        return Metrics(None, step=step, total_steps=total_steps)
    settings, line = inputs.settings, LiveLine(sys.stderr)
    tracked = trackers.Trackers(
        settings.track, out=inputs.out, step=step, settings=record.plain(settings), say=line.say
    )
    return Metrics(
        inputs.out / METRICS, step=step, total_steps=total_steps, work=work(inputs), line=line, trackers=tracked
    )


def work(inputs: Inputs) -> Arithmetic:
    """What a token costs in this run."""
    settings, device = inputs.settings, inputs.world.device
    return Arithmetic(
        config=inputs.config,
        method=settings.method,
        lora_rank=settings.lora_rank,
        recompute_layers=inputs.recompute_layers,
        device=device,
        peak=peak_flops(device, precision=inputs.precision, num_devices=inputs.world.size),
    )


def due(step: int, every: int, last: int) -> bool:
    """Whether something is done after ``step``: every so many steps, and after the last."""
    return step == last or (every > 0 and step % every == 0)


def reader(inputs: Inputs, dataset: PackedDataset) -> Reader:
    """This rank's reader of a dataset."""
    world = inputs.world
    return Reader(
        dataset=dataset, rank=world.rank, world_size=world.size, micro_rows=inputs.settings.micro_rows,
        pin=world.device.type == "cuda",
    )  # fmt: skip


def evaluate_all(inputs: Inputs, model: Qwen3_5ForCausalLM, metrics: Metrics, *, step: int) -> None:
    """Evaluate on every row of the evaluation set once, if there is one."""
    if inputs.eval_dataset is None:
        return
    rows = inputs.plan.evaluation_rows(num_rows=len(inputs.eval_dataset))
    at_once = inputs.world.size * inputs.settings.micro_rows
    read = reader(inputs, inputs.eval_dataset).read
    source: Iterator[StepBatches] = (read(rows[i : i + at_once]) for i in range(0, len(rows), at_once))
    with Prefetch(source) as prefetched:
        counted = metrics.evaluating(prefetched, num_rows=len(rows))
        loss = evaluate(model, counted, device=inputs.world.device)
    if loss is not None and not math.isfinite(loss):
        raise DivergedError(f"step {step}: the loss of the evaluation is {loss}, not finite.")
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
    """Write a checkpoint.

    Raises:
        ValueError: on all ranks, for weights that are not finite, and where the disk does not take it.
    """

    def write() -> None:
        settings = again(inputs.settings)
        try:
            require_finite(model, step=step)
            metrics.sync()
            checkpoint.save(inputs.out, step=step, model=model, optimizer=optimizer, cursor=cursor.state())
        except DivergedError as error:
            raise ValueError(f"{error}\n{record.how_to_calm_down(inputs.out, settings)}") from error
        except OSError as error:
            raise ValueError(f"step {step}: {error}\n{record.how_to_resume(inputs.out, settings)}") from error

    on_rank_0(inputs.world, write)


def prune(inputs: Inputs, *, last: int) -> None:
    """Remove checkpoints that are too old."""
    if inputs.world.rank == 0:
        checkpoint.prune(inputs.out, keep=inputs.settings.keep, last=last)


if __name__ == "__main__":
    sys.exit(main())
