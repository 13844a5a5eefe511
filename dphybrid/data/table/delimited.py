"""Delimited text (CSV, TSV and relatives): how a file is written, inferred from its first lines, and its
rows, block by block.

What is inferred is said, unless it is usual. `blocks` parses; the csv module splits the first lines.
"""

import csv
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np

from dphybrid.config.tables import TableDataConfig
from dphybrid.data.table.blocks import (
    JOINT,
    MOST_OPEN,
    Dialect,
    Parsed,
    parse_plain,
    parse_quoted,
    quoted_separators,
)
from dphybrid.data.table.lines import count_sign, line_ends, whole_lines
from dphybrid.data.table.numbers import is_number
from dphybrid.data.table.rows import Job, Rejected, Rows, as_job, check_columns
from dphybrid.util.errors import UserError

_SEPARATORS = (",", "\t", ";", "|", "||", "\x01", "::", " ")
"""Separators that can be inferred; an earlier one wins a tie. \\x01: Hive's. " ": any number of blanks."""
_NAMED = {"tab": "\t", "\\t": "\t", "blank": " ", "blanks": " ", "space": " "}
_SAMPLE = 50
"""Number of rows from which separator, header and width are inferred."""
_PLAIN_QUOTES = 3
"""With as many lines that quotes would break, quotes are plain text; one is enough if tabs separate cells."""
_EXCEL_LINE = re.compile(r'^"?sep=(.|\\t)"?$', re.I)


@dataclass(frozen=True)
class _Layout:
    """How a delimited file is written. body: number of lines before the first row. index: the name of a
    column that only numbers or names the rows. comments: whether lines that start with # are comments."""

    dialect: Dialect
    names: list[str]
    header: bool
    body: int
    index: tuple[str, ...]
    comments: bool


def csv_jobs(file: Path, data: TableDataConfig) -> Iterator[Job]:
    """Yield a job for each block of a file, in order, that returns its rows. Raises UserError if the file
    cannot be read, is empty, or is not text."""
    layout: _Layout | None = None
    notes: list[str] = []
    line, unread, num_blocks = 0, b"", 0
    for new_text, bytes_read, last in whole_lines(file, data.encoding, notes):
        text, unread = unread + new_text, b""
        if layout is None:
            layout = _layout(file, text, data, notes)
            skipped = layout.body if layout else text.count(b"\n")  # without a layout all lines are blank
            line, text = line + skipped, text.split(b"\n", skipped)[-1]
        if layout is None or not (text or (last and not num_blocks)):
            continue
        block = _Block(file, text, layout, data.no_value, line, bytes_read, tuple(notes))
        num_blocks += 1
        # A quoted value may continue in the next block, so these blocks are read here, in order, and not by
        # a job in another thread.
        quoted: int | None = 0
        joined = text
        if with_quotes := layout.dialect.quote != "" and layout.dialect.quote.encode() in text:
            joined = layout.dialect.joined(text)
            quoted = quoted_separators(joined, layout.dialect)
        if quoted is None:
            parsed = parse_quoted(joined, layout.dialect, len(layout.names), data.no_value, last)
            if parsed.num_open == MOST_OPEN:
                raise UserError(
                    f"data.path={file}: the quotes of {MOST_OPEN} lines do not enclose cells, the last "
                    f"one is line {line + parsed.num_lines}; if they are plain text, set data.quote=none"
                )
            yield as_job(block.rows(parsed))
            line += parsed.num_lines
            unread = text.split(b"\n", parsed.num_lines)[-1]
        else:
            yield partial(block.plain_rows, quoted if with_quotes else None)
            line += count_sign(text, b"\n")
    if layout is None:
        raise UserError(f"data.path={file}: is empty; give a file with rows")


