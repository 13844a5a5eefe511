"""Tables of published checkpoints, as their files hold them: maps frozen rows, trains rows over them, and
writes these into a copy of the checkpoint.

A table NAME lies in one tensor, `NAME.weight`, or in pieces, `NAME.shard_0.weight` and so on, over any
number of files. Its rows may have a scale, `NAME.weight_scale`: one value for all, one a row, or one power of
two for each 32 values of a row.

Letters: N ids of a lookup, U unique ids, K trained rows, D width of a row.
"""

import json
import math
import mmap
import re
import shutil
import tempfile
import threading
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from dphybrid.embedding import native
from dphybrid.embedding.lookup import row_numbers
from dphybrid.embedding.native import StoredRows
from dphybrid.embedding.storage import StartValues, mapped_rows, open_rows, unfilled_rows
from dphybrid.util.errors import UserError, suggestion

_ROWS = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
}
"""Number formats of rows by their names in safetensors files."""
_SCALES = {"F32": torch.float32, "BF16": torch.bfloat16}
_BLOCK = 32
"""Values that share a scale of type F8_E8M0."""
_NORESERVE = 0x4000
"""Linux's MAP_NORESERVE, which Python's mmap names from 3.13 on."""


class Entry(NamedTuple):
    """Where a tensor lies: its file, number format and shape, and the bytes before its first value."""

    file: Path
    format: str
    shape: tuple[int, ...]
    offset: int

    def mapped(self, dtype: torch.dtype) -> Tensor:
        """Return the tensor, mapped into memory: pages are read when they are used, and writing does not
        reach the file."""
        # Without NORESERVE, as torch and safetensors map it, the system refuses files larger than memory.
        with self.file.open("rb") as stream:
            flags = mmap.MAP_PRIVATE | _NORESERVE
            return mapped_rows(stream.fileno(), flags, self.shape, dtype, self.offset)


class PublishedRows(StoredRows):
    """The rows of one table of a checkpoint; a copy or pickle maps them again. pieces_at: their entries."""

    def __init__(
        self, checkpoint: Path, name: str, pieces_at: list[Entry], scale: Tensor | None, dtype: torch.dtype
    ) -> None:
        super().__init__([piece.mapped(dtype) for piece in pieces_at], scale)
        self.checkpoint, self.name, self.pieces_at = checkpoint, name, pieces_at

    def __reduce__(self) -> Any:
        return _again, (self.checkpoint, self.name)


def _again(checkpoint: Path, name: str) -> PublishedRows:
    return Checkpoint(checkpoint).table(name)


