"""The kinds of columns: what each learns from the training rows, and which inputs a model gets from it. The
kind follows from the reader's type, the name and the repetition of values, never from the label.

Ids: 0 = no value, 1 = unknown value. Letters: B rows, L items of a bag.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Self, cast

import numpy as np
import polars as pl
from polars.selectors import by_name  # takes names literally; select() reads `*` as a pattern
from pydantic import ConfigDict, Field

from dphybrid.config import Section
from dphybrid.config.tables import TableDataConfig
from dphybrid.data.batches import Array
from dphybrid.data.table.numbers import Scale, fit_scale
from dphybrid.data.table.values import (
    EXACT,
    FIRST_ID,
    MISSING_ID,
    NAMES_AN_ID,
    PADDING_ID,
    UNITS,
    UNKNOWN_ID,
    Form,
    as_names,
    is_odd,
    items_of,
    type_of,
    typed,
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
_EARLIEST, _LATEST = 631_152_000, 4_102_444_800
"""Seconds from 1970 to 1990 and to 2100: whole numbers between them may be times."""

_MERGED = "floats beyond 2^53 have merged ids; write them as whole numbers or texts"
_NUMBERS_ROWS = re.compile(
    r"^(?:|0|#|n|x|unnamed.*|(?:.*[\W_])?(?:index|idx|rows?|rownames?|row_?num|row_?number|line|record|number"
    r"|num|seq|sequence|serial|obs|case))$",
    re.IGNORECASE,
)
_PANDAS_INDEX = "__index_level_"
"""With it begins the name of an index without a name, as pandas writes it to Parquet."""
_NAMES_A_TIME = re.compile(
    r"(?:^|[\W_])(?i:(?:unix|epoch)?_?(?:review)?(?:time|timestamp|date|datetime|ts))(?:$|[\W_])"
    r"|[a-z](?:Time|Timestamp|Date|TS)$|(?:_at|At)$"
)


@dataclass(frozen=True)
class Encoded:
    """What cells of a column give. missing: (B,), True for no value. values: None also for cells of another
    type. numbers: (B,) each, nan for no value. ids: (B,), of a bag (B, L); empty for a column without ids."""

    missing: Array
    values: pl.Series
    numbers: list[Array]
    ids: Array


class Column(Section):
    """A column of a table, of one of these kinds:

    - numeric: a number;
    - time: three numbers: the hour, the weekday (1: Monday) and the days since 1970;
    - categorical: a value with an embedding each, the most frequent ones first;
    - whole: a whole number whose values repeat: the number, and an embedding for each value;
    - bag: several items in a cell, such as drama|comedy; the model gets the mean of their embeddings, and an
      item that occurs twice counts twice;
    - ignore: not read.

    Attributes:
        form: What its values are.
        separator: Text between the items of a bag's cell, unless it is a list.
        max_items: Number of items of a cell that are looked up, from the first one on.
        unseen: The share of values in the validation rows that training does not know, or that are no values
            of the column's type.
        scales: Of the numbers that each cell gives.
        learned: The values with an id each, as texts, in the order of their ids.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    name: str
    role: Literal["numeric", "whole", "time", "categorical", "bag", "ignore"] = "ignore"
    form: Form = Form()
    separator: str = "|"
    max_items: int = 16
    unseen: float = 0.0
    scales: tuple[Scale, ...] = ()
    # Excluded: the encoder saves the texts of all columns in one Parquet file.
    learned: pl.Series = Field(default_factory=lambda: pl.Series("value", [], dtype=pl.String), exclude=True)

    @property
    def order(self) -> int:
        """Columns with a smaller one come first in the arrays."""
        return {"categorical": 1, "bag": 2}.get(self.role, 0)

    @property
    def has_ids(self) -> bool:
        """Whether its values have embeddings."""
        return self.role in ("whole", "categorical", "bag")

    @property
    def num_ids(self) -> int:
        """Number of ids, with those of no value and of unknown values; 0 without ids."""
        return FIRST_ID + len(self.learned) if self.has_ids else 0

    def read(self, cells: pl.Series) -> pl.Series:
        """Return the values of cells, of a bag the lists of its items; None for no value and for cells of
        another type. cells: of `values.with_gaps`, or of a file."""
        if self.role == "bag":
            return items_of(with_gaps(cells, None), self.separator).list.head(self.max_items)
        return typed(cells, self.form)

    def fitted(self, train: pl.Series, data: TableDataConfig) -> Self:
        """Return the column fitted to the values of the training rows."""
        learned, scales = self.learned, map(fit_scale, self.numbers(sample_of(train)))
        if self.has_ids:
            values = self._items(train)[1] if self.role == "bag" else train
            each = values.drop_nulls().to_frame("value").lazy().group_by("value").agg(pl.len().alias("rows"))
            # Streaming, which keeps no lists of the rows of each value.
            counts = each.filter(pl.col("rows") >= data.min_count).collect(engine="streaming")
            # Counted before they are texts: whole numbers take half of the time and memory.
            form = Form(type="whole") if self.role == "whole" else self.form
            counts = counts.with_columns(as_names(counts["value"], form)).drop_nulls()
            # Ties are broken by the text, as the order of groups depends on threads.
            learned = counts.sort(["rows", "value"], descending=[True, False])["value"]
        return self._with(learned=learned, scales=tuple(scales))

    def unknown(self, found: Encoded) -> tuple[int, int]:
        """Return how many cells, or items of a bag, have a value, and how many of these training does not
        know, or are no values of the column's type."""
        if not self.has_ids:
            filled = int((~found.missing).sum())
            return filled, filled - found.values.count()
        return int((found.ids > MISSING_ID).sum()), int((found.ids == UNKNOWN_ID).sum())

    def numbers(self, values: pl.Series) -> list[Array]:
        """Return the numbers (B,) that the values give, nan for no value."""
        if self.role in ("numeric", "whole"):
            return [values.fill_null(np.nan).to_numpy()]
        if self.role != "time":
            return []
        parts = (values.dt.hour(), values.dt.weekday(), values.dt.date().cast(pl.Int32))
        return [part.cast(pl.Float64).fill_null(np.nan).to_numpy() for part in parts]

    @property
    def num_dense(self) -> int:
        """Number of its inputs that are numbers, or flags of missing ones."""
        return sum(1 + scale.indicator for scale in self.scales)

    def inputs(self, found: Encoded) -> list[Array]:
        """Return what a model gets: `num_dense` arrays (B,), then the ids, if it has any."""
        arrays = list[Array]()
        for scale, numbers_B in zip(self.scales, found.numbers, strict=True):
            # "No value" needs a separate input, as it is standardized to 0, like the mean.
            arrays.append(scale.standardized(numbers_B).astype(np.float32))
            arrays += [np.isnan(numbers_B).astype(np.float32)] if scale.indicator else []
        return [*arrays, found.ids] if self.has_ids else arrays

    def ids(self, place_B: Array, missing_B: Array) -> Array:
        """Return the ids (B,) of cells, or of items. A cell that is not missing and has no value, such as 7.5
        among whole numbers, is unknown."""
        ids_B: Array = np.where(place_B < 0, UNKNOWN_ID, place_B + FIRST_ID).astype(np.int32)
        ids_B[missing_B] = MISSING_ID
        return ids_B

    def bag_ids(self, lists: pl.Series) -> Array:
        """Return the ids (B, L) of the items of lists."""
        lengths_B = lists.list.len().fill_null(0).to_numpy()
        ids_BL = np.full((len(lists), lengths_B.max(initial=1)), PADDING_ID, np.int32)
        # Assigning through a mask goes row by row, which is the order of the items.
        items, values = self._items(lists)
        ids_N = self.ids(self.places(values), items.is_null().to_numpy())
        ids_BL[np.arange(ids_BL.shape[1]) < lengths_B[:, None]] = ids_N
        ids_BL[lengths_B == 0, 0] = MISSING_ID
        return ids_BL

    def _items(self, lists: pl.Series) -> tuple[pl.Series, pl.Series]:
        """Return the items of all lists, one after another, and their values."""
        items = with_gaps(lists.filter(lists.list.len() > 0).explode(), None)
        return items, typed(items, self.form).cast(pl.String)

    @cached_property
    def _codes(self) -> pl.Expr:
        """Expression for the places of texts, in a frame's column of its name, among the learned ones; -1 for
        others. Cached, as the time to give polars an Enum grows with the number of its texts."""
        codes = by_name(self.name).cast(pl.String).cast(pl.Enum(self.learned), strict=False).to_physical()
        return codes.cast(pl.Int32).fill_null(-1)

    @cached_property
    def _by_size(self) -> tuple[Array, Array]:
        """The learned numbers by size, and their places."""
        known_V = self.learned.cast(pl.Float64).to_numpy()
        order_V = known_V.argsort()
        return known_V[order_V], order_V

    def places(self, values: pl.Series) -> Array:
        """Return the places (B,) of values among the learned ones, -1 for others."""
        if self.role == "whole":
            return self.places_of_numbers(values.cast(pl.Float64).fill_null(np.nan).to_numpy())
        return values.alias(self.name).to_frame().select(self._codes).to_series().to_numpy()

    def places_of_numbers(self, numbers_B: Array) -> Array:
        """Return the places (B,) of whole numbers among the learned ones, -1 for others. Not by their texts,
        which takes longer."""
        known_V, order_V = self._by_size
        if not len(known_V):
            return np.full(len(numbers_B), -1)
        near_B = np.searchsorted(known_V, numbers_B).clip(max=len(known_V) - 1)
        return np.where(known_V[near_B] == numbers_B, order_V[near_B], -1)

    def extended(self, newer: "Column") -> Self:
        """Return the column with the values that only `newer` has added; its ids and statistics stay."""
        more = newer.learned.filter(~newer.learned.is_in(self.learned.implode()))
        return self._with(learned=pl.concat([self.learned, more]))

    def _with(self, **changes: Any) -> Self:
        # Not model_copy, which would also copy the cached properties of the old texts.
        return type(self)(**dict(self) | changes)


