"""Safetensors files written one tensor at a time.

Guarantees: the bytes are those of the format that `safetensors` reads; tensors may be anywhere, on a GPU too.
Costs: the largest tensor once in host memory; the library's own writer holds all of them.
"""

import json
import struct
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def save_file(tensors: Mapping[str, Tensor], path: Path, *, metadata: Mapping[str, str] | None = None) -> None:
    """Write `tensors`, the widest types first (readers want each at a multiple of its width), then by name.

    Raises OSError, which names the file, where the disk is full.
    """
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
            for tensor in tensors.values():
                # As bytes: numpy knows no bfloat16.
                flat = tensor.detach().cpu().contiguous().reshape(-1)
                file.write(flat.view(torch.uint8).numpy().data)
    except OSError as error:
        if error.filename is None:  # a write's error does not say where
            error.filename = str(path)
        raise
