"""Categories as ids: 0 = no value, 1 = unknown value, from 2 on the values, most frequent first, then hash
buckets. B: rows."""

import zlib
from dataclasses import dataclass
from functools import cached_property
from threading import Lock

import numpy as np
import polars as pl

from dphybrid.data.batches import Array

MISSING_ID, UNKNOWN_ID, FIRST_ID = 0, 1, 2


class Dictionary:
    """Numbers the texts of a column as they come, in any thread and as many as memory holds."""

    def __init__(self) -> None:
        # A mapping of its own inside polars. Which text gets which number may depend on threads.
        self._categories = pl.Categories.random()
        self.dtype = pl.Categorical(self._categories)
        self._keep = pl.Series([], dtype=self.dtype)  # polars forgets a mapping that no series uses
        self._size = 0
        self._lock = Lock()

    def codes(self, texts: pl.Series) -> Array:
        """Return (B,) uint32: 0 for no value, else 1 + the place in `values`."""
        return self.met(texts.to_frame().select(self.expression(texts.name)).to_series())

    def expression(self, column: str) -> pl.Expr:
        """Return the same as an expression of a column, so that one call does many columns; its result must
        go to `met`."""
        return (pl.col(column).cast(self.dtype).to_physical() + 1).fill_null(0)

    def met(self, codes: pl.Series) -> Array:
        """Take note of codes; return them as an array."""
        codes_B = codes.to_numpy()
        with self._lock:
            self._size = max(self._size, int(codes_B.max(initial=0)))
        return codes_B

    def __len__(self) -> int:
        return self._size

    def values(self) -> pl.Series:
        """Return the texts by number."""
        return pl.Series("value", np.arange(self._size, dtype=np.uint32)).cat.to(self.dtype).cast(pl.String)


@dataclass(frozen=True)
class CategoryColumn:
    """A fitted column of categories. vocabulary: the values that have an id of their own, in the order of
    their ids; hash_buckets: all other ones share so many ids (0: the unknown one)."""

    name: str
    vocabulary: pl.Series
    hash_buckets: int = 0

    @property
    def num_ids(self) -> int:
        return FIRST_ID + len(self.vocabulary) + self.hash_buckets

    def ids_of_codes(self, values: pl.Series) -> Array:
        """Return the ids of a dictionary's codes: entry 0 for no value, entry 1 + i for values[i]."""
        known = pl.DataFrame(
            {
                "value": self.vocabulary,
                "id": np.arange(FIRST_ID, FIRST_ID + len(self.vocabulary), dtype=np.int64),
            }
        )
        found = pl.DataFrame({"value": values}).join(known, on="value", how="left", maintain_order="left")[
            "id"
        ]
        if self.hash_buckets:
            first = FIRST_ID + len(self.vocabulary)
            others = [first + zlib.crc32(value.encode()) % self.hash_buckets for value in values.to_list()]
            found = found.fill_null(pl.Series(others, dtype=pl.Int64))
        return np.concatenate([[MISSING_ID], found.fill_null(UNKNOWN_ID).to_numpy()])

    @cached_property
    def _dictionary(self) -> tuple[Dictionary, list[Array]]:
        return Dictionary(), [np.array([MISSING_ID])]

    def ids(self, texts: pl.Series) -> Array:
        """Return the ids (B,) of texts (None: no value)."""
        dictionary, known = self._dictionary
        codes_B = dictionary.codes(texts)
        if len(dictionary) >= len(known[0]):  # texts that were not met before
            known[0] = np.concatenate(
                [known[0], self.ids_of_codes(dictionary.values()[len(known[0]) - 1 :])[1:]]
            )
        return known[0][codes_B]


def fit_categories(
    name: str, values: pl.Series, counts: Array, min_count: int, top: int | None = None, hash_buckets: int = 0
) -> CategoryColumn:
    """Keep the values seen at least `min_count` times in the training part, the `top` most frequent ones at
    most."""
    seen = pl.DataFrame({"value": values, "rows": counts}).filter(pl.col("rows") >= min_count)
    kept = seen.sort(["rows", "value"], descending=[True, False])["value"]
    return CategoryColumn(name, kept if top is None else kept.head(top), hash_buckets)
