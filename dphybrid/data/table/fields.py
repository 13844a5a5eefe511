"""Fields of delimited text, row by row: RFC 4180 plus what files in the wild do (blanks around values, ragged
rows, stray quotes).

A quote that opens and never closes costs its own row only. Separator, header and column names are told from
the first rows.
"""

import csv
from collections import Counter
from collections.abc import Iterator, Sequence

from dphybrid.config.tables import TableDataConfig
from dphybrid.data.table.numbers import is_number
from dphybrid.util.errors import UserError

SEPARATORS = ",\t;|"
"""Separators that are looked for; the earlier one wins a tie."""
SAMPLE = 50
"""Rows that separator, header and width are inferred from."""
MAX_SPAN = 64
"""Lines that one quoted value may run over."""


def cut_rows(
    lines: list[str], starts: Sequence[int], separator: str, width: int
) -> Iterator[tuple[int, str | list[str], str | None]]:
    """Yield (number of the first line from 0 on, row, why it is rejected). A row without quotes stays one
    string."""
    done = -1
    for i in starts:
        if i <= done:  # the row before runs over this line
            continue
        if '"' not in lines[i]:
            found = lines[i].count(separator) + 1
            yield i, lines[i], None if found == width else _wrong_width(found, width)
            continue
        row, last, reason = _quoted(lines, i, separator, width)
        done = max(done, last)
        yield i, row, reason


def first_rows(lines: list[str], starts: Sequence[int], separator: str) -> list[tuple[list[str], int]]:
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


def _quoted(
    lines: list[str], start: int, separator: str, width: int | None
) -> tuple[list[str], int, str | None]:
    """Return the row that begins in line `start`, its last line, and what is wrong with it. width None:
    any."""
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


def _loose(line: str, separator: str) -> list[str]:
    """Return the cells of a line that may be broken."""
    try:
        (cells,) = csv.reader([line], delimiter=separator, skipinitialspace=True)
    except csv.Error:
        cells = line.split(separator)
    return [cell.strip() for cell in cells]


def find_separator(sample: Sequence[str], wanted: str) -> str:
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

    return max(SEPARATORS, key=score)


def has_header(first: list[str], others: list[list[str]], data: TableDataConfig) -> bool:
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


def column_names(header: list[str]) -> list[str]:
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
