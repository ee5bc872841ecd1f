"""Each torch reference against the plainest loop that defines it, in fp64 where that is possible."""

import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.tiny import LENGTHS
from trainer import kernels, reference
from trainer.batches import IGNORE_INDEX
from trainer.kernels import select
from trainer.reference import Boundaries


def boundaries(lengths: Sequence[int]) -> Boundaries:
    cu_seqlens = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)
    seq_idx = torch.repeat_interleave(torch.arange(len(lengths), dtype=torch.int32), torch.tensor(lengths))
    return SimpleNamespace(
        cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens.clone(), seq_idx=seq_idx, max_seqlen=max(lengths)
    )


def inputs(*shapes: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def assert_same_results_and_gradients(
    found: Callable[..., Tensor], naive: Callable[..., Tensor], tensors: list[Tensor]
) -> None:
    a, b = found(*tensors), naive(*tensors)
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)
    weights = torch.randn(a.shape, generator=torch.Generator().manual_seed(1), dtype=a.dtype)
    for x, y in zip(
        torch.autograd.grad((a * weights).sum(), tensors),
        torch.autograd.grad((b * weights).sum(), tensors),
        strict=True,
    ):
        torch.testing.assert_close(x, y, rtol=1e-8, atol=1e-9)


def segments(lengths: Sequence[int]) -> list[slice]:
    ends = np.cumsum([0, *lengths]).tolist()
    return [slice(start, stop) for start, stop in pairwise(ends)]


# ------------------------------------------------------------------------------------- gated delta rule


