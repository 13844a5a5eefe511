"""Tensors of checkpoints in safetensors files, written and read slice by slice, so that a table may be larger
than the free memory.

The writer of the safetensors library is not used, because it needs whole tensors: the rows of a table that is
spread over several processes arrive in slices. Its reader is: it maps a file, so that only what is read takes
memory.

In a checkpoint, `tables/NAME.safetensors` holds all rows and states of a table. If there is a
`changed/NAME.safetensors`, it holds the rows that have changed since, with their row numbers, and takes
precedence. All reading of tables from checkpoints goes through this module.

Letters: V rows of a table, U changed ones.
"""

import json
import math
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dphybrid.util.errors import UserError
from dphybrid.util.files import naming

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL", torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64",
    torch.complex64: "C64",
}  # fmt: skip
_WRITTEN_BYTES = 2**20
"""Small enough to stay in the processor's cache from copying to checksum to writing."""

_READ_BYTES = 2**26
"""Read at once. A file is mapped anew for each slice: its pages would else count as memory of this process,
as much as a second table."""

REMEDY = "use another checkpoint, or delete this one's folder"

IDS = "row_numbers"
"""Name of the tensor of row numbers in a file of changed rows."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write named tensors from any device; return the file's CRC-32 in hex. The caller must fsync
    it."""
    crc = 0
    with naming(path), path.open("wb") as file:
        for chunk in _chunks(tensors):
            crc = zlib.crc32(chunk, crc)
            file.write(chunk)
    return f"{crc:08x}"


def _chunks(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    header: dict[str, object] = {}
    offset = 0
    # Sorted, so that the same tensors give the same file whatever their order.
    for name, tensor in sorted(tensors.items()):
        span = [offset, offset := offset + tensor.nbytes]
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}
    head = json.dumps(header, separators=(",", ":")).encode()
    # Padded, so that the tensors of a mapped file start at a multiple of eight bytes.
    head += b" " * (-len(head) % 8)
    yield len(head).to_bytes(8, "little")
    yield head
    for _, tensor in sorted(tensors.items()):
        rows, count = (tensor, tensor.shape[0]) if tensor.shape else (tensor.reshape(1), 1)
        step = max(1, _WRITTEN_BYTES * count // max(1, tensor.nbytes))
        for start in range(0, count, step):
            part = rows[start : min(start + step, count)].detach().cpu().contiguous()
            yield part.view(-1).view(torch.uint8).numpy().data


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a file with safetensors' reader. Raises UserError if it is missing or damaged, and for a tensor
    that it lacks."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: is damaged or lacks a tensor ({error}); {REMEDY}") from error


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read all tensors of a file into memory."""
    with _opened(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - safe_open is not a dict


def tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a file's tensors by name; reads its header only."""
    with _opened(path) as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def _read_into(path: Path, name: str, target: Tensor, ids_U: Tensor | None = None) -> None:
    """Fill `target` (V, ...) in place from the tensor `name` of a file, slice by slice. ids_U: fill only
    these rows (ascending). Raises UserError when shapes differ."""
    with _opened(path) as file:
        shape = tuple(file.get_slice(name).get_shape())
        if not shape:
            target.copy_(file.get_tensor(name))
            return
    wanted = tuple(target.shape) if ids_U is None else (len(ids_U), *target.shape[1:])
    if shape != wanted:
        raise UserError(
            f"{path}: {name} has shape {shape}, but the model's table has {wanted}; use the data and config "
            "it was trained with"
        )
    step = max(1, _READ_BYTES // max(1, target.dtype.itemsize * math.prod(shape[1:])))
    for first in range(0, shape[0], step):
        with _opened(path) as file:
            part = file.get_slice(name)[first : first + step].to(target.dtype)
        if ids_U is None:
            target[first : first + step] = part
        else:
            target.index_copy_(0, ids_U[first : first + step], part)


def rows_of(name: str) -> str:
    """Return the name under which a file of changed rows holds those of tensor `name`. A state that is not by
    row is there whole, under its own name."""
    return f"rows.{name}"


def table_file(checkpoint: Path, table: str) -> Path:
    """Return the path of the file with all rows of a table, as of the last full checkpoint."""
    return _file(checkpoint / "tables", table)


def changed_file(checkpoint: Path, table: str) -> Path:
    """Return the path of the file with the rows changed since; a full checkpoint has none."""
    return _file(checkpoint / "changed", table)


def _file(folder: Path, table: str) -> Path:
    # Modules of an nn.ModuleDict may be called after a user's columns, such as "price/unit".
    return folder / f"{table.replace('%', '%25').replace('/', '%2F')}.safetensors"


def changed_rows(checkpoint: Path, table: str) -> Tensor | None:
    """Return the numbers of the rows changed since the last full checkpoint, or None in a full one."""
    file = changed_file(checkpoint, table)
    if not file.is_file():
        return None
    with _opened(file) as opened:
        ids_U: Tensor = opened.get_tensor(IDS)
        return ids_U.long()


def read_table(checkpoint: Path, table: str, name: str, target: Tensor) -> None:
    """Fill `target` in place with a table's weight or state `name`, slice by slice. Raises UserError when
    shapes differ."""
    _read_into(table_file(checkpoint, table), name, target)
    file = changed_file(checkpoint, table)
    if file.is_file():
        by_row = rows_of(name) in tensor_shapes(file)
        ids_U = changed_rows(checkpoint, table) if by_row else None
        _read_into(file, rows_of(name) if by_row else name, target, ids_U)


def mapped_weight(checkpoint: Path, table: str, like: Tensor) -> Tensor:
    """Return the rows of a table mapped into memory: they are loaded when they are read, and writing to them
    does not reach the file. Only the pages of changed rows are loaded at once. Raises UserError when shape or
    type differ from those of `like`."""
    path = table_file(checkpoint, table)
    with _opened(path) as file:
        weight: Tensor = file.get_tensor("weight")
    if (weight.dtype, weight.shape) != (like.dtype, like.shape):
        raise UserError(
            f"{path}: weight is {tuple(weight.shape)} of {weight.dtype}, but the model's table is "
            f"{tuple(like.shape)} of {like.dtype}; use the data and config it was trained with"
        )
    if (ids_U := changed_rows(checkpoint, table)) is not None:
        _read_into(changed_file(checkpoint, table), rows_of("weight"), weight, ids_U)
    return weight
