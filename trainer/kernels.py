"""One table: operation -> implementations in order of preference, its torch reference last.

`select` decides once, at start, and returns the callables with the reason for each choice; the trainer prints the
table and records it with the run. Every operation that mixes tokens takes the batch's boundaries.

The references (`trainer.reference`) serve on a CPU. On a GPU they are several times slower than fused kernels, so
`select` refuses them there, naming the package to install, unless told otherwise. Nothing here imports a GPU
package on a CPU machine.

Shapes: T tokens of the packed batch, D width, C channels, W conv width, H heads, G key/value heads, K key dim,
V value dim (in `loss`: vocabulary).
"""

import importlib.metadata
import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from trainer import reference
from trainer.reference import Boundaries

FIRST_CHOICE = "first choice"

DISTRIBUTIONS = {"fla": "flash-linear-attention", "causal_conv1d": "causal-conv1d", "flash_qla": "flash-qla"}
"""What to install for a package that is imported under another name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One line of the table that is printed at start and recorded with the run."""

    operation: str
    """Name of the field of `Kernels`."""
    implementation: str
    """What serves it, e.g. `torch reference`."""
    version: str
    """Version of the package that the implementation comes from."""
    why: str
    """Why this one and not a preferred one."""
    fused: bool
    """False for a torch reference."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """The operations of the model, chosen once per run."""

    gated_delta_rule: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Boundaries], Tensor]
    """(query [T, G, K], key [T, G, K], value [T, H, V], log decay fp32 [T, H], beta [T, H], boundaries) -> [T, H, V]"""
    causal_conv: Callable[[Tensor, Tensor, Boundaries], Tensor]
    """(x [T, C], weight [C, W], boundaries) -> silu of the depthwise causal convolution [T, C]"""
    attention: Callable[[Tensor, Tensor, Tensor, Boundaries], Tensor]
    """(query [T, H, K], key [T, G, K], value [T, G, K], boundaries) -> [T, H, K]; scale 1 / sqrt(K)"""
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    """(x [..., D], weight [D], eps) -> x / rms(x) * (1 + weight)"""
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    """(x [..., D], delta [..., D], weight [D], eps) -> x + delta, and its rms_norm"""
    norm_rotary: Callable[[Tensor, Tensor, float, Tensor, Tensor], Tensor]
    """(x [T, H, K], weight [K], eps, cosine [T, R], sine [T, R]) -> rms_norm of every head, first R dims turned"""
    delta_gates: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    """(a [T, H], b [T, H], A_log fp32 [H], dt_bias [H]) -> log decay fp32 [T, H], beta [T, H]"""
    output_gate: Callable[[Tensor, Tensor], Tensor]
    """(x [..., D], gate [..., D]) -> x * sigmoid(gate)"""
    gated_rms_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    """(x [..., D], gate [..., D], weight [D], eps) -> x / rms(x) * weight * silu(gate)"""
    swiglu: Callable[[Tensor, Tensor], Tensor]
    """(gate [..., D], up [..., D]) -> silu(gate) * up"""
    loss: Callable[[Tensor, Tensor, Tensor, int], Tensor]
    """(hidden [T, D], head weight [V, D], labels int64 [T], number of targets) -> fp32 scalar: summed cross entropy"""
    table: tuple[Choice, ...]
    """What was chosen and why, one entry per operation."""
    rematerialize: bool = False
    """Compute cheap inputs of matrix products again in the backward pass instead of keeping them."""

    def warnings(self) -> list[str]:
        """One line for each operation that a slower fused kernel serves in place of a faster one."""
        slower = (c for c in self.table if c.fused and c.why != FIRST_CHOICE)
        return [f"{c.operation} runs on {c.implementation}, slower than the first choice ({c.why})" for c in slower]


@dataclass(frozen=True, kw_only=True, slots=True)
class Implementation:
    """One way to run an operation."""

    name: str
    """As printed in the table."""
    fused: bool
    """False for a torch reference, which a GPU refuses unless slow kernels are accepted."""
    obstacle: Callable[[torch.device], str | None]
    """Why it cannot serve on this device, or None; must not import a GPU package on a CPU machine."""
    load: Callable[[], tuple[Callable[..., Any], str]]
    """Imports it; returns the callable and the version of its package."""


def select(device: torch.device, *, accept_slow: bool = False) -> Kernels:
    """Choose an implementation for every operation.

    Raises ValueError on a GPU that would have to run a torch reference, unless `accept_slow`.
    """
    chosen: dict[str, Callable[..., Any]] = {}
    table: list[Choice] = []
    slow: list[str] = []
    for operation, implementations in TABLE.items():
        passed_over: list[str] = []
        for implementation in implementations:
            obstacle = implementation.obstacle(device)
            if obstacle is None:
                break
            passed_over.append(f"{implementation.name}: {obstacle}")
        else:
            raise AssertionError(f"{operation} has no reference in the table")
        if not implementation.fused and device.type != "cpu":
            slow.append(operation)
        chosen[operation], version = implementation.load()
        why = "; ".join(passed_over) or FIRST_CHOICE
        why = "no fused kernel on a CPU" if device.type == "cpu" else why
        table.append(
            Choice(
                operation=operation, implementation=implementation.name, version=version, why=why,
                fused=implementation.fused,
            )
        )  # fmt: skip
    if slow and not accept_slow:
        raise ValueError(_slow_message(slow, device))
    return Kernels(**cast(Any, chosen), table=tuple(table), rematerialize=device.type == "cuda")


def _slow_message(slow: list[str], device: torch.device) -> str:
    lines = [f"only a torch reference is left for {len(slow)} operations on {device}:"]
    for operation in slow:
        obstacles = (f"{i.name}: {i.obstacle(device)}" for i in TABLE[operation] if i.fused)
        lines.append(f"  {operation}: {'; '.join(obstacles)}")
    lines.append(
        "Install what is missing (pip install '.[gpu]'; causal-conv1d is built against the installed torch), or"
    )
    lines.append("pass --accept-slow-kernels to train with the references all the same, several times slower.")
    return "\n".join(lines)


def _reference(function: Callable[..., Any]) -> Implementation:
    return Implementation(
        name="torch reference",
        fused=False,
        obstacle=lambda device: None,
        load=lambda: (function, torch.__version__),
    )


def _fused(
    name: str, function: str, *, package: str, obstacle: Callable[[torch.device], str | None] | None = None
) -> Implementation:
    """A function of `trainer.fused`, which is imported where it is used only."""

    def blocked(device: torch.device) -> str | None:
        if importlib.util.find_spec(package) is None:
            return f"{DISTRIBUTIONS.get(package, package)} is not installed"
        if device.type != "cuda" or not torch.cuda.is_available():
            return "needs a CUDA device"
        return obstacle(device) if obstacle else None

    def load() -> tuple[Callable[..., Any], str]:
        return getattr(importlib.import_module("trainer.fused"), function), _version(package)

    return Implementation(name=name, fused=True, obstacle=blocked, load=load)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(DISTRIBUTIONS.get(package, package))
    except importlib.metadata.PackageNotFoundError:  # brought by another distribution: fla-core, pytorch-triton
        return str(getattr(importlib.import_module(package), "__version__", "unknown"))


def _needs_ampere(device: torch.device) -> str | None:
    major, minor = torch.cuda.get_device_capability(device)
    return None if major >= 8 else f"needs compute capability 8, this device has {major}.{minor}"


def _needs_hopper(device: torch.device) -> str | None:
    major, minor = torch.cuda.get_device_capability(device)
    return None if major in (9, 10) else f"needs compute capability 9 or 10, this device has {major}.{minor}"


def _wrong_gradients(device: torch.device) -> str | None:
    """Triton from 3.4 to before 3.7.1 computes wrong delta-rule gradients on Hopper."""
    version = _version("triton")
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:3])  # of 3.4.0+git1234, too
    affected = torch.cuda.get_device_capability(device)[0] == 9 and (3, 4) <= numbers < (3, 7, 1)
    return f"triton {version} computes wrong gradients on Hopper, 3.7.1 does not" if affected else None


def _compiled(operation: str) -> tuple[Implementation, ...]:
    """torch.compile of the reference, then the reference."""
    return (_fused("torch.compile", operation, package="torch"), _reference(getattr(reference, operation)))


TABLE: dict[str, tuple[Implementation, ...]] = {
    "gated_delta_rule": (
        _fused("FlashQLA", "delta_rule_flash_qla", package="flash_qla", obstacle=_needs_hopper),
        _fused("fla", "delta_rule_fla", package="fla", obstacle=_wrong_gradients),
        _reference(reference.gated_delta_rule),
    ),
    "causal_conv": (
        _fused("causal-conv1d", "causal_conv", package="causal_conv1d"),
        _fused("fla", "causal_conv_fla", package="fla"),
        _reference(reference.causal_conv),
    ),
    "attention": (
        _fused("torch varlen_attn", "attention", package="torch", obstacle=_needs_ampere),
        _reference(reference.attention),
    ),
    "rms_norm": _compiled("rms_norm"),
    "add_rms_norm": _compiled("add_rms_norm"),
    "norm_rotary": _compiled("norm_rotary"),
    "delta_gates": _compiled("delta_gates"),
    "output_gate": _compiled("output_gate"),
    "gated_rms_norm": (
        _fused("fla", "gated_rms_norm_fla", package="fla"),
        *_compiled("gated_rms_norm"),
    ),
    "swiglu": _compiled("swiglu"),
    "loss": (_fused("chunked", "loss", package="triton"), _reference(reference.loss)),
}
"""The preferred implementation of every operation first, its torch reference last."""