def naive_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, *, lengths: Sequence[int]
) -> Tensor:
    """Token by token, head by head."""
    out = []
    shared = value.shape[1] // key.shape[1]
    for segment in segments(lengths):
        states = [torch.zeros(key.shape[2], value.shape[2], dtype=value.dtype) for _ in range(value.shape[1])]
        for t in range(segment.start, segment.stop):
            heads = []
            for h, state in enumerate(states):
                q, k = (x[t, h // shared] / (x[t, h // shared].square().sum() + 1e-6).sqrt() for x in (query, key))
                kept = decay[t, h].exp() * state
                states[h] = kept + beta[t, h] * torch.outer(k, value[t, h] - kept.T @ k)
                heads.append(states[h].T @ q / math.sqrt(len(q)))
            out.append(torch.stack(heads))
    return torch.stack(out)


def delta_rule_inputs(num_tokens: int, *, seed: int = 0) -> list[Tensor]:
    """Two key heads of 5 dims, four value heads of 3."""
    q, k, v, decay, beta = inputs(
        (num_tokens, 2, 5), (num_tokens, 2, 5), (num_tokens, 4, 3), (num_tokens, 4), (num_tokens, 4), seed=seed
    )
    decay, beta = (-0.3 * F.softplus(decay)).detach(), beta.sigmoid().detach()
    return [q, k, v, decay.requires_grad_(), beta.requires_grad_()]


@pytest.mark.parametrize("lengths", [[1], [5, 9, 6], [64], [65, 2], [1, 2, 3, 63, 64, 65], [129, 1, 128]])
def test_the_delta_rule_equals_a_loop_over_tokens(lengths: list[int]) -> None:
    bounds = boundaries(lengths)
    assert_same_results_and_gradients(
        lambda *tensors: reference.gated_delta_rule(*tensors, bounds),
        lambda *tensors: naive_delta_rule(*tensors, lengths=lengths),
        delta_rule_inputs(sum(lengths)),
    )


def test_the_delta_rule_survives_decays_that_erase_everything() -> None:
    q, k, v, decay, beta = delta_rule_inputs(200)
    decay = torch.full_like(decay, -30.0).requires_grad_()
    out = reference.gated_delta_rule(q.float(), k.float(), v.float(), decay.float(), beta.float(), boundaries([200]))
    (gradient,) = torch.autograd.grad(out.sum(), decay)
    assert out.isfinite().all()
    assert gradient.isfinite().all()


def test_the_delta_rule_keeps_the_dtype_of_its_values() -> None:
    tensors = [x.detach().bfloat16() for x in delta_rule_inputs(70)]
    assert reference.gated_delta_rule(*tensors, boundaries([70])).dtype == torch.bfloat16


def test_the_delta_rule_computes_in_fp32_under_autocast() -> None:
    tensors = [x.detach().float() for x in delta_rule_inputs(200)]
    expected = reference.gated_delta_rule(*tensors, boundaries([130, 70]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(reference.gated_delta_rule(*tensors, boundaries([130, 70])), expected)


# ---------------------------------------------------------------------------------- conv and attention


def naive_conv(x: Tensor, weight: Tensor, *, lengths: Sequence[int]) -> Tensor:
    width = weight.shape[1]
    rows = []
    for segment in segments(lengths):
        for t in range(segment.start, segment.stop):
            taps = [(t - lag, width - 1 - lag) for lag in range(width) if t - lag >= segment.start]
            rows.append(F.silu(torch.stack([x[place] * weight[:, tap] for place, tap in taps]).sum(0)))
    return torch.stack(rows)


@pytest.mark.parametrize("lengths", [[1], [2], [1, 1, 1, 1], [1, 2, 3, 4, 5], [40, 3, 30]])
def test_the_convolution_equals_a_loop_over_tokens_and_taps(lengths: list[int]) -> None:
    bounds = boundaries(lengths)
    assert_same_results_and_gradients(
        lambda *tensors: reference.causal_conv(*tensors, bounds),
        lambda *tensors: naive_conv(*tensors, lengths=lengths),
        inputs((sum(lengths), 6), (6, 4)),
    )


def naive_attention(query: Tensor, key: Tensor, value: Tensor, *, lengths: Sequence[int]) -> Tensor:
    rows = []
    shared = query.shape[1] // key.shape[1]
    for segment in segments(lengths):
        for t in range(segment.start, segment.stop):
            past = slice(segment.start, t + 1)
            heads = []
            for h in range(query.shape[1]):
                scores = key[past, h // shared] @ query[t, h] / math.sqrt(query.shape[2])
                heads.append(scores.softmax(0) @ value[past, h // shared])
            rows.append(torch.stack(heads))
    return torch.stack(rows)


@pytest.mark.parametrize("lengths", [[1], [5, 130, 9], [1, 64, 65, 2], [30, 30, 30]])
def test_attention_equals_a_loop_over_tokens(lengths: list[int]) -> None:
    bounds = boundaries(lengths)
    num_tokens = sum(lengths)
    assert_same_results_and_gradients(
        lambda *tensors: reference.attention(*tensors, bounds),
        lambda *tensors: naive_attention(*tensors, lengths=lengths),
        inputs((num_tokens, 4, 8), (num_tokens, 2, 8), (num_tokens, 2, 8)),
    )


def without_its_weight(x: Tensor, bounds: Boundaries) -> Tensor:
    """The convolution with a weight that is not asked about."""
    (weight,) = inputs((3, 4))
    return reference.causal_conv(x, weight.detach(), bounds)


@given(lengths=st.lists(st.integers(1, 150), min_size=1, max_size=12), seed=st.integers(0, 99))
@example(lengths=[1, 1, 1], seed=0)
@settings(max_examples=25, deadline=None)
def test_no_operation_lets_a_gradient_cross_any_boundary(lengths: list[int], seed: int) -> None:
    bounds, num_tokens = boundaries(lengths), sum(lengths)
    chosen = seed % len(lengths)
    for operation, tensors in (
        (reference.gated_delta_rule, delta_rule_inputs(num_tokens, seed=seed)),
        (without_its_weight, inputs((num_tokens, 3), seed=seed)),
        (reference.attention, inputs((num_tokens, 2, 4), (num_tokens, 1, 4), (num_tokens, 1, 4), seed=seed)),
    ):
        out: Tensor = operation(*tensors, bounds)  # type: ignore[operator]
        inside = torch.zeros(num_tokens, dtype=torch.bool)
        inside[segments(lengths)[chosen]] = True
        for gradient in torch.autograd.grad(out[inside].sum(), tensors):
            assert torch.count_nonzero(gradient[~inside]) == 0


# ------------------------------------------------------------------------------------------- layouts


@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=40))
def test_every_token_has_one_slot_and_comes_back_from_it(lengths: list[int]) -> None:
    bounds = boundaries(lengths)
    x = torch.arange(1.0, sum(lengths) + 1).unsqueeze(1)
    for layout in (reference.chunk_layout(bounds, x.device), reference.length_layout(bounds, x.device)):
        slots = layout.to_slots(x)
        assert torch.equal(layout.to_tokens(slots), x)
        assert torch.count_nonzero(slots) == len(x)
    assert sum(layout.counts) == len(lengths)


@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=40))
def test_padding_for_attention_stays_below_one_step_a_segment(lengths: list[int]) -> None:
    layout = reference.length_layout(boundaries(lengths), torch.device("cpu"))
    assert len(layout.token_of_slot) - sum(lengths) < reference.LENGTH_STEP * len(lengths)
    assert all(a < b for a, b in pairwise(layout.lengths))


def test_the_worked_examples_of_the_layouts_hold() -> None:
    chunked = reference.chunk_layout(boundaries([70, 200, 5]), torch.device("cpu"))
    assert chunked.counts == (3, 2, 1, 1)
    assert chunked.slot_of_token[64:70].tolist() == list(range(256, 262))
    grouped = reference.length_layout(boundaries([5, 130, 9]), torch.device("cpu"))
    assert (grouped.counts, grouped.lengths) == ((2, 1), (9, 130))
    assert grouped.slot_of_token.tolist() == [*range(5), *range(18, 148), *range(9, 18)]


class Largest(TorchDispatchMode):
    """Records the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.num_elements = max(self.num_elements, tensor.numel())
        return out


def test_many_short_documents_cost_attention_no_square_of_the_row() -> None:
    tensors = inputs((8192, 2, 4), (8192, 1, 4), (8192, 1, 4))
    with Largest() as largest:
        reference.attention(*tensors, boundaries([32] * 256)).sum().backward()  # type: ignore[no-untyped-call]
    assert largest.num_elements < 8192 * 2 * 64


# -------------------------------------------------------------------------------- norms, SwiGLU, loss


def test_norms_and_swiglu_equal_their_definitions() -> None:
    x, gate, weight = inputs((7, 3, 8), (7, 3, 8), (8,))
    scale = (x.square().mean(-1, keepdim=True) + 0.1).sqrt()
    torch.testing.assert_close(reference.rms_norm(x, weight, 0.1), x / scale * (1 + weight))
    expected = x / scale * weight * gate * torch.sigmoid(gate)
    torch.testing.assert_close(reference.gated_rms_norm(x, gate, weight, 0.1), expected)
    torch.testing.assert_close(reference.swiglu(gate, x), gate * torch.sigmoid(gate) * x)


def test_norms_compute_in_fp32_and_answer_in_the_inputs_dtype() -> None:
    x = torch.full((1, 4), 300.0, dtype=torch.float16)  # its square overflows fp16
    for found in (
        reference.rms_norm(x, torch.zeros(4), 1e-6),
        reference.gated_rms_norm(x, torch.full_like(x, 20.0), torch.full((4,), 0.05), 1e-6),
    ):
        assert found.dtype == torch.float16
        torch.testing.assert_close(found, torch.ones_like(x), rtol=2e-3, atol=0)


def loss_inputs() -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight = inputs((50, 8), (31, 8))
    labels = torch.randint(0, 31, (50,), generator=torch.Generator().manual_seed(0))
    labels[::3] = IGNORE_INDEX
    return hidden, weight, labels


@pytest.mark.parametrize("block", [1, 31 * 7, 2**26])
def test_the_loss_and_its_gradients_equal_torchs_for_any_block(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "LOSS_BLOCK", block)
    hidden, weight, labels = loss_inputs()
    assert_same_results_and_gradients(
        lambda h, w: reference.loss(h, w, labels, int((labels != IGNORE_INDEX).sum())),
        lambda h, w: F.cross_entropy(h @ w.T, labels, reduction="sum", ignore_index=IGNORE_INDEX),
        [hidden, weight],
    )


def test_the_loss_never_makes_logits_of_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "LOSS_BLOCK", 4096)
    hidden, weight = torch.randn(1024, 4, requires_grad=True), torch.randn(512, 4, requires_grad=True)
    with Largest() as largest:
        reference.loss(hidden, weight, torch.arange(1024) % 512, 1024).backward()  # type: ignore[no-untyped-call]
    assert largest.num_elements <= 4096


def test_the_loss_without_targets_is_zero_with_zero_gradients() -> None:
    hidden, weight, labels = loss_inputs()
    total = reference.loss(hidden, weight, torch.full_like(labels, IGNORE_INDEX), 0)
    assert total.item() == 0.0
    assert all(torch.count_nonzero(g) == 0 for g in torch.autograd.grad(total, [hidden, weight]))


def test_the_loss_is_fp32_and_finite_for_bf16_and_for_huge_logits() -> None:
    hidden = torch.full((3, 4), 1e3, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(9, 4, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    total = reference.loss(hidden, weight, torch.tensor([1, 2, 3]), 3)
    total.backward()  # type: ignore[no-untyped-call]
    assert total.dtype == torch.float32
    assert total.isfinite()
    assert hidden.grad is not None
    assert hidden.grad.dtype == torch.bfloat16
    assert hidden.grad.isfinite().all()


def test_evaluation_computes_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, labels = loss_inputs()
    with torch.no_grad():
        total = reference.loss(hidden, weight, labels, int((labels != IGNORE_INDEX).sum()))
    assert not total.requires_grad
    expected = F.cross_entropy(hidden @ weight.T, labels, reduction="sum")
    torch.testing.assert_close(total, expected.detach())


# ----------------------------------------------------------------------------------------- the table


def test_a_cpu_gets_the_references_and_the_table_says_why() -> None:
    chosen = select(torch.device("cpu"))
    assert [choice.operation for choice in chosen.table] == list(kernels.TABLE)
    assert {choice.implementation for choice in chosen.table} == {"torch reference"}
    assert all(choice.version and choice.why for choice in chosen.table)


def test_references_on_a_gpu_are_refused_with_the_packages_and_the_flag() -> None:
    with pytest.raises(ValueError, match="--accept-slow-kernels") as caught:
        select(torch.device("cuda"))
    for operation in kernels.TABLE:
        assert f"  {operation}: " in str(caught.value)
    for package in ("flash-qla", "flash-linear-attention", "causal-conv1d"):
        assert f"{package} is not installed" in str(caught.value)
    assert select(torch.device("cuda"), accept_slow=True).table


def test_the_preferred_implementation_wins_and_a_passed_over_one_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def fused(*, obstacle: str | None) -> kernels.Implementation:
        return kernels.Implementation(
            name="fast", fused=True, obstacle=lambda device: obstacle, load=lambda: (torch.mul, "9.9")
        )

    slow = kernels.TABLE["swiglu"]
    monkeypatch.setitem(kernels.TABLE, "swiglu", (fused(obstacle=None), *slow))
    assert select(torch.device("cpu")).swiglu is torch.mul
    monkeypatch.setitem(kernels.TABLE, "swiglu", (fused(obstacle="not importable"), *slow))
    chosen = select(torch.device("cuda"), accept_slow=True)
    assert chosen.swiglu is reference.swiglu
    assert next(choice.why for choice in chosen.table if choice.operation == "swiglu").startswith(
        "fast: not importable"
    )


def test_a_slower_fused_kernel_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def fused(name: str, *, obstacle: str | None) -> kernels.Implementation:
        return kernels.Implementation(
            name=name, fused=True, obstacle=lambda device: obstacle, load=lambda: (torch.mul, "9.9")
        )

    first, second = fused("fast", obstacle="not importable"), fused("less fast", obstacle=None)
    monkeypatch.setitem(kernels.TABLE, "swiglu", (first, second, *kernels.TABLE["swiglu"]))
    assert select(torch.device("cuda"), accept_slow=True).warnings() == [
        "swiglu runs on less fast, slower than the first choice (fast: not importable)"
    ]
    monkeypatch.setitem(kernels.TABLE, "swiglu", (second, *kernels.TABLE["swiglu"]))
    assert select(torch.device("cuda"), accept_slow=True).warnings() == []


@pytest.mark.parametrize(
    ("version", "wrong"),
    [
        ("3.3.1", False),
        ("3.4.0", True),
        ("3.6.0+git1234abcd", True),
        ("3.7.0rc1", True),
        ("3.7", True),
        ("3.7.1", False),
    ],
)
def test_any_spelling_of_tritons_version_is_read(monkeypatch: pytest.MonkeyPatch, version: str, wrong: bool) -> None:  # noqa: FBT001
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(kernels, "_version", lambda package: version)
    assert (kernels._wrong_gradients(torch.device("cuda")) is not None) is wrong


def test_a_package_from_a_distribution_of_another_name_has_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fla", SimpleNamespace(__version__="0.6.0"))  # as fla-core brings it
    monkeypatch.setitem(sys.modules, "flash_qla", SimpleNamespace())
    assert kernels._version("fla") == "0.6.0"
    assert kernels._version("flash_qla") == "unknown"


def test_an_old_gpu_is_told_why_and_not_by_a_kernel_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    found = kernels.TABLE["attention"][0].obstacle(torch.device("cuda"))
    assert found == "needs compute capability 8, this device has 7.5"


@pytest.mark.filterwarnings("default")  # the compiler's own deprecations
def test_no_row_length_runs_uncompiled() -> None:
    from trainer import fused  # noqa: F401 - it raises torch's limit

    graphs: list[object] = []

    def backend(graph: Any, example: object) -> Any:
        graphs.append(graph)
        return graph.forward

    norm = torch.compile(reference.rms_norm, dynamic=False, backend=backend)
    for num_tokens in range(16, 28):
        norm(torch.zeros(num_tokens, 8), torch.zeros(8), 1e-6)
    torch.compiler.reset()
    assert len(graphs) == 12


def test_a_cpu_machine_imports_no_gpu_package() -> None:
    code = (
        "import sys, torch; from trainer.kernels import select; select(torch.device('cpu'));"
        "print([m for m in ('triton', 'fla', 'causal_conv1d', 'flash_qla', 'torch._inductor') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_lengths_around_the_chunk_are_covered() -> None:
    assert {reference.CHUNK - 1, reference.CHUNK, reference.CHUNK + 1} <= set(LENGTHS)
