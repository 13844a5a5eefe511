"""Rows of files, read once, chunk by chunk, into one file a column: numbers, codes of a dictionary, or codes
of a bag's items.

Threads read and encode some chunks ahead of the one that is being written. One class: what a chunk's rows
become and which of them are set apart is decided in one pass. Letters: B rows, L items of a bag.
"""

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from dphybrid.config.tables import TableDataConfig
from dphybrid.data.ahead import THREADS, mapped
from dphybrid.data.batches import Array
from dphybrid.data.store import Progress
from dphybrid.data.table.bags import padded, take_apart
from dphybrid.data.table.categories import Dictionary
from dphybrid.data.table.chunks import read_jobs
from dphybrid.data.table.columns import ColumnStore
from dphybrid.data.table.encode import TableEncoder
from dphybrid.data.table.labels import Label, are_numbers, decided, wrong_counts, wrong_weights
from dphybrid.data.table.roles import ROLE_ROWS, Column, bag_form, find_column, roles_of
from dphybrid.data.table.rows import Rows, Wanted, as_numbers, check_enough, check_rejected, done
from dphybrid.data.table.schema import SchemaFile
from dphybrid.data.table.splits import RowSplit, split_rows
from dphybrid.data.table.times import part_columns, part_names, seconds
from dphybrid.util.errors import UserError

READERS = max(3, THREADS)
"""Chunks that are read and encoded at a time; one more than two cores, since threads of polars' own parse
each of them."""


@dataclass(frozen=True)
class Table:
    """A table that was read: its columns lie in the store, as numbers (nan: no value) or codes of the
    dictionaries (0: no value, or no item).

    items: dictionaries of the bags' items. longest_bag: items of the fullest cell. left_out: by column, cells
    with too many items and how many items.
    unlabelled, weightless: rows that were left out because they have no label, or a weight of 0. answer,
    answers_B: what the label is, and its numbers, or numbers of classes. weights_B: None without.
    """

    label: str
    answer: Label
    answers_B: Array
    weights_B: Array | None
    columns: list[Column]
    dictionaries: dict[str, Dictionary]
    split: RowSplit
    rejected: list[dict[str, Any]]
    items: dict[str, Dictionary]
    longest_bag: int
    left_out: dict[str, tuple[int, int]]
    unlabelled: int
    weightless: int

    def values_of(self, name: str) -> pl.Series:
        """Return the texts by code of a column of categories or bags."""
        return (self.items if name in self.items else self.dictionaries)[name].values()

    def lookups(self, encoder: TableEncoder) -> dict[str, Array]:
        """Return by column the ids of its codes."""
        found = mapped(
            lambda c: c.ids_of_codes(self.values_of(c.name)).astype(np.int32), encoder.vocabularies
        )
        return dict(zip((c.name for c in encoder.vocabularies), found, strict=True))


@dataclass(frozen=True)
class _Encoded:
    """A chunk in numbers. columns: by name in the store; left_out: as in `Table`. unlabelled, weightless:
    rows without a label or a weight, which are no part of it."""

    num_rows: int
    rejected: list[dict[str, Any]]
    columns: dict[str, Array]
    bytes_read: int
    longest_bag: int
    left_out: dict[str, tuple[int, int]]
    unlabelled: int
    weightless: int


