"""The one form of a value: the type that its column got in training. Cells of every container (file, frame,
records) pass `typed` before anything else looks at them."""

import re
from collections.abc import Collection
from typing import Literal

import numpy as np
import polars as pl

from dphybrid.config import Section
from dphybrid.data.batches import Array
from dphybrid.util.errors import UserError

MISSING_ID, UNKNOWN_ID, FIRST_ID = 0, 1, 2
PADDING_ID = -1
"""Fills up the positions behind the last item of a bag."""
BLOCK = 2**20
"""Cells of a column that are read, split or encoded at a time, to limit memory."""
EXACT = 2**53
"""Floats hold whole numbers exactly up to here."""
_FLAGS = {"true": "true", "1": "true", "1.0": "true", "t": "true"}
_FLAGS |= {"false": "false", "0": "false", "0.0": "false", "f": "false"}
UNITS = {"s": 10**6, "ms": 10**3, "us": 1, "ns": 10**-3}
"""Microseconds of a unit of time."""
_ISO = ("%Y-%m-%d %H:%M:%S%.f", "%Y-%m-%d", "%Y-%m-%d %H:%M", "%Y-%m-%d %H:%M:%S%.f%#z", "%Y-%m-%d %H:%M%#z")
"""Forms of ISO 8601, with a blank instead of the T."""

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
    if dtype.is_numeric():
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


def with_gaps(cells: pl.Series, no_value: Collection[str] | None, form: Form | None = None) -> pl.Series:
    """Return cells with None for no value: texts are stripped, and those that mean no value are None, as are
    nan, infinity and the numbers of `form.none`. no_value: None for cells of files, which `files.read_rows`
    gives so."""
    if cells.dtype in (pl.Categorical, pl.Enum, pl.Time, pl.Null):
        cells = cells.cast(pl.String)
    if cells.dtype == pl.String and no_value is not None:
        cells = cells.str.strip_chars()
        cells = cells.set(cells.is_in(["", *no_value]).fill_null(False), None)
    if cells.dtype.is_float() and not (cells.is_finite().all() and not cells.null_count()):
        cells = cells.set(~cells.is_finite().fill_null(True), None)
    if form and form.none and form.type in ("number", "whole"):
        none = pl.Series(form.none, dtype=pl.Float64).implode()
        cells = cells.set(cells.cast(pl.Float64, strict=False).is_in(none).fill_null(False), None)
    return cells


def typed(cells: pl.Series, form: Form, no_value: Collection[str] | None = None) -> pl.Series:
    """Return cells of any container as values of a type; None for no value and for cells of another type.
    no_value: as for `with_gaps`."""
    cells = with_gaps(cells, no_value, form)
    match form.type:
        case "number":
            return _numbers(cells, form)
        case "whole":
            return _whole(cells, form)
        case "flag":
            texts = cells.cast(pl.String).str.to_lowercase()
            return texts.replace_strict(_FLAGS, default=None, return_dtype=pl.String)
        case "time":
            return _times(cells, form)
    if cells.dtype.is_float() and bool((cells == cells.floor()).all()):
        cells = cells.cast(pl.Int64, strict=False)  # 7.0 beside a missing value is the text 7
    return cells.cast(pl.String)


def _numbers(cells: pl.Series, form: Form) -> pl.Series:
    if cells.dtype != pl.String:
        return cells.cast(pl.Float64, strict=False)
    texts = cells.str.replace(",", ".", literal=True) if form.comma else cells
    return with_gaps(texts.cast(pl.Float64, strict=False), None)


def _whole(cells: pl.Series, form: Form) -> pl.Series:
    """Texts and floats are whole numbers if they have no fraction: 7.0 and "7.0" are 7."""
    if type_of(cells.dtype) in ("whole", "flag"):
        return cells.cast(pl.Int64, strict=False)
    exact = (cells if cells.dtype == pl.String else cells.clear(len(cells))).cast(pl.Int64, strict=False)
    if exact.null_count() == cells.null_count():
        return exact
    numbers = _numbers(cells, form)
    whole = numbers.set((numbers != numbers.floor()).fill_null(False), None)
    return exact.fill_null(whole.cast(pl.Int64, strict=False))


def _times(cells: pl.Series, form: Form) -> pl.Series:
    """Times with a zone are read as the clock in the zone of training; without one, the clock stays."""
    if form.unit:
        return (_whole(cells, form) * UNITS[form.unit]).cast(pl.Int64).cast(pl.Datetime("us"))
    if isinstance(cells.dtype, pl.Datetime) and cells.dtype.time_zone:
        cells = cells.dt.convert_time_zone(form.zone) if form.zone else cells
        cells = cells.dt.replace_time_zone(None)
    if isinstance(cells.dtype, pl.Datetime | pl.Date):
        return cells.cast(pl.Datetime("us"))
    found = pl.Series(cells.name, [None] * len(cells), dtype=pl.Datetime("us"))
    if cells.dtype != pl.String:
        return found
    iso = cells.str.replace("T", " ", literal=True)
    if not form.zone:
        iso = iso.str.replace(r"(:\d\d(?:\.\d+)?)(?:Z|[+-]\d\d:?(?:\d\d)?)$", "${1}")
    for dates, texts in ((form.dates, cells), *((each, iso) for each in _ISO)):
        if dates and found.null_count() > cells.null_count():
            zone = "UTC" if "z" in dates else None
            times = texts.str.to_datetime(dates, strict=False, time_unit="us", time_zone=zone)
            if zone:
                times = times.dt.convert_time_zone(form.zone or zone).dt.replace_time_zone(None)
            # %Y also accepts years of two digits.
            found = found.fill_null(times.set((times.dt.year() < 1000).fill_null(False), None))
    return found


def as_names(cells: pl.Series, form: Form, no_value: Collection[str] | None = None) -> pl.Series:
    """Return cells as texts that name users, items or entities: 7, 7.0 and "7.0" are one name if the form is
    whole."""
    return typed(cells, form, no_value).cast(pl.String)


def items_of(cells: pl.Series, separator: str) -> pl.Series:
    """Return lists of the items of each cell, without empty ones. separator: of texts."""
    if cells.dtype == pl.String:
        cells = cells.str.split(separator)
    elif isinstance(cells.dtype, pl.Array):
        cells = cells.arr.to_list()
    elif not isinstance(cells.dtype, pl.List):
        cells = cells.cast(pl.String).reshape((len(cells), 1)).arr.to_list()
    if getattr(cells.dtype, "inner", None) == pl.String:
        cells = cells.list.eval(pl.element().str.strip_chars().replace("", None))
    return cells.list.drop_nulls()


def in_time(values: pl.Series, where: str) -> Array:
    """Return for each value a number (B,) by which to sort, -inf for no value.

    where: names the column, for the message. Raises UserError for values that have no order in time, and if
    all are missing.
    """
    known = with_gaps(values, None).drop_nulls()
    if not len(known):
        raise UserError(f"{where}: the column has no values; name another one")
    kind = type_of(values.dtype)
    if kind not in ("time", "number", "whole"):
        raise UserError(
            f"{where}: {known[0]!r} was not read as a number, date or time, so rows cannot be ordered by it; "
            "set data.dateformat, or name another column"
        )
    form = Form(type="time", zone="UTC") if kind == "time" else Form(type="number")
    numbers_B: Array = typed(values, form).to_physical().cast(pl.Float64).fill_null(-np.inf).to_numpy()
    return numbers_B
