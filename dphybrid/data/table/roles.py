"""What a column of a table is used as: as somebody said, or by what its first rows hold."""

import difflib
from dataclasses import dataclass

import polars as pl

from dphybrid.config.tables import ROLE_FIELDS, Role, TableDataConfig
from dphybrid.data.table.bags import MAX_ITEMS, SEPARATOR
from dphybrid.data.table.rows import Rows
from dphybrid.data.table.schema import ColumnOptions, SchemaFile, inferred_role
from dphybrid.data.table.times import part_names, parts, seconds
from dphybrid.util.errors import UserError

ROLE_ROWS = 20_000
"""Rows from which the columns' roles are told."""


@dataclass(frozen=True)
class Column:
    """A column and what it is used as. reason: why, where it is not plain; samples: a few values for
    people."""

    name: str
    role: Role
    reason: str
    samples: tuple[str, ...]
    options: ColumnOptions


def bag_form(column: Column) -> tuple[str | None, int]:
    """Return the separator (None: words) of a column of bags, and how many items of a cell are looked up."""
    separator = None if column.role == "text" else column.options.separator or SEPARATOR
    return separator, column.options.max_items or MAX_ITEMS


def find_column(rows: Rows, name: str, place: str) -> str:
    """Return the column of a name or a position. place: the field that gives it. Raises UserError."""
    columns = rows.names
    if name in columns:
        return name
    if name.isascii() and name.isdigit() and int(name) < len(columns):
        return columns[int(name)]
    listed = ", ".join(columns)
    if not name:
        raise UserError(f"{place} is not set; name the column with the answer, one of: {listed}")
    close = difflib.get_close_matches(name, columns, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    if not rows.header:
        hint += "its first line was read as values (data.header=yes reads it as names), so "
    raise UserError(f"{place}={name!r}: {rows.file} has no such column; {hint}columns: {listed}")


def roles_of(
    rows: Rows, data: TableDataConfig, schema: SchemaFile, label: str, weight: str | None
) -> list[Column]:
    """Return the columns with their roles, by what was said or by what the first rows hold; the parts of a
    time follow it. Raises UserError."""
    given: dict[str, Role] = {}
    others = {label: "label", weight: "weight"}
    for field, name in data.named_columns:
        if field not in ROLE_FIELDS:
            continue
        flag = f"data.{field}"
        found = find_column(rows, name, flag)
        if found in given or found in others:
            other = others.get(found) or given[found]
            raise UserError(f"{flag}={name!r}: this column is already named as {other}; name it once")
        given[found] = ROLE_FIELDS[field]
    options = {find_column(rows, name, "data.schema_file: columns"): o for name, o in schema.columns.items()}
    columns = []
    sample = rows.values.head(ROLE_ROWS)
    for place, name in enumerate(rows.names):
        if name in others:
            continue
        present, own = sample.to_series(place).drop_nulls(), options.get(name, ColumnOptions())
        told = given.get(name) or own.role
        if name in rows.lists and own.separator not in (None, SEPARATOR):
            raise UserError(
                f"data.schema_file: columns.{name}.separator = {own.separator!r}: {rows.file} has lists "
                "in this column, whose items need no separator; remove it"
            )
        if told is not None:
            role, reason = told, "as given"
        elif name in rows.lists:
            role, reason = "bag", "lists"
        elif not len(present) and len(rows) > len(sample):
            role, reason = "categorical", f"no values in the first {len(sample):,} rows"
        else:
            role, reason = inferred_role(name, present, len(sample), data)
            if role == "time" and not {*part_names(name)}.isdisjoint(rows.names):
                role, reason = "categorical", "dates or times, whose parts there are columns of"
        samples = tuple(present.unique(maintain_order=True)[:3].to_list())
        columns.append(Column(name, role, reason, samples, own.model_copy(update={"role": role})))
        if role == "time":
            columns += _parts(rows, name, sample.to_series(place), own, data.dayfirst)
    return columns


def _parts(rows: Rows, name: str, texts: pl.Series, own: ColumnOptions, dayfirst: bool) -> list[Column]:
    """Return the numeric columns that a time becomes."""
    columns = []
    for part, values in zip(part_names(name), parts(seconds(texts, dayfirst)), strict=True):
        if part in rows.names:
            raise UserError(f"data.times={name!r}: {rows.file} has a column {part!r} already; rename it")
        samples = tuple(f"{value:g}" for value in values.drop_nans().unique(maintain_order=True)[:3])
        options = own.model_copy(update={"role": "numeric"})
        columns.append(Column(part, "numeric", f"of {name}", samples, options))
    return columns
