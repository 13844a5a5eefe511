"""Turns the cells of a table into the arrays that a model takes, for preparing, predicting and retraining.

Letters: B rows, F columns with one id per row, L ids of a bag, N dense columns.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from dphybrid.config.tables import TableDataConfig
from dphybrid.data.batches import Array
from dphybrid.data.foreign import misread, writing
from dphybrid.data.store import ENCODER_VERSION, Prepared, verify_prepared
from dphybrid.data.table.cells import FIRST_ID, MISSING_ID, one_width, standardized
from dphybrid.data.table.column import Column
from dphybrid.data.table.kinds import Bag, Category, Numbers, ids_of_columns, kind_of
from dphybrid.data.table.labels import Label
from dphybrid.data.table.rows import Cells
from dphybrid.util.errors import UserError
from dphybrid.util.files import read_json, write_text


@dataclass(frozen=True)
class Encoder:
    """Columns fitted to the training rows, the label, and how its cells are read. Saved in each checkpoint.

    In the arrays, columns of numbers come first (`dense_BN`, and their buckets in `ids_BF`), then categories
    (`ids_BF`), then bags (`bags_BFL`)."""

    columns: tuple[Column, ...]
    label: Label
    answer: Column

    @cached_property
    def numbers(self) -> list[Numbers]:
        """The columns of numbers and times."""
        return [column for column in self.columns if isinstance(column, Numbers)]

    @cached_property
    def categories(self) -> list[Category]:
        """The columns with one text per row."""
        return [c for c in self.columns if isinstance(c, Category) and not isinstance(c, Bag)]

    @cached_property
    def bags(self) -> list[Bag]:
        """The columns with several texts per row."""
        return [column for column in self.columns if isinstance(column, Bag)]

    @cached_property
    def names(self) -> list[str]:
        """The names of the columns that are read, in the order of the arrays."""
        return [column.name for column in (*self.numbers, *self.categories, *self.bags)]

    @cached_property
    def id_columns(self) -> list[dict[str, Any]]:
        """Name, role and number of ids of each column of ids_BF, then of the bags."""
        tables = [table for c in (*self.numbers, *self.categories, *self.bags) for table in c.tables]
        return [{"name": name, "role": role, "num_ids": num_ids} for name, role, num_ids in tables]

    @property
    def dense(self) -> list[tuple[str, bool]]:
        """For each column of dense_BN the table's column, and whether it is 1 where the number before it is
        missing, else 0."""
        parts = ((column.name, part) for column in self.numbers for part in column.parts)
        return [(name, flag) for name, p in parts for flag in (False, True)[: 1 + p.learned.indicator]]

    @property
    def max_items(self) -> int:
        """The largest `max_items` of the bags."""
        return max((bag.max_items for bag in self.bags), default=1)

    @property
    def classes(self) -> tuple[str, ...]:
        """The label's classes, the positive one of two last; empty for numbers."""
        return self.label.classes

    def encode(self, cells: Mapping[str, pl.Series]) -> tuple[dict[str, Array], int]:
        """Return the arrays of rows, and the number of cells of numbers and times that could not be read and
        count as missing. cells: those of each of `names`, stripped; None for no value."""
        cells = cells.of(self.names) if isinstance(cells, Cells) else cells
        values = {c.name: c.values(cells[c.name]) for c in self.columns}
        odd = (values[c.name].null_count() - cells[c.name].null_count() for c in self.numbers)
        return self.arrays(values), sum(odd)

    def doubts(self, cells: Mapping[str, pl.Series] | pl.DataFrame) -> list[str]:
        """Return what is to say of columns whose cells may mean something else than in training."""
        given = cells.given if isinstance(cells, Cells) else cells  # cleaning is not needed here
        return [said for column in self.columns if (said := column.doubt(given[column.name]))]

    def answers(self, cells: pl.Series) -> Array:
        """Return the label's numbers, or the numbers of its classes (B,), of stripped cells that have a
        value. Raises UserError that names a cell that is neither."""
        values = self.answer.values(cells)
        numbers, wanted = values, "a number"
        if self.classes:
            places = pl.Series(range(len(self.classes)), dtype=pl.Float64)
            numbers = values.replace_strict(pl.Series(self.classes), places, default=None)
            wanted = f"one of the model's classes, {', '.join(map(repr, self.classes[:6]))}"
        if numbers.null_count():
            odd = cells.filter(numbers.is_null())[0]
            raise UserError(
                f"label {self.label.name!r}: {odd!r} is not {wanted}; correct it, or remove its rows"
            )
        return numbers.to_numpy()

    def arrays(
        self,
        values: Mapping[str, pl.Series],
        by_code: Mapping[str, Array] | None = None,
        longest: int = 1,
    ) -> dict[str, Array]:
        """Return the arrays of rows, given the values that the columns read.

        by_code: result of `ids_by_code`, if texts are stored as codes. longest: least width of the bags'
        array.
        """
        coded = (*self.categories, *self.bags)
        if by_code is not None:
            found = [c.ids_of_codes(values[c.name], by_code[c.name]) for c in coded]
        else:
            found = ids_of_columns(coded, [values[c.name] for c in coded])
        ids_of = {c.name: ids_B for c, ids_B in zip(coded, found, strict=True)}
        dense, ids = list[Array](), list[Array]()
        for column in self.numbers:
            for part, numbers_B in zip(column.parts, column.numbers(values[column.name]), strict=True):
                # "No value" needs a separate input, as it is standardized to 0, like the mean.
                scale = part.learned
                dense.append(standardized(numbers_B, scale.log, scale.mean, scale.std))
                dense += [np.isnan(numbers_B)] if scale.indicator else []
                ids += [scale.ids(numbers_B)] if scale.num_ids else []
        ids += [ids_of[column.name] for column in self.categories]
        num_rows = len(next(iter(values.values())))
        arrays = {
            "ids_BF": _side_by_side(ids, num_rows, np.int32),
            "dense_BN": _side_by_side(dense, num_rows, np.float32),
        }
        if self.bags:
            arrays["bags_BFL"] = one_width([ids_of[bag.name] for bag in self.bags], longest)
        return arrays

    def ids_by_code(self, texts: Mapping[str, pl.Series]) -> dict[str, Array]:
        """Return, for each column of texts, the id of each code. texts: the texts of its dictionary, by
        column."""
        columns = (*self.categories, *self.bags)
        # A dictionary's code 0 means no value; its texts are numbered from 1 on.
        return {c.name: np.insert(c.ids_of(texts[c.name]), 0, MISSING_ID) for c in columns}

    def written(self, data: TableDataConfig) -> "Encoder":
        """Return the encoder for files in the notation that `data` sets, such as another decimal mark."""
        columns = tuple(column.written(data) for column in self.columns)
        return replace(self, columns=columns, answer=self.answer.written(data))

    def extended(self, newer: "Encoder") -> "Encoder":
        """Return the encoder with the values that only `newer` has added; old ids keep their meaning. Raises
        UserError if the label is not the same; call `check_forms` before, which compares the columns."""
        for what, before, now in (
            ("labels", self.label.task, newer.label.task),
            ("classes", list(self.classes), list(newer.classes)),
        ):
            if before != now:
                raise UserError(
                    f"data.base: {what} were {before} and are now {now}; the earlier model cannot be "
                    "retrained, train a new one"
                )
        by_name = {column.name: column for column in newer.columns}
        return replace(self, columns=tuple(c.extended(by_name[c.name]) for c in self.columns))

    def check_forms(self, columns: Sequence[Column]) -> None:
        """Raise UserError if the columns of newer data cannot be encoded like the columns of this encoder."""
        before, now = ({c.name: c.form for c in each} for each in (self.columns, columns))
        for name in before:
            if name not in now:
                raise UserError(
                    f"data.base: column {name!r} of the earlier table is no longer used; use it, or train a "
                    "new model"
                )
            if now[name] != before[name]:
                raise UserError(
                    f"data.base: column {name!r} was {before[name]} and is now {now[name]}; the earlier "
                    "model cannot be retrained, train a new one"
                )
        if more := [name for name in now if name not in before]:
            raise UserError(
                f"data.base: the earlier table has no column {more[0]!r}; name it in data.ignore, or train a "
                "new model"
            )

    def covers(self, other: "Encoder") -> bool:
        """Return whether this encoder tells apart all that `other` does: it reads the same columns, scales
        numbers and labels equally, and knows every value that `other` knows."""
        mine, theirs = ([(c.name, c.form) for c in each.columns] for each in (self, other))
        if mine != theirs or self.label != other.label:
            return False
        for column, earlier in zip(self.columns, other.columns, strict=True):
            if not column.covers(earlier):
                return False
        return True

    def save(self, folder: Path) -> None:
        """Write `encoder.json` and `vocabularies.parquet` into `folder`."""
        folder.mkdir(exist_ok=True)
        *columns, answer = (
            {"role": c.role, **c.model_dump(mode="json")} for c in (*self.columns, self.answer)
        )
        page = {"version": ENCODER_VERSION, "columns": columns, "answer": answer, **self.label.facts()}
        write_text(folder / "encoder.json", json.dumps(page, indent=1, ensure_ascii=False))
        # Not in the JSON: with millions of values, reading it would take seconds before each prediction.
        texts = [c.vocabulary.implode() for c in self.columns if c.vocabulary is not None]
        values = pl.concat([pl.Series([], dtype=pl.List(pl.String)), *texts])
        with writing(file := folder / "vocabularies.parquet"):
            pl.DataFrame({"values": values}).write_parquet(file)

    @classmethod
    def load(cls, folder: Path) -> "Encoder":
        """Read an encoder from the folder that `save` wrote. Raises UserError if another version wrote it,
        and for files of another form."""
        page = read_json(folder / "encoder.json")
        if not isinstance(page, dict) or page.get("version") != ENCODER_VERSION:
            raise UserError(
                f"{folder}: was written by another version of dphybrid; prepare the data and train again"
            )
        with misread(folder):
            # Saved in the order of the columns that have one.
            vocabularies = iter(pl.read_parquet(folder / "vocabularies.parquet", glob=False)["values"])
            columns = [kind_of(each.pop("role")).restored(each, vocabularies) for each in page["columns"]]
            answer = kind_of(page["answer"].pop("role"))(**page["answer"])
            return cls(tuple(columns), Label.of(page), answer)


