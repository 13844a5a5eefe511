"""Rows of CSV, TSV and Parquet files, as text, chunk by chunk."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import polars as pl

from dphybrid.config.tables import TableDataConfig
from dphybrid.data.ahead import mapped
from dphybrid.data.table.bags import is_list_of_items, list_texts
from dphybrid.data.table.delimited import csv_jobs
from dphybrid.data.table.rows import (
    Job,
    Rows,
    Wanted,
    check_columns,
    check_enough,
    check_rejected,
    clean,
    done,
)
from dphybrid.util.errors import UserError

BLOCK_ROWS = 2**16
"""Parquet rows read at a time."""


def is_parquet(file: Path) -> bool:
    """Tell by its name whether a file is read as Parquet."""
    return file.suffix.lower() in (".parquet", ".pq")


def read_chunks(file: Path, data: TableDataConfig) -> Iterator[Rows]:
    """Yield the rows of a file, chunk after chunk, made by a thread of its own; a file without rows gives one
    empty chunk.

    Raises UserError when it cannot be read, is empty, or is no text.
    """
    return mapped(lambda job: job(), read_jobs(file, data, Wanted()), threads=1)


def read_jobs(file: Path, data: TableDataConfig, wanted: Wanted) -> Iterator[Job]:
    """Yield the jobs that return the chunks of `read_chunks`. wanted: how columns may come instead of as text
    where that is quicker; it may be filled after the first job is done."""
    if is_parquet(file):
        return map(done, _parquet_chunks(file, data))
    return csv_jobs(file, data, wanted)


def read_rows(file: Path, data: TableDataConfig) -> Rows:
    """Read a whole file into memory. Raises UserError like `read_chunks`, and when too many rows do not fit
    or fewer than 2 do."""
    chunks = list(read_chunks(file, data))
    rejected = [row for chunk in chunks for row in chunk.rejected]
    values = pl.concat([chunk.values for chunk in chunks])
    lines = np.concatenate([chunk.lines for chunk in chunks])
    first = chunks[0]
    check_rejected(file, rejected, len(values) + len(rejected), data.max_rejected)
    check_enough(file, first, len(values))
    return Rows(first.names, values, lines, rejected, first.header, first.place, file)


def _parquet_chunks(file: Path, data: TableDataConfig) -> Iterator[Rows]:
    names: list[str] = []
    lists: frozenset[str] = frozenset()
    start = 1
    try:
        # Folders named key=value become columns.
        lazy = pl.scan_parquet(
            file, hive_partitioning=any("=" in part for part in file.parent.parts), try_parse_hive_dates=False
        )
        schema = lazy.collect_schema()
        check_columns(file, len(schema), data.max_columns)
        names = schema.names()
        lists = frozenset(name for name, dtype in schema.items() if is_list_of_items(dtype))
        for frame in lazy.collect_batches(chunk_size=BLOCK_ROWS, maintain_order=True):
            values = clean([_single(column, file, data) for column in frame.get_columns()], data.no_value)
            yield Rows(
                names, values, np.arange(start, start + len(frame)), [], True, "row", file, lists=lists
            )
            start += len(frame)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise UserError(f"data.path={file}: cannot be read as Parquet: {error}") from error
    if start == 1:
        empty = pl.DataFrame({str(i): pl.Series([], dtype=pl.String) for i in range(len(names))})
        yield Rows(names, empty, np.arange(0), [], True, "row", file, lists=lists)


def _single(column: pl.Series, file: Path, data: TableDataConfig) -> pl.Series:
    """Return a Parquet column of single values, lists of items as text; one of other things must be ignored,
    and is empty then."""
    if is_list_of_items(column.dtype) and column.name not in data.ignore:
        return list_texts(column, f"data.path={file}")
    if not (column.dtype.is_nested() or column.dtype in (pl.Binary, pl.Object)):
        return column
    if column.name in data.ignore:
        return pl.Series(column.name, [None] * len(column), dtype=pl.String)
    raise UserError(
        f"data.path={file}: column {column.name!r} holds {column.dtype}, not single values or lists of texts "
        "or whole numbers; name it in data.ignore, or write it as text"
    )
