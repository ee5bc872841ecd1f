"""Kernels broken in every way that the doctor has to find, for a CPU."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from trainer import cases, doctor
from trainer.batches import Batch
from trainer.cases import MIXING, NARROW
from trainer.kernels import Kernels, select
from trainer.proofs import Finding

CPU = torch.device("cpu")
SMALL = dataclasses.replace(
    NARROW, num_tokens=256, odd=(1, 2, 3, 31, 33, 63, 65), many=(8,) * 30, vocab=37, loss_vocab=37
)

Function = Callable[..., Any]


def broken(operation: str, breaker: Callable[[Function], Function]) -> Kernels:
    chosen = select(CPU)
    changes: dict[str, Any] = {operation: breaker(getattr(chosen, operation))}
    return dataclasses.replace(chosen, **changes)


def examine(chosen: Kernels, **settings: Any) -> list[Finding]:
    return doctor.examine(chosen, CPU, **{"short": True, "model": False, "sizes": SMALL, **settings})


def failures(found: list[Finding]) -> list[Finding]:
    return [finding for finding in found if not finding.passed]


# --------------------------------------------------------------------------------------- ways to break


def with_boundaries(change: Callable[[Batch], list[int]]) -> Callable[[Function], Function]:
    def breaker(function: Function) -> Function:
        def called(*arguments: Any) -> Any:
            batch: Batch = arguments[-1]
            ends = torch.tensor(change(batch), dtype=torch.int32)
            numbers = torch.repeat_interleave(torch.arange(len(ends) - 1, dtype=torch.int32), ends.diff())
            wrong = dataclasses.replace(batch, cu_seqlens=ends, cu_seqlens_cpu=ends, seq_idx=numbers)
            return function(*arguments[:-1], wrong)

        return called

    return breaker


def ignored(batch: Batch) -> list[int]:
    return [0, len(batch.input_ids)]


def one_late(batch: Batch) -> list[int]:
    first, *inner, last = batch.cu_seqlens_cpu.tolist()
    return [first, *(end + 1 for end in inner), last]


def last_forgotten(batch: Batch) -> list[int]:
    ends: list[int] = batch.cu_seqlens_cpu.tolist()
    return [*ends[:-3], *ends[-2:]]


def with_inputs(change: Callable[..., tuple[Any, ...]]) -> Callable[[Function], Function]:
    return lambda function: lambda *arguments: function(*change(*arguments))


class _Gradients(torch.autograd.Function):
    """The tensors unchanged; their gradients changed."""

    @staticmethod
    def forward(ctx: Any, change: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.change = change
        return tuple(x.clone() for x in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, *ctx.change(*grads)


def with_gradients(num_inputs: int, change: Callable[..., tuple[Tensor, ...]]) -> Callable[[Function], Function]:
    def breaker(function: Function) -> Function:
        def called(*arguments: Any) -> Any:
            changed: Any = cast(Any, _Gradients).apply(change, *arguments[:num_inputs])
            return function(*changed, *arguments[num_inputs:])

        return called

    return breaker


def with_output(change: Callable[..., Tensor]) -> Callable[[Function], Function]:
    return lambda function: lambda *arguments: change(function(*arguments), *arguments)


def poisoned(out: Tensor, *arguments: Any) -> Tensor:
    flat = torch.zeros_like(out).flatten()
    flat[len(flat) // 2] = math.nan
    return out + flat.view_as(out)


def leaking_backward(*grads: Tensor) -> tuple[Tensor, ...]:
    *others, last = grads
    return *others, last + 1e-7 * last.roll(-70, 0)


def stale(function: Function) -> Function:
    """Lengths of the first row of this many tokens and segments, for good."""
    kept: dict[tuple[int, int], Batch] = {}

    def called(*arguments: Any) -> Any:
        batch: Batch = arguments[-1]
        return function(*arguments[:-1], kept.setdefault((len(arguments[0]), batch.cu_seqlens.numel()), batch))

    return called


def leaking(*, source: int | None = None, ahead: int, size: float) -> Callable[[Function], Function]:
    """The last output of a document, by default the longest, is added to all of a later one's; no gradient shows it."""

    def change(out: Tensor, *arguments: Any) -> Tensor:
        documents = cases.documents_of(arguments[-1])
        lengths = [document.stop - document.start for document in documents]
        start = lengths.index(max(lengths)) if source is None else source
        leak = torch.zeros_like(out)
        leak[documents[start + ahead]] = size * out[documents[start].stop - 1].detach()
        return out + leak

    return with_output(change)


def wrong_length(out: Tensor, *arguments: Any) -> Tensor:
    return out[:-1]


