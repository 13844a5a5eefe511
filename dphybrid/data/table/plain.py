"""Plain blocks of delimited text (`dphybrid.data.table.compiled`) as arrays: numbers, and codes of
dictionaries that any block's texts go into.

Letters: B rows, C columns."""

import ctypes
import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from threading import Lock

import numpy as np
import polars as pl

from dphybrid.config.tables import TableDataConfig
from dphybrid.data.batches import Array
from dphybrid.data.table.encode import MAX_DEVIATION, NumericColumn
from dphybrid.data.table.rows import as_numbers, clean
from dphybrid.data.table.times import part_columns, seconds
from dphybrid.embedding.machine_code import kernel_of
from dphybrid.embedding.team import Kernel

KERNEL_BYTES = 2**26
"""Text from which on compiled code reads it: to load that takes half a second, to compile it the first time
some seconds."""
_SHORT = 8
_POWERS = np.array([float(10**power) for power in range(16)])
_ODD = re.compile(
    rb"\xef\xbb\xbf|\xc2[\x85\xa0]|\xe1\x9a\x80|\xe2\x80[\x80-\x8a\xa8\xa9\xaf]|\xe2\x81\x9f|\xe3\x80\x80"
)
"""Byte order marks, and blanks beyond ASCII."""
_Page = ctypes.c_int64 * 20


@cache
def _kernel(name: str) -> Kernel:
    return kernel_of("dphybrid.data.table.compiled", name)


def _call(name: str, *numbers: int) -> "ctypes.Array[ctypes.c_int64]":
    page = _Page(0, *numbers)
    _kernel(name).call(ctypes.addressof(page))
    return page


def uses_kernels(files: Sequence[Path]) -> bool:
    """Tell whether files hold so much text that compiled code pays. Without numba none does."""
    text = sum(file.stat().st_size for file in files if file.suffix.lower() not in (".parquet", ".pq"))
    return text >= KERNEL_BYTES and importlib.util.find_spec("numba") is not None


def warm_up() -> None:
    """Compile, or load, what plain blocks need."""
    for name in ("find", "read", "look_up", "grow", "count", "ids", "dense"):
        _kernel(name)


def _key(text: bytes) -> int:
    """Return the key of a text of at most 8 bytes."""
    return int.from_bytes(text, "little") | (len(text) << 56 if len(text) < _SHORT else 0)


class KeyDictionary:
    """Numbers the texts of a column as they come, in any thread and as many as memory holds. missing: texts
    that mean no value."""

    def __init__(self, missing: Sequence[str] = ()) -> None:
        self.lock = Lock()
        self._slots = np.zeros((2**11, 2), np.int64)
        self._ends = np.zeros(2**10 + 1, np.int64)
        self._texts = np.empty(2**13, np.uint8)
        self._size = self._none = 0
        self.codes(pl.Series(sorted(set(missing) - {""}), dtype=pl.String))
        self._none = self._size
        self._values = pl.Series("value", [], dtype=pl.String)

    def codes(self, texts: pl.Series) -> Array:
        """Return (B,) uint32 of stripped texts (None: no value): 0 for no value, else 1 + the place in
        `values`."""
        texts = texts.cast(pl.String).fill_null("")
        ends = np.cumsum(texts.str.len_bytes().to_numpy().astype(np.int64) + 1)
        text = "\n".join(texts.to_list()).encode() + b"\n"
        places = np.concatenate([[-1], ends - 1]).astype(np.int32)
        rows = len(texts)
        return self.look_up(text, places, 1, 0, _read_keys(text, places, rows, 1, [0])[0])

    def look_up(self, text: bytes, places: Array, width: int, column: int, keys_B: Array) -> Array:
        """Return the same of a column of a block, by the keys of its cells."""
        codes_B = np.empty(len(keys_B), np.uint32)
        start = done = 0
        with self.lock:
            while done < len(keys_B):
                page = _call(
                    "look_up",
                    _address(text),
                    places.ctypes.data,
                    width,
                    column,
                    start,
                    len(keys_B),
                    keys_B.ctypes.data,
                    codes_B.ctypes.data,
                    self._slots.ctypes.data,
                    len(self._slots) - 1,
                    self._texts.ctypes.data,
                    len(self._texts),
                    self._ends.ctypes.data,
                    len(self._ends) - 1,
                    self._none,
                    self._size,
                )
                self._size, start = page[16], page[17]
                done = start
                if done < len(keys_B):
                    self._grow()
        return codes_B

    def _grow(self) -> None:
        if self._size < len(self._ends) - 1:
            self._texts = np.concatenate([self._texts, np.empty_like(self._texts)])
            return
        free = np.zeros((4 * len(self._slots), 2), np.int64)
        _call("grow", self._slots.ctypes.data, len(self._slots), free.ctypes.data, len(free) - 1)
        self._slots = free
        self._ends = np.concatenate([self._ends, np.zeros(3 * (len(self._ends) - 1), np.int64)])

    def __len__(self) -> int:
        return self._size - self._none

    def values(self) -> pl.Series:
        """Return the texts by number."""
        if len(self._values) < len(self):
            ends = self._ends[self._none : self._size + 1].tolist()
            text = self._texts[: ends[-1]].tobytes()
            if text.isascii():  # in one call, not in one a text
                whole = text.decode()
                found = [whole[start:end] for start, end in pairwise(ends)]
            else:
                found = [text[start:end].decode() for start, end in pairwise(ends)]
            self._values = pl.Series("value", found, dtype=pl.String)
        return self._values


