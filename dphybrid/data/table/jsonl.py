"""JSON lines: files with an object per line, whose keys are the columns."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import polars as pl

from dphybrid.config.tables import RowFiles
from dphybrid.data.table.cells import by_column, of_objects
from dphybrid.data.table.lines import unpacked, whole_lines
from dphybrid.data.table.rows import SHOWN, Cells, Rejected, Rows, check_columns, check_types, is_odd
from dphybrid.util.errors import UserError

_HEAD_BYTES = 2**16


def is_json(file: Path) -> bool:
    """Return whether a text file holds JSON lines. Raises UserError if it is a single JSON value."""
    with unpacked(file) as (stream, _):
        head = stream.read(_HEAD_BYTES).removeprefix(b"\xef\xbb\xbf").lstrip()
    first = head.split(b"\n", 1)[0].rstrip()
    named = ".json" in (suffix.lower() for suffix in file.suffixes)
    if head.startswith(b"{"):
        # A long first line may not be complete here.
        if len(first) == _HEAD_BYTES or _object(first) is not None:
            return True
    elif not (named and head.startswith(b"[")):
        return False
    if named:
        raise UserError(
            f"data.path={file}: is one JSON value over several lines; write one object per line "
            "(JSON lines), CSV or Parquet"
        )
    return False


def _object(line: bytes | str) -> dict[str, object] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def json_chunks(file: Path, data: RowFiles) -> Iterator[Rows]:
    """Yield the rows of JSON lines, block by block. A key that a row lacks is a cell without a value. Raises
    UserError if the file cannot be read, or for a column of a type that no table can have."""
    columns: list[str] | None = None
    notes: list[str] = []
    line = 0
    for text, bytes_read, _ in whole_lines(file, data.encoding, notes):
        lines = text.decode().split("\n")[:-1]
        rows = [i for i, one in enumerate(lines) if one.strip()]
        frame, bad = _frame([lines[i] for i in rows])
        rejected = [
            Rejected(file=str(file), line=line + rows[i] + 1, reason=why, text=lines[rows[i]][:SHOWN])
            for i, why in bad.items()
        ]
        numbers = np.array([line + position + 1 for i, position in enumerate(rows) if i not in bad], np.int64)
        line += len(lines)
        if columns is None:
            columns = frame.columns
            check_columns(file, len(columns))
        if later := [name for name in frame.columns if name not in columns]:
            notes.append(f"left out, as the first rows lack it: {later[0]!r}")
        check_types(frame.schema, f"data.path={file}", "data.ignore", data.left_out(frame.columns))
        nothing = pl.Series([None] * len(numbers), dtype=pl.String)
        found = {
            c.name: nothing if is_odd(c.dtype) or c.dtype == pl.Null else c.alias("")
            for c in frame.get_columns()
        }
        given = {name: found.get(name, nothing) for name in columns}
        yield Rows(Cells(given, data.no_value), numbers, rejected, file, True, bytes_read, tuple(notes))


def _frame(lines: Sequence[str]) -> tuple[pl.DataFrame, dict[int, str]]:
    """Return the rows of lines, and for each line that is no object, by its position, the reason."""
    try:
        return pl.read_ndjson("".join(f"{line}\n" for line in lines).encode(), infer_schema_length=None), {}
    except pl.exceptions.PolarsError:
        pass
    # No lines, an odd one, or a column of several types, such as true and 1: records as Python has them.
    found = [_object(line) for line in lines]
    bad = {i: "not a JSON object" for i, record in enumerate(found) if record is None}
    columns = by_column([record for record in found if record is not None])
    return pl.DataFrame([of_objects(name, cells) for name, cells in columns.items()]), bad
