"""Tables of published checkpoints, as their files hold them: maps frozen rows, trains rows over them, and
writes these into a copy of the checkpoint.

A table NAME lies in one tensor, `NAME.weight`, or in pieces, `NAME.shard_0.weight` and so on, over any
number of files of a folder. Its rows may have a scale, `NAME.weight_scale`: one value for all, one a row, or
one power of two for each 32 values of a row.

Letters: N ids of a lookup, U unique ids, K trained rows, D width of a row.
"""

import json
import math
import mmap
import re
import shutil
import threading
import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from dphybrid.embedding import native
from dphybrid.embedding.lookup import row_numbers
from dphybrid.embedding.native import StoredRows
from dphybrid.embedding.storage import mapped_rows, open_states
from dphybrid.util.errors import UserError, suggestion
from dphybrid.util.files import making

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
    """The rows of one table of a checkpoint, mapped; a copy shares them. pieces_at: where they lie."""

    def __init__(self, name: str, pieces_at: list[Entry], scale: Tensor | None) -> None:
        super().__init__([piece.mapped(_ROWS[piece.format]) for piece in pieces_at], scale)
        self.name, self.pieces_at = name, pieces_at

    def __deepcopy__(self, _: object) -> "PublishedRows":
        return self


class Checkpoint:
    """The tensors of all safetensors files of a folder.

    Raises UserError for a folder without such files, for a damaged one, and for two with the same tensor.
    """

    def __init__(self, folder: Path | str) -> None:
        self.path = Path(folder)
        self._entries: dict[str, Entry] = {}
        for file in sorted(self.path.glob("*.safetensors")):
            entries = _entries_of(file)
            if twice := sorted(entries.keys() & self._entries):
                raise UserError(
                    f"{file}: has {twice[0]!r}, as {self._entries[twice[0]].file.name}; keep one of them here"
                )
            self._entries |= entries
        if not self._entries:
            raise UserError(f"{self.path}: has no safetensors files; give the folder of a checkpoint")

    def table(self, name: str, shape: tuple[int, int] | None = None) -> PublishedRows:
        """Return the rows of a table, mapped. shape: that it must have.

        Raises UserError for a table that is not there, lacks a piece, or has another shape, number format or
        scale than those above.
        """
        start = f"{name}." if name else ""  # the model itself may be the table
        piece = re.compile(rf"{re.escape(start)}shard_\d+\.weight")
        count = len([key for key in self._entries if piece.fullmatch(key)])
        keys = [f"{start}shard_{number}.weight" for number in range(count)] or [f"{start}weight"]
        for key in keys:
            if key not in self._entries:
                hint = suggestion(key, list(self._entries))
                raise UserError(f"{self.path}: has no tensor {key!r}{hint}")
        entries = [self._entries[key] for key in keys]
        first = entries[0]
        for key, entry in zip(keys, entries, strict=True):
            is_like_first = (entry.format, entry.shape[1:]) == (first.format, first.shape[1:])
            if entry.format not in _ROWS or len(entry.shape) != 2 or not is_like_first:
                raise UserError(
                    f"{entry.file}: {key} is {entry.shape} of {entry.format}; tables are mapped from "
                    f"{', '.join(_ROWS)}, all pieces of one type and width"
                )
        whole = sum(entry.shape[0] for entry in entries), first.shape[1]
        if shape is not None and whole != tuple(shape):
            several = f" in {len(entries)} pieces" if len(entries) > 1 else ""
            raise UserError(
                f"{self.path}: {name} has shape {whole}{several}, but the model's is {tuple(shape)}; use the "
                "config of this checkpoint"
            )
        scale = f"{start}weight_scale"
        if others := [key for key in self._entries if key.startswith(f"{start}weight_") and key != scale]:
            raise UserError(f"{self.path}: has {others[0]!r}; tables are mapped with {scale} alone")
        return PublishedRows(name, entries, self._scale(scale, whole, first.format))

    def _scale(self, key: str, whole: tuple[int, int], of_rows: str) -> Tensor | None:
        if key not in self._entries:
            if of_rows.startswith("F8"):
                raise UserError(
                    f"{self.path}: has rows of {of_rows} without {key}; add it, 1.0 if there is none"
                )
            return None
        entry, (rows, dim) = self._entries[key], whole
        if entry.format == "F8_E8M0" and entry.shape == (rows, dim // _BLOCK) and dim % _BLOCK == 0:
            return entry.mapped(torch.float8_e8m0fnu)
        if entry.format in _SCALES and entry.shape in ((), (1,), (1, 1), (rows, 1)):
            return entry.mapped(_SCALES[entry.format])
        raise UserError(
            f"{entry.file}: {key} is {entry.shape} of {entry.format}; use one value or {(rows, 1)} of "
            f"{' or '.join(_SCALES)}, or {(rows, dim // _BLOCK)} of F8_E8M0"
        )


def _entries_of(file: Path) -> dict[str, Entry]:
    """Return where each tensor of a file lies. Raises UserError for a damaged file."""
    from safetensors import SafetensorError, safe_open  # `dphybrid.embedding` needs only torch and numpy

    try:
        with safe_open(file, framework="numpy"):  # checks the header and the file's size
            pass
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length))
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file}: cannot be read as safetensors ({error}); fetch it again") from error
    header.pop("__metadata__", None)
    return {
        key: Entry(file, entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0])
        for key, entry in header.items()
    }