@dataclass(frozen=True)
class _Block:
    """Whole lines of a file. line: number of lines before them. bytes_read: of the file, up to their end."""

    file: Path
    text: bytes
    layout: _Layout
    no_value: tuple[str, ...]
    line: int
    bytes_read: int
    notes: tuple[str, ...]

    def plain_rows(self, quoted: int | None) -> Rows:
        """Return the rows of a block without quotes that enclose others or line ends. quoted: the number of
        separators within quotes; None for a block in which no quote has a meaning."""
        dialect = self.layout.dialect if quoted is not None else replace(self.layout.dialect, quote="")
        text, width = dialect.joined(self.text), len(self.layout.names)
        parsed = parse_plain(text, dialect, width, self.no_value, quoted or 0)
        return self.rows(parsed or parse_quoted(text, dialect, width, self.no_value, last=True))

    def rows(self, parsed: Parsed) -> Rows:
        """Return the rows that were parsed from the block."""
        layout, separator = self.layout, self.layout.dialect.separator
        rejected = [
            Rejected(
                file=str(self.file),
                line=self.line + position + 1,
                reason=why,
                text=shown.replace(JOINT, separator),
            )
            for position, why, shown in parsed.bad
            if not (layout.comments and shown.startswith("#"))
        ]
        columns = dict(zip(layout.names, parsed.columns, strict=True))
        return Rows(
            columns,
            parsed.lines + self.line + 1,
            rejected,
            self.file,
            layout.header,
            self.bytes_read,
            self.notes,
            layout.index,
        )


def _layout(file: Path, block: bytes, data: TableDataConfig, notes: list[str]) -> _Layout | None:
    """Infer the layout from the first lines; return None if all are blank. Unusual facts go to `notes`."""
    # Decode a mebibyte of whole lines, or the whole block if its first line is longer.
    head = block if len(block) <= 2**20 else block[: block.rfind(b"\n", 0, 2**20) + 1] or block
    lines = head.decode().split("\n")[:-1]
    start = next((i for i, line in enumerate(lines) if line.strip()), None)
    if start is None:
        return None
    wanted = _wanted(data.delimiter)
    if (excel := _EXCEL_LINE.match(lines[start])) and any(line.strip() for line in lines[start + 1 :]):
        notes.append(f"the first line, {lines[start]!r}, names the separator")
        wanted, start = wanted or excel[1].replace("\\t", "\t"), start + 1
    remarks = start
    while remarks < len(lines) and (not lines[remarks].strip() or lines[remarks].startswith("#")):
        remarks += 1
    sample = list(islice((line for line in lines[remarks:] if line.strip()), _SAMPLE)) or lines[start:]
    quote = {"auto": '"', "none": ""}.get(data.quote, data.quote)
    separator = wanted or _separator(sample, quote)
    dialect = Dialect(separator, quote, quote)
    width = _usual(len(_split(line, dialect)) for line in sample)
    # A comment has another number of cells than a row, or stands above the header; other lines that start
    # with # are headers.
    comments, above = False, _first_rows(lines[remarks:], dialect) if start < remarks < len(lines) else []
    headed = bool(above) and _header(above[0][1], [row for _, row in above[1:]], data) is not None
    while start < remarks < len(lines) and width > 1:
        if len(_split(lines[start], dialect)) == width and not headed:
            break
        comments, start = comments or bool(lines[start].strip()), start + 1
    if comments:
        notes.append("lines that start with # are comments")
    if quote:
        dialect = _quoting(block, dialect, data.quote == "auto", width, notes)
    if (not wanted and len(separator) > 1) or separator == " ":
        notes.append(f"cells are separated by {'blanks' if separator == ' ' else repr(separator)}")
    rows = _first_rows(lines[start:], dialect)
    (after, first), others = rows[0], [row for _, row in rows[1:]]
    check_columns(file, len(first))
    usual = _usual(map(len, others))
    named = first
    if (
        len(first) + 1 == usual
    ):  # R writes no name above the names of rows, others a separator behind each row
        ended = all(len(row) < usual or not row[-1] for row in others)
        named = [*first, ""] if ended else ["", *first]
    if len(named) > 1 and re.match(r"#\s", named[0]):  # as numpy writes headers
        named = [named[0][1:].strip(), *named[1:]]
    why = _header(named, others, data)
    if why is None:
        # The first row of a file without a header may be a broken one.
        width = _usual(len(row) for _, row in rows)
        return _Layout(dialect, [str(i) for i in range(width)], False, start, (), comments)
    if why:
        notes.append(why)
    names = _column_names(named)
    if len(named) > len(first) and not named[0]:
        notes.append(
            f"the first line names {len(first)} of {usual} columns: the first column has the names of rows"
        )
    return _Layout(dialect, names, True, start + after, () if named[0] else (names[0],), comments)


def _usual(counts: Iterator[int] | Sequence[int]) -> int:
    """Return the most frequent count; 0 if there is none."""
    return next((count for count, _ in Counter(counts).most_common(1)), 0)


