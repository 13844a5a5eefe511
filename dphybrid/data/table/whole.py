"""Whole numbers: ids or amounts? A trial on the first rows compares what single values say about the label
with what their neighbourhoods say.

Letters: B rows, C outputs of the label (one for a number, else one for each class).
"""

import re
from dataclasses import dataclass
from typing import cast

import numpy as np
import polars as pl

from dphybrid.data.table.cells import read_numbers

Array = np.ndarray

FEW_VALUES = 32
"""With more different whole numbers, a column is tried. As many bins as a number has by default (model.bins)
hold them one by one, so that a column with fewer loses nothing as a number."""
MANY = 128
"""With more different whole numbers, a column that is read as amounts is named in the summary."""
AMOUNTS = "many whole numbers read as amounts"
"""Start of what the summary says of a column that has more and is no id."""
LISTS = "reads the items between the marks"
"""Words in the reason of a column of categories whose cells look like lists."""
TRIED_ROWS = 2**16
"""Rows of the first chunk that the trial uses."""
_BINS = (128, 16)
_FREQUENT = 1 / 16
"""A value with more than this share of the rows is left out of the trial."""
_FEWEST_ROWS = 400
_REPEATED, _REPEATED_SHARE = 5, 0.5
"""Values that occur this often must make up this share of the rows; rarer ones show nothing."""
_CLEAR_RATIO, _CLEAR_DEVIATIONS = 1.25, 4.0
"""A side wins if it explains this many times as much, by as many standard errors of the difference."""
_LITTLE = 0.05
"""Neighbourhoods of ids may explain this share of the label."""
_MAX_CLASSES = 16
_FEW_NUMBERS = 20

