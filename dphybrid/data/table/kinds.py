"""The kinds of columns: what each learns from the training rows, and which inputs a model gets from it. The
kind follows from the reader's type, the name and the repetition of values, never from the label.

Ids: 0 = no value, 1 = unknown value. Letters: B rows, L items of a bag.
"""

import re
import zlib
from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar, Literal, Self, cast

import numpy as np
import polars as pl
from pydantic import ConfigDict, Field

from dphybrid.config import Section
from dphybrid.config.tables import TableDataConfig
from dphybrid.data.table.numbers import Scale, fit_scale
from dphybrid.data.table.values import (
    EXACT,
    FIRST_ID,
    FLAG_WORDS,
    MISSING_ID,
    NAMES_AN_ID,
    UNKNOWN_ID,
    Array,
    Form,
    bag_ids,
    is_either_order,
    is_odd,
    items_of,
    type_of,
    typed,
    unit_of,
    with_gaps,
)
from dphybrid.util.errors import UserError

FIT_ROWS = 2**18
"""Maximum number of training rows, evenly spaced, from which kinds and the statistics of numbers follow."""
_ROW_NUMBERS = 20
"""Fewest rows for which a column of increasing numbers is taken for a row number."""
_ROW_GAPS = 0.05
"""Share of row numbers that may be missing, because rows were filtered out or rejected."""
_KNOTS = 128
"""Knots of a number's encoding: of more different whole numbers, it does not tell all apart."""
_REPEATED = 0.25
"""Whole numbers repeat if this share of the rows holds a value that occurs again."""
_INT32_MAX = 2**31 - 1
"""Largest int32: ids are stored as such."""
_NO_MEMBER = "\0"
"""Stands for a cell that is no value of its column's type, such as 7.5 among whole numbers: it is unknown,
not missing."""

_NUMBERS_ROWS = re.compile(
    r"^(?:|0|#|n|x|unnamed.*|(?:.*[\W_])?(?:index|idx|rows?|rownames?|row_?num|row_?number|line|record|number"
    r"|num|seq|sequence|serial|obs|case))$",
    re.IGNORECASE,
)
_NAMES_A_TIME = re.compile(
    r"(?:^|[\W_])(?i:(?:unix|epoch)?_?(?:review)?(?:time|timestamp|date|datetime|ts))(?:$|[\W_])"
    r"|[a-z](?:Time|Timestamp|Date|TS)$|(?:_at|At)$"
)


class Column(Section):
    """A column of a table. The fields of its subclasses are keys of its section in schema.toml.

    Attributes:
        role: The kind's name.
        order: Columns with a smaller one come first in the arrays.
        form: What its values are.
        unseen: The share of values in the validation rows that training does not know, or that are no values
            of the column's type.
        scales: Of the numbers that each cell gives.
        learned: The values with an id each, as texts, in the order of their ids.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    role: ClassVar[str] = ""
    order: ClassVar[int] = 0

    name: str
    form: Form = Form()
    unseen: float = 0.0
    scales: tuple[Scale, ...] = ()
    # Excluded: the encoder saves the texts of all columns in one Parquet file.
    learned: pl.Series = Field(default_factory=lambda: pl.Series("value", [], dtype=pl.String), exclude=True)

    @classmethod
    def options(cls) -> dict[str, Any]:
        """Return the fields that a section of schema.toml may have."""
        return {name: field for name, field in cls.model_fields.items() if name not in Column.model_fields}

    @classmethod
    def options_in(cls, section: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of this kind in a section of schema.toml."""
        return {key: value for key, value in section.items() if key in cls.options()}

    def read(self, cells: pl.Series) -> pl.Series:
        """Return the values of cells; None for no value and for cells of another type. cells: of
        `values.with_gaps`, or of a file."""
        return typed(cells, self.form)

    def fitted(self, train: pl.Series, data: TableDataConfig) -> Self:
        """Return the column fitted to the values of the training rows."""
        return self

    def numbers(self, values: pl.Series) -> list[Array]:
        """Return the numbers (B,) that the values give, nan for no value."""
        return []

    @property
    def num_ids(self) -> int:
        """Number of ids, with those of no value, of unknown values and of hash buckets; 0 without ids."""
        return 0

    def ids(self, values: pl.Series) -> Array:
        """Return the ids (B,) of values, of a bag (B, L)."""
        raise NotImplementedError

    def unknown(self, cells: pl.Series, values: pl.Series) -> tuple[int, int]:
        """Return how many cells have a value, and how many of these training does not know, or are no values
        of the column's type. values: `read` of the cells."""
        filled = int(self._filled(cells).sum())
        return filled, max(0, filled - (len(values) - values.null_count()))

    def _filled(self, cells: pl.Series) -> pl.Series:
        """Return a mask (B,) of the cells that have a value, of the column's type or not."""
        cells = with_gaps(cells, None)
        if not self.form.none:
            return cells.is_not_null()
        none = pl.Series(self.form.none, dtype=pl.Float64).implode()
        return cells.is_not_null() & ~cells.cast(pl.Float64, strict=False).is_in(none).fill_null(False)

    def extended(self, newer: "Column") -> Self:
        """Return the column with the values that only `newer` has added; its ids and statistics stay."""
        more = newer.learned.filter(~newer.learned.is_in(self.learned.implode()))
        return self._with(learned=pl.concat([self.learned, more]))

    def covers(self, earlier: "Column") -> bool:
        """Return whether this column tells apart all that `earlier` does."""
        knows_all = bool(earlier.learned.is_in(self.learned.implode()).all())
        return self.scales == earlier.scales and knows_all

    def _with(self, **changes: Any) -> Self:
        values = {name: getattr(self, name) for name in type(self).model_fields}
        # Not model_copy, which would also copy the cached properties of the old texts.
        return type(self)(**values | changes)


