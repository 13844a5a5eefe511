"""Tables of clicks: CSV, TSV or Parquet files with a binary label, categorical and numeric columns.

Read once, chunk by chunk, into one file a column (numbers, or codes of a dictionary); then split, fitted on the training part, and encoded.
Memory holds a chunk, the vocabularies and a few numbers a row, however large the input is. Letters: B rows, F id columns, N dense columns.
"""

import difflib
import itertools
import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np
import polars as pl

from dphybrid.config import DataConfig
from dphybrid.data.ahead import ahead, mapped
from dphybrid.data.bags import MAX_ITEMS, SEPARATOR, BagColumn, bag_ids, form_text, one_width, padded, take_apart
from dphybrid.data.batches import Array
from dphybrid.data.categories import CategoryColumn, Dictionary, fit_categories
from dphybrid.data.encode import FIT_ROWS, NumericColumn, TableEncoder, fit_numeric, side_by_side
from dphybrid.data.extend import Base, extended, extended_split, open_base, row_keys
from dphybrid.data.fields import is_number
from dphybrid.data.rows import Rows, check_enough, check_rejected, read_chunks
from dphybrid.data.schema import ColumnOptions, Role, SchemaFile, inferred_role, read_schema, schema_text
from dphybrid.data.splits import RowSplit, split_rows
from dphybrid.data.store import Content, Progress, Streamed, source_digests
from dphybrid.errors import UserError

POSITIVE = ("1", "true", "yes", "y", "t", "positive", "click", "clicked")
"""Label values that mean 1 although they would sort first."""
ROLE_ROWS = 20_000
"""Rows from which the columns' roles are told."""
UNSEEN_TOLD = 0.0005
"""Share of held-out values without a training row from which on a person is told."""
SUFFIXES = (".csv", ".tsv", ".txt", ".csv.gz", ".tsv.gz", ".txt.gz", ".parquet", ".pq")
"""Files of a folder that are read."""
BLOCK_ROWS = 2**16
"""Rows encoded at a time."""


@dataclass(frozen=True)
class Column:
    """A column and what it is used as. reason: why, where it is not plain; samples: a few values for people."""

    name: str
    role: Role
    reason: str
    samples: tuple[str, ...]
    options: ColumnOptions


