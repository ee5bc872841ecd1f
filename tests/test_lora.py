"""Adapters: the same gradients as plain autograd, nothing kept beyond inputs, nothing changed before training."""

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from tests.tiny import batch_of, random_documents, tiny_model
from trainer.lora import LoRALinear, adapted, add_adapters
from trainer.model import Qwen3_5ForCausalLM

LINEAR = {f"linear_attn.{name}" for name in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")}
FULL = {f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
MLP = {f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")}

BATCH = batch_of(random_documents([5, 70, 33]), tail=4)


def layer(num_inputs: int, num_outputs: int, *, rank: int, dtype: torch.dtype, alpha: float = 6.0) -> LoRALinear:
    torch.manual_seed(0)
    made = LoRALinear(nn.Parameter(torch.randn(num_outputs, num_inputs, dtype=dtype)), rank=rank, alpha=alpha)
    with torch.no_grad():
        made.lora_A.normal_()
        made.lora_B.normal_()
    return made


def plain(made: LoRALinear, x: Tensor) -> Tensor:
    """The formula, left to autograd."""
    return x @ made.weight.t() + made.scale * ((x @ made.lora_A.t()) @ made.lora_B.t())


def trained(*, seed: int = 0, dtype: torch.dtype = torch.float32, rank: int = 4) -> Qwen3_5ForCausalLM:
    """A tiny model with adapters whose B is no longer 0."""
    model = tiny_model(seed=seed).to_dtype(dtype)
    add_adapters(model, rank=rank, alpha=8.0, seed=seed)
    torch.manual_seed(seed)
    with torch.no_grad():
        for adapter in adapted(model).values():
            adapter.lora_B.normal_(std=0.1)
    return model


def gradients(model: Qwen3_5ForCausalLM) -> dict[str, Tensor]:
    model.zero_grad()
    model(BATCH).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_gradients_equal_finite_differences_in_fp64() -> None:
    made = layer(7, 5, rank=3, dtype=torch.float64)
    x = torch.randn(6, 7, dtype=torch.float64, requires_grad=True)

    def call(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        out: Tensor = torch.func.functional_call(made, {"lora_A": a, "lora_B": b}, (x,))
        return out

    assert torch.autograd.gradcheck(call, (x, made.lora_A, made.lora_B))


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)]
)
def test_results_and_gradients_equal_plain_autograd(dtype: torch.dtype, tolerance: float) -> None:
    made = layer(96, 160, rank=8, dtype=dtype)
    x = torch.randn(65, 96, dtype=dtype, requires_grad=True)
    grad = torch.randn(65, 160, dtype=dtype)
    wanted: list[Tensor] = []
    exact = layer(96, 160, rank=8, dtype=dtype).double()
    for module, given in ((exact, x.detach().double().requires_grad_()), (made, x)):
        out = plain(module, given) if module is exact else module(given)
        found = [out, *torch.autograd.grad(out, [given, module.lora_A, module.lora_B], grad.to(out.dtype))]
        if module is exact:
            wanted = found
            continue
        for ours, theirs in zip(found, wanted, strict=True):
            assert ours.dtype == dtype
            assert (ours.double() - theirs).norm() <= tolerance * theirs.norm()


def test_the_frozen_weight_gets_no_gradient_even_when_it_asks() -> None:
    made = layer(8, 6, rank=2, dtype=torch.float32)
    made.weight.requires_grad_()
    made(torch.randn(3, 8, requires_grad=True)).sum().backward()
    assert made.weight.grad is None
    assert made.lora_A.grad is not None


def test_an_input_without_gradient_is_served() -> None:
    made = layer(8, 6, rank=2, dtype=torch.float32)
    x = torch.randn(3, 8)
    found = torch.autograd.grad(made(x).sum(), [made.lora_A, made.lora_B])
    for ours, theirs in zip(found, torch.autograd.grad(plain(made, x).sum(), [made.lora_A, made.lora_B]), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_only_the_input_and_its_short_product_are_kept_and_the_input_is_shared() -> None:
    first, second = (layer(64, num_outputs, rank=4, dtype=torch.bfloat16) for num_outputs in (512, 256))
    weights = {p.data_ptr() for made in (first, second) for p in made.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    x = torch.randn(100, 64, dtype=torch.bfloat16, requires_grad=True)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = first(x), second(x)
    assert sum(kept.values()) == x.nbytes + 2 * (100 * 4 * 2)
    assert outputs[0].shape == (100, 512)


def test_every_linear_of_both_layer_kinds_has_an_adapter_and_the_head_has_none() -> None:
    model = tiny_model()
    add_adapters(model, rank=4, alpha=8.0, seed=0)
    expected = {
        f"model.layers.{i}.{name}"
        for i, kind in enumerate(model.config.layer_types or [])
        for name in MLP | (LINEAR if kind == "linear_attention" else FULL)
    }
    assert set(adapted(model)) == expected
    assert not any(isinstance(m, nn.Linear) for n, m in model.named_modules() if n != "lm_head")
    wants = {name for name, p in model.named_parameters() if p.requires_grad}
    assert wants == {f"{name}.{half}" for name in expected for half in ("lora_A", "lora_B")}
    assert set(gradients(model)) == wants


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_forward_pass_equals_the_models_own_bit_for_bit(dtype: torch.dtype) -> None:
    model = tiny_model().to_dtype(dtype)
    before, names = model.logits(BATCH), {name for name, _ in model.named_parameters()}
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    add_adapters(model, rank=4, alpha=8.0, seed=0)
    assert torch.equal(model.logits(BATCH), before)
    parameters = dict(model.named_parameters())
    assert names <= parameters.keys()
    assert all(torch.equal(parameters[name], values[name]) for name in names)
    assert all(a.lora_A.dtype == a.lora_B.dtype == dtype for a in adapted(model).values())
    assert not torch.equal(trained(dtype=dtype).logits(BATCH), before)


def test_the_whole_models_gradients_equal_plain_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    model = trained()
    ours = gradients(model)
    monkeypatch.setattr(LoRALinear, "forward", plain)
    theirs = gradients(model)
    assert ours.keys() == theirs.keys()
    for name, grad in theirs.items():
        torch.testing.assert_close(ours[name], grad, rtol=1e-4, atol=1e-4 * float(grad.abs().max()), msg=name)


@pytest.mark.parametrize("num_layers", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recomputation_changes_no_bit_of_the_gradients(dtype: torch.dtype, num_layers: int) -> None:
    model = trained(dtype=dtype)
    plainly = gradients(model)
    model.set_recompute(num_layers)
    again = gradients(model)
    assert plainly.keys() == again.keys()
    assert all(torch.equal(plainly[name], again[name]) for name in plainly)


def test_first_values_depend_on_the_seed_and_the_name_alone() -> None:
    def first(seed: int, **changes: int) -> dict[str, Tensor]:
        model = tiny_model(seed=7)
        add_adapters(model, rank=4, alpha=8.0, seed=seed)
        return {name: made.lora_A.detach() for name, made in adapted(model).items()}

    once, again, other = first(1), first(1), first(2)
    assert all(torch.equal(once[name], again[name]) for name in once)
    assert not any(torch.equal(once[name], other[name]) for name in once)
    assert len({tuple(value.flatten()[:4].tolist()) for value in once.values()}) == len(once)
    up = once["model.layers.0.mlp.up_proj"]
    assert float(up.abs().max()) <= 64**-0.5
    assert float(up.std()) == pytest.approx((3 * 64) ** -0.5, rel=0.1)


@pytest.mark.parametrize(("rank", "alpha"), [(0, 32.0), (-1, 32.0), (16, 0.0), (16, float("nan"))])
def test_a_rank_or_alpha_that_trains_nothing_is_refused(rank: int, alpha: float) -> None:
    with pytest.raises(ValueError, match="--lora-rank"):
        add_adapters(tiny_model(), rank=rank, alpha=alpha, seed=0)
