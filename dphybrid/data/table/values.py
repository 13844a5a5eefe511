"""The one form of a value: the type that its column got in training. Cells of every container (file, frame,
records) pass `typed` before anything else looks at them.

Ids: 0 = no value, 1 = unknown value. Letters: B rows, L items of a bag.
"""

import ast
import re
from collections.abc import Callable, Collection, Sequence
from typing import Literal, cast

import numpy as np
import polars as pl

from dphybrid.config import Section
from dphybrid.util.errors import UserError

Array = np.ndarray

MISSING_ID, UNKNOWN_ID, FIRST_ID = 0, 1, 2
PADDING_ID = -1
"""Fills up the positions behind the last item of a bag."""
EXACT = 2**53
"""Floats hold whole numbers exactly up to here."""
FLAG_WORDS = {"true": "true", "false": "false"}
_FLAGS = FLAG_WORDS | {"1": "true", "1.0": "true", "0": "false", "0.0": "false", "t": "true", "f": "false"}
_UNITS = {"s": 10**6, "ms": 10**3, "us": 1, "ns": 10**-3}
"""Microseconds of a unit of time."""
_EARLIEST, _LATEST = 631_152_000, 4_102_444_800
"""Seconds from 1970 to 1990 and to 2100: whole numbers between them may be times."""


# user_id, "user id", id_user and userId name ids; paid does not.
NAMES_AN_ID = re.compile(
    r"(?:^|[\W_])(?i:ids?|uid|uuid|guid|code|key|no|nr|zip|zipcode|postcode)\.?$|^(?i:ids?)[\W_]"
    r"|[a-z0-9](?:Id|ID|Code|Key|No|Nr)\.?$"
)


class Form(Section):
    """What the values of a column are, and how texts write them.

    Attributes:
        type: number and whole: float64 and int64; flag, text: texts; time: microseconds since 1970.
        dates: The format of times in texts, such as %d/%m/%Y.
        comma: Texts write decimals with a comma.
        zone: The time zone of the clock; empty: that of the cells.
        unit: Of times that are whole numbers since 1970: s, ms, us or ns.
        none: Numbers that mean no value, however they are written: -200 is -200.0, too.
    """

    type: Literal["number", "whole", "flag", "text", "time"] = "text"
    dates: str = ""
    comma: bool = False
    zone: str = ""
    unit: str = ""
    none: tuple[float, ...] = ()


def type_of(dtype: pl.DataType) -> str:
    """Return the type of the values of a column; empty for types that are no single values."""
    if dtype.is_integer() or (isinstance(dtype, pl.Decimal) and dtype.scale == 0):
        return "whole"
    if dtype.is_numeric() or dtype == pl.Duration:
        return "number"
    if dtype in (pl.Date, pl.Datetime):
        return "time"
    if dtype == pl.Boolean:
        return "flag"
    return "text" if dtype in (pl.String, pl.Categorical, pl.Enum, pl.Time, pl.Null) else ""


def is_odd(dtype: pl.DataType) -> bool:
    """Return whether values of a type are neither single values nor lists of texts or whole numbers, which
    can be read as bags."""
    inner = getattr(dtype, "inner", None)
    return not type_of(dtype) and (inner is None or type_of(inner) not in ("text", "whole"))


def with_gaps(cells: pl.Series, no_value: Collection[str] | None) -> pl.Series:
    """Return cells with None for no value: texts are stripped, and those that mean no value are None, as are
    nan and infinity. no_value: None for cells of files, which `files.read_rows` gives so."""
    if cells.dtype in (pl.Categorical, pl.Enum, pl.Time):
        cells = cells.cast(pl.String)
    if cells.dtype == pl.String and no_value is not None:
        cells = cells.str.strip_chars()
        return cells.set(cells.is_in(["", *no_value]).fill_null(False), None)
    if cells.dtype.is_float():
        return cells if cells.is_finite().all() and not cells.null_count() else _finite(cells)
    return cells.cast(pl.String) if cells.dtype == pl.Null else cells


def _finite(numbers: pl.Series) -> pl.Series:
    return numbers.set(~numbers.is_finite().fill_null(True), None)


