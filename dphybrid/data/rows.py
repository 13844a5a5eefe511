"""Rows of CSV, TSV and Parquet files, as text, in chunks; rows that do not fit are kept apart with line and reason.

A block of a file that holds no quote and has the same number of separators in every line goes to polars as it is. Any other block is read
row by row (`dphybrid.data.fields`), which gives the same values, only slower. Neither chunks nor results depend on threads.
"""

import gzip
import io
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import polars as pl

from dphybrid.config import DataConfig
from dphybrid.data.batches import Array
from dphybrid.data.fields import MAX_SPAN, SAMPLE, column_names, cut_rows, find_separator, first_rows, has_header
from dphybrid.errors import UserError

SHOWN = 500
"""Characters of a rejected row that are kept."""
BLOCK_BYTES = 2**24
"""Text read at a time."""
BLOCK_ROWS = 2**16
"""Parquet rows read at a time."""
LONGEST_LINE = 2**28
"""Bytes without a line end after which a file is taken for no text."""

_LINE_END = re.compile(r"\r\n|\n|\r")
_LINE_END_BYTES = re.compile(rb"\r\n|\n|\r")
_BLANKS = (b" ", b"\t", b"\v", b"\f")


@dataclass(frozen=True)
class Rows:
    """Values as stripped text (None: no value), the line of each row from 1 on, and the rejected rows.

    values: columns 0, 1, ...; their names stand apart, because polars reads names such as `*` or `^a$` as patterns.
    header: the first line named the columns; Parquet files always do. place: what `lines` counts, "line" or "row".
    """

    names: list[str]
    values: pl.DataFrame
    lines: Array
    rejected: list[dict[str, Any]]
    header: bool
    place: str
    file: Path
    bytes_read: int = 0

    def __len__(self) -> int:
        return len(self.values)

    def column(self, name: str) -> pl.Series:
        """Return a column by its name."""
        return self.values.to_series(self.names.index(name))


@dataclass(frozen=True)
class Layout:
    """How a delimited file is written. body: number of the first line after the header, from 0 on."""

    separator: str
    names: list[str]
    header: bool
    body: int


def is_parquet(file: Path) -> bool:
    """Tell by its name whether a file is read as Parquet."""
    return file.suffix.lower() in (".parquet", ".pq")


def read_chunks(file: Path, data: DataConfig, numbers: Set[str] = frozenset()) -> Iterator[Rows]:
    """Yield the rows of a file, chunk after chunk; a file without rows gives one empty chunk.

    numbers: names of columns that may come as finite float64 instead of text where that is quicker; may grow meanwhile.
    Raises UserError when it cannot be read, is empty, or is no text.
    """
    yield from _parquet_chunks(file, data) if is_parquet(file) else _csv_chunks(file, data, numbers)


def read_rows(file: Path, data: DataConfig) -> Rows:
    """Read a whole file into memory. Raises UserError like `read_chunks`, and when too many rows do not fit or fewer than 2 do."""
    chunks = list(read_chunks(file, data))
    rejected = [row for chunk in chunks for row in chunk.rejected]
    values, lines = pl.concat([chunk.values for chunk in chunks]), np.concatenate([chunk.lines for chunk in chunks])
    first = chunks[0]
    check_rejected(file, rejected, len(values) + len(rejected), data.max_rejected)
    check_enough(file, first, len(values))
    return Rows(first.names, values, lines, rejected, first.header, first.place, file)


def check_enough(file: Path | str, first: Rows, num_rows: int) -> None:
    """Raise UserError when there are not at least two rows."""
    if not num_rows:
        raise UserError(f"data.path={file}: has {'a header and ' if first.header else ''}no rows that can be read")
    if num_rows < 2:
        raise UserError(f"data.path={file}: has {num_rows} rows; at least 2 are needed, one of them held out")


def check_rejected(file: Path | str, rejected: Sequence[dict[str, Any]], num_rows: int, max_rejected: float) -> None:
    """Raise UserError when more than the share `max_rejected` of `num_rows` rows was rejected."""
    if len(rejected) > max_rejected * num_rows:
        first = rejected[0]
        where = "" if str(file) == first["file"] else f" of {first['file']}"
        raise UserError(
            f"data.path={file}: {len(rejected)} of {num_rows} rows cannot be read, more than data.max_rejected={max_rejected:g} allows; "
            f"the first is line {first['line']}{where}: {first['reason']}; mend the file, set data.delimiter, or raise data.max_rejected"
        )


