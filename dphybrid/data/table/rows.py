"""Rows as they come from a file: their values as text, where they stood, and those that do not fit."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

from dphybrid.config.tables import TableDataConfig
from dphybrid.data.batches import Array
from dphybrid.util.errors import UserError


@dataclass(frozen=True)
class Rows:
    """Values as stripped text (None: no value), the line of each row from 1 on, and the rejected rows.

    values: columns 0, 1, ...; their names stand apart, because polars reads names such as `*` or `^a$` as
    patterns.
    header: the first line named the columns; Parquet files always do. place: what `lines` counts, "line" or
    "row".
    lists: names of the columns whose values were lists; they come as text with `bags.SEPARATOR` between the
    items.
    """

    names: list[str]
    values: pl.DataFrame
    lines: Array
    rejected: list[dict[str, Any]]
    header: bool
    place: str
    file: Path
    bytes_read: int = 0
    lists: frozenset[str] = frozenset()

    def __len__(self) -> int:
        return len(self.lines)

    def column(self, name: str) -> pl.Series:
        """Return a column by its name."""
        return self.values.to_series(self.names.index(name))


@dataclass
class Wanted:
    """Names of columns to read as numbers, and of those whose texts are coded."""

    numbers: set[str] = field(default_factory=set)
    coded: set[str] = field(default_factory=set)


Job = Callable[[], Rows]
"""A call that reads a chunk, in any thread."""


def done(rows: Rows) -> Job:
    """Return the job of rows that are read already."""
    return lambda: rows


def check_enough(file: Path | str, first: Rows, num_rows: int) -> None:
    """Raise UserError when there are not at least two rows."""
    if not num_rows:
        raise UserError(
            f"data.path={file}: has {'a header and ' if first.header else ''}no rows that can be read"
        )
    if num_rows < 2:
        raise UserError(
            f"data.path={file}: has {num_rows} rows; at least 2 are needed, one of them for validation"
        )


def check_columns(file: Path, num_columns: int, max_columns: int) -> None:
    """Raise UserError when a file has more than `max_columns` columns."""
    if num_columns > max_columns:
        raise UserError(
            f"data.path={file}: has {num_columns:,} columns, more than data.max_columns={max_columns} "
            "allows; is data.delimiter right? Raise data.max_columns to read them all the same"
        )


def check_rejected(
    file: Path | str, rejected: Sequence[dict[str, Any]], num_rows: int, max_rejected: float
) -> None:
    """Raise UserError when more than the share `max_rejected` of `num_rows` rows was rejected."""
    if len(rejected) > max_rejected * num_rows:
        first = rejected[0]
        where = "" if str(file) == first["file"] else f" of {first['file']}"
        raise UserError(
            f"data.path={file}: {len(rejected)} of {num_rows} rows cannot be read, more than "
            f"data.max_rejected={max_rejected:g} allows; the first is line {first['line']}{where}: "
            f"{first['reason']}; mend the file, set data.delimiter, or raise data.max_rejected"
        )


def plain_notation(texts: pl.Series, data: TableDataConfig) -> pl.Series:
    """Return texts with numbers as programs write them, where `data.decimal` and `data.thousands` say
    otherwise; texts that are no such numbers stay."""
    if data.notation is None:
        return texts
    numbers = texts.str.replace_all(data.thousands, "", literal=True) if data.thousands else texts
    numbers = numbers.str.replace_all(data.decimal, ".", literal=True)
    is_number = texts.str.contains(data.notation).fill_null(False)
    return texts.zip_with(~is_number, numbers)


def as_numbers(texts: pl.Series, data: TableDataConfig) -> pl.Series:
    """Return texts, or numbers, as Float64; None for what is no number in the table's notation."""
    if texts.dtype != pl.String or data.notation is None:
        return texts.cast(pl.Float64, strict=False)
    numbers = plain_notation(texts, data).cast(pl.Float64, strict=False)
    return numbers.set(~texts.str.contains(data.notation).fill_null(True), None)


def clean(columns: Sequence[pl.Series], missing: Sequence[str]) -> pl.DataFrame:
    """Return columns 0, 1, ... of stripped text, None for what means no value."""
    texts = [column.alias(str(i)).cast(pl.String).str.strip_chars() for i, column in enumerate(columns)]
    return pl.DataFrame([text.set(text.is_in(["", *missing]).fill_null(False), None) for text in texts])
