"""How cells write numbers and dates, and how a network receives numbers. Letters: B rows."""

import re
from functools import lru_cache
from typing import cast

import numpy as np
import polars as pl
from pydantic import Field

from dphybrid.config import Section
from dphybrid.config.tables import TableDataConfig
from dphybrid.data.table.cells import plain_numbers, read_numbers, read_times, signed_log
from dphybrid.data.table.column import Array, Sample

_INFINITE = ("inf", "infinity", "+inf", "-inf", "+infinity", "-infinity", "nan")
"""Lower-cased texts of numbers that are not finite, which count as no value."""
_NOTATIONS = [(".", ""), (".", ","), (",", "."), (",", "")]
_NOTATIONS += [(decimal, group) for decimal in ".," for group in " '_"]
"""Signs of decimals and of groups that are tried, in this order."""
FEW_OTHERS = 0.05
"""Share of cells that are not numbers up to which the first one is named as the reason."""

_NAMES_AN_ID = re.compile(
    r"(?:^|[\W_])(?i:ids?|uid|uuid|guid|code|zip|zipcode|postcode)$|[a-z0-9](?:Id|ID|Code)$"
)
_WITH_MARKS = r"^[+-]?\d[\d.,' _]*$"
YEAR_FIRST = r"^\d{4}[-/]\d{1,2}[-/]\d{1,2}(?:[T ]|$)"
_DATE = r"^\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}(?:[T ]|$)"
_FEW = 20


def is_number(text: str) -> bool:
    """Tell whether a text is written as a finite number."""
    try:
        return bool(np.isfinite(float(text))) and "_" not in text
    except ValueError:
        return False


def no_numbers(cells: pl.Series, numbers: pl.Series) -> pl.Series:
    """Return which cells (B,) hold neither a number nor infinity. numbers: what was read of them."""
    odd = cells.is_not_null() & numbers.is_null()
    return odd & ~cells.cast(pl.String).str.to_lowercase().is_in(_INFINITE) if odd.any() else odd


@lru_cache(maxsize=1)  # several kinds ask in turn
def notation_of(sample: Sample) -> tuple[tuple[str, str], pl.Series]:
    """Return the signs before decimals and between groups of three digits (empty: none) of a column's
    numbers, as the config says, else as most of its cells are read; and the cells that are no numbers
    then."""
    cells, data = sample.cells, sample.data

    def others(signs: tuple[str, str]) -> pl.Series:
        return cells.filter(no_numbers(cells, read_numbers(cells, *signs)))

    fits = [
        (decimal, thousands)
        for decimal, thousands in _NOTATIONS
        if data.decimal in ("auto", decimal) and data.thousands in ("auto", thousands)
    ]
    odd = others(fits[0])
    if len(fits) == 1 or cells.dtype != pl.String or not len(odd):
        return fits[0], odd
    if not odd.head(_FEW).str.contains(_WITH_MARKS).all():
        return fits[0], odd
    return min(((signs, others(signs)) for signs in fits), key=lambda found: len(found[1]))


def has_leading_zeros(cells: pl.Series) -> bool:
    """Tell whether a number of a column is written like 007."""
    return cells.dtype == pl.String and bool(cells.str.contains(r"^-?0\d").any())


@lru_cache(maxsize=1)  # several kinds ask in turn
def why_no_number(sample: Sample) -> str | None:
    """Return why a column is not read as numbers (empty: most cells are none), None where it is."""
    cells = sample.cells
    if cells.dtype.is_float():
        return None
    signs, odd = notation_of(sample)
    if len(odd):
        few = len(odd) <= FEW_OTHERS * len(cells)
        return f"{odd[0]!r} is not a number; data.missing can name it" if few else _other_kind(odd)
    if has_leading_zeros(cells):
        return "leading zeros"
    plain = plain_numbers(cells, *signs)
    whole = plain.cast(pl.Int64, strict=False)
    if whole.null_count():
        large = plain.dtype == pl.String and plain.str.contains(r"^-?\d{17,}$").any()
        return "whole numbers beyond 2^53" if large else None
    if cast(int, whole.abs().max()) > 2**53:
        return "whole numbers beyond 2^53"
    return "named like an id" if _NAMES_AN_ID.search(sample.name) else None


