"""Delimited text and JSON lines as typed files, read by DuckDB. It infers how a table is written and the
types of its columns from the first rows of its first file; all rows confirm them, or a column is read again
as text."""

import errno
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from itertools import chain
from pathlib import Path
from tempfile import gettempdir
from typing import Any, NotRequired, TypedDict

import numpy as np
import polars as pl

from dphybrid.config.tables import RowFiles
from dphybrid.data.batches import Array
from dphybrid.data.table.values import EXACT, NAMES_AN_ID
from dphybrid.util.errors import UserError

_SNIFFED = 20_480
"""Rows from which DuckDB infers how a file is written and typed."""
_SNIFFED_TEXTS = 2_048
"""Of these, the rows that suffice where cells are not typed."""
_ROW_GROUP = 2**17
_SMALL = 2**26
"""With fewer bytes, the rows of a file are in memory at once."""
_SHOWN = 500
"""How many characters of a rejected row are kept."""
_TYPES = ("BIGINT", "DOUBLE", "TIMESTAMP", "TIMESTAMP WITH TIME ZONE")
"""Types that are taken from DuckDB. Other ones are text: it reads yes and no as flags, and writes integers
beyond 64 bits as fractions. Dates are times: in a column of dates, it would drop later hours in silence."""
_READ_AS = {"BIGINT": "DOUBLE", "ID": "VARCHAR"}
"""As whole numbers, DuckDB would read 8.5 as 9. ID: whole numbers if all their texts are those of whole
numbers, as 007 is not 7."""
_REMEDY = "set data.encoding, data.delimiter, data.quote or data.header, or save it as CSV or Parquet"
_JSON_REMEDY = "write one object a line, or save the table as CSV or Parquet"


class Rejected(TypedDict):
    """A row that cannot be read: its file and line, the reason, and the start of its text."""

    file: str
    line: int
    reason: str
    text: NotRequired[str]


@dataclass
class Part:
    """The rows of a file. first: the line of its first row. small: whether they are in memory."""

    file: Path
    frame: pl.LazyFrame
    first: int = 1
    small: bool = False
    rejected: list[Rejected] = field(default_factory=list)

    @cached_property
    def size(self) -> int:
        """Number of rows."""
        return int(self.frame.select(pl.len()).collect().item())

    @property
    def lines(self) -> Array:
        """The line of each row (B,); a cell with line ends inside counts as one line."""
        bad = [row["line"] for row in self.rejected]
        return np.setdiff1d(np.arange(self.first, self.first + self.size + len(bad)), bad)[: self.size]


