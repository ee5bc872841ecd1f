"""One table: operation -> implementations in order of preference, its torch reference last.

`select` decides once, at start, and returns the callables with the reason for each choice; the trainer prints the
table and records it with the run. Every operation that mixes tokens takes the batch's boundaries.

The references (`trainer.reference`) serve on a CPU. On a GPU they are several times slower than fused kernels, so
`select` refuses them there, naming the package to install, unless told otherwise. Nothing here imports a GPU
package on a CPU machine.

Shapes: T tokens of the packed batch, D width, C channels, W conv width, H heads, G key/value heads, K key dim,
V value dim (in `loss`: vocabulary).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from trainer import reference
from trainer.reference import Boundaries


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
    gated_rms_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    """(x [..., D], gate [..., D], weight [D], eps) -> x / rms(x) * weight * silu(gate)"""
    swiglu: Callable[[Tensor, Tensor], Tensor]
    """(gate [..., D], up [..., D]) -> silu(gate) * up"""
    loss: Callable[[Tensor, Tensor, Tensor], Tensor]
    """(hidden [T, D], head weight [V, D], labels int64 [T]) -> fp32 scalar: summed cross entropy of the targets"""
    table: tuple[Choice, ...]
    """What was chosen and why, one entry per operation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Implementation:
    """One way to run an operation."""

    name: str
    """As printed in the table."""
    fused: bool
    """False for a torch reference, which a GPU refuses unless slow kernels are accepted."""
    obstacle: Callable[[torch.device], str | None]
    """Why it cannot serve on this device, or None; must not import a GPU package on a CPU machine."""
    load: Callable[[], tuple[Callable[..., Tensor], str]]
    """Imports it; returns the callable and the version of its package."""


def select(device: torch.device, *, accept_slow: bool = False) -> Kernels:
    """Choose an implementation for every operation.

    Raises ValueError on a GPU that would have to run a torch reference, unless `accept_slow`.
    """
    chosen: dict[str, Callable[..., Tensor]] = {}
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
        why = "; ".join(passed_over) or ("no fused kernel on a CPU" if device.type == "cpu" else "first choice")
        table.append(Choice(operation=operation, implementation=implementation.name, version=version, why=why))
    if slow and not accept_slow:
        raise ValueError(_slow_message(slow, device))
    return Kernels(**cast(Any, chosen), table=tuple(table))


def _slow_message(slow: list[str], device: torch.device) -> str:
    lines = [f"only a torch reference is left for {len(slow)} operations on {device}:"]
    for operation in slow:
        usable = len(TABLE[operation]) > 1
        lines.append(f"  {operation}: {'install ' if usable else ''}{FUSED_PACKAGES[operation]}")
        lines[-1] += "" if usable else " (this version cannot use it yet)"
    lines.append("Pass --accept-slow-kernels to train with the references all the same, several times slower.")
    return "\n".join(lines)


def _reference(function: Callable[..., Tensor]) -> Implementation:
    return Implementation(
        name="torch reference",
        fused=False,
        obstacle=lambda device: None,
        load=lambda: (function, torch.__version__),
    )


TABLE: dict[str, tuple[Implementation, ...]] = {
    "gated_delta_rule": (_reference(reference.gated_delta_rule),),
    "causal_conv": (_reference(reference.causal_conv),),
    "attention": (_reference(reference.attention),),
    "rms_norm": (_reference(reference.rms_norm),),
    "gated_rms_norm": (_reference(reference.gated_rms_norm),),
    "swiglu": (_reference(reference.swiglu),),
    "loss": (_reference(reference.loss),),
}
"""Fused implementations go in front of the reference, the preferred one first."""

FUSED_PACKAGES = {
    "gated_delta_rule": "flash-linear-attention",
    "causal_conv": "causal-conv1d",
    "attention": "torch >= 2.11 for CUDA (varlen_attn)",
    "rms_norm": "liger-kernel",
    "gated_rms_norm": "flash-linear-attention",
    "swiglu": "liger-kernel",
    "loss": "liger-kernel",
}
"""The package to name when only the reference is left."""
