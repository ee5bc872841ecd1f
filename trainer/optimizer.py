"""The optimizers: AdamW with fp32 masters, and one that saves memory by rounding stochastically.

    optimizer = make_optimizer(model, lr=1e-5, weight_decay=0.0)                      # adamw
    optimizer = make_optimizer(model, lr=1e-5, weight_decay=0.0, kind="adamw_bf16")   # from torchao

adamw keeps its moments in fp32, and for every parameter that is narrower an fp32 master, which is what is updated; the
parameter is the master rounded to nearest. adamw_bf16 keeps neither: its moments are as narrow as the parameters,
and an update too small for bf16 happens with the probability that makes it right on average.

Guarantees: a parameter equals its rounded master after every step, so a checkpoint needs the master alone; what a
step does depends on parameters, gradients and state only (adamw_bf16: on torch's generator too).
Costs: bytes for each trained parameter beside it and its gradient: adamw 12 with bf16 parameters, 8 with fp32 ones;
adamw_bf16 4. While adamw works, fp32 gradients of `BLOCK` values exist, never of all.
"""

import importlib
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

OptimizerKind = Literal["adamw", "adamw_bf16"]

BETAS = (0.9, 0.95)
"""Decay of Adam's two moments, as is usual for language models."""

EPSILON = 1e-8
"""Added to the root of Adam's second moment."""

BLOCK = 2**28
"""Values that one call updates: 1 GiB of fp32 gradients."""

MASTER = "master"
"""Name of the fp32 master in the optimizer's state."""


def make_optimizer(
    model: nn.Module, *, lr: float, weight_decay: float, kind: OptimizerKind = "adamw"
) -> torch.optim.Optimizer:
    """An optimizer over what the model trains, in two groups.

    Matrices decay; norms, biases, A_log, dt_bias, all of one dimension, do not.

    Raises:
        ValueError: for adamw_bf16 without torchao, naming it.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return AdamW(groups, lr=lr) if kind == "adamw" else StochasticAdamW(groups, lr=lr)


class AdamW(torch.optim.Optimizer):
    """AdamW whose moments and master weights are fp32, whatever the parameters and gradients are.

    State of a parameter: exp_avg, exp_avg_sq, and master where it is narrower than fp32. Each group counts its
    num_updates.
    """

    def __init__(self, groups: list[dict[str, Any]], *, lr: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": BETAS, "eps": EPSILON, "num_updates": 0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient. No call waits for the device."""
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            group["num_updates"] += 1
            for parameter in parameters:
                if not self.state[parameter]:
                    self._begin(parameter)
            for block in _blocks(parameters):
                self._update(group, block)

    def _begin(self, parameter: Tensor) -> None:
        assert parameter.is_contiguous(), "a flat view of it would be a copy, and the update lost"
        state = self.state[parameter]
        wide = torch.promote_types(parameter.dtype, torch.float32)
        if parameter.dtype != wide:
            state[MASTER] = parameter.detach().to(wide)
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros_like(parameter, dtype=wide, memory_format=torch.contiguous_format)

    def _update(self, group: dict[str, Any], block: list[tuple[Tensor, slice]]) -> None:
        def part(tensor: Tensor, piece: slice) -> Tensor:
            return tensor.detach().reshape(-1)[piece]

        def states(name: str) -> list[Tensor]:
            return [part(self.state[parameter][name], piece) for parameter, piece in block]

        gradients = [part(parameter.grad, piece) for parameter, piece in block if parameter.grad is not None]
        targets = [part(parameter, piece) for parameter, piece in block]
        narrow = MASTER in self.state[block[0][0]]
        masters = states(MASTER) if narrow else targets
        if narrow:
            wide = [torch.empty_like(master) for master in masters]
            torch._foreach_copy_(wide, gradients)
            gradients = wide
        num_updates = torch.full((), float(group["num_updates"]), device=masters[0].device)
        torch._fused_adamw_(
            masters, gradients, states("exp_avg"), states("exp_avg_sq"), [], [num_updates] * len(block),
            lr=float(group["lr"]), beta1=group["betas"][0], beta2=group["betas"][1],
            weight_decay=group["weight_decay"], eps=group["eps"], amsgrad=False, maximize=False,
        )  # fmt: skip
        if narrow:
            torch._foreach_copy_(targets, masters)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state as it is: torch's own would round masters and moments to the parameters' dtype."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        self.state.clear()
        for number, kinds in state_dict["state"].items():
            parameter = parameters[number]
            self.state[parameter] = {
                name: value.detach().to(parameter.device, copy=True) for name, value in kinds.items()
            }
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({name: value for name, value in saved.items() if name != "params"})


def _blocks(parameters: list[Tensor]) -> Iterator[list[tuple[Tensor, slice]]]:
    """Parameters cut and gathered into blocks of at most BLOCK values of one dtype, each as (parameter, flat slice).

    Worked example, BLOCK = 10, sizes 4, 3, 12: [4, 3], [10], [2].
    """
    for dtype in sorted({parameter.dtype for parameter in parameters}, key=str):
        block: list[tuple[Tensor, slice]] = []
        filled = 0
        for parameter in (p for p in parameters if p.dtype == dtype):
            for start in range(0, parameter.numel(), BLOCK):
                piece = slice(start, min(start + BLOCK, parameter.numel()))
                if block and filled + piece.stop - start > BLOCK:
                    yield block
                    block, filled = [], 0
                block.append((parameter, piece))
                filled += piece.stop - start
        if block:
            yield block


class StochasticAdamW(torch.optim.Optimizer):
    """torchao's AdamW with stochastic rounding, its learning rate a number as everyone else's."""

    def __init__(self, groups: list[dict[str, Any]], *, lr: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": BETAS, "eps": EPSILON})
        try:
            module = importlib.import_module("torchao.optim")
        except ImportError as error:
            raise ValueError(
                f"--optimizer adamw_bf16 is torchao's, which cannot be imported ({error}): "
                "pip install '.[lowbit]', or use --optimizer adamw"
            ) from error
        self._inner: Any = module._AdamW(
            [dict(group) for group in groups], lr=lr, betas=BETAS, eps=EPSILON, bf16_stochastic_round=True
        )
        self.state = self._inner.state

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; each shape is compiled once, in the first step."""
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner["lr"].fill_(group["lr"])
        self._inner.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state."""
        super().load_state_dict(state_dict)
        self._inner.state = self.state


def masters(optimizer: torch.optim.Optimizer) -> dict[Tensor, Tensor]:
    """The fp32 master of each parameter that has one by now."""
    return {parameter: state[MASTER] for parameter, state in optimizer.state.items() if MASTER in state}