def _parquet_chunks(file: Path, data: DataConfig) -> Iterator[Rows]:
    names, start = None, 1
    try:
        # Folders named key=value become columns.
        lazy = pl.scan_parquet(file, hive_partitioning=any("=" in part for part in file.parent.parts), try_parse_hive_dates=False)
        names = lazy.collect_schema().names()
        for frame in lazy.collect_batches(chunk_size=BLOCK_ROWS, maintain_order=True):
            values = _clean([_single(column, file, data) for column in frame.get_columns()], data.missing)
            yield Rows(names, values, np.arange(start, start + len(frame)), [], True, "row", file)
            start += len(frame)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise UserError(f"data.path={file}: cannot be read as Parquet: {error}") from error
    if start == 1:
        empty = pl.DataFrame({str(i): pl.Series([], dtype=pl.String) for i in range(len(names))})
        yield Rows(names, empty, np.arange(0), [], True, "row", file)


def _single(column: pl.Series, file: Path, data: DataConfig) -> pl.Series:
    """Return a Parquet column of single values; one of lists, structures or bytes must be ignored, and is empty then."""
    if not (column.dtype.is_nested() or column.dtype in (pl.Binary, pl.Object)):
        return column
    if column.name in data.ignore:
        return pl.Series(column.name, [None] * len(column), dtype=pl.String)
    raise UserError(
        f"data.path={file}: column {column.name!r} holds {column.dtype}, not single values; name it in data.ignore, or write it as text, "
        "lists as a|b for data.bags"
    )


def _clean(columns: Sequence[pl.Series], missing: Sequence[str]) -> pl.DataFrame:
    """Return columns 0, 1, ... of stripped text, None for what means no value."""
    texts = [column.alias(str(i)).cast(pl.String).str.strip_chars() for i, column in enumerate(columns)]
    return pl.DataFrame([text.set(text.is_in(["", *missing]).fill_null(False), None) for text in texts])


def _csv_chunks(file: Path, data: DataConfig, numbers: Set[str]) -> Iterator[Rows]:
    layout: Layout | None = None
    line = offset = 0  # of what is not read yet
    found = False
    with _text_stream(file) as stream:
        rest, last = b"", False
        while not last:
            piece = stream.read(BLOCK_BYTES)
            last = not piece
            cut = _last_line_end(piece)
            if not cut and not last:
                rest += piece
                if len(rest) > LONGEST_LINE:
                    raise UserError(f"data.path={file}: line {line + 1} does not end within {LONGEST_LINE:,} bytes; is it text?")
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
                    ends = [match.end() for match in _LINE_END_BYTES.finditer(block, 0)][: layout.body]
                    start = ends[-1] if len(ends) == layout.body else len(block)
                    line, offset, block = layout.body, offset + start, block[start:]
            values = _plain(block, layout, data.missing, numbers)
            if values is not None:
                rows = Rows(layout.names, values, np.arange(line + 1, line + 1 + len(values)), [], layout.header, "line", file)
                line, offset = line + len(values), offset + len(block)
            else:
                rows, num_lines, unread = _careful(file, block, layout, data, line, offset, last)
                line, offset, rest = line + num_lines, offset + len(block) - len(unread), unread + rest
            found = found or bool(len(rows) or rows.rejected)
            yield replace(rows, bytes_read=offset)
    if layout is None:
        raise UserError(f"data.path={file}: is empty; give a file with rows")
    if not found:
        yield Rows(layout.names, _columns([], layout.separator, len(layout.names)), np.arange(0), [], layout.header, "line", file)


