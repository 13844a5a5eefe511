"""How numbers are scaled for a network, and the ids of their buckets or values. Letters: B rows, V values."""

from functools import cached_property
from typing import cast

import numpy as np
import polars as pl
from pydantic import ConfigDict, Field

from dphybrid.config import Section
from dphybrid.data.table.values import FIRST_ID, MISSING_ID, UNKNOWN_ID

Array = np.ndarray
_MAX_DEVIATION = 100.0
"""Standard deviations at which a number is clipped, so that one absurd value cannot dominate a batch."""


class Scale(Section):
    """How a column of numbers is scaled, learned from the training rows.

    Attributes:
        log: Numbers first pass through sign(x) log(1 + |x|).
        indicator: A second input is 1 for no value.
        plain: Numbers pass as they are.
        edges: Of the quantile buckets; None: no buckets.
        known: The values that have an id each, instead of buckets, in the order of their ids.
    """

    log: bool = False
    mean: float = 0.0
    std: float = 1.0
    indicator: bool = False
    plain: bool = False
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

    def bucket_ids(self, numbers_B: Array) -> Array:
        """Return the bucket (B,) of numbers: 0 for nan, then 1, 2, ... by size."""
        edges = self.edges or ()
        # With few edges, comparing with each of them takes a sixth of the time of a search.
        if len(edges) < 64:
            place_B: Array = np.ones(len(numbers_B), np.uint8)
            for edge in edges:
                place_B += (numbers_B >= edge).view(np.uint8)
        else:
            place_B = 1 + np.searchsorted(edges, numbers_B, side="right")
        place_B[np.isnan(numbers_B)] = MISSING_ID
        return place_B

    def value_ids(self, numbers_B: Array) -> Array:
        """Return the ids (B,) of numbers by value, nan for no value; a fraction has the unknown id."""
        known_V, ids_V = self._places
        if not len(known_V):
            found_B: Array = np.full(len(numbers_B), UNKNOWN_ID, np.int32)
        else:
            place_B = np.searchsorted(known_V, numbers_B).clip(max=len(known_V) - 1)
            found_B = np.where(known_V[place_B] == numbers_B, ids_V[place_B], UNKNOWN_ID).astype(np.int32)
        found_B[np.isnan(numbers_B)] = MISSING_ID
        return found_B

    def standardized(self, numbers_B: Array) -> Array:
        """Return numbers (B,) in standard deviations from the mean, 0 for nan."""
        found: Array = signed_log(numbers_B) if self.log else numbers_B
        if not self.plain:
            # Numbers near the end of float64 may overflow to infinity, which is clipped.
            with np.errstate(over="ignore"):
                found = ((found - self.mean) / self.std).clip(-_MAX_DEVIATION, _MAX_DEVIATION)
        return np.where(np.isnan(found), 0.0, found)

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


def signed_log(numbers_B: Array) -> Array:
    """Return sign(x) log(1 + |x|)."""
    found: Array = np.sign(numbers_B) * np.log1p(np.abs(numbers_B))
    return found


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
    return Scale(log=log, mean=mean, std=std, indicator=indicator, plain=scale == "none", edges=edges)


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
