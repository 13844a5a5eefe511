"""Tables: CSV, TSV or Parquet files with a label, categorical and numeric columns.

Read once, chunk by chunk, into one file a column (numbers, or codes of a dictionary); then split, fitted on
the training part, and encoded. Memory holds a chunk, the vocabularies and a few numbers a row, however large
the input is. Letters: B rows, F id columns, N dense columns.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dphybrid.config.tables import TableDataConfig
from dphybrid.data.ahead import mapped
from dphybrid.data.batches import Array
from dphybrid.data.store import INFERRED, Content, Progress, Streamed, source_digests
from dphybrid.data.table.arrays import bags_blocks, dense_blocks, ids_blocks, keys_of
from dphybrid.data.table.bags import BagColumn
from dphybrid.data.table.categories import CategoryColumn, fit_categories
from dphybrid.data.table.chunks import read_jobs
from dphybrid.data.table.columns import ColumnStore
from dphybrid.data.table.description import description
from dphybrid.data.table.encode import FIT_ROWS, NumericColumn, TableEncoder, fit_numeric
from dphybrid.data.table.extend import Base, extended, extended_split, open_base
from dphybrid.data.table.files import find_files
from dphybrid.data.table.reading import Reading, Table
from dphybrid.data.table.roles import Column, bag_form
from dphybrid.data.table.rows import Rows, Wanted
from dphybrid.data.table.schema import INFERRED_TIME, SchemaFile, read_schema, schema_text
from dphybrid.data.table.times import part_names
from dphybrid.util.errors import UserError
from dphybrid.util.files import given_path

LIMITS = ("max_columns", "max_line_mib", "max_expansion")
"""Values that refuse files and change nothing else."""


@dataclass(frozen=True)
class TableSource:
    """Files of rows. held: files whose rows are the held-out ones."""

    data: TableDataConfig
    seed: int
    read_files: tuple[Path, ...]
    held_files: tuple[Path, ...] = ()

    @cached_property
    def schema(self) -> SchemaFile:
        if self.data.schema_file:
            return read_schema(given_path(self.data.schema_file, "data.schema_file"))
        return read_schema(self.base.prepared.path / "schema.toml") if self.base else SchemaFile()

    @cached_property
    def base(self) -> Base | None:
        return open_base(Path(self.data.base)) if self.data.base else None

    @cached_property
    def inferred_times(self) -> list[str]:
        """Columns of dates or times that nobody named: the first rows tell them."""
        return [column.name for column in self.looked if column.reason == INFERRED_TIME]

    @cached_property
    def looked(self) -> list[Column]:
        """The columns as the first rows tell them: for the digest, and for the reading."""
        return self._reading(ColumnStore(Path()), lambda *_: None).look()

    @cached_property
    def first(self) -> Rows:
        """The rows that are looked at."""
        return next(read_jobs(self.files[0], self.data, Wanted()))()

    def _reading(
        self, store: ColumnStore, progress: Progress, columns: list[Column] | None = None
    ) -> Reading:
        data = self.data
        if self.base and data.task == "auto":
            data = data.model_copy(update={"task": self.base.encoder.answer.task})
        files, held = self.files, self.held_files
        return Reading(data, self.schema, self.seed, files, held, store, progress, self.first, columns)

    @property
    def options(self) -> dict[str, Any]:
        values = self.data.model_dump(
            mode="json", exclude={"path", "valid_path", "schema_file", "base", *LIMITS}
        )
        partitions = [[part for part in file.parent.parts if "=" in part] for file in self.files]
        values["missing"] = self.data.no_value
        values |= {"schema": self.schema.model_dump(mode="json")}
        # These came later: what has none of them keeps its digest.
        for name, absent in (
            ("task", "auto"),
            ("weight", None),
            ("bags", []),
            ("text", []),
            ("times", []),
            ("dayfirst", False),
            ("decimal", "."),
            ("thousands", ""),
        ):
            if values[name] == absent:
                del values[name]
        for column in values["schema"]["columns"].values():
            for name in ("separator", "max_items"):
                if column[name] is None:
                    del column[name]
        return values | {
            "partitions": partitions if any(partitions) else [],
            "held_files": len(self.held_files),
            **({"base": self.base.prepared.digest} if self.base else {}),
            **({INFERRED: self.inferred_times} if self.inferred_times else {}),
            "formats": sorted(
                {
                    "".join(file.suffixes[-2:]).lower()
                    for file in self.files
                    if file.suffix.lower() in (".gz", ".parquet", ".pq")
                }
            ),
        }

    @property
    def files(self) -> tuple[Path, ...]:
        return self.read_files + self.held_files

    def digests(self, progress: Progress) -> list[bytes]:
        return source_digests(self.files, progress)

    def read(self, progress: Progress, scratch: Path) -> Content:
        with ColumnStore(scratch / "columns") as store:
            reading = self._reading(store, progress, self.looked)
            reading.run()
        table = reading.table()
        parts: dict[str, Array] = {}
        if self.base:
            answer = self.base.encoder.answer
            keys = keys_of(table, store, self.base.encoder, answer.encoded(table.answers_B))
            held, parts["new_rows"] = extended_split(table.split, self.base, keys)
            table = replace(table, split=held)
        else:
            trained_B = ~table.split.held_B
            weights_B = None if table.weights_B is None else table.weights_B[trained_B]
            answer = table.answer.fitted(table.answers_B[trained_B], weights_B)
            table = replace(table, answer=answer)
        labels_B = answer.encoded(table.answers_B)
        parts |= {
            "train_rows": np.flatnonzero(~table.split.held_B),
            "valid_rows": np.flatnonzero(table.split.held_B),
        }
        encoder, unseen = self._fit(table, store, progress)
        split: dict[str, Any] = {part: len(rows) for part, rows in parts.items()}
        if answer.task == "binary":
            split |= {
                f"{part}_label_rate": float(labels_B[parts[f"{part}_rows"]].mean())
                for part in ("train", "valid")
            }
        num_rows, id_columns = len(labels_B), encoder.id_columns
        if not id_columns:
            raise UserError(
                f"data.path={self.data.path}: no column is left to look up; ignore fewer columns or set "
                "data.buckets above 0"
            )
        lookups = table.lookups(encoder)
        arrays: dict[str, Array | Streamed] = {
            "ids_BF": Streamed(
                (num_rows, len(id_columns) - len(encoder.bags)),
                np.dtype(np.int32),
                lambda: ids_blocks(encoder, lookups, store),
            ),
            "dense_BN": Streamed(
                (num_rows, encoder.num_dense),
                np.dtype(np.float32),
                lambda: dense_blocks(encoder, store),
            ),
            "labels_B": labels_B,
            **({} if table.weights_B is None else {"weights_B": table.weights_B}),
        }
        info: dict[str, Any] = {
            "columns": id_columns,
            "num_ids": [column["num_ids"] for column in id_columns],
            "num_dense": encoder.num_dense,
            "inputs": encoder.names,
            **answer.facts(),
        }
        if encoder.bags:
            shape = (num_rows, len(encoder.bags), table.longest_bag)
            arrays["bags_BFL"] = Streamed(
                shape, np.dtype(np.int32), lambda: bags_blocks(encoder, lookups, store, table.longest_bag)
            )
            info["num_bags"] = len(encoder.bags)
        extra = {
            "label": table.label,
            "classes": list(encoder.classes),
            "base": str(self.base.prepared.path) if self.base else None,
            "split": split | {"most_unseen": max(unseen.values(), default=0.0)},
            "unseen": unseen,
            "columns": [
                {k: v for k, v in column.__dict__.items() if k != "options"} for column in table.columns
            ],
            **(
                {"left_out_items": {name: list(counts) for name, counts in table.left_out.items()}}
                if table.left_out
                else {}
            ),
            **({"unlabelled_rows": table.unlabelled} if table.unlabelled else {}),
            **({"weight": self.data.weight} if self.data.weight else {}),
            **({"weightless_rows": table.weightless} if table.weightless else {}),
        }
        text = description(self.data, table, encoder, split, unseen)

        def save(folder: Path) -> None:
            encoder.save(folder / "encoder")
            made = {part for c in table.columns if c.role == "time" for part in part_names(c.name)}
            schema = schema_text(
                table.label, [(c.name, c.options) for c in table.columns if c.name not in made]
            )
            (folder / "schema.toml").write_text(schema, encoding="utf-8")

        return Content("arrays", arrays | parts, info, text, tuple(arrays), extra, table.rejected, save)

    def _fit(
        self, table: Table, store: ColumnStore, progress: Progress
    ) -> tuple[TableEncoder, dict[str, float]]:
        """Learn from the training rows; also return the share of validation values, a category column, that
        no training row has."""
        held_B = table.split.held_B
        trained = np.flatnonzero(~held_B)
        sample_B = np.zeros(len(held_B), bool)
        sample_B[trained[:: -(-len(trained) // FIT_ROWS)]] = True
        unseen: dict[str, float] = {}

        def fit(column: Column) -> NumericColumn | CategoryColumn:
            o = column.options
            if column.role == "numeric":
                raw_B = np.concatenate(
                    [block[rows_B] for block, rows_B in store.with_rows(column.name, sample_B)]
                )
                return fit_numeric(
                    column.name, raw_B, self.data.buckets if o.buckets is None else o.buckets, o.scale
                )
            values = table.values_of(column.name)
            counts = np.zeros((len(values) + 1, 2), np.int64)
            for codes_B, rows_B in store.with_rows(column.name, held_B):  # (B, L) of bags
                for place, rows in enumerate((~rows_B, rows_B)):
                    counts[:, place] += np.bincount(codes_B[rows].ravel(), minlength=len(values) + 1)
            train, held = counts[1:].T
            unseen[column.name] = float(held[train == 0].sum() / max(held.sum(), 1))
            least = self.data.min_count if o.min_count is None else o.min_count
            found = fit_categories(column.name, values, train, least, o.top, o.hash_buckets)
            if column.role == "categorical":
                return found
            return BagColumn(found.name, found.vocabulary, found.hash_buckets, *bag_form(column))

        used = [column for column in table.columns if column.role not in ("ignore", "time")]
        fitted: list[NumericColumn | CategoryColumn] = []
        for column in mapped(fit, used):
            fitted.append(column)
            progress("encode columns", len(fitted), len(used))
        encoder = TableEncoder(
            tuple(column for column in fitted if isinstance(column, NumericColumn)),
            tuple(
                column
                for column in fitted
                if isinstance(column, CategoryColumn) and not isinstance(column, BagColumn)
            ),
            table.label,
            table.answer,
            tuple(column for column in fitted if isinstance(column, BagColumn)),
            tuple(column.name for column in table.columns if column.role == "time"),
            self.data.dayfirst,
        )
        if self.base:
            encoder = extended(self.base.encoder, encoder)
        return encoder, {column.name: unseen[column.name] for column in encoder.vocabularies}


def open_source(data: TableDataConfig, seed: int) -> TableSource:
    """Find the files. Raises UserError for a missing path or an empty file."""
    if data.path is None:
        raise UserError(
            "data.path is not set; recipe ctr needs a CSV, TSV or Parquet file: --data.path clicks.csv "
            "--data.label clicked"
        )
    files = find_files(data.path, "data.path")
    held = find_files(data.valid_path, "data.valid_path") if data.valid_path else ()
    if both := {file.resolve() for file in files} & {file.resolve() for file in held}:
        raise UserError(
            f"data.valid_path={data.valid_path}: {min(both)} is among the files of data.path, too; rows "
            "cannot be in both parts"
        )
    return TableSource(data, seed, files, held)
