"""Dates and times of tables, as they are written, whatever zone they name."""

import polars as pl

from dphybrid.config.tables import TableDataConfig

YEAR_FIRST = r"^\d{4}[-/]\d{1,2}[-/]\d{1,2}(?:[T ]|$)"
_DATE = r"^\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}(?:[T ]|$)"
_FEW = 20


def read_times(cells: pl.Series, day_first: bool) -> pl.Series:
    """Return times (Datetime) of dates such as 2024-12-31, 12/31/2024 and 31.12.2024, with or without a time
    of the day; None for other texts. day_first: 31/12/2024."""
    if cells.dtype.is_temporal():
        return cells.cast(pl.Datetime("us"))
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


def looks_like_dates(cells: pl.Series, day_first: bool) -> bool:
    """Tell whether all cells are written as dates."""
    for some in (cells.head(_FEW), cells):  # most texts are none, which the first few tell
        if some.dtype != pl.String or not some.str.contains(_DATE).all():
            return False
        if read_times(some, day_first).null_count():
            return False
    return bool(len(cells))


def is_day_first(cells: pl.Series, data: TableDataConfig) -> bool | None:
    """Tell the order of day and month: as the config says, else by what the cells allow; None where that is
    both."""
    if data.dayfirst is not None:
        return data.dayfirst
    if cells.dtype != pl.String or not cells.str.contains("/", literal=True).any():
        return False
    slashes = cells.filter(~cells.str.contains(YEAR_FIRST))
    month, day = (read_times(slashes, first).null_count() for first in (False, True))
    return None if month == day and len(slashes) else day < month
