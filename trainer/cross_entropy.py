"""Softmax cross entropy and its gradient, in place over logits in device memory: one program a token, two passes.

Imports triton: for `trainer.fused` on a GPU alone.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192
"""Logits that one program reads at a time."""


@triton.jit  # type: ignore[untyped-decorator]
def _cross_entropy(logits_ptr, labels_ptr, losses_ptr, num_cols, WITH_GRADIENT: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * num_cols
    label = tl.load(labels_ptr + row)
    at_label = tl.load(logits_ptr + label).to(tl.float32)
    # Largest logit and sum of exponentials in one pass: the sum is rescaled whenever a larger one appears.
    largest = float("-inf")
    total = 0.0
    for start in range(0, num_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + cols, mask=cols < num_cols, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(largest, tl.max(x, 0))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(x - larger), 0)
        largest = larger
    tl.store(losses_ptr + row, largest + tl.log(total) - at_label)
    if WITH_GRADIENT:
        for start in range(0, num_cols, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            x = tl.load(logits_ptr + cols, mask=cols < num_cols, other=float("-inf")).to(tl.float32)
            gradient = tl.exp(x - largest) / total - tl.where(cols == label, 1.0, 0.0)
            tl.store(logits_ptr + cols, gradient.to(logits_ptr.dtype.element_ty), mask=cols < num_cols)


def cross_entropy_(logits_NV: Tensor, labels_N: Tensor, losses_N: Tensor, *, with_gradient: bool) -> None:
    """Write every token's loss into ``losses_N`` (fp32) and, if asked, the gradient of their sum over the logits.

    Args:
        logits_NV: contiguous; overwritten where a gradient is asked for.
        labels_N: int64, each 0 to V - 1.
        losses_N: fp32, overwritten.
        with_gradient: whether a backward pass will come.
    """
    assert logits_NV.is_contiguous()
    assert labels_N.dtype == torch.int64
    num_rows, num_cols = logits_NV.shape
    _cross_entropy[(num_rows,)](
        logits_NV, labels_N, losses_N, num_cols, WITH_GRADIENT=with_gradient, BLOCK=BLOCK, num_warps=16
    )