class Checkpoint:
    """The tensors of a safetensors file, or of a folder with one, or with several and their index.

    Raises UserError for a path without such files, and for a damaged index or file.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._entries: dict[Path, dict[str, Entry]] = {}
        indices = sorted(self.path.glob("*.safetensors.index.json"))
        files = sorted(self.path.glob("*.safetensors")) if self.path.is_dir() else [self.path]
        self.file_of: dict[str, Path] = {}
        if len(indices) == 1:
            try:
                listed = json.loads(indices[0].read_text(encoding="utf-8"))["weight_map"].items()
                self.file_of = {name: self.path / Path(file).name for name, file in listed}
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise UserError(f"{indices[0]}: is not an index of safetensors files ({error})") from error
        elif len(files) != 1:
            raise UserError(
                f"{self.path}: has {len(files)} safetensors files and {len(indices)} indices; give a folder "
                "with one file, or with several and one index, or the file itself"
            )
        elif not files[0].exists():
            raise UserError(f"{self.path}: does not exist; give a safetensors file, or a folder of them")
        else:
            self.file_of = dict.fromkeys(self._entries_of(files[0]), files[0])

    def _entries_of(self, file: Path) -> dict[str, Entry]:
        from safetensors import SafetensorError, safe_open  # `dphybrid.embedding` needs only torch and numpy

        if file not in self._entries:
            try:
                with safe_open(file, framework="numpy"):  # checks the header and the file's size
                    pass
                with file.open("rb") as stream:
                    length = int.from_bytes(stream.read(8), "little")
                    header = json.loads(stream.read(length))
            except (SafetensorError, OSError) as error:
                raise UserError(f"{file}: cannot be read as safetensors ({error}); fetch it again") from error
            header.pop("__metadata__", None)
            self._entries[file] = {
                name: Entry(
                    file, entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0]
                )
                for name, entry in header.items()
            }
        return self._entries[file]

    def _entry(self, name: str) -> Entry:
        entries = self._entries_of(self.file_of[name])
        if name not in entries:
            raise UserError(
                f"{self.file_of[name]}: has no tensor {name!r}, as the index says; fetch it again"
            )
        return entries[name]

    def has(self, name: str) -> bool:
        """Return whether there is a table of this name."""
        start = f"{name}." if name else ""
        return f"{start}weight" in self.file_of or f"{start}shard_0.weight" in self.file_of

    def table(
        self, name: str, shape: tuple[int, int] | None = None, buffers: Collection[str] = ()
    ) -> PublishedRows:
        """Return the rows of a table, mapped.

        shape: that it must have. buffers: names of tensors that the table's module has beside its weight.
        Raises UserError for a table that is not there, lacks a piece, or has another shape, number format or
        scale than those above.
        """
        start = f"{name}." if name else ""  # the model itself may be the table
        keys = {
            int(match[1]): key
            for key in self.file_of
            if (match := re.fullmatch(rf"{re.escape(start)}shard_(\d+)\.weight", key))
        }
        if f"{start}weight" in self.file_of:
            keys = {0: f"{start}weight"}
        if not keys:
            hint = suggestion(f"{start}weight", list(self.file_of))
            raise UserError(f"{self.path}: has no tensor {start + 'weight'!r}{hint}")
        if missing := set(range(max(keys))) - keys.keys():
            raise UserError(
                f"{self.path}: lacks the piece {start}shard_{min(missing)}.weight; fetch it again"
            )
        pieces = [self._entry(keys[number]) for number in sorted(keys)]
        first = pieces[0]
        for (_, key), piece in zip(sorted(keys.items()), pieces, strict=True):
            if piece.format not in _ROWS or piece.format != first.format:
                raise UserError(
                    f"{piece.file}: {key} is of {piece.format}; tables are mapped from {', '.join(_ROWS)}, "
                    "all pieces of one"
                )
            if len(piece.shape) != 2 or piece.shape[1] != first.shape[1]:
                raise UserError(f"{piece.file}: {key} has shape {piece.shape}; pieces have rows of one width")
        whole = sum(piece.shape[0] for piece in pieces), first.shape[1]
        if shape is not None and whole != tuple(shape):
            several = f" in {len(pieces)} pieces" if len(pieces) > 1 else ""
            raise UserError(
                f"{self.path}: {name} has shape {whole}{several}, but the model's is {tuple(shape)}; use the "
                "config of this checkpoint"
            )
        allowed = {f"{start}weight_scale", *(start + buffer for buffer in buffers)}
        foreign = [key for key in self.file_of if key.startswith(start) and "scale" in key.rpartition(".")[2]]
        if unknown := [key for key in foreign if key not in allowed and (start or "." not in key)]:
            raise UserError(
                f"{self.path}: {name} has a scale {unknown[0]!r}; tables are mapped with {start}weight_scale "
                "alone"
            )
        scale = self._scale(f"{start}weight_scale", whole, first.format)
        return PublishedRows(self.path, name, pieces, scale, _ROWS[first.format])

    def _scale(self, key: str, whole: tuple[int, int], of_rows: str) -> Tensor | None:
        if key not in self.file_of:
            if of_rows.startswith("F8"):
                raise UserError(
                    f"{self.path}: has rows of {of_rows} without {key}; add it, 1.0 if there is none"
                )
            return None
        entry, (rows, dim) = self._entry(key), whole
        if entry.format == "F8_E8M0" and entry.shape == (rows, dim // _BLOCK) and dim % _BLOCK == 0:
            return entry.mapped(torch.float8_e8m0fnu)
        if entry.format in _SCALES and entry.shape in ((), (1,), (1, 1), (rows, 1)):
            return entry.mapped(_SCALES[entry.format])
        raise UserError(
            f"{entry.file}: {key} is {entry.shape} of {entry.format}; use one value or {(rows, 1)} of "
            f"{' or '.join(_SCALES)}, or {(rows, dim // _BLOCK)} of F8_E8M0"
        )


class TrainedRows:
    """Rows of a published table that are trained: each has a slot in `weight`, filled from the file when
    training first looks it up. `weight` has room for `most_rows`; a page takes memory once it is used."""

    def __init__(self, stored: PublishedRows, most_rows: int) -> None:
        self.stored, self.name = stored, stored.name
        shape = min(most_rows, len(stored)), stored.shape[1]
        with unfilled_rows():
            name, start = f"{self.name}, most_rows", StartValues(0, 0)
            self.weight = nn.Parameter(open_rows(shape, torch.float32, "memory", None, name, start))
        # Ids, ascending, and their slots; replaced as one. The last id is above all others and has no slot.
        self._index = np.array([np.iinfo(np.int64).max]), np.array([-1])
        self._lock = threading.Lock()  # a worker and replicas look up in threads

    def __reduce__(self) -> Any:
        return _filled, (self.stored, len(self.weight), self.ids_K, self.rows_KD.clone())

    @property
    def ids_K(self) -> Tensor:
        """The trained rows' numbers, in the order of their slots."""
        ids, slots = self._index
        return torch.from_numpy(ids[np.argsort(slots)[1:]])

    @property
    def rows_KD(self) -> Tensor:
        """The trained rows, in the order of their slots, not copied."""
        return self.weight.detach()[: len(self._index[0]) - 1]

    def find(self, ids_N: Tensor) -> Tensor:
        """Return each id's slot, -1 if it has none."""
        ids, slots = self._index
        position_N = np.searchsorted(ids, ids_N.numpy())
        return torch.from_numpy(np.where(ids[position_N] == ids_N.numpy(), slots[position_N], -1))

    def slots(self, ids: Tensor) -> Tensor:
        """Return each id's slot, which new ids get here. Raises UserError past `most_rows`."""
        unique_U, inverse_N, *_ = native.occurrences(ids.reshape(-1), len(self.stored))
        with self._lock:
            slots_U = self.find(unique_U)
            is_new = slots_U < 0
            new_U, first = unique_U[is_new], len(self.rows_KD)
            self._check_room(last := first + len(new_U))
            if len(new_U):
                # By the kernel, which does not raise the weight's version: nobody has read these slots yet.
                native.look_up(self.stored, new_U, self.weight.detach()[first:last])
                slots_U[is_new] = torch.arange(first, last)
                at = np.searchsorted(self._index[0], new_U.numpy())
                added = zip(self._index, (new_U, slots_U[is_new]), strict=True)
                self._index = tuple(np.insert(values, at, new) for values, new in added)  # type: ignore[assignment]
        return slots_U[inverse_N.long()].view(ids.shape)

    def _check_room(self, count: int) -> None:
        if count > len(self.weight):
            raise UserError(
                f"table {self.name!r}: {count:,} rows would be trained, but most_rows is "
                f"{len(self.weight):,}; give host_tables a larger one"
            )

    @torch.no_grad()
    def fill(self, ids_K: Tensor, rows_KD: Tensor) -> None:
        """Replace the trained rows by these, in their order. Raises UserError for ids and rows of another
        table, and past `most_rows`."""
        ids_K, wanted = row_numbers(ids_K, len(self.stored), self.name), (len(ids_K), self.stored.shape[1])
        if rows_KD.shape != wanted or len(ids_K.unique()) < len(ids_K):
            raise UserError(
                f"table {self.name!r}: rows of shape {tuple(rows_KD.shape)} with {len(ids_K.unique()):,} "
                f"numbers of rows; give as many different ones, of {wanted[1]} values"
            )
        self._check_room(len(ids_K))
        self.weight[: len(ids_K)] = rows_KD.to(self.weight)
        order_K = np.argsort(ids_K.numpy())
        self._index = np.append(ids_K.numpy()[order_K], np.iinfo(np.int64).max), np.append(order_K, -1)


