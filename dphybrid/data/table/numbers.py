"""How cells write numbers and dates, and how numbers are scaled for a network. Letters: B rows."""

import re
from functools import cached_property, lru_cache
from typing import cast

import numpy as np
import polars as pl
from pydantic import ConfigDict, Field

from dphybrid.config import Section
from dphybrid.config.tables import RowFiles
from dphybrid.data.table.cells import (
    CURRENCY,
    DASHES,
    FALSE,
    FIRST_ID,
    IS_LIST,
    TRUE,
    Notation,
    bucket_ids,
    is_no_number,
    items_of,
    number_texts,
    plain_numbers,
    read_numbers,
    read_times,
    signed_log,
    value_ids,
    without_marks,
)
from dphybrid.data.table.column import Array, Sample
from dphybrid.util.text import as_flags

_NOTATIONS = [(".", ""), (".", ","), (",", "."), (",", "")]
_NOTATIONS += [(decimal, group) for decimal in ".," for group in " '_"]
"""Pairs of decimal mark and thousands separator, in the order in which they are tried."""
USUAL: Notation = (".", "", False)
FEW_OTHERS = 0.05
"""Largest share of cells other than numbers (or dates) that is taken for mistakes in a column of them; the
first one is then named as the reason why the column is read otherwise."""

# user_id, "user id", id_user and userId name ids; paid does not.
_NAMES_AN_ID = re.compile(
    r"(?:^|[\W_])(?i:ids?|uid|uuid|guid|code|key|no|nr|zip|zipcode|postcode)\.?$|^(?i:ids?)[\W_]"
    r"|[a-z0-9](?:Id|ID|Code|Key|No|Nr)\.?$"
)
_NUMBERS_ROWS = re.compile(
    r"^(?:|0|#|n|x|unnamed.*|(?:.*[\W_])?(?:index|idx|rows?|rownames?|row_?num|row_?number|line|record|number"
    r"|num|seq|sequence|serial|obs|case))$",
    re.IGNORECASE,
)

_KNOTS = 128
"""Knots of a number (model.bins): with more different whole numbers, they do not tell all apart."""
_REPEATED = 0.25
"""Whole numbers repeat if this share of the rows holds a value that occurs again."""
LISTS = "reads the items between the marks"
"""Words in the reason of a column of categories whose cells look like lists."""
WITH_MARKS = r"^[+-]?\d[\d.,'\u2019 _]*(?:e\d)?$"
"""Digits with marks of decimals or groups of digits."""
_MAY_HAVE_MARKS = (
    rf"^(?:[^\p{{L}}\p{{N}}]|{CURRENCY}|Rs\.?|PT?)*\d(?:[^\p{{L}}]|{CURRENCY}|[acdehimnorstuyDEHkKMBST])*$"
)
"""What `without_marks` makes numbers of, and more: digits with signs and the letters of currencies, of 3.8M
and of durations."""
_MAY_BE_NUMBER = r"^[+-]?[\d.,'\u2019 _]+(?:[eE][+-]?\d+)?$"
"""What every notation without marks of currencies and units reads, and more."""
_UNLIKE = (
    (r"\d\s?m\b", r"\d\s?[kK]\b", "'m' is read as minutes beside 'k' for thousands; millions are written M"),
    (r"%\s*$", r"\d$", "percents are read without their sign, beside numbers without one"),
)
"""Two notations in one column that may mean different amounts, and what is said of them."""
_WITH_UNIT = r"^[+-]?\d[\d.,]*\s?([A-Za-zµ°][A-Za-z0-9²³/]*)$"
# The look of a date, in any order; `read_times` then decides whether it is one.
_MONTH_NAME = r"(?i:(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*)\.?"
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


def dashes_of(cells: pl.Series) -> list[str]:
    """Return what is to say of dashes in a column of numbers or dates."""
    return [f"{dash!r} counts as no value" for dash in DASHES if (cells == dash).any()]


