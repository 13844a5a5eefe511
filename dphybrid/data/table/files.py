"""The files that a path names, as typed rows on disk: delimited text and JSON lines as DuckDB reads them
(`dphybrid.data.table.delimited`), Parquet and Arrow files as they are."""

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from glob import glob
from itertools import takewhile
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import polars as pl
from polars.selectors import by_name, string  # takes names literally; select() reads `*` as a pattern

from dphybrid.config.tables import PACKED, RowFiles
from dphybrid.data.batches import Array
from dphybrid.data.store import Progress
from dphybrid.data.table.arrow import dictionaries_of
from dphybrid.data.table.delimited import (
    Dialect,
    Part,
    Rejected,
    dialect_of,
    encoding_of,
    packing_of,
    read_csv,
    read_json,
)
from dphybrid.data.table.values import Form
from dphybrid.util.digests import file_digest
from dphybrid.util.errors import UserError, suggestion
from dphybrid.util.files import given_path, no_such_file

_JSON = (".json", ".jsonl", ".ndjson")
_TEXTS = (".csv", ".tsv", ".txt", ".dat", ".data", *_JSON[1:])
_TYPED = (".parquet", ".pq", ".arrow", ".feather", ".ipc")
SUFFIXES = (*(text + packed for text in _TEXTS for packed in PACKED), *_TYPED)
"""Endings of the files that are read in a folder."""
FRAMES, _FRAME = "frames", re.compile("[0-9a-f]{16}")
"""Folder of the saved frames in the data folder, and the names of their own folders."""
BLOCK_ROWS = 2**16
"""Rows of a chunk."""


@dataclass
class Rows:
    """Typed rows of files, on disk, in the order of the files.

    Attributes:
        frame: Of all files, with the columns of the first one.
        kept_B: Which of all rows are used.
        notes: What was inferred about how the files are written.
        rejected: The rows that cannot be read.
        form: How texts write numbers and times.
        header: Whether the first line named the columns; always true for Parquet files.
    """

    frame: pl.LazyFrame
    parts: list[Part]
    kept_B: Array
    notes: list[str]
    rejected: list[Rejected]
    form: Form
    header: bool

    def __len__(self) -> int:
        return int(self.kept_B.sum())

    @property
    def names(self) -> list[str]:
        """The columns' names."""
        return self.frame.collect_schema().names()

    def column(self, name: str) -> pl.Series:
        """Return a whole column, without its name: methods of a series read names such as `*` as patterns."""
        return self.table([name]).to_series().alias("")

    def table(self, names: Sequence[str]) -> pl.DataFrame:
        """Return columns of all rows in memory."""
        with self._reading():
            rows = self.frame.select(by_name(*names)).collect(engine="streaming")
        return rows if self.kept_B.all() else rows.filter(pl.Series(self.kept_B))

    def chunks(self, names: Sequence[str] | None = None) -> Iterator[pl.DataFrame]:
        """Yield the rows, `BLOCK_ROWS` at a time; one empty chunk if there are none. names: their columns."""
        frame = self.frame if names is None else self.frame.select(by_name(*names))
        if not len(self):
            yield frame.head(0).collect()
            return
        start, whole = 0, self.kept_B.all()
        with self._reading():
            for chunk in frame.collect_batches(chunk_size=BLOCK_ROWS, maintain_order=True):
                kept_B = self.kept_B[start : start + len(chunk)]
                start += len(chunk)
                yield chunk if whole else chunk.filter(pl.Series(kept_B))

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Raise UserError for a damaged Parquet or Arrow file, of which only the metadata was read before."""
        try:
            yield
        except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
            where = f"{self.parts[0].file}{' or another file' * (len(self.parts) > 1)}"
            raise UserError(f"data.path={where}: cannot be read: {error}; write it again") from error

    def lines(self) -> tuple[pl.Series, pl.Series]:
        """Return the file and the line of each row that was read, used or not."""
        files = pl.Series("file", [str(part.file) for part in self.parts])
        of_rows = files.gather(np.repeat(np.arange(len(files)), [part.size for part in self.parts]))
        return of_rows, pl.Series("line", np.concatenate([part.lines for part in self.parts]))


def find_files(path: str, field: str) -> tuple[Path, ...]:
    """Return the files that a path names, sorted by name: a file, a folder (with all folders below it), or a
    pattern such as `logs/day-*.csv.gz`. field: the field or flag with the path, for messages.

    Raises UserError if there is no such file, or an empty one.
    """
    if re.match(r"[a-z][a-z0-9]+://", path):
        raise UserError(f"{field}={path}: is no file of this machine; download it, and give the file")
    root = given_path(path, field)
    if root.is_file():
        files = [root]
    elif root.is_dir():
        # Spark writes _SUCCESS, .part-0.crc and the like beside its data.
        below = (file for file in root.rglob("*") if file.name[0] not in "._" and file.is_file())
        files = [file for file in below if file.name.lower().endswith(SUFFIXES)]
        if not files:
            raise UserError(
                f"{field}={path}: is a folder without tables ({', '.join(_TEXTS + _TYPED)}, also packed as "
                f"{', '.join(PACKED[1:])}); name a table, or a folder that has some"
            )
        if root.parent.name == FRAMES and _FRAME.fullmatch(root.name) and frame_digest(files) != root.name:
            raise UserError(
                f"{field}={path}: this saved frame is damaged, or has other files now; remove the folder and "
                "train the frame again"
            )
    else:
        files = [file for match in glob(str(root), recursive=True) if (file := Path(match)).is_file()]
        if not files:
            raise no_such_file(path, field)
    for file in files:
        if not given_path(str(file), field).stat().st_size:
            raise UserError(f"{field}={file}: is empty; give a file with rows")
    return tuple(sorted(files))


def find_parts(paths: Mapping[str, str | None]) -> list[tuple[Path, ...]]:
    """Return the files of each part of the rows. paths: by field; None: the part has no files. Raises
    UserError as `find_files` does, and for a file of two parts."""
    parts = [() if path is None else find_files(path, field) for field, path in paths.items()]
    counts = Counter(file.resolve() for files in parts for file in files)
    if twice := [file for file, count in counts.items() if count > 1]:
        raise UserError(
            f"{twice[0]}: is a file of two of {', '.join(paths)}; a row cannot be in two splits, so name "
            "different files"
        )
    return parts


def frame_digest(files: Iterable[Path]) -> str:
    """Return the digest of a saved frame's files, which names their folder."""
    parts = (bytes.fromhex(file_digest(file)) for file in sorted(files))
    return hashlib.blake2b(b"".join(parts), digest_size=8).hexdigest()


