"""On a GPU: the fused kernels against fp32 references, what a step waits for and compiles, memory, and whole runs.

Sizes are those that trainer.doctor examines, so that each kernel is compiled for one shape.
"""

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from tests.packed import make_packed, random_rows, with_byte_tokenizer
from tests.training import once
from trainer import doctor
from trainer.batches import Batch, StepBatches
from trainer.cases import RELEASED, Maker
from trainer.kernels import TABLE, Kernels, select
from trainer.lora import add_adapters
from trainer.optimizer import make_optimizer
from trainer.proofs_model import build
from trainer.step import train_step
from trainer.train import main
from trainer.warmup import warm_up

pytestmark = pytest.mark.filterwarnings("default")  # other packages warn of each other's deprecations

COPIES_TO_THE_HOST = "Memcpy DtoH"
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


@pytest.fixture(scope="module")
def kernels(gpu: torch.device) -> Kernels:
    return select(gpu)


@pytest.fixture(scope="module")
def maker(gpu: torch.device) -> Maker:
    return Maker(RELEASED, gpu, torch.bfloat16, seed=5)


def rows(maker: Maker, *, number: int) -> Iterator[Batch]:
    """Rows of one length whose boundaries and targets all differ."""
    rng = np.random.default_rng(0)
    for _ in range(number):
        cuts = np.sort(rng.choice(np.arange(1, RELEASED.num_tokens), rng.integers(3, 30), replace=False))
        yield maker.batch(np.diff([0, *cuts, RELEASED.num_tokens]).tolist())


def test_every_first_choice_is_here(kernels: Kernels) -> None:
    assert all(choice.fused for choice in kernels.table)
    assert kernels.warnings() == []


def test_every_usable_implementation_agrees_with_its_reference(gpu: torch.device, kernels: Kernels) -> None:
    findings = doctor.examine(kernels, gpu, short=False)
    assert [finding for finding in findings if not finding.passed] == []
    assert {finding.operation for finding in findings} == {*TABLE, "model"}


@pytest.mark.parametrize("operation", ["gated_delta_rule", "causal_conv", "attention"])
def test_a_kernel_that_forgets_boundaries_is_found(gpu: torch.device, kernels: Kernels, operation: str) -> None:
    right = getattr(kernels, operation)

    def one_document(*arguments: Any) -> Tensor:
        *tensors, bounds = arguments
        num_tokens = len(tensors[0])
        whole = torch.tensor([0, num_tokens], dtype=torch.int32)
        joined = dataclasses.replace(
            bounds, cu_seqlens=whole.to(gpu), cu_seqlens_cpu=whole, seq_idx=torch.zeros_like(bounds.seq_idx)
        )
        out: Tensor = right(*tensors, joined)
        return out

    broken = dataclasses.replace(kernels, **{operation: one_document})
    with pytest.raises(ValueError, match=operation):
        doctor.require(broken, gpu)


@pytest.mark.parametrize("method", ["full", "lora"])
def test_twenty_rows_wait_for_the_device_at_most_twice_a_step_and_compile_nothing(
    gpu: torch.device, kernels: Kernels, maker: Maker, method: str
) -> None:
    model = build(maker, kernels)
    if method == "lora":
        add_adapters(model, rank=16, alpha=32.0, seed=0)
    optimizer = make_optimizer(model, lr=1e-4, weight_decay=0.0)
    batches = [StepBatches(rows=(i,), doc_ids=(i,), micro=(batch,)) for i, batch in enumerate(rows(maker, number=21))]

    def run(i: int) -> None:
        train_step(model, optimizer, batches[i], step=i + 1, lr=1e-4, clip=1.0, device=gpu)

    warm_up(model, num_tokens=RELEASED.num_tokens, micro_rows=1, max_seqlen=batches[0].micro[0].max_seqlen, device=gpu)
    before = num_compiled()
    for i in range(20):
        run(i)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        run(20)
    assert num_compiled() == before
    counts = {event.key: event.count for event in found.key_averages()}
    copies = sum(count for name, count in counts.items() if COPIES_TO_THE_HOST in name)
    assert copies <= 2, counts
    waits = sum(counts.get(name, 0) for name in WAITS) - 1  # the profiler's own, at its end
    assert waits <= 2, {name: counts.get(name) for name in WAITS}


def num_compiled() -> tuple[int, int]:
    """Graphs that torch.compile has made, and files in the caches of the kernels' compilers."""
    folders = (Path.home() / ".triton" / "cache", Path.home() / ".tilelang" / "cache")
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return graphs, sum(1 for folder in folders for _ in folder.rglob("*"))