def looks_like_dates(cells: pl.Series, day_first: bool) -> bool:
    """Tell whether all cells are written as dates."""
    return bool(len(cells)) and not len(_no_dates(cells, day_first))


def _no_dates(cells: pl.Series, day_first: bool) -> pl.Series:
    """Return the cells that are not written as dates; all of them, where most of the first few are not."""
    if cells.dtype != pl.String or not 2 * int(cells.head(_FEW).str.contains(_DATE).sum()) > min(
        _FEW, len(cells)
    ):
        return cells
    return cells.filter(~cells.str.contains(_DATE) | read_times(cells, day_first).is_null())


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


def _other_kind(cells: pl.Series) -> str:
    """Return what texts could be read as instead of categories."""
    odd = min((_no_dates(cells, first) for first in (False, True)), key=len)
    if not len(odd):
        order = ", --data.dayfirst true where the day comes first"
        return f"dates or times, read as categories; --data.times reads hour, weekday and day{order}"
    if len(odd) <= FEW_OTHERS * len(cells):
        return f"{odd[0]!r} is not a date or time; data.missing can name it"
    several = 2 * int(cells.cast(pl.String).str.contains("|", literal=True).sum()) > len(cells)
    return "most cells hold '|'; --data.bags reads the items between" if several else ""


class Scale(Section):
    """What the training rows tell of a column of numbers. log: they pass through sign(x) log(1 + |x|).
    indicator: a second input says where there is none. edges: of the quantile buckets, None for none."""

    log: bool = False
    mean: float = 0.0
    std: float = 1.0
    indicator: bool = False
    edges: tuple[float, ...] | None = Field(default=None, repr=False)

    @property
    def num_ids(self) -> int:
        """Ids of the buckets, 0 without."""
        return 0 if self.edges is None else len(self.edges) + 2


def fit_scale(numbers_B: Array, num_buckets: int, scale: str = "auto") -> Scale:
    """Learn from training rows (nan: no value). num_buckets 0: none. scale: auto (log for heavy tails), log,
    standard or none."""
    known = np.sort(numbers_B[~np.isnan(numbers_B)])
    indicator = len(known) < len(numbers_B)
    if not len(known):
        return Scale(indicator=indicator)
    log = scale == "log" or (scale == "auto" and _has_heavy_tail(known))
    fit = signed_log(known) if log else known
    mean, std = (0.0, 1.0) if scale == "none" else (float(fit.mean()), float(fit.std()) or 1.0)
    edges = tuple(bucket_edges(known, num_buckets).tolist()) if num_buckets else None
    return Scale(log=log, mean=mean, std=std, indicator=indicator, edges=edges)


def _has_heavy_tail(known: Array) -> bool:
    low, middle, high, top = np.quantile(known, [0.05, 0.5, 0.95, 0.999])
    with np.errstate(over="ignore"):
        far = top - middle > 10 * max(high - low, 1e-12)
    skewed = low >= 0 and high > 30 * max(middle, 1e-12)
    return bool(far or skewed or max(abs(known[0]), abs(known[-1])) > 1e100)


def bucket_edges(known: Array, num_buckets: int) -> Array:
    """Return at most `num_buckets` - 1 edges at quantiles of sorted numbers, sorted.

    A value that would fill whole buckets gets one of its own, and the rest share the others.
    """
    shares = np.linspace(0, 1, num_buckets + 1)[1:-1]
    # By hand, as np.unique would sort them again.
    starts = np.flatnonzero(np.append(True, known[1:] != known[:-1]))
    large = known[starts[np.diff(starts, append=len(known)) * num_buckets > len(known)]]
    rest = known[~np.isin(known, large)] if len(large) else known
    if not len(large) or not len(rest):
        return np.unique(np.quantile(known, shares))
    # An edge on either side of a value, so that it is alone between them.
    around = np.concatenate([large, np.nextafter(large, np.inf)])
    spare = max(0, num_buckets - 1 - len(around))
    inner = np.quantile(rest, np.linspace(0, 1, spare + 2)[1:-1]) if spare else np.empty(0)
    return np.unique(np.concatenate([around, inner]))
