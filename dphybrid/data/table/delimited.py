"""Rows of CSV and TSV files, block by block: RFC 4180 plus what files in the wild do (blanks around values,
ragged rows, stray quotes).

polars parses a block that holds no quote and the same number of separators in every line. Python's `csv`
reads any other block line by line and gives the same values, only slower; a quote that opens and never closes
costs its own row only. Separator, header and column names are inferred from the first rows.
"""

import csv
import gzip
import re
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
from dphybrid.data.batches import Array
from dphybrid.data.table.numbers import is_number
from dphybrid.data.table.rows import Job, Rejected, Rows, as_job, check_columns, clean
from dphybrid.util.errors import UserError

SHOWN = 500
"""Characters of a rejected row that are kept."""
BLOCK_BYTES = 2**23
"""Text read at a time."""
UNPACKED_BYTES = 2**26
"""Text that a packed file may always come to."""
_SEPARATORS = ",\t;|"
"""Separators that are looked for; the earlier one wins a tie."""
_SAMPLE = 50
"""Rows that separator, header and width are inferred from."""
_MAX_SPAN = 64
"""Lines that one quoted value may run over."""

_LINE_END = re.compile(r"\r\n|\n|\r")
_LINE_END_BYTES = re.compile(rb"\r\n|\n|\r")
_BLANKS = (b" ", b"\t", b"\v", b"\f")


@dataclass(frozen=True)
class _Layout:
    """How a delimited file is written. body: number of the first line after the header, from 0 on."""

    separator: str
    names: list[str]
    header: bool
    body: int
    renamed: tuple[tuple[str, str], ...] = ()


def csv_jobs(file: Path, data: TableDataConfig) -> Iterator[Job]:
    """Yield the jobs that return the rows of a file's blocks, in order. Raises UserError when it cannot be
    read, is empty, or is not text."""
    layout: _Layout | None = None
    line = offset = 0  # of what is not read yet
    block, unread, found = b"", b"", False
    for piece, last in _whole_lines(file, data):
        if len(piece) > data.max_line_mib * 2**20:
            _check_line(file, piece, data, line + 1 + _num_ends(unread))
        block = unread + piece
        if layout is None and block:
            layout = _layout(file, block, data)
            cut = _end_of_lines(block, layout.body) if layout else len(block)  # lines are blank so far
            line, offset, block = line + _num_ends(block[:cut]), offset + cut, block[cut:]
        unread = b""
        if layout is None or not (block or (last and not found)):
            continue
        found, read = True, _Block(file, block, layout, data.no_value, line, offset)
        if b'"' in block or (b"\r" in block and block.count(b"\r") != block.count(b"\r\n")):
            rows, num_lines, unread = read._line_by_line(last)
            yield as_job(rows)
        else:
            num_lines = read.num_lines
            yield read.rows
        line, offset = line + num_lines, offset + len(block) - len(unread)
    if layout is None:
        raise UserError(f"data.path={file}: is empty; give a file with rows")


def _whole_lines(file: Path, data: TableDataConfig) -> Iterator[tuple[bytes, bool]]:
    """Yield the text of a file, unpacked when it is gzip, in blocks of whole lines (a line that is too long
    unfinished), and whether a block is the last one."""
    longest, rest, num_bytes = data.max_line_mib * 2**20, b"", 0
    with file.open("rb", buffering=0) as raw:
        packed = file.suffix.lower() == ".gz"
        stream = cast(IO[bytes], gzip.GzipFile(fileobj=raw)) if packed else raw
        try:
            following = stream.read(min(BLOCK_BYTES, longest))
            while piece := following:
                # num_bytes: unpacked; raw.tell(): packed ones that were read for them.
                num_bytes += len(piece)
                if packed and num_bytes > max(UNPACKED_BYTES, data.max_expansion * raw.tell()):
                    raise UserError(
                        f"data.path={file}: unpacks to more than data.max_expansion={data.max_expansion} "
                        f"times its size ({num_bytes:,} bytes from {raw.tell():,}); is it whole? Raise "
                        "data.max_expansion to read it all the same"
                    )
                following = stream.read(min(BLOCK_BYTES, longest))
                cut = _last_line_end(piece) or (len(piece) if len(rest) + len(piece) > longest else 0)
                if cut and following:
                    yield rest + piece[:cut], False
                # the last line needs no end to be one of its block
                rest = piece[cut:] if cut and following else rest + piece
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise UserError(
                f"data.path={file}: is not a complete gzip file: {error}; pack it again, or unpack it"
            ) from error
    yield rest, True


