"""Tensors in safetensors files, streamed: a table larger than the free memory is written and read in slices.

The format is the safetensors project's: eight bytes of header length, a JSON header, raw little-endian rows.
Its library reads these files; it is not used for writing because it first makes a second copy of every tensor
in memory.

A table's rows and states in a checkpoint: `tables/NAME.safetensors` holds all of them, and where there is a
`changed/NAME.safetensors`, that holds those rows that have changed since, with their numbers. Everything that
reads tables of checkpoints does it here. Letters: V rows of a table, U changed ones, D width.
"""

import json
import math
from collections.abc import Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from dphybrid.embedding.native import check_when_read
from dphybrid.embedding.storage import GIB, available_memory_bytes
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
"""Stays in a processor's cache between reading, summing and writing."""

REMEDY = "use another checkpoint, or delete this one's folder"

IDS = "row_numbers"
"""Name of the changed rows' numbers in their file."""

_PAGE_BYTES = 4096


def write_tensors(path: Path, tensors: Mapping[str, Tensor | list[Tensor]]) -> str:
    """Write named tensors, any device; return the file's `BlockSums` in hex. Whoever asks for it has the disk
    keep the file. A list: the rows in parts, each removed when it is written: the file's pages take its
    memory."""
    return _write(path, _pieces(tensors))


def tensor_sums(tensors: Mapping[str, Tensor]) -> str:
    """Return the `BlockSums` in hex that a file of these tensors would have."""
    sums = BlockSums()
    for piece in _pieces(tensors):
        sums.update(piece)
    return sums.hexdigest()


_Changes = Mapping[str, tuple[Tensor, Tensor]]


def patch_tensors(path: Path, base: Path, base_sums: str, changes: _Changes) -> str:
    """Write the tensors of the file `base`, but for changed rows; return the file's `BlockSums` in hex.

    changes: the numbers (ascending) of changed rows and these rows, for each tensor of the file. The file is
    read once, so that damage of it is known when `path` is written: raises UserError then.
    """
    _Blocks(base, base_sums).check(np.array([0]))  # the header
    found = BlockSums()
    sums = _write(path, _patched_pieces(base, found, changes))
    if found.hexdigest() != base_sums:
        raise UserError(f"{base}: is damaged (its checksum differs); {REMEDY}")
    return sums


def _write(path: Path, pieces: Iterator[bytes | memoryview]) -> str:
    sums = BlockSums()
    with naming(path), path.open("wb") as file:
        for piece in pieces:
            sums.update(piece)
            file.write(piece)
    return sums.hexdigest()