def _filled(stored: PublishedRows, most_rows: int, ids_K: Tensor, rows_KD: Tensor) -> TrainedRows:
    trained = TrainedRows(stored, most_rows)
    trained.fill(ids_K, rows_KD)
    return trained


def merge_rows(checkpoint: Path | str, file: Path | str, out: Path | str) -> dict[str, Tensor]:
    """Write a copy of a checkpoint with the rows that `save_rows` wrote to `file`, in the checkpoint's own
    types and scales, rounded to the nearest. Only files that hold changed rows are written; others are
    linked.

    out: a folder, which must not exist. Returns, by table, the numbers of the rows that do not fit their
    scale, of which there is a warning: their values were cut to the largest one. Raises UserError for a
    folder that exists, for rows that are not finite, and what `Checkpoint.table` raises.
    """
    source, out = Checkpoint(checkpoint), Path(out)
    if out.exists():
        raise UserError(f"{out}: exists; give the path of a new folder")
    writes: dict[Path, list[tuple[Entry, Tensor, Tensor]]] = {}
    unfit: dict[str, Tensor] = {}
    for name, (ids_K, rows_KD) in read_rows(file).items():
        table, start = source.table(name), 0
        row_numbers(ids_K, len(table), name)
        bytes_KX, wrong_K = _rounded(table, name, ids_K, rows_KD)
        if bool(wrong_K.any()):
            unfit[name] = ids_K[wrong_K]
        for piece in table.pieces_at:
            is_here = (ids_K >= start) & (ids_K < start + piece.shape[0])
            if bool(is_here.any()):
                writes.setdefault(piece.file, []).append((piece, ids_K[is_here] - start, bytes_KX[is_here]))
            start += piece.shape[0]
    if unfit:
        warnings.warn(
            "merge_rows: rows with values larger than their scale allows, which were cut: "
            + "; ".join(f"{len(ids)} of {name}, such as {int(ids[0])}" for name, ids in unfit.items()),
            stacklevel=2,
        )
    root = source.path if source.path.is_dir() else source.path.parent
    files = [path for path in root.rglob("*") if path.is_file()] if source.path.is_dir() else [source.path]
    with tempfile.TemporaryDirectory(dir=out.absolute().parent, prefix=".merging-") as folder:
        made = Path(folder, "out")
        for path in files:
            target = made / path.relative_to(root)
            target.parent.mkdir(parents=True, exist_ok=True)
            if path not in writes:
                _link(path.resolve(), target)
                continue
            shutil.copyfile(path, target)
            with target.open("r+b") as stream:
                for piece, numbers_M, bytes_MX in writes[path]:
                    for number, row in zip(numbers_M.tolist(), bytes_MX.numpy(), strict=True):
                        stream.seek(piece.offset + number * row.nbytes)
                        stream.write(row.tobytes())
        made.rename(out)
    return unfit