def _check_line(file: Path, block: bytes, data: TableDataConfig, number: int) -> None:
    """Raise UserError where the first line of a block is too long."""
    end = _LINE_END_BYTES.search(block)
    if (end.start() if end else len(block)) > data.max_line_mib * 2**20:
        raise UserError(
            f"data.path={file}: line {number} is longer than data.max_line_mib={data.max_line_mib} allows; "
            "is it text? Mend the file, or raise data.max_line_mib"
        )


def _num_ends(raw: bytes) -> int:
    return len(_LINE_END_BYTES.findall(raw))


def _last_line_end(raw: bytes) -> int:
    """Return where the last whole line ends, 0 where there is none."""
    cut = raw.rfind(b"\n") + 1
    return cut or raw.rfind(b"\r", 0, len(raw) - 1) + 1  # \r may be the first half of a line end


def _end_of_lines(raw: bytes, num_lines: int) -> int:
    """Return where the first lines end."""
    ends = [match.end() for match in islice(_LINE_END_BYTES.finditer(raw), num_lines)]
    return len(raw) if len(ends) < num_lines else max(ends, default=0)


@dataclass(frozen=True)
class _Block:
    """Whole lines of a file. line, offset: lines and bytes before them."""

    file: Path
    text: bytes
    layout: _Layout
    no_value: tuple[str, ...]
    line: int
    offset: int

    @property
    def num_lines(self) -> int:
        """Lines of a block that end in \\n or \\r\\n."""
        return _count(self.text, b"\n") + (not self.text.endswith(b"\n")) if self.text else 0

    def rows(self) -> Rows:
        """Return the rows of a block without quotes, whose lines end in \\n or \\r\\n."""
        cells = self._parsed()
        if cells is None:
            return self._line_by_line(last=True)[0]
        return self._rows(cells, np.arange(self.line + 1, self.line + 1 + self.num_lines), [], b"")

    def _rows(self, cells: list[pl.Series], lines: Array, rejected: list[Rejected], unread: bytes) -> Rows:
        end, layout = self.offset + len(self.text) - len(unread), self.layout
        columns = dict(zip(layout.names, cells, strict=True))
        return Rows(columns, lines, rejected, layout.header, "line", self.file, end, layout.renamed)

    def _parsed(self) -> list[pl.Series] | None:
        """Return the columns as polars reads them, None where `_line_by_line` would read others."""
        separator, width, num_rows = self.layout.separator.encode(), len(self.layout.names), self.num_lines
        if len(separator) > 1 or width == 1:
            return None
        text = self.text.replace(b"\r\n", b"\n") if b"\r" in self.text else self.text
        if not text.isascii():
            text = text.replace(b"\xef\xbb\xbf", b"")
        # polars fills short rows up in silence, so the fields are counted here.
        if _count(text, separator) != num_rows * (width - 1):
            return None
        blanks = not text.isascii() or any(blank in text for blank in _BLANKS if blank != separator)
        # A text for no value costs a comparison with each cell: name only those that the block can hold.
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
        # with all separators there, and no row with too many fields, every row has its own
        if len(frame) != num_rows:
            return None
        return clean(frame.get_columns(), self.no_value) if blanks else frame.get_columns()

    def _line_by_line(self, last: bool) -> tuple[Rows, int, bytes]:
        """Return the rows, how many lines they took, and the end of the block that needs lines of the next
        one."""
        width, separator = len(self.layout.names), self.layout.separator
        lines = _lines(self.file, self.text, self.line, self.offset)
        rows, numbers, rejected = list[list[str]](), list[int](), list[Rejected]()
        i = 0
        while i < len(lines):
            row, end, reason = _row(lines, i, separator, width)
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
        return self._rows(cells, np.array(numbers, np.int64), rejected, unread), i, unread


def _count(block: bytes, sign: bytes) -> int:
    """Return how often a byte occurs; `bytes.count` takes four times as long where it does so often."""
    signs = np.frombuffer(block, np.uint8)
    return sum(int(np.count_nonzero(signs[i : i + 2**20] == sign[0])) for i in range(0, len(signs), 2**20))


def _lines(file: Path, raw: bytes, line: int, offset: int) -> list[str]:
    """Return the lines of a block. line, offset: lines and bytes before it. Raises UserError for what is no
    UTF-8."""
    try:
        text = raw.decode("utf-8").replace("\ufeff", "")  # also between files that were joined
    except UnicodeDecodeError as error:
        line += 1 + _num_ends(raw[: error.start])
        raise UserError(
            f"data.path={file}: is not UTF-8 text (line {line}, byte {offset + error.start}); save it as "
            "UTF-8, or give a Parquet file"
        ) from error
    lines = _LINE_END.split(text)
    return lines[:-1] if lines[-1] == "" else lines


