"""Estimates against what models have, what autograd keeps, and what processes really take."""

import dataclasses
import re
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3_5ForCausalLM as Reference
from transformers import Qwen3_5TextConfig

from tests.tiny import batch_of, random_documents, tiny_config
from trainer import memory
from trainer.kernels import select
from trainer.lora import add_adapters
from trainer.memory import (
    GIB,
    Workload,
    available_bytes,
    estimate,
    num_adapter_parameters,
    num_parameters,
    require,
)
from trainer.model import Qwen3_5ForCausalLM
from trainer.sizes import SIZES, ModelConfig

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[1]


def workload(config: ModelConfig, *, max_tokens: int = 1024, micro_rows: int = 1, segments: int = 1) -> Workload:
    return Workload(
        config=config, max_tokens=max_tokens, micro_rows=micro_rows, max_segments_per_row=segments, method="full",
        precision="fp32",
    )  # fmt: skip


def size(name: str) -> ModelConfig:
    return Qwen3_5TextConfig(**SIZES[name])


def part(found: Workload, name: str) -> int:
    return next(p.num_bytes for p in estimate(found).parts if p.name == name)


@pytest.mark.parametrize(
    ("name", "billions"), [("0.8B", 0.752), ("2B", 1.882), ("4B", 4.206), ("9B", 8.954), ("27B", 26.896)]
)
def test_parameters_of_the_released_sizes(name: str, billions: float) -> None:
    assert num_parameters(size(name)) / 1e9 == pytest.approx(billions, abs=5e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_those_of_the_model(tied: bool) -> None:  # noqa: FBT001
    config = tiny_config(tie_word_embeddings=tied)
    with torch.device("meta"):
        reference = Reference(config)
    reference.tie_weights()
    model = Qwen3_5ForCausalLM(config, kernels=select(CPU))
    expected = sum(p.numel() for p in model.parameters())
    assert num_parameters(config) == expected == sum(p.numel() for p in reference.parameters())


@pytest.mark.parametrize("kind", ["linear_attention", "full_attention"])
@pytest.mark.parametrize("lengths", [[256], [100, 100, 56]])
def test_activations_are_what_autograd_keeps(kind: str, lengths: list[int]) -> None:
    config = tiny_config(num_hidden_layers=2, layer_types=[kind] * 2, linear_value_head_dim=32)
    model = Qwen3_5ForCausalLM(config, kernels=select(CPU))
    model.init_weights(seed=0)
    batch = batch_of(random_documents(lengths), max_seqlen=256)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(batch)
    found = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    three_layers = part(workload(config, max_tokens=256, segments=len(lengths)), "activations")
    assert found / 2 == pytest.approx(three_layers / 3, rel=0.15)


def test_a_model_of_27b_is_refused_here_within_seconds_and_what_fits_is_named() -> None:
    begun = time.process_time()
    alternatives = {f"random:{name}": size(name) for name in SIZES}
    with pytest.raises(ValueError, match=r"this run needs about [0-9.]+ GiB") as caught:
        require(
            workload(size("27B"), max_tokens=8192), available=24 * GIB, where="this machine",
            alternatives=alternatives,
        )  # fmt: skip
    assert time.process_time() - begun < 5  # of work: a busy machine takes longer
    message = str(caught.value)
    for name in ("weights", "gradients", "Adam's moments", "activations", "loss", "26.896 B parameters"):
        assert name in message
    model, length = re.findall(r"--model (random:\S+?),? on shards packed with --max-tokens (\d+)", message)[0]
    suggested = workload(alternatives[model], max_tokens=int(length))
    assert estimate(suggested).num_bytes <= 24 * GIB
    needed = int(re.findall(r"on a machine with (\d+) GiB", message)[0])
    assert require(workload(size("27B"), max_tokens=8192), available=needed * GIB, where="", alternatives={})


def test_fewer_rows_at_a_time_are_suggested_where_they_are_enough() -> None:
    config = tiny_config()
    several = workload(config, micro_rows=8)
    available = int(estimate(dataclasses.replace(several, micro_rows=1)).num_bytes / memory.USABLE) + 1
    with pytest.raises(ValueError, match=r"--micro-rows 1 .*\(more micro-steps") as caught:
        require(several, available=available, where="this machine", alternatives={})
    assert "--max-tokens 512" in str(caught.value)


H200 = int(139.8 * GIB)
"""Free on one."""


def on_gpu(name: str, **changes: Any) -> Workload:
    fields: dict[str, Any] = {
        "config": size(name), "max_tokens": 8192, "micro_rows": 1, "max_segments_per_row": 40, "method": "full",
        "precision": "bf16", "fused": True,
    }  # fmt: skip
    return Workload(**(fields | changes))


def test_27b_with_adapters_fits_one_h200_and_two_rows_at_a_time_with_enough_recomputation() -> None:
    assert require(on_gpu("27B", method="lora"), available=H200, where="", alternatives={})
    two = on_gpu("27B", method="lora", micro_rows=2)
    with pytest.raises(ValueError, match="this run needs about") as caught:
        require(two, available=H200, where="this GPU", alternatives={})
    count = int(re.findall(r"--recompute (\d+) \(layers computed again", str(caught.value))[0])
    assert 0 < count < 64
    assert require(dataclasses.replace(two, recompute_layers=count), available=H200, where="", alternatives={})
    with pytest.raises(ValueError, match="this run needs about"):
        require(dataclasses.replace(two, recompute_layers=count - 1), available=H200, where="", alternatives={})


@pytest.mark.parametrize(
    ("name", "changes", "peak"),
    [("27B", {"method": "lora"}, 130.03), ("0.8B", {}, 21.39)],  # seen on an H200, one row of 8,192 tokens
)
def test_estimates_of_a_gpu_are_near_the_peaks_seen_there(name: str, changes: dict[str, Any], peak: float) -> None:
    assert peak <= estimate(on_gpu(name, **changes)).num_bytes / GIB <= 1.05 * peak


def test_all_of_27b_is_refused_on_one_h200_and_adapters_are_named() -> None:
    with pytest.raises(ValueError, match=r"fp32 masters +100") as caught:
        require(on_gpu("27B", recompute_layers=64), available=H200, where="this GPU", alternatives={"4B": size("4B")})
    message = str(caught.value)
    assert "--method lora" in message
    assert "--optimizer adamw_bf16" not in message  # would not fit either
    assert "--model 4B" in message


def test_9b_fits_one_h200_without_masters_and_that_is_named() -> None:
    with pytest.raises(ValueError, match="this run needs about") as caught:
        require(on_gpu("9B"), available=H200, where="this GPU", alternatives={})
    assert re.search(r"^  --optimizer adamw_bf16", str(caught.value), re.M)
    assert require(on_gpu("9B", optimizer="adamw_bf16"), available=H200, where="", alternatives={})


def test_adapters_are_counted_as_they_are() -> None:
    model = Qwen3_5ForCausalLM(tiny_config(), kernels=select(CPU))
    add_adapters(model, rank=3, alpha=6.0, seed=0)
    expected = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert num_adapter_parameters(tiny_config(), 3) == expected


def test_recomputed_layers_keep_their_inputs_alone() -> None:
    config = tiny_config()
    kept = [part(dataclasses.replace(workload(config), recompute_layers=n), "activations") for n in range(5)]
    assert all(a > b for a, b in pairwise(kept))
    assert kept[4] < kept[0] / 2


def test_optimizer_and_precision_decide_bytes_of_a_parameter() -> None:
    def per_parameter(**changes: Any) -> float:
        found = estimate(on_gpu("4B", **changes))
        state = sum(p.num_bytes for p in found.parts if p.name not in ("activations", "loss"))
        return state / num_parameters(size("4B"))

    assert per_parameter(precision="fp32") == 16
    assert per_parameter() == 16
    assert per_parameter(micro_steps=2) == 20  # their gradients are added up in fp32
    assert per_parameter(optimizer="adamw_bf16", micro_steps=2) == per_parameter(optimizer="adamw_bf16") == 8
    assert 2 < per_parameter(method="lora") < 2.5


def test_what_fits_passes() -> None:
    assert require(workload(tiny_config()), available=GIB, where="", alternatives={}).num_bytes < GIB


def test_processes_on_one_machine_share_its_memory() -> None:
    one = workload(tiny_config())
    assert estimate(dataclasses.replace(one, processes=3)).num_bytes == 3 * estimate(one).num_bytes


def test_many_short_documents_need_more() -> None:
    config = tiny_config()
    few, many = (part(workload(config, segments=n), "activations") for n in (1, 32))
    assert few * 1.2 < many


def test_free_memory_is_what_the_machine_has_left() -> None:
    total = 1024 * int(re.findall(r"MemTotal:\s+(\d+)", Path("/proc/meminfo").read_text())[0])
    assert 0 < available_bytes(CPU) <= total


def test_a_limit_of_the_container_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"/sys/fs/cgroup/memory.max": "3000\n", "/sys/fs/cgroup/memory.current": "1000\n"}
    monkeypatch.setattr(memory, "_read", lambda path: files.get(str(path), ""))
    assert available_bytes(CPU) == 2000


