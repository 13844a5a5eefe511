"""Rows of CSV and TSV files, block by block: RFC 4180, and what real files add to it (blanks around values,
ragged rows, stray quotes).

polars parses blocks without quotes in which every line has the same number of separators. Python's `csv`
reads all other blocks line by line, which gives the same values more slowly; an unclosed quote rejects only
its own row. Separator, header and column names are inferred from the first rows.
"""

import csv
import gzip
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, cast

import numpy as np
import polars as pl

from dphybrid.config.tables import TableDataConfig
from dphybrid.data.table.cells import clean
from dphybrid.data.table.numbers import is_number
from dphybrid.data.table.rows import SHOWN, Job, Rejected, Rows, as_job, check_columns
from dphybrid.util.errors import UserError

BLOCK_BYTES = 2**23
"""Bytes of text read at a time."""
_MAX_LINE_BYTES = 2**26
"""With a longer line, a file is taken not to be a table."""
_SEPARATORS = ",\t;|"
"""Separators that can be inferred; an earlier one wins a tie."""
_SAMPLE = 50
"""Number of rows from which separator, header and width are inferred."""
_MAX_SPAN = 64
"""Maximum number of lines of one quoted value; limits the work on an unclosed quote."""
_BLANKS = (b" ", b"\t", b"\v", b"\f")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class _Layout:
    """How a delimited file is written. body: index of the first line after the header."""

    separator: str
    names: list[str]
    header: bool
    body: int


def csv_jobs(file: Path, data: TableDataConfig) -> Iterator[Job]:
    """Yield a job for each block of a file, in order, that returns its rows. Raises UserError if the file
    cannot be read, is empty, or is not text."""
    layout: _Layout | None = None
    line, unread, num_blocks = 0, b"", 0
    for piece, bytes_read, last in _whole_lines(file):
        text, unread = unread + piece, b""
        if layout is None:
            layout = _layout(file, text, data)
            header = layout.body if layout else text.count(b"\n")  # without a layout all lines are blank
            line, text = line + header, text.split(b"\n", header)[-1]
        if layout is None or not (text or (last and not num_blocks)):
            continue
        block = _Block(file, text, layout, data.no_value, line, bytes_read)
        num_blocks += 1
        # A quoted value may continue in the next block, so these blocks are read here, in order, and not by
        # a job in another thread.
        if b'"' in text:
            rows, num_lines, unread = block.line_by_line(last)
            yield as_job(rows)
        else:
            num_lines = block.num_lines
            yield block.rows
        line += num_lines
    if layout is None:
        raise UserError(f"data.path={file}: is empty; give a file with rows")


def _whole_lines(file: Path) -> Iterator[tuple[bytes, int, bool]]:
    """Yield a file's text in blocks of whole lines, unpacked if it is gzip, with all line ends as \\n. With
    each block, also yield the bytes read so far, and whether it is the last one."""
    rest = b""
    with file.open("rb", buffering=0) as raw:
        packed = file.suffix.lower() == ".gz"
        stream = cast(IO[bytes], gzip.GzipFile(fileobj=raw)) if packed else raw
        try:
            following = stream.read(BLOCK_BYTES)
            while piece := following:
                following = stream.read(BLOCK_BYTES)
                if b"\r" in piece:
                    if piece.endswith(b"\r"):  # perhaps the first half of \r\n
                        piece, following = piece + following[:1], following[1:] or stream.read(BLOCK_BYTES)
                    piece = piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
                if not following and not piece.endswith(b"\n"):
                    piece += b"\n"
                if cut := piece.rfind(b"\n") + 1:
                    text = rest + piece[:cut]
                    if not text.isascii():  # concatenated files have byte-order marks inside, too
                        text = text.replace(_BYTE_ORDER_MARK, b"")
                    yield text, raw.tell(), not following
                rest = piece[cut:] if cut else rest + piece
                if len(rest) > _MAX_LINE_BYTES:
                    raise UserError(
                        f"data.path={file}: has a line of over {_MAX_LINE_BYTES:,} bytes, so it is not "
                        "read as a table; give a text file with line ends"
                    )
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise UserError(
                f"data.path={file}: is not a complete gzip file: {error}; compress it again, or give it "
                "uncompressed"
            ) from error


