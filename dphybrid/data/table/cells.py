"""From the cells of a table to numbers, times, items and ids.

An exported model has a copy of this file, so it imports nothing of the package. Each function takes any cell;
for a few cells in their plain form Python is faster than starting polars' engine, and gives the same values.
Ids: 0 = no value, 1 = unknown value. Letters: B rows, L items of a bag.
"""

import math
import re
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta

import numpy as np
import polars as pl
from polars import selectors

Array = np.ndarray

MISSING_ID, UNKNOWN_ID, FIRST_ID = 0, 1, 2
PADDING_ID = -1
"""Behind the last item of a bag."""
FEW = 64
"""Cells up to which Python reads a column faster than polars."""
_FEW_EDGES = 64
"""Edges up to which comparing with each of them is faster than a search."""
_MAX_DEVIATION = 100.0
"""Standard deviations at which a number is cut off, so that one absurd value cannot drown a batch."""
_SPACES = (*range(9, 14), 32, 133, 160, 5760, *range(8192, 8203), 8232, 8233, 8239, 8287, 12288)
_BLANKS = "".join(map(chr, _SPACES))
"""What polars strips."""
_WORD = r"\w+(?:['’]\w+)*"
_EPOCH = datetime(1970, 1, 1)
_is_plain_number = re.compile(r"[+-]?[0-9]{1,15}(?:\.[0-9]{1,15})?").fullmatch
_is_plain_time = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}(?:[ T](?:[01][0-9]|2[0-3]):[0-5][0-9](?::[0-5][0-9])?)?"
).fullmatch


def is_list_of_items(dtype: pl.DataType) -> bool:
    """Tell whether values of a type are lists of texts or whole numbers, which can be read as bags."""
    inner = getattr(dtype, "inner", None)
    return inner is not None and (inner.is_integer() or inner in (pl.String, pl.Categorical, pl.Enum))


def clean(columns: Iterable[pl.Series], missing: Iterable[str], numbers: bool = False) -> list[pl.Series]:
    """Return columns' cells as stripped text, None for what means no value; lists of items stay lists, and
    with `numbers` columns of numbers are Float64 or whole ones. Durations are read as seconds."""
    given, none = list(columns), {"", *missing}
    if numbers:
        marks = [text for text in none if text[-1:].isdigit() or text in ("inf", "-inf")]
        given = [_typed(cells, marks) if cells.dtype.is_numeric() else cells for cells in given]
    if all(len(cells) <= FEW for cells in given):
        return [_stripped(cells, none, numbers) for cells in given]
    # Numbered, as polars reads names such as `*` as patterns; one expression over all of them, as to start
    # polars' engine for each takes longer than the work.
    frame = pl.DataFrame([cells.alias(str(place)) for place, cells in enumerate(given)])
    frame = frame.with_columns(selectors.duration().dt.total_microseconds() / 1e6)
    texts = [name for name, dtype in frame.schema.items() if not _is_kept(dtype, numbers)]
    if not texts:
        return frame.get_columns()
    stripped = frame.with_columns(pl.col(texts).cast(pl.String).str.strip_chars())
    is_none = pl.col(texts).is_in(pl.Series(list(none)).implode())
    return stripped.with_columns(pl.when(~is_none).then(pl.col(texts))).get_columns()


def _typed(cells: pl.Series, marks: list[str]) -> pl.Series:
    """Return a column of numbers as its text would be read: float32 by its few digits, None for nan and for
    those whose text is one of `marks`."""
    if marks:
        cells = cells.set(cells.cast(pl.String).is_in(marks).fill_null(False), None)
    cells = cells.cast(pl.String).cast(pl.Float64) if cells.dtype == pl.Float32 else cells
    some_nan = cells.dtype.is_float() and (len(cells) > FEW or any(x != x for x in cells.to_list()))
    return cells.fill_nan(None) if some_nan else cells


def _is_kept(dtype: pl.DataType, numbers: bool) -> bool:
    return is_list_of_items(dtype) or (numbers and dtype.is_numeric())


def _stripped(cells: pl.Series, none: set[str], numbers: bool) -> pl.Series:
    if cells.dtype == pl.Duration:
        cells = cells.dt.total_microseconds() / 1e6
    if _is_kept(cells.dtype, numbers):
        return cells
    given = (cells if cells.dtype == pl.String else cells.cast(pl.String)).to_list()
    texts = [None if text is None or (bare := text.strip(_BLANKS)) in none else bare for text in given]
    return cells if cells.dtype == pl.String and texts == given else pl.Series(cells.name, texts, pl.String)


