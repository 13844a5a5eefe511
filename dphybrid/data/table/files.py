"""Files of a table: which ones a path names, and their rows chunk by chunk."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import polars as pl

from dphybrid.config.tables import TableDataConfig
from dphybrid.data.store import mapped
from dphybrid.data.table.delimited import csv_jobs
from dphybrid.data.table.rows import (
    Cells,
    Job,
    Rejected,
    Rows,
    as_job,
    check_columns,
    check_rejected,
    check_types,
    is_odd,
)
from dphybrid.util.errors import UserError
from dphybrid.util.files import given_path

_SUFFIXES = (".csv", ".tsv", ".txt", ".csv.gz", ".tsv.gz", ".txt.gz", ".parquet", ".pq")
"""Files of a folder that are read."""
_OTHER_FORMATS = (
    *(".xlsx", ".xls", ".ods", ".feather", ".arrow", ".orc", ".avro", ".zip", ".pkl", ".sqlite"),
    *(".json", ".jsonl", ".ndjson"),
)
BLOCK_ROWS = 2**16
"""Parquet rows read at a time."""


def find_files(path: str, place: str) -> tuple[Path, ...]:
    """Return the files of a file, a folder (with what is below it) or a pattern such as `logs/day-*.csv.gz`,
    sorted by name.

    Raises UserError when there are none, and for an empty file.
    """
    root = given_path(path, place)
    if root.is_file():
        files = [root]
    elif root.is_dir():
        # _SUCCESS, .part-0.crc and the like stand beside the data that Spark writes.
        below = (file for file in root.rglob("*") if file.name[0] not in "._" and file.is_file())
        files = [file for file in below if file.name.lower().endswith(_SUFFIXES)]
        if not files:
            raise UserError(
                f"{place}={path}: is a folder without files of rows ({', '.join(_SUFFIXES)}); name a file, "
                "or one that has some"
            )
    else:
        anchor = Path(root.anchor) if root.anchor else Path()
        pattern = str(root.relative_to(anchor))
        try:
            wild = any(sign in pattern for sign in "*?[")
            files = [file for file in anchor.glob(pattern) if file.is_file()] if wild else []
        except ValueError as error:
            raise UserError(f"{place}={path}: {error}") from error
        if not files:
            raise UserError(f"{place}={path}: there is no such file")
    for file in files:
        if not file.stat().st_size:
            raise UserError(f"{place}={file}: is empty; give a file with rows")
    return tuple(sorted(files))


def partitions(file: Path) -> list[str]:
    """Return the folders named key=value that a file lies in: they are columns of Parquet files."""
    return [part for part in file.parent.parts if "=" in part]


def read_files(
    files: Sequence[Path],
    data: TableDataConfig,
    rejected: list[Rejected],
    what: str = "",
    on_progress: Callable[[str, int, int], None] | None = None,
) -> Iterator[Rows]:
    """Yield the rows of the files of `data.path`, chunk after chunk, read by a thread of its own; what cannot
    be read goes to `rejected`. A file without rows gives one empty chunk. on_progress(what, bytes, of all
    bytes) is called after each chunk.

    Raises UserError when a file cannot be read, is empty, or is not text, and after the last chunk where more
    than `data.max_rejected` of the rows cannot be read.
    """
    num_rows, done = 0, Done(files)
    for rows in mapped(lambda job: job(), read_jobs(files, data), threads=1):
        rejected += rows.rejected
        num_rows += len(rows)
        yield rows
        if on_progress:
            on_progress(what, done.bytes_of(rows), done.total)
    check_rejected(str(data.path), rejected, num_rows + len(rejected), data.max_rejected)


class Done:
    """How far the reading of files has come."""

    def __init__(self, files: Sequence[Path]) -> None:
        *before, self.total = itertools.accumulate((file.stat().st_size for file in files), initial=0)
        self._before = dict(zip(files, before, strict=True))

    def bytes_of(self, rows: Rows) -> int:
        """Return the bytes up to the end of a chunk."""
        return self._before[rows.file] + rows.bytes_read


def read_jobs(files: Sequence[Path], data: TableDataConfig) -> Iterator[Job]:
    """Yield the jobs that return the chunks of files, in any thread."""
    for file in files:
        suffix = file.suffix.lower()
        if suffix in _OTHER_FORMATS:
            raise UserError(
                f"data.path={file}: {suffix} files are not read; save the table as CSV or Parquet"
            )
        if suffix in (".parquet", ".pq"):
            yield from map(as_job, _parquet_chunks(file, data))
        else:
            yield from csv_jobs(file, data)


def _parquet_chunks(file: Path, data: TableDataConfig) -> Iterator[Rows]:
    start = 1
    try:
        # Read lazily, chunk by chunk; the whole file may be larger than memory.
        lazy = pl.scan_parquet(file, hive_partitioning=bool(partitions(file)), try_parse_hive_dates=False)
        schema = lazy.collect_schema()
        check_columns(file, len(schema))
        check_types(schema, f"data.path={file}", "data.ignore", data.left_out(schema.names()))
        for frame in lazy.collect_batches(chunk_size=BLOCK_ROWS, maintain_order=True):
            yield _parquet_rows(frame, file, data, start)
            start += len(frame)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise UserError(f"data.path={file}: cannot be read as Parquet: {error}") from error
    if start == 1:
        yield _parquet_rows(schema.to_frame(), file, data, start)


def _parquet_rows(frame: pl.DataFrame, file: Path, data: TableDataConfig, start: int) -> Rows:
    nothing = pl.Series([None] * len(frame), dtype=pl.String)
    # Without their names, which a Series' own methods read as patterns, too. What `check_types` let pass and
    # cannot be read is ignored.
    given = {c.name: nothing if is_odd(c.dtype) else c.alias("") for c in frame.get_columns()}
    return Rows(Cells(given, data.no_value), np.arange(start, start + len(frame)), [], file)
