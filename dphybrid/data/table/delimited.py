"""Delimited text (CSV, TSV and relatives), read by DuckDB: its sniffer infers from the first lines how a file
is written, its parser reads block by block, and its reject store names the bad rows.

What is unusual is said. What a file only looks like is refused with the option that says it.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from dphybrid.config.tables import RowFiles
from dphybrid.data.table.duck import MOST_OPEN, Dialect, Parsed, parse, sniff
from dphybrid.data.table.lines import count_sign, line_ends, whole_lines
from dphybrid.data.table.numbers import is_number
from dphybrid.data.table.rows import Cells, Job, Rejected, Rows, as_job, check_columns
from dphybrid.util.errors import UserError

_UNUSUAL = ("::", "||", "\x01")
"""Separators that DuckDB's sniffer does not try by itself. \\x01: Hive's."""
_NAMED = {"tab": "\t", "\\t": "\t", "blank": " ", "blanks": " ", "space": " "}
_HEAD_BYTES, _HEAD_LINES = 2**14, 50
"""The first lines, from which a file's form is inferred: at least this much."""
_REMARKS = re.compile(rb"(?:#.*\n|[^\S\n]*\n)+")
_EXCEL_LINE = re.compile(rb'"?sep=(.|\\t)"?\n', re.I)


@dataclass(frozen=True)
class _Layout:
    """How a delimited file is written.

    Attributes:
        body: Number of lines before the first row.
        index: The name of a column that only numbers or names the rows.
        comments: Whether lines that start with # are comments.
    """

    dialect: Dialect
    names: list[str]
    header: bool
    body: int
    index: tuple[str, ...]
    comments: bool


@dataclass(frozen=True)
class _Block:
    """A block of whole lines. line: number of lines before it. bytes_read: of the file, up to its end."""

    file: Path
    layout: _Layout
    no_value: tuple[str, ...]
    line: int
    bytes_read: int
    notes: tuple[str, ...]

    def parsed(self, text: bytes, last: bool = True) -> Parsed:
        return parse(text, self.layout.dialect, len(self.layout.names), last)

    def read(self, text: bytes) -> Rows:
        """Return the rows of a text that ends with its last row."""
        return self.rows(self.parsed(text))

    def rows(self, parsed: Parsed) -> Rows:
        """Return the rows that were parsed from the block."""
        layout = self.layout
        rejected = [
            Rejected(file=str(self.file), line=self.line + bad.line + 1, reason=bad.why, text=bad.text)
            for bad in parsed.bad
            if not (layout.comments and bad.text.startswith("#"))
        ]
        cells = Cells(dict(zip(layout.names, parsed.columns, strict=True)), self.no_value)
        lines = parsed.lines + self.line + 1
        return Rows(
            cells, lines, rejected, self.file, layout.header, self.bytes_read, self.notes, layout.index
        )


def csv_jobs(file: Path, data: RowFiles) -> Iterator[Job]:
    """Yield a job for each block of a file, in order, that returns its rows. Raises UserError if the file
    cannot be read, is empty, or is not text."""
    layout: _Layout | None = None
    notes: list[str] = []
    line, unread, num_blocks = 0, b"", 0
    for new_text, bytes_read, last in whole_lines(file, data.encoding, notes):
        text, unread = unread + _single_blanks(new_text, data), b""
        if layout is None:
            layout = _layout(file, text, data, notes)
            skipped = layout.body if layout else text.count(b"\n")  # without a layout all lines are blank
            line, text = line + skipped, text.split(b"\n", skipped)[-1]
        if layout is None or not (text or (last and not num_blocks)):
            continue
        num_blocks += 1
        block, quote = _Block(file, layout, data.no_value, line, bytes_read, tuple(notes)), _quote(data)
        if quote and quote.encode() in text:
            # A quoted value may go on in the next block, so these blocks are parsed here, in order.
            parsed = block.parsed(text, last)
            _check_quotes(block, text, parsed, data)
            yield as_job(block.rows(parsed))
            line += parsed.num_lines
            unread = text.split(b"\n", parsed.num_lines)[-1]
        else:
            yield partial(block.read, text)
            line += count_sign(text, b"\n")
    if layout is None:
        raise UserError(f"data.path={file}: is empty; give a file with rows")


