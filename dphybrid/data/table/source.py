"""Tables: CSV, TSV or Parquet files with a label, and columns of the kinds in `dphybrid.data.table.kinds`.

A table is read once, chunk by chunk, then split, fitted on the training part, and encoded. Memory holds some
chunks, the vocabularies and a few numbers per row, however large the input is. Letters: B rows.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from dphybrid.config.tables import TableDataConfig
from dphybrid.data.batches import Array
from dphybrid.data.store import Content, Progress, Source, check_unchanged, file_stamps, mapped, reading_files
from dphybrid.data.table.cells import as_texts
from dphybrid.data.table.column import Column, TrainingValues
from dphybrid.data.table.encoder import Base, Encoder, open_base
from dphybrid.data.table.files import find_files, partitions, read_jobs
from dphybrid.data.table.kinds import KINDS, Category, Numeric, Text
from dphybrid.data.table.labels import Label, label_of_numbers, label_of_texts
from dphybrid.data.table.numbers import unlike
from dphybrid.data.table.reading import Plan, Table, read_table
from dphybrid.data.table.schema import GIVEN, SchemaFile, read_schema, schema_text
from dphybrid.data.table.splits import TEST, TRAIN, VALID, RowSplit, extended_split, rows_in_both, split_rows
from dphybrid.util.digests import code_digest
from dphybrid.util.errors import UserError, counted
from dphybrid.util.files import given_path, write_text
from dphybrid.util.text import as_flags

_FIT_ROWS = 2**18
"""Maximum number of training rows, evenly spaced, from which the statistics of numbers are computed."""
_UNSEEN_SHOWN = 0.0005
"""The summary names a column if at least this share of its validation values has no training row."""

_LOOKED: list[tuple[object, Plan]] = []
"""The plan that was inferred last, with what it was inferred from, until it is asked for again: a command
checks its data before it imports torch, and soon prepares it."""


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
        return read_schema(self.base.prepared.path / "schema.toml") if self.base else SchemaFile()

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
            "kinds": code_digest(KINDS),
            "base": self.base.prepared.digest if self.base else None,
        }

    @cached_property
    def first_look(self) -> tuple[list[tuple[int, int]], Plan]:
        """The files' stamps before they were opened, and the plan inferred from the first rows. Raises
        UserError if the rows do not fit the config."""
        data, stamps = self.data, file_stamps(self.files)
        asked = self.files, stamps, self.data, self.schema.model_dump_json(), self.data.base, tuple(KINDS)
        before = _LOOKED.copy()
        _LOOKED.clear()
        for known, plan in before:
            if known == asked:
                return stamps, plan
        # Retraining keeps the task of its base, whatever the new rows look like.
        if self.base and data.task == "auto":
            data = data.model_copy(update={"task": self.base.encoder.label.task})
        answer = self.base.encoder.answer if self.base else None
        plan = Plan.of(next(read_jobs(self.files[:1], data))(), data, self.schema, answer)
        _LOOKED.append((asked, plan))
        return stamps, plan

    def read(self, progress: Progress, scratch: Path) -> Content:
        stamps, plan = self.first_look
        check_unchanged(self.files, stamps)
        if self.base:
            self.base.encoder.check_forms(plan.columns)
        of_files = dict.fromkeys(self.held_files, VALID) | dict.fromkeys(self.test_files, TEST)
        table = read_table(plan, self.files, of_files, scratch / "rows", progress)
        # The first rows determined how to read the label; its task and classes need all values.
        label, answer, answers_B = _answers(table)
        classes_B = label.encoded(answers_B) if label.classes else np.zeros(table.num_rows)
        split = split_rows(table, self.seed, classes_B)
        if label.task == "binary" and not self.base:
            _check_both_classes(label, classes_B, split)
        parts: dict[str, Array] = {}
        weights_B = table.column("weight").to_numpy().astype(np.float32) if plan.weight else None
        if self.base:
            # Old and new rows are compared in the earlier encoding, in which the base's arrays are stored.
            earlier = self.base.encoder
            labels = np.split(earlier.label.encoded(answers_B), np.cumsum(table.lengths)[:-1])
            pairs = zip(_blocks(table, earlier), labels, strict=True)
            rows = ({**arrays, "labels_B": labels_B} for arrays, labels_B in pairs)
            split, parts["new_rows"] = extended_split(split, self.base, rows)
            # The earlier model was trained on labels with the earlier offset and scale.
            label = label.model_copy(update=earlier.label.model_dump(include={"offset", "scale"}))
        else:
            kept_B = split.part_B == TRAIN
            label = label.fitted(answers_B[kept_B], None if weights_B is None else weights_B[kept_B])
        for part, name in ((TRAIN, "train_rows"), (VALID, "valid_rows"), (TEST, "test_rows")):
            if len(rows_P := np.flatnonzero(split.part_B == part)):
                parts[name] = rows_P
        encoder, unseen = _fitted(table, label, answer, split, progress)
        if self.base:
            encoder = self.base.encoder.extended(encoder)
        text = split.text
        if said := rows_in_both(table, split):
            text += f"\n  check the split: {said}, so metrics on them say little about new rows"
        return self._content(table, encoder, text, unseen, parts, label.encoded(answers_B), weights_B)

    def _content(
        self,
        table: Table,
        encoder: Encoder,
        split_text: str,
        unseen: Mapping[str, float],
        parts: dict[str, Array],
        labels_B: Array,
        weights_B: Array | None,
    ) -> Content:
        if not encoder.id_columns:
            raise UserError(
                f"data.path={self.data.path}: no column is left that has an embedding; ignore fewer columns "
                "or set data.buckets above 0"
            )
        plan, label, num_rows = table.plan, encoder.label, table.num_rows
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
            shapes["bags_BFL"] = ((num_rows, len(encoder.bags), table.longest), np.dtype(np.int32))
        arrays = {"labels_B": labels_B} | ({} if weights_B is None else {"weights_B": weights_B})
        flags = [position for position, (_, is_flag) in enumerate(encoder.dense) if is_flag]
        info: dict[str, object] = {
            "columns": encoder.id_columns,
            "num_ids": [column["num_ids"] for column in encoder.id_columns],
            "num_dense": len(encoder.dense),
            "dense": [name for name, _ in encoder.dense],
            # A base from before flags were inputs of their own goes on with the network that it has.
            "flags": self.base.prepared.info.get("flags", []) if self.base else flags,
            "num_bags": len(encoder.bags),
            "inputs": encoder.names,
            "outputs": label.columns,
            **label.facts(),
        }
        lines = _description(table, encoder, split_text, sizes, unseen)
        extra = {
            "label": label.name,
            "classes": list(label.classes),
            "base": str(self.base.prepared.path) if self.base else None,
            "split": sizes | {"most_unseen": max(unseen.values(), default=0.0)},
            "unseen": dict(unseen),
            "columns": [found.facts for found in plan.described],
            "left_out": {name: count for name, count in table.counts.items() if count},
            "weight": self.data.weight,
        }

        def save(folder: Path) -> None:
            encoder.save(folder / "encoder")
            text = schema_text(label.name, [found.column for found in plan.described])
            write_text(folder / "schema.toml", text)

        return Content(
            arrays | parts,
            info,
            lines,
            (*shapes, *arrays),
            extra,
            table.rejected,
            save,
            shapes,
            partial(_blocks, table, encoder),
        )


def open_source(data: TableDataConfig, seed: int) -> TableSource:
    """Find the files and infer the columns. Raises UserError for a missing path, an empty file, and columns
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
    for field, some in (("data.valid_path", held), ("data.test_path", tested)):
        for file in (file.resolve() for file in some):
            if file in taken:
                raise UserError(
                    f"{field}={getattr(data, field[5:])}: {file} is also among the files of {taken[file]}; "
                    "a row cannot be in both splits, so name different files"
                )
            taken[file] = field
    source = TableSource(data, seed, files, held, tested)
    with reading_files():
        _ = source.first_look  # a cached property: computed here for its errors
    return source


