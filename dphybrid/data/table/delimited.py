"""Delimited text and JSON lines as typed files, read by DuckDB. It infers how a file is written and
the types of its columns from the first rows; all rows confirm them, or the column is read again as text."""

import errno
import gzip
import json
import re
import sys
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from itertools import chain, count
from pathlib import Path
from tempfile import gettempdir
from typing import Any, NotRequired, TypedDict

import numpy as np
import polars as pl
from polars.selectors import by_name  # takes names literally; select() reads `*` as a pattern

from dphybrid.config.tables import RowFiles
from dphybrid.data.batches import Array
from dphybrid.data.foreign import writing
from dphybrid.data.table.values import EXACT, NAMES_AN_ID, Form
from dphybrid.util.errors import UserError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

_SNIFFED = 20_480
"""Rows from which DuckDB infers how a file is written."""
_ROW_GROUP = 2**17
_SMALL = 2**26
"""With fewer bytes, the rows of a file are in memory at once."""
_HEAD = 2**20
"""Bytes that are looked at for the encoding and for quotes."""
_SHOWN = 500
"""How many characters of a rejected row are kept."""
_TYPES = ("BIGINT", "DOUBLE", "DATE", "TIMESTAMP", "TIMESTAMP WITH TIME ZONE")
"""Types that are taken from DuckDB. Other ones are text: it reads yes and no as flags, and writes integers
beyond 64 bits as fractions."""
_READ_AS = {"BIGINT": "DOUBLE", "DIGITS": "VARCHAR"}
"""As whole numbers, DuckDB would read 8.5 as 9. DIGITS: whole numbers that may be ids, as 007 is not 7."""
_WIDER = {("BIGINT", "DOUBLE"): "DOUBLE", ("DATE", "TIMESTAMP"): "TIMESTAMP", ("DIGITS", "DOUBLE"): "DIGITS"}
"""The type that holds the values of two others; any other pair is text."""
_REMEDY = "set data.encoding, data.delimiter, data.quote or data.header, or save it as CSV or Parquet"
_PACKINGS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}


class Rejected(TypedDict):
    """A row that cannot be read: its file and line, the reason, and the start of its text."""

    file: str
    line: int
    reason: str
    text: NotRequired[str]


@dataclass
class Part:
    """The rows of a file. first: the line of its first row. notes: how it is written, where that is unusual.
    forms: how texts of columns are written. header: whether the first line names the columns. index: columns
    that only number or name the rows."""

    file: Path
    frame: pl.LazyFrame
    first: int = 1
    rejected: list[Rejected] = field(default_factory=list)
    notes: Sequence[str] = ()
    forms: dict[str, Form] = field(default_factory=dict)
    header: bool = True
    index: Sequence[str] = ()

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
    """How a file is written. options: of DuckDB's read_csv. names, types: of its columns."""

    options: Mapping[str, Any]
    names: tuple[str, ...]
    types: tuple[str, ...]
    notes: tuple[str, ...]


def read_csv(
    files: Sequence[Path], targets: Sequence[Path], data: RowFiles, named: Sequence[str], as_text: bool
) -> list[Part]:
    """Read delimited files of one table into typed files. named: columns that the table must have, by which
    a header is known. as_text: cells are not typed, as an encoder types those of new files. Raises
    UserError."""
    dialects = [dialect_of(file, data, named, as_text) for file in files]
    types = _joined(dialects)
    while True:
        parts, misfits = list[Part](), Counter[str]()
        for file, target, dialect in zip(files, targets, dialects, strict=True):
            parts.append(_typed(file, target, dialect, types, misfits))
        # The first rows gave the types. They hold if nearly all other cells fit, too.
        most = data.max_rejected * sum(part.size + len(part.rejected) for part in parts)
        wrong = {name for name, cells in misfits.items() if cells > most}
        wrong |= {name for part in parts for name in _doubtful(part.frame, types)}
        if not wrong:
            break
        types |= {name: "DIGITS" if types[name] == "BIGINT" else "VARCHAR" for name in wrong}
    _database.cache_clear()  # its threads and 30 MB
    for part in parts:
        names = [name for name in part.frame.collect_schema() if types[name] == "DIGITS"]
        numbers = {name: dtype for name in names if (dtype := _type_of_digits(part.frame, name))}
        part.frame = part.frame.with_columns(by_name(name).cast(dtype) for name, dtype in numbers.items())
    return parts