@dataclass(frozen=True)
class Dialect:
    """How a table's files are written; by default as files that say so themselves.

    Attributes:
        options: Of DuckDB's read_csv.
        types: Of the columns, by name.
        notes: What is unusual.
        header: Whether the first line names the columns.
        gaps: Whether cells of the first rows that are no texts hold a word for no value.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    types: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    header: bool = True
    gaps: bool = False


def read_csv(
    files: Sequence[Path], targets: Sequence[Path], data: RowFiles, named: Sequence[str], as_text: bool
) -> tuple[list[Part], Dialect]:
    """Read delimited files of one table into typed files, all as the first one is written. named: columns
    that the table must have, by which a header is known. as_text: cells are not typed, as an encoder types
    those of new files. Raises UserError."""
    dialect = dialect_of(files[0], data, named, as_text)
    columns = [[*dialect.types], *(_columns_of(file, dialect, named) for file in files[1:])]
    types = dict.fromkeys(chain.from_iterable(columns), "VARCHAR") | {**dialect.types}
    # Each text takes time at each cell of the table: of texts, `files.read_rows` drops these words.
    options = dict(dialect.options) if dialect.gaps else {**dialect.options, "nullstr": [""]}
    while True:
        parts, misfits = list[Part](), Counter[str]()
        for file, target, names in zip(files, targets, columns, strict=True):
            own = {name: types[name] for name in names}
            parts.append(_typed(file, target, options, own, misfits))
        if misfits.total() and options["nullstr"] != dialect.options["nullstr"]:
            options |= {"nullstr": dialect.options["nullstr"]}
            continue
        # The first rows gave the types. They hold if nearly all other cells fit, too.
        most = data.max_rejected * sum(part.size + len(part.rejected) for part in parts)
        wrong = {name for name, cells in misfits.items() if cells > most}
        if not wrong:
            _database.cache_clear()  # its threads and 30 MB
            return parts, dialect
        types |= {name: "ID" if types[name] == "BIGINT" else "VARCHAR" for name in wrong}


def dialect_of(file: Path, data: RowFiles, named: Sequence[str], as_text: bool = False) -> Dialect:
    """Return how a file is written, and the types of its columns, by the first rows. Raises UserError."""
    stat = file.stat()
    if not stat.st_size:
        raise UserError(f"data.path={file}: is empty; give a file with rows")
    with _reading(file, "", _REMEDY):
        return _sniff(file, (stat.st_size, stat.st_mtime_ns), data, tuple(named), as_text)


@lru_cache(maxsize=8)  # Commands check their data before they import torch, and soon prepare it.
def _sniff(
    file: Path, _stamp: tuple[int, int], data: RowFiles, named: tuple[str, ...], as_text: bool
) -> Dialect:
    database = _database().cursor()
    flags = {
        "delim": data.delimiter,
        "quote": "" if data.quote == "none" else data.quote,
        "header": {"yes": True, "no": False}.get(data.header, "auto"),
        "dateformat": data.dateformat or "auto",
        "timestampformat": data.dateformat or "auto",
    }
    fixed = {
        "encoding": encoding_of(file, data.encoding),
        "hive_partitioning": False,
        "decimal_separator": data.decimal.replace("auto", "."),
        # Cells may have a blank before them.
        "nullstr": ["", *data.no_value, *(f" {text}" for text in data.no_value)],
        **{name: value for name, value in flags.items() if value != "auto"},
    }
    sniffed = _SNIFFED_TEXTS if as_text else _SNIFFED
    options, types = _sniffed(database, file, fixed, sniffed)
    rows = _texts(database, file, options, len(types), sniffed)
    first = _cells(file, rows)
    header = options["header"] if data.header != "auto" else _is_header(first, options, named, as_text)
    if header != options["header"]:
        options, types = _sniffed(database, file, fixed | {"header": header}, sniffed)
    quotes = (cells.str.contains('"', literal=True).any() for cells in rows)
    if data.quote == "auto" and not options["quote"] and not any(quotes):
        options |= {"quote": '"', "escape": '"'}  # which later rows may have
    # With another separator than the comma, decimals may have one: if more columns are numbers then.
    if data.decimal == "auto" and not as_text and options["delim"] != "," and "VARCHAR" in types:
        with_commas = _sniffed(database, file, options | {"decimal_separator": ","}, sniffed)
        if with_commas[1].count("DOUBLE") > types.count("DOUBLE"):
            options, types = options | {"decimal_separator": ","}, with_commas[1]
    names = _names(file, first, named) if header else [*map(str, range(len(types)))]
    notes = _unusual(options, names)
    if as_text:
        types = ["VARCHAR"] * len(types)
    else:
        notes += _words(rows.slice(header), types, names, data)
    # As ids, 007 and 7 differ, which only texts tell.
    of_ids = {name for name in names if NAMES_AN_ID.search(name)}
    types = ["ID" if t == "BIGINT" and n in of_ids else t for n, t in zip(names, types, strict=True)]
    numbers = (cells for cells, kind in zip(rows, types, strict=True) if kind != "VARCHAR")
    gaps = any(cells.str.strip_chars().is_in(data.no_value).any() for cells in numbers)
    return Dialect(options, dict(zip(names, types, strict=True)), tuple(notes), bool(header), gaps)


def _columns_of(file: Path, dialect: Dialect, named: Sequence[str]) -> list[str]:
    """Return the columns of a further file of a table."""
    if not dialect.header:
        return [*dialect.types]
    database = _database().cursor()
    with _reading(file, "", _REMEDY):
        _, types = _sniffed(database, file, dialect.options, _SNIFFED_TEXTS)
        rows = _texts(database, file, dialect.options, len(types), 1)
    return _names(file, _cells(file, rows), named)


def _sniffed(
    database: Any, file: Path, given: Mapping[str, Any], rows: int
) -> tuple[dict[str, Any], list[str]]:
    """Return the options with which DuckDB would read a file, and the types of its columns, by so many
    rows."""
    import duckdb

    given = {name: value for name, value in given.items() if name != "skip"}
    how = {**given, "ignore_errors": True, "sample_size": rows}
    what = "Delimiter, Quote, Escape, SkipRows, HasHeader, Columns, DateFormat, TimestampFormat"
    try:
        (found,) = _query(database, "sniff_csv", file, how, f"SELECT {what}").fetchall()
    except duckdb.InvalidInputException:
        if "strict_mode" in given:
            raise
        # Such as line ends of two kinds.
        return _sniffed(database, file, {**given, "strict_mode": False}, rows)
    delimiter, quote, escape, skip, header, columns, dates, times = found
    quote, escape = ("" if sign in ("(empty)", "\0") else sign for sign in (quote, escape))
    options = {**given, "delim": delimiter, "quote": quote, "escape": escape, "skip": skip, "header": header}
    types = [column["type"].replace("DATE", "TIMESTAMP") for column in columns]
    forms = [form for form in (dates, times) if form and not form.startswith("%Y-%m-%d")]
    if forms and "timestampformat" not in given:  # 05-09-21 may be three days
        types = [kind.replace("TIMESTAMP", "VARCHAR") for kind in types]
    return options, [kind if kind in _TYPES else "VARCHAR" for kind in types]


def _texts(database: Any, file: Path, options: Mapping[str, Any], width: int, most: int) -> pl.DataFrame:
    """Return the first rows as texts, the header among them."""
    plain = {"nullstr": ["\x01\x02"], "auto_detect": False, "ignore_errors": True, "null_padding": True}
    plain |= {"header": False, "parallel": False, "columns": {f"c{i}": "VARCHAR" for i in range(width)}}
    return pl.DataFrame(_query(database, "read_csv", file, {**options, **plain}, f"LIMIT {most}"))


def _cells(file: Path, rows: pl.DataFrame) -> list[str]:
    """Return the texts of the first row. Raises UserError if there is none."""
    if not len(rows):
        raise UserError(f"data.path={file}: is empty; give a file with rows")
    return [(text or "").strip().removeprefix("\ufeff") for text in rows.row(0)]


def _is_header(first: Sequence[str], found: Mapping[str, Any], named: Sequence[str], as_text: bool) -> bool:
    """Return whether a file's first row names the columns. found: how DuckDB reads the file. named: columns
    that the table must have; with `as_text` those of an earlier file, numbers if that had no header."""
    names = [name for name in named if not name.isdigit()]
    if names:
        return found["header"] or all(name in first for name in names)
    return found["header"] and not (as_text and named)


def _names(file: Path, row: Sequence[str], named: Sequence[str]) -> list[str]:
    """Return the names of columns in a header, different ones. Raises UserError if one that the user names
    occurs twice."""
    names = list[str]()
    for name in row:
        if name in names and name in named:
            raise UserError(f"data.path={file}: has two columns named {name!r}; rename one")
        choices = (name, *(f"{name}_{number}" for number in range(1, len(row))))
        names.append(next(choice for choice in choices if choice not in names))
    return names


def _unusual(options: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """Return notes on what a user may want to say otherwise of how a file is written."""
    notes = {
        "there is one column; --data.delimiter :: splits it": len(names) == 1 and "::" in names[0],
        f"{options['skip']} lines above the table are left out": options["skip"],
        "decimals are written with a comma; --data.decimal . reads them as texts": (
            options["decimal_separator"] == ","
        ),
        "there is no header: columns are named 0, 1, ...; --data.header yes overrides this": (
            not options["header"]
        ),
    }
    return [note for note, applies in notes.items() if applies]


def _words(rows: pl.DataFrame, types: Sequence[str], names: Sequence[str], data: RowFiles) -> list[str]:
    """Return a warning about words that count as no value in columns of texts, such as the country NA. By
    the first rows, as DuckDB drops these words."""
    words = [word for word in data.no_value if word[:1].isalpha()]
    texts = zip(names, types, rows, strict=True)
    counts = {n: c.str.strip_chars().is_in(words).sum() for n, kind, c in texts if kind == "VARCHAR"}
    found = ", ".join(f"{cells:,} of {name}" for name, cells in counts.items() if cells)
    note = f"cells such as NA count as no value (in the first rows: {found}); --data.missing '' keeps them"
    return [note] if found else []


def _typed(
    file: Path, target: Path, options: Mapping[str, Any], types: Mapping[str, str], misfits: Counter[str]
) -> Part:
    """Read the rows of a file into memory, or write them as Parquet. types: of its columns, by name. misfits:
    gets the number of cells by column that are not of its type."""
    # By number, as DuckDB takes names that differ only in case for equal.
    columns = {f"c{i}": name for i, name in enumerate(types)}
    read_as = {place: _READ_AS.get(types[name], types[name]) for place, name in columns.items()}
    how = {**options, "auto_detect": False, "columns": read_as, "store_rejects": True, "rejects_limit": 0}
    cells, tests = list[str](), dict[str, pl.Expr]()  # tests: of columns that must be read as another type
    for place, name in columns.items():
        text, column = f"nullif(trim({place}), '')", pl.col(place)
        match types[name]:
            case "ID":
                number = f"try_cast({text} AS BIGINT)"
                cells.append(f"{number} AS {place}, {text} IS DISTINCT FROM {number}::VARCHAR AS not_{place}")
                tests[place] = pl.col(f"not_{place}").any()
            case kind:
                cells.append(place)
                if kind == "BIGINT":  # floats beyond do not keep whole numbers exact
                    tests[place] = column.abs().max() > EXACT
                elif kind == "TIMESTAMP":  # earlier ones are other texts
                    tests[place] = column.min().dt.year() < 1000
    database = _database().cursor()  # which has the table of errors for itself
    with _reading(file, "", _REMEDY):
        rows = _query(database, "read_csv", file, how, f"SELECT {', '.join(cells)}")
        small = file.stat().st_size < _SMALL and packing_of(file) == "none"
        if small:
            frame = pl.DataFrame(rows).lazy()
        else:
            rows.write_parquet(str(target), row_group_size=_ROW_GROUP)
            frame = pl.scan_parquet(target, glob=False)
        # A wrong number of cells first: it explains those that do not fit.
        errors = database.execute(
            "SELECT line, column_name, error_type, error_message, csv_line FROM reject_errors "
            "ORDER BY line, error_type = 'CAST', column_idx"
        ).fetchall()
    found = frame.select(**tests).collect(engine="streaming").row(0, named=True) if tests else {}
    for place in (place for place, is_another in found.items() if is_another):
        misfits[columns[place]] = sys.maxsize
    rejected = dict[int, Rejected]()
    for line, place, kind, message, text in errors:
        name = columns.get(place, "")
        misfits[name] += kind == "CAST"
        why = message.partition("\n")[0].replace(f'"{place}"', repr(name))
        if (text or "x").strip():  # a line of blanks is no row
            row = Rejected(file=str(file), line=line, reason=why, text=(text or "")[:_SHOWN])
            rejected.setdefault(line, row)
    first = 1 + int(options["skip"]) + bool(options["header"])
    return Part(file, frame.select(*columns).rename(columns), first, small, [*rejected.values()])


def read_json(file: Path, target: Path) -> Part:
    """Read a file of JSON lines into a Parquet file. Raises UserError that names the first line that is no
    JSON."""
    database, how = _database().cursor(), {"format": "newline_delimited"}
    with _reading(file, " as JSON lines", _JSON_REMEDY):
        found = _query(database, "read_json", file, how | {"sample_size": -1})
        # Integers beyond 64 bits would become fractions in Parquet.
        types = [re.sub("U?HUGEINT", "VARCHAR", str(kind)) for kind in found.types]
        columns = dict(zip(found.columns, types, strict=True))
        _query(database, "read_json", file, how | {"columns": columns}).write_parquet(str(target))
    return Part(file, pl.scan_parquet(target, glob=False))


def encoding_of(file: Path, given: str) -> str:
    """Return the encoding of a text file, as `data.encoding` gives it or the file's mark does."""
    if given != "auto":
        return given
    with file.open("rb") as stream:
        return "utf-16" if stream.read(2) in (b"\xff\xfe", b"\xfe\xff") else "utf-8"


