"""Rows of files, read once, chunk by chunk: bad rows set apart, the others kept on disk as numbers and codes.

Threads read and encode some chunks ahead of the one that is being written. Letters: B rows.
"""

import errno
import itertools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import polars as pl

from dphybrid.config.tables import TableDataConfig
from dphybrid.data.batches import Array
from dphybrid.data.store import THREADS, Progress, mapped
from dphybrid.data.table.column import Column, Dictionary
from dphybrid.data.table.files import Done, read_jobs
from dphybrid.data.table.kinds import Bag, Category, Ignore, Numeric
from dphybrid.data.table.labels import label_column
from dphybrid.data.table.rows import Rejected, Rows, check_enough, check_rejected
from dphybrid.data.table.schema import Look, SchemaFile, find_column, look, sample_of
from dphybrid.util.errors import UserError

_READERS = max(3, THREADS)
"""Chunks that are read at a time; one more than two cores, since threads of polars parse each of them."""
_STORED_ROWS = 2**16
"""Rows of a stored block, about."""


@dataclass(frozen=True)
class Plan:
    """What the first rows say: how each column is read. label, weight, split: of these columns."""

    data: TableDataConfig
    first: Rows
    looks: list[Look]
    label: Column
    weight: Numeric | None
    split: Category | None

    @classmethod
    def of(cls, first: Rows, data: TableDataConfig, schema: SchemaFile) -> "Plan":
        """Return the plan by the first rows. Raises UserError when these do not fit."""
        label = find_column(first, data.label or schema.label or "", "data.label")
        weight = find_column(first, data.weight, "data.weight") if data.weight else None
        if weight == label:
            raise UserError(
                f"data.weight={data.weight!r}: this column is already named as label; name another one"
            )
        split = find_column(first, data.split_column, "data.split_column") if data.split_column else None
        for name, place in ((label, "label"), (weight, "weight"), (split, "split_column")):
            if name and first.cells[name].dtype == pl.List:
                raise UserError(f"data.{place}={name!r}: holds lists; name a column of single values")
        taken = {label: "label"} | ({weight: "weight"} if weight else {})
        return cls(
            data,
            first,
            look(first, data, schema, taken),
            label_column(sample_of(first, label, data)),
            Numeric(name=weight, **Numeric.told(sample_of(first, weight, data))) if weight else None,
            Category(name=split) if split else None,
        )

    @cached_property
    def columns(self) -> list[Column]:
        """The columns that a model gets."""
        return [look.column for look in self.looks if not isinstance(look.column, Ignore)]

    @cached_property
    def read(self) -> dict[str, tuple[str, Column]]:
        """All columns that are read, by their names in the store, each with the field that says how."""
        # With a prefix, as a column may be named label, weight or split.
        found = {f"column {c.name}": (c.flag, c) for c in self.columns}
        others = {"label": self.label, "weight": self.weight, "split": self.split}
        return found | {name: (name, column) for name, column in others.items() if column}


class _Chunk(NamedTuple):
    """Rows in numbers, those that cannot be read, and counts as `Table` has them."""

    rows: Rows
    values: pl.DataFrame
    rejected: list[Rejected]
    counts: Counter[str]


@dataclass
class Table:
    """A table that was read: its rows lie in `folder` in blocks, as numbers, times and codes of the
    dictionaries (0: no value), and in the column "held" whether their file is held out. counts: rows without
    a label and without a weight, and by bag, by its name in the store, the cells with too many items.
    longest: items of a bag."""

    plan: Plan
    folder: Path
    dictionaries: dict[str, Dictionary]
    lengths: list[int] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    longest: int = 1

    @property
    def num_rows(self) -> int:
        """Rows that can be used."""
        return sum(self.lengths)

    def texts(self, name: str) -> pl.Series:
        """Return the texts by code of a stored column."""
        return self.dictionaries[name].values()

    def values(self, number: int) -> dict[str, pl.Series]:
        """Return a block of the columns that a model gets, texts as codes."""
        names = {f"column {column.name}": column.name for column in self.plan.columns}
        frame = pl.read_ipc(self._file(number), columns=list(names))
        return {names[c.name]: c for c in frame.get_columns()}

    def column(self, name: str) -> pl.Series:
        """Return a whole stored column."""
        files = [self._file(number) for number in range(len(self.lengths))]
        return pl.scan_ipc(files).select(name).collect().to_series()

    def _file(self, number: int) -> Path:
        return self.folder / f"{number:06d}.arrow"

    def store(self, frames: list[pl.DataFrame]) -> None:
        """Write frames as blocks."""
        for part in pl.concat(frames).iter_slices(_STORED_ROWS):
            file = self._file(len(self.lengths))
            try:
                part.write_ipc(file, compression="uncompressed")
            except OSError as error:  # polars' has no number
                raise OSError(errno.ENOSPC, str(error), str(file)) from error
            self.lengths.append(len(part))