def not_numbers(cells: pl.Series, numbers: pl.Series) -> pl.Series:
    """Return a mask (B,) of the cells that hold neither a number nor infinity nor a dash. numbers: the cells
    as read."""
    odd = cells.is_not_null() & numbers.is_null()
    return odd & ~is_no_number(cells) if odd.any() else odd


@lru_cache(maxsize=1)  # several kinds ask this of one column in turn
def notation_of(sample: Sample) -> tuple[Notation, pl.Series]:
    """Return how a column writes its numbers, and the cells that are not numbers in this notation. The config
    determines it, else the notation that reads the most cells."""
    cells, data = sample.cells, sample.data

    def others(some: pl.Series, signs: Notation) -> pl.Series:
        return some.filter(not_numbers(some, read_numbers(some, *signs)))

    if sample.typed:  # not written at all
        return USUAL, others(cells, USUAL)
    allowed = [
        (decimal, thousands, False)
        for decimal, thousands in _NOTATIONS
        if data.decimal in ("auto", decimal) and data.thousands in ("auto", thousands)
    ]
    if sample.comma_file:  # 1.500 and 2,527 are then 1500 and 2.527
        commas = [(".", "") if not cells.str.contains("[.,]").any() else (",", "."), (",", "")]
        allowed.sort(key=lambda signs: signs[:2] not in commas)
    odd = others(cells, allowed[0])
    if cells.dtype != pl.String or not len(odd):
        return allowed[0], odd
    # Trying all notations takes time; most columns of texts do not look like numbers at all.
    some, marks = odd.head(_FEW), False
    if not some.str.contains(WITH_MARKS).all():
        # First what excludes most texts: taking marks away takes 15 calls of polars.
        if 2 * int(some.str.contains(_MAY_HAVE_MARKS).sum()) < len(some):
            return allowed[0], odd
        marks = bool(without_marks(some).str.contains(WITH_MARKS).any())
    # Cells that no notation reads are left out of the trial; without a mark, all notations read the same.
    able = cells if marks else cells.filter(cells.str.contains(_MAY_BE_NUMBER))
    if not marks and not able.str.contains("[.,'\u2019 _]").any():
        return allowed[0], odd
    # min returns the first of equals, so that the usual notation wins a tie.
    best = min(((*signs[:2], marks) for signs in allowed), key=lambda signs: len(others(able, signs)))
    return best, others(cells, best)


def flag_of(cells: pl.Series) -> str:
    """Return the words of a flag as FALSE/TRUE, as `Category.type` has them; empty if cells are no flag."""
    if cells.head(_SOME_TEXTS).n_unique() > 2 * len(TRUE + FALSE):
        return ""
    words = cells.unique().to_list()
    low = {word.lower() for word in words}
    named = low - {"0", "1", "0.0", "1.0"}  # digits alone are numbers
    both = named <= {*TRUE, *FALSE} and named & {*TRUE} and named & {*FALSE}
    if both and len(words) == 2:  # known by the words that the table has
        return "/".join(sorted(words, key=lambda word: word.lower() in TRUE))
    if both and len(named) == 2:
        return "/".join(sorted(named, key=TRUE.__contains__))
    # One word alone may be anything, such as the country no.
    return "false/true" if both or low <= {"true", "false"} else ""


def are_numbers(sample: Sample) -> bool:
    """Return whether all cells of a category are numbers, so that 7 and 7.0 are one value. Leading zeros, and
    several ways to write a fraction, as in the versions 1.1 and 1.10, belong to texts."""
    cells = sample.cells
    signs, odd = notation_of(sample)
    if len(odd) or has_leading_zeros(cells):
        return False
    plain = plain_numbers(cells, *signs)
    fractions = plain.filter(plain.str.contains(r"\.\d*[1-9]\d*$")).unique()
    if sample.declared and fractions.str.ends_with("0").any():
        return False
    return number_texts(fractions).n_unique() == len(fractions)


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


def numbers_rows(name: str) -> bool:
    """Return whether a column's name says that it numbers the rows. Amounts may count up, too, such as
    years."""
    return bool(_NUMBERS_ROWS.search(name) or _NAMES_AN_ID.search(name))


