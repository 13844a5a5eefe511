"""Columns of dates and times: each becomes three numeric ones, the hour of the day, the day of the week (1:
Monday) and the days since 1970, as they are written, whatever zone they name."""

import polars as pl

from dphybrid.data.batches import Array

PARTS = ("hour", "weekday", "day")
SECONDS_A_DAY = 86_400
YEAR_FIRST = r"^\d{4}[-/]\d{1,2}[-/]\d{1,2}(?:[T ]|$)"
"""Dates whose order of day and month nobody has to tell."""


def part_names(name: str) -> list[str]:
    """Return the names of a time's numeric columns."""
    return [f"{name} ({part})" for part in PARTS]


def seconds(texts: pl.Series, day_first: bool) -> pl.Series:
    """Return seconds since 1970 (Float64) of dates such as 2024-12-31, 12/31/2024 and 31.12.2024, with or
    without a time of the day; None for what is none. day_first: 31/12/2024."""
    if texts.dtype.is_temporal():
        texts = texts.cast(pl.Datetime("us")).dt.strftime("%Y-%m-%d %H:%M:%S")
    words = texts.cast(pl.String).str.strip_chars().str.replace("T", " ", literal=True)
    words = words.str.replace(r"(:\d{2})(?:\.\d+)?\s*(?:Z|[+-]\d{2}:?\d{2})?$", "$1")
    date = words.str.extract(r"^(\S+)", 1)
    time = words.str.extract(r"^\S+ (.+)$", 1).fill_null("00:00:00")
    time = time.zip_with(~time.str.contains(r"^\d{1,2}:\d{2}$"), time + ":00")
    slashes = "%d/%m/%Y" if day_first else "%m/%d/%Y"
    found = date.str.to_date("%Y-%m-%d", strict=False)
    for pattern in ("%Y/%m/%d", "%Y%m%d", "%d.%m.%Y", slashes):
        found = found.zip_with(found.is_not_null(), date.str.to_date(pattern, strict=False))
    clock = time.str.to_time("%H:%M:%S", strict=False)
    days = found.cast(pl.Int32).cast(pl.Float64)
    return days * SECONDS_A_DAY + clock.cast(pl.Int64).cast(pl.Float64) / 1e9


def parts(second_B: pl.Series) -> list[pl.Series]:
    """Return the numeric columns of seconds since 1970, nan for no value."""
    days = (second_B / SECONDS_A_DAY).floor()
    hours = ((second_B - days * SECONDS_A_DAY) / 3600).floor()
    weekdays = (days + 3) - ((days + 3) / 7).floor() * 7 + 1  # the first of January 1970 was a Thursday
    return [part.fill_null(float("nan")) for part in (hours, weekdays, days)]


def part_columns(name: str, second_B: pl.Series) -> dict[str, Array]:
    """Return the same by name."""
    found = parts(second_B)
    return {part: values.to_numpy() for part, values in zip(part_names(name), found, strict=True)}
