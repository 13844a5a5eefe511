"""The rows of a block of delimited text.

polars parses blocks in which every line has the same number of separators, and each quote begins or ends a
cell of one line. DuckDB reads all other blocks: it gives the same values, and every bad row with its line
and kind.
"""

import os
import re
from dataclasses import dataclass
from functools import cache
from threading import local
from typing import Any

import numpy as np
import polars as pl

from dphybrid.data.batches import Array
from dphybrid.data.table.cells import clean
from dphybrid.data.table.lines import count_sign, line_ends
from dphybrid.data.table.rows import SHOWN

_MAX_CELL_BYTES = 2**23
"""Most bytes in which an open quote is looked for its end; limits the work on a quote that is not closed."""
MOST_OPEN = 100
"""With as many lines in a block whose quotes do not close, its quotes are something else."""
_STEP_BYTES = 2**16
"""Bytes that are read at a time after a row whose quote is not closed."""
_BLANKS = (b" ", b"\t", b"\v", b"\f")
JOINT = "\x1f"
"""The separator within blocks, if that of the file is blanks or has several characters."""

Bad = tuple[int, str, str]
"""A rejected row: the number of lines before it in its text, the reason, and the start of its text."""


@dataclass(frozen=True)
class Dialect:
    """How cells are written. separator: one character, several, or " " for any number of blanks. quote: empty
    for none. escape: precedes a quote within quotes."""

    separator: str
    quote: str = '"'
    escape: str = '"'

    @property
    def joint(self) -> str:
        """The separator of one character that stands in texts that `joined` returned."""
        return JOINT if self.separator == " " or len(self.separator) > 1 else self.separator

    def joined(self, text: bytes) -> bytes:
        """Return a text with `joint` instead of each separator outside quotes."""
        if self.joint == self.separator:
            return text
        blank = self.separator == " "
        if blank:  # blanks around a line separate nothing
            text = re.sub(rb"(?m)^[ \t]+|[ \t]+$", b"", text)
        sign, quote = self.joint.encode(), self.quote.encode()
        if not quote or quote not in text:
            return re.sub(rb"[ \t]+", sign, text) if blank else text.replace(self.separator.encode(), sign)
        return _separating(self).sub(lambda found: found[1] or sign, text)


@cache
def _separating(dialect: Dialect) -> re.Pattern[bytes]:
    """Return a pattern of separators; its first group is a quoted cell, which is no separator."""
    separator = rb"[ \t]+" if dialect.separator == " " else re.escape(dialect.separator.encode())
    quote = re.escape(dialect.quote.encode())
    inside = (
        rb"[^" + quote + rb"]|" + quote * 2
        if dialect.escape == dialect.quote
        else rb"[^\\" + quote + rb"]|\\."
    )
    start = rb"(?<![^\s])" if dialect.separator == " " else rb""
    return re.compile(rb"(" + start + quote + rb"(?:" + inside + rb")*" + quote + rb")|" + separator, re.S)


@dataclass
class Parsed:
    """Rows of a text: columns of cells, for each row the number of lines before it, and the rejected rows.
    num_lines: lines of the text that were read; the others begin with a quote that may close later. num_open:
    lines whose quotes do not close; with `MOST_OPEN` of them, reading stopped."""

    columns: list[pl.Series]
    lines: Array
    bad: list[Bad]
    num_lines: int
    num_open: int = 0


def quoted_separators(text: bytes, dialect: Dialect) -> int | None:
    """Return how many separators stand within quotes; None unless each quote begins or ends a cell of one
    line, so that there are none within a quoted cell."""
    signs, separator = np.frombuffer(text, np.uint8), dialect.joint.encode()
    positions = np.flatnonzero(signs == dialect.quote.encode()[0])
    if len(positions) % 2 or len(separator) > 1 or len(dialect.quote.encode()) > 1:
        return None
    first, second = positions.reshape(-1, 2).T
    limits, ends = (10, separator[0]), line_ends(text)
    before, after = np.where(first > 0, signs[first - 1], 10), signs[second + 1]
    if not (np.isin(before, limits).all() and np.isin(after, limits).all()):
        return None
    if (np.searchsorted(ends, first) != np.searchsorted(ends, second)).any():
        return None
    found = np.flatnonzero(signs == separator[0])
    return int((np.searchsorted(found, second) - np.searchsorted(found, first)).sum())


def parse_plain(
    text: bytes, dialect: Dialect, width: int, no_value: tuple[str, ...], quoted: int = 0
) -> Parsed | None:
    """Return the rows of a text, read by polars; None if its lines differ in their number of separators or if
    it needs DuckDB for another reason. quoted: what `quoted_separators` returned for a text with quotes."""
    separator, num_rows = dialect.joint.encode(), count_sign(text, b"\n")
    # polars takes separators of one byte, and reads a blank line of a single column as a row.
    if len(separator) > 1 or width == 1:
        return None
    # polars fills up short rows silently, so the separators are counted here.
    if count_sign(text, separator) - quoted != num_rows * (width - 1):
        return None
    blanks = (
        dialect.quote != ""
        or not text.isascii()
        or any(no[-1].isdigit() for no in no_value)  # also written otherwise: -999 as -999.0
        or any(sign in text for sign in _BLANKS if sign != separator)
    )
    # Each text for no value is compared with every cell: pass only those whose letters the block holds.
    present = [] if blanks else [no for no in no_value if all(sign in text for sign in no.encode())]
    try:
        frame = pl.read_csv(
            text,
            has_header=False,
            schema={str(i): pl.String for i in range(width)},
            separator=dialect.joint,
            quote_char=dialect.quote or None,
            null_values=present or None,
        )
    except pl.exceptions.PolarsError:  # a row has too many fields
        return None
    # The total number of separators is right and no row has too many fields, so that every row has the right
    # width, if polars dropped none.
    if len(frame) != num_rows:
        return None
    columns = clean(frame.get_columns(), no_value) if blanks else frame.get_columns()
    return Parsed(columns, np.arange(num_rows), [], num_rows)


