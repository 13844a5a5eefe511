"""Which columns hold dates, and in which order of day and month."""

import polars as pl

from dphybrid.config.tables import TableDataConfig
from dphybrid.data.table.cells import read_times

YEAR_FIRST = r"^\d{4}[-/]\d{1,2}[-/]\d{1,2}(?:[T ]|$)"
_DATE = r"^\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}(?:[T ]|$)"
_FEW = 20


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