class _text_stream:
    """A file's bytes, unpacked when it is gzip; what is wrong with the packing is told as a UserError."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.stream: IO[bytes] | gzip.GzipFile | None = None

    def __enter__(self) -> "_text_stream":
        self.stream = gzip.open(self.file, "rb") if self.file.suffix.lower() == ".gz" else self.file.open("rb", buffering=0)
        return self

    def __exit__(self, *_: object) -> None:
        if self.stream is not None:
            self.stream.close()

    def read(self, size: int) -> bytes:
        assert self.stream is not None
        try:
            return self.stream.read(size)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise UserError(f"data.path={self.file}: is no complete gzip file: {error}; pack it again, or unpack it") from error


def _last_line_end(raw: bytes) -> int:
    """Return where the last whole line ends, 0 where there is none."""
    cut = raw.rfind(b"\n") + 1
    return cut or raw.rfind(b"\r", 0, len(raw) - 1) + 1  # \r may be the first half of a line end


def _layout(file: Path, block: bytes, data: DataConfig) -> Layout | None:
    head = block if len(block) <= 2**20 else block[: _last_line_end(block[: 2**20]) or len(block)]
    lines = _LINE_END.split(_decode(file, head, 0, 0))
    starts = [i for i, line in enumerate(lines) if line.strip()]
    if not starts:
        return None
    separator = find_separator([lines[i] for i in starts[:SAMPLE]], data.delimiter)
    (first, first_end), *others = first_rows(lines, starts, separator)
    if has_header(first, [cells for cells, _ in others], data):
        return Layout(separator, column_names(first), True, first_end + 1)
    width = Counter(len(cells) for cells in (first, *(cells for cells, _ in others))).most_common(1)[0][0]
    return Layout(separator, [str(i) for i in range(width)], False, 0)


def _plain(block: bytes, layout: Layout, missing: Sequence[str], numbers: Set[str]) -> pl.DataFrame | None:
    """Return the columns of a block when polars reads it as `_careful` would, else None."""
    separator, width = layout.separator.encode(), len(layout.names)
    if b'"' in block or len(separator) > 1 or width == 1:
        return None
    if b"\r" in block:
        if block.count(b"\r") != block.count(b"\r\n"):
            return None
        block = block.replace(b"\r\n", b"\n")
    plain = block.isascii()
    if not plain and b"\xef\xbb\xbf" in block:
        block = block.replace(b"\xef\xbb\xbf", b"")
    num_rows = _count(block, b"\n") + (not block.endswith(b"\n"))
    if _count(block, separator) != num_rows * (width - 1):
        return None
    blanks = not plain or any(blank in block for blank in _BLANKS if blank != separator)
    tries = [set() if blanks else {str(i) for i, name in enumerate(layout.names) if name in numbers}, set()]
    for as_numbers in tries if tries[0] else tries[1:]:
        try:
            frame = pl.read_csv(
                block,
                has_header=False,
                schema={str(i): pl.Float64 if str(i) in as_numbers else pl.String for i in range(width)},
                separator=layout.separator,
                quote_char=None,
                null_values=None if blanks else list(missing),
            )
        except pl.exceptions.PolarsError:
            continue
        if len(frame) != num_rows:  # a row with too many fields raises; so with all separators there, every row has its own
            return None
        if all(frame[i].is_finite().all() for i in as_numbers):  # else their texts are needed, to say what is wrong
            return _clean(frame.get_columns(), missing) if blanks else frame
    return None


def _count(block: bytes, sign: bytes) -> int:
    """Return how often a byte occurs; `bytes.count` takes four times as long where it does so often."""
    return int(np.count_nonzero(np.frombuffer(block, np.uint8) == sign[0]))


def _careful(
    file: Path, block: bytes, layout: Layout, data: DataConfig, line: int, offset: int, last: bool
) -> tuple[Rows, int, bytes]:
    """Return the rows of a block, how many lines they took, and the end of the block that needs lines of the next one."""
    lines = _LINE_END.split(_decode(file, block, line, offset))
    if lines[-1] == "":
        lines.pop()
    good: list[tuple[int, str | list[str]]] = []
    rejected: list[dict[str, Any]] = []
    used = len(lines)
    starts = [i for i, text in enumerate(lines) if text.strip()]
    for i, row, reason in cut_rows(lines, starts, layout.separator, len(layout.names)):
        if reason and not last and '"' in lines[i] and i + MAX_SPAN > len(lines):  # may go on in the next block
            used = i
            break
        if reason:
            rejected.append({"file": str(file), "line": line + i + 1, "reason": reason, "text": lines[i][:SHOWN]})
        else:
            good.append((line + i + 1, row))
    values = _clean(_columns([row for _, row in good], layout.separator, len(layout.names)).get_columns(), data.missing)
    numbers = np.array([number for number, _ in good], dtype=np.int64)
    unread = "".join(f"{text}\n" for text in lines[used:]).encode()
    return Rows(layout.names, values, numbers, rejected, layout.header, "line", file), used, unread


def _decode(file: Path, raw: bytes, line: int, offset: int) -> str:
    try:
        return raw.decode("utf-8").replace("\ufeff", "")  # also between files that were joined
    except UnicodeDecodeError as error:
        line += 1 + len(_LINE_END_BYTES.findall(raw[: error.start]))
        raise UserError(
            f"data.path={file}: is no UTF-8 text (line {line}, byte {offset + error.start}); save it as UTF-8, or give a Parquet file"
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
    return pl.DataFrame([pl.Series(name, column, dtype=pl.String) for name, column in zip(names, columns, strict=True)])
