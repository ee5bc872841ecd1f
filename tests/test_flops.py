"""Operations of a step: as torch counts them, and by hand; which GPUs' speed is known."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.tiny import batch_of, random_documents, tiny_config, tiny_model
from trainer.flops import hardware_flops, model_flops, peak_flops
from trainer.lora import add_adapters
from trainer.memory import Method
from trainer.sizes import SIZES, ModelConfig

LENGTHS = [40, 23]
TOKENS, SQUARED = 63, 40**2 + 23**2


def one_layer(kind: str) -> ModelConfig:
    return tiny_config(num_hidden_layers=1, layer_types=[kind])


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("kind", ["linear_attention", "full_attention"])
def test_products_with_weights_are_those_that_torch_counts(kind: str, method: Method) -> None:
    model = tiny_model(num_hidden_layers=1, layer_types=[kind])
    if method == "lora":
        add_adapters(model, rank=4, alpha=8.0, seed=0)
    # What stands before the first layer needs no gradient, but in every other layer it does.
    embeddings = model.model.embed_tokens(torch.arange(TOKENS)).detach().requires_grad_()
    in_place = {torch.ops.aten.addmm_: lambda _, a, b, **_unused: 2 * a[0] * a[1] * b[1]}  # torch does not count it
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        model.hidden(batch_of(random_documents(LENGTHS)), inputs_embeds=embeddings).sum().backward()
    counted = counter.get_flop_counts()["Global"]
    products = sum(counted.get(op, 0) for op in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_))
    config = model.config
    head = (3 if method == "full" else 2) * 2 * TOKENS * config.hidden_size * config.vocab_size
    if kind == "full_attention":
        mixing = 6 * config.num_attention_heads * config.head_dim * SQUARED
    else:
        heads, K, V = config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim
        mixing = 18 * TOKENS * heads * K * V
    found = model_flops(config, num_tokens=TOKENS, sum_squared_lengths=SQUARED, method=method, lora_rank=4)
    assert found == products + head + mixing


def test_the_head_counts_at_every_token() -> None:
    config = tiny_config(num_hidden_layers=0, layer_types=[])
    found = model_flops(config, num_tokens=10, sum_squared_lengths=100, method="full")
    assert found == 6 * 10 * config.hidden_size * config.vocab_size


def test_attention_is_half_of_what_torch_counts_without_causality() -> None:
    config = one_layer("full_attention")
    query, key, value = (
        torch.randn(1, config.num_attention_heads, 40, config.head_dim, requires_grad=True) for _ in range(3)
    )
    with FlopCounterMode(display=False) as counter:
        torch.softmax(query @ key.transpose(-1, -2), -1).matmul(value).sum().backward()
    with_document, without = (
        model_flops(config, num_tokens=40, sum_squared_lengths=n, method="full") for n in (40**2, 0)
    )
    assert with_document - without == counter.get_total_flops() / 2


def test_27b_by_hand() -> None:
    """6 operations a weight and token; 24 heads of 256; 48 heads of 128 x 128."""
    config = ModelConfig(**SIZES["27B"])
    products = 5120 * (3 * 17408) * 64 + 5120 * 248_320
    products += 16 * 5120 * (12288 + 1024 + 1024 + 6144) + 48 * 5120 * (10240 + 6144 + 6144 + 48 + 48)
    expected = 6 * products * 8192 + 16 * 6 * 24 * 256 * 8 * 1024**2 + 48 * 18 * 8192 * 48 * 128 * 128
    found = model_flops(config, num_tokens=8192, sum_squared_lengths=8 * 1024**2, method="full")
    assert found == expected
    assert found / 8192 / 1e9 == pytest.approx(155, rel=0.01)


def test_recomputed_layers_add_their_forward_pass() -> None:
    config = tiny_config()
    arguments: dict[str, Any] = {"num_tokens": 100, "sum_squared_lengths": 5000}
    full = model_flops(config, method="full", **arguments)
    head = 6 * 100 * config.hidden_size * config.vocab_size
    assert hardware_flops(config, method="full", recompute_layers=0, **arguments) == full
    everything = hardware_flops(config, method="full", recompute_layers=4, **arguments)
    assert everything == pytest.approx(full + (full - head) / 3)
    half = hardware_flops(config, method="full", recompute_layers=2, **arguments)
    assert full < half < everything


@pytest.mark.parametrize(("method", "factor"), [("full", 6), ("lora", 4)])
def test_the_head_is_computed_at_targets_alone(method: Any, factor: int) -> None:
    config = tiny_config()
    arguments: dict[str, Any] = {"num_tokens": 100, "sum_squared_lengths": 5000, "recompute_layers": 0}
    every = hardware_flops(config, method=method, **arguments)
    some = hardware_flops(config, method=method, tokens_without_head=30, **arguments)
    assert every - some == 30 * factor * config.hidden_size * config.vocab_size


def test_the_speed_of_a_cpu_is_not_known() -> None:
    assert peak_flops(torch.device("cpu"), precision="bf16", num_devices=1) is None


@pytest.mark.parametrize(
    ("name", "precision", "expected"),
    [
        ("NVIDIA H200", "bf16", 2 * 989e12),
        ("NVIDIA H100 80GB HBM3", "bf16", 2 * 989e12),
        ("NVIDIA H100 PCIe", "bf16", None),
        ("NVIDIA A100-SXM4-80GB", "bf16", None),
        ("NVIDIA H200", "fp32", None),
    ],
)
def test_the_speed_of_a_gpu_is_known_by_its_name(
    name: str, precision: Any, expected: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda"), precision=precision, num_devices=2) == expected
