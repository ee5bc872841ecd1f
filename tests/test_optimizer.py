"""AdamW with fp32 masters against torch's own; the memory-saving one through a stand-in for torchao."""

import copy
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.tiny import tiny_model
from trainer import optimizer as module
from trainer.lora import add_adapters
from trainer.optimizer import BETAS, EPSILON, AdamW, make_optimizer, masters


def toy(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 30))
    return model.to(dtype)


def give_gradients(model: nn.Module, *, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def updated(model: nn.Module, optimizer: torch.optim.Optimizer, *, first: int = 1, last: int = 4) -> nn.Module:
    for step in range(first, last + 1):
        give_gradients(model, seed=step)
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / step
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return model


def torch_adamw(model: nn.Module) -> torch.optim.AdamW:
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.1, betas=BETAS, eps=EPSILON)


@pytest.mark.parametrize("block", [8, 2**28])
def test_fp32_updates_are_those_of_torch_whatever_the_block(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", block)
    model, other = toy(torch.float32), toy(torch.float32)
    updated(model, make_optimizer(model, lr=0.1, weight_decay=0.1))
    updated(other, torch_adamw(other))
    for found, expected in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("block", [8, 2**28])
def test_bf16_weights_follow_a_run_in_fp32_and_equal_their_rounded_masters(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BLOCK", block)
    model = toy(torch.bfloat16)
    wide = copy.deepcopy(model).float()
    optimizer = make_optimizer(model, lr=0.1, weight_decay=0.1)
    reference = make_optimizer(wide, lr=0.1, weight_decay=0.1)
    for step in range(1, 5):
        give_gradients(model, seed=step)
        for narrow, parameter in zip(model.parameters(), wide.parameters(), strict=True):
            assert narrow.grad is not None
            parameter.grad = narrow.grad.float()
        optimizer.step()
        reference.step()
    found = masters(optimizer)
    for narrow, parameter in zip(model.parameters(), wide.parameters(), strict=True):
        assert torch.equal(found[narrow], parameter)
        assert torch.equal(narrow, parameter.bfloat16())
        assert optimizer.state[narrow]["exp_avg"].dtype == torch.float32


def test_updates_too_small_for_bf16_add_up_in_the_master() -> None:
    model = nn.Linear(1, 1, bias=False).bfloat16()
    nn.init.ones_(model.weight)
    optimizer = make_optimizer(model, lr=1e-4, weight_decay=0.0)
    values = []
    for _ in range(100):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        values.append(model.weight.item())
    assert values[0] == 1.0  # 0.9999 rounds to 1
    assert values[-1] == pytest.approx(0.99, abs=4e-3)


def test_a_state_taken_over_goes_on_bit_by_bit() -> None:
    model = toy(torch.bfloat16)
    optimizer = make_optimizer(model, lr=0.1, weight_decay=0.1)
    updated(model, optimizer, last=2)
    other = copy.deepcopy(model)
    resumed = make_optimizer(other, lr=7.0, weight_decay=0.1)
    resumed.load_state_dict(optimizer.state_dict())
    updated(model, optimizer, first=3)
    updated(other, resumed, first=3)
    for found, expected in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(found, expected)
        for kind, tensor in optimizer.state[expected].items():
            assert torch.equal(resumed.state[found][kind], tensor), kind
    assert [g["num_updates"] for g in resumed.param_groups] == [4, 4]


def test_a_state_taken_over_is_a_copy() -> None:
    model = toy(torch.bfloat16)
    optimizer = make_optimizer(model, lr=0.1, weight_decay=0.1)
    updated(model, optimizer, last=1)
    before = {id(p): copy.deepcopy(state) for p, state in optimizer.state.items()}
    other = copy.deepcopy(model)
    resumed = make_optimizer(other, lr=0.1, weight_decay=0.1)
    resumed.load_state_dict(optimizer.state_dict())
    updated(other, resumed, first=2)
    for parameter, state in optimizer.state.items():
        assert all(torch.equal(before[id(parameter)][kind], tensor) for kind, tensor in state.items())


def test_a_parameter_without_a_gradient_stays() -> None:
    model = toy(torch.float32)
    optimizer = make_optimizer(model, lr=0.1, weight_decay=0.1)
    give_gradients(model, seed=1)
    still = next(model.parameters())
    still.grad = None
    before = still.detach().clone()
    optimizer.step()
    assert torch.equal(still, before)
    assert len(optimizer.state) == 3


def test_matrices_decay_and_vectors_do_not() -> None:
    model = tiny_model()
    optimizer = make_optimizer(model, lr=1e-3, weight_decay=0.1)
    names = {id(p): name for name, p in model.named_parameters()}
    decay = {names[id(p)]: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decay.keys() == set(names.values())
    for name, value in decay.items():
        still = name.endswith(("norm.weight", "layernorm.weight", "A_log", "dt_bias"))
        assert value == (0.0 if still else 0.1), name


def test_only_what_is_trained_has_a_place_in_it() -> None:
    model = tiny_model()
    add_adapters(model, rank=2, alpha=4.0, seed=0)
    optimizer = make_optimizer(model, lr=1e-3, weight_decay=0.1)
    trained = {id(p) for name, p in model.named_parameters() if "lora_" in name}
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == trained


def test_parameters_kept_in_fp32_have_no_master() -> None:
    model = tiny_model().to_dtype(torch.bfloat16)
    optimizer = make_optimizer(model, lr=1e-3, weight_decay=0.0)
    give_gradients(model, seed=0)
    optimizer.step()
    for parameter, state in optimizer.state.items():
        assert ("master" in state) == (parameter.dtype == torch.bfloat16)


def test_a_parameter_is_cut_into_blocks_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", 10)
    sizes = [4, 3, 12]
    parameters = [torch.zeros(size) for size in sizes]
    found = [[(p.numel(), s.start, s.stop) for p, s in block] for block in module._blocks(parameters)]
    assert found == [[(4, 0, 4), (3, 0, 3)], [(12, 0, 10)], [(12, 10, 12)]]


# ----------------------------------------------------------------------------------------- from a library


class FakeTorchao(torch.optim.Optimizer):
    """What matters of torchao's: the learning rate is a tensor, moments are as narrow as the parameter."""

    def __init__(self, groups: Any, *, lr: float, betas: Any, eps: float, bf16_stochastic_round: bool) -> None:
        assert bf16_stochastic_round
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})
        for group in self.param_groups:
            group["lr"] = torch.tensor(group["lr"])

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            assert isinstance(group["lr"], Tensor)
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=torch.tensor(0.0), exp_avg=torch.zeros_like(p))
                state["step"] += 1
                state["exp_avg"].lerp_(p.grad, 0.1)
                p.sub_(group["lr"] * state["exp_avg"])


