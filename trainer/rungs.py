"""One rung of the ladder: a way to train, measured at a few numbers of layers. `trainer.bench` runs each in a process.

    for each number of layers: build with random weights on the device -> warm up -> measure steps -> profile one step

A step here is one micro-batch (a packed row, or a padded batch of documents) and one update. What the update takes is
measured apart. The warm-up runs every padded batch once, because each has a shape of its own; packed rows have one
shape, two of them suffice.

Rungs of transformers' model train as TRL's SFTTrainer does by default (SFTConfig of TRL 1.0 and newer): 8 documents a
batch, padded to the longest, and gradient checkpointing, without which 64 layers of this width hold more than a GPU
has. Only the documents are whole, where its default would cut them. `stock_padded_kept` leaves checkpointing out,
to show what it costs.

Guarantees: every measured step has other documents; a result is handed over after each number of layers, so that what
runs out of time or memory later loses nothing.
"""

import dataclasses
import gc
import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pipeline.shards import PackedDataset
from trainer import events, stock, timeline, tracing
from trainer.batches import Batch, StepBatches, make_batch
from trainer.kernels import select
from trainer.lora import add_adapters
from trainer.measured import write_whole
from trainer.memory import GIB, Method
from trainer.model import Qwen3_5ForCausalLM
from trainer.optimizer import make_optimizer
from trainer.sizes import ModelConfig, resolve_config
from trainer.step import Precision, train_step
from trainer.stock import Padded

Item = Padded | Batch
StepFunction = Callable[[Item, int], float]

LORA_RANK, LORA_ALPHA = 16, 32.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Rung:
    """One way to train."""

    order: Literal["source", "sorted", "packed"]
    """Padded batches of documents in the source's order or by length, or packed rows."""
    ours: bool
    """This trainer, or transformers' model."""
    fused: bool = True
    """Whether transformers may use fla and causal-conv1d."""
    method: Method = "full"
    """Which weights are trained."""
    masters: bool = True
    """fp32 master weights (ours only); without them a small update of a bf16 weight is lost."""
    recompute: bool = False
    """Gradient checkpointing (transformers' model only): every layer is computed again in the backward pass."""


RUNGS: dict[str, Rung] = {
    "stock_padded": Rung(order="source", ours=False, fused=False, recompute=True),
    "stock_padded_kept": Rung(order="source", ours=False, fused=False),
    "sorted_padded": Rung(order="sorted", ours=False, fused=False, recompute=True),
    "fused_padded": Rung(order="source", ours=False, recompute=True),
    "fused_packed_stock": Rung(order="packed", ours=False, recompute=True),
    "full_bf16": Rung(order="packed", ours=True),
    "full_bf16_nomaster": Rung(order="packed", ours=True, masters=False),
    "lora_bf16": Rung(order="packed", ours=True, method="lora"),
}
"""By the names that records use."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What one process measures."""

    rung: str
    """A name of RUNGS."""
    shards: Path
    """Packed rows; their documents are what the padded rungs train on."""
    model: str
    """`random:SIZE` or `random:CONFIG.json`: the width, and the number of layers that is extrapolated to."""
    layers: tuple[int, ...]
    """Numbers of layers to measure; 0 stands for all."""
    steps: int
    """Steps that are measured."""
    padded_documents: int
    """Documents of a padded batch."""
    recompute: int
    """Layers that are computed again in the backward pass, of the LoRA rung."""
    device: str
    """cuda or cpu."""
    precision: Precision
    """Of the weights that are computed with."""
    profile: bool
    """Whether a step is profiled."""
    traces: Path | None
    """Folder for the traces; None keeps none."""


