"""How cells write numbers and dates, and how numbers are scaled for a network. Letters: B rows."""

import re
from functools import lru_cache
from typing import cast

import numpy as np
import polars as pl
from pydantic import Field

from dphybrid.config import Section
from dphybrid.config.tables import TableDataConfig
from dphybrid.data.table.cells import (
    items_of,
    plain_numbers,
    read_numbers,
    read_times,
    signed_log,
    without_marks,
)
from dphybrid.data.table.column import Array, Sample
from dphybrid.data.table.whole import (
    AMOUNTS,
    FEW_VALUES,
    LISTS,
    MANY,
    Trial,
    looks_like_a_count,
    names_a_thing,
    time_of_whole_numbers,
    trial,
    whole_numbers,
)

_INFINITE = ("inf", "infinity", "+inf", "-inf", "+infinity", "-infinity", "nan")
"""Lower-cased texts of numbers that are not finite; they count as no value."""
_NOTATIONS = [(".", ""), (".", ","), (",", "."), (",", "")]
_NOTATIONS += [(decimal, group) for decimal in ".," for group in " '_"]
"""Pairs of decimal mark and thousands separator, in the order in which they are tried."""
Notation = tuple[str, str, bool]
"""Decimal mark, thousands separator (empty: none), and whether numbers have other marks, as in $5 or 7%."""
USUAL: Notation = (".", "", False)
FEW_OTHERS = 0.05
"""Largest share of cells other than numbers (or dates) that is taken for mistakes in a column of them; the
first one is then named as the reason why the column is read otherwise."""

# user_id, "user id" and userId name ids; paid does not.
_NAMES_AN_ID = re.compile(
    r"(?:^|[\W_])(?i:ids?|uid|uuid|guid|code|zip|zipcode|postcode)$|[a-z0-9](?:Id|ID|Code)$"
)
# Digits with marks of decimals or groups of digits.
_WITH_MARKS = r"^[+-]?\d[\d.,' _]*(?:e\d)?$"
_MAY_HAVE_MARKS = r"^(?:[^\p{L}\p{N}]|USD|EUR|GBP|CHF|Rs\.?)*\d"
_WITH_UNIT = r"^[+-]?\d[\d.,]*\s?([A-Za-zµ°][A-Za-z0-9²³/]*)$"
# The look of a date, in any order; `read_times` then decides whether it is one.
_MONTH_NAME = r"(?i:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\.?"
_DATE = (
    r"^\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}(?:[T ,]|$)|^\d{8}T\d{4}"
    rf"|^(?:(?i:[a-z]{{3,9}}),? +)?\d{{1,4}}(?:st|nd|rd|th)?[-/ ]{_MONTH_NAME},?[-/ ]\d"
    rf"|^(?:(?i:[a-z]{{3,9}}),? +)?{_MONTH_NAME}[- ]\d{{1,2}}(?:st|nd|rd|th)?,?[- ]\d{{4}}"
)
_AMBIGUOUS = r"^\d{1,2}[-/]\d{1,2}[-/]\d{2,4}(?:[T ,]|$)"
_SEPARATORS = ("|", ";", ",", "/", " ")
_ANY_SEPARATOR = f"[{''.join(_SEPARATORS)}]"
_SOME_TEXTS = 1000
_FEW = 20
"""Cells that are looked at before a pattern is tried on all cells of a column."""


def is_number(text: str) -> bool:
    """Return whether a text is written as a finite number."""
    try:
        # Python reads 1_000 as a number; polars does not.
        return bool(np.isfinite(float(text))) and "_" not in text
    except ValueError:
        return False


def not_numbers(cells: pl.Series, numbers: pl.Series) -> pl.Series:
    """Return a mask (B,) of the cells that hold neither a number nor infinity. numbers: the cells as read."""
    odd = cells.is_not_null() & numbers.is_null()
    return odd & ~cells.cast(pl.String).str.to_lowercase().is_in(_INFINITE) if odd.any() else odd