def dialect_of(file: Path, data: RowFiles, named: Sequence[str], as_text: bool = False) -> Dialect:
    """Return how a file is written, and the types of its columns, by the first rows. Raises UserError."""
    stat = file.stat()
    with _reading(file, "", _REMEDY):
        return _sniff(file, (stat.st_size, stat.st_mtime_ns), data, tuple(named), as_text)


@lru_cache(maxsize=64)  # Commands check their data before they import torch, and soon prepare it.
def _sniff(
    file: Path, _stamp: tuple[int, int], data: RowFiles, named: tuple[str, ...], as_text: bool
) -> Dialect:
    head, database = head_of(file), _database().cursor()
    if not head.strip(b"\xef\xbb\xbf \t\r\n"):
        raise UserError(f"data.path={file}: is empty; give a file with rows")
    flags = {
        "delim": data.delimiter,
        "quote": "" if data.quote == "none" else data.quote,
        "header": {"yes": True, "no": False}.get(data.header, "auto"),
        "dateformat": data.dateformat or "auto",
        "timestampformat": data.dateformat or "auto",
    }
    fixed = {
        "compression": _packing_of(file),
        "encoding": _encoding_of(head, data.encoding),
        "hive_partitioning": False,
        "decimal_separator": data.decimal.replace("auto", "."),
        # Cells may have a blank before them.
        "nullstr": ["", *data.no_value, *(f" {text}" for text in data.no_value)],
        **{name: value for name, value in flags.items() if value != "auto"},
    }
    options, types = _sniffed(database, file, fixed)
    rows = _texts(database, file, options, len(types), 1 if as_text else _SNIFFED)
    first = [(text or "").strip().removeprefix("\ufeff") for text in rows.row(0)] if len(rows) else []
    header = options["header"] if data.header != "auto" else _is_header(first, options, named, as_text)
    if header != options["header"]:
        options, types = _sniffed(database, file, fixed | {"header": header})
    if data.quote == "auto" and not options["quote"] and b'"' not in head:
        options |= {"quote": '"', "escape": '"'}  # of which the first rows have none
    # With another separator than the comma, decimals may have one: if more columns are numbers then.
    if data.decimal == "auto" and not as_text and options["delim"] != "," and "VARCHAR" in types:
        with_commas = _sniffed(database, file, options | {"decimal_separator": ","})
        if with_commas[1].count("DOUBLE") > types.count("DOUBLE"):
            options, types = options | {"decimal_separator": ","}, with_commas[1]
    names = _names(file, first, named) if header else tuple(map(str, range(len(types))))
    notes = _unusual(options, names)
    if as_text:
        types = ["VARCHAR"] * len(types)
    else:
        notes += _words(rows.slice(header), types, names, data.no_value)
    # As ids, 007 and 7 differ, which only texts tell.
    of_ids = {name for name in names if NAMES_AN_ID.search(name)}
    types = ["DIGITS" if t == "BIGINT" and n in of_ids else t for n, t in zip(names, types, strict=True)]
    return Dialect(options, names, tuple(types), tuple(notes))


