"""The order of rows in time, for splits that hold out the latest rows."""

import numpy as np
import polars as pl

from dphybrid.config.tables import TableDataConfig
from dphybrid.data.batches import Array
from dphybrid.data.table.cells import read_times
from dphybrid.data.table.numbers import is_day_first
from dphybrid.util.errors import UserError


def positions_in_time(texts: pl.Series, field: str, data: TableDataConfig) -> tuple[Array, str]:
    """Return for each text a number by which to sort: that of a number, or the microseconds since 1970 of a
    date; and how the dates were read (empty if there is only one way). field: names the column in messages.

    Raises UserError for texts that are neither, for numbers among dates, and for dates whose order of day and
    month is unknown: texts are never sorted as such.
    """
    numbers = texts.cast(pl.Float64, strict=False)
    if not numbers.null_count() and numbers.is_finite().all():
        return numbers.to_numpy(), ""
    day_first = is_day_first(texts, data)
    # A month is its first day.
    texts = texts.str.replace(r"^(\d{4}-\d{2})$", "${1}-01")
    times = read_times(texts, bool(day_first))
    if times.null_count():
        odd = texts.filter(times.is_null())[0]
        raise UserError(
            f"{field}: {odd!r} is neither a number nor a date such as 2024-12-31 or 2024-12-31 18:30:00, so "
            "rows cannot be ordered by it; correct it, list it in data.missing, or name another column"
        )
    slashes = texts.filter(texts.str.contains(r"^\d{1,2}[-/]\d{1,2}[-/]"))
    if day_first is None:
        raise UserError(
            f"{field}: dates such as {slashes[0]!r} can be read in two ways; set data.dayfirst=true if the "
            "day comes first, else false"
        )
    how = "" if not len(slashes) else f"dates are read {'day' if day_first else 'month'} first"
    return times.dt.epoch("us").cast(pl.Float64).to_numpy().astype(np.float64), how
