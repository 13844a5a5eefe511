"""The kinds of columns: which columns each claims, how it reads cells, what it learns from the training rows,
and which inputs a model gets from it.

A new kind is a subclass of `Column` and an entry of `KINDS`: the flag that lists such columns, its keys in
schema.toml and its part of the saved encoder follow from the class. Ids: 0 = no value, 1 = unknown value.
Letters: B rows, N dense columns, L items of a bag.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, cached_property
from typing import Any, Literal, Self, cast

import numpy as np
import polars as pl
from pydantic import Field, create_model

from dphybrid.config import Names
from dphybrid.config.tables import TableDataConfig
from dphybrid.data.table.cells import (
    DASHES,
    FEW,
    FIRST_ID,
    IS_LIST,
    MISSING_ID,
    UNKNOWN_ID,
    Notation,
    bag_ids,
    ids_of,
    items_of,
    number_texts,
    numbers_of,
    read_numbers,
    read_times,
    texts_of,
    time_parts,
    words_of,
)
from dphybrid.data.table.column import Array, Column, Sample, TrainingValues
from dphybrid.data.table.numbers import (
    USUAL,
    WITH_MARKS,
    Scale,
    are_numbers,
    dashes_of,
    fit_scale,
    flag_of,
    has_leading_zeros,
    how_dates_are_read,
    is_day_first,
    is_free_text,
    looks_like_dates,
    may_be_grouped,
    not_numbers,
    notation_of,
    numbers_rows,
    repeat,
    separator_of,
    unlike,
    why_not_numeric,
)
from dphybrid.util.errors import UserError, counted
from dphybrid.util.text import as_flags

_ROW_NUMBERS = 20
"""Fewest rows for which a column of increasing numbers is taken for a row number."""
_ROW_GAPS = 0.05
"""Share of row numbers that may be missing, because rows were filtered out or rejected."""
_BUCKET_ROWS = 4096
"""Fewest training rows per bucket, unless schema.toml asks for more buckets: with fewer, an embedding
memorises its rows. docs/quality.md compares 128 with 4,096."""
_SOME = 20
"""Cells that are looked at before all cells of a column."""
_INT32_MAX = 2**31 - 1
"""Largest int32: ids are stored as such."""


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
        if sample.cells.dtype != pl.String or sample.declared:
            return None
        # A model would learn from a row number when a row was written, and new rows are beyond all of them.
        if not numbers_rows(sample.name):
            return None
        numbers = number_texts(sample.cells).cast(pl.Int64, strict=False)
        counts = len(numbers) == sample.num_rows >= _ROW_NUMBERS and not numbers.null_count()
        if not counts or has_leading_zeros(sample.cells) or not (numbers.diff().drop_nulls() > 0).all():
            return None
        span = int(numbers[-1]) - int(numbers[0])
        return "a row number" if span < (1 + _ROW_GAPS) * sample.num_rows else None


class Notated(Column):
    """A column whose cells may be numbers, and how they are written."""

    decimal: Literal[".", ","] = Field(default=".", examples=["."])
    """Decimal mark."""
    thousands: Literal["", ",", ".", " ", "'", "_"] = Field(default="", examples=[""])
    """Thousands separator; empty: none."""
    marks: bool = Field(default=False, examples=[False])
    """true reads $5, 7 %, (0.13) as -0.13, and durations such as 2h20m and 1:02:30 as seconds."""

    @classmethod
    def inferred(cls, sample: Sample) -> dict[str, Any]:
        return dict(zip(("decimal", "thousands", "marks"), notation_of(sample)[0], strict=True))

    @property
    def notation(self) -> Notation:
        """How the column writes numbers."""
        return self.decimal, self.thousands, self.marks


class Numbers(Column):
    """One or more numbers per cell: standardized, and in quantile buckets with an embedding each."""

    scale: Literal["auto", "log", "standard", "none"] = Field(default="auto", examples=["auto"])
    """log: logarithm, then standardized; standard: standardized; none: as is; auto: log for heavy tails."""
    buckets: int | None = Field(default=None, ge=0, le=4096, examples=[32])
    """Quantile buckets, each with its own embedding; 0: none."""

    @property
    @abstractmethod
    def parts(self) -> "tuple[Numeric, ...]":
        """The numeric columns that this column becomes, each with one number per cell."""

    def wrong(self, cells: pl.Series, values: pl.Series) -> pl.Series:
        # Infinite numbers and dashes were read as None, too, but count as no value.
        return not_numbers(cells, values)

    def numbers(self, values: pl.Series) -> list[Array]:
        """Return the numbers (B,) of each part, nan for no value."""
        return [values.to_numpy()]

    @property
    def tables(self) -> list[tuple[str, str, int]]:
        return [(part.name, "buckets", part.learned.num_ids) for part in self.parts if part.learned.num_ids]

    def ids_of_newer(self, newer: "Numbers") -> list[Array]:
        """Return, for each of the tables, an array that maps the ids of `newer` to this column's."""
        return [np.arange(num_ids) for _, _, num_ids in self.tables]


