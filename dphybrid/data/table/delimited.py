"""Delimited text and JSON lines as typed Parquet files, read by DuckDB. It infers how a file is written and
the types of its columns from the first rows; all rows confirm them, or the column is read again as text."""

import errno
import gzip
import json
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain, count
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import polars as pl

from dphybrid.config.tables import RowFiles
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
_WIDER = {
    ("BIGINT", "DOUBLE"): "DOUBLE",
    ("DATE", "TIMESTAMP"): "TIMESTAMP",
    ("DOUBLE", "WHOLE"): "WHOLE",
}
"""The type that holds the values of two others; any other pair is text."""
_TYPES = ("BIGINT", "DOUBLE", "DATE", "TIMESTAMP", "TIMESTAMP WITH TIME ZONE")
"""Types that are taken from DuckDB. Other ones are text: it reads yes and no as flags, and writes integers
beyond 64 bits as fractions."""
_PACKED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
_AS_TEXTS = {"nullstr": "\x01\x02", "auto_detect": False, "ignore_errors": True, "null_padding": True}
"""Options with which every cell is a text."""


@dataclass
class Part:
    """The rows of a file. first: the line of its first row. bad: line, reason and text of the lines that
    cannot be read."""

    frame: pl.LazyFrame
    size: int
    first: int = 1
    bad: list[tuple[int, str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    forms: dict[str, Form] = field(default_factory=dict)
    header: bool = True


@dataclass(frozen=True)
class Dialect:
    """How a file is written. options: of DuckDB's read_csv. names, types: of its columns."""

    options: Mapping[str, Any]
    names: tuple[str, ...]
    types: tuple[str, ...]
    notes: tuple[str, ...] = ()


def _connect() -> Any:
    """Return a connection to a database in memory, which loads nothing from the network."""
    import duckdb

    return duckdb.connect(config={"autoinstall_known_extensions": False, "temp_directory": gettempdir()})


def _packing_of(file: Path) -> str:
    """Return how a text file is packed: gzip, zstd or none."""
    with file.open("rb") as stream:
        head = stream.read(4)
    return next((name for sign, name in _PACKED.items() if head.startswith(sign)), "none")


def head_of(file: Path, size: int = _HEAD) -> bytes:
    """Return the first bytes of a text file, unpacked; all of them for size -1. Raises UserError if it cannot
    be unpacked."""
    opened: Any = {"none": Path.open, "gzip": gzip.open, "zstd": zstd.open}[_packing_of(file)]
    try:
        with opened(file, "rb") as stream:
            return bytes(stream.read(size))
    except (OSError, EOFError, zstd.ZstdError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise _unpackable(file, error) from error


def _unpackable(file: Path, error: object) -> UserError:
    return UserError(
        f"data.path={file}: is not a complete {_packing_of(file)} file: {error}; compress it again, or "
        "give it uncompressed"
    )


def _encoding_of(head: bytes, given: str) -> str:
    """Return the encoding of a text with these first bytes, as `data.encoding` gives it or its mark does."""
    if given != "auto":
        return given
    return "utf-16" if head[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8"


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


def read_csv(
    files: Sequence[Path], data: RowFiles, scratch: Path, named: Sequence[str], as_text: bool
) -> list[Part]:
    """Read delimited files of one table. named: columns that the table must have, by which a header is known.
    as_text: cells are not typed, as an encoder types those of new files. Raises UserError."""
    import duckdb

    dialects = [dialect_of(file, data, named, as_text) for file in files]
    types, file = _joined(dialects), files[0]
    try:
        with _connect() as connection:
            while True:
                parts, misfits = list[Part](), dict[str, int]()
                for number, (file, dialect) in enumerate(zip(files, dialects, strict=True)):
                    target = scratch / f"rows-{number:05d}.parquet"
                    own = replace(dialect, types=tuple(types[name] for name in dialect.names))
                    parts.append(_copied(connection, file, target, own, misfits))
                # The first rows gave the types. They hold if nearly all other cells fit, too.
                num_rows = sum(part.size + len(part.bad) for part in parts)
                wrong = {name for name, cells in misfits.items() if cells > data.max_rejected * num_rows}
                wrong |= {name for part in parts for name in _doubtful(part.frame, types)}
                if not wrong:
                    for part, dialect in zip(parts, dialects, strict=True):
                        _settle(part, dialect, types)
                    return parts
                types |= {name: "WHOLE" if types[name] == "BIGINT" else "VARCHAR" for name in wrong}
    except duckdb.Error as error:
        raise _unreadable(file, data, error) from error


def _unreadable(file: Path, data: RowFiles, error: Exception) -> Exception:
    why = str(error).strip()
    if "write" in why.lower() and ("space" in why.lower() or "too large" in why.lower()):
        return OSError(errno.ENOSPC, why, str(file))
    if "utf-8" in why.lower() or "unicode" in why.lower():
        return UserError(
            f"data.path={file}: is not {_encoding_of(head_of(file), data.encoding).upper()} text; set "
            "data.encoding, such as latin-1 or utf-16, or save it as UTF-8"
        )
    if _packing_of(file) != "none" and re.search(r"gzip|zstd|compress|decode|miniz", why, re.IGNORECASE):
        return _unpackable(file, why.split("\n")[0])
    return UserError(
        f"data.path={file}: cannot be read: {why.split(chr(10))[0]}; set data.delimiter, data.quote or "
        "data.header, or save it as CSV or Parquet"
    )


def dialect_of(file: Path, data: RowFiles, named: Sequence[str], as_text: bool = False) -> Dialect:
    """Return how a file is written, and the types of its columns, by the first rows. Raises UserError."""
    import duckdb

    stat = file.stat()
    try:
        # Commands check their data before they import torch, and soon prepare it.
        return _sniff(file, (stat.st_size, stat.st_mtime_ns), data, tuple(named), as_text)
    except duckdb.Error as error:
        raise _unreadable(file, data, error) from error


@lru_cache(maxsize=64)
def _sniff(
    file: Path, _stamp: tuple[int, int], data: RowFiles, named: tuple[str, ...], as_text: bool
) -> Dialect:
    head = head_of(file)
    if not head.strip(b"\xef\xbb\xbf \t\r\n"):
        raise UserError(f"data.path={file}: is empty; give a file with rows")
    given: dict[str, Any] = {
        "compression": _packing_of(file),
        "encoding": _encoding_of(head, data.encoding),
        "hive_partitioning": False,
        "decimal_separator": "." if data.decimal == "auto" else data.decimal,
        # Cells may have a blank before them.
        "nullstr": ["", *data.no_value, *(f" {text}" for text in data.no_value)],
    }
    if data.delimiter != "auto":
        given["delim"] = data.delimiter
    if data.quote != "auto":
        given["quote"] = "" if data.quote == "none" else data.quote
    if data.dateformat:
        given |= {"dateformat": data.dateformat, "timestampformat": data.dateformat}
    if data.header != "auto":
        given["header"] = data.header == "yes"
    with _connect() as connection:
        found, columns = _sniffed(connection, file, given)
        rows = _texts(connection, file, found, len(columns), 1 if as_text else _SNIFFED)
        first = [(text or "").strip().removeprefix("\ufeff") for text in rows.row(0)] if len(rows) else []
        is_header = data.header == "yes" or (
            data.header == "auto" and _is_header(first, bool(found["header"]), named, as_text)
        )
        if is_header != found["header"]:
            found, columns = _sniffed(connection, file, given | {"header": is_header})
        if data.quote == "auto" and not found["quote"] and b'"' not in head:
            found |= {"quote": '"', "escape": '"'}  # of which the first rows have none
        # With another separator than the comma, decimals may have one: if more columns are numbers then.
        if data.decimal == "auto" and not as_text and found["delim"] != "," and "VARCHAR" in columns:
            other = _sniffed(connection, file, {**given, **found, "decimal_separator": ","})
            if other[1].count("DOUBLE") > columns.count("DOUBLE"):
                found, columns = {**found, "decimal_separator": ","}, other[1]
    names = _names(file, first, named) if is_header else tuple(map(str, range(len(columns))))
    # As ids, 007 and 7 differ, which only texts tell.
    types = [
        "WHOLE" if kind == "BIGINT" and NAMES_AN_ID.search(name) else kind
        for name, kind in zip(names, columns, strict=True)
    ]
    notes = _unusual(found, names)
    if as_text:
        types = ["VARCHAR"] * len(types)
    else:
        texts = [place for place, kind in enumerate(types) if kind == "VARCHAR"]
        notes += _words(rows.slice(is_header), texts, names, data.no_value)
    return Dialect(found, names, tuple(types), tuple(notes))


def _sniffed(connection: Any, file: Path, given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the options with which DuckDB would read a file, and the types of its columns."""
    import duckdb

    given = {name: value for name, value in given.items() if name not in ("skip", "new_line")}
    # DuckDB refuses texts for no value that hold the separator.
    given["nullstr"] = [text for text in given["nullstr"] if given.get("delim", "\0") not in text]
    arguments = _arguments({**given, "ignore_errors": True, "sample_size": _SNIFFED})
    what = "Delimiter, Quote, Escape, SkipRows, HasHeader, Columns, DateFormat, TimestampFormat"
    try:
        found = connection.execute(f"SELECT {what} FROM sniff_csv({_path(file)}, {arguments})").fetchone()  # noqa: S608 - values are quoted
    except duckdb.InvalidInputException:
        if "strict_mode" in given:
            raise
        # Such as line ends of two kinds.
        return _sniffed(connection, file, {**given, "strict_mode": False})
    delimiter, quote, escape, skip, header, columns, dates, times = found
    quote, escape = ("" if sign in ("(empty)", "\0") else sign for sign in (quote, escape))
    options = {**given, "delim": delimiter, "quote": quote, "escape": escape, "skip": skip, "header": header}
    options["nullstr"] = [text for text in given["nullstr"] if delimiter not in text]
    types = [column["type"] if column["type"] in _TYPES else "VARCHAR" for column in columns]
    for kind, option, form in (("DATE", "dateformat", dates), ("TIMESTAMP", "timestampformat", times)):
        if form and "%y" in form and option not in given:  # 05-09-21 may be three days
            types = ["VARCHAR" if found == kind else found for found in types]
        elif form:
            options[option] = form
    return options, types


def _texts(connection: Any, file: Path, options: Mapping[str, Any], width: int, most: int) -> pl.DataFrame:
    """Return the first rows as texts, the header among them."""
    columns = {f"c{i}": "VARCHAR" for i in range(width)}
    arguments = _arguments({**options, **_AS_TEXTS, "header": False, "parallel": False, "columns": columns})
    query = f"SELECT * FROM read_csv({_path(file)}, {arguments}) LIMIT {most}"  # noqa: S608 - values are quoted
    return pl.DataFrame(connection.cursor().sql(query))


def _words(
    rows: pl.DataFrame, texts: Sequence[int], names: Sequence[str], no_value: Sequence[str]
) -> list[str]:
    """Return warnings about words that count as no value in columns of texts, such as the country NA. By
    the first rows, as DuckDB drops these words."""
    words = [word for word in no_value if word[:1].isalpha()]
    among = "" if len(rows) < _SNIFFED - 1 else f" in the first {_SNIFFED:,} rows"
    counts = {names[place]: rows.to_series(place).str.strip_chars().is_in(words).sum() for place in texts}
    return [
        f"{name}: {cells:,} cells such as NA{among} are read as missing; --data.missing '' keeps them"
        for name, cells in counts.items()
        if cells
    ]


def _is_header(row: Sequence[str], found: bool, named: Sequence[str], known: bool) -> bool:
    """Return whether a file's first row names the columns. found: what DuckDB says. known: `named` are the
    columns of an earlier file, which are numbers if that had no header."""
    names = [name for name in named if not name.isdigit()]
    if names:
        return found or all(name in row for name in names)
    if known and named:
        return False
    # DuckDB takes the empty cell above the index of a frame for a missing number.
    above_index = row[:1] == [""] and not any(re.match(r"[\d.-]|$", c) for c in row[1:])
    return found or (above_index and len(row) > 1)


def _names(file: Path, row: Sequence[str], named: Sequence[str]) -> tuple[str, ...]:
    """Return the names of columns in a header, different ones. Raises UserError if one that the user names
    occurs twice."""
    found = list[str]()
    for name in row:
        if name in found and name in named:
            raise UserError(f"data.path={file}: has two columns named {name!r}; rename one")
        choices = chain([name], (f"{name}_{number}" for number in count(1)))
        found.append(next(choice for choice in choices if choice not in found))
    return tuple(found)


def _unusual(options: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    notes = []
    if options["encoding"] != "utf-8":
        notes.append(f"encoding {options['encoding']}")
    if options["delim"] not in (",", "\t"):
        notes.append(f"columns are separated by {options['delim']!r}")
    if len(names) == 1 and "::" in names[0]:
        notes.append("there is one column; --data.delimiter :: splits it")
    if options["skip"]:
        notes.append(f"{options['skip']} lines above the table are left out")
    if options["decimal_separator"] == ",":
        notes.append("decimals are written with a comma; --data.decimal . overrides this")
    if not options["header"]:
        notes.append("there is no header: columns are named 0, 1, ...; --data.header yes overrides this")
    return notes


def _joined(dialects: Sequence[Dialect]) -> dict[str, str]:
    """Return the types of the columns that files share: the wider one of two, else text."""
    types = dict[str, str]()
    for dialect in dialects:
        for name, kind in zip(dialect.names, dialect.types, strict=True):
            before = types.setdefault(name, kind)
            if kind != before:
                low, high = sorted((kind, before))
                types[name] = _WIDER.get((low, high), "VARCHAR")
    return types


def _copied(connection: Any, file: Path, target: Path, dialect: Dialect, misfits: dict[str, int]) -> Part:
    """Write the rows of a file with these types as Parquet. misfits: gets the number of cells by column that
    are not of its type."""
    # By number, as DuckDB takes names that differ only in case for equal. As whole numbers, it would read 8.5
    # as 9.
    read_as = {"BIGINT": "DOUBLE", "WHOLE": "VARCHAR"}
    columns = {f"c{i}": read_as.get(kind, kind) for i, kind in enumerate(dialect.types)}
    more = {"auto_detect": False, "columns": columns, "store_rejects": True, "rejects_limit": 0}
    cells = ", ".join(f"nullif(trim({n}), '') AS {n}" if t == "VARCHAR" else n for n, t in columns.items())
    query = f"SELECT {cells} FROM read_csv({_path(file)}, {_arguments({**dialect.options, **more})})"  # noqa: S608 - values are quoted
    if file.stat().st_size < _SMALL and dialect.options["compression"] == "none":
        # In memory once, as writing Parquet takes as much time as reading.
        target = target.with_suffix(".arrow")
        frame = pl.DataFrame(connection.sql(query))
        with writing(target):
            frame.write_ipc(target, compression="uncompressed")
        rows = pl.scan_ipc(target, glob=False)
    else:
        form = f"FORMAT parquet, ROW_GROUP_SIZE {_ROW_GROUP}"
        connection.execute(f"COPY ({query}) TO {_sql(str(target))} ({form})")
        rows = pl.scan_parquet(target, glob=False)
    # A wrong number of cells first: it explains those that do not fit.
    errors = connection.execute(
        "SELECT line, column_name, error_type, error_message, csv_line FROM reject_errors "
        "ORDER BY line, error_type = 'CAST', column_idx"
    ).fetchall()
    connection.execute("DROP TABLE reject_errors; DROP TABLE reject_scans")
    names, bad = dict(zip(columns, dialect.names, strict=True)), dict[int, tuple[int, str, str]]()
    for line, column, kind, message, text in errors:
        if kind == "CAST":
            name = names.get(column, "")
            misfits[name] = misfits.get(name, 0) + 1
        why = message.split("\n")[0].replace(f'"{column}"', repr(names.get(column, "")))
        if not (text or "x").strip():
            continue  # a line of blanks
        if numbers := re.fullmatch(r"Expected Number of Columns: (\d+) Found: (\d+)", why):
            # DuckDB counts on through the values that are too many.
            found = max(int(numbers[2]), (text or "").count(dialect.options["delim"]) + 1)
            why = f"{found} values, expected {numbers[1]}"
        if "unicode" in why.lower():
            why = f"not {dialect.options['encoding'].upper()} text; set data.encoding, or save it as UTF-8"
        bad.setdefault(line, (line, why, (text or "")[:_SHOWN]))
    size, header = int(rows.select(pl.len()).collect().item()), bool(dialect.options["header"])
    first = 1 + int(dialect.options["skip"]) + header
    return Part(rows.rename(names), size, first, [*bad.values()], list(dialect.notes), {}, header)


def _doubtful(frame: pl.LazyFrame, types: Mapping[str, str]) -> list[str]:
    """Return the columns of whole numbers that floats do not keep exact, and those of times before the year
    1000, which are other texts."""
    tests = {}
    for place, name in enumerate(frame.collect_schema()):
        if types[name] == "BIGINT":
            tests[name] = pl.nth(place).abs().max() > EXACT
        elif types[name] in ("DATE", "TIMESTAMP"):
            tests[name] = pl.nth(place).min().dt.year() < 1000
    if not tests:
        return []
    found = frame.select(test.alias(str(place)) for place, test in enumerate(tests.values()))
    row = found.collect(engine="streaming").row(0)
    return [name for name, is_doubtful in zip(tests, row, strict=True) if is_doubtful]


def _settle(part: Part, dialect: Dialect, types: Mapping[str, str]) -> None:
    """Note how the columns of a file are written, and make whole numbers of ids in digits."""
    options = dialect.options
    dates = {"DATE": options.get("dateformat", ""), "TIMESTAMP": options.get("timestampformat", "")}
    for place, name in enumerate(dialect.names):
        kind = types[name]
        if kind in ("BIGINT", "DOUBLE") and options["decimal_separator"] == ",":
            part.forms[name] = Form(type="number", comma=True)
        elif dates.get(kind):
            part.forms[name] = Form(type="time", dates=dates[kind])
        elif kind == "WHOLE" and (dtype := _type_of_digits(part.frame.select(pl.nth(place)))) is not None:
            part.frame = part.frame.with_columns(pl.nth(place).cast(dtype))


def _type_of_digits(column: pl.LazyFrame) -> type[pl.DataType] | None:
    """Return the type of texts that are all numbers and written as numbers are; None for ids such as 007."""
    texts = pl.nth(0)
    zeros = texts.str.contains(r"^[+-]?0\d").any()
    values = [texts.cast(dtype, strict=False) for dtype in (pl.Int64, pl.Float64)]
    no_int, no_float = ((texts.is_not_null() & value.is_null()).any() for value in values)
    largest = texts.cast(pl.Float64, strict=False).abs().max()
    found = column.select(a=zeros, b=no_int, c=no_float, d=largest).collect(engine="streaming").row(0)
    if found[0] or found[2]:
        return None
    if not found[1]:
        return pl.Int64
    return pl.Float64 if (found[3] or 0) <= EXACT else None


def read_json(files: Sequence[Path], scratch: Path) -> list[Part]:
    """Read files of JSON lines. Raises UserError that names the first line that is no JSON."""
    import duckdb

    parts = []
    with _connect() as connection:
        for number, file in enumerate(files):
            source = {"format": "newline_delimited", "sample_size": -1, "compression": _packing_of(file)}
            scan = f"read_json({_path(file)}, {_arguments(source)})"
            target = scratch / f"rows-{number:05d}.parquet"
            try:
                found = connection.execute(f"DESCRIBE SELECT * FROM {scan}").fetchall()  # noqa: S608 - values are quoted
                # Integers beyond 64 bits would become fractions in Parquet.
                columns = {name: re.sub("U?HUGEINT", "VARCHAR", kind) for name, kind, *_ in found}
                scan = f"read_json({_path(file)}, {_arguments({**source, 'columns': columns})})"
                connection.execute(f"COPY (SELECT * FROM {scan}) TO {_sql(str(target))} (FORMAT parquet)")  # noqa: S608 - values are quoted
            except duckdb.Error as error:
                why = str(error).strip().split("\n")[0]
                raise UserError(
                    f"data.path={file}: cannot be read as JSON lines: {why}; correct the line, or save "
                    "the table as CSV or Parquet"
                ) from error
            frame = pl.scan_parquet(target, glob=False)
            parts.append(Part(frame, int(frame.select(pl.len()).collect().item())))
    return parts


def json_names(file: Path) -> list[str]:
    """Return the names in the first line of a file of JSON lines; none if it is no JSON."""
    first = next((line for line in head_of(file).splitlines() if line.strip()), b"")
    with suppress(ValueError):
        return list(json.loads(first))
    return []


def _path(file: Path) -> str:
    """Return a path in SQL, in which DuckDB finds no pattern."""
    return _sql(re.sub(r"([*?\[])", r"[\1]", str(file)))


def _arguments(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {_sql(value)}" for name, value in values.items())


def _sql(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case str():
            return "'{}'".format(value.replace("'", "''"))
        case list() | tuple():
            return f"[{', '.join(map(_sql, value))}]"
        case dict():
            return "{{{}}}".format(", ".join(f"{_sql(k)}: {_sql(v)}" for k, v in value.items()))
        case _:
            return str(value)
