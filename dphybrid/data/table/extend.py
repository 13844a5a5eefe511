"""A table encoded as an earlier one was, so that what a model learnt on the earlier one still fits: old ids
keep their meaning, new values get ids behind them, numbers keep their statistics. Rows that the earlier one
trained on are never in the validation split.

Letters: B rows, F id columns, N dense columns, V ids of all columns together.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import polars as pl

from dphybrid.data.batches import Array
from dphybrid.data.store import Prepared, verify_prepared
from dphybrid.data.table.bags import widened
from dphybrid.data.table.categories import FIRST_ID, CategoryColumn
from dphybrid.data.table.encode import TableEncoder
from dphybrid.data.table.splits import RowSplit
from dphybrid.util.errors import UserError

_BLOCK = 2**18

Column = TypeVar("Column", bound=CategoryColumn)


@dataclass(frozen=True)
class Base:
    """The earlier prepared data and its encoder."""

    prepared: Prepared
    encoder: TableEncoder


def open_base(path: Path) -> Base:
    """Open the prepared data to extend. Raises UserError when it is gone, or no table."""
    if not (path / "encoder").is_dir():
        raise UserError(
            f"data.base={path}: is no prepared table (it has no encoder); name the prepared folder of a ctr "
            "run"
        )
    return Base(verify_prepared(path, known=True), TableEncoder.load(path / "encoder"))


def extended(base: TableEncoder, fitted: TableEncoder) -> TableEncoder:
    """Return the base's encoder with the values that `fitted` found besides. Raises UserError when columns or
    classes differ."""
    for what, before, now in (
        ("columns", [c["name"] for c in base.id_columns], [c["name"] for c in fitted.id_columns]),
        ("numbers", [c.name for c in base.numeric], [c.name for c in fitted.numeric]),
        ("labels", base.answer.task, fitted.answer.task),
        ("classes", list(base.classes), list(fitted.classes)),
        (
            "hash buckets",
            [c.hash_buckets for c in base.vocabularies],
            [c.hash_buckets for c in fitted.vocabularies],
        ),
    ):
        if before != now:
            raise UserError(
                f"data.base: {what} were {before} and are {now}; a model cannot be carried over, train a "
                "new one"
            )
    return replace(
        base,
        categories=tuple(
            _grown(old, new) for old, new in zip(base.categories, fitted.categories, strict=True)
        ),
        bags=tuple(_grown(old, new) for old, new in zip(base.bags, fitted.bags, strict=True)),
    )


def _grown(old: Column, new: Column) -> Column:
    more = new.vocabulary.filter(~new.vocabulary.is_in(old.vocabulary.implode()))
    return replace(old, vocabulary=pl.concat([old.vocabulary.cast(pl.String), more.cast(pl.String)]))


def old_ids(base: TableEncoder, now: TableEncoder) -> list[Array]:
    """Return for each id column, by new id, the id that the base gives to the same thing: new values are
    unknown or hashed to it."""
    columns = [np.arange(column.num_ids) for column in base.numeric if column.num_ids]
    for old, new in zip(base.vocabularies, now.vocabularies, strict=True):
        hashed = FIRST_ID + len(old.vocabulary) + np.arange(old.hash_buckets)
        columns.append(np.concatenate([[0, 1], old.ids_of_codes(new.vocabulary)[1:], hashed]))
    return columns


def old_rows(base: TableEncoder, now: TableEncoder) -> Array:
    """Return (V,) for each row of a table over all columns, one after another, the row of the base's table to
    start from."""
    columns = old_ids(base, now)
    starts = np.cumsum([0, *(column["num_ids"] for column in base.id_columns[:-1])])
    return np.concatenate([start + column for start, column in zip(starts, columns, strict=True)])


def row_keys(blocks: Iterator[tuple[Array, Array, Array, Array | None]], encoder: TableEncoder) -> Array:
    """Return (B,) uint64 that are equal for rows with equal ids_BF, dense_BN, labels_B and bags_BFL, which
    come in blocks."""
    keys = []
    for ids_BF, dense_BN, labels_B, bags_BFL in blocks:
        words = [ids_BF.astype(np.int32), dense_BN.astype(np.float32), labels_B.astype(np.float32)[:, None]]
        if bags_BFL is not None:
            words.append(
                widened(bags_BFL, max(column.max_items for column in encoder.bags))
                .reshape(len(ids_BF), -1)
                .astype(np.int32)
            )
        cells_BK = np.concatenate([np.ascontiguousarray(part).view(np.uint32) for part in words], axis=1)
        key_B = np.full(len(cells_BK), 0xCBF29CE484222325, np.uint64)
        for k in range(cells_BK.shape[1]):  # FNV-1a over words, with a shift that also stirs the low bits
            key_B = (key_B ^ cells_BK[:, k]) * np.uint64(0x100000001B3)
            key_B ^= key_B >> np.uint64(29)
        keys.append(key_B)
    return np.concatenate(keys)


def base_keys(base: Base, part: str) -> Array:
    """Return the keys of the rows of a part of the base."""
    arrays, rows_B = base.prepared.arrays, base.prepared.arrays[f"{part}_rows"]

    def blocks() -> Iterator[tuple[Array, Array, Array, Array | None]]:
        for start in range(0, len(rows_B), _BLOCK):
            rows = rows_B[start : start + _BLOCK]
            bags_BFL = arrays["bags_BFL"][rows] if base.encoder.bags else None
            yield arrays["ids_BF"][rows], arrays["dense_BN"][rows], arrays["labels_B"][rows], bags_BFL

    return row_keys(blocks(), base.encoder)


def extended_split(split: RowSplit, base: Base, key_B: Array) -> tuple[RowSplit, Array]:
    """Return the split without rows that the base trained on among the held-out ones, and with those that it
    held out; and which rows are new.

    key_B: of `row_keys`, in the base's encoding. Raises UserError when no row is left to hold out.
    """
    trained_B, kept_B = np.isin(key_B, base_keys(base, "train")), np.isin(key_B, base_keys(base, "valid"))
    new_B = ~trained_B & ~kept_B
    held_B = (split.held_B & new_B) | (kept_B & ~trained_B)
    if not held_B.any() or held_B.all():
        raise UserError(
            "data.base: no row is left to hold out that the earlier model was not trained on; wait for more "
            "rows"
        )
    text = (
        f"{split.text}; {new_B.sum():,} rows are new, and no row that {base.prepared.path.name} trained "
        "on is in the validation split"
    )
    return RowSplit(held_B, text), np.flatnonzero(new_B)