def _layout(file: Path, text: bytes, data: RowFiles, notes: list[str]) -> _Layout | None:
    """Infer the layout from the first lines; return None if all are blank. Unusual facts go to `notes`."""
    if (filled := re.search(rb"\S", text)) is None:
        return None
    start = text.rfind(b"\n", 0, filled.start()) + 1
    wanted = _wanted(data.delimiter)
    if (excel := _EXCEL_LINE.match(text, start)) and text[excel.end() :].strip():
        notes.append(f"the first line, {excel[0].decode().strip()!r}, names the separator")
        wanted, start = wanted or excel[1].decode().replace("\\t", "\t"), excel.end()
    head = _first_lines(text[start:])
    found = _REMARKS.match(head)
    remarks = found[0] if found and found.end() < len(head) else b""
    dialect = _sniffed(file, head[len(remarks) :], wanted, data)
    rows = _first_rows(head[len(remarks) :], dialect)
    if remarks.strip():
        # The last remark is the header, if it has a row's number of cells and no header stands below.
        above = b"\n".join(remarks.rstrip().split(b"\n")[:-1])
        with_it = _first_rows(head[len(above) :], dialect)
        is_header = (
            len(with_it[0][1]) == _usual(rows)
            and _header(rows[0][1], [row for _, row in rows[1:]], data) is None
        )
        rows, remarks = (with_it, above) if is_header else (rows, remarks)
    start += len(remarks)
    comments = remarks.strip() != b""
    notes += ["lines that start with # are comments"] * comments
    notes += ["a backslash stands before quotes within quotes"] * (dialect.escape == "\\")
    if (wanted is None and dialect.separator in _UNUSUAL) or wanted == " ":
        notes.append(f"cells are separated by {'blanks' if wanted == ' ' else repr(dialect.separator)}")
    (length, first), others = rows[0], [cells for _, cells in rows[1:]]
    usual = _usual(rows)
    # A separator behind the last cell of each row means nothing.
    if all(len(row) != usual or not row[-1] for row in others):
        usual = min(usual, len(first))
    named = ["", *first] if len(first) + 1 == usual else first  # R writes no name above the names of rows
    if len(named) > 1 and re.match(r"#\s", named[0]):  # as numpy writes headers
        named = [named[0][1:].strip(), *named[1:]]
    body = text.count(b"\n", 0, start)
    why = _header(named, others, data)
    if why is None:
        # The first row of a file without a header may be a broken one.
        return _Layout(dialect, [str(i) for i in range(usual)], False, body, (), comments)
    notes += [why] * (why != "")
    if named[1:] == first:
        notes.append(
            f"the first line names {len(first)} of {usual} columns: the first one names the rows, as R's do"
        )
    names = _column_names(named)
    return _Layout(dialect, names, True, body + length, () if named[0] else (names[0],), comments)


def _usual(rows: Sequence[tuple[int, list[str]]]) -> int:
    """Return the most frequent number of cells of the rows below the first one."""
    first, *others = (len(cells) for _, cells in rows)
    counts = Counter(others)
    return max(counts, key=lambda found: (counts[found], found == first), default=first)


def _quote(data: RowFiles) -> str:
    return {"auto": '"', "none": ""}.get(data.quote, data.quote)


def _wanted(delimiter: str) -> str | None:
    """Return the separator that data.delimiter names; None for auto."""
    if delimiter == "auto":
        return None
    separator = _NAMED.get(delimiter, delimiter)
    if not 0 < len(separator.encode()) <= 4 or any(sign in '"\r\n' for sign in separator):
        raise UserError(
            f"data.delimiter={delimiter!r}: give up to 4 characters other than quotes and line ends, or tab, "
            "or blank for any number of blanks"
        )
    return separator if separator.strip(" ") else " "


def _single_blanks(text: bytes, data: RowFiles) -> bytes:
    """Return a text in which single blanks separate cells, if data.delimiter says that blanks do."""
    if _wanted(data.delimiter) != " ":
        return text
    quote = re.escape(_quote(data).encode())
    quoted = rb"(?<!\S)" + quote + rb"[^\n" + quote + rb"]*" + quote if quote else rb"(?!)"
    text = re.sub(rb"(?m)^[ \t]+|[ \t]+$", b"", text)  # blanks around a line separate nothing
    return re.sub(rb"(" + quoted + rb")|[ \t]+", lambda found: found[1] or b" ", text)


def _first_lines(text: bytes) -> bytes:
    ends = line_ends(text)
    return text[: ends[min(len(ends) - 1, max(_HEAD_LINES - 1, int(np.searchsorted(ends, _HEAD_BYTES))))]]


def _sniffed(file: Path, head: bytes, wanted: str | None, data: RowFiles) -> Dialect:
    """Return the dialect that DuckDB finds in the first lines. Raises UserError
    for too many columns, and where blanks may separate cells or other quotes enclose them."""
    first = head.split(b"\n", 1)[0]
    check_columns(file, 1 + max(map(first.count, (b",", b"\t", b";", b"|"))))  # DuckDB takes long for many
    found = None
    quote = {} if data.quote == "auto" else {"quote": _quote(data)}
    if wanted is None:  # an unusual separator must split every line; of a usual one, some rows may be broken
        tries = (sniff(head, delim=separator, **quote) for separator in _UNUSUAL)
        found = next((one for one in tries if one and one.width > 1 and not one.num_skipped), None)
    else:
        quote["delim"] = wanted
    if (found := found or sniff(head, ignore_errors=True, **quote)) is None:
        raise UserError(f"data.path={file}: no separator splits its lines; set data.delimiter")
    if found.width == 1 and not wanted:
        _check_blanks(file, head)
    if found.quote == "'" and data.quote == "auto":
        raise UserError(
            f'data.path={file}: single quotes seem to enclose cells; set data.quote="\'" if they do, else '
            "data.quote='\"'"
        )
    escape = found.escape if found.escape == "\\" and found.quote == _quote(data) else _quote(data)
    return Dialect(found.separator, _quote(data), escape)