class Numeric(Notated, Numbers):
    """A number."""

    role = "numeric"
    flag = "numeric"
    flag_help = "Columns to read as numbers, separated by commas; roles of unlisted columns are inferred."
    noun = "number"

    learned: Scale = Scale()

    @classmethod
    def claims(cls, sample: Sample) -> str | None:
        if not len(sample.cells) or why_not_numeric(sample) is not None:
            return None
        column = cls(name=sample.name, **cls.inferred(sample))
        none = sample.cells.filter(column.read(sample.cells).is_null())
        notes = dashes_of(none)
        infinite = len(none) - int(none.is_in(DASHES).sum())
        if infinite:
            notes.append(
                f"{counted(infinite, 'infinite number counts', 'infinite numbers count')} as no value"
            )
        notes += [f"thousands separator {column.thousands!r}"] if column.thousands else []
        notes += [f"decimal mark {column.decimal!r}"] if column.decimal != "." else []
        if column.marks:
            lengths = sample.cells.head(_SOME).str.contains("[hms:]").any()
            notes.append("durations in seconds" if lengths else "numbers without their marks")
            notes += unlike(sample.cells)
        usual = column.notation == USUAL
        if usual and not sample.typed and (grouped := may_be_grouped(sample.cells)):
            notes.append(f"{grouped!r} is {float(grouped):g}; --data.thousands . reads thousands instead")
        return ", ".join(notes) + "; --data.decimal and --data.thousands override this" * (not usual)

    def read(self, cells: pl.Series) -> pl.Series:
        return numbers_of(cells, *self.notation)

    def fitted(self, training: TrainingValues) -> Self:
        return self._fitted_to(training.numbers().to_numpy(), training.data)

    def _fitted_to(self, numbers_B: Array, data: TableDataConfig) -> Self:
        """Return the column fitted to numbers (B,) of the training rows, nan for no value."""
        # With few rows, few buckets: otherwise an embedding would learn single rows.
        most = max(2, int(np.count_nonzero(~np.isnan(numbers_B))) // _BUCKET_ROWS)
        buckets = min(data.buckets, most) if self.buckets is None else self.buckets
        return self.model_copy(update={"learned": fit_scale(numbers_B, buckets, self.scale)})

    @property
    def parts(self) -> "tuple[Numeric, ...]":
        return (self,)


class Whole(Numeric):
    """A whole number whose values repeat: the number, and a row for each value. A fraction among them has the
    row of unknown values."""

    role = "whole"
    flag = "whole"
    flag_help = (
        "Columns to read as whole numbers that also have an embedding for each value, separated by commas."
    )

    @classmethod
    def claims(cls, sample: Sample) -> str | None:
        if not len(sample.cells) or why_not_numeric(sample) is not None or not repeat(sample):
            return None
        said = super().claims(sample)
        return "whole numbers that repeat: a row for each value, and the number" + (
            f", {said}" if said else ""
        )

    def fitted(self, training: TrainingValues) -> Self:
        values = training.every().drop_nulls().rename("value")
        counts = values.filter(values == values.floor()).value_counts(name="rows")
        known = counts.filter(pl.col("rows") >= training.data.min_count)["value"].cast(pl.Int64).sort()
        found = self.model_copy(update={"buckets": 0})._fitted_to(
            training.numbers().to_numpy(), training.data
        )
        return found._with(known)

    def _with(self, known: pl.Series) -> Self:
        return self.model_copy(update={"learned": Scale(**dict(self.learned) | {"known": known})})

    @property
    def tables(self) -> list[tuple[str, str, int]]:
        return [(self.name, "categorical", self.learned.num_ids)]

    @property
    def known(self) -> pl.Series:
        """The values with their own id, in the order of their ids."""
        return cast(pl.Series, self.learned.known)

    def extended(self, newer: Column) -> Self:
        newer_V = cast(Whole, newer).known
        return self._with(pl.concat([self.known, newer_V.filter(~newer_V.is_in(self.known.implode()))]))

    def ids_of_newer(self, newer: Numbers) -> list[Array]:
        newer_V = cast(Whole, newer).known.to_numpy()
        return [np.concatenate([[MISSING_ID, UNKNOWN_ID], self.learned.ids(newer_V)])]

    def covers(self, earlier: Self) -> bool:
        same = [one.learned.model_dump(exclude={"known"}) for one in (self, earlier)]
        return same[0] == same[1] and bool(earlier.known.is_in(self.known.implode()).all())

    @property
    def vocabulary(self) -> pl.Series:
        return self.known.cast(pl.String)

    @classmethod
    def restored(cls, values: dict[str, Any], vocabularies: Iterator[pl.Series]) -> Self:
        return cls(**values)._with(next(vocabularies).cast(pl.Int64))


class Time(Numbers):
    """Dates and times, as three numbers: the hour, the weekday (1: Monday) and the days since 1970."""

    role = "time"
    flag = "times"
    flag_help = (
        "Columns to read as dates or times, separated by commas: hour, weekday and day become numbers. Dates "
        "are inferred if the order of day and month is clear."
    )
    noun = "date or time"

    dayfirst: bool = Field(default=False, examples=[False])
    """true reads 3/12/2024 as 3 December, false as 12 March."""
    learned: tuple[Numeric, ...] = ()

    @classmethod
    def claims(cls, sample: Sample) -> str | None:
        first = is_day_first(sample.cells, sample.data)
        if sample.declared or first is None or not looks_like_dates(sample.cells, first):
            return None
        how = [*dashes_of(sample.cells), *how_dates_are_read(sample.cells, first)]
        return f"{', '.join(['dates or times', *how])}; --data.categorical reads them as categories"

    @classmethod
    def inferred(cls, sample: Sample) -> dict[str, Any]:
        return {"dayfirst": bool(is_day_first(sample.cells, sample.data))}

    def read(self, cells: pl.Series) -> pl.Series:
        return read_times(cells, self.dayfirst)

    def fitted(self, training: TrainingValues) -> Self:
        values = training.numbers()
        parts = [
            Numeric(name=name, scale=self.scale, buckets=self.buckets)._fitted_to(numbers_B, training.data)
            for name, numbers_B in zip(self.part_names, self.numbers(values), strict=True)
        ]
        return self.model_copy(update={"learned": tuple(parts)})

    @property
    def part_names(self) -> list[str]:
        """Names of its numeric columns."""
        return [f"{self.name} ({part})" for part in ("hour", "weekday", "day")]

    @property
    def parts(self) -> tuple[Numeric, ...]:
        return self.learned

    def numbers(self, values: pl.Series) -> list[Array]:
        return time_parts(values)


class Category(Notated):
    """Texts with an embedding each."""

    role = "categorical"
    flag = "categorical"
    flag_help = "Columns to read as categories, separated by commas."
    coded = True

    min_count: int | None = Field(default=None, ge=1, le=_INT32_MAX, examples=[2])
    """Values in fewer training rows than this count as the unknown value."""
    top: int | None = Field(default=None, ge=1, le=_INT32_MAX, examples=[10000])
    """Give only this many values, the most frequent ones, their own embedding."""
    hash_buckets: int = Field(default=0, ge=0, le=_INT32_MAX, examples=[1000])
    """Embeddings that all other values share by a hash, instead of a single unknown one."""
    ignore_case: bool = Field(default=False, examples=[False])
    """true reads Yes and yes as the same value."""
    type: str = Field(default="text", pattern="^(text|number|[^/]+/[^/]+)$", examples=["text"])
    """What the values are, however a file or frame stores them. number: 7 and 7.0 are one value; false/true:
    a flag, where True, 1 and yes are one value, known by the words given. Inferred from the first rows."""
    # Excluded: the encoder saves the texts of all columns in one Parquet file.
    learned: pl.Series = Field(default_factory=lambda: pl.Series("value", [], dtype=pl.String), exclude=True)
    """The values with their own id, in the order of their ids."""

    @classmethod
    def claims(cls, sample: Sample) -> str | None:
        cells = sample.cells
        if not len(cells):
            return f"no values in the first {sample.num_rows:,} rows"
        if why := why_not_numeric(sample):
            return why
        by_case = (
            cells.to_frame("one").unique().group_by(pl.col("one").str.to_lowercase().alias("low")).agg("one")
        )
        several = by_case.filter(pl.col("one").list.len() > 1).sort("low")["one"]
        if not len(several):
            return ""
        if "/" in cls._type_of(sample):
            return "upper and lower case count as equal"
        first, second, *_ = sorted(several[0])
        return (
            f"{first!r} and {second!r} differ only in case; ignore_case = true in schema.toml makes them one"
        )

    @classmethod
    def inferred(cls, sample: Sample) -> dict[str, Any]:
        found = cls._type_of(sample)
        return {"type": found} | (super().inferred(sample) if found == "number" else {})

    @staticmethod
    def _type_of(sample: Sample) -> str:
        if sample.cells.dtype != pl.String or not len(sample.cells):
            return "text"
        return flag_of(sample.cells) or ("number" if are_numbers(sample) else "text")

    def read(self, cells: pl.Series) -> pl.Series:
        return texts_of(cells, self.type, self.notation, self.ignore_case)

    @cached_property
    def _with_zeros(self) -> str:
        """A learned text that is a number with a leading zero; empty if there is none."""
        found = self.learned.filter(self.learned.str.contains(r"^0\d+$")).head(1)
        return "".join(found.to_list())

    def doubt(self, cells: pl.Series) -> str:
        if cells.dtype.is_float() and self.type == "number" and (cells.fill_nan(0).abs() >= 2**53).any():
            return f"Column {self.name!r} holds floats beyond 2^53, which merge ids; give integers or texts"
        if cells.dtype == pl.String and self.type == "number":
            unread = cells.filter(cells.str.contains(WITH_MARKS))
            unread = unread.filter(read_numbers(unread, *self.notation).is_null())
            if len(unread):
                how = "training had numbers without such marks; data.thousands and data.decimal name them"
                return f"Column {self.name!r} holds {unread[0]!r}, but {how}"
        if not (cells.dtype.is_numeric() and self._with_zeros):
            return ""
        texts = f"texts such as {self._with_zeros!r}"
        return f"Column {self.name!r} holds numbers, but training had {texts}; write them as such texts"

    def fitted(self, training: TrainingValues) -> Self:
        texts, counts = training.texts()
        return self.kept(texts, counts, training.data.min_count if self.min_count is None else self.min_count)

    def kept(self, texts: pl.Series, counts: Array, least: int) -> Self:
        """Return the column with the texts that occur in at least `least` training rows, most frequent
        first."""
        seen = pl.DataFrame({"value": texts, "rows": counts}).filter(pl.col("rows") >= least)
        # Ties are broken by the text, as the order in which texts arrive may depend on threads.
        kept = seen.sort(["rows", "value"], descending=[True, False])["value"]
        return self._with(kept if self.top is None else kept.head(self.top))

    def covers(self, earlier: Self) -> bool:
        return bool(earlier.learned.is_in(self.learned.implode()).all())

    @property
    def vocabulary(self) -> pl.Series:
        return self.learned

    @classmethod
    def restored(cls, values: dict[str, Any], vocabularies: Iterator[pl.Series]) -> Self:
        return cls(**values, learned=next(vocabularies))

    def extended(self, newer: Column) -> Self:
        more = newer.learned.filter(~newer.learned.is_in(self.learned.implode()))
        return self._with(pl.concat([self.learned, more]))

    def _with(self, texts: pl.Series) -> Self:
        values = {name: getattr(self, name) for name in type(self).model_fields}
        # Not model_copy, which would also copy the cached properties of the old texts.
        return type(self)(**values | {"learned": texts})

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
        """The id of each learned text, and of None (no value)."""
        return {None: MISSING_ID, **{text: n for n, text in enumerate(self.learned.to_list(), FIRST_ID)}}

    @property
    def _key(self) -> str:
        # Not the bare name: polars reads `*` and `^...$` as patterns.
        return f"texts of {self.name}"

    @cached_property
    def _expression(self) -> pl.Expr:
        """Expression for the ids of a frame's column `_key`. Cached, as the time to give polars an Enum grows
        with the number of its texts."""
        texts = pl.col(self._key)
        codes = texts.cast(pl.Enum(self.learned), strict=False).to_physical().cast(pl.Int32)
        ids = codes.fill_null(UNKNOWN_ID - FIRST_ID) + FIRST_ID
        return pl.when(texts.is_null()).then(MISSING_ID).otherwise(ids).alias(self._key)

    def ids_of(self, texts: pl.Series) -> Array:
        """Return the id (B,) of each text (None: no value)."""
        if self.takes_engine(texts):
            return pl.DataFrame([texts.alias(self._key)]).select(self._expression).to_series().to_numpy()
        return ids_of(texts.to_list(), self._known, FIRST_ID + len(self.learned), self.hash_buckets)

    def takes_engine(self, texts: pl.Series) -> bool:
        """Return whether polars finds the ids of these texts. Hash buckets need crc32, which it lacks; for
        few rows, its engine takes longer to start."""
        return not self.hash_buckets and len(texts) > FEW

    def ids(self, values: pl.Series) -> Array:
        """Return the ids (B,) of the values that `read` returned; of a bag (B, L)."""
        return self.ids_of(values)

    def ids_of_codes(self, codes: pl.Series, ids_by_code: Array) -> Array:
        """Return the ids of values that are stored as codes of a `Dictionary`."""
        return ids_by_code.take(codes.to_numpy())


def ids_of_columns(columns: Sequence[Category], values: Sequence[pl.Series]) -> list[Array]:
    """Return `ids` of several columns, as far as possible from one call of polars: each takes 0.2 ms to
    start."""
    pairs = list(zip(columns, values, strict=True))
    plain = [(c, texts) for c, texts in pairs if type(c) is Category and c.takes_engine(texts)]
    frame = pl.DataFrame([texts.alias(c._key) for c, texts in plain])
    found = frame.select(c._expression for c, _ in plain) if plain else frame
    return [found.get_column(c._key).to_numpy() if c._key in found else c.ids(each) for c, each in pairs]


class Bag(Category):
    """Several values in a cell, such as drama|comedy; the model gets the mean of their embeddings. An item
    that occurs twice counts twice."""

    role = "bag"
    lists = True
    flag = "bags"
    flag_help = (
        "Columns to read as bags (several values in a cell, such as drama|comedy), separated by commas."
    )

    separator: str = Field(default="|", min_length=1, examples=["|"])
    """Text between the items of a cell; [] for lists in brackets, such as ["a", "b"]; not used for lists of a
    Parquet file."""
    max_items: int = Field(default=16, ge=1, le=1024, examples=[16])
    """Number of items of a cell that are looked up, from the first one on."""

    @classmethod
    def claims(cls, sample: Sample) -> str | None:
        # Texts such as drama|comedy are only pointed out to the user; see `why_not_numeric`.
        are_lists = sample.cells.dtype == pl.List or separator_of(sample.cells, is_bag=False) == "[]"
        return "lists" if are_lists else None

    @classmethod
    def inferred(cls, sample: Sample) -> dict[str, Any]:
        mark = "" if sample.cells.dtype == pl.List else sample.separator
        if mark == "auto":
            mark = separator_of(sample.cells, is_bag=True)
        found = {"separator": mark} if mark else {}
        items = items_of(sample.cells, mark or "|").explode().drop_nulls()
        numbers = super().inferred(replace(sample, cells=items))
        return found | (numbers if numbers["type"] == "number" else {})

    @property
    def form(self) -> str:
        return f"a bag with {self.separator!r} between items, at most {self.max_items} of a cell" + (
            f", {self.hash_buckets} hash buckets" if self.hash_buckets else ""
        )

    def items(self, cells: pl.Series, most: int | None = None) -> pl.Series:
        """Return the items of cells as lists, stripped and without empty ones."""
        return items_of(cells, self.separator, most)

    def read(self, cells: pl.Series) -> pl.Series:
        return super().read(self.items(cells, self.max_items))

    def doubt(self, cells: pl.Series) -> str:
        if cells.dtype != pl.String or type(self) is not Bag:
            return ""
        for mark in (";", "|", ","):
            with_mark = cells.head(_SOME).drop_nulls()
            with_mark = with_mark.filter(with_mark.str.contains(mark, literal=True))
            if not len(with_mark) or mark == self.separator or with_mark.str.contains(IS_LIST).all():
                continue
            if not self.items(with_mark).explode().is_in(self.learned.implode()).any():
                how = f"lists or items between {self.separator!r}"
                return f"Column {self.name!r} holds {with_mark[0]!r}, but training had {how}; write them so"
        return ""

    def left_out(self, cells: pl.Series, values: pl.Series) -> int:
        """Return how many cells hold more items than are looked up. values: `read` of the cells."""
        full = cells.filter(values.list.len() == self.max_items)  # no other cell can hold more
        return int((self.items(full).list.len() > self.max_items).sum())

    def ids(self, values: pl.Series) -> Array:
        return bag_ids(values, self.ids_of)

    def ids_of_codes(self, codes: pl.Series, ids_by_code: Array) -> Array:
        return bag_ids(codes, lambda items: ids_by_code.take(items.to_numpy()))


class Text(Bag):
    """A free text, read as the bag of its lower-cased words."""

    role = "text"
    lists = False
    flag = "text"
    flag_help = "Columns to read as free text (a bag of words), separated by commas."

    @classmethod
    def claims(cls, sample: Sample) -> str | None:
        if sample.declared or not is_free_text(sample.cells):
            return None
        flag = as_flags({"data.categorical": [sample.name]})
        return f"free text, read as its words; {flag} reads each text as one value"

    @classmethod
    def inferred(cls, sample: Sample) -> dict[str, Any]:
        return {}

    @property
    def form(self) -> str:
        return f"words, at most {self.max_items} of a cell"

    def items(self, cells: pl.Series, most: int | None = None) -> pl.Series:
        return words_of(cells, most)


KINDS: list[type[Column]] = [Bag, Time, Ignore, Whole, Numeric, Text, Category]
"""All kinds, in the order in which they may claim a column; the last one claims every column."""


def kind_of(role: str) -> type[Column]:
    """Return the kind with a role. Raises UserError for an unknown role."""
    for kind in KINDS:
        if kind.role == role:
            return kind
    raise UserError(f"role = {role!r}: unknown; use {', '.join(roles())}")


def roles() -> list[str]:
    """Return the roles of all kinds."""
    return [kind.role for kind in KINDS]


def table_config() -> type[TableDataConfig]:
    """Return the data section of tables, with a field for each of `KINDS` that lists its columns."""
    # Computed when it is asked for, as another package may have added a kind; cached by the kinds.
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
