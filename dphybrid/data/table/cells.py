"""From the cells of a table to numbers, times, items and ids.

An exported model has a copy of this file, so it imports nothing of the package.
Ids: 0 = no value, 1 = unknown value. Letters: B rows, L items of a bag.
"""

import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import polars as pl

Array = np.ndarray

MISSING_ID, UNKNOWN_ID, FIRST_ID = 0, 1, 2
PADDING_ID = -1
"""Behind the last item of a bag."""
FEW = 64
"""Rows up to which Python reads cells itself: polars' engine takes as long to start."""
_MAX_DEVIATION = 100.0
"""Standard deviations at which a number is cut off, so that one absurd value cannot drown a batch."""
_WORD = r"\w+(?:['’]\w+)*"


def is_list_of_items(dtype: pl.DataType) -> bool:
    """Tell whether values of a type are lists of texts or whole numbers, which can be read as bags."""
    inner = getattr(dtype, "inner", None)
    return inner is not None and (inner.is_integer() or inner in (pl.String, pl.Categorical, pl.Enum))


def clean(columns: Iterable[pl.Series], missing: Iterable[str]) -> list[pl.Series]:
    """Return columns' cells as stripped text, or as Float64 or whole numbers where they are numbers; None for
    what means no value. Lists of items stay lists, durations become seconds."""
    # Numbered, as polars reads names such as `*` as patterns; one call for all columns and one expression a
    # type, as to start polars' engine for each takes longer than the work on few cells.
    frame = pl.DataFrame([cells.alias(str(place)) for place, cells in enumerate(columns)])
    none = {"", *missing}
    marks = [text for text in none if text[-1:].isdigit() or text in ("inf", "-inf")]
    names: dict[pl.DataType, list[str]] = {}
    for cells in frame.get_columns():
        if len(frame) > FEW or not _is_clean(cells, none, marks):
            names.setdefault(cells.dtype, []).append(cells.name)
    if not names:
        return frame.get_columns()
    frame = frame.with_columns(_read(each, dtype, marks) for dtype, each in names.items())
    # A step of its own: in one with the above, texts would be stripped twice.
    texts = pl.col(name for each in names.values() for name in each if frame.schema[name] == pl.String)
    return frame.with_columns(pl.when(~texts.is_in(list(none))).then(texts)).get_columns()


def _is_clean(cells: pl.Series, none: set[str], marks: list[str]) -> bool:
    """Tell whether a few cells would stay as they are."""
    if cells.dtype == pl.String:  # str.strip() strips all blanks that polars strips
        return all(text is None or (text == text.strip() and text not in none) for text in cells.to_list())
    if marks or not (cells.dtype.is_integer() or cells.dtype == pl.Float64):
        return False
    return cells.dtype.is_integer() or not any(number != number for number in cells.to_list())


def _read(names: list[str], dtype: pl.DataType, marks: list[str]) -> pl.Expr:
    """Return columns of a type as stripped text or numbers."""
    cells = pl.col(names)
    if is_list_of_items(dtype):
        return cells
    if dtype == pl.Duration:
        cells, dtype = cells.dt.total_microseconds() / 1e6, pl.Float64()
    if not dtype.is_numeric():
        return cells.cast(pl.String).str.strip_chars()
    if marks:  # a mark such as -999 is compared with a number's text
        cells = pl.when(~cells.cast(pl.String).is_in(marks)).then(cells)
    if dtype == pl.Float32:  # by its few digits, as its text would be read
        cells = cells.cast(pl.String)
    return cells if dtype.is_integer() else cells.cast(pl.Float64).fill_nan(None)


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
    numbers = plain_numbers(cells, decimal, thousands).cast(pl.Float64, strict=False)
    if np.isfinite(numbers.to_numpy()).sum() == len(numbers) - numbers.null_count():
        return numbers
    return numbers.set(~numbers.is_finite().fill_null(True), None)