@lru_cache(maxsize=1)  # several kinds ask this of one column in turn
def notation_of(sample: Sample) -> tuple[Notation, pl.Series]:
    """Return how a column writes its numbers, and the cells that are not numbers in this notation. The config
    determines it, else the notation that reads the most cells."""
    cells, data = sample.cells, sample.data

    def others(signs: Notation) -> pl.Series:
        return cells.filter(not_numbers(cells, read_numbers(cells, *signs)))

    if sample.typed:  # not written at all
        return USUAL, others(USUAL)
    allowed = [
        (decimal, thousands, False)
        for decimal, thousands in _NOTATIONS
        if data.decimal in ("auto", decimal) and data.thousands in ("auto", thousands)
    ]
    if (
        sample.comma_file
        and data.decimal == "auto"
        and cells.str.contains(r"^[+-]?\d{1,3}(?:\.\d{3})+$").all()
    ):
        return (",", ".", False), others((",", ".", False))
    odd = others(allowed[0])
    if cells.dtype != pl.String or not len(odd):
        return allowed[0], odd
    # Trying all notations takes time; most columns of texts do not look like numbers at all.
    some, marks = odd.head(_FEW), False
    if not some.str.contains(_WITH_MARKS).all():
        # First what excludes most texts: taking marks away takes 15 calls of polars.
        if (
            not some.str.contains(_MAY_HAVE_MARKS).all()
            or not without_marks(some).str.contains(_WITH_MARKS).all()
        ):
            return allowed[0], odd
        marks = True
    # min returns the first of equals, so that the usual notation wins a tie.
    tried = [(*signs[:2], marks) for signs in allowed]
    return min(((signs, others(signs)) for signs in tried), key=lambda found: len(found[1]))


def writes_commas(sample: Sample) -> bool:
    """Return whether a column writes decimals with a comma, so that the file's other columns probably do."""
    if (
        sample.typed
        or sample.cells.dtype != pl.String
        or not sample.cells.head(_FEW).str.contains(r"\d,\d").any()
    ):
        return False
    (decimal, _, _), odd = notation_of(sample)
    return decimal == "," and not len(odd)


def has_leading_zeros(cells: pl.Series) -> bool:
    """Return whether any number of a column is written like 007."""
    return cells.dtype == pl.String and bool(cells.str.contains(r"^-?0\d").any())


@lru_cache(maxsize=1)  # several kinds ask this of one column in turn
def why_not_numeric(sample: Sample) -> str | None:
    """Return why a column is not read as numbers (empty: most cells are other texts); None if it is."""
    why = _why_not_numbers(sample)
    return ids_or_amounts(sample)[0] if why is None else why


@lru_cache(maxsize=1)
def ids_or_amounts(sample: Sample) -> tuple[str | None, str]:
    """Return why the whole numbers of a column are ids (None: they are not), and what to say of a column of
    many whole numbers that is read as amounts (empty: nothing)."""
    name, numbers = sample.name, whole_numbers(plain_numbers(sample.cells, *notation_of(sample)[0]))
    if numbers is None:
        return None, ""
    named = names_a_thing(name)
    num_values = numbers.n_unique()
    if num_values <= FEW_VALUES:
        return ("named like an id" if named else None), ""
    time = time_of_whole_numbers(numbers)
    found = None if time else _trial_of(sample)
    figures = "too few rows for a trial" if found is None else found.text()
    says = "" if found is None else found.says
    if says == "ids" or (named and not says and not looks_like_a_count(numbers)):
        why = "" if says else "by the column's name, "
        return f"many whole numbers that are ids: {why}{figures}; --data.numeric {name} reads amounts", ""
    says_so = num_values > MANY
    return None, f"{AMOUNTS}: {f'they look like {time}' if time else figures}" if says_so else ""


def _trial_of(sample: Sample) -> Trial | None:
    if sample.beside_label is None:
        return None
    cells, label_BC = sample.beside_label()
    if label_BC is None:
        return None
    numbers_B = read_numbers(cells, *notation_of(sample)[0]).to_numpy()
    known_B = ~np.isnan(numbers_B) & ~np.isnan(label_BC).any(1)
    return trial(numbers_B[known_B], label_BC[known_B])


