"""How numbers are scaled for a network. Letters: B rows."""

import numpy as np

from dphybrid.config import Section
from dphybrid.data.batches import Array

_MAX_DEVIATION = 100.0
"""Standard deviations at which a number is clipped, so that one absurd value cannot dominate a batch."""


class Scale(Section):
    """How numbers are scaled, learned from the training rows.

    Attributes:
        log: Numbers first pass through sign(x) log(1 + |x|).
        indicator: A second input is 1 for no value.
    """

    log: bool = False
    mean: float = 0.0
    std: float = 1.0
    indicator: bool = False

    def standardized(self, numbers_B: Array) -> Array:
        """Return numbers (B,) in standard deviations from the mean, 0 for nan."""
        found: Array = signed_log(numbers_B) if self.log else numbers_B
        # Numbers near the end of float64 may overflow to infinity, which is clipped.
        with np.errstate(over="ignore"):
            found = ((found - self.mean) / self.std).clip(-_MAX_DEVIATION, _MAX_DEVIATION)
        return np.where(np.isnan(found), 0.0, found)


def fit_scale(numbers_B: Array) -> Scale:
    """Return the scale of numbers of training rows (nan: no value); with heavy tails that of logarithms."""
    known = np.sort(numbers_B[~np.isnan(numbers_B)])
    indicator = len(known) < len(numbers_B)
    if not len(known):
        return Scale(indicator=indicator)
    log = _has_heavy_tail(known)
    mean, std = mean_and_std(signed_log(known) if log else known)
    return Scale(log=log, mean=mean, std=std, indicator=indicator)


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


def _has_heavy_tail(known: Array) -> bool:
    """Return whether some of the sorted numbers are so far from the others that standardizing would squeeze
    most of them together."""
    low, middle, high, top = np.quantile(known, [0.05, 0.5, 0.95, 0.999])
    with np.errstate(over="ignore"):  # differences of numbers near the end of float64 may be infinite
        far = top - middle > 10 * max(high - low, 1e-12)
    skewed = low >= 0 and high > 30 * max(middle, 1e-12)
    return bool(far or skewed or max(abs(known[0]), abs(known[-1])) > 1e100)