def typed(cells: pl.Series, form: Form, no_value: Collection[str] | None = None) -> pl.Series:
    """Return cells of any container as values of a type; None for no value and for cells of another type.
    no_value: as for `with_gaps`."""
    cells = with_gaps(cells, no_value)
    match form.type:
        case "number" | "whole":
            numbers = _numbers(cells, form) if form.type == "number" else _whole(cells, form)
            if not form.none:
                return numbers
            none = pl.Series(form.none, dtype=pl.Float64).implode()
            return numbers.set(numbers.cast(pl.Float64).is_in(none).fill_null(False), None)
        case "flag":
            texts = cells.cast(pl.Int64) if cells.dtype.is_float() else cells
            texts = texts.cast(pl.String).str.to_lowercase()
            return texts.replace_strict(_FLAGS, default=None, return_dtype=pl.String)
        case "time":
            return _times(cells, form)
        case _:
            return _texts(cells)


def _numbers(cells: pl.Series, form: Form) -> pl.Series:
    if cells.dtype == pl.Duration:
        return cells.dt.total_microseconds() / 1e6
    if cells.dtype == pl.String:
        if form.comma:
            cells = cells.str.replace(",", ".", literal=True)
        return _finite(cells.cast(pl.Float64, strict=False))
    return cells.cast(pl.Float64, strict=False)


def _whole(cells: pl.Series, form: Form) -> pl.Series:
    """Texts and floats are whole numbers if they have no fraction: 7.0 and "7.0" are 7."""
    if type_of(cells.dtype) in ("whole", "flag"):
        return cells.cast(pl.Int64, strict=False)
    exact = cells.cast(pl.Int64, strict=False) if cells.dtype == pl.String else None
    if exact is not None and exact.null_count() == cells.null_count():
        return exact
    numbers = _numbers(cells, form)
    numbers = numbers.set((numbers != numbers.floor()).fill_null(False), None).cast(pl.Int64, strict=False)
    return numbers if exact is None else exact.fill_null(numbers)


def _times(cells: pl.Series, form: Form) -> pl.Series:
    """Times with a zone are read as the clock in the zone of training; without one, the clock stays."""
    none = pl.Series(cells.name, [None] * len(cells), dtype=pl.Datetime("us"))
    if form.unit:
        since = _whole(cells, form)
        return (since * _UNITS[form.unit]).cast(pl.Int64).cast(pl.Datetime("us"))
    if cells.dtype == pl.String:
        found = none
        for each in dict.fromkeys(
            (form.dates, "%Y-%m-%d %H:%M:%S%.f", "%Y-%m-%dT%H:%M:%S%.f", "%Y-%m-%d", "%+", "%Y-%m-%d %H:%M")
        ):
            if each and found.null_count() > cells.null_count():
                found = found.fill_null(_parsed_times(cells, each, form.zone))
        return found
    if not isinstance(cells.dtype, pl.Datetime | pl.Date):
        return none
    if isinstance(cells.dtype, pl.Datetime) and cells.dtype.time_zone:
        cells = cells.dt.convert_time_zone(form.zone) if form.zone else cells
        cells = cells.dt.replace_time_zone(None)
    return cells.cast(pl.Datetime("us"))


def _parsed_times(texts: pl.Series, dates: str, zone: str) -> pl.Series:
    if dates == "%+" and not zone:
        texts, dates = texts.str.replace(r"(?:Z|[+-]\d\d:?(?:\d\d)?)$", "").str.replace("T", " "), "%F %T%.f"
    zoned = dates == "%+" or "%z" in dates
    if dates == "%+":
        # A blank for T, and hours alone behind the sign, as databases write them.
        texts = texts.str.replace(r"^(\d{4}-\d\d-\d\d) ", "${1}T").str.replace(r"([+-]\d\d)$", "${1}:00")
    found = texts.str.to_datetime(dates, strict=False, time_unit="us", time_zone="UTC" if zoned else None)
    if zoned:
        found = found.dt.convert_time_zone(zone or "UTC").dt.replace_time_zone(None)
    # %Y also accepts years of two digits.
    return found.set((found.dt.year() < 1000).fill_null(False), None)


def as_names(cells: pl.Series, form: Form, no_value: Collection[str] | None = None) -> pl.Series:
    """Return cells as texts that name users, items or entities: 7, 7.0 and "7.0" are one name if the form is
    whole."""
    return typed(cells, form, no_value).cast(pl.String)


def unit_of(whole: pl.Series) -> str:
    """Return the unit in which whole numbers are times from 1990 to 2100; empty if they are none."""
    low, high = whole.min(), whole.max()
    if low is None or high is None:
        return ""
    for unit, us in _UNITS.items():
        one = 10**6 / us
        if low >= _EARLIEST * one and high <= _LATEST * one:  # type: ignore[operator]
            return unit
    return ""


