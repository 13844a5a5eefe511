"""Columns as numbers: ids of categories, standardized numbers, quantile buckets. Everything is learnt from
the training part.

Ids of buckets: 0 = no value, then by size. Letters: B rows, F columns of one id a row (or of bags, in
bags_BFL), N dense columns, L ids of a bag.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from dphybrid.data.batches import Array
from dphybrid.data.table.bags import BagColumn, one_width
from dphybrid.data.table.categories import MISSING_ID, CategoryColumn
from dphybrid.data.table.labels import Label
from dphybrid.data.table.times import part_columns, part_names, seconds

MAX_DEVIATION = 100.0
"""Standard deviations at which a standardized number is cut off, so that one absurd value cannot drown a
batch."""
FEW_EDGES = 64
"""Edges up to which comparing with each of them is faster than a search."""
CACHED_ROWS = 2**13
"""Rows of tens of columns that are put side by side while they lie in a cache."""
BUCKET_ROWS = 128
"""Training rows for each bucket, at least: rows of fewer are learnt by heart."""
FIT_ROWS = 2**18
"""Training rows, evenly spaced, that the statistics of a numeric column come from at most."""


@dataclass(frozen=True)
class NumericColumn:
    """A fitted column of numbers. log: they pass through sign(x) log(1 + |x|); indicator: a dense column
    tells the missing ones;
    edges: of the buckets, None for none."""

    name: str
    log: bool
    mean: float
    std: float
    indicator: bool
    edges: tuple[float, ...] | None

    @property
    def width(self) -> int:
        """Dense columns it becomes."""
        return 1 + self.indicator

    @property
    def num_ids(self) -> int:
        """Ids of its buckets, 0 without."""
        return 0 if self.edges is None else len(self.edges) + 2

    def dense(self, raw_B: Array, out_BN: Array) -> None:
        """Write the standardized values, 0 where there is none (nan), and the indicator into out_BN (B,
        width)."""
        missing_B = np.isnan(raw_B)
        scaled_B = _log(raw_B) if self.log else raw_B
        # numbers near the end of float64: infinite is then a fair answer to "how far"
        with np.errstate(over="ignore"):
            deviation_B = (scaled_B - self.mean) / self.std
        out_BN[:, 0] = np.where(missing_B, 0.0, np.clip(deviation_B, -MAX_DEVIATION, MAX_DEVIATION))
        if self.indicator:
            out_BN[:, 1] = missing_B

    def ids(self, raw_B: Array) -> Array:
        """Return bucket ids (B,) of values (nan: no value)."""
        assert self.edges is not None
        if len(self.edges) <= FEW_EDGES:
            place_B: Array = np.ones(len(raw_B), np.uint8)
            for edge in self.edges:
                place_B += (raw_B >= edge).view(np.uint8)
        else:
            place_B = 1 + np.searchsorted(self.edges, raw_B, side="right")
        place_B[np.isnan(raw_B)] = MISSING_ID
        return place_B


def fit_numeric(name: str, train_B: Array, num_buckets: int, scale: str = "auto") -> NumericColumn:
    """Learn from the training values (nan: no value). num_buckets 0: none. scale: auto (log when
    heavy-tailed), log, standard or none."""
    known = np.sort(train_B[~np.isnan(train_B)])
    indicator = len(known) < len(train_B)
    if not len(known):
        return NumericColumn(name, False, 0.0, 1.0, indicator, None)
    low, middle, high, top = np.quantile(known, [0.05, 0.5, 0.95, 0.999])
    use_log = scale == "log"
    if scale == "auto":
        with np.errstate(over="ignore"):
            use_log = bool(
                top - middle > 10 * max(high - low, 1e-12) or (low >= 0 and high > 30 * max(middle, 1e-12))
            )
        use_log = use_log or bool(max(abs(known[0]), abs(known[-1])) > 1e100)
    fit = _log(known) if use_log else known
    mean, std = (0.0, 1.0) if scale == "none" else (float(fit.mean()), float(fit.std()) or 1.0)
    num_buckets = min(num_buckets, max(2, len(known) // BUCKET_ROWS))
    edges = tuple(bucket_edges(known, num_buckets).tolist()) if num_buckets else None
    return NumericColumn(name, use_log, mean, std, indicator, edges)


def _log(raw_B: Array) -> Array:
    return np.sign(raw_B) * np.log1p(np.abs(raw_B))


def bucket_edges(known: Array, num_buckets: int) -> Array:
    """Return at most `num_buckets` - 1 edges at quantiles, sorted.

    A value that would fill whole buckets gets one of its own, and the rest share the others.
    """
    shares = np.linspace(0, 1, num_buckets + 1)[1:-1]
    distinct, counts = np.unique(known, return_counts=True)
    large = distinct[counts * num_buckets > len(known)]
    rest = known[~np.isin(known, large)] if len(large) else known
    if not len(large) or not len(rest):
        return np.unique(np.quantile(known, shares))
    around = np.concatenate([large, np.nextafter(large, np.inf)])
    spare = max(0, num_buckets - 1 - len(around))
    edges = (
        np.concatenate([around, np.quantile(rest, np.linspace(0, 1, spare + 2)[1:-1])]) if spare else around
    )
    return np.unique(edges)


def side_by_side(columns: Sequence[Array], dtype: type[np.integer[Any]], num_rows: int) -> Array:
    """Return columns (B,) as (B, F), some rows at a time that stay in a core's cache; `np.stack` takes far
    longer."""
    out_BF: Array = np.empty((num_rows, len(columns)), dtype)
    for start in range(0, num_rows, CACHED_ROWS):
        rows = slice(start, start + CACHED_ROWS)
        for place, column_B in enumerate(columns):
            out_BF[rows, place] = column_B[rows]
    return out_BF


@dataclass(frozen=True)
class TableEncoder:
    """From columns of text to `ids_BF` (buckets first, then categories), `dense_BN` and, where there are
    bags, `bags_BFL`. What it has learnt is saved beside a checkpoint.

    label: name of the answer's column, answer: what it is. missing: texts that mean no value. times: columns
    of dates and times, whose parts are among `numeric`; dayfirst: how they are read."""

    numeric: tuple[NumericColumn, ...]
    categories: tuple[CategoryColumn, ...]
    label: str
    answer: Label
    bags: tuple[BagColumn, ...] = ()
    times: tuple[str, ...] = ()
    dayfirst: bool = False

    @property
    def classes(self) -> tuple[str, ...]:
        """The label's classes, the positive one of two last; none of numbers."""
        return self.answer.classes

    @property
    def names(self) -> list[str]:
        """Columns that are read."""
        made = {part for name in self.times for part in part_names(name)}
        numeric = [column.name for column in self.numeric if column.name not in made]
        return numeric + [column.name for column in self.vocabularies] + list(self.times)

    @property
    def vocabularies(self) -> tuple[CategoryColumn, ...]:
        """Columns whose ids stand for texts."""
        return self.categories + self.bags

    @property
    def id_columns(self) -> list[dict[str, Any]]:
        """Name, role and number of ids of each column of ids_BF, then of bags_BFL."""
        return [
            *({"name": c.name, "role": "buckets", "num_ids": c.num_ids} for c in self.numeric if c.num_ids),
            *({"name": c.name, "role": "categorical", "num_ids": c.num_ids} for c in self.categories),
            *({"name": c.name, "role": c.role, "num_ids": c.num_ids} for c in self.bags),
        ]

    @property
    def num_dense(self) -> int:
        return sum(column.width for column in self.numeric)

    def dense(self, raw: Mapping[str, Array], num_rows: int) -> Array:
        """Return dense_BN float32 of the numeric columns' values (nan: no value)."""
        out_BN = np.zeros((num_rows, self.num_dense), np.float32)
        ends = itertools.accumulate((column.width for column in self.numeric), initial=0)
        for column, start in zip(self.numeric, ends, strict=False):
            column.dense(raw[column.name], out_BN[:, start : start + column.width])
        return out_BN

    def encode(self, columns: Mapping[str, pl.Series]) -> tuple[dict[str, Array], int]:
        """Return the arrays of a batch (ids int64, numbers float32), and how many values of numeric columns
        are no finite numbers and count as missing.

        columns: each of `names` as text or numbers; what means no value is None.
        """
        raw, wrong = {}, 0
        num_rows = len(columns[self.names[0]])
        columns = dict(columns)
        for name in self.times:
            second_B = seconds(columns[name], self.dayfirst)
            wrong += second_B.null_count() - columns[name].null_count()
            found = part_columns(name, second_B).items()
            columns |= {part: pl.Series(values).fill_nan(None) for part, values in found}
        for column in self.numeric:
            series = columns[column.name]
            numbers = series.cast(pl.Float64, strict=False)
            numbers = numbers.set(~numbers.is_finite().fill_null(True), None)
            wrong += numbers.null_count() - series.null_count()
            raw[column.name] = numbers.fill_null(float("nan")).to_numpy()
        parts = [column.ids(raw[column.name]) for column in self.numeric if column.num_ids]
        parts += [column.ids(columns[column.name].cast(pl.String)) for column in self.categories]
        arrays = {"ids_BF": side_by_side(parts, np.int64, num_rows), "dense_BN": self.dense(raw, num_rows)}
        if self.bags:
            arrays["bags_BFL"] = one_width([column.ids(columns[column.name]) for column in self.bags])
        return arrays, wrong

    def save(self, folder: Path) -> None:
        """Write `encoder.json` and `vocabularies.parquet` into `folder`."""
        folder.mkdir(exist_ok=True)
        page: dict[str, Any] = {
            "numeric": [asdict(column) for column in self.numeric],
            "categories": [{"name": c.name, "hash_buckets": c.hash_buckets} for c in self.categories],
            "label": self.label,
            "classes": list(self.classes),
        }
        if self.answer.task != "binary":
            page["answer"] = self.answer.facts()
        if self.times:
            page |= {"times": list(self.times), "dayfirst": self.dayfirst}
        if self.bags:
            page["bags"] = [
                {
                    "name": c.name,
                    "hash_buckets": c.hash_buckets,
                    "separator": c.separator,
                    "max_items": c.max_items,
                }
                for c in self.bags
            ]
        (folder / "encoder.json").write_text(json.dumps(page, indent=1, ensure_ascii=False), encoding="utf-8")
        lists = [
            pl.Series("values", [c.vocabulary.to_list() for c in self.vocabularies], dtype=pl.List(pl.String))
        ]
        pl.DataFrame(lists).write_parquet(folder / "vocabularies.parquet")

    @classmethod
    def load(cls, folder: Path) -> "TableEncoder":
        """Read what `save` wrote."""
        page = json.loads((folder / "encoder.json").read_text(encoding="utf-8"))
        vocabularies = list(pl.read_parquet(folder / "vocabularies.parquet")["values"])
        categories, bags = page["categories"], page.get("bags", [])
        return cls(
            tuple(
                NumericColumn(**{**c, "edges": None if c["edges"] is None else tuple(c["edges"])})
                for c in page["numeric"]
            ),
            tuple(
                CategoryColumn(c["name"], v, c["hash_buckets"])
                for c, v in zip(categories, vocabularies, strict=False)
            ),
            page["label"],
            Label.of(page.get("answer", {}), tuple(page["classes"])),
            tuple(
                BagColumn(**c, vocabulary=v)
                for c, v in zip(bags, vocabularies[len(categories) :], strict=True)
            ),
            tuple(page.get("times", ())),
            page.get("dayfirst", False),
        )