def _blocks(table: Table, encoder: Encoder) -> Iterator[dict[str, Array]]:
    """Yield the encoded arrays of each block of the table."""
    # Each distinct text is encoded once, and each row then looks up its code.
    texts = {c.name: table.texts(f"column {c.name}") for c in table.plan.columns if c.coded}
    by_code = encoder.ids_by_code(texts)
    return mapped(
        lambda number: encoder.arrays(table.values(number), by_code, table.longest), range(len(table.lengths))
    )


def _answers(table: Table) -> tuple[Label, Column, Array]:
    """Return the label, how its cells are read, and its numbers or class numbers (B,)."""
    column, data = table.plan.label, table.plan.data
    values_B = table.column("label").to_numpy()
    if not isinstance(column, Category):
        return label_of_numbers(column.name, values_B, data), column, values_B
    label, column, number = label_of_texts(column, table.texts("label").to_list(), data)
    # nan for code 0 (no value), which no stored row has.
    return label, column, np.concatenate([[np.nan], number])[values_B]


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


def _fitted(
    table: Table, label: Label, answer: Column, split: RowSplit, progress: Progress
) -> tuple[Encoder, dict[str, float]]:
    """Return the encoder fitted to the training rows, and for each column of texts the share of validation
    values that no training row has."""
    trained = np.flatnonzero(split.part_B == TRAIN)
    # Evenly spaced, not the first ones: files are often sorted by time.
    sample = trained[:: -(-len(trained) // _FIT_ROWS)]
    train_B, held_B = (pl.Series(split.part_B == part) for part in (TRAIN, VALID))
    unseen: dict[str, float] = {}

    def texts(name: str) -> tuple[pl.Series, Array]:
        values, codes = table.texts(f"column {name}"), table.column(f"column {name}")
        # [1:] drops the count of code 0, which means no value.
        train, held = (
            np.bincount(some.explode().drop_nulls().to_numpy(), minlength=len(values) + 1)[1:]
            for some in (codes.filter(train_B), codes.filter(held_B))
        )
        unseen[name] = float(held[train == 0].sum() / max(held.sum(), 1))
        return values, train

    def fit(column: Column) -> Column:
        name = column.name
        return column.fitted(
            TrainingValues(
                table.plan.data,
                lambda: table.column(f"column {name}").gather(sample),
                lambda: table.column(f"column {name}").filter(train_B),
                lambda: texts(name),
            )
        )

    columns, fitted = table.plan.columns, list[Column]()
    for column in mapped(fit, columns):
        fitted.append(column)
        progress("encode columns", len(fitted), len(columns))
    encoder = Encoder(tuple(fitted), label, answer)
    return encoder, {c.name: unseen[c.name] for c in (*encoder.categories, *encoder.bags)}


def _description(
    table: Table, encoder: Encoder, split_text: str, sizes: Mapping[str, Any], unseen: Mapping[str, float]
) -> list[str]:
    """Return a description of how a table was read, in lines for people. sizes: number of rows of each split,
    and the share of positive labels. unseen: by column, the share of validation values that no training row
    has."""
    data, label = table.plan.data, encoder.label
    origin = "set by data.task" if data.task != "auto" else "inferred; --data.task changes it"
    if data.base:
        origin = "as in data.base"
    how = "" if label.task == "binary" else f"{label.task} ({origin}): "
    lines = [
        f"  {data.path}: {counted(table.num_rows, 'row')}, label {label.name!r}: {how}"
        f"{_escaped(label.summary())}",
        *(f"  reading: {_escaped(note)}" for note in table.notes),
        *_column_lines(table, encoder),
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
        f"  check {_escaped(found.column.name)}, {found.column.role}: {found.reason}"
        for found in table.plan.described
        if ";" in found.reason
    ]
    answer = table.plan.label
    if isinstance(answer, Numeric) and answer.marks:
        of_label = unlike(as_texts(table.plan.first.cells[answer.name]))
        lines += [f"  check label {_escaped(answer.name)}: {said}" for said in of_label]
    new = sorted(unseen.items(), key=lambda item: -item[1])[:5]
    if shares := ", ".join(f"{name} {share:.1%}" for name, share in new if share >= _UNSEEN_SHOWN):
        lines.append(f"  validation values without a training row: {shares}")
    first, *others = data.role_fields() or [""]
    flags = f"--data.{first} NAMES, also {', '.join(others)}; or " if first else ""
    unnamed = "" if table.plan.first.header else " Columns without a header are named 0, 1, ..."
    return [
        *lines,
        *_left_out_lines(table, encoder),
        f"  to change a role: {flags}--data.schema-file with an edited copy of this folder's schema.toml."
        f"{unnamed}",
    ]


def _column_lines(table: Table, encoder: Encoder) -> list[str]:
    num_ids = {column["name"]: column["num_ids"] for column in encoder.id_columns}
    numbers = {column.name: column for column in encoder.numbers}
    rows = []
    for found in table.plan.described:
        column = found.column
        parts = [part.name for part in numbers[column.name].parts] if column.name in numbers else []
        ids = sum(num_ids.get(name, 0) for name in {column.name, *parts})
        samples = [_escaped(t if len(t) <= 24 else t[:21] + "...") for t in found.samples]
        reason = (
            "" if not found.reason or found.reason == GIVEN or ";" in found.reason else f"  ({found.reason})"
        )
        rows.append((_escaped(column.name), column.role, ids, samples, reason))
    wide = max(len("column"), *(len(name) for name, *_ in rows))
    lines = [f"  {'column':<{wide}}  role         table rows  values such as"]
    if given := sum(found.reason == GIVEN for found in table.plan.described):
        lines[:0] = [f"  roles: of {counted(given, 'column')} as given, by flags or data.schema_file"]
    for name, role, ids, samples, reason in rows:
        line = f"  {name:<{wide}}  {role:<11} {ids:>11,}  {''.join(samples[:1])}"
        for sample in samples[1:]:
            # As many as fit into a terminal.
            line += f", {sample}" if len(line) + len(sample) <= 78 else ""
        lines.append(f"{line}{reason}")
    return lines


def _left_out_lines(table: Table, encoder: Encoder) -> list[str]:
    data = table.plan.data
    lines = [
        f"  {column.name}: hardly any value occurs twice, so all values share one embedding; "
        f"{as_flags({'data.ignore': [column.name]})} leaves the column out"
        for column in encoder.categories
        if not len(column.learned) and not column.hash_buckets
    ]
    lines += [
        f"  {bag.name}: {counted(count, 'cell holds', 'cells hold')} more than {bag.max_items} items; only "
        f"the {'first' if isinstance(bag, Text) else 'last'} {bag.max_items} are used (max_items in "
        "schema.toml)"
        for bag in encoder.bags
        if (count := table.counts[f"column {bag.name}"])
    ]
    if unlabelled := table.counts["label"]:
        name = repr(table.plan.label.name)
        left = f"row without a value of {name} is", f"rows without a value of {name} are"
        lines.append(f"  {counted(unlabelled, *left)} left out: no answer to learn")
    if data.weight:
        weightless = table.counts["weight"]
        zero = counted(weightless, "row with a weight of 0 is", "rows with a weight of 0 are")
        zero = f"; {zero} left out" if weightless else ""
        lines.append(f"  weights of rows, in loss and metrics: {data.weight}{zero}")
    return lines


def _escaped(text: str) -> str:
    """Return a text with control characters written out, as they could move a terminal's cursor."""
    return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in text)