@dataclass(frozen=True)
class _Block:
    """Whole lines of a file. line: number of lines before them. bytes_read: of the file, up to their end."""

    file: Path
    text: bytes
    layout: _Layout
    no_value: tuple[str, ...]
    line: int
    bytes_read: int

    @property
    def num_lines(self) -> int:
        return _count(self.text, b"\n")

    def rows(self) -> Rows:
        """Return the rows of a block without quotes."""
        cells = self._parsed()
        if cells is None:
            return self.line_by_line(last=True)[0]
        return self._rows(cells, range(self.line + 1, self.line + 1 + self.num_lines), [])

    def _rows(self, cells: list[pl.Series], lines: Sequence[int], rejected: list[Rejected]) -> Rows:
        columns = dict(zip(self.layout.names, cells, strict=True))
        numbers = np.array(lines, np.int64)
        return Rows(columns, numbers, rejected, self.file, self.layout.header, self.bytes_read)

    def _parsed(self) -> list[pl.Series] | None:
        """Return the columns as polars reads them; None if `line_by_line` would read something else."""
        text, num_rows = self.text, self.num_lines
        separator, width = self.layout.separator.encode(), len(self.layout.names)
        # polars takes separators of one byte, and reads a blank line of a single column as a row.
        if len(separator) > 1 or width == 1:
            return None
        # polars fills up short rows silently, so the separators are counted here.
        if _count(text, separator) != num_rows * (width - 1):
            return None
        blanks = not text.isascii() or any(sign in text for sign in _BLANKS if sign != separator)
        # Each text for no value is compared with every cell: pass only those whose letters the block holds.
        present = [] if blanks else [no for no in self.no_value if all(sign in text for sign in no.encode())]
        try:
            frame = pl.read_csv(
                text,
                has_header=False,
                schema={str(i): pl.String for i in range(width)},
                separator=self.layout.separator,
                quote_char=None,
                null_values=present or None,
            )
        except pl.exceptions.PolarsError:  # a row has too many fields, or the text is not UTF-8
            return None
        # The total number of separators is right and no row has too many fields, so that every row has the
        # right width, if polars dropped none.
        if len(frame) != num_rows:
            return None
        return clean(frame.get_columns(), self.no_value) if blanks else frame.get_columns()

    def line_by_line(self, last: bool) -> tuple[Rows, int, bytes]:
        """Return the rows, the number of lines that they took, and the rest of the block, which needs lines
        of the next one. last: there is no next block, so that nothing is left as a rest."""
        width, separator = len(self.layout.names), self.layout.separator
        lines = _lines(self.file, self.text, self.line)
        rows, numbers, rejected = list[list[str]](), list[int](), list[Rejected]()
        i = 0
        while i < len(lines):
            row, end, reason = _read_row(lines, i, separator, width)
            if reason and not last and '"' in lines[i] and i + _MAX_SPAN > len(lines):
                break  # an open quote may close in the next block
            number = self.line + i + 1
            if reason:
                rejected.append(
                    Rejected(file=str(self.file), line=number, reason=reason, text=lines[i][:SHOWN])
                )
            elif row:
                rows.append(row)
                numbers.append(number)
            i = end + 1
        columns = zip(*rows, strict=True) if rows else [()] * width
        cells = clean((pl.Series(column, dtype=pl.String) for column in columns), self.no_value)
        unread = "".join(f"{text}\n" for text in lines[i:]).encode()
        return self._rows(cells, numbers, rejected), i, unread


def _count(block: bytes, sign: bytes) -> int:
    """Return how often a byte occurs. `bytes.count` takes four times as long for frequent bytes."""
    signs = np.frombuffer(block, np.uint8)
    return sum(int(np.count_nonzero(signs[i : i + 2**20] == sign[0])) for i in range(0, len(signs), 2**20))


def _lines(file: Path, raw: bytes, line: int) -> list[str]:
    """Return the lines of a block. line: number of lines before it, for messages. Raises UserError for text
    that is not UTF-8."""
    try:
        return raw.decode("utf-8").split("\n")[:-1]
    except UnicodeDecodeError as error:
        line += 1 + raw.count(b"\n", 0, error.start)
        raise UserError(
            f"data.path={file}: is not UTF-8 text (line {line}); save it as UTF-8, or give a Parquet file"
        ) from error


