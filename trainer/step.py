"""One optimizer step: forward and backward over its micro-batches, then clip and update.

    StepBatches ──▶ targets of the whole step ──▶ micro-steps: loss / targets, backward ──▶ reduce ──▶ clip ──▶ update

Guarantees: the loss is the sum over the target tokens of the whole step, over all ranks and micro-batches, divided
by their number, so (1 x 8), (8 x 1) and (2 ranks x 4) rows have one gradient; a micro-batch, rank or step without
a target is safe; a loss or gradient that is not finite stops the run before the weights are touched.
Costs: one all-reduce of a count before, one of the gradients after; the device is waited for once a step, twice where
there are several ranks. Gradients are as narrow as the parameters; where there are several micro-steps they are added
up in fp32, 4 bytes a parameter, and rounded once; for adamw_bf16, chosen to save memory, in bf16.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.batches import Batch, StepBatches
from trainer.optimizer import StochasticAdamW
from trainer.world import all_sum, world_size

Schedule = Literal["cosine", "linear", "constant"]
Precision = Literal["fp32", "bf16"]


class DivergedError(ValueError):
    """A loss or gradient is not finite: going on would ruin the weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What one step did, the same on all ranks."""

    step: int
    """Number of the step, from 1."""
    num_rows: int
    """Rows of the whole step."""
    num_targets: int
    """Tokens that the loss was summed over, on all ranks; 0 means that nothing was updated."""
    num_tokens: int
    """Tokens of documents on all ranks, without padding."""
    sum_squared_lengths: int
    """Sum over the pieces, on all ranks, of their squared lengths."""
    loss: float | None
    """Mean loss of a target in nats; None without a target."""
    lr: float
    """Learning rate of this step."""
    grad_norm: float | None
    """Norm of the whole gradient before clipping; None without a target."""


def learning_rate(step: int, *, peak: float, schedule: Schedule, warmup_steps: int, total_steps: int) -> float:
    """Learning rate of step ``step``, counted from 1.

    It rises linearly to ``peak`` at step ``warmup_steps``, then stays (constant) or falls along a line or half a
    cosine towards 0, which it would reach one step after the last.

    Worked example, linear, 2 of 6 steps warm-up, peak 1: 0.5 1 0.8 0.6 0.4 0.2.
    """
    if step <= warmup_steps:
        return peak * step / warmup_steps
    if schedule == "constant":
        return peak
    after = min(1.0, (step - max(1, warmup_steps)) / max(1, total_steps - max(1, warmup_steps) + 1))
    return peak * (1 - after if schedule == "linear" else (1 + math.cos(math.pi * after)) / 2)


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: StepBatches,
    *,
    step: int,
    lr: float,
    clip: float,
    device: torch.device,
) -> StepResult:
    """Do one step.

    Args:
        model: returns the sum of the losses of a Batch's targets, an fp32 scalar.
        optimizer: over the model's parameters, whose gradients are None or 0.
        batches: this rank's part of the step.
        step: its number, from 1.
        lr: learning rate.
        clip: largest norm of the gradient; 0 leaves it as it is.
        device: where the model is.

    Raises:
        DivergedError: the loss or the gradient is not finite; nothing was updated.
    """
    micro = batches.micro
    num_targets, num_tokens, squared = all_sum(
        [sum(getattr(b, name) for b in micro) for name in ("num_targets", "num_tokens", "sum_squared_lengths")],
        device=device,
    )
    counts: dict[str, Any] = {
        "step": step,
        "num_rows": len(batches.rows),
        "num_targets": num_targets,
        "num_tokens": num_tokens,
        "sum_squared_lengths": squared,
        "lr": lr,
    }
    if num_targets == 0:
        return StepResult(**counts, loss=None, grad_norm=None)

    saves_memory = isinstance(optimizer, StochasticAdamW)  # it is chosen for want of bytes a parameter
    loss = compute_gradients(model, micro, num_targets=num_targets, device=device, wide_sums=not saves_memory)
    grad_norm = _clip(model, clip)
    loss_value, norm_value = torch.stack([loss.float(), grad_norm.float()]).tolist()  # the one wait for the device
    if not (math.isfinite(loss_value) and math.isfinite(norm_value)):
        optimizer.zero_grad(set_to_none=True)
        raise _diverged(step, batches, loss_value, norm_value)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return StepResult(**counts, loss=loss_value, grad_norm=norm_value)


def compute_gradients(
    model: nn.Module, micro: Sequence[Batch], *, num_targets: int, device: torch.device, wide_sums: bool = True
) -> Tensor:
    """Leave in ``grad`` the gradient of the whole step, the same on all ranks.

    Args:
        model: as in ``train_step``.
        micro: this rank's micro-batches.
        num_targets: of the whole step, more than 0.
        device: where the model is.
        wide_sums: add up narrow gradients of several micro-steps in fp32. In bf16, 64 of them would be off by five
            roundings of one gradient.

    Returns:
        The loss of the whole step, a detached scalar.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    sums: dict[nn.Parameter, Tensor] = {}
    for batch in micro:  # one without targets runs too: with sharded weights the other ranks wait for it
        loss = model(batch.to(device, non_blocking=True)) / num_targets
        loss.backward()
        total += loss.detach()
        if wide_sums and len(micro) > 1:
            _add_up(model, sums)
    while sums:  # one at a time, so that wide and narrow ones never all exist
        parameter, gradient = sums.popitem()
        parameter.grad = gradient.to(parameter.dtype)
    if world_size() > 1:
        _reduce_gradients(model)
        dist.all_reduce(total)
    return total