class Ignore(Column):
    """A column that is not read."""

    role = "ignore"


class Numeric(Column):
    """A number."""

    role = "numeric"

    form: Form = Form(type="number")
    scale: Literal["auto", "log", "standard", "none"] = Field(default="auto", examples=["auto"])
    """log: logarithm, then standardized; standard: standardized; none: as is; auto: log for heavy tails."""

    def fitted(self, train: pl.Series, data: TableDataConfig) -> Self:
        numbers = self.numbers(train.gather_every(step_of(len(train))))
        return self._with(scales=tuple(fit_scale(numbers_B, self.scale) for numbers_B in numbers))

    def numbers(self, values: pl.Series) -> list[Array]:
        return [values.fill_null(np.nan).to_numpy()]


class Time(Numeric):
    """Dates and times, as three numbers: the hour, the weekday (1: Monday) and the days since 1970."""

    role = "time"
    form: Form = Form(type="time")

    def numbers(self, values: pl.Series) -> list[Array]:
        parts = (values.dt.hour(), values.dt.weekday(), values.dt.date().cast(pl.Int32))
        return [part.cast(pl.Float64).fill_null(np.nan).to_numpy() for part in parts]


class Category(Column):
    """A value with an embedding each; the most frequent ones first."""

    role = "categorical"
    order = 1

    min_count: int | None = Field(default=None, ge=1, le=_INT32_MAX, examples=[2])
    """Values in fewer training rows than this count as the unknown value."""
    hash_buckets: int = Field(default=0, ge=0, le=_INT32_MAX, examples=[1000])
    """Embeddings that all other values share by a hash, instead of a single unknown one."""

    def read(self, cells: pl.Series) -> pl.Series:
        values = super().read(cells).cast(pl.String)
        if self.form.type == "text" or values.null_count() == 0:
            return values
        odd = values.is_null() & self._filled(cells)
        return values.set(odd, _NO_MEMBER) if odd.any() else values

    def texts(self, values: pl.Series) -> pl.Series:
        """Return values as texts."""
        return values

    def fitted(self, train: pl.Series, data: TableDataConfig) -> Self:
        least = data.min_count if self.min_count is None else self.min_count
        counts = self.texts(train).drop_nulls().rename("value").value_counts(name="rows")
        # Ties are broken by the text, as the order of groups depends on threads.
        known = counts.filter(pl.col("rows") >= least).sort(["rows", "value"], descending=[True, False])
        return self._with(learned=known["value"])

    def unknown(self, cells: pl.Series, values: pl.Series) -> tuple[int, int]:
        filled, odd = super().unknown(cells, values)
        return filled, odd + self._unknown(self.ids(values))

    def _unknown(self, ids: Array) -> int:
        first_bucket = FIRST_ID + len(self.learned)
        return int(((ids == UNKNOWN_ID) | (ids >= first_bucket)).sum())

    @property
    def num_ids(self) -> int:
        return FIRST_ID + len(self.learned) + self.hash_buckets

    @cached_property
    def _codes(self) -> pl.Expr:
        """Expression for the places of a frame's column `value` among the learned texts, -1 for others.
        Cached, as the time to give polars an Enum grows with the number of its texts."""
        codes = pl.col("value").cast(pl.Enum(self.learned), strict=False).to_physical()
        return codes.cast(pl.Int32).fill_null(-1)

    def ids(self, values: pl.Series) -> Array:
        return self.ids_of_texts(self.texts(values))

    def ids_of_texts(self, texts: pl.Series) -> Array:
        """Return the id (B,) of each text (None: no value)."""
        codes = texts.alias("value").to_frame().select(self._codes).to_series().to_numpy()
        ids_B: Array = np.where(codes < 0, UNKNOWN_ID, codes + FIRST_ID).astype(np.int32)
        if self.hash_buckets:
            first = FIRST_ID + len(self.learned)
            for place in np.flatnonzero(codes < 0).tolist():
                # Not hash(): Python salts it differently in each process.
                ids_B[place] = first + zlib.crc32(str(texts[place]).encode()) % self.hash_buckets
        if texts.null_count():
            ids_B[texts.is_null().to_numpy()] = MISSING_ID
        return ids_B


