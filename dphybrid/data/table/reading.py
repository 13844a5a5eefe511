"""Reads the rows of files once, chunk by chunk: rejects bad rows and stores the others on disk as numbers and
codes.

Threads read and encode a few chunks ahead of the one that is being written. Letters: B rows.
"""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import polars as pl
from polars.selectors import by_name

from dphybrid.config.tables import TableDataConfig
from dphybrid.data.batches import Array
from dphybrid.data.foreign import writing
from dphybrid.data.store import THREADS, Progress, mapped
from dphybrid.data.table.column import Column, Dictionary
from dphybrid.data.table.files import ReadProgress, read_jobs
from dphybrid.data.table.kinds import Bag, Category, Ignore, Numeric
from dphybrid.data.table.labels import label_column
from dphybrid.data.table.rows import Rejected, Rows, check_enough, check_rejected
from dphybrid.data.table.schema import (
    DescribedColumn,
    SchemaFile,
    describe_columns,
    find_column,
    samples_of,
)
from dphybrid.util.errors import UserError, suggestion

_READERS = max(3, THREADS)
"""Chunks that are read at once. At least three, even on two cores, as each chunk is parsed by threads of
polars."""
_STORED_ROWS = 2**16
"""Approximate number of rows of a stored block."""


@dataclass(frozen=True)
class Plan:
    """How each column is read, inferred from the first rows. described: all columns except label and weight,
    also those that are ignored. split: the column of data.split_column."""

    data: TableDataConfig
    first: Rows
    described: list[DescribedColumn]
    label: Column
    weight: Numeric | None
    split: Category | None

    @classmethod
    def of(
        cls, first: Rows, data: TableDataConfig, schema: SchemaFile, answer: Column | None = None
    ) -> "Plan":
        """Return the plan for a table with these first rows. answer: how an earlier training read the label.
        Raises UserError if they do not fit the config."""
        label = find_column(first, data.label or schema.label or "", "data.label")
        weight = find_column(first, data.weight, "data.weight") if data.weight else None
        if weight == label:
            raise UserError(
                f"data.weight={data.weight!r}: this column is already the label; name another one"
            )
        split = find_column(first, data.split_column, "data.split_column") if data.split_column else None
        for name, key in ((label, "label"), (weight, "weight"), (split, "split_column")):
            if name and first.cells[name].dtype == pl.List:
                raise UserError(f"data.{key}={name!r}: holds lists; name a column of single values")
        taken = {label: "label"} | ({weight: "weight"} if weight else {})
        # The name of a row's part says nothing about it; a time or a key may be a feature.
        taken |= {split: "split_column"} if split and data.split == "named" else {}
        samples = samples_of(first, data)
        return cls(
            data,
            first,
            describe_columns(first, samples, data, schema, taken),
            answer.model_copy(update={"name": label}) if answer else label_column(samples[label], data),
            Numeric(name=weight, **Numeric.inferred(samples[weight])) if weight else None,
            # Times are only ordered, so that they stay as written.
            Category(name=split, **({} if data.split == "time" else Category.inferred(samples[split])))
            if split
            else None,
        )

    @cached_property
    def columns(self) -> list[Column]:
        """The feature columns that a model gets."""
        return [found.column for found in self.described if not isinstance(found.column, Ignore)]

    @cached_property
    def read(self) -> dict[str, tuple[str, Column]]:
        """All columns that are read, by their names in the stored blocks, each with its field of the data
        section."""
        # Features get a prefix, as one may be named label, weight or split.
        found = {f"column {c.name}": (c.flag, c) for c in self.columns}
        others = {"label": self.label, "weight": self.weight, "split": self.split}
        return found | {name: (name, column) for name, column in others.items() if column}


class _Chunk(NamedTuple):
    """A chunk of rows as numbers and codes, its rejected rows, and counts as in `Table`."""

    rows: Rows
    values: pl.DataFrame
    rejected: list[Rejected]
    counts: Counter[str]


