"""Tables: files of rows with a label, and columns of the kinds in `dphybrid.data.table.kinds`.

A table is read once into typed columns on disk, then split, fitted on the training part column by column, and
encoded chunk by chunk. Memory holds a column or a chunk, the vocabularies and a few numbers per row, however
large the input is. Letters: B rows.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import polars as pl

from dphybrid.config.tables import ROLE_FIELDS, TableDataConfig, bag_of
from dphybrid.data.batches import Array
from dphybrid.data.store import PARTS, Content, Prepared, Progress, Source, reading_files
from dphybrid.data.table.encoder import Encoder, open_base, padded
from dphybrid.data.table.files import Rows, find_parts, folder_values, names_of, read_rows
from dphybrid.data.table.kinds import Column, column_of, encoded
from dphybrid.data.table.labels import Label, label_of
from dphybrid.data.table.notes import remedy
from dphybrid.data.table.splits import TEST, TRAIN, VALID, extended_split, key_texts, split_rows
from dphybrid.data.table.values import BLOCK, items_of, type_of
from dphybrid.util.errors import UserError, counted, suggestion
from dphybrid.util.files import given_path
from dphybrid.util.text import aligned

_PARTS = {"train": TRAIN, "valid": VALID, "test": TEST}
_UNSEEN_ROWS = 2**16
"""Maximum number of validation rows, evenly spaced, among which unknown values are counted."""
_UNSEEN_SHOWN = 0.0005
"""The summary names a column if at least this share of its validation values has no training row."""


@dataclass(frozen=True)
class _Fitted:
    """A column fitted to the training rows, why it has its kind, a few of its values, and the number of items
    of the longest cell of a bag; and the inputs (B,) or (B, L) that all rows give, in files."""

    column: Column
    reason: str
    samples: list[str]
    longest: int = 1
    inputs: Sequence[Array] = ()


@dataclass(frozen=True)
class TableSource(Source):
    """Files of rows. held_files, test_files: the files of data.valid_path and data.test_path."""

    data: TableDataConfig
    seed: int
    read_files: tuple[Path, ...]
    held_files: tuple[Path, ...] = ()
    test_files: tuple[Path, ...] = ()

    @property
    def files(self) -> tuple[Path, ...]:
        return self.read_files + self.held_files + self.test_files

    @property
    def num_test_digests(self) -> int:
        return len(self.test_files)

    @cached_property
    def base(self) -> tuple[Prepared, Encoder] | None:
        return open_base(given_path(self.data.base, "data.base")) if self.data.base else None

    @property
    def options(self) -> dict[str, object]:
        # The contents of files count (as digests of their bytes and base), not their paths: a moved table is
        # not prepared again.
        excluded = {"path", "valid_path", "test_path", "base"}
        return self.data.model_dump(mode="json", exclude=excluded) | {
            "folders": [folder_values(file) for file in self.files],
            "files": [len(self.read_files), len(self.held_files), len(self.test_files)],
            "base": self.base[0].digest if self.base else None,
        }

    @property
    def named(self) -> list[str]:
        """The columns that the table must have."""
        return [*dict.fromkeys(name for field, name in self.data.named_columns if field != "ignore")]

    def check(self) -> None:
        """Raise UserError if the columns of the first file do not fit the config."""
        if names := names_of(self.read_files[0], self.data, self.named):
            self._columns(names)

    def _columns(self, names: list[str]) -> tuple[dict[str, str], dict[str, str]]:
        """Return the columns of label, weight and split, by field, and the fields of those that are not
        features, by column. Raises UserError if a column is missing, or is named twice."""
        data, columns = self.data, {"label": self.data.label or ""}
        columns |= {"weight": data.weight} if data.weight else {}
        columns |= {"split_column": data.split_column} if data.split_column else {}
        for field, name in columns.items():
            _check_column(names, name, f"data.{field}", self.read_files[0])
        if columns.get("weight") == columns["label"]:
            raise UserError(
                f"data.weight={data.weight!r}: this column is already the label; name another one"
            )
        # A time or a key may be a feature, too.
        taken = {name: field for field, name in columns.items() if field != "split_column"}
        if not self.base:  # whose roles hold, whatever comes or goes
            _roles_given(names, data, taken)
        return columns, taken

    def read(self, progress: Progress, scratch: Path) -> Content:
        data = self.data
        every = read_rows(self.files, data, scratch / "rows", self.named, on_progress=progress)
        if len(every) < 2:
            held = "1 row" if len(every) else "no rows that can be read"
            raise UserError(f"data.path={data.path}: has {held}; at least 2 are needed, one for validation")
        columns, taken = self._columns(every.names)
        rows, label, answers_B, weights_B = self._labelled(every, columns)
        files = ((TRAIN, self.read_files), (VALID, self.held_files), (TEST, self.test_files))
        sizes = [part.size for part in rows.parts]
        of_files = np.array([part for part, some in files for _ in some], np.int8)
        part_B = np.repeat(of_files, sizes)[rows.kept_B]
        # Files for validation and test decide nothing about a column.
        num_own = int((part_B == TRAIN).sum())
        classes_B = label.encoded(answers_B) if label.classes else np.zeros(len(rows), np.int8)
        by = columns.get("split_column")
        column = _single_values(rows, by, "split_column") if by else None
        part_B, split_text = split_rows(data, self.seed, part_B, classes_B, column)
        parts: dict[str, Array] = {}
        if self.base:
            # Old and new rows are compared in the earlier encoding, in which the base's arrays are stored.
            base, earlier = self.base
            rows = _with_columns(rows, earlier, taken, data)
            blocks = _earlier_blocks(rows, earlier, label.encoded(answers_B))
            keys = key_texts(column) if column is not None and data.split == "key" else None
            longest = max((bag.max_items for bag in earlier.bags), default=1)
            part_B, text, parts["new_rows"] = extended_split(part_B, base, longest, blocks, keys)
            split_text += f"; {text}"
        else:
            if label.task == "binary":
                _check_both_classes(label, classes_B, part_B)
            label = label.fitted(answers_B, weights_B, part_B == TRAIN)
        arrays = {"labels_B": label.encoded(answers_B)}
        arrays |= {} if weights_B is None else {"weights_B": weights_B}
        del answers_B, classes_B, weights_B, column  # each as large as a column
        fitted = self._fitted(rows, taken, num_own, part_B, progress, scratch)
        encoder = Encoder(tuple(one.column for one in _used(fitted)), label)
        if not encoder.columns:
            why = "".join(f"; {one.column.name}: {one.reason}" for one in fitted if ";" in one.reason)
            raise UserError(
                f"data.path={data.path}: no column is left to learn from; ignore fewer columns, or check "
                f"data.delimiter{why}"
            )
        for name, part in _PARTS.items():
            if len(rows_P := np.flatnonzero(part_B == part)):
                parts[f"{name}_rows"] = rows_P
        return self._content(rows, fitted, encoder, split_text, arrays, parts)

    def _labelled(self, rows: Rows, columns: Mapping[str, str]) -> tuple[Rows, Label, Array, Array | None]:
        """Return the rows with a label, the label, and their answers and weights. Raises UserError if there
        are none."""
        name, notes = columns["label"], rows.notes
        cells = _single_values(rows, name, "label")
        if not cells.count():
            raise UserError(
                f"data.label={name!r}: none of the {len(rows):,} rows of {self.data.path} has a value in "
                "this column; name another one"
            )
        label = self.base[1].label if self.base else label_of(name, cells, self.data)
        answers_B = label.read(cells)
        keep_B = ~np.isnan(answers_B)
        weights_B = _weights(rows, columns["weight"])[keep_B] if "weight" in columns else None
        if num := int((~keep_B).sum()):
            what = f"without a value of {name!r}"
            notes = [*notes, f"{counted(num, f'row {what} is', f'rows {what} are')} left out"]
        return replace(rows, kept_B=keep_B, notes=notes), label, answers_B[keep_B], weights_B

    def _fitted(
        self,
        rows: Rows,
        taken: Mapping[str, str],
        num_own: int,
        part_B: Array,
        progress: Progress,
        scratch: Path,
    ) -> list[_Fitted]:
        """Return the columns fitted to the training rows; with a base, those of the base and the values that
        are new. num_own: the first rows, of data.path. scratch: a folder for what the columns give."""
        data, fitted = self.data, list[_Fitted]()
        train_B, valid_B = (pl.Series(part_B == part) for part in (TRAIN, VALID))
        given = {} if self.base else _roles_given(rows.names, data, taken)
        before = {column.name: column for column in self.base[1].columns} if self.base else {}

        def fit(name: str, file: Path) -> _Fitted:
            cells = rows.column(name)
            train = cells.filter(train_B)
            if name in before:
                column, why = before[name], "as in data.base"
            else:
                column, why = column_of(
                    name, cells.head(num_own), train, given.get(name, {}), data, rows.form
                )
                if not why and column.role == "categorical" and train.dtype == pl.String:
                    why = remedy(name, train)
            one = _Fitted(column, why, _samples(train))
            if column.role == "ignore":
                return one
            newer = column.fitted(column.read(train), data)
            del train  # as large as the column
            column, longest = column.extended(newer) if name in before else newer, 1
            if column.role == "bag":
                lengths = items_of(cells, column.separator).list.len()
                longest = int(cast(int, lengths.max() or 1))
            held = cells.filter(valid_B)
            held = held.gather_every(-(-len(held) // _UNSEEN_ROWS) or 1)
            filled, unknown = column.unknown(*encoded([column], [held]))
            column = column.model_copy(update={"unseen": unknown / max(1, filled)})
            inputs = _inputs(column, cells, min(longest, column.max_items), file)
            return replace(one, column=column, longest=longest, inputs=inputs)

        names = [name for name in rows.names if (name in before if self.base else name not in taken)]
        for number, name in enumerate(names):
            progress("encode columns", number, len(names))
            fitted.append(fit(name, scratch / f"column-{number}"))
        progress("encode columns", len(names), len(names))
        return fitted

    def _content(
        self,
        rows: Rows,
        fitted: list[_Fitted],
        encoder: Encoder,
        split_text: str,
        arrays: dict[str, Array],
        parts: dict[str, Array],
    ) -> Content:
        """Return what is saved. arrays: of all rows, beside the encoded ones. parts: numbers of rows."""
        label = encoder.label
        sizes: dict[str, object] = {part: len(numbers) for part, numbers in parts.items()}
        if label.task == "binary":
            sizes["train_label_rate"] = float(arrays["labels_B"][parts["train_rows"]].mean())
        info: dict[str, object] = {
            "columns": encoder.id_columns,
            "num_ids": [column["num_ids"] for column in encoder.id_columns],
            "num_dense": len(encoder.dense),
            "flags": [position for position, (_, is_flag) in enumerate(encoder.dense) if is_flag],
            "num_bags": len(encoder.bags),
            "inputs": encoder.names,
            "outputs": label.columns,
            **label.facts(),
        }
        extra = {
            "base": str(self.base[0].path) if self.base else None,
            "split": sizes,
            "columns": [{"name": one.column.name, "role": one.column.role} for one in fitted],
            "weight": self.data.weight,
        }

        inputs: dict[str, Any] = encoder.arrays([one.inputs for one in _used(fitted)], len(rows))
        return Content(
            inputs | arrays | parts,
            info,
            _description(self.data, rows, fitted, encoder, split_text, sizes),
            (*inputs, *arrays),
            extra,
            rows.rejected,
            lambda folder: encoder.save(folder / "encoder"),
        )


def open_source(data: TableDataConfig, seed: int) -> TableSource:
    """Find the files and look at the columns. Raises UserError for a missing path, an empty file, and columns
    that do not fit the config: at once, before torch is imported, which takes seconds."""
    if data.path is None:
        raise UserError(
            "data.path is not set; give a CSV, TSV or Parquet file: --data.path clicks.csv "
            "--data.label clicked"
        )
    fields = ("path", "valid_path", "test_path")
    parts = find_parts({f"data.{field}": getattr(data, field) for field in fields})
    source = TableSource(data, seed, *parts)
    with reading_files():
        source.check()
    return source


def _check_column(names: Sequence[str], name: str, field: str, path: object) -> None:
    """Raise UserError if there is no column of a name. field: the field that gives it, for messages."""
    if not name:
        raise UserError(f"{field} is not set; name the column to predict, one of: {', '.join(names)}")
    if name not in names:
        header = any(not each.isdigit() for each in names)
        hint = "" if header else "; its first line was read as values: data.header=yes reads it as names"
        raise UserError(f"{field}={name!r}: {path} has no such column{suggestion(name, names)}{hint}")


def _roles_given(
    names: Sequence[str], data: TableDataConfig, taken: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """Return the roles and separators that flags give, by column. taken: label and weight, each with the
    field that names it. Raises UserError for a column that is missing or is named twice."""
    named_by, given = dict(taken), dict[str, dict[str, Any]]()
    for field, role in ROLE_FIELDS.items():
        for text in getattr(data, field):
            name, separator = (text, "") if field != "bags" or text in names else bag_of(text)
            if field == "ignore" and name not in names:
                continue  # left out already
            _check_column(names, name, f"data.{field}", data.path)
            if name in named_by:
                raise UserError(
                    f"data.{field}={name!r}: this column is already named as {named_by[name]}; name it once"
                )
            named_by[name] = role
            given[name] = {"role": role} | ({"separator": separator} if separator else {})
    return given


def _single_values(rows: Rows, name: str, field: str) -> pl.Series:
    cells = rows.column(name)
    if not type_of(cells.dtype):
        held = "lists" if cells.dtype.is_nested() else cells.dtype
        raise UserError(f"data.{field}={name!r}: holds {held}; name a column of single values")
    return cells


def _weights(rows: Rows, name: str) -> Array:
    """Return the rows' weights (B,), as float32. Raises UserError that shows the first wrong one."""
    cells = _single_values(rows, name, "weight")
    weights_B: Array = cells.cast(pl.Float64, strict=False).fill_null(np.nan).to_numpy().astype(np.float32)
    if len(wrong := cells.filter(pl.Series(~(weights_B > 0)))):
        raise UserError(
            f"data.weight={name!r}: holds {wrong[0]!r}, but weights are numbers above 0; correct "
            f"{counted(len(wrong), 'such row')}, or leave them out"
        )
    return weights_B


