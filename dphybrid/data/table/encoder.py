"""Turns the cells of a table into the arrays that a model takes, for preparing, predicting and retraining.

Letters: B rows, F columns with one id per row, L ids of a bag, N dense columns.
"""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from dphybrid.data.batches import Array
from dphybrid.data.foreign import misread, writing
from dphybrid.data.store import ENCODER_VERSION, Prepared, verify_prepared
from dphybrid.data.table.kinds import Column, Encoded, encoded
from dphybrid.data.table.labels import Label
from dphybrid.data.table.values import FIRST_ID, MISSING_ID, PADDING_ID, UNKNOWN_ID
from dphybrid.util.errors import UserError, counted
from dphybrid.util.files import read_json, write_text

_LEAST_CELLS = 20
"""Fewest cells of a column whose share of unknown values says something."""
_SAID = 0.5
"""Share of unknown values that is always said."""
_TIMES = 10
"""It is also said if it is so many times the share in the validation rows."""


@dataclass
class Unknown:
    """How many cells with a value were encoded, and how many of these are unknown to training or no values of
    their column's type, by column."""

    counts: dict[str, tuple[int, int]] = field(default_factory=dict)

    def add(self, column: Column, found: Encoded) -> None:
        """Count further cells of a column."""
        before, now = self.counts.get(column.name, (0, 0)), column.unknown(found)
        self.counts[column.name] = before[0] + now[0], before[1] + now[1]

    def lines(self, columns: Sequence[Column]) -> list[str]:
        """Return warnings about numbers and times that cannot be read, and columns with many more
        unknown values than the validation rows had."""
        found = []
        for column in columns:
            cells, unknown = self.counts.get(column.name, (0, 0))
            if not unknown:
                continue
            if not column.has_ids:
                noun = "dates or times" if column.role == "time" else "numbers"
                what = f"{unknown:,} of {counted(cells, 'value')} cannot be read as {noun} and became missing"
                found.append(f"Column {column.name!r}: {what}")
            elif cells >= _LEAST_CELLS and unknown / cells >= min(_SAID, max(0.01, _TIMES * column.unseen)):
                what = f"{unknown:,} of {counted(cells, 'value')} are unknown to the model"
                before = f"of the validation rows, {column.unseen:.1%} were"
                found.append(f"Column {column.name!r}: {what}; {before}. Write values as in training")
        return found


@dataclass(frozen=True)
class Encoder:
    """Columns fitted to the training rows, in the order of the arrays (`Column.order`), and the label. Saved
    in each checkpoint.

    Numbers are in `dense_BN`, ids in `ids_BF`, and ids of bags in `bags_BFL`."""

    columns: tuple[Column, ...]
    label: Label

    @cached_property
    def bags(self) -> list[Column]:
        """The columns with several values per row."""
        return [column for column in self.columns if column.role == "bag"]

    @cached_property
    def names(self) -> list[str]:
        """The names of the columns that are read, in the order of the arrays."""
        return [column.name for column in self.columns]

    @cached_property
    def id_columns(self) -> list[dict[str, Any]]:
        """Name, role and number of ids of each column of ids_BF, then of the bags. A table of numbers alone
        has one column of ids, which are all 0."""
        found = [{"name": c.name, "role": c.role, "num_ids": c.num_ids} for c in self.columns if c.num_ids]
        return found or [{"name": "", "role": "constant", "num_ids": FIRST_ID}]

    @property
    def dense(self) -> list[tuple[str, bool]]:
        """For each column of dense_BN the table's column, and whether it is 1 where the number before it is
        missing, else 0."""
        scales = ((column.name, scale) for column in self.columns for scale in column.scales)
        return [(name, flag) for name, scale in scales for flag in (False, True)[: 1 + scale.indicator]]

    def encode(
        self,
        frame: pl.DataFrame,
        no_value: Collection[str] | None = None,
        unknown: Unknown | None = None,
    ) -> dict[str, Array]:
        """Return the arrays of the rows of a frame of any container.

        no_value: texts that mean no value; None for rows of files, see `values.with_gaps`. unknown: gets the
        counts of unknown values.
        """
        inputs = list[list[Array]]()
        cells = [frame.get_column(name).alias("") for name in self.names]
        for column, found in zip(self.columns, encoded(self.columns, cells, no_value), strict=True):
            if unknown is not None:
                unknown.add(column, found)
            inputs.append(column.inputs(found))
        return {name: array[:] for name, array in self.arrays(inputs, len(frame)).items()}

    def arrays(self, inputs: Sequence[Sequence[Array]], num_rows: int) -> "dict[str, SideBySide]":
        """Return the arrays of rows. inputs: `Column.inputs` of each column."""
        dense, ids, bags = list[Array](), list[Array](), list[Array]()
        for column, given in zip(self.columns, inputs, strict=True):
            num = column.num_dense
            dense += given[:num]
            (bags if column.role == "bag" else ids).extend(given[num:])
        ids = ids or [np.zeros(num_rows, np.int32)] * (not bags)
        found = {"ids_BF": SideBySide(ids, num_rows, np.int32)}
        found["dense_BN"] = SideBySide(dense, num_rows, np.float32)
        return found | ({"bags_BFL": SideBySide(bags, num_rows, np.int32)} if bags else {})

    def save(self, folder: Path) -> None:
        """Write `encoder.json` and `vocabularies.parquet` into `folder`."""
        folder.mkdir(exist_ok=True)
        columns = [column.model_dump(mode="json") for column in self.columns]
        page = {"version": ENCODER_VERSION, "columns": columns, **self.label.facts()}
        write_text(folder / "encoder.json", json.dumps(page, indent=1, ensure_ascii=False))
        # Not in the JSON: with millions of values, reading it would take seconds before each prediction.
        texts = [column.learned.implode() for column in self.columns]
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
            texts = pl.read_parquet(folder / "vocabularies.parquet", glob=False)["values"]
            columns = [
                Column(**values, learned=learned)
                for values, learned in zip(page["columns"], texts, strict=True)
            ]
            return cls(tuple(columns), Label.of(page))


