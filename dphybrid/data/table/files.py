"""The files that a path names, as typed rows on disk: delimited text and JSON lines as DuckDB reads them
(`dphybrid.data.table.delimited`), Parquet and Arrow files as they are."""

import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
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
SUFFIXES = (
    *(text + packed for text in _TEXTS for packed in PACKED),
    *(".parquet", ".pq", ".arrow", ".feather", ".ipc"),
)
"""Endings of the files that are read in a folder."""
FRAMES, _FRAME = "frames", re.compile("[0-9a-f]{16}")
"""Folder of the saved frames in the data folder, and the names of their own folders."""
_NO_PARTITION = "__HIVE_DEFAULT_PARTITION__"
BLOCK_ROWS = 2**16
"""Rows of a chunk."""
_FORMATS = {b"PAR1": "parquet", b"ARROW1": "arrow", b"\xff\xff\xff\xff": "arrow stream"}
_OTHERS = {
    b"PK\x03\x04": "an Excel or zip file",
    b"\xd0\xcf\x11\xe0": "an Excel file",
    b"BZh": "packed with bzip2",
    b"\xfd7zXZ\0": "packed with xz",
}
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
        kept_B: Which of all rows are used.
        notes: What was inferred about how the files are written.
        forms: How texts of columns are written, where that is unusual.
        index: The columns that only number or name the rows.
        header: Whether the first line named the columns; always true for Parquet files.
    """

    frame: pl.LazyFrame
    files: tuple[Path, ...]
    sizes: list[int]
    firsts: list[int]
    kept_B: Array
    rejected: list[Rejected]
    notes: list[str]
    forms: dict[str, Form]
    index: set[str]
    header: bool

    def __len__(self) -> int:
        return int(self.kept_B.sum())

    @property
    def names(self) -> list[str]:
        """The columns' names."""
        return self.frame.collect_schema().names()

    def column(self, name: str) -> pl.Series:
        """Return a whole column, without its name: methods of a series read names such as `*` as patterns."""
        cells = self.frame.select(by_name(name)).collect(engine="streaming").to_series().alias("")
        return cells if self.kept_B.all() else cells.filter(pl.Series(self.kept_B))

    def chunks(self, names: Sequence[str] | None = None) -> Iterator[pl.DataFrame]:
        """Yield the rows, `BLOCK_ROWS` at a time; one empty chunk if there are none. names: their columns."""
        frame = self.frame if names is None else self.frame.select(by_name(*names))
        if not len(self):
            yield frame.head(0).collect()
            return
        start, whole = 0, self.kept_B.all()
        for chunk in frame.collect_batches(chunk_size=BLOCK_ROWS, maintain_order=True):
            kept_B = self.kept_B[start : start + len(chunk)]
            start += len(chunk)
            yield chunk if whole else chunk.filter(pl.Series(kept_B))

    def lines(self) -> tuple[pl.Series, pl.Series]:
        """Return the file and the line of each row that was read, used or not; a cell with line ends inside
        counts as one line."""
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
    kinds = {_format_of(file) for file in files}
    if len(kinds) > 1:
        raise UserError(f"data.path={data.path}: holds {' and '.join(sorted(kinds))} files; give one format")
    (kind,) = kinds
    scratch.mkdir(parents=True, exist_ok=True)
    if on_progress:
        on_progress("read rows", 0, len(files))
    if kind == "csv":
        parts = read_csv(files, data, scratch, named, as_text)
    else:
        parts = read_json(files, scratch) if kind == "json" else [_arrow_part(file, kind) for file in files]
        for part in parts:  # of delimited files, DuckDB has stripped the texts
            texts = string().str.strip_chars()
            part.frame = part.frame.with_columns(pl.when(~texts.is_in(["", *data.no_value])).then(texts))
    facts = [facts_of(file, kind) for file in files] if kind in _FORMATS.values() else []
    dictionaries, index = ({name for fact in facts for name in fact[place]} for place in (0, 1))
    frames, notes = _aligned(files, parts, dictionaries)
    rejected = [
        Rejected(file=str(file), line=line, reason=why, text=text)
        for file, part in zip(files, parts, strict=True)
        for line, why, text in part.bad
    ]
    rows = Rows(
        frame=pl.concat(frames, how="vertical_relaxed"),
        files=tuple(files),
        sizes=[part.size for part in parts],
        firsts=[part.first for part in parts],
        kept_B=np.ones(sum(part.size for part in parts), bool),
        rejected=rejected,
        notes=[*dict.fromkeys(notes + [note for part in parts for note in part.notes])],
        forms={name: form for part in parts for name, form in part.forms.items()},
        index=index,
        header=parts[0].header,
    )
    check_rejected(str(data.path), rejected, len(rows) + len(rejected), data.max_rejected)
    if on_progress:
        on_progress("read rows", len(files), len(files))
    return rows