class TrainedRows:
    """Rows of a published table that are trained: each has a slot in `weight`, filled from the file when
    training first looks it up. `weight` has room for `most_rows`; a page takes memory once it is used."""

    def __init__(self, stored: PublishedRows, most_rows: int) -> None:
        self.stored, self.name = stored, stored.name
        shape = min(most_rows, len(stored)), stored.shape[1]
        room = open_states({"most_rows": (shape, torch.float32)}, None, self.name)
        self.weight = nn.Parameter(room["most_rows"])
        # Ids, ascending, and their slots; replaced as one. The last id is above all others and has no slot.
        self._index = np.array([np.iinfo(np.int64).max]), np.array([-1])
        self._lock = threading.Lock()  # a worker and replicas look up in threads

    def __deepcopy__(self, _: object) -> "TrainedRows":
        trained = TrainedRows(self.stored, len(self.weight))
        trained.fill(self.ids_K, self.rows_KD)
        return trained

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


def merge_rows(checkpoint: Path | str, file: Path | str, out: Path | str) -> None:
    """Write a copy of a checkpoint with the rows that `save_rows` wrote to `file`, in the checkpoint's own
    types and scales, rounded to the nearest. Only files that hold trained rows are written; others are
    linked.

    out: a folder, which must not exist. Warns of values that are larger than their row's scale allows, which
    are cut to the largest one. Raises UserError for a folder that exists, for rows that are not finite, and
    what `Checkpoint.table` raises.
    """
    source, out, rows = Checkpoint(checkpoint), Path(out), read_rows(file)
    if out.exists():
        raise UserError(f"{out}: exists; give the path of a new folder")
    writes: list[tuple[Entry, Tensor, Tensor]] = []
    for name, (ids_K, rows_KD) in rows.items():
        table, start = source.table(name), 0
        row_numbers(ids_K, len(table), name)
        bytes_KX = _rounded(table, name, ids_K, rows_KD)
        for piece in table.pieces_at:
            is_here = (ids_K >= start) & (ids_K < start + piece.shape[0])
            writes += [(piece, ids_K[is_here] - start, bytes_KX[is_here])] if bool(is_here.any()) else []
            start += piece.shape[0]
    written = {piece.file for piece, *_ in writes}

    def place(path: str, target: str) -> None:
        if Path(path) in written:
            shutil.copyfile(path, target)
            return
        try:
            Path(target).hardlink_to(Path(path).resolve())
        except OSError:  # another disk, or a system without hard links
            Path(target).symlink_to(Path(path).resolve())

    with making(out) as made:
        shutil.copytree(source.path, made, copy_function=place, dirs_exist_ok=True)
        for piece, numbers_M, bytes_MX in writes:
            with (made / piece.file.name).open("r+b") as stream:
                shape = piece.shape[0], bytes_MX.shape[1]
                pages = mapped_rows(stream.fileno(), mmap.MAP_SHARED, shape, torch.uint8, piece.offset)
                pages[numbers_M] = bytes_MX


def _rounded(table: PublishedRows, name: str, ids_K: Tensor, rows_KD: Tensor) -> Tensor:
    """Return rows as the table's files hold them, as bytes."""
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
    half_step = eps * 2.0 ** (math.frexp(largest)[1] - 2)
    if len(cut := ids_K[(scaled_KD.abs() > largest + half_step).any(1)]):
        warnings.warn(
            f"merge_rows: {len(cut)} rows of {name}, such as {int(cut[0])}, have values larger than their "
            "scale allows, which were cut",
            stacklevel=3,
        )
    return scaled_KD.clamp(-largest, largest).to(dtype).view(torch.uint8)


def read_rows(file: Path | str) -> dict[str, tuple[Tensor, Tensor]]:
    """Return (row numbers, rows) by table of a file of `save_rows`. Raises UserError for another file."""
    from safetensors.torch import load_file

    tensors = load_file(file)
    names = sorted(key.removesuffix(".ids") for key in tensors if key.endswith(".ids"))
    if not names or tensors.keys() != {f"{name}.{part}" for name in names for part in ("ids", "rows")}:
        raise UserError(f"{file}: does not hold row numbers and rows by table; give a file of save_rows")
    return {name: (tensors[f"{name}.ids"], tensors[f"{name}.rows"]) for name in names}