def encoded(
    columns: Sequence[Column], cells: Sequence[pl.Series], no_value: Collection[str] | None = None
) -> list[Encoded]:
    """Return what the cells (B,) of columns give, from any container. no_value: as for `values.with_gaps`.
    Raises UserError for lists in a column of single values.

    A call of polars takes as long as thousands of cells, so columns of one type and form are read together.
    """
    together = defaultdict[Any, list[int]](list)
    for number, (column, series) in enumerate(zip(columns, cells, strict=True)):
        dtype, is_bag = series.dtype, column.role == "bag"
        if dtype != pl.String and (is_odd(dtype) or (dtype.is_nested() and not is_bag)):
            had = "lists" if is_bag else "single values"
            raise UserError(f"column {column.name!r} holds {dtype}, but training had {had}; write those")
        # Each column has categories of its own, and decides for itself whether floats are whole.
        own = dtype != pl.String and (dtype in (pl.Categorical, pl.Enum) or column.form.type == "text")
        together[dtype, column.form, column.role, number if is_bag or own else None].append(number)
    read = dict[int, tuple[Array, pl.Series, list[Array]]]()
    for numbers in together.values():
        column, size = columns[numbers[0]], len(cells[numbers[0]])
        # Concatenating a single column would copy its texts.
        joined = pl.concat([cells[n] for n in numbers]) if len(numbers) > 1 else cells[numbers[0]]
        joined = with_gaps(joined, no_value, column.form)
        values = column.read(joined)
        parts, missing = column.numbers(values), joined.is_null().to_numpy()
        for place, number in enumerate(numbers):
            rows = slice(place * size, (place + 1) * size)
            read[number] = missing[rows], values.slice(place * size, size), [part[rows] for part in parts]
    texts = {n: c for n, c in enumerate(columns) if c.role == "categorical"}
    frame = pl.DataFrame([read[number][1].alias(column.name) for number, column in texts.items()])
    places = dict(zip(texts, frame.select(c._codes for c in texts.values()), strict=True))
    found = []
    for number, column in enumerate(columns):
        missing, values, parts = read[number]
        ids = np.empty(0, np.int32)
        if column.role == "bag":
            ids = column.bag_ids(values)
        elif column.role == "whole":
            ids = column.ids(column.places_of_numbers(parts[0]), missing)
        elif column.role == "categorical":
            ids = column.ids(places[number].to_numpy(), missing)
        found.append(Encoded(missing, values, parts, ids))
    return found


