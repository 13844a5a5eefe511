"""The files that a path names, and their rows, chunk by chunk."""

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
"""Endings of the files that are read in a folder."""
_OTHER_FORMATS = (
    *(".xlsx", ".xls", ".ods", ".feather", ".arrow", ".orc", ".avro", ".zip", ".pkl", ".sqlite"),
    *(".json", ".jsonl", ".ndjson"),
)
"""Endings of files that are refused, instead of being read as CSV like all unknown ones."""
BLOCK_ROWS = 2**16
"""Rows per chunk of a Parquet file."""


def find_files(path: str, place: str) -> tuple[Path, ...]:
    """Return the files that a path names, sorted by name: a file, a folder (with all folders below it), or a
    pattern such as `logs/day-*.csv.gz`. place: the field or flag with the path, for messages.

    Raises UserError if there is no such file, or an empty one.
    """
    root = given_path(path, place)
    if root.is_file():
        files = [root]
    elif root.is_dir():
        # Spark writes _SUCCESS, .part-0.crc and the like beside its data.
        below = (file for file in root.rglob("*") if file.name[0] not in "._" and file.is_file())
        files = [file for file in below if file.name.lower().endswith(_SUFFIXES)]
        if not files:
            raise UserError(
                f"{place}={path}: is a folder without tables ({', '.join(_SUFFIXES)}); name a table, or a "
                "folder that has some"
            )
    else:
        # Path.glob rejects absolute patterns.
        anchor = Path(root.anchor) if root.anchor else Path()
        pattern = str(root.relative_to(anchor))
        try:
            # Without a wildcard, glob would only look for the missing file again.
            wild = any(sign in pattern for sign in "*?[")
            files = [file for file in anchor.glob(pattern) if file.is_file()] if wild else []
        except ValueError as error:
            raise UserError(f"{place}={path}: {error}") from error
        if not files:
            raise UserError(f"{place}={path}: there is no such file")
    for file in files:
        if not given_path(str(file), place).stat().st_size:
            raise UserError(f"{place}={file}: is empty; give a file with rows")
    return tuple(sorted(files))


def partitions(file: Path) -> list[str]:
    """Return the folders named key=value right above a file; Parquet files have them as columns."""
    # Not those further up: below `seed=3`, a data folder would add a column to every saved frame.
    return [*itertools.takewhile(lambda part: "=" in part, reversed(file.parent.parts))][::-1]


def read_files(
    files: Sequence[Path],
    data: TableDataConfig,
    rejected: list[Rejected],
    what: str = "",
    on_progress: Callable[[str, int, int], None] | None = None,
) -> Iterator[Rows]:
    """Yield the rows of the files of `data.path`, chunk by chunk, read ahead by one thread. Unreadable rows
    are appended to `rejected`. A file without rows gives one empty chunk. on_progress(what, bytes read, bytes
    of all files) is called after each chunk.

    Raises UserError if a file cannot be read, is empty, or is not text, and after the last chunk if more than
    `data.max_rejected` of the rows cannot be read.
    """
    num_rows, done = 0, ReadProgress(files)
    for rows in mapped(lambda job: job(), read_jobs(files, data), threads=1):
        rejected += rows.rejected
        num_rows += len(rows)
        yield rows
        if on_progress:
            on_progress(what, done.bytes_of(rows), done.total)
    check_rejected(str(data.path), rejected, num_rows + len(rejected), data.max_rejected)


class ReadProgress:
    """How many bytes of several files have been read."""

    def __init__(self, files: Sequence[Path]) -> None:
        # before: for each file, the bytes of the files ahead of it; total: of all.
        *before, self.total = itertools.accumulate((file.stat().st_size for file in files), initial=0)
        self._before = dict(zip(files, before, strict=True))

    def bytes_of(self, rows: Rows) -> int:
        """Return the number of bytes from the first file's start to the end of a chunk."""
        return self._before[rows.file] + rows.bytes_read


def read_jobs(files: Sequence[Path], data: TableDataConfig) -> Iterator[Job]:
    """Yield a job for each chunk of the files, in order; jobs may run in any thread."""
    for file in files:
        suffix = file.suffix.lower()
        if suffix in _OTHER_FORMATS:
            raise UserError(
                f"data.path={file}: {suffix} files are not supported; save the table as CSV or Parquet"
            )
        if suffix in (".parquet", ".pq"):
            yield from map(as_job, _parquet_chunks(file, data))
        else:
            yield from csv_jobs(file, data)


def _parquet_chunks(file: Path, data: TableDataConfig) -> Iterator[Rows]:
    start = 1
    try:
        # Read lazily, chunk by chunk, as the file may be larger than memory.
        lazy = pl.scan_parquet(
            file, hive_partitioning=bool(partitions(file)), try_parse_hive_dates=False, glob=False
        )
        schema = lazy.collect_schema()
        check_columns(file, len(schema))
        check_types(schema, f"data.path={file}", "data.ignore", data.left_out(schema.names()))
        for frame in lazy.collect_batches(chunk_size=BLOCK_ROWS, maintain_order=True):
            yield _parquet_rows(frame, file, data, start)
            start += len(frame)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise UserError(f"data.path={file}: cannot be read as Parquet: {error}") from error
    if start == 1:  # no rows: the empty chunk still has the columns' names
        yield _parquet_rows(schema.to_frame(), file, data, start)


def _parquet_rows(frame: pl.DataFrame, file: Path, data: TableDataConfig, start: int) -> Rows:
    nothing = pl.Series([None] * len(frame), dtype=pl.String)
    # Series get an empty name, as their methods read a name such as `*` as a pattern. A column of an odd type
    # is one that the user ignores, or `check_types` would have raised; its cells count as empty.
    given = {c.name: nothing if is_odd(c.dtype) else c.alias("") for c in frame.get_columns()}
    return Rows(Cells(given, data.no_value), np.arange(start, start + len(frame)), [], file)