@dataclass
class Table:
    """A table that was read. Its rows are stored in `folder` in blocks, as numbers, times and codes of the
    dictionaries (0: no value); the stored column "part" is that of the row's file.

    Attributes:
        lengths: Rows of each block.
        counts: Under "label" the rows without a label, under "weight" those of weight 0, and under a bag's
            stored name its cells with too many items.
        longest: Most items of a cell.
        notes: What was inferred about how the files are written.
    """

    plan: Plan
    folder: Path
    dictionaries: dict[str, Dictionary]
    lengths: list[int] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    longest: int = 1
    notes: dict[str, None] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        """Number of stored rows, which are the usable ones."""
        return sum(self.lengths)

    def texts(self, name: str) -> pl.Series:
        """Return the texts of a stored column in the order of their codes, from code 1 on."""
        return self.dictionaries[name].values()

    def block(self, number: int) -> pl.DataFrame:
        """Return the features and the labels of a block, as they are stored: texts as codes."""
        names = ["label", *(f"column {column.name}" for column in self.plan.columns)]
        return pl.scan_ipc(self._file(number), glob=False).select(by_name(*names)).collect()

    def values(self, number: int) -> dict[str, pl.Series]:
        """Return the feature columns of a block by name."""
        block = self.block(number)
        return {c.name: block.get_column(f"column {c.name}") for c in self.plan.columns}

    def column(self, name: str) -> pl.Series:
        """Return a whole stored column."""
        files = [self._file(number) for number in range(len(self.lengths))]
        return pl.scan_ipc(files, glob=False).select(by_name(name)).collect().to_series()

    def _file(self, number: int) -> Path:
        return self.folder / f"{number:06d}.arrow"

    def store(self, frames: list[pl.DataFrame]) -> None:
        """Write frames as further blocks."""
        for part in pl.concat(frames).iter_slices(_STORED_ROWS):
            file = self._file(len(self.lengths))
            with writing(file):
                part.write_ipc(file, compression="uncompressed")
            self.lengths.append(len(part))