def _wanted(delimiter: str) -> str | None:
    """Return the separator that data.delimiter names; None for auto."""
    if delimiter == "auto":
        return None
    separator = _NAMED.get(delimiter, delimiter)
    if separator.strip(" ") == "":
        separator = " "
    if not 0 < len(separator) <= 8 or any(sign in '"\r\n' for sign in separator):
        raise UserError(
            f"data.delimiter={delimiter!r}: give up to 8 characters other than quotes and line ends, or tab, "
            "or blank for any number of blanks"
        )
    return separator


def _split(line: str, dialect: Dialect) -> list[str]:
    """Return the cells of a line, even if its quotes are misplaced."""
    line = dialect.joined(line.encode()).decode()
    if not dialect.quote or dialect.quote not in line:
        return [cell.strip() for cell in line.split(dialect.joint)]
    try:
        (cells,) = csv.reader([line], delimiter=dialect.joint, quotechar=dialect.quote, skipinitialspace=True)
    except csv.Error:
        cells = line.split(dialect.joint)
    return [cell.strip() for cell in cells]


def _separator(sample: Sequence[str], quote: str) -> str:
    """Return the separator that splits most lines into the same number of cells and, among equals, into the
    most cells. Blanks separate cells only where nothing else does."""
    twice = all(line.count("|") == 2 * line.count("||") for line in sample)

    def score(separator: str) -> tuple[bool, float, int]:
        if separator == ("|" if twice else "||"):
            return False, 0.0, 0
        dialect = Dialect(separator, quote, quote)
        cells, lines = Counter(len(_split(line, dialect)) for line in sample).most_common(1)[0]
        # R names one column fewer than there are.
        splits = cells > 1 and (separator != " " or lines >= max(2, len(sample) - 1))
        return (splits and separator != " ", lines / len(sample), cells) if splits else (False, 0.0, 0)

    return max(_SEPARATORS, key=score)


def _quoting(block: bytes, dialect: Dialect, free: bool, width: int, notes: list[str]) -> Dialect:
    """Return the dialect with its meaning of quotes. free: the user has not set the quote. width: the number
    of cells of most lines.

    Quotes are plain text if all lines have their number of cells without them and some would not with them.
    """
    quote, separator = dialect.quote.encode(), dialect.joint.encode()
    if quote not in block:
        return dialect
    text = dialect.joined(block)
    head = text[: text.rfind(b"\n", 0, 2**20) + 1]
    if free and width > 1 and _is_even(text, separator, width):
        # Most files have two quotes a cell, one at each end; the patterns of `_num_odd` take longer.
        odd = 0 if quoted_separators(text, dialect) == 0 else _num_odd(text, separator, quote)
        # Among tabs, quotes mostly are plain text, and two of them do not enclose the lines between them.
        if odd and dialect.separator != "\t":
            odd = _num_bad(head, dialect)
        if odd >= (1 if dialect.separator == "\t" else _PLAIN_QUOTES):
            notes.append(
                f"quotes are plain text: {odd:,} of the first cells begin with one that does not enclose "
                f"them; --data.quote '{dialect.quote}' overrides this"
            )
            return replace(dialect, quote="", escape="")
    slashed = replace(dialect, escape="\\")
    if b"\\" + quote in head and _num_bad(head, slashed) < _num_bad(head, dialect):
        notes.append("a backslash stands before quotes within quotes")
        return slashed
    return dialect


def _num_bad(text: bytes, dialect: Dialect) -> int:
    """Return the number of rows of a text that cannot be read."""
    width = _usual(len(row) for _, row in _first_rows(text.decode().split("\n")[:-1], dialect))
    return len(parse_quoted(text, dialect, width, (), last=True).bad)


def _is_even(text: bytes, separator: bytes, width: int) -> bool:
    """Return whether each line that is not empty has the separators of `width` cells."""
    ends = line_ends(text)
    positions = np.flatnonzero(np.frombuffer(text, np.uint8) == separator[0])
    counts = np.diff(np.searchsorted(positions, ends), prepend=0)
    return bool((counts[np.diff(ends, prepend=0) > 1] == width - 1).all())


def _num_odd(text: bytes, separator: bytes, quote: bytes) -> int:
    """Return the number of cells that begin with a quote and do not end with its own. text: without
    separators within cells."""
    sign, mark = re.escape(separator), re.escape(quote)
    start = rb"(?:^|" + sign + rb")[ ]*" + mark
    inside = rb"(?:[^" + sign + mark + rb"\n]|" + mark * 2 + rb")*"
    whole = start + inside + mark + rb"[ ]*(?=" + sign + rb"|$)"
    return len(re.findall(start, text, re.M)) - len(re.findall(whole, text, re.M))