def _used(fitted: Sequence[_Fitted]) -> list[_Fitted]:
    """Return the columns that a model gets, in the order of the arrays."""
    used = [one for one in fitted if one.column.role != "ignore"]
    return sorted(used, key=lambda one: one.column.order)


def _inputs(column: Column, cells: pl.Series, width: int, file: Path) -> list[Array]:
    """Return the inputs that all cells of a column give, in files whose names begin with `file`'s: memory
    holds one column at a time, and each cell is encoded once. width: of a bag's array."""
    blocks, found = list[list[Array]](), list[Array]()
    for start in range(0, len(cells), BLOCK):
        inputs = column.inputs(*encoded([column], [cells[start : start + BLOCK]]))
        blocks.append([padded(array, width) if array.ndim == 2 else array for array in inputs])
    for number, parts in enumerate(zip(*blocks, strict=True)):
        array, path = np.concatenate(parts), Path(f"{file}-{number}")
        path.write_bytes(array.data)
        found.append(np.memmap(path, array.dtype, "r", shape=array.shape))
    return found


def _earlier_blocks(rows: Rows, encoder: Encoder, labels_B: Array) -> Iterator[dict[str, Array]]:
    """Yield the arrays of each chunk of rows in the encoding of an earlier table, and their labels."""
    start = 0
    for chunk in rows.chunks(encoder.names):
        yield encoder.encode(chunk) | {"labels_B": labels_B[start : start + len(chunk)]}
        start += len(chunk)