def has_leading_zeros(cells: pl.Series) -> bool:
    """Return whether any number of a column is written like 007."""
    return cells.dtype == pl.String and bool(cells.str.contains(r"^-?0\d").any())


@lru_cache(maxsize=1)  # several kinds ask this of one column in turn
def why_not_numeric(sample: Sample) -> str | None:
    """Return why a column is not read as numbers (empty: most cells are other texts); None if it is."""
    cells = sample.cells
    if sample.declared:
        return "declared as categories"
    signs, odd = notation_of(sample)
    if len(odd):
        if few := _few_others(odd, cells, "number"):
            return few
        return _suggestion(odd, cells, sample)
    if has_leading_zeros(cells):
        return "leading zeros"
    # Float64 holds whole numbers exactly up to 2^53; beyond, ids that differ would become the same number.
    # 7.97E+17 is no id, and floats are ids only if they repeat.
    written = cells if sample.typed else cells.filter(~cells.str.contains("[eE]"))
    floats = sample.floats or written.str.ends_with(".0").any()
    whole = whole_numbers(written, signs)
    if whole is None:
        digits = plain_numbers(written, *signs).str.contains(r"^-?\d{17,}(?:\.0*)?$")
        return "whole numbers beyond 2^53" if not floats and digits.any() else None
    largest = max(cast(int, whole.max() or 0), -cast(int, whole.min() or 0))
    if largest > 2**53 and (not floats or _repeat(whole)):
        return "whole numbers beyond 2^53"
    return "named like an id" if _NAMES_AN_ID.search(sample.name) else None


def whole_numbers(cells: pl.Series, signs: Notation) -> pl.Series | None:
    """Return numbers as whole ones; None if some are fractions."""
    plain = plain_numbers(cells, *signs).drop_nulls()
    if plain.dtype.is_integer():
        return plain
    # First what takes no regular expressions: fractions, mostly among the first cells, and digits alone.
    for some in (plain.head(_FEW), plain):
        numbers = some.cast(pl.Float64, strict=False)
        if (numbers != numbers.floor()).any():
            return None
    plain = plain.filter(numbers.is_finite())  # without dashes and infinity, which are no value
    for whole in (plain.cast(pl.Int64, strict=False), number_texts(plain).cast(pl.Int128, strict=False)):
        if not whole.null_count():
            return whole
    return None


def repeat(sample: Sample) -> bool:
    """Return whether the numbers of a column are whole, of more values than a number has knots, and repeat.
    Decided without the label."""
    rows = sample.cells if sample.more is None else sample.more.drop_nulls()
    whole = whole_numbers(rows, notation_of(sample)[0])
    if whole is None or whole.n_unique() <= _KNOTS:
        return False
    return _repeat(whole)


def _repeat(numbers: pl.Series) -> bool:
    return float(numbers.is_duplicated().mean() or 0) >= _REPEATED  # type: ignore[arg-type]


def may_be_grouped(cells: pl.Series) -> str:
    """Return a number such as 1.500, in a column whose points may all stand before groups of three digits,
    beside whole numbers; empty if there is none."""
    with_point = (
        cells.filter(cells.str.contains(".", literal=True)) if cells.dtype == pl.String else cells.clear()
    )
    if not 0 < len(with_point) < len(cells) or not with_point.str.contains(r"^-?[1-9]\d{0,2}\.\d{3}$").all():
        return ""
    return str(with_point[0])


def unlike(cells: pl.Series) -> list[str]:
    """Return what is to say of notations in one column that may mean different amounts."""
    found = [
        why
        for one, other, why in _UNLIKE
        if cells.str.contains(one).any() and cells.str.contains(other).any()
    ]
    signs = cells.str.extract(f"({CURRENCY})", 1).drop_nulls().unique().sort().to_list()
    if len(signs) > 1:
        found.append(f"amounts in {' and '.join(signs)} are read as if of one currency")
    return found


def looks_like_dates(cells: pl.Series, day_first: bool) -> bool:
    """Return whether all cells are written as dates."""
    return bool(len(cells)) and not len(_not_dates(cells, day_first))