def _texts(cells: pl.Series) -> pl.Series:
    if cells.dtype.is_float() and bool((cells == cells.floor()).all()):
        cells = cells.cast(pl.Int64, strict=False)  # 7.0 beside a missing value is the text 7
    return cells.cast(pl.String)


def items_of(cells: pl.Series, separator: str, most: int | None = None) -> pl.Series:
    """Return lists of the first `most` items of each cell, without empty ones. separator: of texts; [] for
    lists as JSON and Python write them."""
    if cells.dtype == pl.String:
        if separator == "[]":
            cells = pl.Series(cells.name, [_list(text) for text in cells], dtype=pl.List(pl.String))
        else:
            cells = cells.str.split(separator)
    elif isinstance(cells.dtype, pl.Array):
        cells = cells.arr.to_list()
    elif not isinstance(cells.dtype, pl.List):
        cells = cells.cast(pl.String).reshape((len(cells), 1)).arr.to_list()
    if getattr(cells.dtype, "inner", None) == pl.String:
        cells = cells.list.eval(pl.element().str.strip_chars().replace("", None))
    lists = cells.list.drop_nulls()
    return lists if most is None else lists.list.head(most)


def _list(text: str | None) -> list[str] | None:
    """Return the items of a list in a text; of another text itself as the only item."""
    if not text:
        return None
    try:
        found = ast.literal_eval(text.replace("null", "None") if "null" in text else text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return [text]
    return [str(item) for item in found if item is not None] if isinstance(found, list) else [text]


def bag_ids(lists: pl.Series, ids_of_items: Callable[[pl.Series], Array]) -> Array:
    """Return the ids (B, L) of lists of items, padded; an empty list or None gets the id of no value."""
    lengths_B = lists.list.len().fill_null(0).to_numpy().astype(np.int64)
    ids_BL = np.full((len(lists), max(1, int(lengths_B.max(initial=1)))), PADDING_ID, np.int32)
    if lengths_B.any():
        # Assigning through a mask goes row by row, which is the order of the exploded items.
        items = lists.filter(pl.Series(lengths_B > 0)).explode()
        ids_BL[np.arange(ids_BL.shape[1]) < lengths_B[:, None]] = ids_of_items(items)
    ids_BL[lengths_B == 0, 0] = MISSING_ID
    return ids_BL


def one_width(bags: Sequence[Array], longest: int) -> Array:
    """Return bags (B, L) of several columns as (B, F, L), padded to at least `longest` items."""
    width = max(longest, *(ids_BL.shape[1] for ids_BL in bags))
    padded = (
        np.pad(ids_BL, ((0, 0), (0, width - ids_BL.shape[1])), constant_values=PADDING_ID) for ids_BL in bags
    )
    return np.stack(list(padded), axis=1)


def is_either_order(times: pl.Series, dates: str) -> bool:
    """Return whether dates of this format could also have day and month in the other order."""
    if dates[:2] not in ("%d", "%m") or not times.dtype.is_temporal():
        return False
    return int(cast(int, times.dt.day().max() or 0)) <= 12


def in_time(values: pl.Series, where: str, dates: str = "") -> Array:
    """Return for each value a number (B,) by which to sort, -inf for no value.

    where: names the column, for the message. dates: the format of the column's texts, if it was inferred.
    Raises UserError for values that have no order in time, for dates whose order of day and month is unknown,
    and if all are missing.
    """
    kind = type_of(values.dtype)
    if kind not in ("time", "number", "whole"):
        shown = values.drop_nulls().head(1).to_list()
        raise UserError(
            f"{where}: {shown[0]!r} was not read as a number, date or time, so rows cannot be ordered by it; "
            "set data.dateformat, or name another column"
            if shown
            else f"{where}: the column has no values; name another one"
        )
    if is_either_order(values, dates):
        raise UserError(
            f"{where}: its dates can be read in two ways; set data.dateformat, such as {dates} if they are "
            "written so"
        )
    if isinstance(values.dtype, pl.Datetime) and values.dtype.time_zone:
        values = values.dt.convert_time_zone("UTC")
    found = typed(values, Form(type="time" if kind == "time" else "number"))
    numbers_B: Array = found.to_physical().cast(pl.Float64).fill_null(-np.inf).to_numpy()
    if not np.isfinite(numbers_B).any():
        raise UserError(f"{where}: the column has no values; name another one")
    return numbers_B
