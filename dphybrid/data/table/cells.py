"""Turns the cells of a table into numbers, times, items and ids.

Ids: 0 = no value, 1 = unknown value. Letters: B rows, L items of a bag.
"""

import ast
import json
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from itertools import repeat
from typing import Any, cast

import numpy as np
import polars as pl

Array = np.ndarray

MISSING_ID, UNKNOWN_ID, FIRST_ID = 0, 1, 2
PADDING_ID = -1
"""Fills up the positions behind the last item of a bag."""
FEW = 64
"""Up to this many rows, cells are read by Python loops. polars' engine takes longer to start: one predicted
row, 1 ms, would take 1.3 ms more, and one of pandas 4 ms more."""
_MAX_DEVIATION = 100.0
"""Standard deviations at which a number is clipped, so that one absurd value cannot dominate a batch."""
_PYTHON = {type(None), bool, int, float, str, bytes, date, datetime, time, timedelta, Decimal}
"""Types of Python that polars reads as they are."""
_IS_NUMBER = r"^[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?$"
_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|[+-]?inf"
_ISO = r"^\d{4}-\d{1,2}-\d{1,2}$"
_QUICK_FORMS = {10: "%Y-%m-%d", 16: "%Y-%m-%d %H:%M", 19: "%Y-%m-%d %H:%M:%S"}
"""Forms of dates, by their number of letters."""
_ZONE = r"(?:Z|UTC|GMT|(?:UTC|GMT)?[+-]\d{1,2}(?::?\d{2})?)(?:\s*[\[(][^\])]*[\])])?|\b[A-Z]{3,4}"
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_PART = r"\d+(?:\.\d+)?\s*(?:d(?:ays?)?|h(?:ours?|rs?)?|m(?:in(?:ute)?s?)?|s(?:ec(?:ond)?s?)?)"
_DURATION = rf"^{_PART}(?:\s*{_PART})*$"
_ISO_DURATION = r"^P(?:\d+D)?(?:T[\dHM.]+[HMS])?$"
_DAYS_OF_CLOCK, _CLOCK = r"^(\d+) days?,? (\d+:)", r"^(\d+d)?(\d+):([0-5]\d):([0-5]\d(?:\.\d+)?)$"
_SIGN, _CODE = r"[A-Z]{0,2}\p{Sc}", "USD|EUR|GBP|CHF|JPY|INR"
CURRENCY = f"(?:{_SIGN}|{_CODE})"
_WORD = r"\w+(?:['’]\w+)*"
_QUOTED = r"""\"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'"""
_ITEM = rf"""{_QUOTED}|[^,\s"'][^,]*"""
IS_LIST = rf"(?s)^\s*(?:\[.*\]|[({{](?:\s*(?:{_QUOTED})\s*,?)+[)}}]|set\(\))\s*$"
"""A list as JSON and Python write it, also as a tuple or a set of texts."""
TRUE, FALSE = ("1", "t", "true", "y", "yes"), ("0", "f", "false", "n", "no")
"""The two values of a flag, in lower case."""
Notation = tuple[str, str, bool]
"""Decimal mark, thousands separator (empty: none), and whether numbers have other marks, as in $5 or 7%."""
DASHES = ("-", "--", "–", "—")
"""What stands for no value among numbers and dates."""
_NO_NUMBERS = (*DASHES, "inf", "infinity", "+inf", "-inf", "+infinity", "-infinity", "nan")
"""Lower-cased texts that count as no value among numbers."""
_ZONES = {
    name: hours
    for hours, names in (
        *((0, "UTC GMT WET"), (1, "CET BST WEST"), (2, "EET CEST"), (3, "EEST MSK"), (9, "JST")),
        *((-4, "EDT"), (-5, "EST CDT"), (-6, "CST MDT"), (-7, "MST PDT"), (-8, "PST")),
    )
    for name in names.split()
}
"""Hours of named time zones."""