def test_no_layer_waits_for_the_device(gpu: torch.device, kernels: Kernels, maker: Maker) -> None:
    model = build(maker, kernels)
    first, second = rows(maker, number=2)
    model(first).backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        (model(second) / second.num_targets).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_computing_cheap_tensors_again_changes_no_gradient_and_saves_memory(
    gpu: torch.device, kernels: Kernels, maker: Maker
) -> None:
    model = build(maker, kernels)
    (batch,) = rows(maker, number=1)

    def gradients(*, again: bool, layers: int) -> tuple[list[Tensor], int]:
        model.model.rematerialize = again
        model.set_recompute(layers)
        model.zero_grad()
        before = torch.cuda.memory_allocated()
        loss = model(batch)
        held = torch.cuda.memory_allocated() - before
        loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None], held

    plain, all_held = gradients(again=False, layers=0)
    remade, less_held = gradients(again=True, layers=0)
    recomputed, least_held = gradients(again=True, layers=4)
    # Inputs of matrix products: of every layer two norms and one swiglu, of linear layers the gated norm, of the other
    # the gated attention.
    sizes = RELEASED
    widths = 4 * (2 * sizes.hidden + 2 * sizes.hidden) + 3 * sizes.value_heads * sizes.linear_dim
    widths += sizes.heads * sizes.head_dim
    assert all_held - less_held >= 0.99 * sizes.num_tokens * widths * 2
    assert least_held < 0.5 * less_held
    for one, two, three in zip(plain, remade, recomputed, strict=True):
        # Not bit by bit: sums over tokens use atomics in some kernels, and a sum is rounded once more.
        assert (one - two).norm() <= 0.01 * one.norm()
        assert (one - three).norm() <= 0.01 * one.norm()


def test_the_loss_of_a_long_row_over_the_real_vocabulary_stays_below_a_gigabyte(
    gpu: torch.device, kernels: Kernels
) -> None:
    hidden = torch.randn(8192, 1024, device=gpu, dtype=torch.bfloat16, requires_grad=True)
    head = (torch.randn(248_320, 1024, device=gpu) * 0.02).to(torch.bfloat16).requires_grad_()
    labels = torch.randint(248_320, (8192,), device=gpu)
    kernels.loss(hidden, head, labels, 8192).backward()
    hidden.grad = head.grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kernels.loss(hidden, head, labels, 8192).backward()
    gradients = head.numel() * head.element_size() + hidden.numel() * hidden.element_size()
    assert torch.cuda.max_memory_allocated() - before - gradients < 1e9


def test_a_batch_without_targets_has_a_loss_of_zero_and_zero_gradients(
    gpu: torch.device, kernels: Kernels, maker: Maker
) -> None:
    model = build(maker, kernels)
    (batch,) = rows(maker, number=1)
    empty = dataclasses.replace(batch, labels=torch.full_like(batch.labels, -100), num_targets=0)
    loss = model(empty)
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert all(float(p.grad.abs().max()) == 0.0 for p in model.parameters() if p.grad is not None)


# --------------------------------------------------------------------------------------------- whole runs


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    num_tokens = RELEASED.num_tokens
    found = random_rows(num_rows=8, max_tokens=num_tokens, vocab_size=RELEASED.vocab, seed=3)
    path = tmp_path_factory.mktemp("gpu") / "packed"
    return with_byte_tokenizer(make_packed(path, found, max_tokens=num_tokens, vocab_size=RELEASED.vocab))


@pytest.fixture(scope="module")
def config(gpu: torch.device, maker: Maker, kernels: Kernels, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("config") / "small.json"
    path.write_text(json.dumps(build(maker, kernels).config.to_dict()))
    return f"random:{path}"


def train(shards: Path, config: str, out: Path, *more: str) -> list[dict[str, Any]]:
    """Run the trainer; returns its metrics, steps alone."""
    words = ("--shards", str(shards), "--model", config, "--out", str(out), "--rows-per-step", "2", "--lr", "1e-3")
    assert main(once(*words, *more)) == 0
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def test_a_resumed_run_goes_on_with_the_same_rows_and_nearly_the_same_losses(
    gpu: torch.device, shards: Path, config: str, tmp_path: Path
) -> None:
    often = ("--steps", "6", "--save-every", "3", "--keep", "9")
    whole = train(shards, config, tmp_path / "whole", *often)
    repeated = train(shards, config, tmp_path / "repeated", *often)
    noise = max(abs(a["loss"] - b["loss"]) for a, b in zip(whole, repeated, strict=True))
    shutil.rmtree(max((tmp_path / "repeated" / "checkpoints").iterdir()))
    resumed = train(shards, config, tmp_path / "repeated", *often, "--resume")
    assert [line["step"] for line in resumed[-3:]] == [4, 5, 6]
    assert [line["rows_seen"] for line in resumed[-3:]] == [line["rows_seen"] for line in whole[-3:]]
    for a, b in zip(whole[-3:], resumed[-3:], strict=True):
        assert abs(a["loss"] - b["loss"]) <= max(5 * noise, 2e-3)
    assert whole[-1]["loss"] < whole[0]["loss"]


def test_metrics_know_the_card(gpu: torch.device, shards: Path, config: str, tmp_path: Path) -> None:
    lines = train(shards, config, tmp_path / "run", "--steps", "2")
    assert all(line["mfu"] > 0 and line["peak_gib"] > 0 for line in lines)


def test_adapters_train_with_layers_recomputed(gpu: torch.device, shards: Path, config: str, tmp_path: Path) -> None:
    lines = train(
        shards, config, tmp_path / "run", "--steps", "8", "--method", "lora", "--recompute", "2", "--lr", "1e-2"
    )
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").is_file()
