"""The files that a path names, as typed rows on disk: delimited text and JSON lines as DuckDB reads them
(`dphybrid.data.table.delimited`), Parquet and Arrow files as they are."""

import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NotRequired, TypedDict
from urllib.parse import unquote

import numpy as np
import polars as pl
from polars.selectors import by_name, string  # takes names literally; select() reads `*` as a pattern

from dphybrid.config.tables import PACKED, RowFiles
from dphybrid.data.batches import Array
from dphybrid.data.store import Progress
from dphybrid.data.table.arrow import facts_of
from dphybrid.data.table.delimited import Part, dialect_of, head_of, json_names, read_csv, read_json
from dphybrid.data.table.values import Form
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
"""Rows of a chunk."""
_MAX_COLUMNS = 32_768
"""With more columns, a file is taken to be damaged or read with the wrong delimiter."""
_OTHERS = (
    (b"PK\x03\x04", "an Excel or zip file"),
    (b"\xd0\xcf\x11\xe0", "an Excel file"),
    (b"BZh", "packed with bzip2"),
    (b"\xfd7zXZ\0", "packed with xz"),
    (b"FEA1", "a Feather file of version 1"),
    (b"ORC", "an ORC file"),
    (b"Obj\x01", "an Avro file"),
    (b"SQLite format 3\0", "an SQLite database"),
    (b"\x89HDF", "an HDF5 file"),
    (b"\x80\x04", "a pickle"),
    (b"%PDF-", "a PDF"),
)
"""First bytes of other formats, and their names."""


class Rejected(TypedDict):
    """A row that cannot be read: its file and line, the reason, and the start of its text."""

    file: str
    line: int
    reason: str
    text: NotRequired[str]


@dataclass
class Rows:
    """Typed rows of files, on disk, in the order of the files.

    Attributes:
        frame: Of all files, with the columns of the first one.
        sizes: Number of rows of each file.
        firsts: The line of each file's first row.
        notes: What was inferred about how the files are written.
        forms: How texts of columns are written, where that is unusual.
        index: The columns that only number or name the rows.
        header: Whether the first line named the columns; always true for Parquet files.
    """

    frame: pl.LazyFrame
    files: tuple[Path, ...]
    sizes: list[int]
    firsts: list[int]
    rejected: list[Rejected] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    forms: dict[str, Form] = field(default_factory=dict)
    index: tuple[str, ...] = ()
    header: bool = True

    def __len__(self) -> int:
        return sum(self.sizes)

    @property
    def names(self) -> list[str]:
        """The columns' names."""
        return self.frame.collect_schema().names()

    def column(self, name: str) -> pl.Series:
        """Return a whole column, without its name: methods of a series read names such as `*` as patterns."""
        return self.frame.select(by_name(name)).collect(engine="streaming").to_series().alias("")

    def chunks(self, size: int = BLOCK_ROWS) -> Iterator[pl.DataFrame]:
        """Yield the rows, `size` at a time; one empty chunk if there are none."""
        if not len(self):
            yield self.frame.head(0).collect()
            return
        yield from self.frame.collect_batches(chunk_size=size, maintain_order=True)

    def lines(self) -> tuple[pl.Series, pl.Series]:
        """Return the file and the line of each row; a cell with line ends inside counts as one line."""
        lines = list[Array]()
        for file, size, first in zip(self.files, self.sizes, self.firsts, strict=True):
            bad = [row["line"] for row in self.rejected if row["file"] == str(file)]
            own = np.arange(first, first + size + len(bad))
            lines.append(np.setdiff1d(own, bad)[:size])
        names = pl.Series("file", list(map(str, self.files)), dtype=pl.String)
        of_rows = names.gather(np.repeat(np.arange(len(self.files)), self.sizes))
        return of_rows, pl.Series("line", np.concatenate(lines) if lines else [], dtype=pl.Int64)


def read_rows(
    files: Sequence[Path],
    data: RowFiles,
    scratch: Path,
    named: Sequence[str] = (),
    *,
    as_text: bool = False,
    on_progress: Progress | None = None,
) -> Rows:
    """Return the rows of files. scratch: a folder for Parquet files, which must stay while rows are read.

    named: columns that the table must have, by which a header is known. as_text: cells of delimited files are
    not typed, as an encoder types those of new files. Raises UserError for files that cannot be read, and if
    more than `data.max_rejected` of the rows cannot be.
    """
    kinds = {file: _format_of(file) for file in files}
    if len(different := sorted({*kinds.values()})) > 1:
        raise UserError(f"data.path={data.path}: holds {' and '.join(different)} files; give one format")
    scratch.mkdir(parents=True, exist_ok=True)
    if on_progress:
        on_progress("read rows", 0, len(files))
    index, declared = set[str](), set[str]()
    match kinds[files[0]]:
        case "csv":
            parts = read_csv(files, data, scratch, named, as_text)
        case "json":
            parts = read_json(files, scratch)
        case kind:
            parts = []
            for file in files:
                parts.append(_arrow_part(file, kind))
                of_file = facts_of(file, kind)
                declared.update(of_file[0])
                index.update(of_file[1])
    first, forms, notes = parts[0], dict[str, Form](), dict[str, None]()
    names = [*first.frame.collect_schema().names(), *_folders(files[0])]
    if len(names) > _MAX_COLUMNS:
        raise UserError(
            f"data.path={files[0]}: has {len(names):,} columns, but at most {_MAX_COLUMNS:,} are allowed; "
            "check data.delimiter"
        )
    if kinds[files[0]] != "csv":  # whose texts DuckDB has stripped
        for part in parts:
            part.frame = _cleaned(part.frame, data.no_value)
    frames = _aligned(files, parts, [*dict.fromkeys(names)], declared, notes)
    rejected = list[Rejected]()
    for file, part in zip(files, parts, strict=True):
        notes |= dict.fromkeys(part.notes)
        forms |= part.forms
        rejected += [
            Rejected(file=str(file), line=line, reason=why, text=text) for line, why, text in part.bad
        ]
    rows = Rows(
        pl.concat(frames, how="vertical_relaxed"),
        tuple(files),
        [part.size for part in parts],
        [part.first for part in parts],
        rejected,
        list(notes),
        forms,
        tuple(index),
        first.header,
    )
    check_rejected(str(data.path), rejected, len(rows) + len(rejected), data.max_rejected)
    if on_progress:
        on_progress("read rows", len(files), len(files))
    return rows