def plain_numbers(cells: pl.Series, decimal: str, thousands: str) -> pl.Series:
    """Return texts as programs write numbers; None for other texts where the notation is another.

    decimal, thousands: signs before decimals and between groups of three digits (empty: none)."""
    if (decimal, thousands) == (".", "") or cells.dtype != pl.String:
        return cells
    group = re.escape(thousands)
    whole = rf"(?:\d{{1,3}}(?:{group}\d{{3}})+|\d+)" if group else r"\d+"
    mark = re.escape(decimal)
    pattern = rf"^[+-]?(?:{whole}(?:{mark}\d*)?|{mark}\d+)(?:[eE][+-]?\d+)?$"
    texts = cells.str.replace_all(thousands, "", literal=True) if group else cells
    texts = texts.str.replace_all(decimal, ".", literal=True)
    return texts.set(~cells.str.contains(pattern).fill_null(True), None)


def read_numbers(cells: pl.Series, decimal: str = ".", thousands: str = "") -> pl.Series:
    """Return finite numbers as Float64, None for everything else."""
    if len(cells) <= FEW and (few := _few_numbers(cells, (decimal, thousands) == (".", ""))) is not None:
        return few
    numbers = plain_numbers(cells, decimal, thousands).cast(pl.Float64, strict=False)
    finite = numbers.is_finite()
    return numbers if finite.all() else numbers.set(~finite.fill_null(True), None)


def _few_numbers(cells: pl.Series, usual: bool) -> pl.Series | None:
    """Return the numbers of cells; None where polars must read them. usual: a point before the decimals."""
    if cells.dtype.is_numeric():
        numbers = cells.cast(pl.Float64, strict=False)
        whole = all(number is None or math.isfinite(number) for number in numbers.to_list())
        return numbers if whole else None
    if cells.dtype != pl.String or not usual:
        return None
    texts = cells.to_list()
    if all(text is None or _is_plain_number(text) for text in texts):
        return pl.Series(cells.name, [None if text is None else float(text) for text in texts], pl.Float64)
    return None


def read_times(cells: pl.Series, day_first: bool) -> pl.Series:
    """Return times (Datetime) of dates such as 2024-12-31, 12/31/2024 and 31.12.2024, with or without a time
    of the day; None for other texts. day_first: 31/12/2024."""
    if cells.dtype.is_temporal():
        return cells.cast(pl.Datetime("us"))
    if len(cells) <= FEW and (few := _few_times(cells)) is not None:
        return pl.Series(cells.name, few, pl.Int64).cast(pl.Datetime("us"))
    words = cells.cast(pl.String).str.strip_chars().str.replace("T", " ", literal=True)
    words = words.str.replace(r"(:\d{2})(?:\.\d+)?\s*(?:Z|[+-]\d{2}:?\d{2})?$", "$1")
    date = words.str.extract(r"^(\S+)", 1)
    time = words.str.extract(r"^\S+ (.+)$", 1).fill_null("00:00:00")
    time = time.zip_with(~time.str.contains(r"^\d{1,2}:\d{2}$"), time + ":00")
    found = date.str.to_date("%Y-%m-%d", strict=False)
    for pattern in ("%Y/%m/%d", "%Y%m%d", "%d.%m.%Y", "%d/%m/%Y" if day_first else "%m/%d/%Y"):
        if found.null_count():
            found = found.zip_with(found.is_not_null(), date.str.to_date(pattern, strict=False))
    clock = time.str.to_time("%H:%M:%S", strict=False)
    return (
        pl.DataFrame({"date": found, "clock": clock})
        .select(pl.col("date").dt.combine(pl.col("clock")))
        .to_series()
    )