def _pieces(tensors: Mapping[str, Tensor | list[Tensor]]) -> Iterator[bytes | memoryview]:
    # Sorted: the same tensors give the same file, however they came to be.
    named = {name: rows if isinstance(rows, list) else [rows] for name, rows in sorted(tensors.items())}
    header: dict[str, object] = {}
    offset = 0
    for name, parts in named.items():
        shape, dtype = list(parts[0].shape), parts[0].dtype
        shape[:1] = [sum(map(len, parts))] if shape else []
        size = math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": _NAMES[dtype],
            "shape": shape,
            "data_offsets": [offset, offset + size],
        }
        offset += size
    head = json.dumps(header, separators=(",", ":")).encode()
    # So that mapped tensors begin at a multiple of eight bytes.
    head += b" " * (-len(head) % 8)
    yield len(head).to_bytes(8, "little")
    yield head
    for parts in named.values():
        while parts:
            flat = parts.pop(0).detach().reshape(-1)
            step = max(1, _SLICE_BYTES // flat.element_size())
            for start in range(0, flat.numel(), step):
                yield _bytes(flat[start : start + step].cpu().contiguous())


def _bytes(part: Tensor) -> memoryview:
    return part.view(torch.uint8).numpy().data


def _patched_pieces(base: Path, found: BlockSums, changes: _Changes) -> Iterator[bytes | memoryview]:
    """Yield the file's content with the changed rows. found: takes its bytes as they were read."""
    entries, start = _header(base)
    with base.open("rb", buffering=0) as file:
        head = file.read(start)
        found.update(head)
        yield head
        # In the file's order: it is read once, front to back.
        for name, entry in sorted(entries.items(), key=lambda each: each[1]["data_offsets"][0]):
            (ids_U, rows_UD), first = changes[name], 0
            width = math.prod(entry["shape"][1:])
            for part in _read_slices(file, entry, f"{base}: ends within {name}", width):
                found.update(_bytes(part))
                last = first + part.numel() // max(1, width)
                low, high = torch.searchsorted(ids_U, torch.tensor([first, last])).tolist()
                part.view(last - first, *entry["shape"][1:])[ids_U[low:high] - first] = rows_UD[low:high]
                yield _bytes(part)
                first = last


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read all tensors of a file into memory."""
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - safe_open is not a dict


def tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors of a file by name."""
    return {name: tuple(entry["shape"]) for name, entry in _header(path)[0].items()}


def stored_tensor(path: Path, name: str) -> Tensor:
    """Read one tensor of a file into memory."""
    entry = _header(path)[0][name]
    found = torch.empty(entry["shape"], dtype=_DTYPES[entry["dtype"]])
    read_into(path, name, found)
    return found


def read_into(path: Path, name: str, target: Tensor) -> None:
    """Fill `target` (N, ...) in place from the tensor `name` of the file, slice by slice. Raises UserError
    when shapes differ."""
    shape = tensor_shapes(path)[name]
    if shape != tuple(target.shape):
        raise UserError(
            f"{path}: {name} has shape {shape}, the model's table has {tuple(target.shape)}; was it trained "
            "on other data?"
        )
    flat, first = target.view(-1), 0
    for part in _stored_slices(path, name):
        flat[first : first + part.numel()] = part
        first += part.numel()


def read_rows_into(path: Path, name: str, ids_U: Tensor, target: Tensor) -> None:
    """Put the rows of the tensor `name` of the file at ids_U (ascending) of `target` (N, ...), slice by
    slice."""
    width = math.prod(target.shape[1:])
    first = 0
    for part in _stored_slices(path, name, width):
        last = first + part.numel() // max(1, width)
        rows = part.view(last - first, *target.shape[1:]).to(target.dtype)
        target.index_copy_(0, ids_U[first:last], rows)
        first = last


def _stored_slices(path: Path, name: str, multiple_of: int = 1) -> Iterator[Tensor]:
    """Yield the values of a tensor of a file, one slice after the other in the same memory. multiple_of: of
    their lengths."""
    entries, start = _header(path)
    with path.open("rb", buffering=0) as file:
        file.seek(start + entries[name]["data_offsets"][0])
        yield from _read_slices(file, entries[name], f"{path}: ends within {name}", multiple_of)


def _read_slices(file: FileIO, entry: Mapping[str, Any], cut_off: str, multiple_of: int) -> Iterator[Tensor]:
    # Plain reading: pages of a mapped file would count as this process's memory, a second table for a while.
    dtype, left = _DTYPES[entry["dtype"]], math.prod(entry["shape"])
    width = max(1, multiple_of)
    step = max(width, _SLICE_BYTES // dtype.itemsize // width * width)
    buffer = torch.empty(min(step, left), dtype=dtype)
    while left:
        part = buffer[: min(step, left)]
        wanted = _bytes(part)
        while wanted:
            count = file.readinto(wanted)
            if not count:
                raise UserError(f"{cut_off}; use another checkpoint")
            wanted = wanted[count:]
        yield part
        left -= part.numel()


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """Return the entries of a file by name, and where its data starts."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        entries = json.loads(file.read(length))
    entries.pop("__metadata__", None)
    return entries, 8 + length


def mapped_tensor(path: Path, name: str, like: Tensor, sums: str) -> Tensor:
    """Return the tensor `name` (V, ...) of the file, mapped into memory. The first lookup that reads a block
    of the file checks it, and raises UserError when it is damaged (`embedding.native`).

    Writing does not reach the file. sums: of `BlockSums`. Raises UserError when shape or type differ from
    those of `like`, and for a damaged header.
    """
    blocks = _Blocks(path, sums)
    blocks.check(np.array([0, path.stat().st_size - 1]))  # the header, and that nothing is cut off
    entries, data = _header(path)
    entry = entries[name]
    if tuple(entry["shape"]) != tuple(like.shape) or entry["dtype"] != _NAMES[like.dtype]:
        raise UserError(
            f"{path}: {name} is {entry['dtype']} {tuple(entry['shape'])}, the model's table is "
            f"{_NAMES[like.dtype]} {tuple(like.shape)}; was it trained on other data?"
        )
    start = data + entry["data_offsets"][0]
    # Copy on write: changed rows are laid over it, the file stays as it is.
    raw = np.memmap(path, np.uint8, "c", start, (entry["data_offsets"][1] - entry["data_offsets"][0],))
    row_bytes = len(raw) // like.shape[0]

    def check_read(ids_N: Tensor) -> None:
        first_N = start + row_bytes * ids_N.numpy()
        # A row may begin in one block and end in a later one.
        for within in (*range(0, row_bytes, BLOCK), row_bytes - 1):
            blocks.check(first_N + within)

    found = torch.from_numpy(raw).view(like.dtype).view(like.shape)
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
    return stored_tensor(file, IDS) if file.is_file() else None


def read_table(checkpoint: Path, table: str, name: str, target: Tensor) -> None:
    """Fill `target` in place with the weight or the state `name` of a table, slice by slice. Raises UserError
    when shapes differ."""
    read_into(table_file(checkpoint, table), name, target)
    ids_U = changed_rows(checkpoint, table)
    if ids_U is None:
        return
    file = changed_file(checkpoint, table)
    if rows_of(name) in tensor_shapes(file):
        read_rows_into(file, rows_of(name), ids_U, target)
    else:
        read_into(file, name, target)


def table_weight(checkpoint: Path, table: str) -> Tensor:
    """Return all rows of a table in memory."""
    weight = stored_tensor(table_file(checkpoint, table), "weight")
    ids_U = changed_rows(checkpoint, table)
    if ids_U is not None:
        read_rows_into(changed_file(checkpoint, table), rows_of("weight"), ids_U, weight)
    return weight


def mapped_weight(checkpoint: Path, table: str, like: Tensor, sums: str) -> Tensor:
    """Return the rows of a table mapped into memory: what is read of them is loaded and checked then. Changed
    rows, and what lies on their pages, are in memory at once.

    Raises UserError when shape or type differ from those of `like`, and when the changed rows do not fit.
    """
    weight = mapped_tensor(table_file(checkpoint, table), "weight", like, sums)
    ids_U = changed_rows(checkpoint, table)
    if ids_U is None:
        return weight
    row_bytes = weight.nbytes // max(1, len(weight))
    pages = len(torch.unique_consecutive(ids_U * row_bytes // _PAGE_BYTES)) if row_bytes < _PAGE_BYTES else 0
    wanted, free = max(pages * _PAGE_BYTES, len(ids_U) * row_bytes), available_memory_bytes()
    if wanted > free:
        raise UserError(
            f"{checkpoint}: rows of table {table} that changed since the last full checkpoint take "
            f"{wanted / GIB:.3g} GiB of memory, {free / GIB:.3g} GiB are free; use a full checkpoint "
            "(one without a folder `changed`; checkpoint.full_every=1 makes each one full)"
        )
    read_rows_into(changed_file(checkpoint, table), rows_of("weight"), ids_U, weight)
    return weight