@torch.no_grad()
def evaluate(model: nn.Module, source: Iterable[StepBatches], *, device: torch.device) -> float | None:
    """Mean loss of a target over everything that ``source`` yields on all ranks; None if it has no target."""
    was_training = model.training
    model.eval()
    total = torch.zeros((), dtype=torch.float64, device=device)
    num_targets = 0
    for batches in source:
        for batch in batches.micro:
            total += model(batch.to(device, non_blocking=True))
            num_targets += batch.num_targets
    model.train(was_training)
    if world_size() > 1:
        dist.all_reduce(total)
    (num_targets,) = all_sum([num_targets], device=device)
    return float(total) / num_targets if num_targets else None


@torch.no_grad()
def _add_up(model: nn.Module, sums: dict[nn.Parameter, Tensor]) -> None:
    """Move the narrow gradients of one micro-step into fp32 sums."""
    for parameter in model.parameters():
        if parameter.grad is None or parameter.dtype.itemsize >= 4:
            continue
        if parameter in sums:
            sums[parameter].add_(parameter.grad)
        else:
            sums[parameter] = parameter.grad.float()
        parameter.grad = None


def _reduce_gradients(model: nn.Module) -> None:
    """Sum every gradient over the ranks, in fp32. Sharded weights will do this in their own backward pass."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            wide = parameter.grad.to(torch.promote_types(parameter.dtype, torch.float32))
            dist.all_reduce(wide)
            parameter.grad.copy_(wide)


def _clip(model: nn.Module, clip: float) -> Tensor:
    norm = gradient_norm([p.grad for p in model.parameters() if p.grad is not None])
    if clip > 0:
        nn.utils.clip_grads_with_norm_(model.parameters(), clip, norm)
    return norm


def gradient_norm(gradients: Iterable[Tensor]) -> Tensor:
    """Norm of all gradients together, summed up in fp32 at least whatever they are stored in; a scalar."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
    norms = [
        torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.promote_types(dtype, torch.float32))).float()
        for dtype, tensors in by_dtype.items()
    ]
    norm: Tensor = torch.linalg.vector_norm(torch.cat(norms))
    return norm


def require_finite(model: nn.Module, *, step: int) -> None:
    """Raise DivergedError if the norm of what is trained is not finite: a finite gradient can still ruin weights."""
    norm = gradient_norm(p.detach() for p in model.parameters() if p.requires_grad).item()
    if not math.isfinite(norm):
        raise DivergedError(f"step {step}: the norm of the weights is {norm}, so they are not saved.")


def _diverged(step: int, batches: StepBatches, loss: float, grad_norm: float) -> DivergedError:
    documents = [batches.doc_ids]
    if world_size() > 1:  # all ranks are here: loss and gradient are sums over all of them
        gathered: list[Any] = [None] * world_size()
        dist.all_gather_object(gathered, batches.doc_ids)
        documents = gathered
    ids = sorted({doc for part in documents for doc in part})
    return DivergedError(
        f"step {step}: loss {loss}, gradient norm {grad_norm}: not finite. The weights were not updated.\n"
        f"  rows of the step: {_some(list(batches.rows))}\n  documents in them: {_some(ids)}\n"
        "Look at a row with: python -m pipeline.verify DATASET --show ROW."
    )


def _some(ids: list[int], most: int = 64) -> str:
    shown = " ".join(map(str, ids[:most]))
    return shown if len(ids) <= most else f"{shown} ... ({len(ids)} in all)"
