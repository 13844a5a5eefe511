"""The files that a path names, and their rows, chunk by chunk."""

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from os import SEEK_END
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import polars as pl

from dphybrid.config.tables import PACKED, RowFiles
from dphybrid.data.store import mapped
from dphybrid.data.table.cells import as_texts, is_odd
from dphybrid.data.table.delimited import csv_jobs
from dphybrid.data.table.jsonl import is_json, json_chunks
from dphybrid.data.table.lines import format_of
from dphybrid.data.table.rows import (
    Cells,
    Job,
    Rejected,
    Rows,
    as_job,
    check_columns,
    check_rejected,
    check_types,
)
from dphybrid.data.table.strays import without_strays
from dphybrid.util.digests import file_digest
from dphybrid.util.errors import UserError
from dphybrid.util.files import given_path, no_such_file

_TEXTS = (".csv", ".tsv", ".txt", ".dat", ".data", ".jsonl", ".ndjson")
_SUFFIXES = (
    *(text + packed for text in _TEXTS for packed in PACKED),
    *(".parquet", ".pq", ".arrow", ".feather", ".ipc"),
)
"""Endings of the files that are read in a folder."""
FRAMES, _FRAME = "frames", re.compile("[0-9a-f]{16}")
"""Folder of the saved frames in the data folder, and the names of their own folders."""
_NO_PARTITION = "__HIVE_DEFAULT_PARTITION__"
BLOCK_ROWS = 2**16
"""Rows per chunk of a Parquet file."""


