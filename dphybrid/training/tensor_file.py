"""Tensors in safetensors files, in slices: a table larger than the free memory is written and read.

Its library's writer is not used: it wants whole tensors, and rows that lie with several processes come slice
by slice.

A table's rows and states in a checkpoint: `tables/NAME.safetensors` holds all of them, and where there is a
`changed/NAME.safetensors`, that holds those rows that have changed since, with their numbers. Everything that
reads tables of checkpoints does it here. Letters: V rows of a table, U changed ones, D width.
"""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from dphybrid.embedding.native import check_when_read
from dphybrid.util.digests import BLOCK, BlockSums, block_sum
from dphybrid.util.errors import UserError
from dphybrid.util.files import naming

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_SLICE_BYTES = 2**20
"""Stays in a processor's cache between copying, summing and writing."""

REMEDY = "use another checkpoint, or delete this one's folder"

IDS = "row_numbers"
"""Name of the changed rows' numbers in their file."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write named tensors, any device; return the file's `BlockSums` in hex. Whoever asks for it has the disk
    keep the file."""
    sums = BlockSums()
    with naming(path), path.open("wb") as file:
        for piece in _pieces(tensors):
            sums.update(piece)
            file.write(piece)
    return sums.hexdigest()


def _pieces(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    header: dict[str, object] = {}
    offset = 0
    # Sorted: the same tensors give the same file, however they came to be.
    for name, tensor in sorted(tensors.items()):
        place = [offset, offset := offset + tensor.nbytes]
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": place}
    head = json.dumps(header, separators=(",", ":")).encode()
    # So that mapped tensors begin at a multiple of eight bytes.
    head += b" " * (-len(head) % 8)
    yield len(head).to_bytes(8, "little")
    yield head
    for _, tensor in sorted(tensors.items()):
        flat = tensor.detach().reshape(-1)
        step = max(1, _SLICE_BYTES // flat.element_size())
        for start in range(0, flat.numel(), step):
            yield flat[start : start + step].cpu().contiguous().view(torch.uint8).numpy().data


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read all tensors of a file into memory."""
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - safe_open is not a dict


def tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors of a file by name."""
    return {name: tuple(entry["shape"]) for name, entry in _header(path)[0].items()}


def _stored_tensor(path: Path, name: str) -> Tensor:
    """Read one tensor of a file into memory."""
    with safe_open(path, framework="pt") as file:
        tensor: Tensor = file.get_tensor(name)
        return tensor


def _read_into(path: Path, name: str, target: Tensor, ids_U: Tensor | None = None) -> None:
    """Fill `target` (V, ...) in place from the tensor `name` of a file, slice by slice, or its rows ids_U
    (ascending). Raises UserError when shapes differ."""
    entries, start = _header(path)
    shape = tuple(entries[name]["shape"])
    if ids_U is None and shape != tuple(target.shape):
        raise UserError(
            f"{path}: {name} has shape {shape}, the model's table has {tuple(target.shape)}; was it trained "
            "on other data?"
        )
    if not shape:
        target.copy_(_stored_tensor(path, name))
        return
    dtype = _DTYPES[entries[name]["dtype"]]
    row_bytes = dtype.itemsize * math.prod(shape[1:])
    step = max(1, _SLICE_BYTES // max(1, row_bytes))
    with path.open("rb") as file:
        file.seek(start + entries[name]["data_offsets"][0])
        for first in range(0, shape[0], step):
            last = min(first + step, shape[0])
            # Not mapped: its pages would count as this process's memory, a second table for a while.
            raw = np.fromfile(file, np.uint8, (last - first) * row_bytes)
            part = torch.from_numpy(raw).view(dtype).view(last - first, *shape[1:]).to(target.dtype)
            if ids_U is None:
                target[first:last] = part
            else:
                target.index_copy_(0, ids_U[first:last], part)


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """Return the entries of a file by name, and where its data starts."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        entries = json.loads(file.read(length))
    entries.pop("__metadata__", None)
    return entries, 8 + length


def _mapped_tensor(path: Path, name: str, like: Tensor, sums: str) -> Tensor:
    """Return the tensor `name` (V, ...) of the file, mapped into memory. The first lookup that reads a block
    of the file checks it, and raises UserError when it is damaged (`embedding.native`).

    Writing does not reach the file. sums: of `BlockSums`. Raises UserError when shape or type differ from
    those of `like`, and for a damaged header.
    """
    blocks = _Blocks(path, sums)
    blocks.check(np.array([0, path.stat().st_size - 1]))  # the header, and that nothing is cut off
    entries, data = _header(path)
    entry = entries[name]
    there, wanted = (entry["dtype"], *entry["shape"]), (_NAMES[like.dtype], *like.shape)
    if there != wanted:
        raise UserError(
            f"{path}: {name} is {there}, the model's table is {wanted}; was it trained on other data?"
        )
    start, stop = (data + offset for offset in entry["data_offsets"])
    # Copy on write: changed rows are laid over it, the file stays as it is.
    raw = np.memmap(path, np.uint8, "c", start, (stop - start,))
    row_bytes = len(raw) // like.shape[0]

    def check_read(ids_N: Tensor) -> None:
        first_N = start + row_bytes * ids_N.numpy()
        # A row may begin in one block and end in a later one.
        for within in (*range(0, row_bytes, BLOCK), row_bytes - 1):
            blocks.check(first_N + within)

    found = torch.from_numpy(raw).view(like.dtype).view(like.shape)
    # As long as `raw` is in memory, which `found` holds.
    check_when_read(found, check_read, raw)
    return found


class _Blocks:
    """The blocks of a file, each of which is compared with its sum when it is first read."""

    def __init__(self, path: Path, sums: str) -> None:
        self._path, self._wanted = path, np.frombuffer(bytes.fromhex(sums), ">u4")
        size = path.stat().st_size if path.is_file() else 0
        if -(-size // BLOCK) != len(self._wanted):
            raise UserError(f"{path}: is damaged (it has {size:,} bytes); {REMEDY}")
        self._content = np.memmap(path, np.uint8, "r")
        self._whole = np.zeros(len(self._wanted), bool)

    def check(self, places_N: np.ndarray) -> None:
        """Raise UserError when the block under one of these bytes is damaged."""
        # Once all are checked, a lookup costs nothing more.
        if self._whole.all():
            return
        blocks_N = places_N // BLOCK
        for block in np.unique(blocks_N[~self._whole[blocks_N]]).tolist():
            start, end = block * BLOCK, (block + 1) * BLOCK
            if block_sum(self._content[start:end].data) != self._wanted[block]:
                raise UserError(f"{self._path}: is damaged (in bytes {start:,} to {end:,}); {REMEDY}")
            self._whole[block] = True


def rows_of(name: str) -> str:
    """Return the name of the changed rows of a tensor in their file; under the name itself it is there
    whole."""
    return f"rows.{name}"


def table_file(checkpoint: Path, table: str) -> Path:
    """Return the file that holds all rows of a table, as they were at the last full checkpoint."""
    return checkpoint / "tables" / f"{table}.safetensors"


def changed_file(checkpoint: Path, table: str) -> Path:
    """Return the file of the rows changed since, which a full checkpoint has not."""
    return checkpoint / "changed" / f"{table}.safetensors"


def changed_rows(checkpoint: Path, table: str) -> Tensor | None:
    """Return the numbers of the rows changed since the last full checkpoint, None in a full one."""
    file = changed_file(checkpoint, table)
    return _stored_tensor(file, IDS) if file.is_file() else None


def read_table(checkpoint: Path, table: str, name: str, target: Tensor) -> None:
    """Fill `target` in place with the weight or the state `name` of a table, slice by slice. Raises UserError
    when shapes differ."""
    _read_into(table_file(checkpoint, table), name, target)
    if (ids_U := changed_rows(checkpoint, table)) is not None:
        file = changed_file(checkpoint, table)
        by_row = rows_of(name) in tensor_shapes(file)
        _read_into(file, rows_of(name) if by_row else name, target, ids_U if by_row else None)


def mapped_weight(checkpoint: Path, table: str, like: Tensor, sums: str) -> Tensor:
    """Return the rows of a table mapped into memory: what is read of them is loaded and checked then. Changed
    rows, and what lies on their pages, are in memory at once. Raises UserError when shape or type differ from
    those of `like`."""
    weight = _mapped_tensor(table_file(checkpoint, table), "weight", like, sums)
    if (ids_U := changed_rows(checkpoint, table)) is not None:
        _read_into(changed_file(checkpoint, table), rows_of("weight"), weight, ids_U)
    return weight
