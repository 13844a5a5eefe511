"""Rows of CSV and TSV files, block by block.

A block of a file that holds no quote and has the same number of separators in every line goes to polars as it
is. Any other block is read row by row (`dphybrid.data.table.fields`), which gives the same values, only
slower. Where a block without quotes ends is known before it is read, so that threads can read several at a
time; neither blocks nor results depend on them.
"""

import gzip
import io
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import polars as pl

from dphybrid.config.tables import TableDataConfig
from dphybrid.data.table.fields import (
    MAX_SPAN,
    SAMPLE,
    column_names,
    cut_rows,
    find_separator,
    first_rows,
    has_header,
)
from dphybrid.data.table.rows import Job, Rows, as_job, check_columns, clean
from dphybrid.util.errors import UserError

SHOWN = 500
"""Characters of a rejected row that are kept."""
BLOCK_BYTES = 2**23
"""Text read at a time."""
UNPACKED_BYTES = 2**26
"""Text that a packed file may always come to."""

_LINE_END = re.compile(r"\r\n|\n|\r")
_LINE_END_BYTES = re.compile(rb"\r\n|\n|\r")
_BLANKS = (b" ", b"\t", b"\v", b"\f")


@dataclass(frozen=True)
class Layout:
    """How a delimited file is written. body: number of the first line after the header, from 0 on."""

    separator: str
    names: list[str]
    header: bool
    body: int
    renamed: tuple[tuple[str, str], ...] = ()


def csv_jobs(file: Path, data: TableDataConfig) -> Iterator[Job]:
    """Yield the jobs that return the rows of a file's blocks, in order. Raises UserError when it cannot be
    read, is empty, or is no text."""
    layout: Layout | None = None
    line = offset = 0  # of what is not read yet
    found = False
    longest = data.max_line_mib * 2**20
    with _text_stream(file, data.max_expansion) as stream:
        rest, last = b"", False
        while not last:
            piece = stream.read(min(BLOCK_BYTES, longest))
            last = not piece
            cut = _last_line_end(piece)
            if len(rest) + len(piece) > longest:
                begun = len(rest) - _last_line_end(rest)
                end = _LINE_END_BYTES.search(piece)
                if begun + (end.start() if end else len(piece)) > longest:
                    number = line + 1 + len(_LINE_END_BYTES.findall(rest))
                    raise UserError(
                        f"data.path={file}: line {number} is longer than data.max_line_mib="
                        f"{data.max_line_mib} allows; is it text? Mend the file, or raise data.max_line_mib"
                    )
            if not cut and not last:
                rest += piece
                continue
            block, rest = b"".join((rest, memoryview(piece)[:cut])), piece[cut:]
            if not block:
                continue
            if layout is None:
                layout = _layout(file, block, data)
                if layout is None:  # blank lines only, so far
                    line, offset = line + len(_LINE_END_BYTES.findall(block)), offset + len(block)
                    continue
                if line == 0 and layout.body:
                    ends = [match.end() for match in islice(_LINE_END_BYTES.finditer(block), layout.body)]
                    start = ends[-1] if len(ends) == layout.body else len(block)
                    line, offset, block = layout.body, offset + start, block[start:]
            if b'"' in block or (b"\r" in block and block.count(b"\r") != block.count(b"\r\n")):
                rows, num_lines, unread = _careful(file, block, layout, data, line, offset, last)
                yield as_job(rows)
                line, offset, rest = line + num_lines, offset + len(block) - len(unread), unread + rest
            elif block:
                num_lines = _count(block, b"\n") + (not block.endswith(b"\n"))
                yield partial(_block_rows, file, block, layout, data, line, offset, num_lines)
                line, offset = line + num_lines, offset + len(block)
            found = found or bool(block)
    if layout is None:
        raise UserError(f"data.path={file}: is empty; give a file with rows")
    if not found:
        yield partial(_block_rows, file, b"", layout, data, line, offset, 0)


class _text_stream:
    """A file's bytes, unpacked when it is gzip; what is wrong with the packing is told as a UserError."""

    def __init__(self, file: Path, max_expansion: int) -> None:
        self.file, self.max_expansion = file, max_expansion
        self.unpacked_bytes = 0
        self._stack = ExitStack()

    def __enter__(self) -> "_text_stream":
        self.raw = self._stack.enter_context(self.file.open("rb", buffering=0))
        self.stream: IO[bytes] = self.raw
        self.packed = self.file.suffix.lower() == ".gz"
        if self.packed:
            self.stream = cast(IO[bytes], self._stack.enter_context(gzip.GzipFile(fileobj=self.raw)))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read(self, size: int) -> bytes:
        try:
            piece = self.stream.read(size)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise UserError(
                f"data.path={self.file}: is no complete gzip file: {error}; pack it again, or unpack it"
            ) from error
        self.unpacked_bytes += len(piece)
        if self.packed and self.unpacked_bytes > max(UNPACKED_BYTES, self.max_expansion * self.raw.tell()):
            raise UserError(
                f"data.path={self.file}: unpacks to more than data.max_expansion={self.max_expansion} times "
                f"its size ({self.unpacked_bytes:,} bytes from {self.raw.tell():,}); is it whole? Raise "
                "data.max_expansion to read it all the same"
            )
        return piece


def _last_line_end(raw: bytes) -> int:
    """Return where the last whole line ends, 0 where there is none."""
    cut = raw.rfind(b"\n") + 1
    return cut or raw.rfind(b"\r", 0, len(raw) - 1) + 1  # \r may be the first half of a line end