def find_files(path: str, field: str) -> tuple[Path, ...]:
    """Return the files that a path names, sorted by name: a file, a folder (with all folders below it), or a
    pattern such as `logs/day-*.csv.gz`. field: the field or flag with the path, for messages.

    Raises UserError if there is no such file, or an empty one.
    """
    root = given_path(path, field)
    if root.is_file():
        files = [root]
    elif root.is_dir():
        # Spark writes _SUCCESS, .part-0.crc and the like beside its data.
        below = (file for file in root.rglob("*") if file.name[0] not in "._" and file.is_file())
        files = [file for file in below if file.name.lower().endswith(_SUFFIXES)]
        if not files:
            endings = ", ".join((*_TEXTS, ".parquet, .pq, .arrow, .feather, .ipc"))
            raise UserError(
                f"{field}={path}: is a folder without tables ({endings}, also packed as "
                f"{', '.join(PACKED[1:])}); name a table, or a folder that has some"
            )
        if root.parent.name == FRAMES and _FRAME.fullmatch(root.name) and frame_digest(files) != root.name:
            raise UserError(
                f"{field}={path}: this saved frame is damaged, or has other files now; remove the folder and "
                "train the frame again"
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
            raise UserError(f"{field}={path}: {error}") from error
        if not files:
            raise no_such_file(path, field)
    for file in files:
        if not given_path(str(file), field).stat().st_size:
            raise UserError(f"{field}={file}: is empty; give a file with rows")
    return tuple(sorted(files))


def frame_digest(files: Iterable[Path]) -> str:
    """Return the digest of a saved frame's files, which names their folder."""
    parts = (bytes.fromhex(file_digest(file)) for file in sorted(files))
    return hashlib.blake2b(b"".join(parts), digest_size=8).hexdigest()


def partitions(file: Path) -> list[str]:
    """Return the folders named key=value right above a file, which are columns."""
    # Not those further up: below `seed=3`, a data folder would add a column to every saved frame.
    return [*itertools.takewhile(lambda part: "=" in part, reversed(file.parent.parts))][::-1]


def read_files(
    files: Sequence[Path],
    data: RowFiles,
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


def read_jobs(files: Sequence[Path], data: RowFiles) -> Iterator[Job]:
    """Yield a job for each chunk of the files, in order; jobs may run in any thread. The folders of
    partitions are columns."""
    for file in files:
        folders = dict(part.split("=", 1) for part in partitions(file))
        for number, job in enumerate(_jobs(file, data)):
            yield partial(_completed, job, number == 0, folders, data)


def _completed(job: Job, first: bool, folders: Mapping[str, str], data: RowFiles) -> Rows:
    """Return a job's rows without stray lines, and with the columns of its file's folders."""
    rows = without_strays(job(), first)
    if not folders.keys() - {*rows.names}:
        return rows
    # Spark's name of no value; a column of the file itself counts.
    values = {name: None if text == _NO_PARTITION else unquote(text) for name, text in folders.items()}
    added = {name: pl.Series([value] * len(rows), dtype=pl.String) for name, value in values.items()}
    return replace(rows, cells=Cells(added | dict(rows.cells.given), data.no_value))


def _jobs(file: Path, data: RowFiles) -> Iterator[Job]:
    found = format_of(file)
    if found in ("parquet", "arrow", "arrow stream"):
        yield from map(as_job, _frame_chunks(file, found, data))
    elif found != "text":
        raise UserError(
            f"data.path={file}: is {found}, which is not supported; save the table as CSV or Parquet"
        )
    elif is_json(file):
        yield from map(as_job, json_chunks(file, data))
    else:
        yield from csv_jobs(file, data)


def _frame_chunks(file: Path, kind: str, data: RowFiles) -> Iterator[Rows]:
    start = 1
    try:
        lazy = _scan(file, kind)
        schema = lazy.collect_schema()
        check_columns(file, len(schema))
        check_types(schema, f"data.path={file}", "data.ignore", data.left_out(schema.names()))
        index, declared = _by_pandas(file, kind, schema) if kind != "arrow stream" else ((), ())
        for frame in lazy.collect_batches(chunk_size=BLOCK_ROWS, maintain_order=True):
            yield _frame_rows(frame, file, data, start, index, declared)
            start += len(frame)
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError) as error:
        raise UserError(f"data.path={file}: cannot be read as {kind.title()}: {error}") from error
    if start == 1:  # no rows: the empty chunk still has the columns' names
        yield _frame_rows(schema.to_frame(), file, data, start, index, declared)


def _scan(file: Path, kind: str) -> pl.LazyFrame:
    """Return a file's rows, lazily where the format allows it, as the file may be larger than memory."""
    if kind == "parquet":
        return pl.scan_parquet(file, hive_partitioning=False, glob=False)
    if kind == "arrow":
        return pl.scan_ipc(file, hive_partitioning=False, glob=False)
    return pl.read_ipc_stream(file).lazy()


def _by_pandas(file: Path, kind: str, schema: pl.Schema) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the columns that are the index of a data frame that pandas wrote, and those that it declared as
    categories, which polars forgets where they are numbers."""
    try:
        if kind == "parquet":
            page = json.loads(pl.read_parquet_metadata(file).get("pandas", ""))
        else:  # polars does not return what Arrow's footer says; its size stands before the last mark
            with file.open("rb") as stream:
                stream.seek(-10, SEEK_END)
                size = int.from_bytes(stream.read(4), "little")
                stream.seek(-10 - size, SEEK_END)
                text = stream.read(size).decode("utf-8", "replace")
            page, _ = json.JSONDecoder().raw_decode(text, text.find('{"index_columns"'))
        declared = [each["field_name"] for each in page["columns"] if each["pandas_type"] == "categorical"]
        index = [name for name in page["index_columns"] if isinstance(name, str)]
    except (ValueError, KeyError, TypeError):  # not written by pandas
        return (), ()
    return tuple(name for name in index if name in schema), tuple(n for n in declared if n in schema)


def _frame_rows(
    frame: pl.DataFrame,
    file: Path,
    data: RowFiles,
    start: int,
    index: tuple[str, ...],
    declared: tuple[str, ...],
) -> Rows:
    nothing = pl.Series([None] * len(frame), dtype=pl.String)
    # Series get an empty name, as their methods read a name such as `*` as a pattern. A column of an odd type
    # is one that the user ignores, or `check_types` would have raised; its cells count as empty.
    given = {c.name: nothing if is_odd(c.dtype) else c.alias("") for c in frame.get_columns()}
    given |= {name: as_texts(given[name]).cast(pl.Categorical) for name in declared}
    lines = np.arange(start, start + len(frame))
    return Rows(Cells(given, data.no_value), lines, [], file, index=index)