def _why_not_numbers(sample: Sample) -> str | None:
    cells = sample.cells
    if sample.declared:
        return "declared as categories"
    signs, odd = notation_of(sample)
    if len(odd):
        if len(odd) <= FEW_OTHERS * len(cells):
            return f"{odd[0]!r} is not a number; data.missing can list it"
        if odd.n_unique() == 1 and len(odd) < len(cells):
            share = len(odd) / len(cells)
            return (
                f"{odd[0]!r} in {share:.0%} of the cells is perhaps no value, all others are numbers; "
                f"--data.missing '{odd[0]}' reads them"
            )
        return _suggestion(odd, cells, sample)
    if has_leading_zeros(cells):
        return "leading zeros"
    plain = plain_numbers(cells, *signs)
    whole = plain.cast(pl.Int64, strict=False)
    # Float64 holds whole numbers exactly up to 2^53; beyond, ids that differ would become the same number.
    if whole.null_count():
        return "whole numbers beyond 2^53" if plain.str.contains(r"^-?\d{17,}$").any() else None
    # Not abs(): that of the smallest Int64 is negative.
    if max(cast(int, whole.max()), -cast(int, whole.min())) > 2**53:
        return "whole numbers beyond 2^53"
    return "named like an id" if _NAMES_AN_ID.search(sample.name) else None


def looks_like_dates(cells: pl.Series, day_first: bool) -> bool:
    """Return whether all cells are written as dates."""
    return bool(len(cells)) and not len(_not_dates(cells, day_first))


def _not_dates(cells: pl.Series, day_first: bool) -> pl.Series:
    """Return the cells that are not written as dates; all cells if most of the first few are not."""
    if cells.dtype != pl.String or not 2 * int(cells.head(_FEW).str.contains(_DATE).sum()) > min(
        _FEW, len(cells)
    ):
        return cells
    return cells.filter(~cells.str.contains(_DATE) | read_times(cells, day_first).is_null())


def is_day_first(cells: pl.Series, data: TableDataConfig) -> bool | None:
    """Return whether the day comes before the month: from the config, else from the cells; None if the cells
    allow both orders."""
    if data.dayfirst is not None:
        return data.dayfirst
    # With dots the day comes first, and names of months leave no choice.
    if cells.dtype != pl.String:
        return False
    open_ones = cells.filter(cells.str.contains(_AMBIGUOUS))
    if not len(open_ones):
        return False
    unread_month, unread_day = (read_times(open_ones, first).null_count() for first in (False, True))
    return None if unread_month == unread_day else unread_day < unread_month


def how_dates_are_read(cells: pl.Series, day_first: bool) -> str:
    """Return what is to say about how dates are read, starting with a comma; empty if nothing is."""
    notes = []
    if cells.str.contains(_AMBIGUOUS).any() or cells.str.contains(r"^\d{1,2}\.").any():
        has_dots = cells.str.contains(r"^\d{1,2}\.").any()
        notes.append(f"{'day' if day_first or has_dots else 'month'} first")
    if cells.str.contains(
        r"^(?:\d{1,2}/\d{1,2}/|\d{2}\.\d{2}\.|\d{1,2}[- ][A-Za-z]{3}[- ])\d{2}(?:\D|$)"
    ).any():
        notes.append("years of two digits are 1969 to 2068")
    if cells.str.contains(r":\d{2}(?:[.,]\d+)?\s*(?:Z|[A-Z]{3,4}|[+-]\d{2}:?\d{0,2})\b").any():
        notes.append("time zones are left out, the clock stays as written")
    return "".join(f", {note}" for note in notes)


def _suggestion(odd: pl.Series, cells: pl.Series, sample: Sample) -> str:
    """Return a hint how else texts could be read, instead of as categories; empty if there is none. odd: the
    cells that are no numbers."""
    dates = min((_not_dates(odd, first) for first in (False, True)), key=len)
    if not len(dates):
        order = " (with --data.dayfirst true if the day comes first)"
        return f"dates or times, read as categories; --data.times reads hour, weekday and day{order}"
    if len(dates) <= FEW_OTHERS * len(odd):
        return f"{dates[0]!r} is not a date or time; data.missing can list it"
    units = odd.str.extract(_WITH_UNIT, 1).drop_nulls() if odd.dtype == pl.String else odd.clear()
    if len(units) >= (1 - FEW_OTHERS) * len(odd) and units.n_unique() == 1:
        return f"numbers with the unit {units[0]!r}, read as categories; without the unit they are amounts"
    mark = separator_of(cells, is_bag=False)
    if mark:
        with_mark = int(cells.str.contains(r"^\[" if mark == "[]" else re.escape(mark)).sum())
        # A few items in many combinations are lists, too, although most cells may hold a single item.
        few_items = mark != " " and 2 * items_of(cells, mark).explode().n_unique() <= cells.n_unique()
        if few_items or 2 * with_mark > len(cells):
            return (
                f"{with_mark / len(cells):.0%} of the cells hold {mark!r}; --data.bags {sample.name} {LISTS}"
            )
    words = cells.head(_SOME_TEXTS)
    if (
        len(words) >= _FEW
        and words.n_unique() > 0.5 * len(words)
        and float(words.str.count_matches(r"\w+").cast(pl.Float64).sum()) >= 4 * len(words)
    ):
        return f"looks like free text; --data.text {sample.name} reads its words"
    return ""