@pytest.fixture
def torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = types.ModuleType("torchao.optim")
    fake._AdamW = FakeTorchao  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchao", types.ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, "torchao.optim", fake)


@pytest.mark.usefixtures("torchao")
def test_the_librarys_optimizer_takes_rates_as_numbers_and_resumes_bit_by_bit() -> None:
    model = toy(torch.bfloat16)
    optimizer = make_optimizer(model, lr=0.1, weight_decay=0.1, kind="adamw_bf16")
    updated(model, optimizer, last=2)
    assert [type(group["lr"]) for group in optimizer.param_groups] == [float, float]
    assert not masters(optimizer)
    other = copy.deepcopy(model)
    resumed = make_optimizer(other, lr=7.0, weight_decay=0.1, kind="adamw_bf16")
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    before = [p.detach().clone() for p in model.parameters()]
    updated(model, optimizer, first=3)
    updated(other, resumed, first=3)
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters(), strict=True))
    assert all(state["step"] == 4 for state in resumed.state.values())


def test_without_the_library_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(ValueError, match=r"torchao.*pip install '\.\[lowbit\]'"):
        make_optimizer(toy(torch.bfloat16), lr=0.1, weight_decay=0.0, kind="adamw_bf16")


def test_the_default_is_the_one_with_masters() -> None:
    assert isinstance(make_optimizer(toy(torch.float32), lr=0.1, weight_decay=0.0), AdamW)