def not_causal(query: Tensor, key: Tensor, value: Tensor, batch: Batch) -> Tensor:
    outs = []
    for span in cases.documents_of(batch):
        q, k, v = (x[span].transpose(0, 1) for x in (query, key, value))
        k, v = (x.repeat_interleave(len(q) // len(x), dim=0) for x in (k, v))
        outs.append(torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(0, 1))
    return torch.cat(outs)


BROKEN: dict[str, tuple[str, Callable[[Function], Function]]] = {
    **{f"{name} ignores the boundaries": (name, with_boundaries(ignored)) for name in MIXING},
    **{f"{name} sees boundaries one token late": (name, with_boundaries(one_late)) for name in MIXING},
    **{f"{name} forgets one boundary": (name, with_boundaries(last_forgotten)) for name in MIXING},
    **{f"{name} keeps the lengths of an earlier row": (name, stale) for name in MIXING},
    **{
        f"{name} leaks into the document after the next": (name, leaking(source=2, ahead=2, size=1e-6))
        for name in MIXING
    },
    **{f"{name} gives one NaN": (name, with_output(poisoned)) for name in (*MIXING, "rms_norm", "loss")},
    "the delta rule swaps two gradients": (
        "gated_delta_rule",
        with_gradients(2, lambda query, key: (key, query)),
    ),
    "the delta rule leaks in its backward pass alone": ("gated_delta_rule", with_gradients(3, leaking_backward)),
    "the convolution leaks in its backward pass alone": ("causal_conv", with_gradients(1, leaking_backward)),
    "the delta rule drops beta": (
        "gated_delta_rule",
        with_inputs(lambda q, k, v, decay, beta, batch: (q, k, v, decay, 1.0 + 0.0 * beta, batch)),
    ),
    "the delta rule drops the decay": (
        "gated_delta_rule",
        with_inputs(lambda q, k, v, decay, beta, batch: (q, k, v, 0.0 * decay, beta, batch)),
    ),
    "the delta rule pairs values with another group's keys": (
        "gated_delta_rule",
        with_inputs(lambda q, k, *rest: (q.repeat(1, 2, 1), k.repeat(1, 2, 1), *rest)),
    ),
    "the delta rule drops the scale": ("gated_delta_rule", with_output(lambda out, *_: out * 8**0.5)),
    "the convolution drops a tap": (
        "causal_conv",
        with_inputs(lambda x, w, batch: (x, w * w.new_tensor([0, 1, 1, 1]), batch)),
    ),
    "the convolution drops a weight's gradient": (
        "causal_conv",
        with_gradients(2, lambda x, w: (x, torch.zeros_like(w))),
    ),
    "attention sees the future": ("attention", lambda function: not_causal),
    "attention drops the last token": ("attention", with_output(wrong_length)),
    "the norm's weight is plain": ("rms_norm", with_inputs(lambda x, w, eps: (x, w - 1.0, eps))),
    "the norm drops eps": ("rms_norm", with_inputs(lambda x, w, eps: (x, w, 0.0))),
    "the norm beside the sum drops the sum": (
        "add_rms_norm",
        lambda function: lambda x, delta, w, eps: (x + delta, function(x, delta * 0, w, eps)[1]),
    ),
    "the gated norm drops the gate": (
        "gated_rms_norm",
        with_inputs(lambda x, gate, w, eps: (x, 1.2784645 + 0.0 * gate, w, eps)),
    ),
    "the gated norm's eps is ten times too large": (
        "gated_rms_norm",
        with_inputs(lambda x, gate, w, eps: (x, gate, w, 10 * eps)),
    ),
    "the rotation turns backwards": ("norm_rotary", with_inputs(lambda x, w, eps, cos, sin: (x, w, eps, cos, -sin))),
    "the decay forgets its bias": ("delta_gates", with_inputs(lambda a, b, a_log, bias: (a, b, a_log, 0.0 * bias))),
    "the output gate is a silu": ("output_gate", with_output(lambda out, x, gate: out * gate)),
    "SwiGLU swaps gate and up": ("swiglu", with_inputs(lambda gate, up: (up, gate))),
    "SwiGLU overlooks one token": ("swiglu", with_output(lambda out, *_: torch.cat([out[:-1], 0.9 * out[-1:]]))),
    "the loss is shifted by one label": ("loss", with_inputs(lambda h, w, labels, n: (h, w, labels.roll(1), n))),
    "the loss counts what is no target": (
        "loss",
        with_inputs(lambda h, w, labels, n: (h, w, labels.clamp_min(0), len(labels))),
    ),
    "the loss forgets the factor of its backward pass": ("loss", with_gradients(1, lambda h: (h / 0.37,))),
}