def separator_of(cells: pl.Series, is_bag: bool) -> str:
    """Return the text between the items of cells such as drama|comedy, "[]" for lists in brackets such as
    ["a", "b"]; empty if there is none. is_bag: the user says that the cells hold several items; otherwise
    the parts must repeat more than the whole cells."""
    if cells.dtype != pl.String or not len(cells):
        return ""
    if cells.str.contains(r"^\[.*\]$").all():
        return "[]"
    if not cells.str.contains(_ANY_SEPARATOR).any():
        return ""
    whole = cells.n_unique()
    for mark in _SEPARATORS:
        parted = cells.filter(cells.str.contains(mark, literal=True))
        if len(parted) < 0.1 * len(cells):
            continue
        if is_bag or mark == "|" or cells.str.split(mark).explode().str.strip_chars().n_unique() < whole:
            return mark
    return ""


class Scale(Section):
    """How a column of numbers is scaled, learned from the training rows. log: numbers first pass through
    sign(x) log(1 + |x|). indicator: a second input is 1 for no value. edges: of the quantile buckets; None:
    no buckets."""

    log: bool = False
    mean: float = 0.0
    std: float = 1.0
    indicator: bool = False
    edges: tuple[float, ...] | None = Field(default=None, repr=False)

    @property
    def num_ids(self) -> int:
        """Number of ids of the buckets; 0 without buckets."""
        # Each edge separates two buckets, and id 0 is for no value.
        return 0 if self.edges is None else len(self.edges) + 2


def fit_scale(numbers_B: Array, num_buckets: int, scale: str = "auto") -> Scale:
    """Return the scale of numbers of training rows (nan: no value). num_buckets: 0 for none. scale: auto (log
    for heavy tails), log, standard or none."""
    known = np.sort(numbers_B[~np.isnan(numbers_B)])
    indicator = len(known) < len(numbers_B)
    if not len(known):
        return Scale(indicator=indicator)
    log = scale == "log" or (scale == "auto" and _has_heavy_tail(known))
    fit = signed_log(known) if log else known
    # `or 1.0`: a constant column has no deviation to divide by.
    mean, std = (0.0, 1.0) if scale == "none" else (float(fit.mean()), float(fit.std()) or 1.0)
    edges = tuple(bucket_edges(known, num_buckets).tolist()) if num_buckets else None
    return Scale(log=log, mean=mean, std=std, indicator=indicator, edges=edges)


def _has_heavy_tail(known: Array) -> bool:
    """Return whether some of the sorted numbers are so far from the others that standardizing would squeeze
    most of them together."""
    low, middle, high, top = np.quantile(known, [0.05, 0.5, 0.95, 0.999])
    with np.errstate(over="ignore"):  # differences of numbers near the end of float64 may be infinite
        far = top - middle > 10 * max(high - low, 1e-12)
    skewed = low >= 0 and high > 30 * max(middle, 1e-12)
    return bool(far or skewed or max(abs(known[0]), abs(known[-1])) > 1e100)


def bucket_edges(known: Array, num_buckets: int) -> Array:
    """Return at most `num_buckets` - 1 edges at quantiles of sorted numbers, in order.

    A value that is frequent enough to fill a bucket gets its own; all others share the remaining buckets.
    """
    shares = np.linspace(0, 1, num_buckets + 1)[1:-1]
    # Not np.unique, which would sort the numbers again.
    starts = np.flatnonzero(np.append(True, known[1:] != known[:-1]))
    large = known[starts[np.diff(starts, append=len(known)) * num_buckets > len(known)]]
    rest = known[~np.isin(known, large)] if len(large) else known
    if not len(large) or not len(rest):
        return np.unique(np.quantile(known, shares))
    # Edges at the value and at the next float64 enclose that value alone.
    around = np.concatenate([large, np.nextafter(large, np.inf)])
    spare = max(0, num_buckets - 1 - len(around))
    inner = np.quantile(rest, np.linspace(0, 1, spare + 2)[1:-1]) if spare else np.empty(0)
    return np.unique(np.concatenate([around, inner]))
