"""The order of rows in time, for splits that hold out the latest rows."""

import numpy as np
import polars as pl

from dphybrid.config.tables import RowFiles
from dphybrid.data.batches import Array
from dphybrid.data.table.cells import DASHES, read_times, zones_of
from dphybrid.data.table.numbers import is_day_first
from dphybrid.util.errors import UserError

_YEAR_MONTH, _MONTH_YEAR = (
    r"^((?:19|20)\d\d)[-./](0?[1-9]|1[0-2])$",
    r"^(0?[1-9]|1[0-2])[-./]((?:19|20)\d\d)$",
)


def positions_in_time(texts: pl.Series, field: str, data: RowFiles) -> tuple[Array, str]:
    """Return for each text a number by which to sort: that of a number, or the microseconds since 1970 of a
    date, -inf for no value or a dash; and how the dates were read (empty if there is only one way). field:
    names the column in messages.

    Raises UserError for texts that are neither, for numbers among dates, and for dates whose order of day and
    month is unknown: texts are never sorted as such.
    """
    is_known = texts.is_not_null() & ~texts.is_in(DASHES)
    if not is_known.all():
        found = np.full(len(texts), -np.inf)
        found[is_known.to_numpy()], how = positions_in_time(texts.filter(is_known), field, data)
        return found, how
    texts = _with_dates(texts, field, data)
    day_first = is_day_first(texts, data)
    numbers = texts.cast(pl.Float64, strict=False)
    if not numbers.null_count() and numbers.is_finite().all():
        return numbers.to_numpy(), ""
    times = read_times(texts, bool(day_first))
    ahead = zones_of(texts)
    if times.null_count() or ahead.null_count():
        odd = texts.filter(times.is_null() | ahead.is_null())[0]
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
    instants = times.dt.epoch("us") - ahead * 60_000_000
    return instants.cast(pl.Float64).to_numpy().astype(np.float64), how


def _with_dates(texts: pl.Series, field: str, data: RowFiles) -> pl.Series:
    """Return texts with months (2024-02, 2010.10, 10.2010) as their first day, and with dates of eight digits
    as 31/12/2024, where all of them are dates with the year last and not all are dates with the year first.
    Raises UserError for dates of six digits, unless all are a year and a month."""
    if texts.str.contains(r"^\d{4}\.0\d$").any():  # 2010.10 as a number loses its last zero
        texts = texts.str.replace(r"^(\d{4}\.1)$", "${1}0")
    for month, iso in ((_YEAR_MONTH, "${1}-${2}-01"), (_MONTH_YEAR, "${2}-${1}-01")):
        if texts.str.contains(month).all():
            return texts.str.replace(month, iso)
    texts = texts.str.replace(_YEAR_MONTH, "${1}-${2}-01")
    six = texts.str.contains(r"^\d{6}$").all() and not texts.str.contains(r"^(?:19|20)..(?:0|1[0-2])").all()
    eight = texts.str.contains(r"^\d{7,8}$").all() and bool(read_times(texts, False).null_count())
    if not (six or eight):
        return texts
    parted = texts.str.zfill(6 if six else 8).str.replace(r"^(\d\d)(\d\d)(\d\d|(?:19|20)\d\d)$", "$1/$2/$3")
    firsts = (False, True) if data.dayfirst is None else (data.dayfirst,)
    if all(read_times(parted, first).null_count() for first in firsts):
        return texts
    if six:
        raise UserError(
            f"{field}: {texts[0]!r} may be a date, but any two of its six digits may be the year; write "
            "dates as 2024-12-31"
        )
    return parted