def _not_dates(cells: pl.Series, *day_first: bool) -> pl.Series:
    """Return the cells that are not written as dates, in the order of day and month that leaves the fewest;
    all cells if most of the first few are not. day_first: the orders to try."""
    if cells.dtype != pl.String:
        return cells
    cells = cells.filter(~cells.is_in(DASHES))
    some = cells.head(_FEW)
    if not 2 * int(some.str.contains(_DATE).sum()) > len(some):
        return cells
    other = ~cells.str.contains(_DATE)
    return min((cells.filter(other | read_times(cells, first).is_null()) for first in day_first), key=len)


def is_day_first(cells: pl.Series, data: RowFiles) -> bool | None:
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


def how_dates_are_read(cells: pl.Series, day_first: bool) -> list[str]:
    """Return what is to say about how dates are read."""
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
    return notes


def _few_others(odd: pl.Series, cells: pl.Series, noun: str) -> str:
    """Return what is to say if only a few cells, or those of one text, are no numbers or dates; else an empty
    text. odd: these cells."""
    if len(odd) <= FEW_OTHERS * len(cells):
        return f"{odd[0]!r} is not a {noun}; data.missing can list it"
    if odd.n_unique() > 1 or len(odd) == len(cells):
        return ""
    return (
        f"{odd[0]!r} in {len(odd) / len(cells):.0%} of the cells is perhaps no value, every other one is a "
        f"{noun}; {as_flags({'data.missing': [odd[0]]})} reads them"
    )


def _suggestion(odd: pl.Series, cells: pl.Series, sample: Sample) -> str:
    """Return a hint how else texts could be read, instead of as categories; empty if there is none. odd: the
    cells that are no numbers."""
    dates = _not_dates(odd, False, True)
    if not len(dates):
        order = " (with --data.dayfirst true if the day comes first)"
        return f"dates or times, read as categories; --data.times reads hour, weekday and day{order}"
    if few := _few_others(dates, odd, "date or time"):
        return few
    units = odd.str.extract(_WITH_UNIT, 1).drop_nulls() if odd.dtype == pl.String else odd.clear()
    if len(units) >= (1 - FEW_OTHERS) * len(odd) and units.n_unique() == 1:
        return f"numbers with the unit {units[0]!r}, read as categories; without the unit they are amounts"
    mark = separator_of(cells, is_bag=False)
    if mark:
        with_mark = int(cells.str.contains(r"^\[" if mark == "[]" else re.escape(mark)).sum())
        # A few items in many combinations are lists, too, although most cells may hold a single item.
        few_items = mark != " " and 2 * items_of(cells, mark).explode().n_unique() <= cells.n_unique()
        if few_items or 2 * with_mark > len(cells):
            flag = as_flags({"data.bags": [sample.name]})
            return f"{with_mark / len(cells):.0%} of the cells hold {mark!r}; {flag} {LISTS}"
    return ""


def is_free_text(cells: pl.Series) -> bool:
    """Return whether cells are sentences: they hardly repeat, and have four words or more on average, most of
    which only blanks separate."""
    some = cells.head(_SOME_TEXTS)
    if cells.dtype != pl.String or len(some) < _FEW or some.n_unique() <= 0.3 * len(some):
        return False
    words = int(some.str.count_matches(r"\w+").sum())
    gaps = int(some.str.count_matches(r"\w[ \t]+\w").sum())
    return (
        words >= 4 * len(some) and gaps >= 0.5 * (words - len(some)) and not some.str.contains(IS_LIST).all()
    )