def read_times(cells: pl.Series, day_first: bool) -> pl.Series:
    """Return times (Datetime) of dates such as 2024-12-31, 12/31/2024 and 31.12.2024, with or without a time
    of the day; None for other texts. day_first: 31/12/2024."""
    if cells.dtype.is_temporal():
        return cells.cast(pl.Datetime("us"))
    words = cells.cast(pl.String).str.strip_chars().str.replace("T", " ", literal=True)
    words = words.str.replace(r"(:\d{2})(?:\.\d+)?\s*(?:Z|[+-]\d{2}:?\d{2})?$", "$1")
    date = words.str.extract(r"^(\S+)", 1)
    time = words.str.extract(r"^\S+ (.+)$", 1).fill_null("00:00:00")
    # One pattern then reads times with and without seconds.
    time = time.zip_with(~time.str.contains(r"^\d{1,2}:\d{2}$"), time + ":00")
    found = date.str.to_date("%Y-%m-%d", strict=False)
    # A pattern is tried for what the ones before have left: most columns need the first alone.
    for pattern in ("%Y/%m/%d", "%Y%m%d", "%d.%m.%Y", "%d/%m/%Y" if day_first else "%m/%d/%Y"):
        if found.null_count():
            found = found.zip_with(found.is_not_null(), date.str.to_date(pattern, strict=False))
    clock = time.str.to_time("%H:%M:%S", strict=False)
    return (
        pl.DataFrame({"date": found, "clock": clock})
        .select(pl.col("date").dt.combine(pl.col("clock")))
        .to_series()
    )


def time_parts(times: pl.Series) -> list[Array]:
    """Return the hour, the weekday (1: Monday) and the days since 1970 of times (B,), nan for no value."""
    times_B = times.to_numpy()
    days_B = times_B.astype("datetime64[D]")
    none_B, day_B = np.isnat(times_B), days_B.astype(np.int64)
    hour_B = (times_B - days_B).astype("timedelta64[h]").astype(np.int64)
    # + 3: 1970-01-01 was a Thursday.
    return [np.where(none_B, np.nan, part_B) for part_B in (hour_B, (day_B + 3) % 7 + 1, day_B)]


def items_of(cells: pl.Series, separator: str, most: int | None = None) -> pl.Series:
    """Return the items of cells as lists, the first `most` ones (None: all): blanks around them are stripped,
    empty ones dropped."""
    item = pl.element().str.strip_chars()
    if cells.dtype != pl.List:
        cells = cells.cast(pl.String).str.split(separator)
    # Items of lists may be whole numbers or categories.
    items = cells.cast(pl.List(pl.String)).list.eval(item.filter(item != ""))
    return items if most is None else items.list.head(most)


def words_of(cells: pl.Series, most: int | None = None) -> pl.Series:
    """Return the lower-cased words of cells as lists, the first `most` ones (None: all)."""
    words = cells.cast(pl.String).str.to_lowercase().str.extract_all(_WORD)
    return words if most is None else words.list.head(most)


def standardized(numbers_B: Array, log: bool, mean: float, std: float) -> Array:
    """Return numbers (B,) in standard deviations from the mean, 0 for nan. log: of sign(x) log(1 + |x|)."""
    # Numbers near the end of float64: infinite is then a fair answer to "how far".
    with np.errstate(over="ignore"):
        found: Array = ((signed_log(numbers_B) if log else numbers_B) - mean) / std
    found = found.clip(-_MAX_DEVIATION, _MAX_DEVIATION)
    found[np.isnan(found)] = 0.0
    return found


def signed_log(numbers_B: Array) -> Array:
    """Return sign(x) log(1 + |x|)."""
    found: Array = np.sign(numbers_B) * np.log1p(np.abs(numbers_B))
    return found


def bucket_ids(numbers_B: Array, edges: Sequence[float]) -> Array:
    """Return the bucket (B,) of numbers: 0 for nan, then by size."""
    if len(edges) < 64 and len(numbers_B) > FEW:  # to compare with each edge takes a sixth of a search then
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
    lengths_B = lists.list.len().fill_null(0).to_numpy().astype(np.int64)
    ids_BL = np.full((len(lists), max(1, int(lengths_B.max(initial=1)))), PADDING_ID, np.int32)
    if lengths_B.any():
        # A mask is filled row by row, which is the order of the items.
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
