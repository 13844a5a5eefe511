"""The kinds of columns: why each claims a column, how it reads cells, what it learns from training rows, and
what a model gets of it.

A new kind is a subclass of `Column` and an entry of `KINDS`: the flag that lists such columns, its keys in
schema.toml and its page of the saved encoder follow from the class. Ids: 0 = no value, 1 = unknown value.
Letters: B rows, N dense columns, L items of a bag.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from typing import Any, Literal, Self

import numpy as np
import polars as pl
from pydantic import Field, create_model

from dphybrid.config import Names
from dphybrid.config.tables import TableDataConfig
from dphybrid.data.table.cells import (
    FEW,
    FIRST_ID,
    MISSING_ID,
    UNKNOWN_ID,
    bag_ids,
    ids_of,
    items_of,
    read_numbers,
    read_times,
    time_parts,
    words_of,
)
from dphybrid.data.table.column import Array, Column, Found, Sample
from dphybrid.data.table.numbers import (
    YEAR_FIRST,
    Scale,
    fit_scale,
    has_leading_zeros,
    is_day_first,
    looks_like_dates,
    no_numbers,
    notation_of,
    why_no_number,
)
from dphybrid.util.errors import UserError

_ROW_NUMBERS = 20
"""Rows from which on a column that counts them is taken for a row number."""
_ROW_GAPS = 0.05
"""Share of row numbers that may be left out: rows that were filtered out or rejected."""
_BUCKET_ROWS = 128
"""Training rows for each bucket that nobody asked for, at least: rows of fewer are learnt by heart."""
_MOST = 2**31 - 1


class Ignore(Column):
    """A column that is not read."""

    role = "ignore"
    lists = True
    flag = "ignore"
    flag_help = "Columns to leave out, separated by commas."

    @classmethod
    def claims(cls, sample: Sample) -> str | None:
        if not len(sample.cells):
            return "no values" if sample.whole else None
        if sample.cells.dtype != pl.String and not sample.cells.dtype.is_integer():
            return None
        # A counter of rows tells the model when a row was written, which new rows lie beyond.
        numbers = sample.cells.cast(pl.Int64, strict=False)
        counts = len(numbers) == sample.num_rows >= _ROW_NUMBERS and not numbers.null_count()
        if not counts or has_leading_zeros(sample.cells) or not (numbers.diff().drop_nulls() > 0).all():
            return None
        span = int(numbers[-1]) - int(numbers[0])
        return "a row number" if span < (1 + _ROW_GAPS) * sample.num_rows else None


class Numbers(Column):
    """One or more numbers a cell: standardized, and in quantile buckets that have an embedding each."""

    scale: Literal["auto", "log", "standard", "none"] = Field(default="auto", examples=["auto"])
    """log and standardize, standardize, neither, or by the look of the training rows."""
    buckets: int | None = Field(default=None, ge=0, le=4096, examples=[32])
    """Quantile buckets that get an embedding each; 0: none."""

    @property
    @abstractmethod
    def parts(self) -> "tuple[Numeric, ...]":
        """The columns of one number a cell that it becomes."""

    def numbers(self, values: pl.Series) -> list[Array]:
        """Return the numbers (B,) of its parts, nan for no value."""
        return [values.to_numpy()]

    @property
    def tables(self) -> list[tuple[str, str, int]]:
        return [(part.name, "buckets", part.learned.num_ids) for part in self.parts if part.learned.num_ids]


class Numeric(Numbers):
    """A number."""

    role = "numeric"
    flag = "numeric"
    flag_help = "Columns to read as numbers, separated by commas; the rest is inferred."
    noun = "number"

    decimal: Literal[".", ","] = Field(default=".", examples=["."])
    """Sign before the decimals."""
    thousands: Literal["", ",", ".", " ", "'", "_"] = Field(default="", examples=[""])
    """Sign between groups of three digits."""
    learned: Scale = Scale()

    @classmethod
    def claims(cls, sample: Sample) -> str | None:
        if not len(sample.cells) or why_no_number(sample) is not None:
            return None
        column = cls(name=sample.name, **cls.told(sample))
        infinite = column.read(sample.cells).null_count()
        said = [f"{infinite:,} infinite ones count as no value"] if infinite else []
        said += [f"thousands marked by {column.thousands!r}"] if column.thousands else []
        said += [f"decimals after {column.decimal!r}"] if column.decimal != "." else []
        usual = (column.decimal, column.thousands) == (".", "")
        return ", ".join(said) + ("" if usual else "; --data.decimal and --data.thousands overrule")

    @classmethod
    def told(cls, sample: Sample) -> dict[str, Any]:
        return dict(zip(("decimal", "thousands"), notation_of(sample)[0], strict=True))

    def read(self, cells: pl.Series) -> pl.Series:
        return read_numbers(cells, self.decimal, self.thousands)

    def wrong(self, cells: pl.Series, values: pl.Series) -> pl.Series:
        return no_numbers(cells, values)

    def fitted(self, found: Found) -> Self:
        return self._fitted_to(found.numbers().to_numpy(), found.data)

    def _fitted_to(self, numbers_B: Array, data: TableDataConfig) -> Self:
        """Return the column with what numbers (B,) of the training rows tell, nan for no value."""
        # Few rows need few buckets, or an embedding learns single rows.
        most = max(2, int(np.count_nonzero(~np.isnan(numbers_B))) // _BUCKET_ROWS)
        buckets = min(data.buckets, most) if self.buckets is None else self.buckets
        return self.model_copy(update={"learned": fit_scale(numbers_B, buckets, self.scale)})

    @property
    def parts(self) -> "tuple[Numeric, ...]":
        return (self,)


class Time(Numbers):
    """Dates and times: the hour, the weekday (1: Monday) and the days since 1970 are numbers."""

    role = "time"
    flag = "times"
    flag_help = (
        "Columns to read as dates or times, by commas: hour, weekday and day become numbers. Dates whose "
        "order of day and month is plain are inferred."
    )
    noun = "date or time"

    dayfirst: bool = Field(default=False, examples=[False])
    """Is 3/12/2024 the third of December? Else it is the twelfth of March."""
    learned: tuple[Numeric, ...] = ()

    @classmethod
    def claims(cls, sample: Sample) -> str | None:
        first = is_day_first(sample.cells, sample.data)
        if first is None or not looks_like_dates(sample.cells, first):
            return None
        order = "month" if not first and sample.cells.str.contains("/", literal=True).any() else "day"
        how = "" if sample.cells.str.contains(YEAR_FIRST).all() else f", {order} first"
        return f"dates or times{how}; --data.categorical reads each as a category"

    @classmethod
    def told(cls, sample: Sample) -> dict[str, Any]:
        return {"dayfirst": bool(is_day_first(sample.cells, sample.data))}

    def read(self, cells: pl.Series) -> pl.Series:
        return read_times(cells, self.dayfirst)

    def fitted(self, found: Found) -> Self:
        values = found.numbers()
        parts = [
            Numeric(name=name, scale=self.scale, buckets=self.buckets)._fitted_to(numbers_B, found.data)
            for name, numbers_B in zip(self.part_names, self.numbers(values), strict=True)
        ]
        return self.model_copy(update={"learned": tuple(parts)})

    @property
    def part_names(self) -> list[str]:
        """Names of its columns of numbers."""
        return [f"{self.name} ({part})" for part in ("hour", "weekday", "day")]

    @property
    def parts(self) -> tuple[Numeric, ...]:
        return self.learned

    def numbers(self, values: pl.Series) -> list[Array]:
        return time_parts(values)


class Category(Column):
    """Texts that have an embedding each."""

    role = "categorical"
    flag = "categorical"
    flag_help = "Columns to read as categories, separated by commas."
    coded = True

    min_count: int | None = Field(default=None, ge=1, le=_MOST, examples=[2])
    """Values seen in fewer training rows become the unknown one."""
    top: int | None = Field(default=None, ge=1, le=_MOST, examples=[10000])
    """At most so many values, the most frequent ones, get an embedding of their own."""
    hash_buckets: int = Field(default=0, ge=0, le=_MOST, examples=[1000])
    """Embeddings that the other values share by a hash, instead of the unknown one."""
    ignore_case: bool = Field(default=False, examples=[False])
    """Are Yes and yes the same value?"""
    learned: pl.Series = Field(default_factory=lambda: pl.Series("value", [], dtype=pl.String), exclude=True)
    """Values that have an id of their own, in the order of their ids."""

    @classmethod
    def claims(cls, sample: Sample) -> str | None:
        cells = sample.cells
        if not len(cells):
            return f"no values in the first {sample.num_rows:,} rows"
        return why_no_number(sample) or ("letters' case is ignored" if cls.told(sample) else "")

    @classmethod
    def told(cls, sample: Sample) -> dict[str, Any]:
        distinct = sample.cells.unique().to_list() if sample.cells.dtype == pl.String else []
        folded = {str(text).lower() for text in distinct[:8]}
        # True, TRUE and true come from different programs; other words may differ on purpose.
        mixed = len(folded) < len(distinct) <= 6 and folded <= {"true", "false"}
        return {"ignore_case": True} if mixed else {}

    def read(self, cells: pl.Series) -> pl.Series:
        texts = cells.cast(pl.String)
        return texts.str.to_lowercase() if self.ignore_case else texts

    def fitted(self, found: Found) -> Self:
        texts, counts = found.texts()
        return self.kept(texts, counts, found.data.min_count if self.min_count is None else self.min_count)

    def kept(self, texts: pl.Series, counts: Array, least: int) -> Self:
        """Return the column with the texts that at least so many training rows have, most frequent first."""
        seen = pl.DataFrame({"value": texts, "rows": counts}).filter(pl.col("rows") >= least)
        # Ties by name: the order in which texts were read may depend on threads.
        kept = seen.sort(["rows", "value"], descending=[True, False])["value"]
        return self._with(kept if self.top is None else kept.head(self.top))

    def extended(self, newer: Column) -> Self:
        more = newer.learned.filter(~newer.learned.is_in(self.learned.implode()))
        return self._with(pl.concat([self.learned, more]))

    def _with(self, texts: pl.Series) -> Self:
        values = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self)(**values | {"learned": texts})  # a copy would have what is cached of the old ones

    @property
    def form(self) -> str:
        return f"{self.role} with {self.hash_buckets} hash buckets" if self.hash_buckets else self.role

    @property
    def num_ids(self) -> int:
        return FIRST_ID + len(self.learned) + self.hash_buckets

    @property
    def tables(self) -> list[tuple[str, str, int]]:
        return [(self.name, self.role, self.num_ids)]

    @cached_property
    def _known(self) -> dict[str | None, int]:
        """The ids of the learned texts and of no value."""
        return {None: MISSING_ID, **{text: n for n, text in enumerate(self.learned.to_list(), FIRST_ID)}}

    @cached_property
    def _expression(self) -> pl.Expr:
        """The ids of a frame's first column; made once, as to hand an Enum to polars takes time for each of
        its texts."""
        codes = pl.first().cast(pl.Enum(self.learned), strict=False).to_physical().cast(pl.Int32)
        ids = codes.fill_null(UNKNOWN_ID - FIRST_ID) + FIRST_ID
        return pl.when(pl.first().is_null()).then(MISSING_ID).otherwise(ids).alias("ids")

    def ids_of(self, texts: pl.Series) -> Array:
        """Return the id (B,) of each text (None: no value)."""
        if self.hash_buckets or len(texts) <= FEW:
            return ids_of(texts.to_list(), self._known, FIRST_ID + len(self.learned), self.hash_buckets)
        return texts.to_frame().select(self._expression).to_series().to_numpy()

    def knows(self, texts: Sequence[str]) -> bool:
        """Are some of these texts learned ones?"""
        return bool(pl.Series(texts, dtype=pl.String).is_in(self.learned.implode()).any())

    def ids_as_given(self, cells: pl.Series, cleaned: Callable[[pl.Series], pl.Series]) -> Array:
        """Return the ids (B,) of cells of which none is cleaned but those that are not learned as they are:
        learned texts are clean."""
        reads_otherwise = type(self) is not Category or self.ignore_case or cells.dtype != pl.String
        if reads_otherwise or self.hash_buckets:
            return self.ids(self.values(cleaned(cells)))
        ids_B = np.array(self.ids_of(cells))
        odd = np.flatnonzero(ids_B == UNKNOWN_ID)
        if len(odd):
            ids_B[odd] = self.ids_of(cleaned(cells.gather(odd)))
        return ids_B

    def ids(self, values: pl.Series) -> Array:
        """Return the ids (B,) of what `read` gave; of a bag (B, L)."""
        return self.ids_of(values)

    def ids_of_codes(self, codes: pl.Series, ids_by_code: Array) -> Array:
        """Return the ids of values that are codes of a `Dictionary`."""
        return ids_by_code.take(codes.to_numpy())


class Bag(Category):
    """Several values in a cell, such as drama|comedy: the mean of their embeddings. An item that comes twice
    counts twice."""

    role = "bag"
    lists = True
    flag = "bags"
    flag_help = (
        "Columns to read as bags: several values in a cell, such as drama|comedy, separated by commas."
    )

    separator: str = Field(default="|", min_length=1, examples=["|"])
    """Text between the items of a cell; lists have none."""
    max_items: int = Field(default=16, ge=1, le=1024, examples=[16])
    """Items of a cell that are looked up, the first ones."""

    @classmethod
    def claims(cls, sample: Sample) -> str | None:
        return "lists" if sample.cells.dtype == pl.List else None

    @classmethod
    def told(cls, sample: Sample) -> dict[str, Any]:
        return {}

    @property
    def form(self) -> str:
        return f"a bag with {self.separator!r} between items, at most {self.max_items} of a cell" + (
            f", {self.hash_buckets} hash buckets" if self.hash_buckets else ""
        )

    def items(self, cells: pl.Series, most: int | None = None) -> pl.Series:
        """Return the items of cells as lists: blanks around them are stripped, empty ones dropped."""
        return items_of(cells, self.separator, most)

    def read(self, cells: pl.Series) -> pl.Series:
        return self.items(cells, self.max_items)

    def left_out(self, cells: pl.Series, values: pl.Series) -> int:
        """Return how many cells hold more items than are looked up. values: what `read` gave."""
        full = cells.filter(values.list.len() == self.max_items)  # the only ones that may hold more
        return int((self.items(full).list.len() > self.max_items).sum())

    def ids(self, values: pl.Series) -> Array:
        return bag_ids(values, self.ids_of)

    def ids_of_codes(self, codes: pl.Series, ids_by_code: Array) -> Array:
        return bag_ids(codes, lambda items: ids_by_code.take(items.to_numpy()))


class Text(Bag):
    """The lower-cased words of a free text, as a bag."""

    role = "text"
    lists = False
    flag = "text"
    flag_help = "Columns to read as free text, whose words are a bag, separated by commas."

    @classmethod
    def claims(cls, sample: Sample) -> str | None:
        return None

    @property
    def form(self) -> str:
        return f"words, at most {self.max_items} of a cell"

    def items(self, cells: pl.Series, most: int | None = None) -> pl.Series:
        return words_of(cells, most)


KINDS: list[type[Column]] = [Bag, Text, Time, Ignore, Numeric, Category]
"""In the order in which they are asked; the last one claims every column."""


def kind_of(role: str) -> type[Column]:
    """Return the kind of a role. Raises UserError for none of `KINDS`."""
    for kind in KINDS:
        if kind.role == role:
            return kind
    raise UserError(f"role = {role!r}: there is no such kind of column; use {', '.join(roles())}")


def roles() -> list[str]:
    """Return the names of the kinds."""
    return [kind.role for kind in KINDS]


def table_config() -> type[TableDataConfig]:
    """Return the data section of tables, with a field that lists columns for each of `KINDS`."""
    return _table_config(tuple(KINDS))


@cache
def _table_config(kinds: tuple[type[Column], ...]) -> type[TableDataConfig]:
    fields: dict[str, Any] = {
        kind.flag: (
            Names,
            Field(default=(), description=kind.flag_help, json_schema_extra={"role": kind.role}),
        )
        for kind in kinds
    }
    return create_model(
        "TableDataConfig", __base__=TableDataConfig, __doc__=TableDataConfig.__doc__, **fields
    )
