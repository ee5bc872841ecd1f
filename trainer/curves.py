"""One loss curve: is training right? `trainer.bench curves` runs each in a process; `distances` compares them.

    ours_packed          packed rows, as the trainer trains
    stock_padded         transformers' model and loss, the same documents padded, torch's AdamW
    fused_padded         the same with fla and causal-conv1d in transformers' model: what is a kernel's, what is ours
    ours_unpacked        every document a micro-batch of its own in the same optimizer step: the same gradient
    sorted_padded        transformers again, each step documents of one length: what sorting does, not expected to agree
    *_noise, *_noise_2   from weights moved by one rounding, one way or another: how far bf16 alone lets curves drift
    ours_packed_fp32, stock_padded_fp32    the first steps in fp32, ours on the torch references
    ours_packed_noise_fp32                 the same from weights moved by one fp32 rounding: how chaotic the run is

All but sorted_padded take the same documents in the same steps, with the same learning rates, clipping and first
weights (ours, drawn on the CPU or read from a checkpoint, rounded to bf16 for all). In bf16 both models have bf16
weights with fp32 masters, ours by trainer.optimizer, transformers' by torch's AdamW. But for fused_padded, transformers
runs on its torch fallbacks, so that the two sides share neither kernels nor loss nor optimizer.

Guarantees: a curve is written step by step, so that one cut short is as long as it got.
Costs: bf16 curves as training does; fp32 ones run on references, many times slower.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from pipeline.shards import PackedDataset, Row
from trainer import stock
from trainer.batches import Reader, StepBatches, make_batch
from trainer.hub import weights_folder
from trainer.kernels import TABLE, Kernels, select
from trainer.model import Qwen3_5ForCausalLM, keeps_fp32
from trainer.optimizer import make_optimizer
from trainer.plan import Plan, stream_rows
from trainer.sizes import ModelConfig, resolve_config
from trainer.step import Precision, learning_rate, train_step
from trainer.stock import Document
from trainer.weights import load_weights

VARIANTS = (
    "ours_packed", "stock_padded", "fused_padded", "ours_packed_noise", "ours_packed_noise_2", "stock_padded_noise",
    "ours_unpacked", "sorted_padded", "ours_packed_fp32", "ours_packed_noise_fp32", "stock_padded_fp32",
)  # fmt: skip

CLIP = 1.0

Step = Callable[[int, float], float]
"""(number of the step from 1, learning rate) -> its loss"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What one process trains."""

    variant: str
    """A name of VARIANTS."""
    shards: Path
    """Packed rows."""
    model: str
    """As in trainer.train: random weights, or those of a checkpoint."""
    num_layers: int
    """Layers of it; 0 for all."""
    steps: int
    """Steps of a curve."""
    fp32_steps: int
    """Steps of an fp32 one."""
    rows_per_step: int
    """Rows whose documents one step takes."""
    lr: float
    """Highest learning rate."""
    warmup_steps: int
    """Steps in which it rises."""
    seed: int
    """Of weights and order."""
    time_box: float
    """Seconds of training."""
    device: str
    """cuda or cpu."""
    precision: Precision
    """Of all but the fp32 variants."""
    out: Path
    """The curve: JSON lines with step, loss, lr, seconds."""


def run(job: Job) -> dict[str, Any]:
    """Train one variant and write its curve."""
    exact = job.variant.endswith("_fp32")
    steps = min(job.steps, job.fp32_steps) if exact else job.steps
    ours = job.variant.startswith("ours")
    step = (_ours if ours else _stock)(job, "fp32" if exact else job.precision)
    result: dict[str, Any] = {"status": "ok"} | ({} if ours else {"fused": stock.fused_kernels_in_use()})
    begun = time.perf_counter()
    with job.out.open("w", encoding="utf-8") as lines:
        for number in range(1, steps + 1):
            lr = learning_rate(
                number, peak=job.lr, schedule="cosine", warmup_steps=job.warmup_steps, total_steps=job.steps
            )
            loss = step(number, lr)
            seconds = round(time.perf_counter() - begun, 3)
            lines.write(json.dumps({"step": number, "loss": loss, "lr": lr, "seconds": seconds}) + "\n")
            lines.flush()
            if seconds > job.time_box and number < steps:
                return result | {"status": "out of time", "detail": f"after {number} of {steps} steps"}
    return result