def _read_row(lines: list[str], start: int, separator: str, width: int | None) -> tuple[list[str], int, str]:
    """Return the row that begins in line `start` (empty for a blank line), its last line, and the reason why
    it is rejected (empty: it is not). width: expected number of values; None: any."""
    text = lines[start]
    if '"' not in text:
        row = text.split(separator) if text.strip() else []
        return row, start, _wrong_width(row, width) if row else ""
    # A quoted value may hold line ends: add one line at a time until csv reads a complete row.
    for last in range(start, min(start + _MAX_SPAN, len(lines))):
        if last > start:
            text += "\n" + lines[last]
            if '"' not in lines[last]:  # the value cannot end in this line
                continue
        try:
            (row,) = csv.reader([text], delimiter=separator, skipinitialspace=True, strict=True)
        except csv.Error as error:
            # csv has a single class of errors; this text means an open quote.
            if str(error) == "unexpected end of data":
                continue
            if last == start:
                return [], start, f"misplaced quote: {error}"
            break
        reason = _wrong_width(row, width)
        # A stray quote joined the row to the lines after it: reject its own line only.
        if reason and last > start:
            break
        return row, last, reason
    return [], start, "a quote is opened and not closed"


def _wrong_width(row: list[str], width: int | None) -> str:
    return "" if width in (None, len(row)) else f"{len(row)} values, expected {width}"


def _split_leniently(line: str, separator: str) -> list[str]:
    """Return the cells of a line, even if its quotes are misplaced."""
    try:
        (cells,) = csv.reader([line], delimiter=separator, skipinitialspace=True)
    except csv.Error:
        cells = line.split(separator)
    return [cell.strip() for cell in cells]


def _layout(file: Path, block: bytes, data: TableDataConfig) -> _Layout | None:
    """Infer the layout from the first rows; return None if all lines are blank."""
    # Decode a mebibyte of whole lines, or the whole block if its first line is longer.
    head = block if len(block) <= 2**20 else block[: block.rfind(b"\n", 0, 2**20) + 1] or block
    lines = _lines(file, head, 0)
    sample = list(islice((line for line in lines if line.strip()), _SAMPLE))
    if not sample:
        return None
    separator = _separator(sample, data.delimiter)
    rows, i, body = list[list[str]](), 0, 0
    while i < len(lines) and len(rows) < _SAMPLE:
        row, end, reason = _read_row(lines, i, separator, None)
        if row or reason:
            body = body or end + 1  # set by the first row, which may be the header
            rows.append(_split_leniently(lines[i], separator) if reason else [cell.strip() for cell in row])
        i = end + 1
    first, *others = rows
    check_columns(file, len(first))
    if _has_header(first, others, data):
        return _Layout(separator, _column_names(first), True, body)
    # The usual width: the first row of a file without a header may be a broken one.
    width = Counter(map(len, rows)).most_common(1)[0][0]
    return _Layout(separator, [str(i) for i in range(width)], False, 0)


def _separator(sample: Sequence[str], wanted: str) -> str:
    """Return the wanted separator; for auto, the one that splits most lines into the same number of cells
    and, among equals, into the most cells."""
    if wanted != "auto":
        separator = {"tab": "\t", "\\t": "\t"}.get(wanted, wanted)
        if len(separator) != 1 or separator in '"\r\n':
            raise UserError(
                f"data.delimiter={wanted!r}: give one character other than a quote or line end, or tab"
            )
        return separator

    def score(separator: str) -> tuple[float, int]:
        cells, lines = Counter(len(_split_leniently(line, separator)) for line in sample).most_common(1)[0]
        return (lines / len(sample), cells) if cells > 1 else (0.0, 0)

    return max(_SEPARATORS, key=score)


def _has_header(first: list[str], others: list[list[str]], data: TableDataConfig) -> bool:
    """Return whether the first line names the columns.

    It does if it holds a column name from the config. Otherwise it must hold no number, and either stand
    above a column of numbers, or have a distinct text in every cell, none of which appears below it.
    """
    if data.header != "auto":
        return data.header == "yes"
    given = {name for _, name in data.named_columns if name and not is_number(name)}
    below = [{row[i] for row in others if i < len(row)} - {"", *data.no_value} for i in range(len(first))]
    pairs = list(zip(first, below, strict=True))
    if any(cell in given and cell not in values for cell, values in pairs):
        return True
    if any(is_number(cell) for cell in first):
        return False
    none = {"", *data.no_value}
    if any(cell not in none and values and all(map(is_number, values)) for cell, values in pairs):
        return True
    return (
        none.isdisjoint(first)
        and len(set(first)) == len(first)
        and not any(cell in values for cell, values in pairs)
    )


def _column_names(header: list[str]) -> list[str]:
    """Return distinct column names: an unnamed column gets its position, and a repeated name a number."""
    names: dict[str, None] = {}
    given = set(header)
    for position, cell in enumerate(header):
        name, count = cell or str(position), 1
        # A numbered name must not be one that the header gives to another column.
        while name in names or (count > 1 and name in given):
            count += 1
            name = f"{cell or position}_{count}"
        names[name] = None
    return list(names)