def _rounded(table: PublishedRows, name: str, ids_K: Tensor, rows_KD: Tensor) -> tuple[Tensor, Tensor]:
    """Return (rows as the table's files hold them, as bytes, and which of them do not fit their scale)."""
    if not bool(rows_KD.isfinite().all()) or rows_KD.shape[1:] != table.shape[1:]:
        raise UserError(
            f"merge_rows: {name} has rows that are not finite, or not of {table.shape[1]} values; train "
            "again from the last good ones"
        )
    dtype, scale, scaled_KD = table.pieces[0].dtype, table.scale, rows_KD
    if scale is not None:
        if scale.numel() > 1:
            # torch cannot index all types
            scale = scale.view(torch.uint8).view(len(scale), -1)[ids_K].view(scale.dtype)
            scale = scale.float().repeat_interleave(table.shape[1] // scale.shape[1], 1)
        scaled_KD = (rows_KD / scale.float()).nan_to_num()
    largest, eps = torch.finfo(dtype).max, torch.finfo(dtype).eps
    bytes_KX = scaled_KD.clamp(-largest, largest).to(dtype).view(torch.uint8)
    half_step = eps * 2.0 ** (math.frexp(largest)[1] - 2)
    return bytes_KX, (scaled_KD.abs() > largest + half_step).any(1)


def _link(path: Path, target: Path) -> None:
    try:
        target.hardlink_to(path)
    except OSError:  # another disk, or a system without hard links
        target.symlink_to(path)


def read_rows(file: Path | str) -> dict[str, tuple[Tensor, Tensor]]:
    """Return (row numbers, rows) by table of a file of `save_rows`. Raises UserError for another file."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(file)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file}: cannot be read as safetensors ({error})") from error
    names = {key.removesuffix("ids").removesuffix(".") for key in tensors if key.rpartition(".")[2] == "ids"}
    tables = {name: [tensors.pop(key_in(name, part), None) for part in ("ids", "rows")] for name in names}
    if tensors or any(rows is None for _, rows in tables.values()) or not tables:
        raise UserError(f"{file}: does not hold row numbers and rows by table; give a file of save_rows")
    return {name: (ids_K, rows_KD) for name, (ids_K, rows_KD) in sorted(tables.items())}  # type: ignore[misc]


def key_in(table: str, part: str) -> str:
    """Return the name of a table's tensor. table: empty for a model that is one."""
    return f"{table}.{part}" if table else part