class SideBySide:
    """Columns (B,) as one array (B, F), or columns (B, L) as (B, F, L), made when its rows are read: it may
    be larger than memory."""

    def __init__(self, columns: Sequence[Array], num_rows: int, dtype: type[np.generic]) -> None:
        self.columns, self.dtype = columns, np.dtype(dtype)
        self.shape = (num_rows, len(columns), *max((column.shape[1:] for column in columns), default=()))

    def __getitem__(self, rows: slice) -> Array:
        first, stop, _ = rows.indices(self.shape[0])
        out = np.empty((stop - first, *self.shape[1:]), self.dtype)
        # Blocks of rows that fit into a core's cache: `np.stack` takes far longer.
        for start in range(0, len(out), 2**13):
            for position, column in enumerate(self.columns):
                block = column[first + start : min(first + start + 2**13, stop)]
                out[start : start + 2**13, position] = padded(block, *self.shape[2:])
        return out


def padded(ids: Array, *width: int) -> Array:
    """Return ids of bags (..., L) as (..., width); without a width as they are."""
    if not width or width[0] == ids.shape[-1]:
        return ids
    missing = [(0, 0)] * (ids.ndim - 1) + [(0, width[0] - ids.shape[-1])]
    return np.pad(ids, missing, constant_values=PADDING_ID)


def open_base(path: Path) -> tuple[Prepared, Encoder]:
    """Open the prepared data to extend, and its encoder. Raises UserError if it does not exist, is damaged or
    is not a table."""
    if not (path / "encoder").is_dir():
        raise UserError(
            f"data.base={path}: is not a prepared table (it has no encoder); name the prepared folder "
            "of a run that read one"
        )
    return verify_prepared(path), Encoder.load(path / "encoder")


def old_rows(base: Encoder, now: Encoder) -> Array:
    """Return (V,) the row of the base's table from which each row of the new table starts: that of the same
    value, for a new value that of the unknown one. Both tables hold the rows of all columns, one column after
    another."""
    found, start = list[Array](), 0
    for old, new in zip(base.columns, now.columns, strict=True):
        if old.has_ids:
            known = old.ids(old.places(new.learned), np.zeros(len(new.learned), bool))
            found.append(start + np.concatenate([[MISSING_ID, UNKNOWN_ID], known]))
            start += old.num_ids
    return np.concatenate(found or [np.arange(FIRST_ID)])
