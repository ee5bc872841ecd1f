"""Safetensors files written one tensor at a time, against those of the library."""

import functools
import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from trainer import tensors
from trainer.tensors import Deferred

DTYPES = sorted(tensors._DTYPES, key=str)


def example(dtype: torch.dtype, *shape: int) -> Tensor:
    """Any bits but those that a bool does not have."""
    generator = torch.Generator().manual_seed(len(str(dtype)))
    size = (*shape[:-1], shape[-1] * dtype.itemsize) if shape else (dtype.itemsize,)
    raw = torch.randint(2 if dtype == torch.bool else 256, size, generator=generator, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def bits(tensor: Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    return tensor.dtype, tensor.shape, tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_the_library_reads_every_dtype_and_shape_as_it_was(tmp_path: Path) -> None:
    made = {f"{dtype} {shape}": example(dtype, *shape) for dtype in DTYPES for shape in ((), (3, 5), (0, 2), (7,))}
    made["turned"] = example(torch.float32, 4, 6).t()
    deferred = {
        name: Deferred(dtype=tensor.dtype, shape=tensor.shape, make=functools.partial(torch.clone, tensor))
        for name, tensor in made.items()
    }
    for number, given in enumerate((made, deferred)):
        tensors.save_file(given, tmp_path / f"{number}.safetensors", metadata={"format": "pt"})
        found = load_file(tmp_path / f"{number}.safetensors")
        assert {name: bits(tensor) for name, tensor in found.items()} == {name: bits(t) for name, t in made.items()}
    whole = (tmp_path / "0.safetensors").read_bytes()
    assert whole == (tmp_path / "1.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    header = json.loads(whole[8 : 8 + length])
    begins = {name: 8 + length + header[name]["data_offsets"][0] for name in made}
    assert not [name for name, begin in begins.items() if begin % made[name].itemsize], "not at a multiple of its width"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_file_of_one_dtype_is_the_librarys_byte_for_byte(tmp_path: Path, dtype: torch.dtype) -> None:
    made = {name: example(dtype, len(name), 3) for name in ("b", "aa", "layers.10.weight", "layers.9.weight")}
    tensors.save_file(made, tmp_path / "ours", metadata={"format": "pt"})
    save_file(made, tmp_path / "theirs", {"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_a_deferred_tensor_that_is_another_than_promised_is_a_fault(tmp_path: Path) -> None:
    for dtype, shape in ((torch.bfloat16, (2,)), (torch.float32, (3,))):
        promised = Deferred(dtype=dtype, shape=torch.Size(shape), make=lambda: torch.ones(2))
        with pytest.raises(AssertionError, match="x is not what was promised"):
            tensors.save_file({"x": promised}, tmp_path / "x.safetensors")


def test_a_dtype_that_is_not_known_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"x has dtype torch\.complex128, which is none of F64, "):
        tensors.save_file({"x": torch.ones(2, dtype=torch.complex128)}, tmp_path / "x.safetensors")
    assert not list(tmp_path.iterdir())