def is_list_of_items(dtype: pl.DataType) -> bool:
    """Return whether a type is a list of texts or of whole numbers, which can be read as a bag."""
    inner = getattr(dtype, "inner", None)
    items = (pl.String, pl.Categorical, pl.Enum, pl.Null)  # Null: of lists that are all empty
    return inner is not None and (inner.is_integer() or inner in items)


def is_odd(dtype: pl.DataType) -> bool:
    """Return whether values of a type are neither single values nor lists that can be read as bags."""
    other = dtype in (pl.Binary, pl.Object) or isinstance(dtype, pl.BaseExtension)
    return (dtype.is_nested() or other) and not is_list_of_items(dtype)


def of_objects(name: str, values: Sequence[Any], as_text: Callable[[Any], str] | None = None) -> pl.Series:
    """Return a column of Python objects. None, nan, pd.NA and NaT are no value; arrays and tuples are lists,
    and so is a number or a text beside them.

    as_text: for values of other types; without it, they raise TypeError."""
    types = set(map(type, values))
    if {int, float} <= types:  # nan would make floats of whole numbers, which hold them up to 2^53 only
        values = [None if value != value else value for value in values]
    if types <= _PYTHON and datetime not in types:
        return pl.Series(name, values, strict=False)

    def plain(value: Any) -> Any:
        if isinstance(value, np.generic):
            value = value.item()
        elif hasattr(value, "to_pydatetime"):
            value = value.to_pydatetime()
        if type(value) is datetime and value.tzinfo is not None:
            return value.isoformat()  # as a text: polars would turn each into the same zone
        if isinstance(value, list | tuple | np.ndarray):
            return list(map(plain, value))
        if value is None or type(value).__name__ in ("NAType", "NaTType"):
            return None
        if type(value) in _PYTHON or isinstance(value, Mapping):
            return value
        if as_text is None:
            raise TypeError(
                f"column {name!r} holds a {type(value).__name__} ({value!r:.60}), which is no text, number, "
                "date or list; write it as one of these, or leave the column out"
            )
        return as_text(value)

    found = list(map(plain, values))
    if list in (kinds := set(map(type, found))):
        known = (None if value != value else value for value in found)
        lists = ((_parsed(value) if isinstance(value, str) else None, value) for value in known)
        found = [value if items is None else items for items, value in lists]
        found = [value if value is None or isinstance(value, list) else [value] for value in found]
        if str in kinds:
            found = [value and [item if item is None else str(item) for item in value] for value in found]
    return pl.Series(name, found, strict=False)