def separator_of(cells: pl.Series, is_bag: bool) -> str:
    """Return the text between the items of cells such as drama|comedy, "[]" for lists in brackets such as
    ["a", "b"]; empty if there is none. is_bag: the user says that the cells hold several items; otherwise
    the parts must repeat more than the whole cells."""
    if cells.dtype != pl.String or not len(cells):
        return ""
    if cells[0].lstrip()[:1] in tuple("[({s") and cells.str.contains(IS_LIST).all():
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
    """How a column of numbers is scaled, learned from the training rows.

    Attributes:
        log: Numbers first pass through sign(x) log(1 + |x|).
        indicator: A second input is 1 for no value.
        edges: Of the quantile buckets; None: no buckets.
        known: The values that have an id each, instead of buckets, in the order of their ids.
    """

    log: bool = False
    mean: float = 0.0
    std: float = 1.0
    indicator: bool = False
    edges: tuple[float, ...] | None = Field(default=None, repr=False)
    # Excluded: the encoder saves the values of all columns in one Parquet file.
    known: pl.Series | None = Field(default=None, repr=False, exclude=True)

    model_config = ConfigDict(arbitrary_types_allowed=True)

    @cached_property
    def _places(self) -> tuple[Array, Array]:
        """The known values by size, and their ids."""
        known_V = cast(pl.Series, self.known).to_numpy()
        order_V = known_V.argsort()
        return known_V[order_V], order_V + FIRST_ID

    def ids(self, numbers_B: Array) -> Array:
        """Return the id (B,) of each number, nan for no value: of its bucket or of its value."""
        if self.known is not None:
            return value_ids(numbers_B, *self._places)
        return bucket_ids(numbers_B, self.edges or ())

    @property
    def num_ids(self) -> int:
        """Number of ids of the buckets or values; 0 without any."""
        if self.known is not None:
            return FIRST_ID + len(self.known)
        # Each edge separates two buckets, and id 0 is for no value.
        return 0 if self.edges is None else len(self.edges) + 2


def mean_and_std(numbers_B: Array, weights_B: Array | None = None) -> tuple[float, float]:
    """Return the mean and the standard deviation of numbers; 1 for equal ones, which have no deviation to
    divide by."""
    # Not the deviation decides: where the mean of equal numbers is not exact, it is 1e-17, not 0.
    if numbers_B.min() == numbers_B.max():
        return float(numbers_B[0]), 1.0
    mean = float(np.average(numbers_B, weights=weights_B))
    return mean, float(np.sqrt(np.average((numbers_B - mean) ** 2, weights=weights_B))) or 1.0


def fit_scale(numbers_B: Array, num_buckets: int, scale: str = "auto") -> Scale:
    """Return the scale of numbers of training rows (nan: no value). num_buckets: 0 for none. scale: auto (log
    for heavy tails), log, standard or none."""
    known = np.sort(numbers_B[~np.isnan(numbers_B)])
    indicator = len(known) < len(numbers_B)
    if not len(known):
        return Scale(indicator=indicator)
    log = scale == "log" or (scale == "auto" and _has_heavy_tail(known))
    fit = signed_log(known) if log else known
    mean, std = (0.0, 1.0) if scale == "none" else mean_and_std(fit)
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


def quantile_edges(numbers: Array, most: int) -> Array:
    """Return the ends of at most `most` bins (at least one) that hold about as many numbers each, ascending.
    Each end is one of the numbers. None counts for more of them than a bin has: a frequent value begins one
    bin and leaves the rest to others."""
    values, counts = np.unique(numbers, return_counts=True)
    rank = np.cumsum(np.minimum(counts, len(numbers) / most))
    places = np.searchsorted(rank, np.linspace(0, rank[-1], most + 1)[1:-1])
    return np.unique(np.concatenate([values[:1], values[places], values[-1:]]))


def bucket_edges(known: Array, num_buckets: int) -> Array:
    """Return at most `num_buckets` - 1 edges between numbers, in order: a value that is frequent enough to
    fill a bucket gets its own, and quantiles of all others share the remaining buckets."""
    values, counts = np.unique(known, return_counts=True)
    large = values[counts * num_buckets > len(known)]
    if len(large) == len(values):
        return values[1:]
    # Edges at the value and at the next float64 enclose that value alone.
    around = np.concatenate([large, np.nextafter(large, np.inf)])
    rest = known[~np.isin(known, large)] if len(large) else known
    inner = quantile_edges(rest, max(1, num_buckets - len(around)))[1:-1]
    return np.unique(np.concatenate([around, inner]))