def packing_of(file: Path) -> str:
    """Return how a text file is packed: gzip or none."""
    with file.open("rb") as stream:
        return "gzip" if stream.read(2) == b"\x1f\x8b" else "none"


@cache
def _database() -> Any:
    """A database in memory, which loads nothing from the network. One for all files, as making it takes 40 ms
    of CPU time; `read_csv` closes it."""
    import duckdb

    return duckdb.connect(config={"autoinstall_known_extensions": False, "temp_directory": gettempdir()})


@contextmanager
def _reading(file: Path, what: str, remedy: str) -> Iterator[None]:
    """Raise UserError with the remedy if DuckDB cannot read a file in the block, OSError if the disk is
    full."""
    import duckdb

    try:
        yield
    except duckdb.Error as error:
        why, words = str(error).strip().partition("\n")[0], str(error).lower()
        if "write" in words and ("space" in words or "too large" in words):
            raise OSError(errno.ENOSPC, why, str(file)) from error
        if packing_of(file) == "gzip":
            remedy = f"if it is not a complete gzip file, compress it again; else {remedy}"
        raise UserError(f"data.path={file}: cannot be read{what}: {why}; {remedy}") from error


def _query(database: Any, call: str, file: Path, options: Mapping[str, Any], rest: str = "") -> Any:
    """Return what a table function of DuckDB reads from a file, as a relation. rest: of the query."""
    # Marked, so that DuckDB finds no pattern in the path.
    given = {**options, "compression": packing_of(file), "path": re.sub(r"([*?\[])", r"[\1]", str(file))}
    if "nullstr" in options:  # DuckDB refuses texts for no value that hold the separator
        given["nullstr"] = [text for text in options["nullstr"] if options.get("delim", "\0") not in text]
    arguments = ", ".join(["$path", *(f"{name} = ${name}" for name in given if name != "path")])
    return database.sql(f"FROM {call}({arguments}) {rest}", params=given)
