"""Tables of which a recipe names the columns that it needs: users and items, or heads, relations and
tails."""

from collections.abc import Sequence

import polars as pl
from polars.selectors import by_name  # takes names literally; select() reads `*` as a pattern

from dphybrid.data.table.files import Rejected, Rows
from dphybrid.util.errors import UserError, suggestion


def named_columns(rows: Rows, names: Sequence[str], where: str, remedy: str) -> pl.DataFrame:
    """Return the columns of these names, each once. where, remedy: for the message of the UserError about one
    that is missing."""
    if missing := [name for name in names if name not in rows.names]:
        raise UserError(f"{where} no column {missing[0]!r}{suggestion(missing[0], rows.names)}; {remedy}")
    return rows.table([*dict.fromkeys(names)])


def complete_rows(
    rows: Rows, frame: pl.DataFrame, needed: Sequence[str]
) -> tuple[pl.DataFrame, list[Rejected]]:
    """Return the rows of `frame` that have a value in each needed column, and all rejected rows: those that
    could not be read, and the others. rows: as they were read; `frame` has values of all of them."""
    rejected, gaps = list(rows.rejected), frame.select(by_name(*needed).is_null())
    if not gaps.select(pl.any_horizontal(pl.all()).any()).item():
        return frame, rejected
    of_file, lines = rows.lines()
    left_out_B = pl.Series([False]).new_from_index(0, len(frame))
    for name in needed:
        for row in (gaps[name] & ~left_out_B).arg_true():
            why = f"no value in {name!r}"
            rejected.append(Rejected(file=of_file[row], line=lines[row], reason=why))
        left_out_B |= gaps[name]
    return frame.filter(~left_out_B), rejected
