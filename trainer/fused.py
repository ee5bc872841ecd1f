"""Fused kernels for a CUDA device, each with the signature of its reference in `trainer.reference`.

Only `trainer.kernels` imports this, and only where a GPU is used. Measured times are in data/records; `trainer.doctor`
compares every function here with its reference.

Guarantees: boundaries reach every kernel that mixes tokens; one compilation a shape; no host synchronisation, but for
fla's delta rule and convolution, second choices, which wait once a batch for tables of their own.

Shapes: T tokens of the packed batch, D width, C channels, W conv width, H heads, G key/value heads, K key dim,
V value dim (in the loss: vocabulary), R rotary dims, N targets.
"""

import inspect
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from trainer import reference
from trainer.batches import IGNORE_INDEX
from trainer.reference import Boundaries

LOSS_BYTES = 2**29
"""Logits alive at once in the loss: 512 MiB, some 1,000 tokens of 248,320 entries in bf16."""

RECOMPILE_LIMIT = 64
"""Rows of a few lengths, each forward, computed again and in evaluation, are more than torch's 8: it would run the rest
uncompiled, saying so in its log alone."""


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """torch.compile, for up to ``RECOMPILE_LIMIT`` shapes, in whatever thread: the backward pass has its own.

    Static shapes: a run has one row length, and dynamic ones cost speed.
    """
    # From torch 2.12 on a setting counts in the thread alone that made it, and the function has the parameter.
    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        options["recompile_limit"] = RECOMPILE_LIMIT
    return torch.compile(function, dynamic=False, **options)


# Norms and gates are bound by memory: the compiler fuses each with what stands around it, forward and backward.
rms_norm = compiled(reference.rms_norm)
add_rms_norm = compiled(reference.add_rms_norm)
norm_rotary = compiled(reference.norm_rotary)
delta_gates = compiled(reference.delta_gates)
output_gate = compiled(reference.output_gate)
gated_rms_norm = compiled(reference.gated_rms_norm)
swiglu = compiled(reference.swiglu)


def delta_rule_flash_qla(
    query_TGK: Tensor, key_TGK: Tensor, value_THV: Tensor, decay_TH: Tensor, beta_TH: Tensor, bounds: Boundaries
) -> Tensor:
    """FlashQLA: head dims of 128, bf16."""
    from flash_qla import chunk_gated_delta_rule
    from flash_qla.utils.index import prepare_varlen_metadata

    _require_narrow("FlashQLA", value_THV)
    if not hasattr(bounds.cu_seqlens, "_flash_qla_prepared_varlen"):
        # Chunk tables from the CPU's copy of the boundaries; otherwise each batch would wait for the device.
        prepare_varlen_metadata(bounds.cu_seqlens, bounds.cu_seqlens_cpu)
    out, _ = chunk_gated_delta_rule(
        *(x.unsqueeze(0) for x in (query_TGK, key_TGK, value_THV, decay_TH, beta_TH)),
        cu_seqlens=bounds.cu_seqlens,
        use_qk_l2norm_in_kernel=True,
        auto_cp=False,  # splitting long documents reads their lengths from the device, and rows hold many
    )
    return cast(Tensor, out.squeeze(0))


def delta_rule_fla(
    query_TGK: Tensor, key_TGK: Tensor, value_THV: Tensor, decay_TH: Tensor, beta_TH: Tensor, bounds: Boundaries
) -> Tensor:
    """fla's kernels; its hand-over of the whole operation to other packages is passed by, so that its own run.

    Where TileLang is installed parts of its backward pass may still be TileLang's on Hopper.
    """
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    _require_narrow("fla", value_THV)
    out, _ = inspect.unwrap(chunk_gated_delta_rule)(
        *(x.unsqueeze(0) for x in (query_TGK, key_TGK, value_THV, decay_TH, beta_TH)),
        cu_seqlens=bounds.cu_seqlens,
        cu_seqlens_cpu=bounds.cu_seqlens_cpu,
        use_qk_l2norm_in_kernel=True,
    )
    return cast(Tensor, out.squeeze(0))


def causal_conv(x_TC: Tensor, weight_CW: Tensor, bounds: Boundaries) -> Tensor:
    """causal-conv1d in its channel-last layout, the one that takes segment numbers."""
    from causal_conv1d import causal_conv1d_fn

    out = causal_conv1d_fn(x_TC.t().unsqueeze(0), weight_CW, seq_idx=bounds.seq_idx.unsqueeze(0), activation="silu")
    return cast(Tensor, out.squeeze(0).t())