class Reading:
    """Reads files of rows into a store; schema: what is known of the columns before. held_files: of files,
    those whose rows are held out. first: the first rows of the first file, by which columns are judged.
    columns: what they were judged to be, where somebody has looked."""

    def __init__(
        self,
        data: TableDataConfig,
        schema: SchemaFile,
        seed: int,
        files: tuple[Path, ...],
        held_files: tuple[Path, ...],
        store: ColumnStore,
        progress: Progress,
        first: Rows,
        columns: list[Column] | None = None,
    ) -> None:
        self.data, self.schema, self.seed = data, schema, seed
        self.files, self.held_files, self.first = files, held_files, first
        self.store, self.progress = store, progress
        self.rejected: list[dict[str, Any]] = []
        self._judged, self.columns = columns, list[Column]()
        self.label = ""
        self.weight: str | None = None
        self.names: list[str] = []
        self.dictionaries: dict[str, Dictionary] = {}
        self.numeric: list[str] = []
        self.times: list[str] = []
        self.bags: dict[str, tuple[str | None, int]] = {}
        self.items: dict[str, Dictionary] = {}
        self.longest_bag = 1
        self.left_out: dict[str, tuple[int, int]] = {}
        self.wanted = Wanted()
        self.unlabelled = self.weightless = 0
        self.num_rows = 0
        self.num_read: int | None = None

    def look(self) -> list[Column]:
        """Return what the columns are used as, by the first rows alone. Raises UserError when these do not
        fit."""
        self._start()
        return self.columns

    def run(self) -> None:
        """Read all files. Raises UserError when they cannot be read, do not fit together, or have too few
        rows."""
        total = sum(file.stat().st_size for file in self.files)
        before = 0
        for file in self.files:
            if self.num_read is None and file in self.held_files:
                self.num_read = self.num_rows
            jobs = read_jobs(file, self.data, self.wanted)
            if not self.names:
                next(jobs)
                self._start()
                jobs = itertools.chain([done(self.first)], jobs)
            for chunk in mapped(lambda job: self._encoded(job()), jobs, READERS):
                self.progress("read rows", min(total, before + chunk.bytes_read), total)
                self._add(chunk)
            before += file.stat().st_size
        check_rejected(
            str(self.data.path), self.rejected, self.num_rows + len(self.rejected), self.data.max_rejected
        )
        for field, name, count in (
            ("label", self.label, self.unlabelled),
            ("weight", self.weight, self.weightless),
        ):
            if count and not self.num_rows:
                value = "a value" if field == "label" else "a weight above 0"
                raise UserError(
                    f"data.{field}={name!r}: none of the {count:,} rows of {self.data.path} has {value} in "
                    "this column; name another one"
                )
        check_enough(str(self.data.path), self.first, self.num_rows)

    def table(self) -> Table:
        """Return what was read, once the store is written. Raises UserError when labels are not what
        `data.task` says or a part is empty."""
        answer, answers_B = self._answers()
        split = self._split(self.num_rows if self.num_read is None else self.num_read)
        return Table(
            self.label,
            answer,
            answers_B,
            self.store.whole(self.weight).astype(np.float32) if self.weight else None,
            self.columns,
            self.dictionaries,
            split,
            self.rejected,
            self.items,
            self.longest_bag,
            self.left_out,
            self.unlabelled,
            self.weightless,
        )

    def _start(self) -> None:
        rows = self.first
        self.names = rows.names
        self.label = find_column(rows, self.data.label or self.schema.label or "", "data.label")
        self.weight = find_column(rows, self.data.weight, "data.weight") if self.data.weight else None
        if self.weight == self.label:
            raise UserError(
                f"data.weight={self.data.weight!r}: this column is already named as label; name another one"
            )
        self.columns = (
            roles_of(rows, self.data, self.schema, self.label, self.weight)
            if self._judged is None
            else self._judged
        )
        self.times = [column.name for column in self.columns if column.role == "time"]
        derived = {part for name in self.times for part in part_names(name)}
        self.numeric = [c.name for c in self.columns if c.role == "numeric" and c.name not in derived]
        coded = [column.name for column in self.columns if column.role == "categorical"]
        sample = rows.values.to_series(rows.names.index(self.label)).head(ROLE_ROWS)
        if are_numbers(self.label, sample, self.data):
            self.numeric.append(self.label)
        else:
            coded.insert(0, self.label)
        if self.weight:
            self.numeric.append(self.weight)
        self.split_column = (
            find_column(rows, self.data.split_column, "data.split_column") if self.data.split_column else None
        )
        if self.split_column and self.split_column not in coded:
            coded.append(self.split_column)
        self.dictionaries = {name: Dictionary() for name in coded}
        self.bags = {
            column.name: bag_form(column) for column in self.columns if column.role in ("bag", "text")
        }
        self.items = {name: Dictionary() for name in self.bags}
        self.wanted.coded.update(coded)
        self.wanted.numbers.update(self.numeric)

    def _encoded(self, rows: Rows) -> _Encoded:
        """Set apart the rows that cannot be used and turn the others into numbers; in any thread."""
        if rows.names != self.names:
            missing = [name for name in self.names if name not in rows.names] or [
                n for n in rows.names if n not in self.names
            ]
            if missing:
                raise UserError(
                    f"data.path={self.data.path}: {rows.file} has other columns than {self.files[0]}, "
                    f"{missing[0]!r} for one; give files with the same columns"
                )
        place = {name: str(i) for i, name in enumerate(rows.names)}
        frame = rows.values
        nan = float("nan")
        numbers = (
            frame.select_seq(
                pl.col(place[name]).cast(pl.Float64, strict=False).fill_null(nan) for name in self.numeric
            )
            if self.data.notation is None
            else pl.DataFrame(
                [as_numbers(frame[place[name]], self.data).fill_null(nan) for name in self.numeric]
            )
        )
        rejected = list(rows.rejected)
        unlabelled_B = frame[place[self.label]].is_null().to_numpy()
        weightless_B = self._unused(rows, {name: numbers[place[name]].to_numpy() for name in self.numeric})
        weightless_B &= ~unlabelled_B
        wrong_B = unlabelled_B | weightless_B

        def set_apart(name: str, odd: pl.Series, field: str, what: str, remedy: str) -> None:
            values = frame[place[name]]
            for row in np.flatnonzero(odd.to_numpy() & ~wrong_B):
                why = f"{field}: column {name!r} holds {values[int(row)]!r}, no {what}"
                hint = f"mend it, list it in data.missing, or {remedy}"
                rejected.append(self._rejected(rows, int(row), f"{why}; {hint}"))
            wrong_B[odd.to_numpy()] = True

        for name in self.numeric:
            values, found = frame[place[name]], numbers[place[name]]
            if (
                values.dtype == pl.Float64
                or int(found.is_finite().sum()) == len(values) - values.null_count()
            ):
                continue
            field, other = "data.numeric", "name the column in data.categorical"
            if name == self.label:
                field, other = "data.label", "give data.task=multiclass"
            set_apart(name, values.is_not_null() & ~found.is_finite(), field, "number", other)
        second = {name: seconds(frame[place[name]], self.data.dayfirst) for name in self.times}
        for name, found in second.items():
            odd = frame[place[name]].is_not_null() & found.is_null()
            set_apart(name, odd, "data.times", "date or time", "name the column in data.categorical")
        if wrong_B.any():
            keep = pl.Series(~wrong_B)
            second = {name: found.filter(keep) for name, found in second.items()}
            frame, numbers = frame.filter(keep), numbers.filter(keep) if self.numeric else numbers
        columns = {name: numbers[place[name]].to_numpy() for name in self.numeric}
        for name, found in second.items():
            columns |= part_columns(name, found)
        # One after another: the other threads have chunks of their own.
        codes = frame.select_seq(d.expression(place[name]) for name, d in self.dictionaries.items())
        for name, dictionary in self.dictionaries.items():
            columns[self._key(name)] = dictionary.met(codes[place[name]])
        longest, left_out = self._add_bags({name: frame[place[name]] for name in self.bags}, columns)
        rejected.sort(key=lambda row: row["line"])
        return _Encoded(
            len(frame),
            rejected,
            columns,
            rows.bytes_read,
            longest,
            left_out,
            int(unlabelled_B.sum()),
            int(weightless_B.sum()),
        )

    def _unused(self, rows: Rows, numbers: dict[str, Array]) -> Array:
        """Return the rows (B,) bool whose weight is 0. Raises UserError that names the first line with no
        weight, or no count as label."""
        if self.data.task == "counts":
            self._refuse(rows, wrong_counts(numbers[self.label]), numbers, self.label, "data.label")
        if self.weight is None:
            return np.zeros(len(rows), bool)
        self._refuse(rows, wrong_weights(numbers[self.weight]), numbers, self.weight, "data.weight")
        return numbers[self.weight].astype(np.float32) == 0

    def _refuse(self, rows: Rows, wrong_B: Array, numbers: dict[str, Array], name: str, field: str) -> None:
        for row in np.flatnonzero(wrong_B)[:1]:
            held = rows.column(name)[int(row)]
            what, other = "weights are numbers from 0 on", "mend it, or leave the row out"
            if field == "data.label":
                what, other = "counts are whole numbers from 0 on", "mend it, or give data.task=regression"
            raise UserError(
                f"{field}={name!r}: {rows.file}, {rows.place} {int(rows.lines[row])}: holds {held!r}, and "
                f"{what}; {other}"
            )

    def _add_bags(
        self, texts: dict[str, pl.Series], columns: dict[str, Array]
    ) -> tuple[int, dict[str, tuple[int, int]]]:
        """Put the bags' codes into `columns`; return the items of the fullest cell, and what is left out."""
        longest, left_out = 1, {}
        for name, (separator, max_items) in self.bags.items():
            cells = take_apart(texts[name], separator, max_items)
            columns[name] = padded(self.items[name].codes(cells.items_N), cells.lengths_B, max_items)
            longest = max(longest, int(cells.lengths_B.max(initial=0)))
            if cells.cut:
                left_out[name] = (cells.cut, cells.left_out)
        return longest, left_out

    def _add(self, chunk: _Encoded) -> None:
        self.store.add(chunk.columns)
        self.longest_bag = max(self.longest_bag, chunk.longest_bag)
        for name, (cells, items) in chunk.left_out.items():
            before = self.left_out.get(name, (0, 0))
            self.left_out[name] = (before[0] + cells, before[1] + items)
        self.rejected += chunk.rejected
        self.num_rows += chunk.num_rows
        self.unlabelled += chunk.unlabelled
        self.weightless += chunk.weightless
        seen = self.num_rows + len(self.rejected)
        # far past what is allowed: more of the file would not mend it
        if len(self.rejected) > 10_000 and len(self.rejected) > 10 * self.data.max_rejected * seen:
            check_rejected(str(self.data.path), self.rejected, seen, self.data.max_rejected)

    def _key(self, name: str) -> str:
        """Return where the codes of a column's whole cells lie; the column may be read as numbers or items
        besides, for data.split_column."""
        return f"{name}\0codes" if name in self.numeric or name in self.bags else name

    def _rejected(self, rows: Rows, row: int, reason: str) -> dict[str, Any]:
        return {"file": str(rows.file), "line": int(rows.lines[row]), "reason": reason}

    def _answers(self) -> tuple[Label, Array]:
        """Return what the label is, and its numbers (B,), or numbers of classes."""
        if self.label in self.numeric:
            answers_B = self.store.whole(self.label)
            if len(answers_B) and answers_B.min() < answers_B.max():
                return Label("counts" if self.data.task == "counts" else "regression"), answers_B
            values, codes_B = [f"{value:g}" for value in answers_B[:1]], np.zeros(0, np.int64)
        else:
            values, codes_B = self.dictionaries[self.label].values().to_list(), self.store.whole(self.label)
        answer, number = decided(self.label, values, self.data)
        return answer, np.concatenate([[np.nan], number])[codes_B]

    def _split(self, num_read: int) -> RowSplit:
        codes_B, values = None, None
        if self.split_column:
            codes_B = self.store.whole(self._key(self.split_column))
            values = self.dictionaries[self.split_column].values()
        return split_rows(self.data, self.seed, self.num_rows, num_read, codes_B, values)
