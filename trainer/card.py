"""What this machine can do, for `trainer.doctor`: memory, bandwidth, matrix speed, attention at head dim 256.

Costs: a few seconds and about 3 GB on a GPU; nothing is measured on a CPU.
"""

import importlib.metadata
import itertools
import platform
import shutil
import subprocess
from collections.abc import Callable

import numpy as np
import torch

from trainer.cases import RELEASED, Maker
from trainer.kernels import Kernels
from trainer.proofs import Finding, Subject

LOSS_SHAPE = (8192, 248_320, 1024)
"""Tokens, vocabulary and width at which the loss's memory is measured."""

LOSS_GB = 1.0
"""What the loss may take beside its inputs and their gradients; the logits alone, in fp32, would be 8.1."""


def describe(device: torch.device) -> dict[str, str]:
    """Names and versions."""
    found = {"machine": platform.machine(), "torch": torch.__version__, "triton": _version("triton")}
    if device.type != "cuda":
        return {"device": f"CPU, {torch.get_num_threads()} threads"} | found
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": properties.name,
        "memory": f"{properties.total_memory / 2**30:.1f} GiB",
        "compute capability": f"{properties.major}.{properties.minor}",
        "driver": _driver(),
        "CUDA": str(torch.version.cuda),
    } | found


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _driver() -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return "unknown: there is no nvidia-smi"
    query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, check=False, timeout=60)
    lines = answer.stdout.split()
    return lines[0] if lines else "unknown: nvidia-smi does not answer"


def speeds(kernels: Kernels, device: torch.device) -> dict[str, float]:
    """Measured on a GPU, by name and unit."""
    generator = torch.Generator(device).manual_seed(0)
    found = {"copy, read + write, GB/s": _copy_speed(device)}
    size = 8192
    a, b = (torch.randn(size, size, generator=generator, device=device).bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    seconds = timed(lambda: torch.mm(a, b, out=out), device)
    found["bf16 matrix product, 8192^3, TFLOP/s"] = 2 * size**3 / seconds / 1e12
    return found | _attention_speed(kernels, device)


def _copy_speed(device: torch.device) -> float:
    source = torch.empty(2**30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / timed(lambda: target.copy_(source), device) / 1e9


def _attention_speed(kernels: Kernels, device: torch.device) -> dict[str, float]:
    """One document of 8,192 tokens, 16 heads of 256, 4 key/value heads; half the square, as it is causal."""
    maker = Maker(RELEASED, device, torch.bfloat16, seed=0)
    num_tokens, heads, dim = RELEASED.num_tokens, 16, 256
    batch = maker.batch([num_tokens])
    query = maker.normal(num_tokens, heads, dim).requires_grad_()
    key, value = (maker.normal(num_tokens, 4, dim).requires_grad_() for _ in range(2))
    upstream = maker.normal(num_tokens, heads, dim)

    def forward_backward() -> None:
        torch.autograd.grad(kernels.attention(query, key, value, batch), [query, key, value], upstream)

    with torch.no_grad():
        forward = timed(lambda: kernels.attention(query, key, value, batch), device)
    both, flops = timed(forward_backward, device), 2 * num_tokens**2 * heads * dim
    return {
        "attention, head dim 256, forward, TFLOP/s": flops / forward / 1e12,
        "attention, head dim 256, forward + backward, TFLOP/s": 3.5 * flops / both / 1e12,
    }


def timed(work: Callable[[], object], device: torch.device, *, repeats: int = 10) -> float:
    """Median seconds of one call after three to warm up."""
    for _ in range(3):
        work()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]  # type: ignore[no-untyped-call]
    for event in events[:-1]:
        event.record()
        work()
    events[-1].record()
    torch.cuda.synchronize(device)
    times = [start.elapsed_time(stop) for start, stop in itertools.pairwise(events)]
    return float(np.median(times)) / 1e3


def loss_memory(subject: Subject, device: torch.device) -> Finding:
    """Peak memory of the loss, forward and backward, beside its inputs and the two gradients it returns."""
    num_tokens, vocab, width = LOSS_SHAPE
    maker = Maker(RELEASED, device, torch.bfloat16, seed=0)
    hidden = maker.normal(num_tokens, width).requires_grad_()
    weight = torch.empty(vocab, width, dtype=torch.bfloat16, device=device).normal_(0, 0.02, generator=maker.generator)
    weight.requires_grad_()
    labels = (maker.uniform(num_tokens) * vocab).long()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    gradients = torch.autograd.grad(subject.function(hidden, weight, labels, num_tokens), [hidden, weight])
    returned = sum(gradient.nbytes for gradient in gradients)
    extra = torch.cuda.max_memory_allocated(device) - before - returned
    return subject.finding(
        "extra GB at 8,192 x 248,320, gradients not counted",
        extra / 1e9,
        LOSS_GB,
        "logits of all tokens must never exist at once",
    )