def read_table(
    plan: Plan, files: Sequence[Path], held: Collection[Path], folder: Path, progress: Progress
) -> Table:
    """Read files into blocks in `folder`. held: those whose rows are held out. Raises UserError when they
    cannot be read, do not fit together, or have too few rows."""
    folder.mkdir()
    table = Table(plan, folder, {name: Dictionary() for name, (_, c) in plan.read.items() if c.coded})
    done, jobs = Done(files), read_jobs(files, plan.data)
    next(jobs)  # its rows are in the plan
    waiting: list[pl.DataFrame] = []
    for chunk in mapped(
        lambda job: _encoded(plan, job(), table.dictionaries),
        itertools.chain([lambda: plan.first], jobs),
        _READERS,
    ):
        progress("read rows", done.bytes_of(chunk.rows), done.total)
        # Small chunks, as of many small files, are joined: a block costs a file and a scan of it.
        waiting.append(chunk.values.with_columns(held=pl.lit(chunk.rows.file in held)))
        if sum(map(len, waiting)) > _STORED_ROWS // 2:
            table.store(waiting)
            waiting = []
        for name, dtype in chunk.values.schema.items():
            if dtype == pl.List:
                table.longest = max(table.longest, cast(int, chunk.values[name].list.len().max() or 0))
        table.rejected += chunk.rejected
        table.counts += chunk.counts
        seen, most = table.num_rows + len(table.rejected), plan.data.max_rejected
        # Far past what is allowed: more of the file would not mend it.
        if len(table.rejected) > max(10_000, 10 * most * seen):
            check_rejected(str(plan.data.path), table.rejected, seen, most)
    if waiting:
        table.store(waiting)
    _check(table)
    return table


def _check(table: Table) -> None:
    data, plan = table.plan.data, table.plan
    check_rejected(str(data.path), table.rejected, table.num_rows + len(table.rejected), data.max_rejected)
    for what, column, value in (
        ("label", plan.label, "a value"),
        ("weight", plan.weight, "a weight above 0"),
    ):
        if column and (count := table.counts[what]) and not table.num_rows:
            raise UserError(
                f"data.{what}={column.name!r}: none of the {count:,} rows of {data.path} has {value} in "
                "this column; name another one"
            )
    check_enough(str(data.path), plan.first.header, table.num_rows)


def _encoded(plan: Plan, rows: Rows, dictionaries: Mapping[str, Dictionary]) -> _Chunk:
    """Set apart the rows that cannot be used and turn the others into numbers; in any thread."""
    if {*rows.names} != {*plan.first.names}:
        other = min({*rows.names} ^ {*plan.first.names})
        raise UserError(
            f"data.path={plan.data.path}: {rows.file} has other columns than {plan.first.file}, {other!r} "
            "for one; give files with the same columns"
        )
    cells = {name: rows.cells[column.name] for name, (_, column) in plan.read.items()}
    values = {name: column.values(cells[name]) for name, (_, column) in plan.read.items()}
    unlabelled_B = cells["label"].is_null().to_numpy()
    weightless_B = _weightless(plan, rows, values) & ~unlabelled_B
    drop_B, rejected = unlabelled_B | weightless_B, list(rows.rejected)
    for name, (flag, column) in plan.read.items():
        # Most blocks have no bad cell, which the counts tell at once.
        if column.noun is None or values[name].null_count() == cells[name].null_count():
            continue
        odd_B = column.wrong(cells[name], values[name]).to_numpy() & ~drop_B
        other = "give data.task=multiclass" if flag == "label" else "name the column in data.categorical"
        for row in np.flatnonzero(odd_B).tolist():
            reason = (
                f"data.{flag}: column {column.name!r} holds {cells[name][row]!r}, no {column.noun}; mend it, "
                f"list it in data.missing, or {other}"
            )
            rejected.append(Rejected(file=str(rows.file), line=int(rows.lines[row]), reason=reason))
        drop_B = drop_B | odd_B
    counts = Counter({"label": int(unlabelled_B.sum()), "weight": int(weightless_B.sum())})
    for name, (_, column) in plan.read.items():
        if isinstance(column, Bag):
            counts[name] = column.left_out(cells[name], values[name])
    kept = pl.DataFrame([column.alias(name) for name, column in values.items()])
    kept = kept.filter(pl.Series(~drop_B)) if drop_B.any() else kept
    # Codes instead of texts: 4 bytes a cell on disk, and each text is encoded once, not once a row.
    stored = [dictionaries[c.name].codes(c) if c.name in dictionaries else c for c in kept.get_columns()]
    return _Chunk(rows, pl.DataFrame(stored), sorted(rejected, key=lambda row: row["line"]), counts)


def _weightless(plan: Plan, rows: Rows, values: Mapping[str, pl.Series]) -> Array:
    """Return the rows (B,) bool whose weight is 0. Raises UserError that names the first line with no weight,
    or no count as label."""
    if plan.data.task == "counts":
        counts_B = values["label"].to_numpy()
        wrong_B = (counts_B < 0) | (counts_B != np.floor(counts_B)) & ~np.isnan(counts_B)
        what, remedy = "counts are whole numbers from 0 on", "give data.task=regression"
        _refuse(rows, wrong_B, "data.label", plan.label, f"{what}; mend it, or {remedy}")
    if plan.weight is None:
        return np.zeros(len(rows), bool)
    weights_B = values["weight"].to_numpy()
    wrong_B = ~(weights_B >= 0)  # true of nan
    why = "weights are numbers from 0 on; mend it, or leave the row out"
    _refuse(rows, wrong_B, "data.weight", plan.weight, why)
    return weights_B.astype(np.float32) == 0


def _refuse(rows: Rows, wrong_B: Array, field: str, column: Column, why: str) -> None:
    for row in np.flatnonzero(wrong_B)[:1].tolist():
        held = rows.texts(column.name)[row]
        raise UserError(
            f"{field}={column.name!r}: {rows.file}, line {int(rows.lines[row])}: holds {held!r}, and {why}"
        )