def _layout(file: Path, block: bytes, data: TableDataConfig) -> Layout | None:
    head = block if len(block) <= 2**20 else block[: _last_line_end(block[: 2**20]) or len(block)]
    lines = _LINE_END.split(_decode(file, head, 0, 0))
    starts = [i for i, line in enumerate(lines) if line.strip()]
    if not starts:
        return None
    separator = find_separator([lines[i] for i in starts[:SAMPLE]], data.delimiter)
    (first, first_end), *others = first_rows(lines, starts, separator)
    check_columns(file, len(first), data.max_columns)
    if has_header(first, [cells for cells, _ in others], data):
        names = column_names(first)
        twice = tuple((cell, name) for cell, name in zip(first, names, strict=True) if cell not in ("", name))
        return Layout(separator, names, True, first_end + 1, twice)
    width = Counter(len(cells) for cells in (first, *(cells for cells, _ in others))).most_common(1)[0][0]
    return Layout(separator, [str(i) for i in range(width)], False, 0)


def _block_rows(
    file: Path, block: bytes, layout: Layout, data: TableDataConfig, line: int, offset: int, num_lines: int
) -> Rows:
    """Return the rows of a block without quotes, whose lines end in \\n or \\r\\n."""
    values = _plain(block, num_lines, layout, data.no_value)
    if values is None:
        return _careful(file, block, layout, data, line, offset, last=True)[0]
    lines = np.arange(line + 1, line + 1 + num_lines)
    end = offset + len(block)
    return Rows(layout.names, values, lines, [], layout.header, "line", file, end, layout.renamed)


def _plain(block: bytes, num_rows: int, layout: Layout, missing: tuple[str, ...]) -> pl.DataFrame | None:
    """Return the columns of such a block when polars reads it as `_careful` would, else None."""
    separator, width = layout.separator.encode(), len(layout.names)
    if len(separator) > 1 or width == 1:
        return None
    if b"\r" in block:
        block = block.replace(b"\r\n", b"\n")
    if not block.isascii():
        block = block.replace(b"\xef\xbb\xbf", b"")
    if _count(block, separator) != num_rows * (width - 1):
        return None
    blanks = not block.isascii() or any(blank in block for blank in _BLANKS if blank != separator)
    present = [] if blanks else [text for text in missing if all(sign in block for sign in text.encode())]
    try:
        frame = pl.read_csv(
            block,
            has_header=False,
            schema={str(i): pl.String for i in range(width)},
            separator=layout.separator,
            quote_char=None,
            null_values=present or None,
        )
    except pl.exceptions.PolarsError:  # a row has too many fields, or the text is no UTF-8
        return None
    # with all separators there, and no row with too many fields, every row has its own
    if len(frame) != num_rows:
        return None
    return clean(frame, missing) if blanks else frame


def _count(block: bytes, sign: bytes) -> int:
    """Return how often a byte occurs; `bytes.count` takes four times as long where it does so often."""
    signs = np.frombuffer(block, np.uint8)
    return sum(int(np.count_nonzero(signs[i : i + 2**20] == sign[0])) for i in range(0, len(signs), 2**20))


def _careful(
    file: Path, block: bytes, layout: Layout, data: TableDataConfig, line: int, offset: int, last: bool
) -> tuple[Rows, int, bytes]:
    """Return the rows of a block, how many lines they took, and the end of the block that needs lines of the
    next one."""
    lines = _LINE_END.split(_decode(file, block, line, offset))
    if lines[-1] == "":
        lines.pop()
    good: list[tuple[int, str | list[str]]] = []
    rejected: list[dict[str, Any]] = []
    used = len(lines)
    starts = [i for i, text in enumerate(lines) if text.strip()]
    for i, row, reason in cut_rows(lines, starts, layout.separator, len(layout.names)):
        # an open quote may close in the next block
        if reason and not last and '"' in lines[i] and i + MAX_SPAN > len(lines):
            used = i
            break
        if reason:
            rejected.append(
                {"file": str(file), "line": line + i + 1, "reason": reason, "text": lines[i][:SHOWN]}
            )
        else:
            good.append((line + i + 1, row))
    columns = _columns([row for _, row in good], layout.separator, len(layout.names))
    values = clean(columns, data.no_value)
    numbers = np.array([number for number, _ in good], dtype=np.int64)
    unread = "".join(f"{text}\n" for text in lines[used:]).encode()
    bytes_read = offset + len(block) - len(unread)
    return (
        Rows(
            layout.names, values, numbers, rejected, layout.header, "line", file, bytes_read, layout.renamed
        ),
        used,
        unread,
    )


def _decode(file: Path, raw: bytes, line: int, offset: int) -> str:
    try:
        return raw.decode("utf-8").replace("\ufeff", "")  # also between files that were joined
    except UnicodeDecodeError as error:
        line += 1 + len(_LINE_END_BYTES.findall(raw[: error.start]))
        raise UserError(
            f"data.path={file}: is no UTF-8 text (line {line}, byte {offset + error.start}); save it as "
            "UTF-8, or give a Parquet file"
        ) from error


def _columns(rows: list[str | list[str]], separator: str, width: int) -> pl.DataFrame:
    """Return the columns as text: plain rows by polars, rows with quotes put in their places."""
    names = [str(i) for i in range(width)]
    if rows and separator.isascii() and all(isinstance(row, str) for row in rows):
        text = "\n".join(row for row in rows if isinstance(row, str))
        return pl.read_csv(
            io.BytesIO(text.encode()),
            has_header=False,
            new_columns=names,
            separator=separator,
            quote_char=None,
            infer_schema=False,
        )
    split = [row.split(separator) if isinstance(row, str) else row for row in rows]
    columns = zip(*split, strict=True) if split else ([] for _ in names)
    return pl.DataFrame(
        [pl.Series(name, column, dtype=pl.String) for name, column in zip(names, columns, strict=True)]
    )
