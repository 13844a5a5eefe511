"""Rows of a CSV, TSV or Parquet file, as text, each with its line; rows that do not fit are kept apart.

CSV: RFC 4180 plus what files in the wild do (byte order mark, any line end, blanks around values, ragged rows). Lines without a quote go to
polars with quoting switched off, lines with one through Python's csv module, so that one stray quote never swallows the rows after it.
"""

import csv
import io
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from dphybrid.config import DataConfig
from dphybrid.data.batches import Array
from dphybrid.errors import UserError

SEPARATORS = ",\t;|"
"""Separators that are looked for; the earlier one wins a tie."""
SAMPLE = 50
"""Rows that separator, header and width are inferred from."""
MAX_SPAN = 64
"""Lines that one quoted value may run over."""
SHOWN = 500
"""Characters of a rejected row that are kept."""

_LINE_END = re.compile(r"\r\n|\n|\r")


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

    def __len__(self) -> int:
        return len(self.values)

    def column(self, name: str) -> pl.Series:
        """Return a column by its name."""
        return self.values.to_series(self.names.index(name))


def read_rows(file: Path, data: DataConfig) -> Rows:
    """Read a whole file. Raises UserError when it is no such file, is empty, or too many of its rows do not fit."""
    if file.suffix.lower() in (".parquet", ".pq"):
        try:
            frame = pl.read_parquet(file)
            values = _clean([_single(column, file, data) for column in frame.get_columns()], data.missing)
        except (pl.exceptions.PolarsError, OSError) as error:
            raise UserError(f"data.path={file}: cannot be read as Parquet: {error}") from error
        rows = Rows(frame.columns, values, np.arange(1, len(frame) + 1), [], True, "row")
    else:
        rows = _read_csv(file, data)
    if len(rows) < 2:
        raise UserError(f"data.path={file}: has {len(rows)} rows; at least 2 are needed, one of them held out")
    return rows


def check_rejected(file: Path, rejected: Sequence[dict[str, Any]], num_rows: int, max_rejected: float) -> None:
    """Raise UserError when more than the share `max_rejected` of `num_rows` rows was rejected."""
    if len(rejected) > max_rejected * num_rows:
        first = rejected[0]
        raise UserError(
            f"data.path={file}: {len(rejected)} of {num_rows} rows cannot be read, more than data.max_rejected={max_rejected:g} allows; "
            f"the first is line {first['line']}: {first['reason']}; mend the file, set data.delimiter, or raise data.max_rejected"
        )


def is_number(text: str) -> bool:
    """Tell whether a text is written as a number; infinity and nan are none."""
    try:
        return bool(np.isfinite(float(text))) and "_" not in text
    except ValueError:
        return False


def _single(column: pl.Series, file: Path, data: DataConfig) -> pl.Series:
    """Return a Parquet column of single values; one of lists, structures or bytes must be ignored, and is empty then."""
    if not (column.dtype.is_nested() or column.dtype in (pl.Binary, pl.Object)):
        return column
    if column.name in data.ignore:
        return pl.Series(column.name, [None] * len(column), dtype=pl.String)
    raise UserError(
        f"data.path={file}: column {column.name!r} holds {column.dtype}, not single values; name it in data.ignore, or write it as text"
    )


def _clean(columns: Sequence[pl.Series], missing: Sequence[str]) -> pl.DataFrame:
    """Return columns 0, 1, ... of stripped text, None for what means no value."""
    texts = [column.alias(str(i)).cast(pl.String).str.strip_chars() for i, column in enumerate(columns)]
    return pl.DataFrame([text.set(text.is_in(["", *missing]).fill_null(False), None) for text in texts])


def _read_csv(file: Path, data: DataConfig) -> Rows:
    lines = _LINE_END.split(_decode(file))
    starts = [i for i, line in enumerate(lines) if line.strip()]
    if not starts:
        raise UserError(f"data.path={file}: is empty; give a file with rows")
    separator = _separator([lines[i] for i in starts[:SAMPLE]], data.delimiter)
    (first, first_end), *others = _sample(lines, starts, separator)
    header = _has_header(first, [cells for cells, _ in others], data)
    if header:
        names = _names(first)
        starts = [i for i in starts if i > first_end]
    else:
        names = [
            str(i) for i in range(Counter(len(cells) for cells in (first, *(cells for cells, _ in others))).most_common(1)[0][0])
        ]
    good: list[tuple[int, str | list[str]]] = []
    rejected: list[dict[str, Any]] = []
    for number, row, reason in _fields(lines, starts, separator, len(names)):
        if reason:
            rejected.append({"file": str(file), "line": number, "reason": reason, "text": lines[number - 1][:SHOWN]})
        else:
            good.append((number, row))
    check_rejected(file, rejected, len(good) + len(rejected), data.max_rejected)
    if not good:
        raise UserError(f"data.path={file}: has {'a header and ' if header else ''}no rows that can be read")
    columns = _columns([row for _, row in good], separator, len(names))
    values = _clean(columns, data.missing)
    return Rows(names, values, np.array([number for number, _ in good]), rejected, header, "line")


