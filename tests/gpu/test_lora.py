"""On a GPU: adapters in bf16 against fp64, nothing changed before training, memory and time at the 27B's width."""

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.tiny import tiny_config
from trainer import adapters, weights
from trainer.kernels import select
from trainer.lora import LoRALinear, add_adapters
from trainer.model import Qwen3_5ForCausalLM

NUM_TOKENS, WIDTH, FFN, RANK = 8192, 5120, 17_408, 16


def layer(device: torch.device, dtype: torch.dtype) -> LoRALinear:
    torch.manual_seed(0)
    weight = nn.Parameter((torch.randn(FFN, WIDTH, device=device) * 0.02).to(torch.bfloat16).to(dtype))
    made = LoRALinear(weight, rank=RANK, alpha=32.0)
    with torch.no_grad():
        made.lora_A.copy_(torch.randn(RANK, WIDTH, device=device).mul_(0.01).bfloat16())
        made.lora_B.copy_(torch.randn(FFN, RANK, device=device).mul_(0.01).bfloat16())
    return made


def test_bf16_results_and_gradients_equal_fp64s_and_the_base_is_kept(gpu: torch.device) -> None:
    made, exact = layer(gpu, torch.bfloat16), layer(gpu, torch.float64)
    x = torch.randn(1024, WIDTH, device=gpu).bfloat16().requires_grad_()
    grad = torch.randn(1024, FFN, device=gpu).bfloat16()
    found = [out := made(x), *torch.autograd.grad(out, [x, made.lora_A, made.lora_B], grad)]
    double = x.detach().double().requires_grad_()
    out = double @ exact.weight.t() + exact.scale * (double @ exact.lora_A.t()) @ exact.lora_B.t()
    wanted = [out, *torch.autograd.grad(out, [double, exact.lora_A, exact.lora_B], grad.double())]
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.dtype == torch.bfloat16
        assert (ours.double() - theirs).norm() < 0.01 * theirs.norm()
    nn.init.zeros_(made.lora_B)
    assert torch.equal(made(x), x @ made.weight.t())


def test_a_layer_keeps_its_input_and_little_else(gpu: torch.device) -> None:
    made = layer(gpu, torch.bfloat16)
    x = torch.randn(NUM_TOKENS, WIDTH, device=gpu, dtype=torch.bfloat16, requires_grad=True)
    made(x)
    before = torch.cuda.memory_allocated()
    out = made(x)
    kept = torch.cuda.memory_allocated() - before - out.nbytes
    assert kept <= NUM_TOKENS * RANK * 2 + 4096


@pytest.mark.parametrize("adapted", [False, True])
def test_time_of_a_layer(gpu: torch.device, *, adapted: bool) -> None:
    """Measured, not judged: `pytest -s` shows it."""
    made = layer(gpu, torch.bfloat16)
    x = torch.randn(NUM_TOKENS, WIDTH, device=gpu, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(NUM_TOKENS, FFN, device=gpu, dtype=torch.bfloat16)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for step in range(13):
        if step == 3:
            start.record()
        (made(x) if adapted else nn.functional.linear(x, made.weight)).backward(grad)
        made.zero_grad()
    end.record()
    end.synchronize()
    print(f"{'adapted' if adapted else 'plain, frozen'}: {start.elapsed_time(end) / 10:.2f} ms forward and backward")


def test_a_model_on_the_gpu_leaves_and_comes_back_bit_for_bit(gpu: torch.device, tmp_path: Path) -> None:
    model = Qwen3_5ForCausalLM(tiny_config(), kernels=select(torch.device("cpu"))).to_dtype(torch.bfloat16).to(gpu)
    model.init_weights(seed=0)
    source = weights.export(tmp_path / "source", model=model, tokenizer_dir=None, eos_token_ids=[1])
    again = Qwen3_5ForCausalLM(tiny_config(), kernels=model.kernels).to_dtype(torch.bfloat16).to(gpu)
    weights.load_weights(again, source)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))
    add_adapters(again, rank=RANK, alpha=32.0, seed=0)
    adapter = adapters.export(tmp_path / "adapter", model=again, source=source, rank=RANK, alpha=32.0)
    merged = weights.checkpoint_keys(adapters.merge(source, adapter, tmp_path / "merged"))
    for name, parameter in model.named_parameters():  # B is 0: merging changes nothing
        assert torch.equal(weights.read_tensor(merged[name], name), parameter.cpu())