def folder_values(file: Path) -> dict[str, str | None]:
    """Return the columns that folders named key=value right above a file give, and their value."""
    # Not those further up: below `seed=3`, a data folder would add a column to every saved frame.
    folders = reversed([*takewhile(lambda part: "=" in part, reversed(file.parent.parts))])
    pairs = (folder.split("=", 1) for folder in folders)
    return {name: None if text == "__HIVE_DEFAULT_PARTITION__" else unquote(text) for name, text in pairs}


def names_of(file: Path, data: RowFiles, named: Sequence[str] = ()) -> list[str]:
    """Return the columns of a file by its first rows, or its schema; none for JSON lines, of which each may
    have others. Raises UserError as `read_rows` does."""
    match _format_of(file, data):
        case "csv":
            own = [*dialect_of(file, data, named).types]
        case "json":
            return []
        case kind:
            own = _read_arrow(file, kind).frame.collect_schema().names()
    return [*dict.fromkeys([*own, *folder_values(file)])]


def read_rows(
    files: Sequence[Path],
    data: RowFiles,
    scratch: Path,
    named: Sequence[str] = (),
    *,
    as_text: bool = False,
    on_progress: Progress | None = None,
) -> Rows:
    """Return the rows of files. scratch: a folder for typed files, which must stay while rows are read.

    named: columns that the table must have, by which a header is known. as_text: cells of delimited files are
    not typed, as an encoder types those of new files. Raises UserError for files that cannot be read, and if
    more than `data.max_rejected` of the rows cannot be.
    """
    kinds = {_format_of(file, data) for file in files}
    if len(kinds) > 1:
        raise UserError(f"data.path={data.path}: holds {' and '.join(sorted(kinds))} files; give one format")
    (kind,) = kinds
    scratch.mkdir(parents=True, exist_ok=True)
    if on_progress:
        on_progress("read rows", 0, len(files))
    targets = [scratch / f"rows-{number:05d}" for number in range(len(files))]
    dialect = Dialect()
    match kind:
        case "csv":
            parts, dialect = read_csv(files, targets, data, named, as_text)
        case "json":
            parts = [read_json(file, target) for file, target in zip(files, targets, strict=True)]
        case _:
            parts = [_read_arrow(file, kind) for file in files]
    texts = string().str.strip_chars()
    for part in parts:
        frame = part.frame.with_columns(texts.replace(["", *data.no_value], None))
        part.frame = frame.collect().lazy() if part.small else frame
    frame, notes = _one_table(parts)
    rejected = [row for part in parts for row in part.rejected]
    num_rows = sum(part.size for part in parts)
    check_rejected(str(data.path), rejected, num_rows + len(rejected), data.max_rejected)
    if on_progress:
        on_progress("read rows", len(files), len(files))
    return Rows(
        frame=frame,
        parts=parts,
        kept_B=np.ones(num_rows, bool),
        notes=[*notes, *dialect.notes],
        rejected=rejected,
        form=Form(comma=dialect.options.get("decimal_separator") == ",", dates=data.dateformat),
        header=dialect.header,
    )


