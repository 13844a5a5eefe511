"""Tensors in safetensors files, streamed: a table larger than the free memory is written and read in slices.

The format is the safetensors project's: eight bytes of header length, a JSON header, raw little-endian rows.
Its library reads these files; it is not used for writing because it first makes a second copy of every tensor
in memory.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from dphybrid.util.errors import UserError
from dphybrid.util.files import naming

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_SLICE_BYTES = 16 * 2**20


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write named tensors, any device; return the file's sha256 in hex. Whoever asks for it has the disk keep
    the file."""
    digest = hashlib.sha256()
    with naming(path), path.open("wb") as file:
        for piece in _pieces(tensors):
            digest.update(piece)
            file.write(piece)
    return digest.hexdigest()


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the sha256 that the file of these tensors would have."""
    digest = hashlib.sha256()
    for piece in _pieces(tensors):
        digest.update(piece)
    return digest.hexdigest()


def _pieces(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    tensors = dict(sorted(tensors.items()))  # the same tensors give the same file, however they came to be
    header: dict[str, object] = {}
    offset = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    yield len(head).to_bytes(8, "little")
    yield head
    for tensor in tensors.values():
        yield from _byte_slices(tensor)


def _byte_slices(tensor: Tensor) -> Iterator[memoryview]:
    flat = tensor.detach().reshape(-1)
    step = max(1, _SLICE_BYTES // tensor.element_size())
    for start in range(0, flat.numel(), step):
        yield flat[start : start + step].cpu().contiguous().view(torch.uint8).numpy().data


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read all tensors of a file into memory."""
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - safe_open is no dict


def tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors of a file by name."""
    return {name: tuple(entry["shape"]) for name, entry in _header(path)[0].items()}


def read_into(path: Path, name: str, target: Tensor) -> None:
    """Fill `target` (N, ...) in place from the tensor `name` of the file, slice by slice. Raises UserError
    when shapes differ."""
    entries, start = _header(path)
    shape, dtype = tuple(entries[name]["shape"]), _DTYPES[entries[name]["dtype"]]
    if shape != tuple(target.shape):
        raise UserError(
            f"{path}: {name} has shape {shape}, the model's table has {tuple(target.shape)}; was it trained "
            "on other data?"
        )
    # Plain reading: pages of a mapped file would count as this process's memory, a second table for a while.
    flat, size = target.view(-1), dtype.itemsize
    step = max(1, _SLICE_BYTES // size)
    buffer = torch.empty(min(step, max(1, flat.numel())), dtype=dtype)
    with path.open("rb", buffering=0) as file:
        file.seek(start + entries[name]["data_offsets"][0])
        for first in range(0, flat.numel(), step):
            part = buffer[: min(step, flat.numel() - first)]
            wanted = part.view(torch.uint8).numpy().data.cast("B")
            while wanted:
                count = file.readinto(wanted)
                if not count:
                    raise UserError(f"{path}: ends within {name}; use another checkpoint")
                wanted = wanted[count:]
            flat[first : first + part.numel()] = part


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """Return the entries of a file by name, and where its data starts."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        entries = json.loads(file.read(length))
    entries.pop("__metadata__", None)
    return entries, 8 + length


def mapped_tensor(path: Path, name: str, like: Tensor) -> Tensor:
    """Return the tensor `name` of the file, mapped into memory: what is read of it is loaded then, and
    writing does not reach the file.

    Raises UserError when shape or type differ from those of `like`.
    """
    entries, data = _header(path)
    entry = entries[name]
    if tuple(entry["shape"]) != tuple(like.shape) or entry["dtype"] != _NAMES[like.dtype]:
        raise UserError(
            f"{path}: {name} is {entry['dtype']} {tuple(entry['shape'])}, the model's table is "
            f"{_NAMES[like.dtype]} {tuple(like.shape)}; "
            "was it trained on other data?"
        )
    start = data + entry["data_offsets"][0]
    raw = np.memmap(path, np.uint8, "c", start, (entry["data_offsets"][1] - entry["data_offsets"][0],))
    return torch.from_numpy(raw).view(like.dtype).view(like.shape)