def _config(job: Job) -> ModelConfig:
    config = resolve_config(job.model)
    return stock.with_layers(config, job.num_layers or config.num_hidden_layers)


def first_weights(job: Job, config: ModelConfig) -> Qwen3_5ForCausalLM:
    """What a variant starts from: the same for all, but for those that measure noise."""
    model = common_weights(config, model=job.model, seed=job.seed, precision=job.precision)
    if "noise" in job.variant:
        exact = job.variant.endswith("_fp32")
        move_by_one_rounding(
            model.float() if exact else model, seed=job.seed + job.variant.endswith("_2"), bits=24 if exact else 8
        )
    return model


def common_weights(config: ModelConfig, *, model: str, seed: int, precision: Precision) -> Qwen3_5ForCausalLM:
    """Our model on the CPU with the weights that every variant starts from: rounded to bf16 where anything is."""
    with torch.device("meta"):
        made = Qwen3_5ForCausalLM(config, kernels=select(torch.device("cpu")))
    made.to_empty(device="cpu")
    made.tie_weights()
    if (folder := weights_folder(model)) is None:
        made.init_weights(seed=seed)
    else:
        load_weights(made, folder)
    return made.to_dtype(torch.bfloat16) if precision == "bf16" else made


@torch.no_grad()
def move_by_one_rounding(model: nn.Module, *, seed: int, bits: int) -> None:
    """Move every weight up or down, at random, by half of to the whole distance to its neighbour, and round.

    ``bits`` are those of the neighbours' significands: 8 in bf16, 24 in fp32.
    """
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        sign = torch.randint(0, 2, parameter.shape, generator=generator).double() * 2 - 1
        parameter.copy_(parameter.double() * (1 + sign * 2.0**-bits))


def references() -> Kernels:
    """Every operation by its torch reference, on any device: the only ones that compute in fp32 throughout."""
    chosen = {operation: implementations[-1].load()[0] for operation, implementations in TABLE.items()}
    return Kernels(**cast(Any, chosen), table=())


def _ours(job: Job, precision: Precision) -> Step:
    config, device = _config(job), torch.device(job.device)
    source = first_weights(job, config)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    with stock.created_on(device, dtype):
        model = Qwen3_5ForCausalLM(config, kernels=references() if precision == "fp32" else select(device))
    model.load_state_dict(source.state_dict())
    optimizer = make_optimizer(model, lr=job.lr, weight_decay=0.0)
    dataset = PackedDataset.open(job.shards)
    reader = Reader(dataset=dataset)
    plan = _plan(job, dataset)

    def step(number: int, lr: float) -> float:
        rows = plan.rows(rows_seen=(number - 1) * job.rows_per_step)
        if job.variant == "ours_unpacked":
            found = stock.documents(dataset, rows)
            longest = dataset.manifest.max_tokens  # a tail may be longer than any document
            fixed = longest if device.type == "cuda" else 0  # there kernels compile for every length
            alone = [make_batch([alone_in_a_row(d, length=fixed)], max_seqlen=longest) for d in found]
            batches = StepBatches(rows=tuple(map(int, rows)), doc_ids=(), micro=tuple(alone))
        else:
            batches = reader.read(rows)
        result = train_step(model, optimizer, batches, step=number, lr=lr, clip=CLIP, device=device)
        return result.loss or 0.0

    return step


def _plan(job: Job, dataset: PackedDataset) -> Plan:
    return Plan.build(
        num_rows=len(dataset), seed=job.seed, rows_per_step=job.rows_per_step, epochs=1, steps=job.steps
    )  # fmt: skip