def _row(lines: list[str], start: int, separator: str, width: int | None) -> tuple[list[str], int, str]:
    """Return the row that begins in line `start` (empty for a blank line), its last line, and what is wrong
    with it. width None: any."""
    text = lines[start]
    if '"' not in text:
        row = text.split(separator) if text.strip() else []
        return row, start, _wrong_width(row, width) if row else ""
    for last in range(start, min(start + _MAX_SPAN, len(lines))):
        if last > start:
            text += "\n" + lines[last]
            if '"' not in lines[last]:  # cannot close the value
                continue
        try:
            (row,) = csv.reader([text], delimiter=separator, skipinitialspace=True, strict=True)
        except csv.Error as error:
            if str(error) == "unexpected end of data":
                continue
            if last == start:
                return [], start, f"misplaced quote: {error}"
            break
        reason = _wrong_width(row, width)
        if reason and last > start:
            break
        return row, last, reason
    return [], start, "a quote is opened and not closed"


def _wrong_width(row: list[str], width: int | None) -> str:
    return "" if width in (None, len(row)) else f"{len(row)} values, expected {width}"


def _loose(line: str, separator: str) -> list[str]:
    """Return the cells of a line that may be broken."""
    try:
        (cells,) = csv.reader([line], delimiter=separator, skipinitialspace=True)
    except csv.Error:
        cells = line.split(separator)
    return [cell.strip() for cell in cells]


def _layout(file: Path, block: bytes, data: TableDataConfig) -> _Layout | None:
    """Infer the layout from the first rows; None where all lines are blank."""
    head = block if len(block) <= 2**20 else block[: _last_line_end(block[: 2**20]) or len(block)]
    lines = _lines(file, head, 0, 0)
    sample = list(islice((line for line in lines if line.strip()), _SAMPLE))
    if not sample:
        return None
    separator = _separator(sample, data.delimiter)
    rows, i, body = list[list[str]](), 0, 0
    while i < len(lines) and len(rows) < _SAMPLE:
        row, end, reason = _row(lines, i, separator, None)
        if row or reason:
            body = body or end + 1
            rows.append(_loose(lines[i], separator) if reason else [cell.strip() for cell in row])
        i = end + 1
    first, *others = rows
    check_columns(file, len(first), data.max_columns)
    if _has_header(first, others, data):
        names = _column_names(first)
        twice = tuple((cell, name) for cell, name in zip(first, names, strict=True) if cell not in ("", name))
        return _Layout(separator, names, True, body, twice)
    width = Counter(map(len, rows)).most_common(1)[0][0]
    return _Layout(separator, [str(i) for i in range(width)], False, 0)


def _separator(sample: Sequence[str], wanted: str) -> str:
    """Return the wanted separator, else the one that cuts the most lines into the same number of cells, then
    into the most cells."""
    if wanted != "auto":
        separator = {"tab": "\t", "\\t": "\t"}.get(wanted, wanted)
        if len(separator) != 1 or separator in '"\r\n':
            raise UserError(
                f"data.delimiter={wanted!r}: give one character, no quote and no line end, or tab"
            )
        return separator

    def score(separator: str) -> tuple[float, int]:
        cells, lines = Counter(len(_loose(line, separator)) for line in sample).most_common(1)[0]
        return (lines / len(sample), cells) if cells > 1 else (0.0, 0)

    return max(_SEPARATORS, key=score)


def _has_header(first: list[str], others: list[list[str]], data: TableDataConfig) -> bool:
    """Tell whether the first line names the columns: it holds a column name that the config gives; else it
    holds no number, and names a column whose other values are all numbers, or is complete, without
    repetition, and none of its cells appears below it."""
    if data.header != "auto":
        return data.header == "yes"
    given = {name for _, name in data.named_columns if name and not is_number(name)}
    below = [{row[i] for row in others if i < len(row)} - {"", *data.no_value} for i in range(len(first))]
    if any(cell in given and cell not in values for cell, values in zip(first, below, strict=True)):
        return True
    if any(is_number(cell) for cell in first):
        return False
    told = [cell not in ("", *data.no_value) for cell in first]
    if any(name and values and all(map(is_number, values)) for name, values in zip(told, below, strict=True)):
        return True
    return (
        all(told)
        and len(set(first)) == len(first)
        and not any(c in v for c, v in zip(first, below, strict=True))
    )


def _column_names(header: list[str]) -> list[str]:
    """Return distinct names: a column without a name gets its position, a repeated name a number."""
    names: list[str] = []
    taken: set[str] = set()
    given = set(header)
    for position, cell in enumerate(header):
        name, count = cell or str(position), 1
        while name in taken or (count > 1 and name in given):
            count += 1
            name = f"{cell or position}_{count}"
        names.append(name)
        taken.add(name)
    return names
