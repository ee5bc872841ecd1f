"""The torch reference of every operation in `trainer.kernels`, exact about isolation: no document sees another.

Called through `trainer.kernels`; tests compare them with naive loops and with transformers.

Guarantees: the gradient of one document's loss in another document is exactly 0; fp32 at least inside, whatever the
dtype outside; the same bits for the same input.
Costs: memory linear in tokens (attention included), no work between documents; a Python loop over the 64-token
chunks of the longest segment in the delta rule, and over distinct lengths (in steps of 64) in attention.

Shapes: T tokens of the packed batch, S segments, D width, C channels, W conv width, H heads, G key/value heads,
K key dim, V value dim (in the loss: vocabulary), N slots, B chunks (blocks) of L tokens.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.batches import IGNORE_INDEX

CHUNK = 64
"""Tokens in one chunk of the delta rule: triangular systems of this size, one state hand-over between chunks."""

LENGTH_STEP = 64
"""Segments whose lengths round up to the same multiple share one attention call."""

LOSS_BLOCK = 2**26
"""Logits alive at once in the loss (fp32: 256 MiB), whatever the number of tokens."""


class Boundaries(Protocol):
    """Where documents begin and end; a `Batch` is one."""

    @property
    def cu_seqlens(self) -> Tensor:
        """int32 [S + 1]: 0, ..., T, on the batch's device."""

    @property
    def cu_seqlens_cpu(self) -> Tensor:
        """The same on the CPU, so that nobody waits for the device."""

    @property
    def seq_idx(self) -> Tensor:
        """int32 [T]: the segment of each token."""

    @property
    def max_seqlen(self) -> int:
        """Upper bound of a segment's length, constant over a run."""


# Layouts: tokens moved into padded slots, one document per slot range, and back.


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """A placement of T tokens in N >= T slots; slots without a token read as zero and pass no gradient."""

    token_of_slot: Tensor
    """int64 [N]: token in each slot, T where there is none."""
    slot_of_token: Tensor
    """int64 [T]: slot of each token."""
    counts: tuple[int, ...]
    """Delta rule: chunks in each round (round j holds the j-th chunk of every segment that has one), not increasing.
    Attention: segments in each group."""
    lengths: tuple[int, ...]
    """Attention: slots of one segment in each group. Delta rule: empty."""

    def to_slots(self, x_T: Tensor) -> Tensor:
        """[T, ...] -> [N, ...]"""
        return _move(x_T, self.token_of_slot, self.slot_of_token)

    def to_tokens(self, x_N: Tensor) -> Tensor:
        """[N, ...] -> [T, ...]"""
        return _move(x_N, self.slot_of_token, self.token_of_slot)


class _Move(torch.autograd.Function):
    """Gather in both directions: no two outputs read the same input, so the gradient needs no scatter-add."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return _gather_or_zero(x, source)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return _gather_or_zero(grads[0], back), None, None


_move = cast(Callable[[Tensor, Tensor, Tensor], Tensor], _Move.apply)


def _gather_or_zero(x: Tensor, index: Tensor) -> Tensor:
    """Rows of x by index; one past the end reads as zero."""
    return torch.cat([x, x.new_zeros(1, *x.shape[1:])]).index_select(0, index)


def _segments(bounds: Boundaries) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lengths int64 [S], then per token its segment and its place in it, int64 [T]."""
    cu = bounds.cu_seqlens_cpu.numpy().astype(np.int64)
    lengths = np.diff(cu)
    segment_T = np.repeat(np.arange(len(lengths)), lengths)
    return lengths, segment_T, np.arange(cu[-1]) - cu[segment_T]


def _layout(
    slot_of_token: np.ndarray, *, num_slots: int, counts: list[int], lengths: list[int], device: torch.device
) -> Layout:
    token_of_slot = np.full(num_slots, len(slot_of_token), np.int64)
    token_of_slot[slot_of_token] = np.arange(len(slot_of_token))
    return Layout(
        token_of_slot=torch.from_numpy(token_of_slot).to(device),
        slot_of_token=torch.from_numpy(slot_of_token).to(device),
        counts=tuple(counts),
        lengths=tuple(lengths),
    )


