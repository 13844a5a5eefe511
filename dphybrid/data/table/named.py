"""Tables of which a recipe names the columns that it needs: users and items, or heads, relations and
tails."""

from collections.abc import Sequence

import polars as pl
from polars.selectors import by_name  # takes names literally; select() reads `*` as a pattern

from dphybrid.data.table.files import Rejected, Rows
from dphybrid.util.errors import UserError, suggestion


def named_columns(rows: pl.LazyFrame, names: Sequence[str], where: str, remedy: str) -> pl.DataFrame:
    """Return the columns of these names, each once. where, remedy: for the message of the UserError about one
    that is missing."""
    columns = rows.collect_schema().names()
    if missing := [name for name in names if name not in columns]:
        raise UserError(f"{where} no column {missing[0]!r}{suggestion(missing[0], columns)}; {remedy}")
    return rows.select(by_name(*dict.fromkeys(names))).collect(engine="streaming")


def complete_rows(
    rows: Rows, frame: pl.DataFrame, needed: Sequence[str]
) -> tuple[pl.DataFrame, list[Rejected]]:
    """Return the rows of `frame` that have a value in each needed column, and all rejected rows: those that
    could not be read, and the others. rows: as they were read; `frame` has values of all of them."""
    rejected, is_complete_B = list(rows.rejected), pl.Series([True]).new_from_index(0, len(frame))
    of_file, lines = rows.lines()
    for name in needed:
        for row in (is_complete_B & frame[name].is_null()).arg_true():
            line = Rejected(file=of_file[row], line=lines[row], reason=f"no value in {name!r}")
            rejected.append(line)
        is_complete_B &= frame[name].is_not_null()
    return frame.filter(is_complete_B), rejected
