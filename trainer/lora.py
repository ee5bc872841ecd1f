"""LoRA on every linear layer but the head: y = x W' + (alpha / rank) (x A') B'.

    model.to_dtype(torch.bfloat16)                    # after loading, before the optimizer is made
    add_adapters(model, rank=16, alpha=32.0, seed=0)
    model(batch).backward()                           # gradients of lora_A and lora_B alone

Guarantees: the first forward pass equals the model's own bit for bit (B is 0); frozen weights get no gradient; first
values depend on the seed and the parameter's name alone.
Costs: for the backward pass each layer keeps its input, which the projections that read it share, and x A'; nothing as
wide as its output.

Shapes: T tokens, I inputs, O outputs, R rank.
"""

import hashlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

HEAD = "lm_head"
"""The one linear layer without an adapter."""


class _AdaptedProduct(torch.autograd.Function):
    """x W' + scale (x A') B' with no gradient for W."""

    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, weight_OI: Tensor, a_RI: Tensor, b_OR: Tensor, scale: float) -> Tensor:
        """[T, I], [O, I], [R, I], [O, R] -> [T, O]"""
        down_TR = F.linear(x_TI, a_RI)
        ctx.save_for_backward(x_TI, down_TR, weight_OI, a_RI, b_OR)
        ctx.scale = scale
        # In place: the product is rounded once, with the sum, and no second [T, O] exists.
        return F.linear(x_TI, weight_OI).addmm_(down_TR, b_OR.t(), alpha=scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, None, Tensor | None, Tensor | None, None]:
        """Gradients of x, A and B."""
        x_TI, down_TR, weight_OI, a_RI, b_OR = ctx.saved_tensors
        needs_x, _, needs_a, needs_b, _ = ctx.needs_input_grad
        grad_x = grad_a = grad_b = None
        if needs_x or needs_a:
            grad_down_TR = grad_TO @ b_OR
        if needs_x:
            grad_x = (grad_TO @ weight_OI).addmm_(grad_down_TR, a_RI, alpha=ctx.scale)
        if needs_a:
            grad_a = (grad_down_TR.t() @ x_TI).mul_(ctx.scale)
        if needs_b:
            grad_b = (grad_TO.t() @ down_TR).mul_(ctx.scale)
        return grad_x, None, grad_a, grad_b, None


class LoRALinear(nn.Module):
    """A frozen linear layer with an adapter beside it; its weight keeps its name."""

    def __init__(self, weight: nn.Parameter, *, rank: int, alpha: float) -> None:
        """Takes over a linear layer's weight [O, I]; the adapter has its dtype and device, and changes nothing yet."""
        super().__init__()
        num_outputs, num_inputs = weight.shape
        self.scale = alpha / rank
        weight.requires_grad = False
        self.weight = weight
        self.lora_A = nn.Parameter(weight.new_zeros(rank, num_inputs))
        self.lora_B = nn.Parameter(weight.new_zeros(num_outputs, rank))

    def forward(self, x_TI: Tensor) -> Tensor:
        """[T, I] -> [T, O]"""
        assert x_TI.dim() == 2, "packed input has tokens and width alone"
        out: Tensor = _AdaptedProduct.apply(  # type: ignore[no-untyped-call]
            x_TI, self.weight, self.lora_A, self.lora_B, self.scale
        )
        return out


def add_adapters(model: nn.Module, *, rank: int, alpha: float, seed: int) -> None:
    """Replace every `nn.Linear` but the head by a `LoRALinear` and freeze the rest of the model; in place.

    Call it once weights are loaded and cast, and before the optimizer is made.

    Raises ValueError for a rank below 1 or an alpha that is not above 0.
    """
    if rank < 1 or not alpha > 0:
        raise ValueError(f"--lora-rank {rank} --lora-alpha {alpha}: the rank is at least 1 and alpha above 0")
    assert not adapted(model), "the model has adapters already"
    model.requires_grad_(requires_grad=False)
    for name, linear in [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != HEAD]:
        assert linear.bias is None, f"{name} has a bias"
        layer = LoRALinear(linear.weight, rank=rank, alpha=alpha)
        _first_values(layer.lora_A, name=f"{name}.lora_A", seed=seed)
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, layer)


def adapted(model: nn.Module) -> dict[str, LoRALinear]:
    """The model's layers with adapters, under their names."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoRALinear)}


@torch.no_grad()
def _first_values(a_RI: nn.Parameter, *, name: str, seed: int) -> None:
    """Uniform with a standard deviation of (3 I) ** -0.5, drawn on the CPU in fp32 whatever the model's device."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
    bound = a_RI.shape[1] ** -0.5
    a_RI.copy_(torch.empty(a_RI.shape).uniform_(-bound, bound, generator=generator))