def _cleaned(frame: pl.LazyFrame, no_value: Sequence[str]) -> pl.LazyFrame:
    """Return rows whose texts are stripped, with None for those that mean no value."""
    texts = string().str.strip_chars()
    return frame.with_columns(pl.when(~texts.is_in(["", *no_value])).then(texts))


def _format_of(file: Path) -> str:
    """Return csv, json, parquet, arrow or arrow stream, by the file's first bytes. Raises UserError for other
    formats."""
    with file.open("rb") as stream:
        head = stream.read(16)
    if head[:4] == b"PAR1":
        return "parquet"
    if head[:6] == b"ARROW1":
        return "arrow"
    if head[:4] == b"\xff\xff\xff\xff":
        return "arrow stream"
    for sign, what in _OTHERS:
        if head.startswith(sign):
            raise UserError(
                f"data.path={file}: is {what}, which is not supported; save the table as CSV or Parquet"
            )
    text = head_of(file).lstrip(b"\xef\xbb\xbf \t\r\n")
    if text[:1] == b"{" and json_names(file):
        return "json"
    if text[:1] in (b"{", b"[") and ".json" in file.suffixes:
        raise UserError(f"data.path={file}: is one JSON value; write JSON lines, with one object a line")
    return "csv"


def _arrow_part(file: Path, kind: str) -> Part:
    try:
        if kind == "parquet":
            frame = pl.scan_parquet(file, hive_partitioning=False, glob=False)
        elif kind == "arrow":
            frame = pl.scan_ipc(file, hive_partitioning=False, glob=False)
        else:
            frame = pl.read_ipc_stream(file).lazy()
        frame.head(1).collect()  # for types that polars cannot read
        return Part(frame, int(frame.select(pl.len()).collect().item()))
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError) as error:
        raise UserError(f"data.path={file}: cannot be read as {kind.title()}: {error}") from error


def _folders(file: Path) -> dict[str, str | None]:
    """Return the columns that the folders right above a file give."""
    pairs = (part.split("=", 1) for part in partitions(file))
    return {name: None if text == _NO_PARTITION else unquote(text) for name, text in pairs}


def _aligned(
    files: Sequence[Path], parts: Sequence[Part], names: list[str], declared: set[str], notes: dict[str, None]
) -> list[pl.LazyFrame]:
    """Return the rows of each file with these columns. notes: gets which columns come or go."""
    found = []
    for file, part in zip(files, parts, strict=True):
        schema, folders = part.frame.collect_schema(), _folders(file)
        added = [
            pl.lit(text, pl.String).alias(name)
            for name, text in folders.items()
            if name in names and name not in schema
        ]
        gone = [name for name in names if name not in schema and name not in folders]
        if len(gone) == len(names):
            raise UserError(
                f"data.path: {file} has none of the columns of {files[0]}; give files of one table"
            )
        if gone:
            notes[f"{file.name} has no column {', '.join(gone)}: no value in its rows"] = None
        if come := [name for name in schema if name not in names]:
            notes[
                f"{file.name} has more columns than {files[0].name}, which are left out: {', '.join(come)}"
            ] = None
        dictionary = [name for name in declared if name in schema]
        frame = part.frame.with_columns(
            *added,
            *(pl.lit(None).alias(name) for name in gone),
            by_name(*dictionary).cast(pl.String).cast(pl.Categorical),
        )
        found.append(frame.select(by_name(*names)))
    schemas = [frame.collect_schema() for frame in found]
    for name in names:
        types = {
            schema[name]
            for schema, part in zip(schemas, parts, strict=True)
            if name in part.frame.collect_schema()
        }
        if len(types) > 1 and any(dtype.is_nested() for dtype in types):
            raise UserError(
                f"data.path: column {name!r} holds lists in some files and other values in others; write "
                "one of them"
            )
        if len(types) > 1 and not all(dtype.is_numeric() for dtype in types):
            found = [frame.with_columns(by_name(name).cast(pl.String)) for frame in found]
    return found


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


def names_of(file: Path, data: RowFiles, named: Sequence[str] = ()) -> list[str]:
    """Return the columns of a file by its first rows, or its schema. Raises UserError as `read_rows` does."""
    match _format_of(file):
        case "csv":
            own = list(dialect_of(file, data, named).names)
        case "json":
            own = json_names(file)
        case kind:
            own = _arrow_part(file, kind).frame.collect_schema().names()
    return [*dict.fromkeys([*own, *_folders(file)])]


def check_enough(file: Path | str, header: bool, num_rows: int) -> None:
    """Raise UserError unless there are at least two rows."""
    if num_rows < 2:
        held = "1 row" if num_rows else f"{'a header and ' if header else ''}no rows that can be read"
        raise UserError(f"data.path={file}: has {held}; at least 2 are needed, one for validation")


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
            f"{first['reason']}; correct the file, set data.delimiter, or raise data.max_rejected"
        )
