"""Rows read from files chunk by chunk: cells, line numbers and rejected rows."""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NotRequired, TypedDict

import numpy as np
import polars as pl

from dphybrid.config.tables import TableDataConfig
from dphybrid.data.ahead import mapped
from dphybrid.data.batches import Array
from dphybrid.data.table.cells import clean, is_list_of_items
from dphybrid.data.table.column import Column
from dphybrid.data.table.kinds import Numeric
from dphybrid.util.errors import UserError, counted
from dphybrid.util.files import given_path

_SUFFIXES = (".csv", ".tsv", ".txt", ".csv.gz", ".tsv.gz", ".txt.gz", ".parquet", ".pq", ".jsonl", ".ndjson")
"""Files of a folder that are read."""
BLOCK_ROWS = 2**16
"""Parquet rows read at a time."""
_JSON_BYTES = 2**23
"""Text of JSON lines read at a time."""
_NUMBERS = {int, float}


class Rejected(TypedDict):
    """A row that cannot be read: where it stands, why, and how it begins."""

    file: str
    line: int
    reason: str
    text: NotRequired[str]


@dataclass(frozen=True)
class Rows:
    """Cells, the line of each row from 1 on, and the rejected rows.

    given: by name, stripped text (None: no value), lists of texts, or numbers; no frame, as polars reads
    names such as `*` as patterns. header: the first line named the columns; Parquet files always do. place:
    what `lines` counts, "line" or "row". renamed: names that the header repeats, with those that the columns
    got instead. typed: which cells (B,) are numbers in the file itself, of columns that have some.
    """

    given: Mapping[str, pl.Series]
    lines: Array
    rejected: list[Rejected]
    header: bool
    place: str
    file: Path
    bytes_read: int = 0
    renamed: tuple[tuple[str, str], ...] = ()
    typed: Mapping[str, pl.Series] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.lines)

    def cells(self, column: Column) -> pl.Series:
        """The cells that a column reads, numbers that are typed as it reads them."""
        if isinstance(column, Numeric) and self.given[column.name].dtype.is_numeric():
            return self.given[column.name]
        return self.texts(column.name, column.decimal if isinstance(column, Numeric) else ".")

    def texts(self, name: str, decimal: str = ".", most: int | None = None) -> pl.Series:
        """The first cells of a column as texts or lists. decimal: sign before the decimals of numbers that
        are typed."""
        cells, typed = self.given[name][:most], self.typed.get(name)
        cells = cells.cast(pl.String) if cells.dtype.is_numeric() else cells
        if typed is None or decimal == ".":
            return cells
        return cells.zip_with(~typed[:most], cells.str.replace(".", decimal, literal=True))

    @cached_property
    def columns(self) -> dict[str, pl.Series]:
        """All cells as texts or lists."""
        return {name: self.texts(name) for name in self.given}

    @property
    def names(self) -> list[str]:
        """The columns' names."""
        return list(self.given)


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


_OTHER_FORMATS = (".xlsx", ".xls", ".ods", ".feather", ".arrow", ".orc", ".avro", ".zip", ".pkl", ".sqlite")


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
    jobs = (job for file in files for job in read_jobs(file, data))
    for rows in mapped(lambda job: job(), jobs, threads=1):
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
        """Return the bytes up to the end of a chunk; packed files have fewer than were read of them."""
        return min(self.total, self._before[rows.file] + rows.bytes_read)


def read_jobs(file: Path, data: TableDataConfig) -> Iterator[Job]:
    """Yield the jobs that return the chunks of a file, in any thread."""
    from dphybrid.data.table.delimited import csv_jobs  # which needs `Rows`

    suffix = file.suffix.lower()
    if suffix in (".parquet", ".pq"):
        return map(as_job, _parquet_chunks(file, data))
    if suffix in (".jsonl", ".ndjson"):
        return map(as_job, _json_chunks(file, data))
    if suffix == ".json":
        raise UserError(
            f"data.path={file}: a JSON document is not read; write one record a line and name the file .jsonl"
        )
    if suffix in _OTHER_FORMATS:
        raise UserError(f"data.path={file}: {suffix} files are not read; save the table as CSV or Parquet")
    return csv_jobs(file, data)


def check_enough(file: Path | str, first: Rows, num_rows: int) -> None:
    """Raise UserError when there are not at least two rows."""
    if not num_rows:
        raise UserError(
            f"data.path={file}: has {'a header and ' if first.header else ''}no rows that can be read"
        )
    if num_rows < 2:
        raise UserError(
            f"data.path={file}: has {counted(num_rows, 'row')}; at least 2 are needed, one to validate"
        )


