"""These tests need a CUDA device and the extra `gpu`; elsewhere they are skipped, and say so."""

import pytest
import torch


@pytest.fixture(scope="session")
def gpu() -> torch.device:
    """The device. Skips where there is none."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here: the fused kernels cannot run")
    return torch.device("cuda")
