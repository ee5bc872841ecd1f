"""Tests of tests/gpu that any device can run, run here: what is skipped in CI would go stale unseen."""

from pathlib import Path

import pytest
import torch

from tests.gpu import test_fused as fused
from tests.gpu import test_lora as lora
from tests.training import make_base

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("base"))


@pytest.mark.parametrize(
    "test",
    [
        fused.test_a_resumed_run_goes_on_with_the_same_rows_and_nearly_the_same_losses,
        fused.test_adapters_train_with_layers_recomputed,
    ],
    ids=lambda test: test.__name__,
)
def test_whole_runs(test, base: Path, tmp_path: Path) -> None:
    test(CPU, base / "packed", f"random:{base / 'tiny.json'}", tmp_path)


def test_a_model_leaves_and_comes_back(tmp_path: Path) -> None:
    lora.test_a_model_on_the_gpu_leaves_and_comes_back_bit_for_bit(CPU, tmp_path)