def _sniffed(database: Any, file: Path, given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the options with which DuckDB would read a file, and the types of its columns."""
    import duckdb

    given = {name: value for name, value in given.items() if name != "skip"}
    how = {**given, "ignore_errors": True, "sample_size": _SNIFFED}
    what = "Delimiter, Quote, Escape, SkipRows, HasHeader, Columns, DateFormat, TimestampFormat"
    try:
        (found,) = _query(database, "sniff_csv", file, how, f"SELECT {what}").fetchall()
    except duckdb.InvalidInputException:
        if "strict_mode" in given:
            raise
        # Such as line ends of two kinds.
        return _sniffed(database, file, {**given, "strict_mode": False})
    delimiter, quote, escape, skip, header, columns, dates, times = found
    quote, escape = ("" if sign in ("(empty)", "\0") else sign for sign in (quote, escape))
    options = {**given, "delim": delimiter, "quote": quote, "escape": escape, "skip": skip, "header": header}
    types = [column["type"] if column["type"] in _TYPES else "VARCHAR" for column in columns]
    for kind, option, form in (("DATE", "dateformat", dates), ("TIMESTAMP", "timestampformat", times)):
        if form and "%y" in form and option not in given:  # 05-09-21 may be three days
            types = ["VARCHAR" if one == kind else one for one in types]
        elif form:
            options[option] = form
    return options, types


def _texts(database: Any, file: Path, options: Mapping[str, Any], width: int, most: int) -> pl.DataFrame:
    """Return the first rows as texts, the header among them."""
    plain = {"nullstr": ["\x01\x02"], "auto_detect": False, "ignore_errors": True, "null_padding": True}
    plain |= {"header": False, "parallel": False, "columns": {f"c{i}": "VARCHAR" for i in range(width)}}
    return pl.DataFrame(_query(database, "read_csv", file, {**options, **plain}, f"LIMIT {most}"))


def _is_header(first: Sequence[str], found: Mapping[str, Any], named: Sequence[str], as_text: bool) -> bool:
    """Return whether a file's first row names the columns. found: how DuckDB reads the file. named: columns
    that the table must have; with `as_text` those of an earlier file, numbers if that had no header."""
    names = [name for name in named if not name.isdigit()]
    if names:
        return found["header"] or all(name in first for name in names)
    if as_text and named:
        return False
    # DuckDB takes the empty cell above the index of a frame for a missing number.
    above_index = len(first) > 1 and not first[0] and not any(re.match(r"[\d.-]|$", c) for c in first[1:])
    return found["header"] or above_index


def _names(file: Path, row: Sequence[str], named: Sequence[str]) -> tuple[str, ...]:
    """Return the names of columns in a header, different ones. Raises UserError if one that the user names
    occurs twice."""
    names = list[str]()
    for name in row:
        if name in names and name in named:
            raise UserError(f"data.path={file}: has two columns named {name!r}; rename one")
        choices = chain([name], (f"{name}_{number}" for number in count(1)))
        names.append(next(choice for choice in choices if choice not in names))
    return tuple(names)


def _unusual(options: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """Return notes on what a user may want to say otherwise of how a file is written."""
    notes = {
        f"encoding {options['encoding']}": options["encoding"] != "utf-8",
        f"columns are separated by {options['delim']!r}": options["delim"] not in (",", "\t"),
        "there is one column; --data.delimiter :: splits it": len(names) == 1 and "::" in names[0],
        f"{options['skip']} lines above the table are left out": options["skip"],
        "decimals are written with a comma; --data.decimal . overrides this": (
            options["decimal_separator"] == ","
        ),
        "there is no header: columns are named 0, 1, ...; --data.header yes overrides this": (
            not options["header"]
        ),
    }
    return [note for note, applies in notes.items() if applies]


def _words(
    rows: pl.DataFrame, types: Sequence[str], names: Sequence[str], no_value: Sequence[str]
) -> list[str]:
    """Return warnings about words that count as no value in columns of texts, such as the country NA. By
    the first rows, as DuckDB drops these words."""
    words = [word for word in no_value if word[:1].isalpha()]
    among = "" if len(rows) < _SNIFFED - 1 else f" in the first {_SNIFFED:,} rows"
    texts = {n: cells for n, kind, cells in zip(names, types, rows, strict=True) if kind == "VARCHAR"}
    counts = {name: cells.str.strip_chars().is_in(words).sum() for name, cells in texts.items()}
    return [
        f"{name}: {cells:,} cells such as NA{among} are read as missing; --data.missing '' keeps them"
        for name, cells in counts.items()
        if cells
    ]


def _joined(dialects: Sequence[Dialect]) -> dict[str, str]:
    """Return the types of the columns that files share: the wider one of two, else text."""
    types = dict[str, str]()
    for dialect in dialects:
        for name, kind in zip(dialect.names, dialect.types, strict=True):
            low, high = sorted((kind, types.get(name, kind)))
            types[name] = kind if low == high else _WIDER.get((low, high), "VARCHAR")
    return types


def _typed(
    file: Path, target: Path, dialect: Dialect, types: Mapping[str, str], misfits: Counter[str]
) -> Part:
    """Write the rows of a file as Arrow or Parquet. types: of its columns, by name. misfits: gets the number
    of cells by column that are not of its type."""
    options, kinds = dialect.options, [types[name] for name in dialect.names]
    # By number, as DuckDB takes names that differ only in case for equal.
    columns = {f"c{i}": _READ_AS.get(kind, kind) for i, kind in enumerate(kinds)}
    how = {**options, "auto_detect": False, "columns": columns, "store_rejects": True, "rejects_limit": 0}
    cells = ", ".join(f"nullif(trim({n}), '') AS {n}" if t == "VARCHAR" else n for n, t in columns.items())
    database = _database().cursor()  # which has the table of errors for itself
    with _reading(file, "", _REMEDY):
        rows = _query(database, "read_csv", file, how, f"SELECT {cells}")
        if file.stat().st_size < _SMALL and options["compression"] == "none":
            with writing(target):  # which takes a fifth less time in all
                pl.DataFrame(rows).write_ipc(target, compression="uncompressed")
            frame = pl.scan_ipc(target, glob=False)
        else:
            rows.write_parquet(str(target), row_group_size=_ROW_GROUP)
            frame = pl.scan_parquet(target, glob=False)
        # A wrong number of cells first: it explains those that do not fit.
        errors = database.execute(
            "SELECT line, column_name, error_type, error_message, csv_line FROM reject_errors "
            "ORDER BY line, error_type = 'CAST', column_idx"
        ).fetchall()
    names, rejected = dict(zip(columns, dialect.names, strict=True)), dict[int, Rejected]()
    for line, column, kind, message, text in errors:
        name = names.get(column, "")
        misfits[name] += kind == "CAST"
        why = message.partition("\n")[0].replace(f'"{column}"', repr(name))
        if numbers := re.fullmatch(r"Expected Number of Columns: (\d+) Found: (\d+)", why):
            # DuckDB counts on through the values that are too many.
            values = max(int(numbers[2]), (text or "").count(options["delim"]) + 1)
            why = f"{values} values, expected {numbers[1]}"
        elif "unicode" in why.lower():
            why = f"not {options['encoding'].upper()} text; set data.encoding, or save it as UTF-8"
        if (text or "x").strip():  # a line of blanks is no row
            row = Rejected(file=str(file), line=line, reason=why, text=(text or "")[:_SHOWN])
            rejected.setdefault(line, row)
    dates = {"DATE": options.get("dateformat"), "TIMESTAMP": options.get("timestampformat")}
    forms = {kind: Form(type="time", dates=dates) for kind, dates in dates.items() if dates}
    if options["decimal_separator"] == ",":
        forms |= dict.fromkeys(("BIGINT", "DOUBLE"), Form(type="number", comma=True))
    of_columns = {n: forms[kind] for n, kind in zip(dialect.names, kinds, strict=True) if kind in forms}
    header = bool(options["header"])
    first = 1 + int(options["skip"]) + header
    return Part(file, frame.rename(names), first, [*rejected.values()], dialect.notes, of_columns, header)


def _doubtful(frame: pl.LazyFrame, types: Mapping[str, str]) -> list[str]:
    """Return the columns of whole numbers that floats do not keep exact, and those of times before the year
    1000, which are other texts."""
    tests = []
    for name in frame.collect_schema():
        if types[name] == "BIGINT":
            tests.append(by_name(name).abs().max() > EXACT)
        elif types[name] in ("DATE", "TIMESTAMP"):
            tests.append(by_name(name).min().dt.year() < 1000)
    found = frame.select(tests).collect(engine="streaming").row(0, named=True) if tests else {}
    return [name for name, is_doubtful in found.items() if is_doubtful]


def _type_of_digits(frame: pl.LazyFrame, name: str) -> type[pl.DataType] | None:
    """Return the type of texts that are all numbers and written as numbers are; None for ids such as 007."""
    texts = by_name(name)
    no_int, no_float = (
        (texts.is_not_null() & texts.cast(dtype, strict=False).is_null()).any()
        for dtype in (pl.Int64, pl.Float64)
    )
    zeros, largest = texts.str.contains(r"^[+-]?0\d").any(), texts.cast(pl.Float64, strict=False).abs().max()
    found = frame.select(a=zeros | no_float, b=no_int, c=largest).collect(engine="streaming").row(0)
    if found[0]:
        return None
    if not found[1]:
        return pl.Int64
    return pl.Float64 if (found[2] or 0) <= EXACT else None


def read_json(file: Path, target: Path) -> Part:
    """Read a file of JSON lines into a Parquet file. Raises UserError that names the first line that is no
    JSON."""
    how: dict[str, Any] = {"format": "newline_delimited", "sample_size": -1, "compression": _packing_of(file)}
    remedy = "correct the line, or save the table as CSV or Parquet"
    with _reading(file, " as JSON lines", remedy):
        database = _database().cursor()
        found = _query(database, "read_json", file, how)
        # Integers beyond 64 bits would become fractions in Parquet.
        types = [re.sub("U?HUGEINT", "VARCHAR", str(kind)) for kind in found.types]
        how["columns"] = dict(zip(found.columns, types, strict=True))
        _query(database, "read_json", file, how).write_parquet(str(target))
    return Part(file, pl.scan_parquet(target, glob=False))


def json_names(file: Path) -> list[str]:
    """Return the names in the first line of a file of JSON lines; none if it is no JSON. Raises UserError for
    names that DuckDB cannot tell apart."""
    first, names = next((line for line in head_of(file).splitlines() if line.strip()), b""), dict[str, str]()
    try:
        keys = [*json.loads(first)]
    except ValueError:
        return []
    for name in keys:
        if (other := names.setdefault(name.lower(), name)) != name:
            raise UserError(f"data.path={file}: {other!r} and {name!r} differ only in case; rename one")
    return keys


def head_of(file: Path, size: int = _HEAD) -> bytes:
    """Return the first bytes of a text file, unpacked; all of them for size -1. Raises UserError if it cannot
    be unpacked."""
    opened: Any = {"none": Path.open, "gzip": gzip.open, "zstd": zstd.open}[_packing_of(file)]
    try:
        with opened(file, "rb") as stream:
            return bytes(stream.read(size))
    except (OSError, EOFError, zlib.error, zstd.ZstdError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise _unpackable(file, error) from error


def read_text(file: Path, encoding: str) -> str:
    """Return the whole text of a file. Raises UserError if it cannot be unpacked or decoded."""
    raw = head_of(file, -1)
    encoding = _encoding_of(raw, encoding)
    try:
        text = raw.decode("utf-8-sig" if encoding == "utf-8" else encoding)
        return text.replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise UserError(
            f"data.path={file}: is not {encoding.upper()} text (line {line}); set data.encoding=latin-1 or "
            "utf-16, or save it as UTF-8"
        ) from error


def _encoding_of(head: bytes, given: str) -> str:
    """Return the encoding of a text with these first bytes, as `data.encoding` gives it or its mark does."""
    if given != "auto":
        return given
    return "utf-16" if head[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8"


def _packing_of(file: Path) -> str:
    """Return how a text file is packed: gzip, zstd or none."""
    with file.open("rb") as stream:
        head = stream.read(4)
    return next((name for sign, name in _PACKINGS.items() if head.startswith(sign)), "none")


def _unpackable(file: Path, why: object) -> UserError:
    return UserError(
        f"data.path={file}: is not a complete {_packing_of(file)} file: {why}; compress it again, or give it "
        "uncompressed"
    )


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
        if _packing_of(file) != "none" and re.search("gzip|zstd|compress|decode|miniz", words):
            raise _unpackable(file, why) from error
        raise UserError(f"data.path={file}: cannot be read{what}: {why}; {remedy}") from error


def _query(database: Any, call: str, file: Path, options: Mapping[str, Any], rest: str = "") -> Any:
    """Return what a table function of DuckDB reads from a file, as a relation. rest: of the query."""
    # Marked, so that DuckDB finds no pattern in the path.
    given = {**options, "path": re.sub(r"([*?\[])", r"[\1]", str(file))}
    if "nullstr" in options:  # DuckDB refuses texts for no value that hold the separator
        given["nullstr"] = [text for text in options["nullstr"] if options.get("delim", "\0") not in text]
    arguments = ", ".join(["$path", *(f"{name} = ${name}" for name in options)])
    return database.sql(f"FROM {call}({arguments}) {rest}", params=given)
