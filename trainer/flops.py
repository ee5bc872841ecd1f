"""Floating-point operations of a step, and the shares of a GPU's speed that they come to: mfu and hfu.

    model_flops(config, num_tokens=8192, sum_squared_lengths=8 * 1024**2, method="full")    # what the model needs
    hardware_flops(..., recompute_layers=20)                                                # what is computed
    Arithmetic(...).figures(result, seconds)                                                # {mfu, hfu, peak_gib}

Costs: a loop over the layers; the device is not waited for.
"""

from dataclasses import dataclass

import torch

from trainer.memory import GIB, Method, linear_shapes
from trainer.sizes import ModelConfig, layer_types
from trainer.step import Precision, StepResult

PEAK = 989e12
"""Dense bf16 operations a second of one H100 or H200 (SXM), by NVIDIA's data sheets."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Arithmetic:
    """What a token costs in this run, and what its GPUs can do."""

    config: ModelConfig
    """The model."""
    method: Method
    """lora has no products for gradients of frozen weights."""
    lora_rank: int
    """Inner width of the adapters."""
    recompute_layers: int
    """Layers that are computed again in the backward pass."""
    device: torch.device
    """Where it runs."""
    peak: float | None
    """Operations a second of all GPUs together; None where it is not known, as on a CPU."""

    def figures(self, result: StepResult, elapsed: float) -> dict[str, float]:
        """Fields of a step's line; none on a CPU."""
        if self.device.type != "cuda":
            return {}
        found = {"peak_gib": round(torch.cuda.max_memory_allocated(self.device) / GIB, 2)}
        if self.peak is None:
            return found
        flops = _flops(
            self.config, num_tokens=result.num_tokens, sum_squared_lengths=result.sum_squared_lengths,
            method=self.method, lora_rank=self.lora_rank,
        )  # fmt: skip
        able = elapsed * self.peak
        done = flops.hardware(self.recompute_layers, tokens_without_head=result.num_tokens - result.num_targets)
        mfu, hfu = flops.model / able, done / able
        return {"mfu": round(mfu, 4), "hfu": round(hfu, 4), **found}


def peak_flops(device: torch.device, *, precision: Precision, num_devices: int) -> float | None:
    """Operations a second of so many GPUs like this one in bf16; None for a CPU, another GPU, or fp32."""
    if device.type != "cuda" or precision != "bf16":
        return None
    name = torch.cuda.get_device_name(device)
    known = ("H100" in name or "H200" in name) and not any(word in name for word in ("PCIe", "NVL"))
    return num_devices * PEAK if known else None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Flops:
    model: float
    """Forward and backward pass, nothing twice."""
    forward: tuple[float, ...]
    """Forward pass of each layer."""
    head: float
    """Of ``model``, the head's part for one token."""

    def hardware(self, recompute_layers: int, *, tokens_without_head: int) -> float:
        """With the first layers' forward passes again, and the head's at targets alone."""
        return self.model + sum(self.forward[:recompute_layers]) - tokens_without_head * self.head


def model_flops(
    config: ModelConfig, *, num_tokens: int, sum_squared_lengths: int, method: Method, lora_rank: int = 16
) -> float:
    """Floating-point operations of the forward and backward pass of one step, nothing counted twice.

    As in PaLM (Chowdhery et al. 2022, appendix B), but for causal attention, LoRA and the delta rule:

    products with a weight of n values: 2 n a token forward, 2 n for the gradient of the input, 2 n for that of the
    weight where it is trained (the head counts at every token, the embedding is a lookup);
    attention, H heads of K dimensions, a document of L tokens: two products over the L^2 / 2 pairs that causality
    leaves, 2 H K L^2 forward, twice that backward;
    delta rule, H heads, K x V state (Yang et al. 2024, Gated Delta Networks): the recurrence's three products,
    6 H K V a token forward, twice that backward. That it is computed in chunks, which takes more, is not counted, nor
    are norms, gates and convolutions.

    Args:
        config: the model.
        num_tokens: tokens of documents in the step.
        sum_squared_lengths: sum of the squared lengths of its documents.
        method: full, or lora with frozen weights and adapters.
        lora_rank: their inner width.
    """
    found = _flops(
        config, num_tokens=num_tokens, sum_squared_lengths=sum_squared_lengths, method=method, lora_rank=lora_rank
    )
    return found.model


def hardware_flops(
    config: ModelConfig,
    *,
    num_tokens: int,
    sum_squared_lengths: int,
    method: Method,
    recompute_layers: int,
    lora_rank: int = 16,
    tokens_without_head: int = 0,
) -> float:
    """``model_flops`` and the forward pass of the layers that are computed again (Korthikanti et al. 2022).

    Less the head at ``tokens_without_head``: this trainer's loss computes logits of targets alone. What a kernel
    computes again inside its backward pass is not counted.
    """
    found = _flops(
        config, num_tokens=num_tokens, sum_squared_lengths=sum_squared_lengths, method=method, lora_rank=lora_rank
    )
    return found.hardware(recompute_layers, tokens_without_head=tokens_without_head)


def _flops(config: ModelConfig, *, num_tokens: int, sum_squared_lengths: int, method: Method, lora_rank: int) -> _Flops:
    per_weight = 6 if method == "full" else 4
    head = 2 * num_tokens * config.hidden_size * config.vocab_size
    model, forward = head * per_weight / 2, []
    for kind in layer_types(config):
        shapes = linear_shapes(config, kind)
        weights = 2 * num_tokens * sum(i * o for i, o in shapes)
        adapters = 2 * num_tokens * lora_rank * sum(i + o for i, o in shapes) if method == "lora" else 0
        if kind == "full_attention":
            mixing = 2 * config.num_attention_heads * config.head_dim * sum_squared_lengths
        else:
            state = config.linear_key_head_dim * config.linear_value_head_dim
            mixing = 6 * num_tokens * config.linear_num_value_heads * state
        forward.append(float(weights + adapters + mixing))
        model += weights * per_weight / 2 + 3 * (adapters + mixing)
    return _Flops(
        model=model, forward=tuple(forward), head=float(per_weight * config.hidden_size * config.vocab_size)
    )  # fmt: skip