def parse_quoted(text: bytes, dialect: Dialect, width: int, no_value: tuple[str, ...], last: bool) -> Parsed:
    """Return the rows of any text, read by DuckDB. A quote that is not closed rejects only its own line.
    last: no text follows, so that a quote that is open at the end stays open."""
    ends = line_ends(text)
    columns, lines, bad = [_no_cells(width)], [np.empty(0, np.int64)], list[Bad]()
    line, step, num_open = 0, len(text), 0
    while line < len(ends) and num_open < MOST_OPEN:
        start = int(ends[line - 1]) if line else 0
        # At least one line.
        until = max(line + 1, int(np.searchsorted(ends, start + step, side="right")))
        whole = until == len(ends)
        found, is_open = _read(text[start : int(ends[until - 1])], dialect, width, last and whole)
        columns.append(found.columns)
        lines.append(found.lines + line)
        bad += [(line + position, why, shown) for position, why, shown in found.bad]
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
    return Parsed(clean(parts, no_value), numbers, bad, line, num_open)


def _no_cells(width: int) -> list[pl.Series]:
    return [pl.Series(str(i), [], dtype=pl.String) for i in range(width)]


def _read(text: bytes, dialect: Dialect, width: int, last: bool) -> tuple[Parsed, bool]:
    """Return the rows of a text up to the first line whose quote does not close, which is the last rejected
    one; and whether reading stopped before it, because more text may close it."""
    columns, errors = _by_duckdb(text, dialect, width)
    ends, bad = line_ends(text), dict[int, tuple[str, str]]()
    num_lines, broken = len(ends), len(ends)
    for position, kinds, num_values, shown in errors:
        line = int(np.searchsorted(ends, position, side="right"))
        own = text[position : int(ends[line]) - 1]
        # DuckDB shows only the beginning of a long row, which may have lines beyond it.
        joined = "\n" in shown.rstrip("\n") or len(shown) >= _SHOWN_BY_DUCKDB
        if "UNQUOTED VALUE" in kinds or (joined and dialect.quote):
            odd = own.count(dialect.quote.encode()) % 2
            why = "a quote is opened and not closed" if odd else "misplaced quote"
        else:
            why = f"{num_values} values, expected {width}"
        bad[line] = why, own.decode("utf-8", "replace")[:SHOWN]
        if dialect.quote and (joined or (why.endswith("closed") and line == num_lines - 1)):
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
    told = [(line, *about) for line, about in sorted(bad.items()) if about[1].strip()]
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


_SHOWN_BY_DUCKDB = 10_000
"""How much of a rejected row DuckDB shows."""
_threads = local()


def _by_duckdb(
    text: bytes, dialect: Dialect, width: int
) -> tuple[list[pl.Series], list[tuple[int, set[str], int, str]]]:
    """Return the columns of the good rows; and for each bad row, in order, its position in the text, the
    kinds of its errors, its number of values, and its beginning."""
    names = ", ".join(f"'{i}': 'VARCHAR'" for i in range(width))
    signs = {
        "delim": dialect.joint,
        "quote": dialect.quote,
        "escape": dialect.escape if dialect.quote else "",
    }
    options = ", ".join("{} = '{}'".format(name, sign.replace("'", "''")) for name, sign in signs.items())
    # A file in memory, which DuckDB opens by the name of this process's descriptor.
    with os.fdopen(os.memfd_create("block"), "w+b") as file:
        file.write(text)
        file.flush()
        query = (
            f"from read_csv('/proc/self/fd/{file.fileno()}', auto_detect = false, header = false, "
            f"columns = {{{names}}}, {options}, new_line = '\\n', store_rejects = true, rejects_limit = 0, "
            f"max_line_size = {len(text) + 1}, buffer_size = {len(text) + 2})"
        )
        connection = _connection()
        frame = pl.DataFrame(connection.sql(query))
    found = connection.execute(
        "select line_byte_position - 1, error_type, error_message, csv_line from reject_errors order by all"
    ).fetchall()
    connection.execute("drop table reject_errors; drop table reject_scans")
    errors: dict[int, tuple[int, set[str], int, str]] = {}
    for position, kind, message, shown in found:
        count = re.search(r"Found: (\d+)", message)
        num_values = int(count[1]) if count else 0
        _, kinds, others, _ = errors.setdefault(position, (position, set(), num_values, shown))
        # DuckDB counts on through the missing columns, and through those that are too many.
        num_values = (min if kind == "MISSING COLUMNS" else max)(num_values, others)
        errors[position] = position, kinds | {kind}, num_values, shown
    return frame.get_columns(), list(errors.values())


def _connection() -> Any:
    """Return the thread's own connection to DuckDB, which is imported for the first block that needs it."""
    if not hasattr(_threads, "connection"):
        import duckdb

        _threads.connection = duckdb.connect(config={"threads": 1})
    return _threads.connection
