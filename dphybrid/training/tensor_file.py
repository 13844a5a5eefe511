"""Reads and writes tensors of safetensors files slice by slice, so that a table may be larger than the free
memory.

The writer of the safetensors library is not used, because it needs whole tensors: the rows of a table that is
spread over several processes arrive in slices.

In a checkpoint, `tables/NAME.safetensors` holds all rows and states of a table. If there is a
`changed/NAME.safetensors`, it holds the rows that have changed since, with their row numbers, and takes
precedence. All reading of tables from checkpoints goes through this module.

Letters: V rows of a table, U changed ones, D width.
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
    torch.bool: "BOOL", torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64",
    torch.complex64: "C64",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_SLICE_BYTES = 2**20
"""Small enough to stay in the processor's cache from copying to checksum to writing."""

REMEDY = "use another checkpoint, or delete this one's folder"

IDS = "row_numbers"
"""Name of the tensor of row numbers in a file of changed rows."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write named tensors from any device; return the file's `BlockSums` in hex. The caller must fsync the
    file."""
    sums = BlockSums()
    with naming(path), path.open("wb") as file:
        for piece in _pieces(tensors):
            sums.update(piece)
            file.write(piece)
    return sums.hexdigest()


def _pieces(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    header: dict[str, object] = {}
    offset = 0
    # Sorted, so that the same tensors give the same file whatever their order.
    for name, tensor in sorted(tensors.items()):
        place = [offset, offset := offset + tensor.nbytes]
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": place}
    head = json.dumps(header, separators=(",", ":")).encode()
    # Padded, so that the tensors of a mapped file start at a multiple of eight bytes.
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
    """Return the shapes of a file's tensors by name; reads its header only."""
    return {name: tuple(entry["shape"]) for name, entry in _header(path)[0].items()}


def _stored_tensor(path: Path, name: str) -> Tensor:
    """Read one tensor of a file into memory."""
    with safe_open(path, framework="pt") as file:
        tensor: Tensor = file.get_tensor(name)
        return tensor


def _read_into(path: Path, name: str, target: Tensor, ids_U: Tensor | None = None) -> None:
    """Fill `target` (V, ...) in place from the tensor `name` of a file, slice by slice. ids_U: fill only
    these rows (ascending). Raises UserError when shapes differ."""
    entries, start = _header(path)
    shape = tuple(entries[name]["shape"])
    if ids_U is None and shape != tuple(target.shape):
        raise UserError(
            f"{path}: {name} has shape {shape}, but the model's table has {tuple(target.shape)}; use the "
            "data and config it was trained with"
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
            # Not mapped: the pages would count as memory of this process, as much as a second table.
            raw = np.fromfile(file, np.uint8, (last - first) * row_bytes)
            part = torch.from_numpy(raw).view(dtype).view(last - first, *shape[1:]).to(target.dtype)
            if ids_U is None:
                target[first:last] = part
            else:
                target.index_copy_(0, ids_U[first:last], part)


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """Return the header entries of a file by name, and the offset of its data."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        entries = json.loads(file.read(length))
    entries.pop("__metadata__", None)
    return entries, 8 + length


def _mapped_tensor(path: Path, name: str, like: Tensor, sums: str) -> Tensor:
    """Return the tensor `name` (V, ...) of the file, mapped into memory. The first lookup in a block of the
    file checks it and raises UserError if it is damaged (`embedding.native`).

    Writes to the tensor do not reach the file. sums: its `BlockSums` in hex. Raises UserError when shape or
    type differ from those of `like`, and for a damaged header.
    """
    blocks = _Blocks(path, sums)
    # The blocks of the first and the last byte: the header is read next, and a file may be cut off.
    blocks.check(np.array([0, path.stat().st_size - 1]))
    entries, data = _header(path)
    entry = entries[name]
    stored, wanted = (entry["dtype"], *entry["shape"]), (_NAMES[like.dtype], *like.shape)
    if stored != wanted:
        raise UserError(
            f"{path}: {name} is {stored}, but the model's table is {wanted}; use the data and config it was "
            "trained with"
        )
    start, stop = (data + offset for offset in entry["data_offsets"])
    # "c" is copy on write: `mapped_weight` writes changed rows into memory, and the file stays as it is.
    raw = np.memmap(path, np.uint8, "c", start, (stop - start,))
    row_bytes = len(raw) // like.shape[0]

    def check_read(ids_N: Tensor) -> None:
        first_N = start + row_bytes * ids_N.numpy()
        # A row may start in one block and end in a later one.
        for within in (*range(0, row_bytes, BLOCK), row_bytes - 1):
            blocks.check(first_N + within)

    mapped = torch.from_numpy(raw).view(like.dtype).view(like.shape)
    # The check stays registered while `raw` exists, and `mapped` keeps a reference to it.
    check_when_read(mapped, check_read, raw)
    return mapped


class _Blocks:
    """The blocks of a file. Each is compared with its checksum when it is first read."""

    def __init__(self, path: Path, sums: str) -> None:
        self._path, self._wanted = path, np.frombuffer(bytes.fromhex(sums), ">u4")
        size = path.stat().st_size if path.is_file() else 0
        if -(-size // BLOCK) != len(self._wanted):
            raise UserError(f"{path}: is damaged (it has {size:,} bytes); {REMEDY}")
        self._content = np.memmap(path, np.uint8, "r")
        self._whole = np.zeros(len(self._wanted), bool)

    def check(self, places_N: np.ndarray) -> None:
        """Raise UserError if a block with one of these byte offsets is damaged."""
        # Once all blocks are checked, a lookup costs nothing more.
        if self._whole.all():
            return
        blocks_N = places_N // BLOCK
        for block in np.unique(blocks_N[~self._whole[blocks_N]]).tolist():
            start, end = block * BLOCK, (block + 1) * BLOCK
            if block_sum(self._content[start:end].data) != self._wanted[block]:
                raise UserError(f"{self._path}: is damaged (in bytes {start:,} to {end:,}); {REMEDY}")
            self._whole[block] = True


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
    file = folder / f"{table.replace('%', '%25').replace('/', '%2F')}.safetensors"
    earlier = folder / f"{table.replace('/', '%2F')}.safetensors"
    # Checkpoints were written with "%" as it is: "a/b" and "a%2Fb" were one file, so only one of them was
    # there.
    return earlier if "%" in table and not file.exists() and earlier.exists() else file


def changed_rows(checkpoint: Path, table: str) -> Tensor | None:
    """Return the numbers of the rows changed since the last full checkpoint, or None in a full one."""
    file = changed_file(checkpoint, table)
    return _stored_tensor(file, IDS) if file.is_file() else None


def read_table(checkpoint: Path, table: str, name: str, target: Tensor) -> None:
    """Fill `target` in place with a table's weight or state `name`, slice by slice. Raises UserError when
    shapes differ."""
    _read_into(table_file(checkpoint, table), name, target)
    if (ids_U := changed_rows(checkpoint, table)) is not None:
        file = changed_file(checkpoint, table)
        by_row = rows_of(name) in tensor_shapes(file)
        _read_into(file, rows_of(name) if by_row else name, target, ids_U if by_row else None)


def mapped_weight(checkpoint: Path, table: str, like: Tensor, sums: str) -> Tensor:
    """Return the rows of a table mapped into memory: rows are loaded and checked when they are read. Only the
    pages of changed rows are loaded at once. Raises UserError when shape or type differ from those of
    `like`."""
    weight = _mapped_tensor(table_file(checkpoint, table), "weight", like, sums)
    if (ids_U := changed_rows(checkpoint, table)) is not None:
        _read_into(changed_file(checkpoint, table), rows_of("weight"), weight, ids_U)
    return weight