def _one_table(parts: Sequence[Part]) -> tuple[pl.LazyFrame, list[str]]:
    """Return the rows of all files with the columns of the first one, and notes on those that come or go.
    Raises UserError for files that are not of one table."""
    first, notes = parts[0].file, list[str]()
    for part in parts:
        own, added = part.frame.collect_schema(), folder_values(part.file).items()
        part.frame = part.frame.with_columns(
            pl.lit(text, pl.String).alias(name) for name, text in added if name not in own
        )
    schemas = [part.frame.collect_schema() for part in parts]
    names = schemas[0].names()
    for part, schema in zip(parts, schemas, strict=True):
        gone, come = [n for n in names if n not in schema], [n for n in schema if n not in names]
        if len(gone) == len(names):
            raise UserError(
                f"data.path: {part.file} has none of the columns of {first}; give files of one table"
            )
        if gone:
            notes.append(f"{part.file.name} has no column {', '.join(gone)}: no value in its rows")
        if come:
            what = f"more columns than {first.name}, which are left out: {', '.join(come)}"
            notes.append(f"{part.file.name} has {what}")
    try:
        for name in names:
            types = {schema[name] for schema in schemas if name in schema} - {pl.Null()}
            if len({dtype.is_nested() for dtype in types}) > 1:
                raise pl.exceptions.SchemaError(f"{name!r} holds lists in some files only")
        table = pl.concat(
            [part.frame.select(by_name(*names, require_all=False)) for part in parts], how="diagonal_relaxed"
        ).select(by_name(*names))
        table.collect_schema()
    except pl.exceptions.PolarsError as error:
        raise UserError(
            f"data.path: {first} and others have columns of other types: {error}; write one type"
        ) from error
    return table, notes


def check_rejected(
    file: Path | str, rejected: Sequence[Rejected], num_rows: int, max_rejected: float
) -> None:
    """Raise UserError if more than the share `max_rejected` of `num_rows` rows was rejected."""
    if len(rejected) > max_rejected * num_rows:
        first = rejected[0]
        where = "" if str(file) == first["file"] else f" of {first['file']}"
        raise UserError(
            f"data.path={file}: {len(rejected)} of {num_rows} rows cannot be read, more than "
            f"data.max_rejected={max_rejected:g} allows; the first is line {first['line']}{where}: "
            f"{first['reason']}; correct the file, set data.delimiter or data.encoding, or raise "
            "data.max_rejected"
        )


def _format_of(file: Path, data: RowFiles) -> str:
    """Return csv, json, parquet or arrow, by the file's first bytes. Raises UserError for other formats."""
    with file.open("rb") as stream:
        head = stream.read(4096)
    if head.startswith((b"PAR1", b"ARROW1")):
        return "parquet" if head.startswith(b"P") else "arrow"
    if b"\0" in head and packing_of(file) == "none" and encoding_of(file, data.encoding) != "utf-16":
        raise UserError(
            f"data.path={file}: is no text, Parquet or Arrow file, but such as Excel or a zip file; save the "
            "table as CSV or Parquet"
        )
    return "json" if {*_JSON} & {*file.suffixes} else "csv"


def _read_arrow(file: Path, kind: str) -> Part:
    try:
        scan = pl.scan_parquet if kind == "parquet" else pl.scan_ipc
        frame = scan(file, hive_partitioning=False, glob=False)
        frame.head(1).collect()  # for types that polars cannot read
        dictionaries = by_name(*dictionaries_of(file, kind))
        return Part(file, frame.with_columns(dictionaries.cast(pl.String).cast(pl.Categorical)))
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError) as error:
        raise UserError(f"data.path={file}: cannot be read as {kind.title()}: {error}") from error


def named_columns(rows: Rows, names: Sequence[str], where: str, remedy: str) -> pl.DataFrame:
    """Return the columns of these names, each once. where, remedy: for the message of the UserError about one
    that is missing."""
    if missing := [name for name in names if name not in rows.names]:
        raise UserError(f"{where} no column {missing[0]!r}{suggestion(missing[0], rows.names)}; {remedy}")
    return rows.table([*dict.fromkeys(names)])


def complete_rows(
    rows: Rows, frame: pl.DataFrame, needed: Sequence[str]
) -> tuple[pl.DataFrame, list[Rejected]]:
    """Return the rows of `frame` that have a value in each needed column, and all rejected rows: those that
    could not be read, and the others. rows: as they were read; `frame` has values of all of them."""
    gap = pl.coalesce(pl.when(by_name(name).is_null()).then(pl.lit(name)) for name in needed)
    missing, rejected = frame.select(gap).to_series(), list(rows.rejected)
    if missing.count():
        of_file, lines = rows.lines()
        for row in missing.is_not_null().arg_true():
            why = f"no value in {missing[row]!r}"
            rejected.append(Rejected(file=of_file[row], line=lines[row], reason=why))
    return frame.filter(missing.is_null()), rejected