# Names of things that are numbered: `user`, `movie`, `ad`; also `item:token` of RecBole's files and the
# anonymous C14 of click logs. Not their plurals, which are counts. A second hint: the trial may overrule it.
_NAMES_A_THING = re.compile(
    r"^(?:(?:.*[\W_])?(?:user|member|customer|client|visitor|patient|student|employee|driver|doctor|author|host"
    r"|item|movie|film|song|track|artist|book|product|article|sku|asin|ad|adgroup|campaign|creative|advertiser"
    r"|publisher|store|shop|seller|merchant|brand|device|site|app|query|playlist|hotel|restaurant)"
    r"|c(?:1[4-9]|2[0-6])|.*:token)$",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Trial:
    """The shares of the label's variance, on rows that the means were not computed from, that single values
    and neighbourhoods explain. deviations: their difference in standard errors, positive for values.
    repeats: most rows have a value that occurs several times."""

    values: float
    neighbourhoods: float
    deviations: float
    repeats: bool

    @property
    def says(self) -> str:
        """Return ids or amounts if one side is clearly better, else an empty text."""
        low, high = sorted((max(self.values, 1e-9), max(self.neighbourhoods, 1e-9)))
        if high < _CLEAR_RATIO * low or abs(self.deviations) < _CLEAR_DEVIATIONS:
            return ""
        if self.values > self.neighbourhoods:
            return "ids" if self.repeats else ""
        # Ids are often given in the order of time, so that neighbours have a little in common, too.
        return "amounts" if self.neighbourhoods > _LITTLE else ""

    def text(self) -> str:
        """Return both figures in words."""
        return (
            f"single values explain {max(self.values, 0):.1%} of the label, neighbourhoods "
            f"{max(self.neighbourhoods, 0):.1%}"
        )


def names_a_thing(name: str) -> bool:
    """Return whether a column's name says that its numbers are ids of things."""
    return _NAMES_A_THING.match(name) is not None


def whole_numbers(cells: pl.Series) -> pl.Series | None:
    """Return the cells as Int64 if all of them are whole numbers of 0 or more, but for one negative one such
    as -1, which often stands for no value; else None. cells: without missing ones."""
    numbers = cells if cells.dtype.is_numeric() else cells.cast(pl.Float64, strict=False)
    if not len(numbers) or numbers.null_count():
        return None
    if cast(float, numbers.min()) < 0 and numbers.filter(numbers < 0).n_unique() > 1:
        return None
    if numbers.dtype.is_float():
        floats = numbers.to_numpy()
        if not (np.isfinite(floats).all() and (floats == np.floor(floats)).all() and floats.max() < 2**53):
            return None
    return numbers.cast(pl.Int64, strict=False)


def looks_like_a_count(numbers: pl.Series) -> bool:
    """Return whether the smallest numbers, from 0 or 1 on, are ever rarer and three of them make up half of
    the rows, as 1, 2, 3 contacts in a campaign do; ids by falling frequency hardly begin so steeply."""
    low = cast(int, numbers.min())
    first = [int((numbers == low + step).sum()) for step in range(4)]
    return low <= 1 and first == sorted(first, reverse=True) and 2 * sum(first[:3]) >= len(numbers)


def time_of_whole_numbers(numbers: pl.Series) -> str:
    """Return what kind of time whole numbers seem to be, such as minutes since 1970; empty if they do not."""
    low, high = cast(int, numbers.min()), cast(int, numbers.max())
    for unit, size in (("seconds", 1), ("milliseconds", 10**3), ("microseconds", 10**6)):
        # From 1990 to 2040. Times of the same second hardly repeat, unless they are whole minutes; ids may.
        in_range = 631_152_000 * size <= low and high < 2_208_988_800 * size
        if in_range and (numbers.n_unique() > len(numbers) / 3 or (numbers % (60 * size)).max() == 0):
            return f"{unit} since 1970"
    if low >= 19_000_101 and high <= 20_991_231:
        month, day = numbers // 100 % 100, numbers % 100
        if month.is_between(1, 12).all() and day.is_between(1, 31).all():
            return "dates written as yyyymmdd"
    return ""


def label_outputs(cells: pl.Series) -> Array | None:
    """Return a label's cells as numbers (B, C), nan for a missing one: clipped numbers, or 0 and 1 for each
    of the most frequent classes. None if all of them are equal."""
    known = cells.drop_nulls()
    if known.n_unique() < 2:
        return None
    numbers = read_numbers(cells)
    if numbers.null_count() == cells.null_count() and known.n_unique() > _FEW_NUMBERS:
        found = numbers.to_numpy()
        # So that a few extreme labels do not decide alone.
        return found.clip(*np.nanquantile(found, [0.01, 0.99]))[:, None]
    classes = known.value_counts(sort=True)[known.name].head(_MAX_CLASSES)
    # Of two classes, one says all.
    classes = classes.head(1) if len(classes) == 2 else classes
    one_hot = [(cells == value).cast(pl.Float64).to_numpy() for value in classes.to_list()]
    return np.stack(one_hot, 1)


def trial(numbers_B: Array, label_BC: Array) -> Trial | None:
    """Return the trial of a column, or None for too few rows. numbers_B: whole numbers; label_BC: of the same
    rows, without nan.

    The means of half of the rows, shrunken towards the overall mean, predict the other half, and vice versa:
    those of each value, and those of each of 128 and of 16 quantile bins. Bins hold at least four values on
    average, as they would otherwise be values under another name. Rows of very frequent values,
    such as 0 of a count, are left out: as numbers, too, these have a bucket each.
    """
    values, codes_B, counts = np.unique(numbers_B, return_inverse=True, return_counts=True)
    rare_B = counts[codes_B] <= _FREQUENT * len(numbers_B)
    if not rare_B.all():
        numbers_B, label_BC = numbers_B[rare_B], label_BC[rare_B]
        values, codes_B, counts = np.unique(numbers_B, return_inverse=True, return_counts=True)
    if len(numbers_B) < _FEWEST_ROWS:
        return None
    base = float(((label_BC - label_BC.mean(0)) ** 2).sum())
    if not base:
        return None
    repeated = counts[counts >= _REPEATED].sum()
    half_B = np.zeros(len(numbers_B), bool)
    half_B[np.random.default_rng(0).permutation(len(numbers_B))[::2]] = True
    by_value_B = _errors(codes_B, len(values), label_BC, half_B)
    found = []
    for most in _BINS:
        bins = min(most, max(2, len(values) // 4))
        edges = np.unique(np.quantile(values[codes_B], np.linspace(0, 1, bins + 1)[1:-1]))
        places_B = np.searchsorted(edges, numbers_B, side="right")
        found.append(_errors(places_B, len(edges) + 1, label_BC, half_B))
    by_bin_B = min(found, key=np.sum)
    gain_B = by_bin_B - by_value_B
    error = float(gain_B.std()) / len(gain_B) ** 0.5
    return Trial(
        1 - float(by_value_B.sum()) / base,
        1 - float(by_bin_B.sum()) / base,
        float(gain_B.mean()) / max(error, 1e-12),
        bool(repeated >= _REPEATED_SHARE * len(numbers_B)),
    )


def _errors(groups_B: Array, num_groups: int, label_BC: Array, half_B: Array) -> Array:
    """Return the squared errors (B,) of the groups' shrunken means, each computed on the other half."""
    errors_B = np.empty(len(label_BC))
    for fit_B in (half_B, ~half_B):
        means = _shrunken_means(groups_B[fit_B], num_groups, label_BC[fit_B])
        errors_B[~fit_B] = ((label_BC[~fit_B] - means[groups_B[~fit_B]]) ** 2).sum(1)
    return errors_B


def _shrunken_means(groups_B: Array, num_groups: int, label_BC: Array) -> Array:
    """Return the label's mean in each group (G, C), shrunken towards the overall mean as much as the
    variances within and between groups suggest (empirical Bayes of a one-way random-effects model)."""
    num_rows, mean_C = len(groups_B), label_BC.mean(0)
    rows_G = np.bincount(groups_B, minlength=num_groups).astype(np.float64)
    sums_GC = np.stack([np.bincount(groups_B, label_B, num_groups) for label_B in label_BC.T], 1)
    means_GC = sums_GC / np.maximum(rows_G, 1)[:, None]
    num_used = int(np.count_nonzero(rows_G))
    inside = float(((label_BC - means_GC[groups_B]) ** 2).sum()) / max(num_rows - num_used, 1)
    spread = float((rows_G[:, None] * (means_GC - mean_C) ** 2).sum()) - (num_used - 1) * inside
    between = spread / max(num_rows - float((rows_G**2).sum()) / num_rows, 1e-9)
    if between <= 0:
        return np.broadcast_to(mean_C, means_GC.shape)
    weight = np.maximum(inside / between, 1.0)
    shrunken: Array = (sums_GC + weight * mean_C) / (rows_G + weight)[:, None]
    return shrunken