def sample_of(cells: pl.Series) -> pl.Series:
    """Return at most `FIT_ROWS` cells, evenly spaced: files are often sorted."""
    return cells.gather_every(max(1, -(-len(cells) // FIT_ROWS)))


def column_of(
    name: str,
    every: pl.Series,
    train: pl.Series,
    given: Mapping[str, Any],
    data: TableDataConfig,
    form: Form,
) -> tuple[Column, str]:
    """Return a column of the given role, else of the one that fits, and the reason if it is to be said.

    every, train: cells of all rows of data.path and of the training rows, as the reader typed them. given:
    its role and options, as far as the user says. form: how the reader found its texts written. Raises
    UserError if the cells do not fit the given role.
    """
    role = given.get("role")
    if role == "ignore":
        return Column(name=name), "as given"
    if is_odd(train.dtype) or (train.dtype.is_nested() and role not in (None, "bag")):
        why = f"{train.dtype} is no single value; name it in data.ignore, or write it as text"
        if role:
            raise UserError(f"column {name!r}: {why}")
        return Column(name=name), why
    if role is None and (name.startswith(_PANDAS_INDEX) or counts_rows(name, every)):
        return Column(name=name), "a row number"
    cells = with_gaps(train, None)
    known = sample_of(cells.drop_nulls())
    why = "as given"
    if role is None:
        role, why = _role_of(name, known, cells)
    options = {"name": name, **given, "role": role}
    if role == "bag":
        inner = type_of(getattr(train.dtype, "inner", pl.String()))
        return Column(form=Form.model_validate({"type": inner}), max_items=data.max_items, **options), why
    if role == "categorical" and _have_merged(cells, known):
        raise UserError(f"data.categorical: column {name!r}: {_MERGED}")
    unit = _unit_of(cells) if role == "time" else ""
    form = form_as(role, known, form).model_copy(update={"unit": unit, "none": none_of(data.missing)})
    column = Column(form=form, **options)
    if "role" in given and role != "categorical":
        _check_readable(column, cells, data)
    if unit:
        why = f"whole numbers of {unit} since 1970; --data.categorical or --data.numeric reads them otherwise"
    return column, why


def none_of(missing: Any) -> tuple[float, ...]:
    """Return the numbers among texts that mean no value."""
    texts = pl.Series([*(missing or ())], dtype=pl.String)
    return tuple(texts.cast(pl.Float64, strict=False).drop_nulls())


def form_as(role: str, known: pl.Series, form: Form) -> Form:
    """Return the form of the values of a column with a role. known: its values, or a sample of them."""
    if role in ("numeric", "whole"):
        return form.model_copy(update={"type": "number"})
    if role == "time":
        zone = getattr(known.dtype, "time_zone", None) or form.zone
        return form.model_copy(update={"type": "time", "zone": zone})
    found = type_of(known.dtype)
    if found == "number":  # whole numbers beside a missing value are floats in pandas
        found = "whole" if _are_whole(known) else "number"
    if found == "whole" and _largest(known) > EXACT:
        found = "text"
    if found == "text" and _is_flag(known):
        found = "flag"
    return form.model_copy(update={"type": found})


def _check_readable(column: Column, cells: pl.Series, data: TableDataConfig) -> None:
    (found,) = encoded([column], [cells])
    odd = cells.filter(found.values.is_null() & pl.Series(~found.missing))
    if len(odd) > data.max_rejected * len(cells):
        noun = "date or time" if column.role == "time" else "number"
        raise UserError(
            f"data.{'times' if column.role == 'time' else column.role}: column {column.name!r} holds "
            f"{odd[0]!r}, not a {noun}, in {len(odd):,} of {len(cells):,} rows; correct the column, list the "
            "text in data.missing, or name the column in data.categorical"
        )


def _role_of(name: str, known: pl.Series, cells: pl.Series) -> tuple[str, str]:
    """Return the role that fits a column, and the reason if it is to be said. known: a sample of the values.
    cells: of all training rows."""
    if known.dtype.is_nested():
        return "bag", "lists"
    if not len(known):
        return "ignore", "no values"
    if known.dtype.is_temporal():
        return "time", ""
    if known.dtype.is_numeric():
        return _role_of_numbers(name, known, cells)
    some = known.head(1000)
    if some.dtype == pl.String and 2 * some.str.contains("|", literal=True).sum() > len(some):
        flag = f"--data.bags '{name}:|'"
        return "categorical", f"most cells hold '|'; {flag} reads the items between the marks"
    return "categorical", ""


def _role_of_numbers(name: str, known: pl.Series, cells: pl.Series) -> tuple[str, str]:
    named_id = bool(NAMES_AN_ID.search(name))
    if not named_id and _NAMES_A_TIME.search(name) and _unit_of(cells):
        return "time", ""
    if not _are_whole(known):
        return "numeric", ""
    repeated = float(known.is_duplicated().mean() or 0) >= _REPEATED  # type: ignore[arg-type]
    if (named_id or repeated) and _have_merged(cells, known):
        return "ignore", _MERGED
    if not known.dtype.is_float() and _largest(cells) > EXACT:
        return "categorical", "whole numbers beyond 2^53"
    if named_id:
        return "categorical", "named like an id"
    if repeated and known.n_unique() > _KNOTS:
        return "whole", "whole numbers that repeat: a row for each value, and the number"
    return "numeric", ""


def _have_merged(cells: pl.Series, known: pl.Series) -> bool:
    """Return whether numbers would be ids whose digits are lost. known: a sample of their values."""
    return known.dtype.is_float() and _largest(cells) > EXACT and _are_whole(known)


def _unit_of(cells: pl.Series) -> str:
    """Return the unit in which numbers are times from 1990 to 2100; empty if they are none."""
    if not cells.dtype.is_numeric() or not cells.count() or not _are_whole(cells):
        return ""
    low, high = float(cast(Any, cells.min())), float(cast(Any, cells.max()))
    seconds = {unit: (low * us / 10**6, high * us / 10**6) for unit, us in UNITS.items()}
    return next((u for u, (low, high) in seconds.items() if low >= _EARLIEST and high <= _LATEST), "")


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
    return {*texts.drop_nulls().unique().str.to_lowercase()} <= {"true", "false"}