def _decode(file: Path) -> str:
    raw = file.read_bytes()
    try:
        return raw.decode("utf-8").replace("\ufeff", "")  # also between files that were joined
    except UnicodeDecodeError as error:
        line = 1 + len(re.findall(rb"\r\n|\n|\r", raw[: error.start]))
        raise UserError(
            f"data.path={file}: is no UTF-8 text (line {line}, byte {error.start}); save it as UTF-8, or give a Parquet file"
        ) from error


def _fields(
    lines: list[str], starts: Sequence[int], separator: str, width: int
) -> Iterator[tuple[int, str | list[str], str | None]]:
    """Yield (line from 1 on, row, why it is rejected). A row without quotes stays one string."""
    done = -1
    for i in starts:
        if i <= done:  # the row before runs over this line
            continue
        if '"' not in lines[i]:
            found = lines[i].count(separator) + 1
            yield i + 1, lines[i], None if found == width else _wrong_width(found, width)
            continue
        row, last, reason = _quoted(lines, i, separator, width)
        done = max(done, last)
        yield i + 1, row, reason


def _sample(lines: list[str], starts: Sequence[int], separator: str) -> list[tuple[list[str], int]]:
    """Return the cells and the last line of the first rows; broken ones are cut as well as can be."""
    rows: list[tuple[list[str], int]] = []
    for i in starts:
        if rows and i <= rows[-1][1]:
            continue
        if len(rows) == SAMPLE:
            break
        cells, last, reason = _quoted(lines, i, separator, None)
        rows.append((_loose(lines[i], separator), i) if reason else ([cell.strip() for cell in cells], last))
    return rows


def _quoted(lines: list[str], start: int, separator: str, width: int | None) -> tuple[list[str], int, str | None]:
    """Return the row that begins in line `start`, its last line, and what is wrong with it. width None: any."""
    text = lines[start]
    for last in range(start, min(start + MAX_SPAN, len(lines))):
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
        if width is None or len(row) == width:
            return row, last, None
        if last == start:
            return row, start, _wrong_width(len(row), width)
        break
    return [], start, "a quote is opened and not closed"


def _wrong_width(found: int, width: int) -> str:
    return f"{found} values, expected {width}"


def _columns(rows: list[str | list[str]], separator: str, width: int) -> list[pl.Series]:
    """Return the columns as text: plain rows by polars, rows with quotes put in their places."""
    if all(isinstance(row, str) for row in rows):
        text = "\n".join(row for row in rows if isinstance(row, str))
        names = [str(i) for i in range(width)]
        return pl.read_csv(
            io.BytesIO(text.encode()),
            has_header=False,
            new_columns=names,
            separator=separator,
            quote_char=None,
            infer_schema=False,
        ).get_columns()
    split = [row.split(separator) if isinstance(row, str) else row for row in rows]
    return [pl.Series(str(i), column, dtype=pl.String) for i, column in enumerate(zip(*split, strict=True))]


def _loose(line: str, separator: str) -> list[str]:
    """Return the cells of a line that may be broken."""
    try:
        (cells,) = csv.reader([line], delimiter=separator, skipinitialspace=True)
    except csv.Error:
        cells = line.split(separator)
    return [cell.strip() for cell in cells]


def _separator(sample: Sequence[str], wanted: str) -> str:
    """Return the wanted separator, else the one that cuts the most lines into the same number of cells, then into the most cells."""
    if wanted != "auto":
        separator = {"tab": "\t", "\\t": "\t"}.get(wanted, wanted)
        if len(separator) != 1 or separator in '"\r\n':
            raise UserError(f"data.delimiter={wanted!r}: give one character, no quote and no line end, or tab")
        return separator

    def score(separator: str) -> tuple[float, int]:
        cells, lines = Counter(len(_loose(line, separator)) for line in sample).most_common(1)[0]
        return (lines / len(sample), cells) if cells > 1 else (0.0, 0)

    return max(SEPARATORS, key=score)


def _has_header(first: list[str], others: list[list[str]], data: DataConfig) -> bool:
    """Tell whether the first line names the columns: it holds a column name that the config gives; else it holds no number, and names
    a column whose other values are all numbers, or is complete, without repetition, and none of its cells appears below it."""
    if data.header != "auto":
        return data.header == "yes"
    given = {name for name in (data.label or "", *data.numeric, *data.categorical, *data.ignore) if name and not is_number(name)}
    below = [{row[i] for row in others if i < len(row)} - {"", *data.missing} for i in range(len(first))]
    if any(cell in given and cell not in values for cell, values in zip(first, below, strict=True)):
        return True
    if any(is_number(cell) for cell in first):
        return False
    named = [cell not in ("", *data.missing) for cell in first]
    if any(name and values and all(map(is_number, values)) for name, values in zip(named, below, strict=True)):
        return True
    return all(named) and len(set(first)) == len(first) and not any(c in v for c, v in zip(first, below, strict=True))


def _names(header: list[str]) -> list[str]:
    """Return distinct names: a column without a name gets its position, a repeated name a number."""
    names: list[str] = []
    for position, cell in enumerate(header):
        name, count = cell or str(position), 1
        while name in names or (count > 1 and name in header):
            count += 1
            name = f"{cell or position}_{count}"
        names.append(name)
    return names
