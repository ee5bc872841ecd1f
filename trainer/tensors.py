"""Safetensors files written one tensor at a time.

Guarantees: the bytes are those of the format that `safetensors` reads; tensors may be anywhere, on a GPU too, or not
be there before their turn.
Costs: the largest tensor once in host memory; the library's own writer holds all of them.
"""

import json
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint64: "U64", torch.uint32: "U32",
    torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ", torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Deferred:
    """A tensor that is made when its turn has come, and again where it is wanted again."""

    dtype: torch.dtype
    shape: torch.Size
    make: Callable[[], Tensor]

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all."""
        return math.prod(self.shape) * self.itemsize


def save_file(
    tensors: Mapping[str, Tensor | Deferred], path: Path, *, metadata: Mapping[str, str] | None = None
) -> None:
    """Write `tensors`, the widest types first (readers want each at a multiple of its width), then by name.

    Raises ValueError for a dtype that such files do not have here, and OSError, which names the file, where the disk is
    full.
    """
    if unknown := [name for name, tensor in tensors.items() if tensor.dtype not in _DTYPES]:
        known = ", ".join(_DTYPES.values())
        raise ValueError(f"{unknown[0]} has dtype {tensors[unknown[0]].dtype}, which is none of {known}")
    tensors = dict(sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0])))
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # data begin at a multiple of 8
    try:
        with path.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for name, tensor in tensors.items():
                made = tensor.make() if isinstance(tensor, Deferred) else tensor
                assert (made.dtype, made.shape) == (tensor.dtype, tensor.shape), f"{name} is not what was promised"
                # As bytes: numpy knows no bfloat16.
                flat = made.detach().cpu().contiguous().reshape(-1)
                file.write(flat.view(torch.uint8).numpy().data)
    except OSError as error:
        if error.filename is None:  # a write's error does not say where
            error.filename = str(path)
        raise
