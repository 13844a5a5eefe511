"""DuckDB's sniffer and parser of delimited text, for blocks of text in memory."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import local
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from dphybrid.data.batches import Array
from dphybrid.data.table.lines import line_ends
from dphybrid.data.table.rows import SHOWN

MOST_OPEN = 100
"""With as many lines in a text whose quotes do not close, reading stops: quotes are something else."""
_MAX_CELL_BYTES = 2**23
"""Most bytes in which an open quote is looked for its end; limits the work on a quote that is not closed."""
_STEP_BYTES = 2**16
"""Bytes that are read at a time after a row whose quote is not closed."""
_SHOWN_BY_DUCKDB = 10_000
"""How much of a rejected row DuckDB shows."""
_threads = local()


class Dialect(NamedTuple):
    """How cells are written.

    Attributes:
        quote: Empty for none.
        escape: Precedes a quote within quotes.
        num_skipped, width: Lines before the table and its columns, as `sniff` finds them.
    """

    separator: str
    quote: str
    escape: str
    num_skipped: int = 0
    width: int = 0


class Bad(NamedTuple):
    """A row that cannot be read. line: number of lines before it. num_values: its cells; 0 if its quotes are
    wrong."""

    line: int
    why: str
    text: str
    num_values: int


@dataclass
class Parsed:
    """Rows of a text: columns of cells, the number of lines before each row, and the rejected rows.
    num_lines: lines of the text that were read; the others begin with a quote that may close later. num_open:
    lines whose quotes do not close."""

    columns: list[pl.Series]
    lines: Array
    bad: list[Bad]
    num_lines: int
    num_open: int = 0


def sniff(text: bytes, **options: object) -> Dialect | None:
    """Return how a text is written; None if DuckDB cannot say."""
    import duckdb

    with _in_memory(text) as path:
        given = _options(options | {"max_line_size": len(text) + 1})
        query = "select Delimiter, Quote, Escape, SkipRows, len(Columns)"
        try:
            (found,) = _connection().execute(f"{query} from sniff_csv('{path}', {given})").fetchall()
        except duckdb.Error:  # such as a text whose lines all differ
            return None
    return Dialect(*found)


def parse(text: bytes, dialect: Dialect, width: int, last: bool = True, ragged: bool = False) -> Parsed:
    """Return the rows of any text, read by DuckDB. A quote that is not closed rejects only its own line.
    last: no text follows, so that a quote that is open at the end stays open. ragged: rows may have fewer
    cells than `width`, which are None then; empty cells are texts."""
    ends = line_ends(text)
    nothing = [pl.Series(str(i), [], dtype=pl.String) for i in range(width)]
    columns, lines, bad = [nothing], [np.empty(0, np.int64)], list[Bad]()
    line, step, num_open = 0, len(text), 0
    while line < len(ends) and num_open < MOST_OPEN:
        start = int(ends[line - 1]) if line else 0
        # At least one line.
        until = max(line + 1, int(np.searchsorted(ends, start + step, side="right")))
        whole = until == len(ends)
        part, part_ends = text[start : int(ends[until - 1])], ends[line:until] - start
        found, is_open = _read(part, part_ends, dialect, width, last and whole, ragged)
        columns.append(found.columns)
        lines.append(found.lines + line)
        bad += [row._replace(line=line + row.line) for row in found.bad]
        line += found.num_lines
        if is_open and whole:
            break
        # After a quote that is not closed, look at less text, as the next one is often not far.
        stopped = line < until and not is_open
        step = _STEP_BYTES if stopped else 4 * max(step, _STEP_BYTES)
        num_open += stopped
    parts = [pl.concat(cells) for cells in zip(*columns, strict=True)]
    numbers = np.concatenate(lines)
    if width == 1 and (blank := parts[0].is_null() | (parts[0].str.strip_chars() == "")).any():
        parts, numbers = [parts[0].filter(~blank)], numbers[~blank.to_numpy()]
    return Parsed(parts, numbers, bad, line, num_open)


def _read(
    text: bytes, ends: Array, dialect: Dialect, width: int, last: bool, ragged: bool
) -> tuple[Parsed, bool]:
    """Return the rows of a text up to the first line whose quote does not close, which is the last rejected
    one; and whether reading stopped before it, because more text may close it. ends: `line_ends`."""
    columns, errors = _by_duckdb(text, dialect, width, ragged)
    bad = dict[int, Bad]()
    num_lines, broken = len(ends), len(ends)
    for position, kinds, num_values, shown in errors:
        line = int(np.searchsorted(ends, position, side="right"))
        own = text[position : int(ends[line]) - 1]
        # DuckDB shows only the beginning of a long row, which may have lines beyond it.
        joined = "\n" in shown.rstrip("\n") or len(shown) >= _SHOWN_BY_DUCKDB
        if "UNQUOTED VALUE" in kinds or (joined and dialect.quote):
            is_open = own.count(dialect.quote.encode()) % 2 == 1
            why = "a quote is opened and not closed" if is_open else "misplaced quote"
            why, num_values = f"{why}; if quotes are plain text, set data.quote=none", 0
        else:
            why, is_open = f"{num_values} values, expected {width}", False
        bad[line] = Bad(line, why, own.decode("utf-8", "replace")[:SHOWN], num_values)
        if dialect.quote and (joined or (is_open and line == num_lines - 1)):
            broken = line
            break
    # DuckDB skips empty lines, unless the table has a single column.
    empty = np.flatnonzero(np.diff(ends, prepend=0) == 1) if width > 1 else np.empty(0, np.int64)
    skipped = np.union1d(empty, np.array([*bad], np.int64))
    lines = _places(columns, skipped, num_lines)
    kept = int(np.searchsorted(lines, broken))
    is_open = broken < num_lines and not last and kept == len(columns[0]) and len(text) < _MAX_CELL_BYTES
    if is_open:
        del bad[broken]
    rows = [cells.head(kept) for cells in columns]
    told = [bad[line] for line in sorted(bad) if bad[line].text.strip()]
    return Parsed(rows, lines[:kept], told, min(broken + (not is_open), num_lines)), is_open


def _places(columns: list[pl.Series], skipped: Array, num_lines: int) -> Array:
    """Return the first line of each row. skipped: the lines that are no rows, sorted."""
    own = np.delete(np.arange(num_lines), skipped)
    if len(own) == len(columns[0]):
        return own
    more = pl.DataFrame(columns).select(pl.sum_horizontal(pl.all().str.count_matches("\n", literal=True)))
    lines, line, skip = list[int](), 0, {*skipped.tolist()}
    for extra in more.to_series().to_list():
        while line in skip:
            line += 1
        lines.append(line)
        line += 1 + extra
    return np.array(lines, np.int64)


def _by_duckdb(
    text: bytes, dialect: Dialect, width: int, ragged: bool
) -> tuple[list[pl.Series], list[tuple[int, set[str], int, str]]]:
    """Return the columns of the good rows; and for each bad row, in order, its position in the text, the
    kinds of its errors, its number of values, and its beginning."""
    names = ", ".join(f"'{i}': 'VARCHAR'" for i in range(width))
    options: dict[str, object] = {
        "delim": dialect.separator,
        "quote": dialect.quote,
        "escape": dialect.escape,
        "auto_detect": False,
        "header": False,
        "new_line": "\\n",
        "store_rejects": True,
        "rejects_limit": 0,
        "max_line_size": len(text) + 1,
        "buffer_size": len(text) + 2,
    }
    if ragged:
        options |= {"null_padding": True, "parallel": False, "nullstr": "\x01\x02"}
    connection = _connection()
    with _in_memory(text) as path:
        query = f"from read_csv('{path}', {_options(options)}, columns = {{{names}}})"
        frame = pl.DataFrame(connection.sql(query))
    found = connection.execute(
        "select line_byte_position - 1, error_type, error_message, csv_line from reject_errors order by all"
    ).fetchall()
    connection.execute("drop table reject_errors; drop table reject_scans")
    errors: dict[int, tuple[int, set[str], int, str]] = {}
    for position, kind, message, shown in found:
        position += len(shown) - len(shown.lstrip("\n"))  # empty lines before the row
        count = re.search(r"Found: (\d+)", message)
        num_values = int(count[1]) if count else 0
        _, kinds, others, _ = errors.setdefault(position, (position, set(), num_values, shown))
        # DuckDB counts on through the missing columns, and through those that are too many.
        num_values = (min if kind == "MISSING COLUMNS" else max)(num_values, others)
        errors[position] = position, kinds | {kind}, num_values, shown.strip("\n")
    return frame.get_columns(), list(errors.values())


@contextmanager
def _in_memory(text: bytes) -> Iterator[str]:
    """Open a file in memory that holds a text; DuckDB finds it by the name of this process's descriptor."""
    with os.fdopen(os.memfd_create("text"), "w+b") as file:
        file.write(text)
        file.flush()
        yield f"/proc/self/fd/{file.fileno()}"


def _options(values: dict[str, object]) -> str:
    shown = (
        (name, "'{}'".format(v.replace("'", "''")) if isinstance(v, str) else v) for name, v in values.items()
    )
    return ", ".join(f"{name} = {value}" for name, value in shown)


def _connection() -> Any:
    """Return the thread's own connection to DuckDB, which is imported for the first text that needs it."""
    if not hasattr(_threads, "connection"):
        import duckdb

        _threads.connection = duckdb.connect(config={"threads": 1})
    return _threads.connection