def _format_of(file: Path) -> str:
    """Return csv, json, parquet, arrow or arrow stream, by the file's first bytes. Raises UserError for other
    formats."""
    with file.open("rb") as stream:
        head = stream.read(16)
    for sign, kind in _FORMATS.items():
        if head.startswith(sign):
            return kind
    for sign, what in _OTHERS.items():
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
        if kind == "arrow stream":
            frame = pl.read_ipc_stream(file).lazy()
        else:
            scan = pl.scan_parquet if kind == "parquet" else pl.scan_ipc
            frame = scan(file, hive_partitioning=False, glob=False)
        frame.head(1).collect()  # for types that polars cannot read
        return Part(frame, int(frame.select(pl.len()).collect().item()))
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError) as error:
        raise UserError(f"data.path={file}: cannot be read as {kind.title()}: {error}") from error


def partitions(file: Path) -> list[str]:
    """Return the folders named key=value right above a file, which are columns."""
    # Not those further up: below `seed=3`, a data folder would add a column to every saved frame.
    return [*itertools.takewhile(lambda part: "=" in part, reversed(file.parent.parts))][::-1]


def _folders(file: Path) -> dict[str, str | None]:
    """Return the columns that the folders right above a file give."""
    pairs = (part.split("=", 1) for part in partitions(file))
    return {name: None if text == _NO_PARTITION else unquote(text) for name, text in pairs}


def _aligned(
    files: Sequence[Path], parts: Sequence[Part], dictionaries: set[str]
) -> tuple[list[pl.LazyFrame], list[str]]:
    """Return the rows of each file with the columns of the first one, and notes on those that come or go.
    dictionaries: columns that are dictionaries of Arrow in some file."""
    schemas, notes = [part.frame.collect_schema() for part in parts], list[str]()
    names = [*dict.fromkeys([*schemas[0].names(), *_folders(files[0])])]
    texts = {n for n in names if _differs(n, {schema[n] for schema in schemas if n in schema})}
    frames = []
    for file, part, schema in zip(files, parts, schemas, strict=True):
        given = {name: text for name, text in _folders(file).items() if name in names and name not in schema}
        gone = [name for name in names if name not in schema and name not in given]
        if len(gone) == len(names):
            raise UserError(
                f"data.path: {file} has none of the columns of {files[0]}; give files of one table"
            )
        if gone:
            notes.append(f"{file.name} has no column {', '.join(gone)}: no value in its rows")
        if come := [name for name in schema if name not in names]:
            what = f"more columns than {files[0].name}, which are left out: {', '.join(come)}"
            notes.append(f"{file.name} has {what}")
        added = {name: pl.lit(text, pl.String) for name, text in given.items()}
        added |= {name: pl.lit(None, pl.String if name in texts else pl.Null) for name in gone}
        frame = part.frame.with_columns(
            by_name(*dictionaries & {*schema}).cast(pl.String).cast(pl.Categorical)
        )
        frame = frame.with_columns(by_name(*texts & {*schema}).cast(pl.String))
        frames.append(frame.with_columns(**added).select(by_name(*names)))
    return frames, notes


def _differs(name: str, types: set[pl.DataType]) -> bool:
    """Return whether a column has types in several files that only texts hold together. Raises UserError for
    lists beside other values."""
    if len(types) > 1 and any(dtype.is_nested() for dtype in types):
        raise UserError(
            f"data.path: column {name!r} holds lists in some files and other values in others; write "
            "one of them"
        )
    return len(types) > 1 and not all(dtype.is_numeric() for dtype in types)


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