class Whole(Category, Numeric):
    """A whole number whose values repeat: the number, and a row for each value. A fraction among them has the
    row of unknown values."""

    role = "whole"
    order = 0
    form: Form = Form(type="number")

    def read(self, cells: pl.Series) -> pl.Series:
        return Numeric.read(self, cells)

    def texts(self, values: pl.Series) -> pl.Series:
        whole = values.cast(pl.Int64, strict=False)
        odd = values.is_not_null() & (whole.is_null() | (values != values.floor()))
        return whole.cast(pl.String).set(odd, _NO_MEMBER)

    @cached_property
    def _places(self) -> tuple[Array, Array]:
        """The known values by size, and their ids."""
        known_V = self.learned.cast(pl.Float64).to_numpy()
        order_V = known_V.argsort()
        return known_V[order_V], order_V + FIRST_ID

    def ids(self, values: pl.Series) -> Array:
        if self.hash_buckets or not len(self.learned):
            return super().ids(values)
        # Not by their texts, which takes longer.
        (numbers_B,), (known_V, ids_V) = self.numbers(values), self._places
        place_B = np.searchsorted(known_V, numbers_B).clip(max=len(known_V) - 1)
        ids_B = np.where(known_V[place_B] == numbers_B, ids_V[place_B], UNKNOWN_ID).astype(np.int32)
        ids_B[np.isnan(numbers_B)] = MISSING_ID
        return ids_B

    def fitted(self, train: pl.Series, data: TableDataConfig) -> Self:
        known = Category.fitted(self, train, data).learned
        scales = Numeric.fitted(self, train, data).scales
        return self._with(learned=known.filter(known != _NO_MEMBER), scales=scales)


class Bag(Category):
    """Several values in a cell, such as drama|comedy; the model gets the mean of their embeddings. An item
    that occurs twice counts twice."""

    role = "bag"
    order = 2

    separator: str = Field(default="|", min_length=1, examples=["|"])
    """Text between the items of a cell; [] for lists in brackets, such as ["a", "b"]; not used for lists of a
    Parquet file."""
    max_items: int = Field(default=16, ge=1, le=1024, examples=[16])
    """Number of items of a cell that are looked up, from the first one on."""

    def read(self, cells: pl.Series) -> pl.Series:
        lists = items_of(with_gaps(cells, None), self.separator, self.max_items)
        numbers = lists.list.len().fill_null(0)
        flat = super().read(lists.filter(numbers > 0).explode())
        rows = pl.Series("row", np.repeat(np.arange(len(lists), dtype=np.uint32), numbers.to_numpy()))
        found = pl.DataFrame([rows, flat.alias("item")]).group_by("row", maintain_order=True).agg("item")
        every = pl.DataFrame({"row": pl.int_range(len(lists), dtype=pl.UInt32, eager=True)})
        joined = every.join(found, "row", "left", maintain_order="left")["item"]
        return joined.alias(cells.name)

    def fitted(self, train: pl.Series, data: TableDataConfig) -> Self:
        return super().fitted(train.explode().drop_nulls(), data)

    def unknown(self, cells: pl.Series, values: pl.Series) -> tuple[int, int]:
        ids_B = self.ids_of_texts(values.explode().drop_nulls())
        return len(ids_B), self._unknown(ids_B)

    def ids(self, values: pl.Series) -> Array:
        return bag_ids(values, self.ids_of_texts)