def _check_blanks(file: Path, head: bytes) -> None:
    """Raise UserError if blanks split the lines of a file with a single column evenly."""
    lines = [line for line in head.split(b"\n")[:_HEAD_LINES] if line.strip()]
    first, *others = (len(re.findall(rb'"[^"]*"|\S+', line)) for line in lines)
    if others and {*others} <= {first, first + 1} and len({*others}) == 1 and others[0] > 1:
        raise UserError(
            f"data.path={file}: its lines have one cell, or {others[0]} between blanks; set "
            "data.delimiter=blank for the latter, else data.delimiter=,"
        )


def _check_quotes(block: _Block, text: bytes, parsed: Parsed, data: RowFiles) -> None:
    """Raise UserError if quotes seem to be plain text: every line has its number of cells without them, and
    they break rows or join lines; or very many do not close."""
    filled = np.diff(line_ends(text), prepend=0)[: parsed.num_lines] > 1
    num_joined = int(filled.sum()) - len(parsed.lines) - len(parsed.bad)
    wrong = [bad.line for bad in parsed.bad if not bad.num_values]
    if parsed.num_open < MOST_OPEN:
        separator, width = block.layout.dialect.separator, len(block.layout.names)
        # Among tabs, quotes mostly are plain text; in other files, a few may be mistakes.
        if data.quote != "auto" or len(wrong) + num_joined < (1 if separator == "\t" else 3):
            return
        if not all(line.count(separator.encode()) == width - 1 for line in text.split(b"\n") if line):
            return
    long = np.diff(parsed.lines, append=parsed.num_lines) > 1
    first = min([*wrong, *parsed.lines[long][:1].tolist()])
    raise UserError(
        f"data.path={block.file}: has quotes that do not enclose cells, such as in line "
        f"{block.line + first + 1}; set data.quote=none if quotes are plain text, else "
        f"data.quote='{_quote(data)}', which rejects such rows"
    )


def _first_rows(head: bytes, dialect: Dialect) -> list[tuple[int, list[str]]]:
    """Return the cells of the first rows, each with the number of lines up to its end."""
    lines = head.split(b"\n")
    separator, quote = dialect.separator.encode(), dialect.quote.encode()
    most = max(line.count(separator) for line in lines)
    if quote and quote in head:  # a row may have several lines
        most = min(head.count(separator), max(4 * most, 64))
    parsed = parse(head, dialect, 1 + most, ragged=True)
    rows = list[tuple[int, list[str]]]()
    first_rows = zip(*(cells.head(_HEAD_LINES) for cells in parsed.columns), strict=True)
    for line, row in zip(parsed.lines.tolist(), first_rows, strict=False):
        cells = [cell.strip() for cell in row if cell is not None]
        rows.append((line + 1 + sum(cell.count("\n") for cell in row if cell), cells))
    # Without any row, the first line has a quote that is not closed.
    first = next(number for number, line in enumerate(lines) if line.strip())
    return rows or [(first + 1, lines[first].decode().split(dialect.separator))]


def _header(first: list[str], others: list[list[str]], data: RowFiles) -> str | None:
    """Return a note (mostly empty) if the first line names the columns, else None.

    It does if it holds a column name from the config, or counts columns or years. Otherwise it must hold no
    number, and either stand above a column of numbers, or have a distinct text in every cell, none of which
    appears below it.
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
    if _counts(pairs):
        shown = ", ".join(cell for cell, _ in pairs[:4])
        return f"the first line ({shown}, ...) names the columns; --data.header no reads it as values"
    if any(is_number(cell) for cell, _ in pairs):
        return None
    if any(cell not in none and values and all(map(is_number, values)) for cell, values in pairs):
        return ""
    cells = [cell for cell, _ in pairs]
    distinct = len(set(cells)) == len(cells) and none.isdisjoint(cells) and (first[0] or len(cells) > 1)
    return "" if distinct and not any(cell in values for cell, values in pairs) else None


def _counts(pairs: Sequence[tuple[str, set[str]]]) -> bool:
    """Return whether the first line counts the columns or the years, as no row below does."""
    cells = [cell for cell, _ in pairs]
    numbers = [(int(cell), values) for cell, values in pairs if re.fullmatch(r"\d{1,4}", cell)]
    first = numbers[0][0] if numbers else -1
    if len(numbers) < 2 or [n for n, _ in numbers] != list(range(first, first + len(numbers))):
        return False
    if len(numbers) == len(pairs) and first in (0, 1):
        # A row of whole numbers may begin 0, 1, 2, too, but hardly goes on for long.
        return len(cells) > 4 or any(not v.lstrip("+-").isdigit() for _, values in pairs for v in values)
    others = any(is_number(cell) for cell in cells if not cell.isdigit())
    is_year = re.compile(r"(19|20)\d\d").fullmatch
    return (
        is_year(str(first)) is not None
        and not others
        and all(values and not all(map(is_year, values)) for _, values in numbers)
        and not any(cell in values for cell, values in pairs)
    )


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
