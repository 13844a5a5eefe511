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
from pathlib import Path
from tempfile import gettempdir
from typing import IO, Any, cast

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

    @property
    def header(self) -> bool:
        return bool(self.options["header"])


def _connect() -> Any:
    """Return a connection to a database in memory, which loads nothing from the network."""
    import duckdb

    return duckdb.connect(config={"autoinstall_known_extensions": False, "temp_directory": gettempdir()})


def packing_of(file: Path) -> str:
    """Return how a text file is packed: gzip, zstd or none."""
    with file.open("rb") as stream:
        head = stream.read(4)
    return next((name for sign, name in _PACKED.items() if head.startswith(sign)), "none")


def open_text(file: Path) -> IO[bytes]:
    """Open a text file, unpacked."""
    packing = packing_of(file)
    if packing == "none":
        return file.open("rb")
    return cast(IO[bytes], gzip.open(file) if packing == "gzip" else zstd.open(file))


def head_of(file: Path) -> bytes:
    """Return the first bytes of a text file, unpacked. Raises UserError if it cannot be unpacked."""
    try:
        with open_text(file) as stream:
            return stream.read(_HEAD)
    except (OSError, EOFError, zstd.ZstdError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise _unpackable(file, error) from error


def _unpackable(file: Path, error: object) -> UserError:
    return UserError(
        f"data.path={file}: is not a complete {packing_of(file)} file: {error}; compress it again, or "
        "give it uncompressed"
    )


def encoding_of(head: bytes, data: Any) -> str:
    """Return the encoding of a text with these first bytes, as `data.encoding` says or its mark does."""
    if data.encoding != "auto":
        return str(data.encoding)
    return "utf-16" if head[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8"


def read_text(file: Path, encoding: str) -> str:
    """Return the whole text of a file. Raises UserError if it cannot be unpacked or decoded."""
    try:
        with open_text(file) as stream:
            raw = stream.read()
        known = encoding
        if encoding == "auto":
            known = "utf-16" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
        return raw.decode(known).replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise UserError(
            f"data.path={file}: is not {known.removesuffix('-sig').upper()} text (line {line}); set "
            "data.encoding=latin-1 or utf-16, or save it as UTF-8"
        ) from error
    except (OSError, EOFError, zstd.ZstdError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise _unpackable(file, error) from error


def read_csv(
    files: Sequence[Path], data: RowFiles, scratch: Path, named: Sequence[str], as_text: bool
) -> list[Part]:
    """Read delimited files of one table. named: columns that the table must have, by which a header is known.
    as_text: cells are not typed, as an encoder types those of new files. Raises UserError."""
    import duckdb

    file = files[0]
    try:
        with _connect() as connection:
            dialects = [dialect_of(file, data, named, as_text) for file in files]
            types = _joined(dialects)
            while True:
                parts, misfits = list[Part](), dict[str, int]()
                for number, (file, dialect) in enumerate(zip(files, dialects, strict=True)):
                    own = replace(dialect, types=tuple(types[name] for name in dialect.names))
                    target = scratch / f"rows-{number:05d}.parquet"
                    parts.append(_copied(connection, file, target, own, misfits))
                # The first rows gave the types. They hold if nearly all other cells fit, too.
                num_rows = sum(part.size + len(part.bad) for part in parts)
                wrong = {name for name, count in misfits.items() if count > data.max_rejected * num_rows}
                wrong |= {name for part in parts for name in _doubtful(part.frame, types)}
                if not wrong:
                    return [_settled(p, d, types) for p, d in zip(parts, dialects, strict=True)]
                types |= {name: "WHOLE" if types[name] == "BIGINT" else "VARCHAR" for name in wrong}
    except duckdb.Error as error:
        raise _unreadable(file, data, error) from error


def _unreadable(file: Path, data: RowFiles, error: Exception) -> Exception:
    why = str(error).strip()
    if "write" in why.lower() and ("space" in why.lower() or "too large" in why.lower()):
        return OSError(errno.ENOSPC, why, str(file))
    if "utf-8" in why.lower() or "unicode" in why.lower():
        return UserError(
            f"data.path={file}: is not {encoding_of(head_of(file), data).upper()} text; set data.encoding, "
            "such as latin-1 or utf-16, or save it as UTF-8"
        )
    if packing_of(file) != "none" and re.search(r"gzip|zstd|compress|decode|miniz", why, re.IGNORECASE):
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
        return _dialect(file, (stat.st_size, stat.st_mtime_ns), data, tuple(named), as_text)
    except duckdb.Error as error:
        raise _unreadable(file, data, error) from error


@lru_cache(maxsize=64)
def _dialect(
    file: Path, _stamp: tuple[int, int], data: RowFiles, named: tuple[str, ...], as_text: bool
) -> Dialect:
    with _connect() as connection:
        return _sniff(connection, file, data, named, as_text)


def _sniff(connection: Any, file: Path, data: RowFiles, named: Sequence[str], as_text: bool) -> Dialect:
    """Return how a file is written, and the types of its columns by the first rows."""
    head = head_of(file)
    encoding = encoding_of(head, data)
    if not head.strip(b"\xef\xbb\xbf \t\r\n"):
        raise UserError(f"data.path={file}: is empty; give a file with rows")
    given: dict[str, Any] = {
        "compression": packing_of(file),
        "encoding": encoding,
        "hive_partitioning": False,
    }
    if data.delimiter != "auto":
        given["delim"] = data.delimiter
    if data.quote != "auto":
        given["quote"] = "" if data.quote == "none" else data.quote
    if data.dateformat:
        given |= {"dateformat": data.dateformat, "timestampformat": data.dateformat}
    if data.header != "auto":
        given["header"] = data.header == "yes"
    # Cells may have a blank before them.
    given["nullstr"] = ["", *data.no_value, *(f" {text}" for text in data.no_value)]
    mark = "." if data.decimal == "auto" else data.decimal
    found, columns = _sniffed(connection, file, given | {"decimal_separator": mark})
    raw = _first_row(connection, file, found, len(columns))
    if "header" not in given and _is_header(raw, bool(found["header"]), named, as_text) != found["header"]:
        given["header"] = not found["header"]
        found, columns = _sniffed(connection, file, given | {"decimal_separator": mark})
    if data.quote == "auto" and not found["quote"] and b'"' not in head:
        found |= {"quote": '"', "escape": '"'}  # of which the first rows have none
    # With another separator than the comma, decimals may have one: if more columns are numbers then.
    if data.decimal == "auto" and not as_text and found["delim"] != "," and "VARCHAR" in columns:
        other = _sniffed(connection, file, {**given, **found, "decimal_separator": ","})
        if other[1].count("DOUBLE") > columns.count("DOUBLE"):
            found, columns = {**found, "decimal_separator": ","}, other[1]
    names = _names(file, raw, named) if found["header"] else tuple(map(str, range(len(columns))))
    if as_text:
        columns = ["VARCHAR"] * len(columns)
    # As ids, 007 and 7 differ, which only texts tell.
    columns = [
        "WHOLE" if kind == "BIGINT" and NAMES_AN_ID.search(name) else kind
        for name, kind in zip(names, columns, strict=True)
    ]
    notes = _unusual(found, names)
    notes += [] if as_text else _words(connection, file, found, names, columns, data)
    return Dialect(found, names, tuple(columns), tuple(notes))


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
    options = dict(given) | {"delim": delimiter, "quote": _sign(quote), "escape": _sign(escape)}
    options |= {"skip": skip, "header": header}
    options["nullstr"] = [text for text in given["nullstr"] if delimiter not in text]
    types = [column["type"] if column["type"] in _TYPES else "VARCHAR" for column in columns]
    for kind, option, form in (("DATE", "dateformat", dates), ("TIMESTAMP", "timestampformat", times)):
        if form and "%y" in form and option not in given:  # 05-09-21 may be three days
            types = ["VARCHAR" if found == kind else found for found in types]
        elif form:
            options[option] = form
    return options, types


def _first_row(connection: Any, file: Path, options: Mapping[str, Any], width: int) -> list[str]:
    """Return the cells of the first row, which may be the header."""
    columns = {f"c{i}": "VARCHAR" for i in range(width)}
    more = {"header": False, "nullstr": "\x01\x02", "auto_detect": False, "ignore_errors": True}
    more |= {"null_padding": True, "parallel": False, "columns": columns}
    arguments = _arguments({**options, **more})
    row = connection.execute(f"SELECT * FROM read_csv({_path(file)}, {arguments}) LIMIT 1").fetchone()  # noqa: S608 - values are quoted
    return [(text or "").strip().removeprefix("\ufeff") for text in row or [""] * width]


def _words(
    connection: Any,
    file: Path,
    options: Mapping[str, Any],
    names: Sequence[str],
    types: Sequence[str],
    data: RowFiles,
) -> list[str]:
    """Return what is to say of words that count as no value in columns of texts, such as the country NA. By
    the first rows, as DuckDB drops these words."""
    words = [word for word in data.no_value if word[:1].isalpha()]
    texts = [place for place, kind in enumerate(types) if kind == "VARCHAR"]
    if not (words and texts):
        return []
    columns = {f"c{place}": "VARCHAR" for place in range(len(types))}
    more = {"nullstr": "\x01\x02", "auto_detect": False, "ignore_errors": True, "columns": columns}
    scan = f"SELECT * FROM read_csv({_path(file)}, {_arguments({**options, **more})}) LIMIT {_SNIFFED}"  # noqa: S608 - values are quoted
    counts = ", ".join(f"count_if(trim(c{place}) IN ({', '.join(map(_sql, words))}))" for place in texts)
    found = connection.execute(f"SELECT {counts}, count(*) FROM ({scan})").fetchone()  # noqa: S608 - values are quoted
    among = "" if found[-1] < _SNIFFED else f" in the first {_SNIFFED:,} rows"
    return [
        f"{names[place]}: {count:,} cells such as NA{among} are read as missing; --data.missing '' keeps them"
        for place, count in zip(texts, found[:-1], strict=True)
        if count
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
        number = 1
        unique = name
        while unique in found:
            unique, number = f"{name}_{number}", number + 1
        found.append(unique)
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
    texts = [name for name, kind in columns.items() if kind == "VARCHAR"]
    more = {"auto_detect": False, "columns": columns, "store_rejects": True, "rejects_limit": 0}
    cells = ", ".join(f"nullif(trim({n}), '') AS {n}" if n in texts else n for n in columns)
    query = f"SELECT {cells} FROM read_csv({_path(file)}, {_arguments({**dialect.options, **more})})"  # noqa: S608 - values are quoted
    if file.stat().st_size < _SMALL and dialect.options["compression"] == "none":
        # In memory once, as writing Parquet takes as much time as reading.
        target = target.with_suffix(".arrow")
        frame = pl.DataFrame(connection.sql(query))
        with writing(target):
            frame.write_ipc(target, compression="uncompressed")
    else:
        form = f"FORMAT parquet, ROW_GROUP_SIZE {_ROW_GROUP}"
        connection.execute(f"COPY ({query}) TO {_sql(str(target))} ({form})")
    numbered = dict(zip(columns, dialect.names, strict=True))
    # A wrong number of cells first: it explains those that do not fit.
    errors = connection.execute(
        "SELECT line, column_name, error_type, error_message, csv_line FROM reject_errors "
        "ORDER BY line, error_type = 'CAST', column_idx"
    ).fetchall()
    connection.execute("DROP TABLE reject_errors; DROP TABLE reject_scans")
    bad = dict[int, tuple[int, str, str]]()
    for line, column, kind, message, text in errors:
        name = numbered.get(column, "")
        if kind == "CAST":
            misfits[name] = misfits.get(name, 0) + 1
        why = message.split("\n")[0].replace(f'"{column}"', repr(name))
        if not (text or "x").strip():
            continue  # a line of blanks
        if count := re.fullmatch(r"Expected Number of Columns: (\d+) Found: (\d+)", why):
            # DuckDB counts on through the values that are too many.
            found = max(int(count[2]), (text or "").count(dialect.options["delim"]) + 1)
            why = f"{found} values, expected {count[1]}"
        if "unicode" in why.lower():
            why = f"not {dialect.options['encoding'].upper()} text; set data.encoding, or save it as UTF-8"
        bad.setdefault(line, (line, why, (text or "")[:_SHOWN]))
    is_arrow = target.suffix == ".arrow"
    rows = pl.scan_ipc(target, glob=False) if is_arrow else pl.scan_parquet(target, glob=False)
    size = int(rows.select(pl.len()).collect().item())
    first = 1 + int(dialect.options["skip"]) + dialect.header
    return Part(
        rows.rename(numbered), size, first, list(bad.values()), list(dialect.notes), {}, dialect.header
    )


def _doubtful(frame: pl.LazyFrame, types: Mapping[str, str]) -> list[str]:
    """Return the columns of whole numbers that floats do not keep exact, and those of times before the year
    1000, which are other texts."""
    names = frame.collect_schema().names()
    whole = [name for name in names if types[name] == "BIGINT"]
    times = [name for name in names if types[name] in ("DATE", "TIMESTAMP")]
    ends = [
        pl.nth(names.index(n)).abs().max().alias(f"{i}") for i, n in enumerate(whole + times) if n in whole
    ]
    ends += [pl.nth(names.index(n)).min().dt.year().alias(f"y{i}") for i, n in enumerate(times)]
    if not ends:
        return []
    found = frame.select(ends).collect(engine="streaming").row(0)
    return [
        name
        for name, end in zip(whole + times, found, strict=True)
        if end is not None and (end > EXACT if name in whole else end < 1000)
    ]


def _settled(part: Part, dialect: Dialect, types: Mapping[str, str]) -> Part:
    """Return a file's rows with how its columns are written; ids in digits as whole numbers."""
    options = dialect.options
    dates = {"DATE": options.get("dateformat", ""), "TIMESTAMP": options.get("timestampformat", "")}
    comma = options["decimal_separator"] == ","
    forms = dict[str, Form]()
    for name in dialect.names:
        kind = types[name]
        if kind in ("BIGINT", "DOUBLE") and comma:
            forms[name] = Form(type="number", comma=True)
        elif dates.get(kind):
            forms[name] = Form(type="time", dates=dates[kind])
    whole = [place for place, name in enumerate(dialect.names) if types[name] == "WHOLE"]
    for place in whole:
        if (dtype := _type_of_digits(part.frame.select(pl.nth(place)))) is not None:
            part.frame = part.frame.with_columns(pl.nth(place).cast(dtype))
    part.forms = forms
    return part


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
            source = {"format": "newline_delimited", "sample_size": -1, "compression": packing_of(file)}
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


def _sign(sign: str) -> str:
    return "" if sign in ("(empty)", "\0") else sign


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
