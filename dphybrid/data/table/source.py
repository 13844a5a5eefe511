"""Tables: files of rows with a label, and columns of the kinds in `dphybrid.data.table.kinds`.

A table is read once into typed columns on disk, then split, fitted on the training part column by column, and
encoded chunk by chunk. Memory holds a column or a chunk, the vocabularies and a few numbers per row, however
large the input is. Letters: B rows.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import polars as pl
from polars.selectors import by_name  # takes names literally; select() reads `*` as a pattern

from dphybrid.config.tables import ROLE_FIELDS, TableDataConfig, bag_of
from dphybrid.data.batches import Array
from dphybrid.data.store import Content, Progress, Source, check_unchanged, file_stamps, reading_files
from dphybrid.data.table.encoder import Base, Encoder, Unknown, open_base
from dphybrid.data.table.files import Rows, check_enough, find_files, names_of, partitions, read_rows
from dphybrid.data.table.kinds import Bag, Column, Ignore, Numbers, column_of
from dphybrid.data.table.labels import Label, label_of
from dphybrid.data.table.notes import remedy
from dphybrid.data.table.schema import SchemaFile, find_column, read_schema, roles_given, schema_text
from dphybrid.data.table.splits import (
    TEST,
    TRAIN,
    VALID,
    RowSplit,
    extended_split,
    key_texts,
    rows_in_both,
    split_rows,
)
from dphybrid.data.table.values import Form, items_of, typed
from dphybrid.util.errors import UserError, counted
from dphybrid.util.files import given_path, write_text
from dphybrid.util.text import as_flags

_UNSEEN_ROWS = 2**16
"""Maximum number of validation rows, evenly spaced, among which unknown values are counted."""
_UNSEEN_SHOWN = 0.0005
"""The summary names a column if at least this share of its validation values has no training row."""
_COMPARED_ROWS = 2**18
"""Number of first rows among which equal ones are looked for in both parts."""
_GIVEN = "as given"


@dataclass
class _Table:
    """The rows that are used: those with a label and a weight above 0. keep_B: among all rows read."""

    rows: Rows
    keep_B: Array

    def __len__(self) -> int:
        return int(self.keep_B.sum())

    def column(self, name: str) -> pl.Series:
        """Return the cells of a whole column."""
        cells = self.rows.column(name)
        return cells if self.keep_B.all() else cells.filter(pl.Series(self.keep_B))

    def chunks(self, names: list[str]) -> Iterator[pl.DataFrame]:
        """Yield these columns, chunk by chunk."""
        start, whole = 0, bool(self.keep_B.all())
        for chunk in self.rows.frame.select(by_name(*names)).collect_batches(
            chunk_size=_CHUNK_ROWS, maintain_order=True
        ):
            keep_B = self.keep_B[start : start + len(chunk)]
            start += len(chunk)
            yield chunk if whole else chunk.filter(pl.Series(keep_B))


_CHUNK_ROWS = 2**16


@dataclass
class _Fitted:
    """Columns with what is said of them: by name the reason and some values, and how many of a bag's cells
    have more items than are used. longest: most items of a cell."""

    columns: list[Column] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)
    samples: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    too_long: dict[str, int] = field(default_factory=dict)
    longest: int = 1


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

    @cached_property
    def schema(self) -> SchemaFile:
        if self.data.schema_file:
            return read_schema(given_path(self.data.schema_file, "data.schema_file"))
        return SchemaFile()

    @cached_property
    def base(self) -> Base | None:
        return open_base(given_path(self.data.base, "data.base")) if self.data.base else None

    @property
    def options(self) -> dict[str, object]:
        # The contents of files count (as digests of their bytes, schema and base), not their paths: a moved
        # table is not prepared again.
        excluded = {"path", "valid_path", "test_path", "schema_file", "base"}
        return self.data.model_dump(mode="json", exclude=excluded) | {
            "schema": self.schema.model_dump(mode="json"),
            "partitions": [partitions(file) for file in self.files],
            "held_files": len(self.held_files),
            **({"test_files": len(self.test_files)} if self.test_files else {}),
            "base": self.base.prepared.digest if self.base else None,
        }

    @cached_property
    def stamps(self) -> list[tuple[int, int]]:
        """The files' sizes and times when the columns were looked at."""
        return file_stamps(self.files)

    @property
    def label_name(self) -> str:
        """The label as the user gives it, or as the earlier table had it."""
        return self.data.label or self.schema.label or (self.base.encoder.label.name if self.base else "")

    @property
    def named(self) -> list[str]:
        """The columns that the table must have."""
        data = self.data
        found = [self.label_name, data.weight or "", data.split_column or ""]
        for field_ in ROLE_FIELDS:
            if field_ != "ignore":
                found += [bag_of(n)[0] if field_ == "bags" else n for n in getattr(data, field_)]
        return [name for name in dict.fromkeys(found) if name]

    def check(self) -> None:
        """Raise UserError if the columns of the first file do not fit the config."""
        _ = self.stamps
        names = names_of(self.read_files[0], self.data, self.named)
        header = not all(name.isdigit() for name in names)
        self._taken(names, header)

    def _taken(self, names: list[str], header: bool) -> dict[str, str]:
        """Return the columns of label and weight, and of the split if it is no feature, each with its field.
        Raises UserError if one is missing, or is named twice."""
        data = self.data
        label = find_column(names, self.label_name, "data.label", header, self.read_files[0])
        taken = {label: "label"}
        if data.weight:
            weight = find_column(names, data.weight, "data.weight", header, self.read_files[0])
            if weight == label:
                raise UserError(
                    f"data.weight={data.weight!r}: this column is already the label; name another one"
                )
            taken[weight] = "weight"
        if data.split_column:
            split = find_column(names, data.split_column, "data.split_column", header, self.read_files[0])
            # The name of a row's part says nothing about it; a time or a key may be a feature.
            taken |= {split: "split_column"} if data.split == "named" else {}
        if not self.base:  # whose roles hold, whatever comes or goes
            roles_given(names, data, self.schema, taken, header)
        return taken

    def read(self, progress: Progress, scratch: Path) -> Content:
        data = self.data
        check_unchanged(self.files, self.stamps)
        rows = read_rows(self.files, data, scratch / "rows", self.named, on_progress=progress)
        check_enough(str(data.path), rows.header, len(rows))
        names = rows.names
        taken = self._taken(names, rows.header)
        by_field = {what: name for name, what in taken.items()}
        by = _split_name(names, data) if data.split_column else ""
        schema = rows.frame.collect_schema()
        for what, name in (by_field | ({"split_column": by} if by else {})).items():
            if schema[name].is_nested():
                raise UserError(f"data.{what}={name!r}: holds lists; name a column of single values")
        cells = rows.column(by_field["label"])
        if not cells.count():
            raise UserError(
                f"data.label={by_field['label']!r}: none of the {len(rows):,} rows of {data.path} has a "
                "value in this column; name another one"
            )
        label = (
            _earlier_label(self.base.encoder.label, cells)
            if self.base
            else label_of(by_field["label"], cells, data)
        )
        answers_B = label.read(cells)
        unlabelled_B = np.isnan(answers_B)
        weights_B = _weights(rows, by_field["weight"]) if "weight" in by_field else None
        weightless_B = np.zeros(len(rows), bool) if weights_B is None else (weights_B == 0) & ~unlabelled_B
        if weightless_B.all():
            raise UserError(
                f"data.weight={data.weight!r}: none of the {len(rows):,} rows of {data.path} has a weight "
                "above 0 in this column; name another one"
            )
        table = _Table(rows, ~unlabelled_B & ~weightless_B)
        check_enough(str(data.path), rows.header, len(table))
        answers_B = answers_B[table.keep_B]
        weights_B = None if weights_B is None else weights_B[table.keep_B].astype(np.float32)
        of_files = [TRAIN] * len(self.read_files) + [VALID] * len(self.held_files)
        of_files += [TEST] * len(self.test_files)
        part_B = np.repeat(np.array(of_files), rows.sizes)[table.keep_B]
        classes_B = label.encoded(answers_B) if label.classes else np.zeros(len(table))
        column = table.column(by) if by else None
        dates = rows.forms.get(by, Form()).dates
        split = split_rows(data, self.seed, part_B, classes_B, column, dates)
        if label.task == "binary" and not self.base:
            _check_both_classes(label, classes_B, split)
        parts: dict[str, Array] = {}
        if self.base:
            # Old and new rows are compared in the earlier encoding, in which the base's arrays are stored.
            table, gone = _with_columns(table, self.base.encoder)
            blocks = _blocks(table, self.base.encoder, label.encoded(answers_B))
            keys = key_texts(column) if column is not None and data.split == "key" else None
            split, parts["new_rows"] = extended_split(split, self.base, blocks, keys)
        else:
            train = split.part_B == TRAIN
            label = label.fitted(answers_B[train], None if weights_B is None else weights_B[train])
        for part, name in ((TRAIN, "train_rows"), (VALID, "valid_rows"), (TEST, "test_rows")):
            if len(rows_P := np.flatnonzero(split.part_B == part)):
                parts[name] = rows_P
        fitted = self._fitted(table, taken, split, progress)
        used = tuple(column for column in fitted.columns if not isinstance(column, Ignore))
        encoder = Encoder(used, label)
        if self.base:
            fitted.notes += gone
            fitted.notes += _of_other_columns(names, encoder, {*taken, *data.ignore})
        text = split.text
        compared = [*encoder.names, label.name]
        if said := rows_in_both(_row_hashes(table, compared), split.part_B):
            text += f"\n  check the split: {said}, so metrics on them say little about new rows"
        labels_B = label.encoded(answers_B)
        counts = {"label": int(unlabelled_B.sum()), "weight": int(weightless_B.sum())}
        return self._content(table, fitted, encoder, text, parts, labels_B, weights_B, counts)

    def _fitted(
        self, table: _Table, taken: Mapping[str, str], split: RowSplit, progress: Progress
    ) -> _Fitted:
        """Return the columns fitted to the training rows; with a base, those of the base and the values that
        are new."""
        data, rows, found = self.data, table.rows, _Fitted()
        train_B, valid_B = (pl.Series(split.part_B == part) for part in (TRAIN, VALID))
        names = [name for name in rows.names if name not in taken]
        # Files for validation and test decide nothing about a column.
        own_rows = int(table.keep_B[: sum(rows.sizes[: len(self.read_files)])].sum())
        given = {} if self.base else roles_given(rows.names, data, self.schema, taken, rows.header)
        before = {column.name: column for column in self.base.encoder.columns} if self.base else {}
        for number, name in enumerate(names):
            if self.base and name not in before:
                continue
            progress("encode columns", number, len(names))
            cells = table.column(name)
            train = cells.filter(train_B)
            if name in before:
                column, why = before[name], "as in data.base"
            elif name in rows.index and given[name].role is None:
                column, why = Ignore(name=name), "the index of the rows"
            else:
                form = rows.forms.get(name, Form())
                said = given[name]
                own = cells.head(own_rows)
                column, why = column_of(name, own, train, said.role, dict(said.section), data, form)
                why = why or _doubt(column, train)
            found.samples[name] = _samples(train)
            found.reasons[name] = why
            if isinstance(column, Ignore):
                found.columns.append(column)
                continue
            if isinstance(column, Bag):
                lengths = items_of(cells, column.separator).list.len().fill_null(0)
                longest = int(cast(int, lengths.max() or 0))
                found.longest = max(found.longest, min(column.max_items, longest))
                found.too_long[name] = int((lengths > column.max_items).sum())
            newer = column.fitted(column.read(train), data)
            column = column.extended(newer) if name in before else newer
            held = cells.filter(valid_B)
            held = held.gather_every(max(1, -(-len(held) // _UNSEEN_ROWS)))
            unknown = Unknown()
            unknown.add(name, *column.unknown(held, column.read(held)))
            found.columns.append(column.model_copy(update={"unseen": unknown.share(name)}))
        progress("encode columns", len(names), len(names))
        if taken_twice := _clash(found.columns, table.rows.names):
            raise UserError(taken_twice)
        return found

    def _content(
        self,
        table: _Table,
        fitted: _Fitted,
        encoder: Encoder,
        split_text: str,
        parts: dict[str, Array],
        labels_B: Array,
        weights_B: Array | None,
        counts: Mapping[str, int],
    ) -> Content:
        if not encoder.id_columns:
            why = "".join(f"; {name}: {reason}" for name, reason in fitted.reasons.items() if ";" in reason)
            raise UserError(
                f"data.path={self.data.path}: no column is left that has an embedding; ignore fewer columns, "
                f"set data.buckets above 0, or check data.delimiter{why}"
            )
        label, num_rows = encoder.label, len(table)
        sizes: dict[str, object] = {part: len(rows) for part, rows in parts.items()}
        if label.task == "binary":
            for part in ("train", "valid", "test"):
                if f"{part}_rows" in parts:
                    sizes[f"{part}_label_rate"] = float(labels_B[parts[f"{part}_rows"]].mean())
        num_singles = len(encoder.id_columns) - len(encoder.bags)
        shapes: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {
            "ids_BF": ((num_rows, num_singles), np.dtype(np.int32)),
            "dense_BN": ((num_rows, len(encoder.dense)), np.dtype(np.float32)),
        }
        if encoder.bags:
            shapes["bags_BFL"] = ((num_rows, len(encoder.bags), fitted.longest), np.dtype(np.int32))
        arrays = {"labels_B": labels_B} | ({} if weights_B is None else {"weights_B": weights_B})
        info: dict[str, object] = {
            "columns": encoder.id_columns,
            "num_ids": [column["num_ids"] for column in encoder.id_columns],
            "num_dense": len(encoder.dense),
            "dense": [name for name, _ in encoder.dense],
            "flags": [position for position, (_, is_flag) in enumerate(encoder.dense) if is_flag],
            "num_bags": len(encoder.bags),
            "inputs": encoder.names,
            "outputs": label.columns,
            **label.facts(),
        }
        unseen = {c.name: c.unseen for c in encoder.columns if not isinstance(c, Numbers)}
        left_out = {**counts, **{f"column {name}": count for name, count in fitted.too_long.items()}}
        extra = {
            "label": label.name,
            "classes": list(label.classes),
            "base": str(self.base.prepared.path) if self.base else None,
            "split": sizes | {"most_unseen": max(unseen.values(), default=0.0)},
            "unseen": unseen,
            "columns": [
                {
                    "name": column.name,
                    "role": column.role,
                    "reason": fitted.reasons[column.name],
                    "samples": fitted.samples[column.name],
                }
                for column in fitted.columns
            ],
            "left_out": {name: count for name, count in left_out.items() if count},
            "weight": self.data.weight,
        }

        def save(folder: Path) -> None:
            encoder.save(folder / "encoder")
            write_text(folder / "schema.toml", schema_text(label.name, fitted.columns))

        return Content(
            arrays | parts,
            info,
            _description(self.data, table, fitted, encoder, split_text, sizes, counts),
            (*shapes, *arrays),
            extra,
            table.rows.rejected,
            save,
            shapes,
            partial(_blocks, table, encoder, None, fitted.longest),
        )


def open_source(data: TableDataConfig, seed: int) -> TableSource:
    """Find the files and look at the columns. Raises UserError for a missing path, an empty file, and columns
    that do not fit the config: at once, before torch is imported, which takes seconds."""
    if data.path is None:
        raise UserError(
            "data.path is not set; give a CSV, TSV or Parquet file: --data.path clicks.csv "
            "--data.label clicked"
        )
    files = find_files(data.path, "data.path")
    held = find_files(data.valid_path, "data.valid_path") if data.valid_path else ()
    tested = find_files(data.test_path, "data.test_path") if data.test_path else ()
    taken = dict.fromkeys((file.resolve() for file in files), "data.path")
    for field_, some in (("data.valid_path", held), ("data.test_path", tested)):
        for file in (file.resolve() for file in some):
            if file in taken:
                raise UserError(
                    f"{field_}={getattr(data, field_[5:])}: {file} is also among the files of {taken[file]}; "
                    "a row cannot be in both splits, so name different files"
                )
            taken[file] = field_
    source = TableSource(data, seed, files, held, tested)
    with reading_files():
        source.check()
    return source


def _earlier_label(label: Label, cells: pl.Series) -> Label:
    """Return the label of an earlier table. Raises UserError if the cells have other classes."""
    if label.classes:
        now = typed(cells, label.form).drop_nulls().unique().cast(pl.String).sort().to_list()
        if {*now} - {*label.classes}:
            raise UserError(
                f"data.base: classes were {list(label.classes)} and are now {now}; the earlier model cannot "
                "be retrained, train a new one"
            )
    return label


def _split_name(names: list[str], data: TableDataConfig) -> str:
    return find_column(names, data.split_column or "", "data.split_column", True, data.path)


def _weights(rows: Rows, name: str) -> Array:
    """Return the rows' weights (B,). Raises UserError that names the first wrong one."""
    cells = rows.column(name)
    weights_B: Array = cells.cast(pl.Float64, strict=False).fill_null(np.nan).to_numpy()
    if len(wrong := np.flatnonzero(~(weights_B >= 0))):
        files, lines = rows.lines()
        place = int(wrong[0])
        raise UserError(
            f"data.weight={name!r}: {files[place]}, line {lines[place]}: holds {cells[place]!r}, but weights "
            "are numbers of 0 or more; correct it, or leave the row out"
        )
    # As float32, in which weights are stored: a tiny weight may round to 0.
    return weights_B.astype(np.float32).astype(np.float64)


def _blocks(
    table: _Table, encoder: Encoder, labels_B: Array | None = None, longest: int = 1
) -> Iterator[dict[str, Array]]:
    """Yield the encoded arrays of each chunk of the table, with their labels if they are given."""
    start = 0
    for chunk in table.chunks(encoder.names):
        arrays = encoder.encode(chunk, longest=longest)
        if labels_B is not None:
            arrays["labels_B"] = labels_B[start : start + len(chunk)]
        start += len(chunk)
        yield arrays


def _row_hashes(table: _Table, names: list[str]) -> pl.Series:
    """Return hashes of the first rows, of these columns."""
    hashes, size = list[pl.Series](), 0
    for chunk in table.chunks(names):
        hashes.append(chunk.hash_rows())
        size += len(chunk)
        if size >= _COMPARED_ROWS:
            break
    return pl.concat(hashes)


def _with_columns(table: _Table, encoder: Encoder) -> tuple[_Table, list[str]]:
    """Return the table with the columns that an earlier one had and it lacks, as no values; and what to say
    of them."""
    gone = [name for name in encoder.names if name not in table.rows.names]
    if not gone:
        return table, []
    rows = table.rows
    rows.frame = rows.frame.with_columns(pl.lit(None, pl.String).alias(name) for name in gone)
    return table, [f"columns of the earlier table are gone, no values: {', '.join(gone)}"]


def _of_other_columns(names: list[str], encoder: Encoder, taken: set[str]) -> list[str]:
    come = [name for name in names if name not in encoder.names and name not in taken]
    return [f"columns that the earlier table has not are left out: {', '.join(come)}"] if come else []


def _check_both_classes(label: Label, classes_B: Array, split: RowSplit) -> None:
    """Raise UserError unless both splits have rows of both classes."""
    for number, part in ((TRAIN, "training"), (VALID, "validation"), (TEST, "test")):
        found = np.bincount(classes_B[split.part_B == number].astype(np.int64), minlength=2)
        if not found.all() and (found.any() or number != TEST):
            only, rare = int(found.argmax()), int(found.argmin())
            raise UserError(
                f"data.label={label.name}: all {found.sum():,} {part} rows are {label.classes[only]!r}; "
                f"{label.classes[rare]!r} has {(classes_B == rare).sum():,} of {len(classes_B):,} rows, and "
                "training and validation need at least one each (a test, too): add such rows, or change "
                "data.split"
            )


def _doubt(column: Column, train: pl.Series) -> str:
    """Return what a column of categories looks like, if it is something else."""
    if column.role != "categorical" or train.dtype != pl.String:
        return ""
    return remedy(column.name, train)


def _clash(columns: list[Column], names: list[str]) -> str:
    for column in columns:
        if column.role == "time" and (both := {*column.part_names} & {*names}):  # type: ignore[attr-defined]
            return (
                f"column {min(both)!r} has the name of a part of {column.name!r}, which is read as dates or "
                f"times; rename it, or name {column.name!r} in data.categorical"
            )
    return ""


def _samples(train: pl.Series) -> list[str]:
    # In the order of the file, so that users find the values there.
    known = train.head(10_000).drop_nulls().unique(maintain_order=True).head(3).to_list()
    return [f"{v:.15g}" if isinstance(v, float) else str(v) for v in known]


def _description(
    data: TableDataConfig,
    table: _Table,
    fitted: _Fitted,
    encoder: Encoder,
    split_text: str,
    sizes: Mapping[str, Any],
    counts: Mapping[str, int],
) -> list[str]:
    """Return a description of how a table was read, in lines for people. sizes: number of rows of each split,
    and the share of positive labels. counts: rows without a label, and of weight 0."""
    label = encoder.label
    origin = "set by data.task" if data.task != "auto" else "inferred; --data.task changes it"
    if data.base:
        origin = "as in data.base"
    how = "" if label.task == "binary" else f"{label.task} ({origin}): "
    lines = [
        f"  {data.path}: {counted(len(table), 'row')}, label {label.name!r}: {how}"
        f"{_escaped(label.summary())}",
        *(f"  reading: {_escaped(note)}" for note in (*table.rows.notes, *fitted.notes)),
        *_column_lines(fitted, encoder),
    ]
    rates = {part: sizes.get(f"{part}_label_rate") for part in ("train", "valid", "test")}
    rows = sum(column["num_ids"] for column in encoder.id_columns)
    lines.append(
        f"  {counted(sizes['train_rows'], 'row')} to train"
        + ("" if rates["train"] is None else f" ({rates['train']:.1%} positive)")
        + f", {sizes['valid_rows']:,} to validate"
        + ("" if rates["valid"] is None else f" ({rates['valid']:.1%})")
        + (f", {sizes['test_rows']:,} to test" if "test_rows" in sizes else "")
        + ("" if rates["test"] is None else f" ({rates['test']:.1%})")
        + f", {counted(rows, 'table row')}"
    )
    lines.append(f"  {split_text}")
    # A reason with a semicolon names a remedy: it deserves a line of its own.
    lines += [
        f"  check {_escaped(column.name)}, {column.role}: {_escaped(reason)}"
        for column in fitted.columns
        if ";" in (reason := fitted.reasons[column.name])
    ]
    new = sorted(((c.name, c.unseen) for c in encoder.columns), key=lambda item: -item[1])[:5]
    if shares := ", ".join(f"{name} {share:.1%}" for name, share in new if share >= _UNSEEN_SHOWN):
        lines.append(f"  validation values without a training row: {shares}")
    first, *others = ROLE_FIELDS
    return [
        *lines,
        *_left_out_lines(data, fitted, encoder, counts),
        f"  to change a role: --data.{first} NAMES, also {', '.join(others)}; or --data.schema-file with an "
        "edited copy of this folder's schema.toml.",
    ]


def _column_lines(fitted: _Fitted, encoder: Encoder) -> list[str]:
    num_ids = {column["name"]: column["num_ids"] for column in encoder.id_columns}
    numbers = {column.name: column for column in encoder.numbers}
    rows = []
    for column in fitted.columns:
        parts = [part.name for part in numbers[column.name].parts] if column.name in numbers else []
        ids = sum(num_ids.get(name, 0) for name in {column.name, *parts})
        samples = [_escaped(t if len(t) <= 24 else t[:21] + "...") for t in fitted.samples[column.name]]
        reason = fitted.reasons[column.name]
        shown = "" if not reason or reason == _GIVEN or ";" in reason else f"  ({reason})"
        rows.append((_escaped(column.name), column.role, ids, samples, shown))
    wide = max(len("column"), *(len(name) for name, *_ in rows))
    lines = [f"  {'column':<{wide}}  role         table rows  values such as"]
    if given := sum(reason == _GIVEN for reason in fitted.reasons.values()):
        lines[:0] = [f"  roles: of {counted(given, 'column')} as given, by flags or data.schema_file"]
    for name, role, ids, samples, reason in rows:
        line = f"  {name:<{wide}}  {role:<11} {ids:>11,}  {''.join(samples[:1])}"
        for sample in samples[1:]:
            # As many as fit into a terminal.
            line += f", {sample}" if len(line) + len(sample) <= 78 else ""
        lines.append(f"{line}{reason}")
    return lines


def _left_out_lines(
    data: TableDataConfig, fitted: _Fitted, encoder: Encoder, counts: Mapping[str, int]
) -> list[str]:
    lines = [
        f"  {column.name}: hardly any value occurs twice, so all values share one embedding; "
        f"{as_flags({'data.ignore': [column.name]})} leaves the column out"
        for column in encoder.categories
        if not len(column.learned) and not column.hash_buckets
    ]
    lines += [
        f"  {bag.name}: {counted(count, 'cell holds', 'cells hold')} more than {bag.max_items} items; only "
        f"the first {bag.max_items} are used (max_items in schema.toml)"
        for bag in encoder.bags
        if (count := fitted.too_long[bag.name])
    ]
    if unlabelled := counts["label"]:
        left = (
            f"row without a value of {encoder.label.name!r} is",
            f"rows without a value of {encoder.label.name!r} are",
        )
        lines.append(f"  {counted(unlabelled, *left)} left out: no answer to learn")
    if data.weight:
        weightless = counts["weight"]
        zero = counted(weightless, "row with a weight of 0 is", "rows with a weight of 0 are")
        zero = f"; {zero} left out" if weightless else ""
        lines.append(f"  weights of rows, in loss and metrics: {data.weight}{zero}")
    return lines


def _escaped(text: str) -> str:
    """Return a text with control characters written out, as they could move a terminal's cursor."""
    return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in text)