PROGRAM = """
import re, sys, torch
from pathlib import Path
from tests.tiny import batch_of, random_documents, tiny_config
from trainer.batches import StepBatches
from trainer.kernels import select
from trainer.model import Qwen3_5ForCausalLM
from trainer.optimizer import make_optimizer
from trainer.step import train_step
cpu = torch.device("cpu")

def peak():  # of this program alone: getrusage would begin with that of the process that started it
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

def run(tokens, **changes):
    model = Qwen3_5ForCausalLM(tiny_config(**changes), kernels=select(cpu))
    model.init_weights(seed=0)
    optimizer = make_optimizer(model, lr=1e-3, weight_decay=0.0)
    batches = StepBatches(rows=(0,), doc_ids=(0,), micro=(batch_of(random_documents([tokens])),))
    for step in (1, 2):
        train_step(model, optimizer, batches, step=step, lr=1e-3, clip=1.0, device=cpu)

run(64)  # libraries and their buffers
before = peak()
run(int(sys.argv[1]), **eval(sys.argv[2]))
print(peak() - before)
"""


@pytest.mark.parametrize(
    ("max_tokens", "changes"),
    [
        (4096, {"hidden_size": 128, "intermediate_size": 256}),  # activations
        (256, {"hidden_size": 256, "vocab_size": 120_000}),  # loss and embeddings
    ],
)
def test_the_peak_of_a_real_run_is_near_the_estimate(max_tokens: int, changes: dict[str, int]) -> None:
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(max_tokens), repr(changes)],
        cwd=ROOT, capture_output=True, text=True, check=True, env={"OMP_NUM_THREADS": "1", "PATH": ""},
    )  # fmt: skip
    expected = estimate(workload(tiny_config(**changes), max_tokens=max_tokens)).num_bytes
    assert 0.6 < int(found.stdout) / expected < 1.2, (int(found.stdout) / GIB, expected / GIB)