def _side_by_side(columns: Sequence[Array], num_rows: int, dtype: type[np.generic]) -> Array:
    """Return columns (B,) as one array (B, F)."""
    # Blocks of rows that fit into a core's cache: `np.stack` takes far longer.
    out_BF: Array = np.empty((num_rows, len(columns)), dtype)
    for start in range(0, num_rows, 2**13):
        rows = slice(start, start + 2**13)
        for position, column_B in enumerate(columns):
            out_BF[rows, position] = column_B[rows]
    return out_BF


@dataclass(frozen=True)
class Base:
    """Earlier prepared data, which is extended by new rows, and its encoder."""

    prepared: Prepared
    encoder: Encoder


def open_base(path: Path) -> Base:
    """Open the prepared data to extend. Raises UserError if it does not exist, is damaged or is not a
    table."""
    if not (path / "encoder").is_dir():
        raise UserError(
            f"data.base={path}: is not a prepared table (it has no encoder); name the prepared folder "
            "of a run that read one"
        )
    return Base(verify_prepared(path), Encoder.load(path / "encoder"))


def old_ids(base: Encoder, now: Encoder) -> list[Array]:
    """Return, for each id column, an array that maps new ids to the base's id of the same value; new values
    map to the base's unknown id or hash bucket."""
    numbers = zip(base.numbers, now.numbers, strict=True)
    found = [ids for old, new in numbers for ids in old.ids_of_newer(new)]
    for old, new in zip((*base.categories, *base.bags), (*now.categories, *now.bags), strict=True):
        # The number of hash buckets is part of `form`, so that it is the same in both.
        hashed = FIRST_ID + len(old.learned) + np.arange(old.hash_buckets)
        found.append(np.concatenate([[0, 1], old.ids_of(new.learned), hashed]))
    return found


def old_rows(base: Encoder, now: Encoder) -> Array:
    """Return (V,) the row of the base's table from which each row of the new table starts. Both tables hold
    the rows of all columns, one column after another."""
    starts = np.cumsum([0, *(column["num_ids"] for column in base.id_columns[:-1])])
    return np.concatenate([start + ids for start, ids in zip(starts, old_ids(base, now), strict=True)])