def causal_conv_fla(x_TC: Tensor, weight_CW: Tensor, bounds: Boundaries) -> Tensor:
    """fla's Triton convolution."""
    from fla.modules.causal_conv1d import causal_conv1d

    out, _ = causal_conv1d(
        x_TC.unsqueeze(0),
        weight_CW,
        activation="silu",
        cu_seqlens=bounds.cu_seqlens,
        cu_seqlens_cpu=bounds.cu_seqlens_cpu,
    )
    return cast(Tensor, out.squeeze(0))


# Newer releases ask for the flag where heads are shared, older ones do not know it.
_GROUPED = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def attention(query_THK: Tensor, key_TGK: Tensor, value_TGK: Tensor, bounds: Boundaries) -> Tensor:
    """torch's variable-length flash attention; causal by its window."""
    _require_narrow("varlen_attn", query_THK)
    offsets, longest = bounds.cu_seqlens, bounds.max_seqlen
    out = varlen_attn(
        query_THK, key_TGK, value_TGK, offsets, offsets, longest, longest, window_size=(-1, 0), **cast(Any, _GROUPED)
    )
    return cast(Tensor, out)


def gated_rms_norm_fla(x: Tensor, gate: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """fla's norm and gate in one kernel."""
    from fla.modules.norm.fused_norm_gate import rms_norm_gated

    return cast(Tensor, rms_norm_gated(x, gate, weight_D, None, "swish", eps=eps))


def loss(hidden_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, num_targets: int) -> Tensor:
    """Summed cross entropy of the targets, logits and their gradient in one buffer of ``LOSS_BYTES``."""
    # The number is known on the host: looking for the targets waits for nothing.
    targets_N = torch.nonzero_static(labels_T != IGNORE_INDEX, size=num_targets).squeeze(1)
    want_grad = torch.is_grad_enabled() and (hidden_TD.requires_grad or weight_VD.requires_grad)
    return _chunked_loss(
        hidden_TD[targets_N] if num_targets else hidden_TD[:0], weight_VD, labels_T[targets_N], want_grad
    )


class _ChunkedLoss(torch.autograd.Function):
    """Gradients are computed along with the loss, so that no logit is kept or computed twice.

    The head's gradient is a sum over the parts in its own dtype, rounded once a part: one row of 8,192 targets of the
    released vocabulary has 8.
    """

    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, want_grad: bool) -> Tensor:  # noqa: FBT001
        from trainer.cross_entropy import cross_entropy_

        losses_N = torch.empty(len(labels_N), dtype=torch.float32, device=hidden_ND.device)
        grad_hidden = torch.empty_like(hidden_ND) if want_grad else None
        grad_weight = torch.zeros_like(weight_VD) if want_grad and weight_VD.requires_grad else None
        size = LOSS_BYTES // (weight_VD.shape[0] * hidden_ND.element_size())
        size = max(16, size // 16 * 16)  # every part starts aligned: other places would be another kernel to compile
        for start in range(0, len(labels_N), size):
            part = slice(start, start + size)
            logits = hidden_ND[part] @ weight_VD.T
            cross_entropy_(logits, labels_N[part], losses_N[part], with_gradient=want_grad)
            if grad_hidden is not None:
                torch.mm(logits, weight_VD, out=grad_hidden[part])
            if grad_weight is not None:
                grad_weight.addmm_(logits.T, hidden_ND[part])
            del logits
        ctx.save_for_backward(grad_hidden, grad_weight)
        return losses_N.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        # In place: nobody else holds these, and the head's gradient is gigabytes.
        grad_hidden, grad_weight = ctx.saved_tensors
        scaled = [None if grad is None else grad.mul_(grads[0]) for grad in (grad_hidden, grad_weight)]
        return scaled[0], scaled[1], None, None


_chunked_loss = cast(Callable[[Tensor, Tensor, Tensor, bool], Tensor], _ChunkedLoss.apply)


def _require_narrow(name: str, x: Tensor) -> None:
    if x.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(
            f"{name} computes in bf16, the model is in {x.dtype}: use --precision bf16, or train in fp32 through the "
            "references of a CPU"
        )
