"""Columns as numbers: ids of categories, standardized numbers, quantile buckets. Everything is learnt from the training part.

Ids of a category column: 0 = no value, 1 = unknown value, from 2 on the values, most frequent first. Buckets: 0 = no value, then by size.
Letters: B rows.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from dphybrid.data.batches import Array

MISSING_ID, UNKNOWN_ID, FIRST_ID = 0, 1, 2
MAX_DEVIATION = 100.0
"""Standard deviations at which a standardized number is cut off, so that one absurd value cannot drown a batch."""


@dataclass(frozen=True)
class Numbers:
    """A numeric column: dense parts (B,), bucket ids (B,) and the statistics they rest on."""

    dense: list[Array]
    buckets: Array | None
    num_buckets: int
    facts: dict[str, Any]


def encode_numeric(values: pl.Series, train_rows: Array, num_buckets: int) -> Numbers:
    """Encode a column of numbers written as text (None: no value); num_buckets 0: no bucket ids.

    dense: the standardized value, 0 where there is none; then, when any is missing, 1 where it is. Heavy-tailed columns pass through
    sign(x) log(1 + |x|) first.
    """
    raw_B = values.cast(pl.Float64).to_numpy().astype(np.float64)
    missing_B = np.isnan(raw_B)
    known = raw_B[train_rows][~missing_B[train_rows]]
    low, middle, high, top = np.quantile(known, [0.05, 0.5, 0.95, 0.999]) if len(known) else (0.0, 0.0, 0.0, 0.0)
    with np.errstate(over="ignore"):  # numbers near the end of float64: infinite is then a fair answer to "how far"
        use_log = bool(top - middle > 10 * max(high - low, 1e-12) or (low >= 0 and high > 30 * max(middle, 1e-12)))
    use_log = use_log or bool(len(known) and np.abs(known).max() > 1e100)
    scaled_B = np.sign(raw_B) * np.log1p(np.abs(raw_B)) if use_log else raw_B
    fit = scaled_B[train_rows][~missing_B[train_rows]]
    mean, std = (float(fit.mean()), float(fit.std()) or 1.0) if len(fit) else (0.0, 1.0)
    dense = [np.where(missing_B, 0.0, np.clip((scaled_B - mean) / std, -MAX_DEVIATION, MAX_DEVIATION))]
    if missing_B.any():
        dense.append(missing_B.astype(np.float64))
    buckets, edges = None, np.empty(0)
    if num_buckets and len(known):
        edges = bucket_edges(known, num_buckets)
        place_B = 1 + np.searchsorted(edges, np.where(missing_B, 0.0, raw_B), side="right")
        buckets = np.where(missing_B, MISSING_ID, place_B).astype(np.int64)
    facts = {"log": use_log, "mean": mean, "std": std, "edges": edges.tolist(), "indicator": len(dense) > 1}
    return Numbers(dense, buckets, len(edges) + 2, facts)


def bucket_edges(known: Array, num_buckets: int) -> Array:
    """Return at most `num_buckets` - 1 edges at quantiles, sorted.

    A value that would fill whole buckets gets one of its own, and the rest share the others.
    """
    shares = np.linspace(0, 1, num_buckets + 1)[1:-1]
    distinct, counts = np.unique(known, return_counts=True)
    large = distinct[counts * num_buckets > len(known)]
    rest = known[~np.isin(known, large)]
    if not len(large) or not len(rest):
        return np.unique(np.quantile(known, shares))
    around = np.concatenate([large, np.nextafter(large, np.inf)])
    spare = max(0, num_buckets - 1 - len(around))
    edges = np.concatenate([around, np.quantile(rest, np.linspace(0, 1, spare + 2)[1:-1])]) if spare else around
    return np.unique(edges)


def encode_categories(values: pl.Series, train_rows: Array, min_count: int) -> tuple[Array, list[str]]:
    """Return ids (B,) int64 and the values that have one, from FIRST_ID on: those seen at least min_count times in the training part."""
    counts = values.alias("value")[train_rows].drop_nulls().value_counts(name="rows")
    kept = counts.filter(pl.col("rows") >= min_count).sort(["rows", "value"], descending=[True, False])
    vocabulary: list[str] = kept["value"].to_list()
    ids = list(range(FIRST_ID, FIRST_ID + len(vocabulary)))
    codes = values.replace_strict(vocabulary, ids, default=UNKNOWN_ID, return_dtype=pl.Int64).to_numpy()
    return np.where(values.is_null().to_numpy(), MISSING_ID, codes).astype(np.int64), vocabulary