def by_column(records: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the values of records by column; None where a record lacks one."""
    orders = set(map(tuple, records))
    if len(orders) == 1:  # transposed without a look-up for each cell
        values = zip(*(record.values() for record in records), strict=True)
        return dict(zip(orders.pop(), map(list, values), strict=True))
    names = dict.fromkeys(name for record in records for name in record)
    return {name: [record.get(name) for record in records] for name in names}


def clean(columns: Iterable[pl.Series], missing: Iterable[str]) -> list[pl.Series]:
    """Return the cells of columns as stripped text, or as Float64 or whole numbers if they are numbers; None
    for cells that mean no value. Booleans, dates and times keep their type, lists of items stay lists, and
    durations become seconds. A text that means no value also means its number: -999 and -999.0 are one."""
    # Columns are named by number, as polars reads names such as `*` as patterns. One call covers all columns,
    # with one expression per type: starting polars' engine takes longer than the work on few cells.
    named = [cells.alias(str(position)) for position, cells in enumerate(columns)]
    none = {"", *missing}
    marks = [float(text) for text in none if re.fullmatch(_NUMBER, text)]
    names: dict[pl.DataType, list[str]] = {}
    for cells in named:
        if len(cells) > FEW or not _is_clean(cells, none, marks):
            names.setdefault(cells.dtype, []).append(cells.name)
    if not names:
        return named
    frame = pl.DataFrame(named)
    frame = frame.with_columns(_read(each, dtype, marks) for dtype, each in names.items())
    # A separate step: in one step with the above, polars would strip the texts twice.
    schema = frame.schema  # made anew by each access
    texts = pl.col(name for each in names.values() for name in each if schema[name] == pl.String)
    is_none = texts.is_in(list(none))
    if marks:
        # A comma before other than three digits is a decimal mark.
        numbers = texts.str.replace(r"^([+-]?\d+),(\d{1,2}|\d{4,})$", "$1.$2").cast(pl.Float64, strict=False)
        is_none |= numbers.is_in(marks).fill_null(False)
    return frame.with_columns(pl.when(~is_none).then(texts)).get_columns()


def _is_clean(cells: pl.Series, none: set[str], marks: list[float]) -> bool:
    """Return whether cleaning would leave these few cells unchanged."""
    if cells.dtype == pl.String and not marks:  # str.strip() strips at least the blanks that polars strips
        return all(text is None or (text == text.strip() and text not in none) for text in cells.to_list())
    if marks or not (cells.dtype.is_integer() or cells.dtype == pl.Float64):
        return False
    # A nan differs from itself; cleaning turns it into None.
    return cells.dtype.is_integer() or not any(number != number for number in cells.to_list())


def _read(names: list[str], dtype: pl.DataType, marks: list[float]) -> pl.Expr:
    """Return the expression that reads columns of a type as stripped text or as numbers."""
    cells = pl.col(names)
    if is_list_of_items(dtype):
        return cells.arr.to_list() if isinstance(dtype, pl.Array) else cells
    if dtype == pl.Boolean or (dtype.is_temporal() and dtype != pl.Duration):
        return cells
    if dtype == pl.Duration:
        cells, dtype = cells.dt.total_microseconds() / 1e6, pl.Float64()
    if not dtype.is_numeric():
        return cells.cast(pl.String).str.strip_chars()
    if isinstance(dtype, pl.Decimal) and not dtype.scale:  # whole numbers, exact beyond 2^53
        cells, dtype = cells.cast(pl.Int128), pl.Int128()
    if dtype in (
        pl.Float16,
        pl.Float32,
    ):  # via its text: 0.1 stays 0.1, as in a CSV file, instead of 0.10000000149
        cells = cells.cast(pl.String).cast(pl.Float64)
    if marks:
        cells = pl.when(~cells.cast(pl.Float64).is_in(marks)).then(cells)
    return cells if dtype.is_integer() else cells.cast(pl.Float64).fill_nan(None)


def as_texts(cells: pl.Series) -> pl.Series:
    """Return cells as the texts that a file would hold: whole numbers without a decimal mark, also those of
    floats, true and false, dates as 2024-12-31, and times of day only where there are some; with the zone,
    where there is one."""
    if cells.dtype == pl.String:
        return cells
    if isinstance(cells.dtype, pl.Datetime):
        if cells.dtype.time_zone is not None:
            return cells.dt.to_string("%Y-%m-%d %H:%M:%S%.f%:z")
        return cells.cast(pl.String).str.replace(r"\.0+$", "").str.strip_suffix(" 00:00:00")
    texts = cells.cast(pl.String)
    if cells.dtype.is_float():
        # pandas makes floats of whole numbers beside a missing one: 7.0 is 7.
        whole = (cells == cells.floor()) & (cells.abs() < 1e38)
        return cells.cast(pl.Int128, strict=False).cast(pl.String).zip_with(whole, texts)
    return texts


def number_texts(cells: pl.Series) -> pl.Series:
    """Return numbers as texts of one form, with all digits of whole ones: 7 for 7.0, +7, 007 and 7E0, 1 for
    True. Other texts stay as they are."""
    texts = as_texts(cells.cast(pl.Int8) if cells.dtype == pl.Boolean else cells)
    if cells.dtype != pl.String or not texts.str.contains(r"^0\d|[^\d]").any():
        return texts
    texts = texts.str.replace("^(?i:true)$", "1").str.replace("^(?i:false)$", "0")
    texts = texts.str.replace(r"^\+?(-?)0*(\d+?)(?:\.0*)?$", "$1$2").str.replace("^-0$", "0")
    others = texts.str.contains(r"\d") & texts.str.contains(r"[.eE]") & texts.str.contains(_IS_NUMBER)
    if not others.any():
        return texts
    numbers = texts.set(~others, None).cast(pl.Float64, strict=False)
    return as_texts(numbers).zip_with(numbers.is_finite().fill_null(False), texts)


def texts_of(cells: pl.Series, form: str, notation: Notation, ignore_case: bool) -> pl.Series:
    """Return cells as the texts of a column of categories, each value in one form.

    form: text; number, where 7, 7.0 and +7 are one value, written in `notation`, and infinity and a dash
    are none; or FALSE/TRUE, the words for the values of a flag, where True, TRUE, 1, 1.0 and yes are one."""
    if cells.dtype == pl.List:
        if form == "text" and not ignore_case:
            return cells
        items = cells.explode().drop_nulls().unique()
        texts = texts_of(items, form, notation, ignore_case)
        if texts.equals(items):
            return cells
        return cells.list.eval(pl.element().replace(items, texts).drop_nulls())
    texts = as_texts(cells) if form == "text" else _in_form(cells, form, notation)
    return texts.str.to_lowercase() if ignore_case else texts


def _in_form(cells: pl.Series, form: str, notation: Notation) -> pl.Series:
    if form == "number":
        plain = plain_numbers(cells, *notation)
        texts = number_texts(
            plain.zip_with(plain.is_not_null(), cells) if cells.dtype == pl.String else cells
        )
        return texts.set(is_no_number(texts), None)
    no, yes = form.split("/")
    words = dict.fromkeys(FALSE, no) | dict.fromkeys(TRUE, yes)
    texts = as_texts(cells)
    found = texts.replace_strict(words, default=None)
    if found.null_count() == texts.null_count():
        return found
    low = texts.str.to_lowercase().str.replace(r"^([01])\.0*$", "$1")
    return low.replace_strict(words, default=None).fill_null(texts)


def is_no_number(cells: pl.Series) -> pl.Series:
    """Return a mask (B,) of dashes and of numbers that are not finite, which count as no value."""
    return cells.cast(pl.String).str.to_lowercase().is_in(_NO_NUMBERS).fill_null(False)


def numbers_of(cells: pl.Series, decimal: str = ".", thousands: str = "", marks: bool = False) -> pl.Series:
    """Return `read_numbers` of the cells of a column of numbers, where true counts as 1 and false as 0."""
    if cells.dtype == pl.Boolean:
        return cells.cast(pl.Float64)
    numbers = read_numbers(cells, decimal, thousands, marks)
    if cells.dtype != pl.String or numbers.null_count() == cells.null_count():
        return numbers
    truth = cells.str.to_lowercase().replace_strict({"true": 1.0, "false": 0.0}, default=None)
    return numbers.zip_with(truth.is_null(), truth.cast(pl.Float64))


def plain_numbers(cells: pl.Series, decimal: str, thousands: str, marks: bool = False) -> pl.Series:
    """Return numbers in a notation as texts such as 1206.73, which polars reads; None for texts that do not
    follow the notation. Numbers in the usual notation are returned as they are, without a check.

    Args:
        decimal: The decimal mark.
        thousands: The separator of groups of three digits (empty: none).
        marks: Read also what `without_marks` takes away.
    """
    if cells.dtype != pl.String:
        return cells
    cells = without_marks(cells) if marks else cells
    if (decimal, thousands) == (".", ""):
        return cells
    if thousands == "'":  # also the typographic one
        cells = cells.str.replace_all("\u2019", thousands, literal=True)
    group = re.escape(thousands)
    # In India, groups have two digits, the last one has three.
    groups = (
        rf"[1-9]\d{{0,2}}(?:{group}\d{{2,3}})*{group}\d{{3}}"
        if thousands == ","
        else rf"[1-9]\d{{0,2}}(?:{group}\d{{3}})+"
    )
    whole = rf"(?:{groups}|\d+)" if group else r"\d+"
    mark = re.escape(decimal)
    pattern = rf"^[+-]?(?:{whole}(?:{mark}\d*)?|{mark}\d+)(?:[eE][+-]?\d+)?$"
    texts = cells.str.replace_all(thousands, "", literal=True) if group else cells
    texts = texts.str.replace_all(decimal, ".", literal=True)
    return texts.set(~cells.str.contains(pattern).fill_null(True), None)


def without_marks(cells: pl.Series) -> pl.Series:
    """Return texts of numbers without the marks of currencies and percent; with a minus for brackets, as in
    (0.13), and for the typographic one; with plain blanks; 29k, 3.8M and 1B as 29e3, 3.8e6 and 1e9; and
    durations (2h20m, 1:02:30, 1 days 01:02:30, PT1H2M) as seconds. Other texts stay as they are."""
    texts = cells.str.replace_all(r"[\u{a0}\u{2007}\u{2009}\u{202f}]", " ").str.replace_all(
        "\u2212", "-", literal=True
    )
    texts = texts.str.replace(rf"^([+-]?)\s*(?:{_SIGN}|(?:{_CODE}|Rs\.?)\s)\s*([+-]?[\d.,].*)$", "$1$2")
    texts = texts.str.replace(rf"^(.*\d[.,]?(?:\s?[kKMB])?)\s*(?:{CURRENCY}|%)$", "$1")
    texts = texts.str.replace(rf"^\(\s*{CURRENCY}?\s*(\d[\d.,' ]*?)\s*(?:{CURRENCY}|%)?\s*\)$", "-$1")
    for mark, exponent in (("[kK]", "e3"), ("M", "e6"), ("B", "e9")):
        texts = texts.str.replace(rf"^([+-]?\d[\d.,]*)\s?{mark}$", f"${{1}}{exponent}")
    # The clock of pandas and Python first, then ISO's form, which polars writes.
    texts = texts.str.replace(_DAYS_OF_CLOCK, "${1}d$2").str.replace(_CLOCK, "${1}${2}h${3}m${4}s")
    is_iso = texts.str.contains(_ISO_DURATION).fill_null(False)
    texts = texts.str.replace_all("[PT]", "").str.to_lowercase().zip_with(is_iso, texts)
    is_duration = texts.str.contains(_DURATION).fill_null(False)
    if not is_duration.any():
        return texts
    days, hours, minutes, seconds = (
        texts.str.extract(rf"(\d+(?:\.\d+)?)\s*{unit}").cast(pl.Float64, strict=False).fill_null(0.0)
        for unit in "dhms"
    )
    length = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    return texts.zip_with(~is_duration, length.cast(pl.String))


def read_numbers(cells: pl.Series, decimal: str = ".", thousands: str = "", marks: bool = False) -> pl.Series:
    """Return finite numbers as Float64; None for everything else."""
    numbers = plain_numbers(cells, decimal, thousands, marks).cast(pl.Float64, strict=False)
    # Most columns hold no infinite number; numpy finds this out faster than polars builds a mask.
    if np.isfinite(numbers.to_numpy()).sum() == len(numbers) - numbers.null_count():
        return numbers
    return numbers.set(~numbers.is_finite().fill_null(True), None)


def read_times(cells: pl.Series, day_first: bool) -> pl.Series:
    """Return Datetimes of dates, with or without a time of day, as the clock shows them; None for other
    texts.

    Dates: 2024-12-31, 2024/12/31, 20241231, 31.12.2024, 12/31/2024, 12-31-2024, 12/31/24, 31 Dec 2024,
    December 31, 2024. Clocks: 8:30, 08:30:15.5, 8:30 PM; 083015 after 20241231T. The clock is that of the
    zone, if one is written; see `zones_of`. Years of two digits are 1969 to 2068. day_first: read 31/12/2024,
    not 12/31/2024."""
    if cells.dtype.is_temporal():
        local = cells.dt.replace_time_zone(None) if isinstance(cells.dtype, pl.Datetime) else cells
        return local.cast(pl.Datetime("us"), strict=False)
    texts = as_texts(cells)
    # First the usual forms without regular expressions, which take twenty times as long.
    sizes = texts.str.len_bytes()
    if (form := _QUICK_FORMS.get(cast(int, sizes.max()))) and sizes.min() == sizes.max():
        mark = "T" if "T" in cast(str, texts.drop_nulls()[0]) else " "
        quick = texts.str.to_datetime(form.replace(" ", mark), time_unit="us", strict=False)
        if quick.null_count() == texts.null_count():
            return quick
    words = texts.str.strip_chars().str.replace(r"(\d)T(\d)", "$1 $2")
    if words.str.contains("[A-Za-z]{3}").any():
        words = _with_numbers_of_months(words)
    words = words.str.replace(rf"(:\d{{2}})(?:[.,]\d+)?(\s*[AaPp]\.?[Mm]\.?)?\s*(?:{_ZONE})?$", "$1$2")
    date = words.str.extract(r"^(\S+?),?(?:\s|$)", 1)
    time = words.str.extract(r"^\S+\s+(.+)$", 1).fill_null("00:00:00")
    time = time.str.replace(r"^(\d{2})(\d{2})(\d{2})(?:[.,]\d+)?Z?$", "$1:$2:$3")
    if not date.str.contains(_ISO).all():
        date = _iso_dates(date, day_first)
    found = date.str.to_date("%Y-%m-%d", strict=False)
    if time.str.contains("[AaPp]").any():
        time = (
            time.str.to_uppercase()
            .str.replace(r"^(\d{1,2}) ?([AP])", "$1:00 $2")
            .str.replace_all(".", "", literal=True)
        )
        time = time.str.replace(r"^(\d{1,2}:\d{2}) ?([AP]M)$", "$1:00 $2").str.replace(
            r"(\d)([AP]M)$", "$1 $2"
        )
        half = time.str.to_time("%I:%M:%S %p", strict=False)
        time = time.zip_with(half.is_null(), half.cast(pl.String))
    # With seconds added, one pattern reads all times.
    time = time.zip_with(~time.str.contains(r"^\d{1,2}:\d{2}$"), time + ":00")
    clock = time.str.to_time("%H:%M:%S", strict=False)
    return (
        pl.DataFrame({"date": found, "clock": clock})
        .select(pl.col("date").dt.combine(pl.col("clock")))
        .to_series()
    )


def zones_of(texts: pl.Series) -> pl.Series:
    """Return the minutes by which the zone of each time is ahead of UTC: 0 without one, None for names of
    zones that are not known."""
    zone = texts.str.extract(rf":\d{{2}}(?:[.,]\d+)?(?:\s*[AaPp]\.?[Mm]\.?)?\s*({_ZONE})$", 1)
    zone = (
        zone.str.replace(r"\s*[\[(].*$", "").str.replace("^Z$", "UTC").str.replace("^(?:UTC|GMT)([+-])", "$1")
    )
    parts = (zone.str.extract(r"^([+-])(\d{1,2}):?(\d{2})?$", part) for part in (1, 2, 3))
    sign, hours, minutes = parts
    ahead = hours.cast(pl.Int64) * 60 + minutes.cast(pl.Int64).fill_null(0)
    ahead = ahead * sign.replace_strict({"+": 1, "-": -1}, default=None, return_dtype=pl.Int64)
    named = zone.replace_strict(_ZONES, default=None, return_dtype=pl.Int64) * 60
    return ahead.fill_null(named).set(zone.is_null(), 0)


def _iso_dates(dates: pl.Series, day_first: bool) -> pl.Series:
    """Return dates of any notation as 2024-12-31, None for other texts."""
    slashes = "-$2-$1" if day_first else "-$1-$2"
    found = dates
    for pattern, iso in (
        (r"^(\d{4})(\d{2})(\d{2})$", "$1-$2-$3"),
        (r"^(\d{4})[/.](\d{1,2})[/.](\d{1,2})$", "$1-$2-$3"),
        (r"^(\d{1,2})\.(\d{1,2})\.(\d{4})$", "$3-$2-$1"),
        (r"^(\d{2})\.(\d{2})\.(0\d|[1-5]\d|6[0-8])$", "20$3-$2-$1"),
        (r"^(\d{2})\.(\d{2})\.(\d{2})$", "19$3-$2-$1"),
        (r"^(\d{1,2})[-/](\d{1,2})[-/](\d{4})$", "$3" + slashes),
        (r"^(\d{1,2})/(\d{1,2})/(0\d|[1-5]\d|6[0-8])$", "20$3" + slashes),
        (r"^(\d{1,2})/(\d{1,2})/(\d{2})$", "19$3" + slashes),
    ):
        found = found.str.replace(pattern, iso)
    return found.set(~found.str.contains(_ISO).fill_null(True), None)


def _with_numbers_of_months(words: pl.Series) -> pl.Series:
    """Return dates such as 5 Mar 2024, Mar 5, 2024 and Tue, 05-Mar-2024 as 5.3.2024."""
    low = words.str.to_lowercase().str.replace(r"^(?:mon|tue|wed|thu|fri|sat|sun)[a-z]*\.?,?\s+", "")
    low = low.str.replace(r"^([a-z]{3,9})\.?[\s-]+(\d{1,2})(?:st|nd|rd|th)?,?[\s-]+(\d{4})", "$2.$1.$3")
    low = low.str.replace(r"^(\d{1,2})(?:st|nd|rd|th)?\.?[\s/-]+([a-z]{3,9})\.?,?[\s/-]+(\d{4})", "$1.$2.$3")
    low = low.str.replace(r"^(\d{1,2})[\s/-]([a-z]{3})[\s/-](0\d|[1-5]\d|6[0-8])(\s|$)", "$1.$2.20$3$4")
    low = low.str.replace(r"^(\d{1,2})[\s/-]([a-z]{3})[\s/-](\d{2})(\s|$)", "$1.$2.19$3$4")
    low = low.str.replace(r"^(\d{4})[\s/-]([a-z]{3,9})[\s/-](\d{1,2})", "$3.$2.$1")
    for number, month in enumerate(_MONTHS, 1):
        low = low.str.replace(rf"^(\d{{1,2}})\.{month}[a-z]*\.(\d{{4}})", rf"${{1}}.{number}.${{2}}")
    is_date = low.str.contains(r"^\d{1,2}\.\d{1,2}\.\d{4}")
    return words.zip_with(~is_date.fill_null(False), low.str.to_uppercase())


def time_parts(times: pl.Series) -> list[Array]:
    """Return the hour, the weekday (1: Monday) and the days since 1970 of times (B,), nan for no value."""
    times_B = times.to_numpy()
    days_B = times_B.astype("datetime64[D]")
    none_B, day_B = np.isnat(times_B), days_B.astype(np.int64)
    hour_B = (times_B - days_B).astype("timedelta64[h]").astype(np.int64)
    # + 3: 1970-01-01 was a Thursday.
    return [np.where(none_B, np.nan, part_B) for part_B in (hour_B, (day_B + 3) % 7 + 1, day_B)]


def items_of(cells: pl.Series, separator: str, most: int | None = None) -> pl.Series:
    """Return the items of cells as lists, stripped and without empty ones. Lists as JSON or Python write them
    are read as such, with the text of their items as it is.

    separator: between the items of other texts; []: these are read like lists. most: keep only the last ones,
    which are the newest of a history (None: all)."""
    if cells.dtype == pl.List:
        # The items of lists may be whole numbers or categories, hence the cast to texts.
        items = cells.cast(pl.List(pl.String))
    else:
        texts = as_texts(cells)
        is_list = texts.str.contains(IS_LIST) | (separator == "[]")
        items = texts.str.split("," if separator == "[]" else separator)
        if is_list.any():
            items = _listed(texts.set(~is_list, None)).zip_with(is_list.fill_null(False), items)
    item = pl.element().str.strip_chars()
    items = items.list.eval(item.filter(item != ""))
    return items if most is None else items.list.tail(most)


def _listed(texts: pl.Series) -> pl.Series:
    """Return the items of lists as JSON or Python write them."""
    inner = texts.str.replace(r"(?s)^\s*(?:set\(|[\[({])(.*)[\])}]\s*$", "$1")
    # Arrays of numbers, as numpy writes them.
    blanks = inner.str.contains(r"^[\d.+\-\s]+$").fill_null(False)
    inner = inner.str.replace_all(r"(\d\.?)\s", "$1,").zip_with(blanks, inner)
    item = pl.element().str.strip_chars()
    is_quoted = item.str.contains("(?s)^(?:\".*\"|'.*')$")
    plain = pl.when(is_quoted).then(item.str.slice(1, item.str.len_chars() - 2)).otherwise(item)
    none = ~is_quoted & item.is_in(["None", "null", "nan", "NaN"])
    items = inner.str.extract_all(_ITEM).list.eval(pl.when(~none).then(plain))
    escaped = texts.str.contains("\\", literal=True).fill_null(False)
    if not escaped.any():
        return items
    known = {text: _parsed(text) for text in texts.filter(escaped).unique().to_list()}
    exact = pl.Series([known.get(text) for text in texts.to_list()], dtype=pl.List(pl.String))
    return exact.zip_with(escaped & exact.is_not_null(), items)


def _parsed(text: str) -> list[str] | None:
    """Return the items of a list in JSON or in Python; None for other texts."""
    for parse in (json.loads, ast.literal_eval):
        try:
            found = parse(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        if isinstance(found, list | tuple):
            return [str(item) for item in found if item is not None]
    return None


def words_of(cells: pl.Series, most: int | None = None) -> pl.Series:
    """Return the lower-cased words of cells as lists. most: keep only the first ones (None: all)."""
    words = as_texts(cells).str.to_lowercase().str.extract_all(_WORD)
    return words if most is None else words.list.head(most)


def standardized(numbers_B: Array, log: bool, mean: float, std: float) -> Array:
    """Return numbers (B,) in standard deviations from the mean, 0 for nan. log: mean and std are those of
    sign(x) log(1 + |x|)."""
    # Numbers near the end of float64 may overflow to infinity, which is clipped below.
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
    """Return the bucket (B,) of numbers: 0 for nan, then 1, 2, ... by size. edges: sorted."""
    # With few edges, comparing with each of them takes a sixth of the time of a search.
    if len(edges) < 64 and len(numbers_B) > FEW:
        place_B: Array = np.ones(len(numbers_B), np.uint8)
        for edge in edges:
            place_B += (numbers_B >= edge).view(np.uint8)
    else:
        place_B = 1 + np.searchsorted(edges, numbers_B, side="right")
    place_B[np.isnan(numbers_B)] = 0
    return place_B


def value_ids(numbers_B: Array, known_V: Array, ids_V: Array) -> Array:
    """Return the ids (B,) of whole numbers, nan for no value. known_V: the known ones, by size; ids_V: their
    ids."""
    if not len(known_V):
        found_B: Array = np.full(len(numbers_B), UNKNOWN_ID, np.int32)
    else:
        place_B = np.searchsorted(known_V, numbers_B).clip(max=len(known_V) - 1)
        found_B = np.where(known_V[place_B] == numbers_B, ids_V[place_B], UNKNOWN_ID).astype(np.int32)
    found_B[np.isnan(numbers_B)] = MISSING_ID
    return found_B


def ids_of(texts: Iterable[str | None], known: Mapping[str | None, int], first: int, buckets: int) -> Array:
    """Return the id (B,) of each text (None: no value).

    known: the ids of the known texts and of None. buckets: number of ids from `first` on that unknown texts
    share by a hash; 0: they get UNKNOWN_ID."""
    if not buckets:
        # map instead of a generator: a loop without Python code, twice as fast.
        return np.fromiter(map(known.get, texts, repeat(UNKNOWN_ID)), np.int32)
    # Not hash(): Python salts it differently in each process.
    found = ((text, known.get(text)) for text in texts)
    return np.fromiter(
        (first + zlib.crc32(str(t).encode()) % buckets if i is None else i for t, i in found), np.int32
    )


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
