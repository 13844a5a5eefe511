"""Rows read from files chunk by chunk: cells, line numbers and rejected rows."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NotRequired, TypedDict

import numpy as np
import polars as pl

from dphybrid.config.tables import TableDataConfig
from dphybrid.data.batches import Array
from dphybrid.data.store import mapped
from dphybrid.data.table.cells import clean, is_list_of_items
from dphybrid.util.errors import UserError
from dphybrid.util.files import given_path

_SUFFIXES = (".csv", ".tsv", ".txt", ".csv.gz", ".tsv.gz", ".txt.gz", ".parquet", ".pq")
"""Files of a folder that are read."""
_OTHER_FORMATS = (
    *(".xlsx", ".xls", ".ods", ".feather", ".arrow", ".orc", ".avro", ".zip", ".pkl", ".sqlite"),
    *(".json", ".jsonl", ".ndjson"),
)
SHOWN = 500
"""Characters of a rejected row that are kept."""
_MAX_COLUMNS = 32_768
"""Columns above which a file is taken for damaged, or read with the wrong delimiter."""
BLOCK_ROWS = 2**16
"""Parquet rows read at a time."""


class Rejected(TypedDict):
    """A row that cannot be read: where it stands, why, and how it begins."""

    file: str
    line: int
    reason: str
    text: NotRequired[str]


@dataclass(frozen=True)
class Rows:
    """Cells by column, the line of each row from 1 on, and the rejected rows.

    cells: stripped text (None: no value), lists of texts, or numbers; no frame, as polars reads names such as
    `*` as patterns. header: the first line named the columns; Parquet files always do.
    """

    cells: Mapping[str, pl.Series]
    lines: Array
    rejected: list[Rejected]
    file: Path
    header: bool = True
    bytes_read: int = 0

    def __len__(self) -> int:
        return len(self.lines)

    @property
    def names(self) -> list[str]:
        """The columns' names."""
        return list(self.cells)

    def texts(self, name: str) -> pl.Series:
        """The cells of a column as texts or lists."""
        cells = self.cells[name]
        return cells.cast(pl.String) if cells.dtype.is_numeric() else cells


Job = Callable[[], Rows]
"""A call that reads a chunk, in any thread."""


def as_job(rows: Rows) -> Job:
    """Return the job of rows that are read already."""
    return lambda: rows


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
    from dphybrid.data.table.delimited import csv_jobs  # which needs `Rows`

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


def check_enough(file: Path | str, header: bool, num_rows: int) -> None:
    """Raise UserError when there are not at least two rows."""
    if num_rows < 2:
        held = "1 row" if num_rows else f"{'a header and ' if header else ''}no rows that can be read"
        raise UserError(f"data.path={file}: has {held}; at least 2 are needed, one to validate")


def check_columns(file: Path, num_columns: int) -> None:
    """Raise UserError when a file has more columns than any table."""
    if num_columns > _MAX_COLUMNS:
        raise UserError(
            f"data.path={file}: has {num_columns:,} columns, and {_MAX_COLUMNS:,} at most are read; is "
            "data.delimiter right?"
        )


def check_rejected(
    file: Path | str, rejected: Sequence[Rejected], num_rows: int, max_rejected: float
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
    given = [nothing if _is_odd(cells.dtype) else cells.alias("") for cells in frame.get_columns()]
    columns = dict(zip(frame.columns, clean(given, data.no_value), strict=True))
    return Rows(columns, np.arange(start, start + len(frame)), [], file)


def _is_odd(dtype: pl.DataType) -> bool:
    return (dtype.is_nested() or dtype in (pl.Binary, pl.Object)) and not is_list_of_items(dtype)


def check_types(schema: pl.Schema, where: str, field: str, ignored: Sequence[str]) -> None:
    """Raise UserError where a column that is not ignored holds what no file of rows could."""
    for name, dtype in schema.items():
        if _is_odd(dtype) and name not in ignored:
            raise UserError(
                f"{where}: column {name!r} holds {dtype}, not single values or lists of texts or whole "
                f"numbers; name it in {field}, or write it as text"
            )
