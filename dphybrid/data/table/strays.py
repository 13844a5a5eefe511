"""Lines of a table that are no rows: its header once more, a total at the end, and the units of its columns.

They are left out and said, and count as rejected rows, but not towards `data.max_rejected`.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import polars as pl

from dphybrid.data.table.numbers import is_number
from dphybrid.data.table.rows import STRAY, Rejected, Rows

_TOTAL = r"(?i)^\s*(?:(?:(?:grand|sub)[ -]?)?totals?|sum|summe|gesamt(?:summe)?|insgesamt)\s*:?\s*$"
_SUBTOTAL = r"(?i)^\s*(?:grand|sub)"
"""Totals that are hardly values of a column, as Total may be."""
_OF_ONE = r"(?i)[ -](?:sub[ -]?)?total\s*$"
_LOOKED_AT = 1000
"""Rows whose cells say that a column holds numbers."""


def without_strays(rows: Rows, first: bool) -> Rows:
    """Return rows without the lines that are no rows. first: whether they are the first ones of a file."""
    names = [name for name in rows.names if name not in rows.index]
    if not rows.header or not len(rows):
        return rows
    # Columns of other types hold no header, total or unit.
    texts = {name: rows.cells.given[name] for name in names if rows.cells.given[name].dtype == pl.String}
    totals, open_ones = _totals(rows, texts)
    found = dict.fromkeys(totals, "a total")
    if len(texts) == len(names) > 1:
        found |= dict.fromkeys(_headers(texts), "the header once more")
        if first and len(rows) > 2 and _is_units(rows, names):
            found[0] = "the units of the columns"
    notes = [
        f"{rows.file.name}, line {rows.lines[row]}, looks like a subtotal and is read as a row; remove such "
        "lines if they are totals"
        for row in open_ones[:1]
    ]
    if not found:
        return replace(rows, notes=(*rows.notes, *notes)) if notes else rows
    keep = np.ones(len(rows), bool)
    keep[[*found]] = False
    rejected = [
        Rejected(file=str(rows.file), line=int(rows.lines[row]), reason=f"{STRAY}{what}")
        for row, what in sorted(found.items())
    ]
    notes += [f"{rows.file.name}, line {row['line']}, {row['reason']}, is left out" for row in rejected]
    return replace(
        rows,
        cells=rows.cells.kept(keep),
        lines=rows.lines[keep],
        rejected=sorted([*rows.rejected, *rejected], key=lambda row: row["line"]),
        notes=(*rows.notes, *notes),
    )


def _headers(texts: dict[str, pl.Series]) -> Iterator[int]:
    first, *others = texts
    for row in (texts[first].str.strip_chars().str.to_lowercase() == first.strip().lower()).arg_true():
        if all((texts[name][row] or "").strip().lower() == name.strip().lower() for name in others):
            yield row


def _totals(rows: Rows, texts: dict[str, pl.Series]) -> tuple[list[int], list[int]]:
    """Return the rows whose first value says that they are a total, and those that may be values: a total
    stands at the end, in a column that holds numbers otherwise, or alone, where other rows have words."""
    found, open_ones = list[int](), list[int]()
    for place, name in enumerate([*texts][:2]):
        of_one = texts[name].str.contains(_OF_ONE).fill_null(False)
        if of_one.any():  # North Total, beside rows of North
            of_one &= texts[name].str.replace(_OF_ONE, "").is_in(texts[name].implode())
        is_total = texts[name].str.contains(_TOTAL).fill_null(False) | of_one
        if not is_total.any():
            continue
        below = {each: rows.cells[each].filter(~is_total).head(_LOOKED_AT) for each in texts}
        words = [each for each in texts if not (below[each].null_count() or _holds_numbers(below[each]))]
        first, alone = is_total, pl.repeat(bool({*words} - {name}), len(rows), eager=True)
        for before in [*texts][:place]:
            first &= rows.cells[before].is_null()
        for each in {*words} - {name}:
            alone &= rows.cells[each].is_null()
        last = len(rows) - int((~first).reverse().arg_max() or 0)
        ends = pl.int_range(len(rows), eager=True) >= last
        ends &= ~texts[name].is_in(texts[name].head(last).implode())
        certain = first & (alone | ends | _holds_numbers(below[name]))
        found += certain.arg_true().to_list()
        open_ones += (
            (is_total & ~certain & (of_one | texts[name].str.contains(_SUBTOTAL))).arg_true().to_list()
        )
    return found, open_ones


def _is_units(rows: Rows, names: list[str]) -> bool:
    """Return whether the first row holds words only, two or more of them above numbers, and none of them is
    a value of its column."""
    words = {name: rows.cells[name][0] for name in names}
    words = {name: word for name, word in words.items() if word is not None}
    if any(map(is_number, words.values())):
        return False
    below = {name: rows.cells[name].slice(1, _LOOKED_AT) for name in words}
    numbers = [name for name in words if _holds_numbers(below[name])]
    others = [name for name in words if name not in numbers]
    return len(numbers) > (1 if others else 0) and not any((below[n] == words[n]).any() for n in others)


def _holds_numbers(cells: pl.Series) -> bool:
    known = cells.drop_nulls()
    return len(known) > 0 and known.cast(pl.Float64, strict=False).null_count() == 0