@dataclass(frozen=True)
class TableSource:
    """Files of rows. held: files whose rows are the held-out ones."""

    data: DataConfig
    seed: int
    read_files: tuple[Path, ...]
    held_files: tuple[Path, ...] = ()

    @cached_property
    def schema(self) -> SchemaFile:
        if self.data.schema_file:
            return read_schema(Path(self.data.schema_file).expanduser())
        return read_schema(self.base.prepared.path / "schema.toml") if self.base else SchemaFile()

    @cached_property
    def base(self) -> Base | None:
        return open_base(Path(self.data.base)) if self.data.base else None

    @property
    def options(self) -> dict[str, Any]:
        values = self.data.model_dump(mode="json", exclude={"path", "valid_path", "schema_file", "base", "window", "negatives"})
        partitions = [[part for part in file.parent.parts if "=" in part] for file in self.files]
        values |= {"schema": self.schema.model_dump(mode="json")}
        # Bags came later: what has none keeps its digest.
        for name in ("bags", "text"):
            if not values[name]:
                del values[name]
        for column in values["schema"]["columns"].values():
            for name in ("separator", "max_items"):
                if column[name] is None:
                    del column[name]
        return values | {
            "partitions": partitions if any(partitions) else [],
            "held_files": len(self.held_files),
            **({"base": self.base.prepared.digest} if self.base else {}),
            "formats": sorted(
                {"".join(file.suffixes[-2:]).lower() for file in self.files if file.suffix.lower() in (".gz", ".parquet", ".pq")}
            ),
        }

    @property
    def files(self) -> tuple[Path, ...]:
        return self.read_files + self.held_files

    def digests(self, progress: Progress) -> list[bytes]:
        return source_digests(self.files, progress)

    def read(self, progress: Progress, scratch: Path) -> Content:
        with ColumnStore(scratch / "columns") as store:
            reading = _Reading(self, store, progress)
            reading.run()
        table = reading.table()
        parts: dict[str, Array] = {}
        if self.base:
            held, parts["new_rows"] = extended_split(table.split, self.base, _keys_of(table, store, self.base.encoder))
            table = replace(table, split=held)
        parts |= {"train_rows": np.flatnonzero(~table.split.held_B), "valid_rows": np.flatnonzero(table.split.held_B)}
        encoder, unseen = self._fit(table, store, progress)
        split: dict[str, Any] = {part: len(rows) for part, rows in parts.items()}
        split |= {f"{part}_label_rate": float(table.labels_B[parts[f"{part}_rows"]].mean()) for part in ("train", "valid")}
        num_rows, id_columns = len(table.labels_B), encoder.id_columns
        if not id_columns:
            raise UserError(
                f"data.path={self.data.path}: no column is left to look up; ignore fewer columns or set data.buckets above 0"
            )
        lookups = table.lookups(encoder)
        arrays: dict[str, Array | Streamed] = {
            "ids_BF": Streamed(
                (num_rows, len(id_columns) - len(encoder.bags)),
                np.dtype(np.int32),
                lambda: _ids(encoder, lookups, store, num_rows),
            ),
            "dense_BN": Streamed((num_rows, encoder.num_dense), np.dtype(np.float32), lambda: _dense(encoder, store, num_rows)),
            "labels_B": table.labels_B,
        }
        info: dict[str, Any] = {
            "task": "binary",
            "columns": id_columns,
            "num_ids": [column["num_ids"] for column in id_columns],
            "num_dense": encoder.num_dense,
        }
        if encoder.bags:
            shape = (num_rows, len(encoder.bags), table.longest_bag)
            arrays["bags_BFL"] = Streamed(
                shape, np.dtype(np.int32), lambda: _bags(encoder, lookups, store, num_rows, table.longest_bag)
            )
            info["num_bags"] = len(encoder.bags)
        extra = {
            "label": table.label,
            "classes": list(encoder.classes),
            "base": str(self.base.prepared.path) if self.base else None,
            "split": split | {"most_unseen": max(unseen.values(), default=0.0)},
            "unseen": unseen,
            "columns": [{k: v for k, v in column.__dict__.items() if k != "options"} for column in table.columns],
            **({"left_out_items": {name: list(counts) for name, counts in table.left_out.items()}} if table.left_out else {}),
        }
        text = self._description(table, encoder, split, unseen)

        def save(folder: Path) -> None:
            encoder.save(folder / "encoder")
            schema = schema_text(table.label, [(column.name, column.options) for column in table.columns])
            (folder / "schema.toml").write_text(schema, encoding="utf-8")

        return Content("arrays", arrays | parts, info, text, tuple(arrays), extra, table.rejected, save)

    def _fit(self, table: "Table", store: "ColumnStore", progress: Progress) -> tuple[TableEncoder, dict[str, float]]:
        """Learn from the training rows; also return the share of held-out values, a category column, that no training row has."""
        held_B = table.split.held_B
        trained = np.flatnonzero(~held_B)
        sample_B = np.zeros(len(held_B), bool)
        sample_B[trained[:: -(-len(trained) // FIT_ROWS)]] = True
        unseen: dict[str, float] = {}

        def fit(column: Column) -> NumericColumn | CategoryColumn:
            o = column.options
            if column.role == "numeric":
                raw_B = np.concatenate([block[rows_B] for block, rows_B in store.with_rows(column.name, sample_B)])
                return fit_numeric(column.name, raw_B, self.data.buckets if o.buckets is None else o.buckets, o.scale)
            values = table.values_of(column.name)
            counts = np.zeros((2, len(values) + 1), np.int64)
            for codes_B, rows_B in store.with_rows(column.name, held_B):  # (B, L) of bags
                counts += [np.bincount(codes.ravel(), minlength=len(values) + 1) for codes in (codes_B, codes_B[rows_B])]
            train, held = (counts[0] - counts[1])[1:], counts[1, 1:]
            unseen[column.name] = float(held[train == 0].sum() / max(held.sum(), 1))
            least = self.data.min_count if o.min_count is None else o.min_count
            found = fit_categories(column.name, values, train, least, o.top, o.hash_buckets)
            if column.role == "categorical":
                return found
            return BagColumn(found.name, found.vocabulary, found.hash_buckets, *bag_form(column))

        used = [column for column in table.columns if column.role != "ignore"]
        fitted: list[NumericColumn | CategoryColumn] = []
        for column in mapped(fit, used):
            fitted.append(column)
            progress("encode columns", len(fitted), len(used))
        encoder = TableEncoder(
            tuple(column for column in fitted if isinstance(column, NumericColumn)),
            tuple(column for column in fitted if isinstance(column, CategoryColumn) and not isinstance(column, BagColumn)),
            table.label,
            (table.classes[0], table.classes[1]),
            tuple(column for column in fitted if isinstance(column, BagColumn)),
        )
        if self.base:
            encoder = extended(self.base.encoder, encoder)
        return encoder, {column.name: unseen[column.name] for column in encoder.vocabularies}

    def _description(self, table: "Table", encoder: TableEncoder, split: dict[str, Any], unseen: dict[str, float]) -> list[str]:
        num_ids = {column["name"]: column["num_ids"] for column in encoder.id_columns}
        columns, classes, labels_B = table.columns, table.classes, table.labels_B
        wide = max(len("column"), *(len(column.name) for column in columns))
        lines = [f"  {self.data.path}: {len(labels_B):,} rows, label {table.label!r}: {classes[1]!r} is 1, {classes[0]!r} is 0"]
        lines += [f"  {'column':<{wide}}  role            ids  values such as"]
        for column in columns:
            samples = ", ".join(text if len(text) <= 24 else text[:21] + "..." for text in column.samples)
            reason = f"  ({column.reason})" if column.reason else ""
            lines.append(f"  {column.name:<{wide}}  {column.role:<11} {num_ids.get(column.name, 0):>7,}  {samples}{reason}")
        lines.append(
            f"  {split['train_rows']:,} rows to train ({split['train_label_rate']:.1%} of them 1), {split['valid_rows']:,} held out "
            f"({split['valid_label_rate']:.1%}), {sum(num_ids.values()):,} table rows"
        )
        lines.append(f"  {table.split.text}")
        if new := {name: share for name, share in sorted(unseen.items(), key=lambda item: -item[1])[:5] if share >= UNSEEN_TOLD}:
            shares = ", ".join(f"{name} {share:.1%}" for name, share in new.items())
            lines.append(f"  held-out values that no training row has: {shares}")
        for name, (cells, items) in table.left_out.items():
            lines.append(
                f"  {name}: {cells:,} cells hold more items than are looked up, {items:,} items are left out; max_items in schema.toml"
            )
        lines.append(
            "  Other roles: --data.numeric, --data.categorical, --data.bags, --data.text, --data.ignore with column names, or --data.schema-file "
            "with an edited schema.toml of this folder; without a header columns are named 0, 1, ..."
        )
        if table.rejected:
            lines.append(f"  {len(table.rejected)} rows rejected: rejected.jsonl in the prepared folder says which and why")
        return lines


@dataclass(frozen=True)
class Table:
    """A table that was read: its columns lie in the store, as numbers (nan: no value) or codes of the dictionaries (0: no value, or no item).

    items: dictionaries of the bags' items. longest_bag: items of the fullest cell. left_out: by column, cells with too many items and how
    many items.
    """

    label: str
    classes: list[str]
    labels_B: Array
    columns: list[Column]
    dictionaries: dict[str, Dictionary]
    split: RowSplit
    rejected: list[dict[str, Any]]
    items: dict[str, Dictionary]
    longest_bag: int
    left_out: dict[str, tuple[int, int]]

    def values_of(self, name: str) -> pl.Series:
        """Return the texts by code of a column of categories or bags."""
        return (self.items if name in self.items else self.dictionaries)[name].values()

    def lookups(self, encoder: TableEncoder) -> dict[str, Array]:
        """Return by column the ids of its codes."""
        found = mapped(lambda c: c.ids_of_codes(self.values_of(c.name)).astype(np.int32), encoder.vocabularies)
        return dict(zip((c.name for c in encoder.vocabularies), found, strict=True))


def bag_form(column: Column) -> tuple[str | None, int]:
    """Return the separator (None: words) of a column of bags, and how many items of a cell are looked up."""
    separator = None if column.role == "text" else column.options.separator or SEPARATOR
    return separator, column.options.max_items or MAX_ITEMS


class ColumnStore:
    """One file of numbers a column, (B,) or (B, L), written chunk by chunk within `with`, then read in blocks by any number of threads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, tuple[IO[bytes], np.dtype[Any], tuple[int, ...]]] = {}
        self._stack = ExitStack()

    def __enter__(self) -> "ColumnStore":
        self.folder.mkdir()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def append(self, name: str, values_B: Array) -> None:
        if name not in self._files:
            file = self._stack.enter_context((self.folder / str(len(self._files))).open("wb"))
            self._files[name] = (file, values_B.dtype, values_B.shape[1:])
        self._files[name][0].write(np.ascontiguousarray(values_B).data)

    def block(self, name: str, number: int, size: int = BLOCK_ROWS) -> Array:
        """Return rows from `number * size` on, `size` of them at most."""
        file, dtype, shape = self._files[name]
        width = math.prod(shape)
        values = np.fromfile(file.name, dtype, size * width, offset=number * size * width * dtype.itemsize)
        return values.reshape(-1, *shape)

    def with_rows(self, name: str, rows_B: Array) -> Iterator[tuple[Array, Array]]:
        """Yield blocks with their part of `rows_B`."""
        for number, start in enumerate(range(0, len(rows_B), 2**20)):
            yield self.block(name, number, 2**20), rows_B[start : start + 2**20]

    def whole(self, name: str) -> Array:
        file, dtype, shape = self._files[name]
        return np.fromfile(file.name, dtype).reshape(-1, *shape)


def _ids(encoder: TableEncoder, lookups: dict[str, Array], store: ColumnStore, num_rows: int) -> Iterator[Array]:
    def block(number: int) -> Array:
        parts = [column.ids(store.block(column.name, number)) for column in encoder.numeric if column.num_ids]
        parts += [lookups[column.name][store.block(column.name, number)] for column in encoder.categories]
        return side_by_side(parts, np.int32, min(BLOCK_ROWS, num_rows - number * BLOCK_ROWS))

    return mapped(block, range(-(-num_rows // BLOCK_ROWS)))


def _bags(encoder: TableEncoder, lookups: dict[str, Array], store: ColumnStore, num_rows: int, longest: int) -> Iterator[Array]:
    def block(number: int) -> Array:
        return one_width([bag_ids(store.block(c.name, number)[:, :longest], lookups[c.name]) for c in encoder.bags], longest)

    return mapped(block, range(-(-num_rows // BLOCK_ROWS)))


def _dense(encoder: TableEncoder, store: ColumnStore, num_rows: int) -> Iterator[Array]:
    def block(number: int) -> Array:
        raw = {column.name: store.block(column.name, number) for column in encoder.numeric}
        return encoder.dense(raw, min(BLOCK_ROWS, num_rows - number * BLOCK_ROWS))

    return mapped(block, range(-(-num_rows // BLOCK_ROWS)))


def _keys_of(table: Table, store: ColumnStore, encoder: TableEncoder) -> Array:
    """The rows' keys in another table's encoding."""
    before = {c.name: "numeric" for c in encoder.numeric} | {c.name: "categorical" for c in encoder.categories}
    before |= {c.name: form_text(c.separator, c.max_items) for c in encoder.bags}
    now = {c.name: form_text(*bag_form(c)) if c.role in ("bag", "text") else c.role for c in table.columns if c.role != "ignore"}
    for name, form in before.items():
        if name not in now:
            raise UserError(f"data.base: the earlier table has a column {name!r} that is used no more; train a new model")
        if now[name] != form:
            raise UserError(
                f"data.base: column {name!r} was {form} and is {now[name]}; a model cannot be carried over, train a new one"
            )
    lookups = table.lookups(encoder)
    num_rows, start = len(table.labels_B), 0

    def blocks() -> Iterator[tuple[Array, Array, Array, Array | None]]:
        nonlocal start
        bags = _bags(encoder, lookups, store, num_rows, table.longest_bag) if encoder.bags else itertools.repeat(None)
        for ids_BF, dense_BN in zip(_ids(encoder, lookups, store, num_rows), _dense(encoder, store, num_rows), strict=True):
            yield ids_BF, dense_BN, table.labels_B[start : start + len(ids_BF)], next(bags)
            start += len(ids_BF)

    return row_keys(blocks(), encoder)


class _Reading:
    """Reads the files of a source into a store."""

    def __init__(self, source: TableSource, store: ColumnStore, progress: Progress) -> None:
        self.source, self.data, self.store, self.progress = source, source.data, store, progress
        self.rejected: list[dict[str, Any]] = []
        self.columns: list[Column] = []
        self.label = ""
        self.names: list[str] = []
        self.dictionaries: dict[str, Dictionary] = {}
        self.numeric: list[str] = []
        self.bags: dict[str, tuple[str | None, int]] = {}
        self.items: dict[str, Dictionary] = {}
        self.longest_bag = 1
        self.left_out: dict[str, tuple[int, int]] = {}
        self.numbers: set[str] = set()  # numeric columns whose texts are not needed besides
        self.num_rows = 0
        self.num_read: int | None = None

    def run(self) -> None:
        """Read all files. Raises UserError when they cannot be read, do not fit together, or have too few rows."""
        first: Rows | None = None
        total = sum(file.stat().st_size for file in self.source.files)
        before = 0
        for file in self.source.files:
            if self.num_read is None and file in self.source.held_files:
                self.num_read = self.num_rows
            for rows in ahead(read_chunks(file, self.data, self.numbers)):
                self.progress("read rows", min(total, before + rows.bytes_read), total)
                if first is None:
                    first = rows
                    self._start(rows)
                self._add(rows)
            before += file.stat().st_size
        assert first is not None
        check_rejected(str(self.data.path), self.rejected, self.num_rows + len(self.rejected), self.data.max_rejected)
        check_enough(str(self.data.path), first, self.num_rows)

    def table(self) -> Table:
        """Return what was read, once the store is written. Raises UserError when labels are not two-valued or a part is empty."""
        labels_B, classes = self._labels()
        split = self._split(self.num_rows if self.num_read is None else self.num_read)
        return Table(
            self.label,
            classes,
            labels_B,
            self.columns,
            self.dictionaries,
            split,
            self.rejected,
            self.items,
            self.longest_bag,
            self.left_out,
        )

    def _start(self, rows: Rows) -> None:
        self.names = rows.names
        self.label = self._find(rows, self.data.label or self.source.schema.label or "", "data.label")
        self.columns = self._roles(rows)
        self.numeric = [column.name for column in self.columns if column.role == "numeric"]
        coded = [self.label, *(column.name for column in self.columns if column.role == "categorical")]
        self.split_column = self._find(rows, self.data.split_column, "data.split_column") if self.data.split_column else None
        if self.split_column and self.split_column not in coded:
            coded.append(self.split_column)
        self.dictionaries = {name: Dictionary() for name in coded}
        self.bags = {column.name: bag_form(column) for column in self.columns if column.role in ("bag", "text")}
        self.items = {name: Dictionary() for name in self.bags}
        self.numbers.update(name for name in self.numeric if name not in coded)

    def _add(self, rows: Rows) -> None:
        if rows.names != self.names:
            missing = [name for name in self.names if name not in rows.names] or [n for n in rows.names if n not in self.names]
            if missing:
                raise UserError(
                    f"data.path={self.data.path}: {rows.file} has other columns than {self.source.files[0]}, {missing[0]!r} for one; "
                    "give files with the same columns"
                )
        place = {name: str(rows.names.index(name)) for name in self.names}
        frame = rows.values
        numbers = frame.select(pl.col(place[name]).cast(pl.Float64, strict=False) for name in self.numeric)
        wrong_B, rejected = np.zeros(len(frame), bool), list(rows.rejected)
        unlabelled = frame[place[self.label]].is_null()
        if unlabelled.any():
            wrong_B |= unlabelled.to_numpy()
            rejected += [self._rejected(rows, int(i), "no label") for i in np.flatnonzero(wrong_B)]
        for name in self.numeric:
            values, found = frame[place[name]], numbers[place[name]]
            if values.dtype == pl.Float64 or int(found.is_finite().sum()) == len(values) - values.null_count():
                continue
            odd_B = (values.is_not_null() & ~found.is_finite().fill_null(False)).to_numpy() & ~wrong_B
            hint = "mend it, list it in data.missing, or name the column in data.categorical"
            rejected += [
                self._rejected(rows, int(i), f"data.numeric: column {name!r} holds {values[int(i)]!r}, no number; {hint}")
                for i in np.flatnonzero(odd_B)
            ]
            wrong_B |= odd_B
        if rejected:
            self.rejected += sorted(rejected, key=lambda row: row["line"])
            keep = pl.Series(~wrong_B)
            frame, numbers = frame.filter(keep), numbers.filter(keep) if self.numeric else numbers
        for name in self.numeric:
            self.store.append(f"{name}", numbers[place[name]].fill_null(float("nan")).to_numpy())
        codes = frame.select(dictionary.expression(place[name]) for name, dictionary in self.dictionaries.items())
        for name, dictionary in self.dictionaries.items():
            self.store.append(self._key(name), dictionary.met(codes[place[name]]))
        for name, (separator, max_items) in self.bags.items():
            cells = take_apart(frame[place[name]], separator, max_items)
            self.store.append(name, padded(self.items[name].codes(cells.items_N), cells.lengths_B, max_items))
            self.longest_bag = max(self.longest_bag, int(cells.lengths_B.max(initial=0)))
            if cells.cut:
                before = self.left_out.get(name, (0, 0))
                self.left_out[name] = (before[0] + cells.cut, before[1] + cells.left_out)
        self.num_rows += len(frame)
        seen = self.num_rows + len(self.rejected)
        if len(self.rejected) > 10_000 and len(self.rejected) > 10 * self.data.max_rejected * seen:  # hopeless
            check_rejected(str(self.data.path), self.rejected, seen, self.data.max_rejected)

    def _key(self, name: str) -> str:
        """Return where the codes of a column's whole cells lie; the column may be read as numbers or items besides, for data.split_column."""
        return f"{name}\0codes" if name in self.numeric or name in self.bags else name

    def _rejected(self, rows: Rows, row: int, reason: str) -> dict[str, Any]:
        return {"file": str(rows.file), "line": int(rows.lines[row]), "reason": reason}

    def _find(self, rows: Rows, name: str, place: str) -> str:
        """Return the column of a name or a position."""
        columns = rows.names
        if name in columns:
            return name
        if name.isascii() and name.isdigit() and int(name) < len(columns):
            return columns[int(name)]
        listed = ", ".join(columns)
        if not name:
            raise UserError(f"{place} is not set; name the column with the answer, one of: {listed}")
        close = difflib.get_close_matches(name, columns, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        if not rows.header:
            hint += "its first line was read as values (data.header=yes reads it as names), so "
        raise UserError(f"{place}={name!r}: {rows.file} has no such column; {hint}columns: {listed}")

    def _roles(self, rows: Rows) -> list[Column]:
        given: dict[str, Role] = {}
        flags: tuple[tuple[str, Role, tuple[str, ...]], ...] = (
            ("data.numeric", "numeric", self.data.numeric),
            ("data.categorical", "categorical", self.data.categorical),
            ("data.bags", "bag", self.data.bags),
            ("data.text", "text", self.data.text),
            ("data.ignore", "ignore", self.data.ignore),
        )
        for flag, role, names in flags:
            for name in names:
                found = self._find(rows, name, flag)
                if found in given or found == self.label:
                    other = "label" if found == self.label else given[found]
                    raise UserError(f"{flag}={name!r}: this column is already named as {other}; name it once")
                given[found] = role
        options = {self._find(rows, name, "data.schema_file: columns"): o for name, o in self.source.schema.columns.items()}
        columns = []
        sample = rows.values.head(ROLE_ROWS)
        for place, name in enumerate(rows.names):
            if name == self.label:
                continue
            present, own = sample.to_series(place).drop_nulls(), options.get(name, ColumnOptions())
            told = given.get(name) or own.role
            if told is not None:
                role, reason = told, "as given"
            elif not len(present) and len(rows) > len(sample):
                role, reason = "categorical", f"no values in the first {len(sample):,} rows"
            else:
                role, reason = inferred_role(name, present, len(sample))
            samples = tuple(present.unique(maintain_order=True)[:3].to_list())
            columns.append(Column(name, role, reason, samples, own.model_copy(update={"role": role})))
        return columns

    def _labels(self) -> tuple[Array, list[str]]:
        """Return labels (B,) of 0 and 1, and the two values: numbers by size, else by text, the positive one last."""
        values = self.dictionaries[self.label].values().to_list()
        found = sorted(values, key=lambda v: (is_number(v), float(v) if is_number(v) else 0.0, v))
        if len(found) != 2:
            shown = ", ".join(repr(v) for v in found[:6]) + (", ..." if len(found) > 6 else "")
            raise UserError(
                f"data.label={self.data.label}: needs two different values, column {self.label!r} has {len(found)}: {shown} "
                f"({self.data.path}); name another column, or make the label two-valued"
            )
        if found[0].lower() in POSITIVE:
            found.reverse()
        is_one = np.array([False, *(value == found[1] for value in values)])
        return is_one[self.store.whole(self.label)].astype(np.float32), found

    def _split(self, num_read: int) -> RowSplit:
        codes_B, values = None, None
        if self.split_column:
            codes_B, values = self.store.whole(self._key(self.split_column)), self.dictionaries[self.split_column].values()
        return split_rows(self.data, self.source.seed, self.num_rows, num_read, codes_B, values)


def open_source(data: DataConfig, seed: int) -> TableSource:
    """Find the files. Raises UserError for a missing path or an empty file."""
    if data.path is None:
        raise UserError(
            "data.path is not set; recipe ctr needs a CSV, TSV or Parquet file: --data.path clicks.csv --data.label clicked"
        )
    files = find_files(data.path, "data.path")
    held = find_files(data.valid_path, "data.valid_path") if data.valid_path else ()
    if both := {file.resolve() for file in files} & {file.resolve() for file in held}:
        raise UserError(
            f"data.valid_path={data.valid_path}: {min(both)} is among the files of data.path, too; rows cannot be in both parts"
        )
    return TableSource(data, seed, files, held)


def find_files(path: str, place: str) -> tuple[Path, ...]:
    """Return the files of a file, a folder (with what is below it) or a pattern such as `logs/day-*.csv.gz`, sorted by name.

    Raises UserError when there are none, and for an empty file.
    """
    root = Path(path).expanduser()
    if root.is_file():
        files = [root]
    elif root.is_dir():
        files = [
            file
            for file in root.rglob("*")
            if file.name.lower().endswith(SUFFIXES) and file.is_file() and file.name[0] not in "._"
        ]
        if not files:
            raise UserError(
                f"{place}={path}: is a folder without files of rows ({', '.join(SUFFIXES)}); name a file, or one that has some"
            )
    else:
        anchor = Path(root.anchor) if root.anchor else Path()
        pattern = str(root.relative_to(anchor))
        files = [file for file in anchor.glob(pattern) if file.is_file()] if any(sign in pattern for sign in "*?[") else []
        if not files:
            raise UserError(f"{place}={path}: there is no such file")
    for file in files:
        if not file.stat().st_size:
            raise UserError(f"{place}={file}: is empty; give a file with rows")
    return tuple(sorted(files))
