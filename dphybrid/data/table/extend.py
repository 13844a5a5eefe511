"""A table encoded as an earlier one was, so that its model can be trained on: rows that the earlier one
trained on are never in the validation split. Letters: B rows, V ids of all columns together."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from dphybrid.data.batches import Array
from dphybrid.data.store import Prepared, verify_prepared
from dphybrid.data.table.cells import FIRST_ID, PADDING_ID
from dphybrid.data.table.encoder import Encoder
from dphybrid.data.table.splits import RowSplit
from dphybrid.util.errors import UserError

_BLOCK = 2**18


@dataclass(frozen=True)
class Base:
    """The earlier prepared data and its encoder."""

    prepared: Prepared
    encoder: Encoder


def open_base(path: Path) -> Base:
    """Open the prepared data to extend. Raises UserError when it is gone, or no table."""
    if not (path / "encoder").is_dir():
        raise UserError(
            f"data.base={path}: is not a prepared table (it has no encoder); name the prepared folder "
            "of a run that read one"
        )
    return Base(verify_prepared(path), Encoder.load(path / "encoder"))


def old_ids(base: Encoder, now: Encoder) -> list[Array]:
    """Return for each id column, by new id, the base's id of the same value: new values are unknown or hashed
    to it."""
    found = [np.arange(num_ids) for number in base.numbers for _, _, num_ids in number.tables]
    for old, new in zip((*base.categories, *base.bags), (*now.categories, *now.bags), strict=True):
        hashed = FIRST_ID + len(old.learned) + np.arange(old.hash_buckets)
        found.append(np.concatenate([[0, 1], old.ids_of(new.learned.to_list()), hashed]))
    return found


def old_rows(base: Encoder, now: Encoder) -> Array:
    """Return (V,) for each row of a table over all columns, one after another, the row of the base's table to
    start from."""
    starts = np.cumsum([0, *(column["num_ids"] for column in base.id_columns[:-1])])
    return np.concatenate([start + ids for start, ids in zip(starts, old_ids(base, now), strict=True)])


def _row_keys(blocks: Iterable[Mapping[str, Array]], max_items: int) -> Array:
    """Return (B,) uint64 that are equal for rows with equal ids, numbers, labels and bags, which come in
    blocks of arrays by name. max_items: of a bag, at most."""
    keys = [np.empty(0, np.uint64)]
    for arrays in blocks:
        cells = {name: arrays[name] for name in ("ids_BF", "dense_BN", "labels_B")}
        if "bags_BFL" in arrays:
            # A table is as wide as its longest bag, and equal rows of two tables must have equal keys.
            beyond = max_items - arrays["bags_BFL"].shape[2]
            cells["bags_BFL"] = np.pad(
                arrays["bags_BFL"], ((0, 0), (0, 0), (0, beyond)), constant_values=PADDING_ID
            )
        columns = [
            pl.Series(f"{name} {place}", column_B)
            for name, array in cells.items()
            for place, column_B in enumerate(array.reshape(len(array), -1).T)
        ]
        # Compared within this process only: another version of polars may hash otherwise.
        keys.append(pl.DataFrame(columns).hash_rows().to_numpy())
    return np.concatenate(keys)


def extended_split(
    split: RowSplit, base: Base, blocks: Iterable[Mapping[str, Array]]
) -> tuple[RowSplit, Array]:
    """Return the split without rows that the base trained on among the held-out ones, and with those that it
    held out; and which rows are new.

    blocks: of the rows' arrays, in the base's encoding. Raises UserError when no row is left to hold out.
    """
    keys_B = _row_keys(blocks, base.encoder.max_items)
    trained_B, kept_B = (np.isin(keys_B, _base_keys(base, part)) for part in ("train", "valid"))
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


def _base_keys(base: Base, part: str) -> Array:
    arrays = base.prepared.arrays
    rows_B = arrays[f"{part}_rows"]

    def blocks() -> Iterator[dict[str, Array]]:
        for start in range(0, len(rows_B), _BLOCK):
            rows = rows_B[start : start + _BLOCK]
            yield {name: arrays[name][rows] for name in base.prepared.manifest.batch_arrays}

    return _row_keys(blocks(), base.encoder.max_items)
