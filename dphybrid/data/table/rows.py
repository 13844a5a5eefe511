"""Rows of a table as they are read (cells, line numbers and rejected rows), and the checks of their number,
columns and types."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NotRequired, TypedDict

import polars as pl

from dphybrid.data.batches import Array
from dphybrid.data.table.cells import as_texts, clean, is_odd
from dphybrid.util.errors import UserError

SHOWN = 500
"""How many characters of a rejected row are kept."""
STRAY = "no row: "
"""Begins the reason of a line that is no row, such as a total; such lines do not count as unreadable."""
_MAX_COLUMNS = 32_768
"""With more columns, a file is taken to be damaged or read with the wrong delimiter."""


class Rejected(TypedDict):
    """A row that cannot be read: its file and line, the reason, and the start of its text."""

    file: str
    line: int
    reason: str
    text: NotRequired[str]


class Cells(Mapping[str, pl.Series]):
    """Columns by name, each cleaned on first access, as not every column is used.

    given: the columns as they are. no_value: the texts that mean no value.
    """

    def __init__(self, given: Mapping[str, pl.Series], no_value: Sequence[str]) -> None:
        self.given, self._no_value = given, no_value
        self._cleaned: dict[str, pl.Series] = {}

    def __getitem__(self, name: str) -> pl.Series:
        return self.of([name])[name]

    def of(self, names: Iterable[str]) -> dict[str, pl.Series]:
        """Return columns by name. All are cleaned by one call of polars, which takes 0.2 ms to start."""
        new = [name for name in dict.fromkeys(names) if name not in self._cleaned]
        cleaned = clean([self.given[name] for name in new], self._no_value) if new else []
        self._cleaned |= zip(new, cleaned, strict=True)
        return {name: self._cleaned[name] for name in names}

    def __iter__(self) -> Iterator[str]:
        return iter(self.given)

    def __len__(self) -> int:
        return len(self.given)

    def kept(self, keep_B: Array) -> "Cells":
        """Return the cells of the rows of a mask (B,)."""
        return Cells(
            {name: cells.filter(pl.Series(keep_B)) for name, cells in self.given.items()}, self._no_value
        )


@dataclass(frozen=True)
class Rows:
    """A chunk of rows: cells by column, the line of each row from 1 on, and the rejected rows.

    Attributes:
        cells: Stripped text (None: no value), lists of texts, or numbers; not a frame, as polars reads names
            such as `*` as patterns.
        header: Whether the first line named the columns; always true for Parquet files.
        bytes_read: Of the file, up to the end of this chunk.
        notes: What was inferred about how the file is written.
        index: The columns that only number or name the rows.
    """

    cells: Cells
    lines: Array
    rejected: list[Rejected]
    file: Path
    header: bool = True
    bytes_read: int = 0
    notes: tuple[str, ...] = ()
    index: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.lines)

    @property
    def names(self) -> list[str]:
        """The columns' names."""
        return list(self.cells)

    def texts(self, name: str) -> pl.Series:
        """Return the cells of a column as texts or lists."""
        cells = self.cells[name]
        return cells if cells.dtype == pl.List else as_texts(cells)


Job = Callable[[], Rows]
"""A function that reads a chunk; it may be called in any thread."""


def as_job(rows: Rows) -> Job:
    """Return a job that returns rows that are already read."""
    return lambda: rows


def check_enough(file: Path | str, header: bool, num_rows: int) -> None:
    """Raise UserError unless there are at least two rows."""
    if num_rows < 2:
        held = "1 row" if num_rows else f"{'a header and ' if header else ''}no rows that can be read"
        raise UserError(f"data.path={file}: has {held}; at least 2 are needed, one for validation")


def check_columns(file: Path, num_columns: int) -> None:
    """Raise UserError if a file has more columns than any real table."""
    if num_columns > _MAX_COLUMNS:
        raise UserError(
            f"data.path={file}: has {num_columns:,} columns, but at most {_MAX_COLUMNS:,} are allowed; check "
            "data.delimiter"
        )


def check_rejected(
    file: Path | str, rejected: Sequence[Rejected], num_rows: int, max_rejected: float
) -> None:
    """Raise UserError if more than the share `max_rejected` of `num_rows` rows was rejected."""
    rejected = [row for row in rejected if not row["reason"].startswith(STRAY)]
    if len(rejected) > max_rejected * num_rows:
        first = rejected[0]
        where = "" if str(file) == first["file"] else f" of {first['file']}"
        raise UserError(
            f"data.path={file}: {len(rejected)} of {num_rows} rows cannot be read, more than "
            f"data.max_rejected={max_rejected:g} allows; the first is line {first['line']}{where}: "
            f"{first['reason']}; correct the file, set data.delimiter, or raise data.max_rejected"
        )


def check_types(schema: pl.Schema, where: str, field: str, ignored: Sequence[str]) -> None:
    """Raise UserError if a column that is not in `ignored` has a type that no table can have."""
    for name, dtype in schema.items():
        if is_odd(dtype) and name not in ignored:
            raise UserError(
                f"{where}: column {name!r} holds {dtype}, not single values or lists of texts or whole "
                f"numbers; name it in {field}, or write it as text"
            )