def chunk_layout(bounds: Boundaries, device: torch.device) -> Layout:
    """Chunk-aligned slots, rounds first, longest segments first within a round.

    Lengths 70, 200, 5 have 2, 4, 1 chunks: ranks 1, 0, 2; counts 3, 2, 1, 1; the second chunk of the first
    segment is chunk 3 + 1 = 4, its tokens 64..69 sit in slots 256..261.
    """
    lengths, segment_T, place_T = _segments(bounds)
    num_chunks = -(-lengths // CHUNK)
    rank = np.empty(len(lengths), np.int64)
    rank[np.argsort(-num_chunks, kind="stable")] = np.arange(len(lengths))
    counts = (num_chunks[None, :] > np.arange(num_chunks.max())[:, None]).sum(axis=1)
    first_of_round = np.cumsum(counts) - counts
    slot_T = (first_of_round[place_T // CHUNK] + rank[segment_T]) * CHUNK + place_T % CHUNK
    return _layout(slot_T, num_slots=int(counts.sum()) * CHUNK, counts=counts.tolist(), lengths=[], device=device)


def length_layout(bounds: Boundaries, device: torch.device) -> Layout:
    """Segments grouped by rounded length, each group padded to its own longest.

    Lengths 5, 130, 9: groups {5, 9} of 9 slots each and {130}; slots 0..4, 18..147, 9..17.
    """
    lengths, segment_T, place_T = _segments(bounds)
    order = np.argsort(lengths, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(-(-lengths[order] // LENGTH_STEP))) + 1)
    widths = [int(lengths[group[-1]]) for group in groups]
    slots = np.repeat(widths, [len(group) for group in groups])
    start = np.empty(len(lengths), np.int64)
    start[order] = np.cumsum(slots) - slots
    return _layout(
        start[segment_T] + place_T,
        num_slots=int(slots.sum()),
        counts=[len(group) for group in groups],
        lengths=widths,
        device=device,
    )


def _at_least_fp32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def gated_delta_rule(
    query_TGK: Tensor, key_TGK: Tensor, value_THV: Tensor, decay_TH: Tensor, beta_TH: Tensor, bounds: Boundaries
) -> Tensor:
    """Gated delta rule by chunks: state S <- exp(decay) S; S <- S + beta k (v - S'k)'; output S'q / sqrt(K).

    Query and key are normalised to length 1 here (eps 1e-6). Within a chunk the updates are one unit triangular system;
    between chunks the state is an affine map of the one before: S <- transfer S + update, the only sequential part.
    """
    with torch.autocast(query_TGK.device.type, enabled=False):  # autocast would carry the state in bf16
        return _gated_delta_rule(query_TGK, key_TGK, value_THV, decay_TH, beta_TH, bounds)


def _gated_delta_rule(
    query_TGK: Tensor, key_TGK: Tensor, value_THV: Tensor, decay_TH: Tensor, beta_TH: Tensor, bounds: Boundaries
) -> Tensor:
    layout = chunk_layout(bounds, query_TGK.device)
    num_heads, key_dim = value_THV.shape[1], query_TGK.shape[2]

    def chunks(x_T: Tensor) -> Tensor:  # [T, H or G, ...] -> [B, H, L, ...]
        x = layout.to_slots(x_T).reshape(-1, CHUNK, *x_T.shape[1:]).transpose(1, 2)
        return x.repeat_interleave(num_heads // x.shape[1], dim=1) if x.shape[1] != num_heads else x.contiguous()

    query = chunks(_unit(query_TGK) * key_dim**-0.5)
    key = chunks(_unit(key_TGK))
    value = chunks(_at_least_fp32(value_THV))
    beta = chunks(_at_least_fp32(beta_TH)).unsqueeze(-1)
    decay = chunks(_at_least_fp32(decay_TH)).cumsum(-1)
    tail = decay[..., -1:]

    upper = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=decay.device).triu(1)
    # Masked before exp: above the diagonal the difference is positive and may overflow.
    between = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).masked_fill(upper, -math.inf).exp()
    since_start = decay.exp().unsqueeze(-1)
    key_T = key.transpose(-1, -2)
    system = (beta * key) @ key_T * between  # its diagonal is taken as 1
    right = torch.cat([beta * value, beta * since_start * key], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    written, read = torch.split(solved, [value.shape[-1], key_dim], dim=-1)

    kept_T = (key * (tail - decay).exp().unsqueeze(-1)).transpose(-1, -2)
    identity = torch.eye(key_dim, dtype=key.dtype, device=key.device)
    transfer = identity * tail.exp().unsqueeze(-1) - kept_T @ read
    state = _states_before(transfer, kept_T @ written, layout.counts)
    out = (query * since_start) @ state + (query @ key_T * between) @ (written - read @ state)
    return layout.to_tokens(out.transpose(1, 2).flatten(0, 1)).to(value_THV.dtype)


def _unit(x: Tensor) -> Tensor:
    x = _at_least_fp32(x)
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _states_before(transfer_BHKK: Tensor, update_BHKV: Tensor, counts: tuple[int, ...]) -> Tensor:
    """State [B, H, K, V] that each chunk finds; a segment's first chunk finds zero, whatever came before it."""
    num_heads = update_BHKV.shape[1]
    sizes = [count * num_heads for count in counts]
    # One split each, not an index per round: its backward is one concatenation.
    transfers = torch.split(transfer_BHKK.flatten(0, 1), sizes)
    updates = torch.split(update_BHKV.flatten(0, 1), sizes)
    states = [torch.zeros_like(updates[0])]
    for transfer, update, size in zip(transfers, updates, sizes[1:], strict=False):
        states.append(torch.baddbmm(update[:size], transfer[:size], states[-1][:size]))
    return torch.cat(states).reshape(update_BHKV.shape)


def causal_conv(x_TC: Tensor, weight_CW: Tensor, bounds: Boundaries) -> Tensor:
    """Silu of the depthwise causal convolution; taps that would reach into an earlier segment read zero."""
    out_TC = _segment_conv(_at_least_fp32(x_TC), _at_least_fp32(weight_CW), bounds.seq_idx)
    return F.silu(out_TC).to(x_TC.dtype)


class _SegmentConv(torch.autograd.Function):
    """One pass per tap in place: half the time of autograd's."""

    @staticmethod
    def forward(ctx: Any, x_TC: Tensor, weight_CW: Tensor, seq_idx_T: Tensor) -> Tensor:
        ctx.save_for_backward(x_TC, weight_CW, seq_idx_T)
        out = x_TC * weight_CW[:, -1]
        for lag, other in _earlier_taps(weight_CW, seq_idx_T):
            tap = x_TC[:-lag].masked_fill(other, 0.0)
            out[lag:].addcmul_(tap, weight_CW[:, -1 - lag])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x_TC, weight_CW, seq_idx_T = ctx.saved_tensors
        grad = grads[0]
        grad_x = grad * weight_CW[:, -1]
        grad_weight = torch.zeros_like(weight_CW)
        grad_weight[:, -1] = (grad * x_TC).sum(0)
        for lag, other in _earlier_taps(weight_CW, seq_idx_T):
            here = grad[lag:].masked_fill(other, 0.0)
            grad_x[:-lag].addcmul_(here, weight_CW[:, -1 - lag])
            grad_weight[:, -1 - lag] = (here * x_TC[:-lag]).sum(0)
        return grad_x, grad_weight, None


_segment_conv = cast(Callable[[Tensor, Tensor, Tensor], Tensor], _SegmentConv.apply)


def _earlier_taps(weight_CW: Tensor, seq_idx_T: Tensor) -> list[tuple[int, Tensor]]:
    """(lag, bool [T - lag, 1]: whether the token `lag` places earlier is in another segment)"""
    lags = range(1, min(weight_CW.shape[1], len(seq_idx_T)))
    return [(lag, (seq_idx_T[lag:] != seq_idx_T[:-lag]).unsqueeze(-1)) for lag in lags]


def attention(query_THK: Tensor, key_TGK: Tensor, value_TGK: Tensor, bounds: Boundaries) -> Tensor:
    """Causal attention within each segment, one call per group of similar lengths.

    Padding stands behind a segment's tokens, so causality alone hides it.
    """
    layout = length_layout(bounds, query_THK.device)
    repeats = query_THK.shape[1] // key_TGK.shape[1]
    sizes = [count * length for count, length in zip(layout.counts, layout.lengths, strict=True)]
    outs: list[Tensor] = []
    slots = (torch.split(layout.to_slots(x), sizes) for x in (query_THK, key_TGK, value_TGK))
    for count, length, *group in zip(layout.counts, layout.lengths, *slots, strict=True):
        q, k, v = (x.reshape(count, length, *x.shape[1:]).transpose(1, 2) for x in group)
        k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        outs.append(out.transpose(1, 2).flatten(0, 1))
    return layout.to_tokens(torch.cat(outs))


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Zero-centred RMSNorm: a weight of 0 leaves the scale at 1."""
    wide = _at_least_fp32(x)
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * (1.0 + _at_least_fp32(weight_D))).to(x.dtype)


def add_rms_norm(x: Tensor, delta: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """A residual sum, and the zero-centred RMSNorm of it."""
    total = x + delta
    return total, rms_norm(total, weight_D, eps)


def norm_rotary(x_THK: Tensor, weight_K: Tensor, eps: float, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """RMSNorm of every head, then its first R dims turned by the token's angles; pairs are R / 2 dims apart."""
    x_THK = rms_norm(x_THK, weight_K, eps)
    cos, sin = cos_TR.unsqueeze(1), sin_TR.unsqueeze(1)
    turned, rest = torch.split(x_THK, [cos.shape[-1], x_THK.shape[-1] - cos.shape[-1]], dim=-1)
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat([-second, first], dim=-1) * sin
    return torch.cat([turned.to(rest.dtype), rest], dim=-1)


def delta_gates(a_TH: Tensor, b_TH: Tensor, a_log_H: Tensor, dt_bias_H: Tensor) -> tuple[Tensor, Tensor]:
    """Log decay, at most 0, and beta. The decay is wide, because it is summed over a whole chunk."""
    step_TH = F.softplus(a_TH.to(a_log_H.dtype) + dt_bias_H)
    return -a_log_H.exp() * step_TH, b_TH.sigmoid()


def output_gate(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate)"""
    return x * gate.sigmoid()


def gated_rms_norm(x: Tensor, gate: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """RMSNorm with a plain weight, then silu of the gate."""
    wide = _at_least_fp32(x)
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * weight_D * F.silu(_at_least_fp32(gate))).to(x.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up"""
    return F.silu(gate) * up


def loss(hidden_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, num_targets: int) -> Tensor:
    """Summed cross entropy of the ``num_targets`` targets in fp32; tokens that are no target cost nothing.

    While gradients are wanted they are computed in the same pass over the vocabulary, block by block:
    three products in all, and LOSS_BLOCK logits alive at most.
    """
    assert num_targets <= len(labels_T)
    want_grad = torch.is_grad_enabled() and (hidden_TD.requires_grad or weight_VD.requires_grad)
    return _summed_cross_entropy(hidden_TD, weight_VD, labels_T, want_grad)


class _SummedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, want_grad: bool) -> Tensor:  # noqa: FBT001
        targets = (labels_T != IGNORE_INDEX).nonzero().squeeze(1)
        wide = torch.promote_types(hidden_TD.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=hidden_TD.device)
        grad_hidden = torch.zeros_like(hidden_TD) if want_grad else None
        grad_weight = torch.zeros_like(weight_VD, dtype=wide) if want_grad and weight_VD.requires_grad else None
        for rows in torch.split(targets, max(1, LOSS_BLOCK // len(weight_VD))):
            hidden, labels = hidden_TD[rows], labels_T[rows].unsqueeze(1)
            logits = (hidden @ weight_VD.T).to(wide)
            logits -= logits.amax(1, keepdim=True)
            at_label = logits.gather(1, labels)
            norm = logits.exp_().sum(1, keepdim=True)
            total += (norm.log() - at_label).sum()
            if grad_hidden is None:
                continue
            # In place: softmax, then minus one at the label, is the gradient of the logits.
            grad_logits = logits.div_(norm).scatter_add_(1, labels, -torch.ones_like(norm))
            narrow = grad_logits.to(weight_VD.dtype)
            grad_hidden[rows] = (narrow @ weight_VD).to(grad_hidden.dtype)
            if grad_weight is not None:
                grad_weight += narrow.T @ hidden
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight_VD.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        if grad_weight is not None:
            grad_weight = (grad_weight * grads[0]).to(ctx.weight_dtype)
        return grad_hidden * grads[0], grad_weight, None, None


_summed_cross_entropy = cast(Callable[[Tensor, Tensor, Tensor, bool], Tensor], _SummedCrossEntropy.apply)