def _with_columns(rows: Rows, encoder: Encoder, taken: Mapping[str, str], data: TableDataConfig) -> Rows:
    """Return rows with the columns that an earlier table had and they lack, as no values; its notes say which
    columns came and went."""
    names, notes = rows.names, list(rows.notes)
    if gone := [name for name in encoder.names if name not in names]:
        notes.append(f"columns of the earlier table that are missing have no values: {', '.join(gone)}")
    if come := [n for n in names if n not in encoder.names and n not in taken and n not in data.ignore]:
        notes.append(f"columns that the earlier table lacks are left out: {', '.join(come)}")
    frame = rows.frame.with_columns(pl.lit(None, pl.String).alias(name) for name in gone)
    return replace(rows, frame=frame, notes=notes)


def _check_both_classes(label: Label, classes_B: Array, part_B: Array) -> None:
    """Raise UserError unless all parts have rows of both classes."""
    for part, number in _PARTS.items():
        found = np.bincount(classes_B[part_B == number].astype(np.int64), minlength=2)
        if found.any() and not found.all():
            raise UserError(
                f"data.label={label.name}: all {found.sum():,} rows {PARTS[part]} are "
                f"{label.classes[int(found.argmax())]!r}; add rows of the other value, or change data.split"
            )


def _samples(train: pl.Series) -> list[str]:
    # In the order of the file, so that users find the values there.
    known = train.head(10_000).drop_nulls().unique(maintain_order=True).head(3).to_list()
    texts = (f"{value:.15g}" if isinstance(value, float) else " ".join(str(value).split()) for value in known)
    return [text if len(text) <= 24 else f"{text[:21]}..." for text in texts]