def check_columns(file: Path, num_columns: int, max_columns: int) -> None:
    """Raise UserError when a file has more than `max_columns` columns."""
    if num_columns > max_columns:
        raise UserError(
            f"data.path={file}: has {num_columns:,} columns, more than data.max_columns={max_columns} "
            "allows; is data.delimiter right? Raise data.max_columns to read them all the same"
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


def _json_chunks(file: Path, data: TableDataConfig) -> Iterator[Rows]:
    names, first, size = list[str](), 1, 0
    with file.open("rb") as stream:
        while texts := stream.readlines(_JSON_BYTES):
            records, lines, rejected = list[dict[str, object]](), list[int](), list[Rejected]()
            for line, text in enumerate(texts, first):
                if not text.strip():
                    continue
                record, reason = _record(text, names)
                if reason:
                    rejected.append(Rejected(file=str(file), line=line, reason=reason))
                else:
                    names = names or list(record)
                    records.append(record)
                    lines.append(line)
            if rejected and not names:
                raise UserError(
                    f"data.path={file}: line {rejected[0]['line']}: {rejected[0]['reason']}; write one JSON "
                    "record a line"
                )
            first, size = first + len(texts), size + sum(map(len, texts))
            check_columns(file, len(names), data.max_columns)
            given = {name: [record.get(name) for record in records] for name in names}
            columns = dict(zip(names, clean(map(_json_cells, given.values()), data.no_value), strict=True))
            typed = {
                name: pl.Series([type(value) in _NUMBERS for value in values])
                for name, values in given.items()
                if columns[name].dtype == pl.String and not _NUMBERS.isdisjoint(map(type, values))
            }
            lines_B = np.array(lines, np.int64)
            yield Rows(columns, lines_B, rejected, True, "line", file, size, typed=typed)


def _record(text: bytes, names: Sequence[str]) -> tuple[dict[str, object], str]:
    """Return the record of a line, or why it is rejected. names: of the first record."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        return {}, f"no JSON: {error}"
    if not isinstance(record, dict) or not record:
        return {}, 'no record such as {"age": 31}'
    if names and (more := [name for name in record if name not in names]):
        return {}, f"has {more[0]!r}, which the first record lacks"
    if odd := [name for name, value in record.items() if isinstance(value, dict)]:
        return {}, f"{odd[0]!r} holds a record, not a single value or a list"
    return record, ""


def _json_cells(values: list[object]) -> pl.Series:
    """Return values as texts, lists as lists of texts."""
    if any(isinstance(value, list) for value in values):
        lists = [value if isinstance(value, list) else [value] for value in values]
        return pl.Series([[_text(item) for item in items] for items in lists], dtype=pl.List(pl.String))
    return pl.Series([_text(value) for value in values], dtype=pl.String)


def _text(value: object) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value)


def _parquet_chunks(file: Path, data: TableDataConfig) -> Iterator[Rows]:
    start = 1
    try:
        # Read lazily, chunk by chunk; the whole file may be larger than memory.
        lazy = pl.scan_parquet(file, hive_partitioning=bool(partitions(file)), try_parse_hive_dates=False)
        schema = lazy.collect_schema()
        check_columns(file, len(schema), data.max_columns)
        check_types(schema, f"data.path={file}", "data.ignore", data.left_out(schema.names()))
        for frame in lazy.collect_batches(chunk_size=BLOCK_ROWS, maintain_order=True):
            yield _parquet_rows(frame, file, data, start)
            start += len(frame)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise UserError(f"data.path={file}: cannot be read as Parquet: {error}") from error
    if start == 1:
        yield _parquet_rows(schema.to_frame(), file, data, start)


def _parquet_rows(frame: pl.DataFrame, file: Path, data: TableDataConfig, start: int) -> Rows:
    ignored = set(data.left_out(frame.columns))
    nothing = pl.Series([None] * len(frame), dtype=pl.String)
    # Without their names, which a Series' own methods read as patterns, too.
    given = zip(frame.columns, (cells.alias("") for cells in frame.get_columns()), strict=True)
    cells = [nothing if name in ignored and _is_odd(c.dtype) else c for name, c in given]
    # Decimals keep their zeros where they are categories.
    cells = [c.cast(pl.String) if c.dtype.is_decimal() else c for c in cells]
    columns = dict(zip(frame.columns, clean(cells, data.no_value, numbers=True), strict=True))
    is_typed = pl.repeat(True, len(frame), eager=True)
    typed = {name: is_typed for name, dtype in frame.schema.items() if dtype.is_numeric()}
    return Rows(columns, np.arange(start, start + len(frame)), [], True, "row", file, typed=typed)


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