@dataclass
class Wanted:
    """Names of columns to read as numbers, of those whose texts are coded, and of times. compiled: by
    compiled code."""

    numbers: set[str] = field(default_factory=set)
    coded: set[str] = field(default_factory=set)
    times: set[str] = field(default_factory=set)
    compiled: bool = False


@dataclass(frozen=True)
class PlainBlock:
    """A block's rows. numbers: by name, nan where there is none. keys: by name, of `texts`' cells."""

    block: bytes
    places: Array
    names: list[str]
    separator: str
    missing: Sequence[str]
    numbers: dict[str, Array]
    keys: dict[str, Array]

    def codes(self, name: str, dictionary: KeyDictionary) -> Array:
        """Return the codes (B,) of a column whose keys were read."""
        return dictionary.look_up(
            self.block, self.places, len(self.names), self.names.index(name), self.keys[name]
        )

    def texts(self, names: Sequence[str]) -> dict[str, pl.Series]:
        """Return columns as stripped text, None for no value."""
        return dict(
            zip(names, _texts(self.block, self.names, self.separator, names, self.missing), strict=True)
        )


def read_plain(
    block: bytes, num_rows: int, names: list[str], separator: str, data: TableDataConfig, wanted: Wanted
) -> PlainBlock | None:
    """Read a block without quotes whose lines end in \\n or \\r\\n; None where a row has not its columns, or
    something in it needs a closer look."""
    width, sign = len(names), separator.encode()
    if len(sign) > 1 or width == 1 or not num_rows:
        return None
    if b"\r" in block:
        block = block.replace(b"\r\n", b"\n")
    if not block.endswith(b"\n"):
        block += b"\n"
    if not block.isascii() and (_ODD.search(block) or not _is_text(block)):
        return None
    places = np.empty(num_rows * width + 1, np.int32)
    if not _call("find", _address(block), len(block), sign[0], width, places.ctypes.data, num_rows * width)[
        7
    ]:
        return None
    missing = data.no_value
    numeric = [i for i, name in enumerate(names) if name in wanted.numbers and data.notation is None]
    coded = [i for i, name in enumerate(names) if name in wanted.coded]
    numbers, odd, keys = _read(block, places, num_rows, width, numeric, coded, missing)
    found = {names[i]: numbers[n] for n, i in enumerate(numeric) if not odd[n]}
    closer = [name for name in names if name in wanted.numbers and name not in found]
    for name, texts in zip(closer, _texts(block, names, separator, closer, missing), strict=True):
        values = as_numbers(texts, data)
        if int(values.is_finite().sum()) < len(texts) - texts.null_count():
            return None  # texts are needed, to say what is wrong
        found[name] = values.fill_null(float("nan")).to_numpy()
    times = [name for name in names if name in wanted.times]
    for name, texts in zip(times, _texts(block, names, separator, times, missing), strict=True):
        second_B = seconds(texts, data.dayfirst)
        if second_B.null_count() > texts.null_count():
            return None
        found |= part_columns(name, second_B)
    return PlainBlock(
        block, places, names, separator, missing, found, {names[i]: keys[n] for n, i in enumerate(coded)}
    )