def read_table(
    plan: Plan, files: Sequence[Path], parts: Mapping[Path, int], folder: Path, progress: Progress
) -> Table:
    """Read files into blocks in `folder`. parts: the part of a file's rows, if they are held out (see
    `dphybrid.data.table.splits`). Raises UserError if files cannot be read, do not fit together, or have too
    few rows."""
    folder.mkdir()
    table = Table(plan, folder, {name: Dictionary() for name, (_, c) in plan.read.items() if c.coded})
    done, jobs = ReadProgress(files), read_jobs(files, plan.data)
    next(jobs)  # the plan already holds the rows of the first job
    waiting: list[pl.DataFrame] = []
    for chunk in mapped(
        lambda job: _encoded(plan, job(), table.dictionaries),
        itertools.chain([lambda: plan.first], jobs),
        _READERS,
    ):
        progress("read rows", done.bytes_of(chunk.rows), done.total)
        # Small chunks, such as those of many small files, are joined, as each block costs a file and a scan.
        part = pl.lit(parts.get(chunk.rows.file, 0), pl.Int8)
        waiting.append(chunk.values.with_columns(part=part))
        if sum(map(len, waiting)) > _STORED_ROWS // 2:
            table.store(waiting)
            waiting = []
        for name, dtype in chunk.values.schema.items():
            if dtype == pl.List:
                table.longest = max(table.longest, cast(int, chunk.values[name].list.len().max() or 0))
        table.notes |= dict.fromkeys(chunk.rows.notes)
        table.rejected += chunk.rejected
        table.counts += chunk.counts
        seen, most = table.num_rows + len(table.rejected), plan.data.max_rejected
        # Far beyond the limit, stop at once: the rest of the files will hardly bring the share below it.
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
    """Return a chunk with its rows as numbers and codes, without the rows that are rejected or left out. Runs
    in any thread."""
    # Compared as sets, as files may have the same columns in another order.
    if {*rows.names} != {*plan.first.names}:
        other = min({*rows.names} ^ {*plan.first.names})
        if plan.label.name not in rows.names:
            raise UserError(
                f"{rows.file}: has no column {plan.label.name!r}, the label (dphybrid predict scores rows "
                f"without one){suggestion(plan.label.name, rows.names)}"
            )
        raise UserError(
            f"data.path={plan.data.path}: {rows.file} has other columns than {plan.first.file}, such as "
            f"{other!r}; give files with the same columns"
        )
    cleaned = rows.cells.of([column.name for _, column in plan.read.values()])
    cells = {name: cleaned[column.name] for name, (_, column) in plan.read.items()}
    values = {name: column.values(cells[name]) for name, (_, column) in plan.read.items()}
    # An infinite label is none, too.
    unlabelled_B = (values["label"].is_null() & ~plan.label.wrong(cells["label"], values["label"])).to_numpy()
    weightless_B = _weightless(plan, rows, values) & ~unlabelled_B
    drop_B, rejected = unlabelled_B | weightless_B, list(rows.rejected)
    for name, (flag, column) in plan.read.items():
        # Most chunks have no unreadable cell, which comparing the counts shows at once.
        if column.noun is None or values[name].null_count() == cells[name].null_count():
            continue
        # A row is rejected only once, and not at all if it is left out for its label or weight.
        odd_B = column.wrong(cells[name], values[name]).to_numpy() & ~drop_B
        other = "give data.task=multiclass" if flag == "label" else "name the column in data.categorical"
        for row in np.flatnonzero(odd_B).tolist():
            reason = (
                f"data.{flag}: column {column.name!r} holds {cells[name][row]!r}, not a {column.noun}; "
                f"correct it, list it in data.missing, or {other}"
            )
            rejected.append(Rejected(file=str(rows.file), line=int(rows.lines[row]), reason=reason))
        drop_B = drop_B | odd_B
    counts = Counter({"label": int(unlabelled_B.sum()), "weight": int(weightless_B.sum())})
    for name, (_, column) in plan.read.items():
        if isinstance(column, Bag):
            counts[name] = column.left_out(cells[name], values[name])
    kept = pl.DataFrame([column.alias(name) for name, column in values.items()])
    kept = kept.filter(pl.Series(~drop_B)) if drop_B.any() else kept
    # Codes instead of texts: 4 bytes per cell on disk, and each text is encoded once instead of in each row.
    stored = [dictionaries[c.name].codes(c) if c.name in dictionaries else c for c in kept.get_columns()]
    return _Chunk(rows, pl.DataFrame(stored), sorted(rejected, key=lambda row: row["line"]), counts)


def _weightless(plan: Plan, rows: Rows, values: Mapping[str, pl.Series]) -> Array:
    """Return a mask (B,) of the rows with weight 0. Raises UserError that names the first line with a wrong
    weight."""
    if plan.weight is None:
        return np.zeros(len(rows), bool)
    weights_B = values["weight"].to_numpy()
    wrong_B = ~(weights_B >= 0)  # also true for nan, a missing weight
    why = "weights are numbers of 0 or more; correct it, or leave the row out"
    _refuse(rows, wrong_B, "data.weight", plan.weight, why)
    # As float32, in which weights are stored: a tiny weight may round to 0.
    return weights_B.astype(np.float32) == 0


def _refuse(rows: Rows, wrong_B: Array, field: str, column: Column, why: str) -> None:
    """Raise UserError for the first of the wrong rows, if any."""
    for row in np.flatnonzero(wrong_B)[:1].tolist():
        held = rows.texts(column.name)[row]
        raise UserError(
            f"{field}={column.name!r}: {rows.file}, line {int(rows.lines[row])}: holds {held!r}, but {why}"
        )