def run(job: Job, write: Callable[[dict[str, Any]], None]) -> None:
    """Measure; hands ``write`` all that is known so far after every number of layers.

    A padded rung that runs out of memory is measured anew with batches half as large, which its result says.
    """
    rung, device = RUNGS[job.rung], torch.device(job.device)
    if not rung.fused:
        stock.without_fused_kernels()
    all_layers = resolve_config(job.model).num_hidden_layers
    recompute = all_layers if rung.recompute else job.recompute if _is_lora(rung) else 0
    result: dict[str, Any] = {"status": "started", "recompute": recompute}
    if rung.order == "packed":
        _attempt(job, device, result, write)
        return
    for size in (job.padded_documents, job.padded_documents // 2):
        sized = dataclasses.replace(job, padded_documents=size)
        if _attempt(sized, device, {**result, "padded_documents": size}, write):
            return


def _attempt(job: Job, device: torch.device, result: dict[str, Any], write: Callable[[dict[str, Any]], None]) -> bool:
    """Measure every number of layers; False where memory did not suffice."""
    config = resolve_config(job.model)
    write(result | {"runs": []})
    runs: list[dict[str, Any]] = []
    try:
        for layers in job.layers:
            _free(device)
            found = measure(job, stock.with_layers(config, layers or config.num_hidden_layers), device, first=not runs)
            runs.append(found)
            write(result | {"runs": runs})
    except torch.OutOfMemoryError as error:
        reason = f"at {layers or config.num_hidden_layers} layers: {str(error).splitlines()[0]}"
        write(result | {"runs": runs, "status": "out of memory", "detail": reason})
        return False
    write(result | {"runs": runs, "status": "ok"})
    return True


def _is_lora(rung: Rung) -> bool:
    return rung.method == "lora"


def measure(job: Job, config: ModelConfig, device: torch.device, *, first: bool) -> dict[str, Any]:
    """Measure one number of layers."""
    rung = RUNGS[job.rung]
    warm, items = work(job, rung)
    started = time.perf_counter()
    model, optimizer, step, about = (_ours if rung.ours else _stock)(job, rung, config, device)
    clock, held = OptimizerClock(optimizer, device), Held(model, device)
    for number, item in enumerate(warm):
        step(item, number + 1)
    _synchronize(device)
    warm_seconds = time.perf_counter() - started
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    steps = []
    for number, item in enumerate(items):
        begun = time.perf_counter()
        loss = step(item, len(warm) + number + 1)
        _synchronize(device)
        seconds = time.perf_counter() - begun
        steps.append({"seconds": seconds, "optimizer_seconds": clock.seconds, "loss": loss, **_counts(item)})
    found = {
        "layers": config.num_hidden_layers,
        "parameters": sum(p.numel() for p in model.parameters()),
        "trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "warm_up_seconds": warm_seconds,
        "peak_gib": _peak_bytes(device) / GIB,
        "held_gib": held.num_bytes / GIB,
        "state_gib": _state_bytes(model, optimizer) / GIB,
        "steps": steps,
        **about,
    }
    # Torch's fallbacks launch so much that a trace of more layers costs a minute and tells nothing new.
    if job.profile and (first or rung.fused):
        clock.wait = False
        found["profile"] = profile(step, items[-1], job=job, layers=config.num_hidden_layers)
    return found


class OptimizerClock:
    """Measures each update of an optimizer, in seconds."""

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self.seconds = 0.0
        self.wait = True
        update = optimizer.step

        def timed() -> None:
            if self.wait:
                _synchronize(device)
            begun = time.perf_counter()
            update()
            if self.wait:
                _synchronize(device)
            self.seconds = time.perf_counter() - begun

        optimizer.step = timed  # type: ignore[assignment, method-assign]


class Held:
    """The most memory of the GPU that a forward pass has left in use for the backward pass, in bytes."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.num_bytes = 0
        self._before = 0
        if device.type == "cuda":
            model.register_forward_pre_hook(self._begin)
            model.register_forward_hook(self._end)

    def _begin(self, *_: Any) -> None:
        self._before = torch.cuda.memory_allocated()

    def _end(self, *_: Any) -> None:
        self.num_bytes = max(self.num_bytes, torch.cuda.memory_allocated() - self._before)


def _state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Weights, gradients of those trained, and all that the optimizer keeps."""
    weights = sum(p.nbytes * (1 + p.requires_grad) for p in model.parameters())
    kept = (value for state in optimizer.state.values() for value in state.values())
    return weights + sum(value.nbytes for value in kept if isinstance(value, Tensor))


def work(job: Job, rung: Rung) -> tuple[list[Item], list[Item]]:
    """Warm-up and measured micro-batches; padded ones are spread evenly over the dataset."""
    dataset = PackedDataset.open(job.shards)
    manifest = dataset.manifest
    if rung.order == "packed":
        numbers = [i % len(dataset) for i in range(2 + job.steps)]
        limit = int(manifest.limits["max_segment_tokens"])
        rows: list[Item] = [make_batch([dataset[i]], max_seqlen=limit) for i in numbers]
        return rows[:2], rows[2:]
    found = stock.documents(dataset)
    found.sort(key=lambda d: len(d.input_ids) if rung.order == "sorted" else d.doc_id)
    pad_id = int(manifest.recipe["tokenizer"]["pad_token_id"])
    batches = stock.batches_of(found, size=job.padded_documents, pad_id=pad_id)
    count = min(job.steps, len(batches))
    items: list[Item] = [batches[(2 * i + 1) * len(batches) // (2 * count)] for i in range(count)]
    return items, items


def _counts(item: Item) -> dict[str, int]:
    """Tokens of documents, and all that the device works on: padding too."""
    if isinstance(item, Padded):
        num_rows, length = item.input_ids.shape
        slots, squares = num_rows * length, num_rows * length**2
    else:
        lengths = item.cu_seqlens_cpu.diff().long()
        slots, squares = int(lengths.sum()), int((lengths**2).sum())
    return {
        "tokens": item.num_tokens,
        "targets": item.num_targets,
        "sum_squared_lengths": item.sum_squared_lengths,
        "slots": slots,
        "slots_sum_squared_lengths": squares,
    }


Built = tuple[nn.Module, torch.optim.Optimizer, StepFunction, dict[str, Any]]


def _dtype(precision: Precision) -> torch.dtype:
    return torch.bfloat16 if precision == "bf16" else torch.float32


def _ours(job: Job, rung: Rung, config: ModelConfig, device: torch.device) -> Built:
    kernels = select(device)
    with stock.created_on(device, _dtype(job.precision)):
        model = Qwen3_5ForCausalLM(config, kernels=kernels)
    stock.fill_weights(model, seed=0, std=config.initializer_range)
    if _is_lora(rung):
        add_adapters(model, rank=LORA_RANK, alpha=LORA_ALPHA, seed=0)
        model.set_recompute(min(job.recompute, config.num_hidden_layers))
    optimizer = (
        make_optimizer(model, lr=1e-5, weight_decay=0.0) if rung.masters else stock.stock_optimizer(model, lr=1e-5)
    )

    def step(item: Item, number: int) -> float:
        assert isinstance(item, Batch)
        batches = StepBatches(rows=(number,), doc_ids=(), micro=(item,))
        result = train_step(model, optimizer, batches, step=number, lr=1e-5, clip=1.0, device=device)
        return result.loss or 0.0

    return model, optimizer, step, {"kernels": [asdict(choice) for choice in kernels.table]}


def _stock(job: Job, rung: Rung, config: ModelConfig, device: torch.device) -> Built:
    model = stock.build_stock(
        config, device=device, dtype=_dtype(job.precision), seed=0, recompute=rung.recompute
    )  # fmt: skip
    optimizer = stock.stock_optimizer(model, lr=1e-5)
    if device.type == "cuda" and stock.fused_kernels_in_use() is not rung.fused:
        raise ValueError(f"{job.rung}: install {' and '.join(stock.FUSED)}, which transformers' fused rungs need")

    def step(item: Item, number: int) -> float:
        item = item.to(device)
        loss = stock_loss(model, item)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        value = loss.item()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return value

    return model, optimizer, step, {"fused": stock.fused_kernels_in_use()}


def stock_loss(model: nn.Module, item: Item) -> Tensor:
    """Mean loss of the micro-batch's targets, by transformers."""
    targets = max(1, item.num_targets)
    if isinstance(item, Padded):
        return stock.padded_loss(model, item, num_targets=targets)
    return stock.packed_loss(model, item, num_targets=targets)


def profile(step: StepFunction, item: Item, *, job: Job, layers: int) -> dict[str, Any]:
    """What one step does on CPU and GPU, from a trace of it."""
    with _trace_path(job, layers) as path:
        with tracing.tracer(path, first=1, num_steps=1) as trace:
            for number in (1, 2):
                step(item, number)
                trace.step()
        return timeline.summary(timeline.analyse(events.read(path)))


@contextmanager
def _trace_path(job: Job, layers: int) -> Iterator[Path]:
    """Where the trace goes: kept, or in a folder that is removed afterwards."""
    if job.traces:
        yield job.traces / f"{job.rung}-{layers}-layers.json.gz"
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "trace.json"


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _peak_bytes(device: torch.device) -> int:
    """Most memory that tensors took on the GPU, or the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def main(job_file: str, result_file: str) -> int:
    """Run the job in one file and write what is known to the other, each time whole."""
    fields = json.loads(Path(job_file).read_text(encoding="utf-8"))
    fields |= {"shards": Path(fields["shards"]), "layers": tuple(fields["layers"])}
    fields["traces"] = Path(fields["traces"]) if fields["traces"] else None
    run(Job(**fields), partial(write_whole, Path(result_file)))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