def _is_text(block: bytes) -> bool:
    try:
        block.decode()
    except UnicodeDecodeError:
        return False
    return True


def _read(
    text: bytes,
    places: Array,
    num_rows: int,
    width: int,
    numeric: Sequence[int],
    coded: Sequence[int],
    missing: Sequence[str] = (),
) -> tuple[Array, Array, Array]:
    """Return the numbers (columns, B), which columns hold other things, and the keys (columns, B)."""
    numbers_CB, keys_CB = np.empty((len(numeric), num_rows)), np.empty((len(coded), num_rows), np.int64)
    odd_C, numeric_C, coded_C = (
        np.array(values, np.int64) for values in ([0] * len(numeric), numeric, coded)
    )
    none = np.array([_key(text.encode()) for text in missing if len(text.encode()) <= _SHORT], np.int64)
    _call(
        "read",
        _address(text),
        len(text),
        places.ctypes.data,
        num_rows,
        width,
        numeric_C.ctypes.data,
        len(numeric),
        numbers_CB.ctypes.data,
        odd_C.ctypes.data,
        coded_C.ctypes.data,
        len(coded),
        keys_CB.ctypes.data,
        none.ctypes.data,
        len(none),
        _POWERS.ctypes.data,
    )
    return numbers_CB, odd_C, keys_CB


def _read_keys(text: bytes, places: Array, num_rows: int, width: int, columns: Sequence[int]) -> Array:
    return _read(text, places, num_rows, width, [], columns)[2]


def _texts(
    block: bytes, names: list[str], separator: str, wanted: Sequence[str], missing: Sequence[str]
) -> list[pl.Series]:
    if not wanted:
        return []
    places = sorted(names.index(name) for name in wanted)
    frame = pl.read_csv(
        block,
        has_header=False,
        columns=places,
        schema={str(i): pl.String for i in range(len(names))},
        separator=separator,
        quote_char=None,
    )
    cleaned = clean(frame.get_columns(), missing)
    return [cleaned.to_series(places.index(names.index(name))) for name in wanted]


def count(codes_B: Array, held_B: Array, counts: Array) -> None:
    """Add to counts (codes, 2) how often each code occurs in rows that are not held out, and in those that
    are. codes_B may be (B, L)."""
    items = codes_B.size // max(1, len(codes_B))
    _call("count", codes_B.ctypes.data, len(codes_B), items, held_B.ctypes.data, counts.ctypes.data)


def ids(
    numbers: Sequence[tuple[Array, Sequence[float]]], codes: Sequence[tuple[Array, Array]], num_rows: int
) -> Array:
    """Return ids_BF int32: the buckets of numbers by their edges, then the ids of codes by their lookups."""
    edges = [np.array(of, np.float64) for _, of in numbers]
    pages = [
        (raw_B.ctypes.data, of.ctypes.data, len(of)) for (raw_B, _), of in zip(numbers, edges, strict=True)
    ]
    pages += [(codes_B.ctypes.data, lookup.ctypes.data, -1) for codes_B, lookup in codes]
    columns = np.array(pages, np.int64)
    ids_BF = np.empty((num_rows, len(pages)), np.int32)
    _call("ids", num_rows, columns.ctypes.data, len(pages), ids_BF.ctypes.data)
    return ids_BF


def dense(columns: Sequence[NumericColumn], raw: Mapping[str, Array], num_rows: int) -> Array:
    """Return dense_BN float32 as `NumericColumn.dense` makes it; its logarithms are numpy's, to the bit."""
    width = sum(column.width for column in columns)
    dense_BN = np.empty((num_rows, width), np.float32)
    at = dense_BN.ctypes.data
    scaled_B = np.empty(num_rows)
    for column in columns:
        raw_B = raw[column.name]
        if column.log:
            np.log1p(np.abs(raw_B, out=scaled_B), out=scaled_B)
        facts = np.array([column.mean, column.std, MAX_DEVIATION])
        scaled = scaled_B.ctypes.data if column.log else 0
        _call(
            "dense", num_rows, raw_B.ctypes.data, scaled, facts.ctypes.data, column.indicator, at, 4 * width
        )
        at += 4 * column.width
    return dense_BN


def _address(text: bytes) -> int:
    return int(np.frombuffer(text, np.uint8).ctypes.data) if text else 0