KINDS: dict[str, type[Column]] = {k.role: k for k in (Numeric, Whole, Time, Category, Bag, Ignore)}


def step_of(num_rows: int) -> int:
    """Return the distance of rows of a sample of `FIT_ROWS`, evenly spaced: files are often sorted."""
    return max(1, -(-num_rows // FIT_ROWS))


def column_of(
    name: str,
    every: pl.Series,
    train: pl.Series,
    role: str | None,
    given: Mapping[str, Any],
    data: TableDataConfig,
    form: Form,
) -> tuple[Column, str]:
    """Return a column of the given role, else of the one that fits, and the reason if it is to be said.

    every, train: cells of all rows of data.path and of the training rows, as the reader typed them. given:
    its section of the schema. form: how the reader found its texts written. Raises UserError if the cells do
    not fit the given role.
    """
    if role == "ignore":
        return Ignore(name=name), "as given"
    if is_odd(train.dtype):
        if role:
            raise UserError(
                f"column {name!r} holds {train.dtype}, not single values or lists of them; write it otherwise"
            )
        why = f"{train.dtype} is no single value; name it in data.ignore, or write it as text"
        return Ignore(name=name), why
    if role is None and counts_rows(name, every):
        return Ignore(name=name), "a row number"
    cells = with_gaps(train, None)
    sample = cells.gather_every(step_of(len(cells)))
    unit = _unit(name, sample, cells, role)
    found, why = ("time", "") if unit else _role_of(name, sample, cells, role)
    role, why = role or found, "as given" if role else why
    kind = KINDS[role]
    given = kind.options_in(given)
    if kind is Bag:
        if "separator" not in given and train.dtype == pl.String:
            texts = sample.drop_nulls().head(20)
            given = given | {"separator": "[]" if texts.str.starts_with("[").all() else "|"}
        inner = type_of(getattr(train.dtype, "inner", pl.String()))
        return Bag(name=name, form=Form(type=cast(Any, inner)), **given), why
    if train.dtype == pl.List:
        raise UserError(
            f"column {name!r} holds lists, but {role} columns need single values; name it in data.bags or "
            "data.ignore, or write single values"
        )
    form = form_as(role, sample, form).model_copy(update={"unit": unit})
    if form.type in ("number", "whole"):
        form = form.model_copy(update={"none": none_of(data.missing)})
    column = kind(name=name, form=form, **given)
    if isinstance(column, Numeric):
        _check_readable(column, cells, data)
    if unit:
        why = f"whole numbers of {unit} since 1970; --data.categorical or --data.numeric reads them otherwise"
    elif kind is Time and is_either_order(sample, form.dates):
        why = f"dates are read as {form.dates}; --data.dateformat says otherwise"
    return column, why


def none_of(missing: Any) -> tuple[float, ...]:
    """Return the numbers among texts that mean no value."""
    texts = pl.Series([*(missing or ())], dtype=pl.String)
    return tuple(texts.cast(pl.Float64, strict=False).drop_nulls())


def form_as(role: str, sample: pl.Series, form: Form) -> Form:
    """Return the form of the values of a column with a role."""
    if role in ("numeric", "whole"):
        return form.model_copy(update={"type": "number"})
    if role == "time":
        zone = getattr(sample.dtype, "time_zone", None) or form.zone
        return form.model_copy(update={"type": "time", "zone": zone})
    found = type_of(sample.dtype)
    if found == "number":  # whole numbers beside a missing value are floats in pandas
        known = sample.drop_nulls().cast(pl.Float64, strict=False)
        found = "whole" if bool((known == known.floor()).all()) else "number"
    if found == "whole" and _largest(sample) > EXACT:
        found = "text"
    if found == "text" and _is_flag(sample):
        found = "flag"
    return form.model_copy(update={"type": found})


def _check_readable(column: Column, cells: pl.Series, data: TableDataConfig) -> None:
    values = typed(cells, column.form.model_copy(update={"none": ()}))
    odd = cells.filter(cells.is_not_null() & values.is_null())
    if len(odd) > data.max_rejected * len(cells):
        noun = "date or time" if column.role == "time" else "number"
        raise UserError(
            f"data.{'times' if column.role == 'time' else column.role}: column {column.name!r} holds "
            f"{odd[0]!r}, not a {noun}, in {len(odd):,} of {len(cells):,} rows; correct the column, list the "
            "text in data.missing, or name the column in data.categorical"
        )


def _unit(name: str, sample: pl.Series, cells: pl.Series, given: str | None) -> str:
    """Return the unit of times that are whole numbers since 1970; empty if they are none. given: the role
    that the user gives."""
    named = not NAMES_AN_ID.search(name) and _NAMES_A_TIME.search(name)
    numeric = type_of(sample.dtype) in ("whole", "number") and sample.dtype != pl.Duration
    if not numeric or not (given == "time" or (given is None and named)):
        return ""
    return unit_of(cells) if _are_whole(sample) and _largest(cells) <= 2**63 else ""


def _role_of(name: str, sample: pl.Series, cells: pl.Series, given: str | None) -> tuple[str, str]:
    """Return the role of a column and why. given: the role that the user gives."""
    known, kind = sample.drop_nulls(), type_of(sample.dtype)
    if isinstance(sample.dtype, pl.List | pl.Array):
        return "bag", "lists"
    if not len(known):
        return ("categorical", "") if cells.count() else ("ignore", "no values")
    if kind == "time":
        return "time", ""
    if sample.dtype == pl.Duration:
        return "numeric", "in seconds"
    if kind in ("whole", "number"):
        return _role_of_numbers(name, known, cells, given)
    if sample.dtype == pl.String and given is None:
        some = known.head(1000)
        if some.str.contains(r"(?s)^\[.*\]$").all():
            return "bag", "lists in brackets"
        if float(some.str.contains("|", literal=True).mean() or 0) > 0.5:  # type: ignore[arg-type]
            flag = f"--data.bags '{name}:|'"
            return "categorical", f"most cells hold '|'; {flag} reads the items between the marks"
    return "categorical", ""


def _role_of_numbers(name: str, known: pl.Series, cells: pl.Series, given: str | None) -> tuple[str, str]:
    if not _are_whole(known):
        return "numeric", ""
    named_id, largest = bool(NAMES_AN_ID.search(name)), _largest(cells)
    repeated = float(known.is_duplicated().mean() or 0) >= _REPEATED  # type: ignore[arg-type]
    if largest > EXACT and known.dtype.is_float() and (named_id or repeated or given == "categorical"):
        merged = "floats beyond 2^53 have merged ids; write them as whole numbers or texts"
        if given == "categorical":
            raise UserError(f"data.categorical: column {name!r}: {merged}")
        return "ignore", merged
    if largest > EXACT and not known.dtype.is_float():
        return "categorical", "whole numbers beyond 2^53"
    if named_id:
        return "categorical", "named like an id"
    if repeated and known.n_unique() > _KNOTS:
        return "whole", "whole numbers that repeat: a row for each value, and the number"
    return "numeric", ""


def counts_rows(name: str, cells: pl.Series) -> bool:
    """Return whether a column of all rows numbers them. A model would learn from it when a row was written,
    and new rows are beyond all of them."""
    named = _NUMBERS_ROWS.search(name) or NAMES_AN_ID.search(name)
    if not named or not cells.dtype.is_numeric() or len(cells) < _ROW_NUMBERS or cells.null_count():
        return False
    numbers = cells.cast(pl.Float64)
    span = float(numbers[-1]) - float(numbers[0])
    increasing = span < (1 + _ROW_GAPS) * len(cells) and bool((numbers.diff().drop_nulls() > 0).all())
    return increasing and _are_whole(numbers)


def _are_whole(numbers: pl.Series) -> bool:
    """Return whether no number has a fraction; None counts as none."""
    if numbers.dtype.is_integer():
        return True
    numbers = numbers.cast(pl.Float64, strict=False)
    return bool((numbers == numbers.floor()).all())


def _largest(cells: pl.Series) -> float:
    """Return the largest absolute value of numbers."""
    low, high = cells.min(), cells.max()
    return max(-float(cast(Any, low)), float(cast(Any, high))) if low is not None else 0.0


def _is_flag(texts: pl.Series) -> bool:
    """Return whether texts are true and false, as some files write flags."""
    if texts.dtype != pl.String or texts.head(1000).n_unique() > 8:
        return False
    return {*texts.drop_nulls().unique().str.to_lowercase()} <= {*FLAG_WORDS}