def _first_rows(lines: Sequence[str], dialect: Dialect) -> list[tuple[int, list[str]]]:
    """Return the first rows that are not blank, each with the number of lines up to its end."""
    texts = (dialect.joined(line.encode()).decode() + "\n" for line in lines)
    reader = csv.reader(
        texts,
        delimiter=dialect.joint,
        quotechar=dialect.quote or None,
        quoting=csv.QUOTE_MINIMAL if dialect.quote else csv.QUOTE_NONE,
        doublequote=dialect.escape != "\\",
        escapechar="\\" if dialect.escape == "\\" else None,
        skipinitialspace=True,
    )
    rows = list[tuple[int, list[str]]]()
    try:
        for row in reader:
            if len(row) > 1 or any(cell.strip() for cell in row):  # not a blank line
                rows.append((reader.line_num, [cell.strip() for cell in row]))
            if len(rows) == _SAMPLE:
                break
    except csv.Error:  # a huge cell: a quote that is not closed
        pass
    first = next(i for i, line in enumerate(lines) if line.strip())
    return rows or [(first + 1, _split(lines[first], dialect))]


def _header(first: list[str], others: list[list[str]], data: TableDataConfig) -> str | None:
    """Return a note (mostly empty) if the first line names the columns, else None.

    It does if it holds a column name from the config, or counts the columns. Otherwise it must hold no number
    but consecutive years, and either stand above a column of numbers, or have a distinct text in every cell,
    none of which appears below it.
    """
    if data.header != "auto":
        return "" if data.header == "yes" else None
    given = {name for _, name in data.named_columns if name and not is_number(name)}
    none = {"", *data.no_value}
    below = [{row[i] for row in others if i < len(row)} - none for i in range(len(first))]
    pairs = list(zip(first, below, strict=True))
    if any(cell in given and cell not in values for cell, values in pairs):
        return ""
    # Data frames write an index without a name.
    if not first[0]:
        pairs = pairs[1:]
    if note := _of_numbers(pairs):
        return note
    if any(is_number(cell) for cell, _ in pairs):
        return None
    if any(cell not in none and values and all(map(is_number, values)) for cell, values in pairs):
        return ""
    cells = [cell for cell, _ in pairs]
    distinct = len(set(cells)) == len(cells) and none.isdisjoint(cells) and (first[0] or len(cells) > 1)
    return "" if distinct and not any(cell in values for cell, values in pairs) else None


def _of_numbers(pairs: Sequence[tuple[str, set[str]]]) -> str:
    """Return a note if the first line counts the columns or names years, which the columns below do not
    repeat; else an empty text."""
    cells = [cell for cell, _ in pairs]
    note = (
        f"the first line ({', '.join(cells[:4])}, ...) names the columns; --data.header no reads it as values"
    )
    counts = any(cells == [str(i) for i in range(start, start + len(cells))] for start in (0, 1))
    fractions = any(not value.lstrip("+-").isdigit() for _, values in pairs for value in values)
    # A row of whole numbers may begin 0, 1, 2, too, but hardly goes on for long.
    if counts and len(cells) > 1 and (fractions or len(cells) > 4):
        return note
    years = [(cell, values) for cell, values in pairs if re.fullmatch(r"(19|20)\d\d", cell)]
    numbers = [int(cell) for cell, _ in years]
    others = [(cell, values) for cell, values in pairs if not is_number(cell)]
    if (
        len(numbers) > 1
        and numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        and len(years) + len(others) == len(pairs)
        and all(values and not all(re.fullmatch(r"(19|20)\d\d", v) for v in values) for _, values in years)
        and not any(cell in values for cell, values in pairs)
    ):
        return note
    return ""


def _column_names(header: list[str]) -> list[str]:
    """Return distinct column names: an unnamed column gets its position, and a repeated name a number."""
    names: dict[str, None] = {}
    given = set(header)
    for position, cell in enumerate(header):
        # The position may be the name of another column.
        own = cell or (str(position) if str(position) not in given else "index")
        name, count = own, 1
        # A numbered name must not be one that the header gives to another column.
        while name in names or (count > 1 and name in given):
            count += 1
            name = f"{own}_{count}"
        names[name] = None
    return list(names)