def _few_times(cells: pl.Series) -> list[int | None] | None:
    """Return the times of cells, in microseconds since 1970; None where polars must read them."""
    texts = cells.to_list() if cells.dtype == pl.String else [""]
    if not all(text is None or _is_plain_time(text) for text in texts):
        return None
    try:
        times = (None if text is None else datetime.fromisoformat(text) for text in texts)
        return [None if time is None else (time - _EPOCH) // timedelta(microseconds=1) for time in times]
    except ValueError:  # such as the 31st of June
        return None


def time_parts(times: pl.Series) -> list[Array]:
    """Return the hour, the weekday (1: Monday) and the days since 1970 of times (B,), nan for no value."""
    times_B = times.to_numpy()
    days_B = times_B.astype("datetime64[D]")
    none_B, day_B = np.isnat(times_B), days_B.astype(np.int64)
    hour_B = (times_B - days_B).astype("timedelta64[h]").astype(np.int64)
    return [np.where(none_B, np.nan, part_B) for part_B in (hour_B, (day_B + 3) % 7 + 1, day_B)]


def items_of(cells: pl.Series, separator: str, most: int | None = None) -> pl.Series:
    """Return the items of cells as lists, the first `most` ones (None: all): blanks around them are stripped,
    empty ones dropped."""
    if len(cells) <= FEW and cells.dtype == pl.String:
        split = (None if text is None else text.split(separator) for text in cells.to_list())
        lists = [None if texts is None else _items(texts)[:most] for texts in split]
        return pl.Series(cells.name, lists, pl.List(pl.String))
    item = pl.element().str.strip_chars()
    if cells.dtype != pl.List:
        cells = cells.cast(pl.String).str.split(separator)
    items = cells.cast(pl.List(pl.String)).list.eval(item.filter(item != ""))
    return items if most is None else items.list.head(most)


def _items(texts: Iterable[str]) -> list[str]:
    return [item for text in texts if (item := text.strip(_BLANKS))]


def words_of(cells: pl.Series, most: int | None = None) -> pl.Series:
    """Return the lower-cased words of cells as lists, the first `most` ones (None: all)."""
    words = cells.cast(pl.String).str.to_lowercase().str.extract_all(_WORD)
    return words if most is None else words.list.head(most)


def standardized(numbers: Array, log: bool | Sequence[int], mean: float | Array, std: float | Array) -> Array:
    """Return numbers (B,), or (N, B) of N columns, in standard deviations from the mean, 0 for nan. log: of
    sign(x) log(1 + |x|); of several columns, their numbers."""
    found = numbers.copy()
    found[log] = signed_log(found[log])
    # numbers near the end of float64: infinite is then a fair answer to "how far"
    with np.errstate(over="ignore"):
        found -= mean
        found /= std
    np.clip(found, -_MAX_DEVIATION, _MAX_DEVIATION, out=found)
    found[np.isnan(found)] = 0.0
    return found


def signed_log(numbers_B: Array) -> Array:
    """Return sign(x) log(1 + |x|)."""
    found: Array = np.sign(numbers_B) * np.log1p(np.abs(numbers_B))
    return found


def bucket_ids(numbers_B: Array, edges: Sequence[float]) -> Array:
    """Return the bucket (B,) of numbers: 0 for nan, then by size."""
    if len(numbers_B) <= FEW:
        return np.array([1 + bisect_right(edges, x) if x == x else 0 for x in numbers_B.tolist()], np.int32)
    if len(edges) <= _FEW_EDGES:
        place_B: Array = np.ones(len(numbers_B), np.uint8)
        for edge in edges:
            place_B += (numbers_B >= edge).view(np.uint8)
    else:
        place_B = 1 + np.searchsorted(edges, numbers_B, side="right")
    place_B[np.isnan(numbers_B)] = 0
    return place_B


def ids_of(texts: Iterable[str | None], known: Mapping[str | None, int], first: int, buckets: int) -> Array:
    """Return the id (B,) of each text, None for no value.

    known: the ids of texts and of None. buckets: ids from `first` on that unknown texts share by a hash."""
    if not buckets:
        return np.fromiter((known.get(text, UNKNOWN_ID) for text in texts), np.int32)
    # Not hash(): Python salts that of texts anew in each process.
    found = ((text, known.get(text)) for text in texts)
    return np.fromiter(
        (first + zlib.crc32(str(t).encode()) % buckets if i is None else i for t, i in found), np.int32
    )


def bag_ids(lists: pl.Series, ids_of_items: Callable[[pl.Series], Array]) -> Array:
    """Return the ids (B, L) of lists of items, padded; an empty list or None has the id of no value."""
    if len(lists) <= FEW:
        lengths_B = np.array([len(items or ()) for items in lists.to_list()], np.int64)
    else:
        lengths_B = lists.list.len().fill_null(0).to_numpy().astype(np.int64)
    ids_BL = np.full((len(lists), max(1, int(lengths_B.max(initial=1)))), PADDING_ID, np.int32)
    if lengths_B.any():
        items = lists.filter(pl.Series(lengths_B > 0)).explode()
        ids_BL[np.arange(ids_BL.shape[1]) < lengths_B[:, None]] = ids_of_items(items)
    ids_BL[lengths_B == 0, 0] = MISSING_ID
    return ids_BL


def one_width(bags: Sequence[Array], longest: int) -> Array:
    """Return bags (B, L) of several columns as (B, F, L), padded to `longest` at least."""
    width = max(longest, *(ids_BL.shape[1] for ids_BL in bags))
    padded = (
        np.pad(ids_BL, ((0, 0), (0, width - ids_BL.shape[1])), constant_values=PADDING_ID) for ids_BL in bags
    )
    return np.stack(list(padded), axis=1)