def alone_in_a_row(document: Document, *, length: int) -> Row:
    """A row of this document and padding up to ``length`` tokens, none where that is less than the document has."""
    num_tokens = len(document.input_ids)
    tail = max(0, length - num_tokens)
    return Row(
        input_ids=np.pad(document.input_ids, (0, tail)),
        position_ids=np.concatenate([np.arange(num_tokens), np.arange(tail)]).astype(np.int32),
        loss_mask=np.pad(document.loss_mask, (0, tail)),
        boundaries=np.array([0, num_tokens, num_tokens + tail] if tail else [0, num_tokens], np.int32),
        doc_ids=np.array([document.doc_id]),
        pieces=np.zeros(1, np.int32),
    )


def _stock(job: Job, precision: Precision) -> Step:
    config, device = _config(job), torch.device(job.device)
    if job.variant != "fused_padded":
        stock.without_fused_kernels()
    source = first_weights(job, config)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    model = stock.build_stock(config, device=device, dtype=dtype, seed=0)
    if job.variant == "fused_padded" and device.type == "cuda" and not stock.fused_kernels_in_use():
        # They are looked for when the model is imported.
        raise ValueError(f"fused_padded: install {' and '.join(stock.FUSED)}")
    for name, parameter in model.named_parameters():
        if keeps_fp32(name):  # as in released checkpoints
            parameter.data = parameter.data.float()
    model.load_state_dict(source.state_dict())
    masters = Masters(model, lr=job.lr)
    dataset = PackedDataset.open(job.shards)
    pad_id = int(dataset.manifest.recipe["tokenizer"]["pad_token_id"])
    most_tokens = job.rows_per_step * dataset.manifest.max_tokens
    steps = steps_of_documents(job, dataset)

    def step(number: int, lr: float) -> float:
        batches = stock.padded_batches(next(steps), most_tokens=most_tokens, pad_id=pad_id)
        targets = max(1, sum(batch.num_targets for batch in batches))
        total = torch.zeros((), device=device)
        for batch in batches:
            loss = stock.padded_loss(model, batch.to(device), num_targets=targets)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        masters.update(lr=lr)
        return total.item()

    return step


class Masters:
    """torch's AdamW over fp32 copies of a model's weights, which are rounded back into the model: none of our code."""

    def __init__(self, model: nn.Module, *, lr: float) -> None:
        self.weights = list(model.parameters())
        self.copies = [nn.Parameter(weight.detach().float().clone()) for weight in self.weights]
        self.optimizer = torch.optim.AdamW(self.copies, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)

    @torch.no_grad()
    def update(self, *, lr: float) -> None:
        """Clip, update, round; the model's gradients are gone afterwards."""
        for weight, copy in zip(self.weights, self.copies, strict=True):
            copy.grad, weight.grad = (None if weight.grad is None else weight.grad.float()), None
        nn.utils.clip_grad_norm_(self.copies, CLIP)
        self.optimizer.param_groups[0]["lr"] = lr
        self.optimizer.step()
        for weight, copy in zip(self.weights, self.copies, strict=True):
            weight.copy_(copy)


def steps_of_documents(job: Job, dataset: PackedDataset) -> Iterator[list[Document]]:
    """The documents of each step: those of ours, or of one length and as many on average."""
    if job.variant != "sorted_padded":
        plan = _plan(job, dataset)
        for number in range(job.steps):
            yield stock.documents(dataset, plan.rows(rows_seen=number * job.rows_per_step))
        return
    found = sorted(stock.documents(dataset), key=lambda document: len(document.input_ids))
    count = max(1, round(len(found) * job.rows_per_step / len(dataset)))
    groups = [found[i : i + count] for i in range(0, len(found), count)]
    for number in stream_rows(num_rows=len(groups), seed=job.seed, first=0, count=job.steps):
        yield groups[int(number)]


def main(job_file: str, result_file: str) -> int:
    """Train the job in one file and write how it ended to the other."""
    fields = json.loads(Path(job_file).read_text(encoding="utf-8"))
    fields |= {"shards": Path(fields["shards"]), "out": Path(fields["out"])}
    Path(result_file).write_text(json.dumps(run(Job(**fields))), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