def _description(
    data: TableDataConfig,
    rows: Rows,
    fitted: list[_Fitted],
    encoder: Encoder,
    split_text: str,
    sizes: Mapping[str, Any],
) -> list[str]:
    """Return a description of how a table was read, in lines for people. sizes: number of rows of each part,
    and the share of positive labels."""
    label = encoder.label
    origin = "set by data.task" if data.task != "auto" else "inferred; --data.task changes it"
    origin = "as in data.base" if data.base else origin
    how = "" if label.task == "binary" else f"{label.task} ({origin}): "
    table = [["column", "role", "table rows", "values such as"]]
    for one in fitted:
        why = f"  ({one.reason})" if one.reason and ";" not in one.reason else ""
        column = one.column
        table.append([column.name, column.role, f"{column.num_ids:,}", f"{', '.join(one.samples)}{why}"])
    found = [part for part in PARTS if f"{part}_rows" in sizes]
    counts = ", ".join(f"{sizes[f'{part}_rows']:,} rows {PARTS[part]}" for part in found)
    rate = f" ({sizes['train_label_rate']:.1%} positive)" if label.task == "binary" else ""
    num_ids = sum(column["num_ids"] for column in encoder.id_columns)
    lines = [
        f"{data.path}: {counted(len(rows), 'row')}, label {label.name!r}: {how}{label.summary()}",
        *(f"  reading: {note}" for note in rows.notes),
        *(f"  {line}" for line in aligned(table)),
        f"{counts}{rate}, {counted(num_ids, 'table row')}",
        split_text,
        # A reason with a semicolon names a remedy: it deserves a line of its own.
        *(f"  check {o.column.name}, {o.column.role}: {o.reason}" for o in fitted if ";" in o.reason),
    ]
    new = sorted(((c.name, c.unseen) for c in encoder.columns), key=lambda item: -item[1])[:5]
    if shares := ", ".join(f"{name} {share:.1%}" for name, share in new if share >= _UNSEEN_SHOWN):
        lines.append(f"validation values without a training row: {shares}")
    for column, longest in ((one.column, one.longest) for one in fitted):
        if longest > column.max_items:
            lines.append(
                f"{column.name}: a cell has {longest:,} items; only the first {column.max_items} of each are "
                "used (data.max_items)"
            )
    lines.append(f"To change a column's role, name it with --data.{', --data.'.join(ROLE_FIELDS)}.")
    return [f"  {line}" for line in lines]
