"""Which rows are for training, validation and test. Validation: random rows, the latest rows, all rows of
some keys, or separate files. When a model is retrained, no row that it was trained on is for validation.
Letters: B rows."""

from collections.abc import Iterable, Mapping

import numpy as np
import polars as pl

from dphybrid.config.tables import TableDataConfig
from dphybrid.data.batches import Array
from dphybrid.data.store import Prepared
from dphybrid.data.table.encoder import padded
from dphybrid.data.table.kinds import form_as
from dphybrid.data.table.values import BLOCK, Form, as_names, in_time
from dphybrid.util.errors import UserError, counted

_FEW_DISTINCT = 0.1
"""With a smaller share of different rows, equal rows are not taken for the same rows."""


TRAIN, VALID, TEST = range(3)


def split_rows(
    data: TableDataConfig, seed: int, part_B: Array, classes_B: Array, column: pl.Series | None
) -> tuple[Array, str]:
    """Return the part of each row (B,), TRAIN, VALID or TEST, and how they were chosen, for the summary.

    part_B: TRAIN, or the part of the row's file. classes_B: classes by which random rows are stratified, so
    that each gives its share. column: cells of data.split_column. Raises UserError if a part would be empty.
    """
    part_B = part_B.copy()
    # Validation rows are chosen among these.
    open_B = part_B == TRAIN
    if data.valid_path is not None:
        text = f"validation split: the rows of {data.valid_path}"
    elif column is None:
        part_B[open_B] = VALID * _random(seed, classes_B[open_B], data.valid_fraction)
        text = f"validation split: rows at random, by train.seed={seed}"
    else:
        own = column.filter(pl.Series(open_B))
        held_B, text = _latest(data, own) if data.split == "time" else _keys(data, seed, own)
        part_B[open_B] = VALID * held_B
    if data.test_path is not None:
        text += f"; test part: the rows of {data.test_path}"
    for part, what in ((VALID, "no row is"), (TRAIN, "all rows are")):
        if not (part_B == part).any():
            raise UserError(
                f"data.split={data.split}: {what} in the validation split; give more rows, or change "
                "data.valid_fraction or data.split_column"
            )
    if data.test_path is not None and not (part_B == TEST).any():
        raise UserError(f"data.test_path={data.test_path}: no row has a label; dphybrid predict needs none")
    return part_B, text


def _random(seed: int, classes_B: Array, fraction: float) -> Array:
    """Hold out the same share of every class in every block of rows: at least one row of a class with two or
    more, and none of a class with a single row. Blocks save the memory of a permutation of all rows."""
    held_B = np.zeros(len(classes_B), bool)
    for number, start in enumerate(range(0, len(classes_B), BLOCK)):
        block_B = classes_B[start : start + BLOCK].astype(np.int64)
        # A generator per block, so that the choice in a block does not depend on the number of blocks.
        order_B = np.random.default_rng([seed, number]).permutation(len(block_B))
        order_B = order_B[np.argsort(block_B[order_B], kind="stable")]
        counts_C = np.bincount(block_B)
        ends_C = np.cumsum(counts_C)
        # Cumulated shares are rounded, not those of each class, so that the total is right.
        wanted_C = np.diff(np.round(ends_C * fraction), prepend=0)
        wanted_C = wanted_C.clip(np.minimum(counts_C - 1, 1), np.maximum(counts_C - 1, 0))
        # The position of each row within its class, in random order.
        place_B = np.arange(len(block_B)) - np.repeat(ends_C - counts_C, counts_C)
        held_B[start + order_B[place_B < np.repeat(wanted_C, counts_C)]] = True
    return held_B


def random_rows(seed: int | list[int], num_rows: int, fraction: float) -> Array:
    """Return the mask (B,) of about this share of the rows, drawn by `seed`: at least one, and not all."""
    held_B = np.zeros(num_rows, bool)
    wanted = min(max(1, round(num_rows * fraction)), num_rows - 1)
    held_B[np.random.default_rng(seed).permutation(num_rows)[:wanted]] = True
    return held_B


def latest_rows(times_B: Array, fraction: float) -> Array:
    """Return the mask (B,) of about this share of the rows, the latest ones. Rows of one time stay together,
    and rows without one (-inf) are left out."""
    _, places_B = np.unique(-times_B, return_inverse=True)
    taken = _closest(np.bincount(places_B), fraction * len(times_B))
    held_B: Array = (places_B < taken) & np.isfinite(times_B)
    return held_B


def _latest(data: TableDataConfig, column: pl.Series) -> tuple[Array, str]:
    """Hold out the latest rows; return the mask (B,) and the line for the summary. Rows of one time stay
    together, and rows without a value are for training."""
    times_B = in_time(column, f"data.split_column={data.split_column}")
    held_B = latest_rows(times_B, data.valid_fraction)
    first = column.filter(pl.Series(held_B)).min()
    text = (
        f"validation split: {data.split_column} from {str(first)!r} on; earlier rows, and rows without a "
        "value, are for training"
    )
    return held_B, text


def _keys(data: TableDataConfig, seed: int, column: pl.Series) -> tuple[Array, str]:
    """Hold out all rows of some values; return the mask (B,) and the line for the summary."""
    keys = key_texts(column)
    # Sorted first, as the order of groups depends on threads.
    counts = keys.drop_nulls().rename("key").value_counts(name="rows").sort("key")
    counts = counts[np.random.default_rng(seed).permutation(len(counts))]
    taken = _closest(counts["rows"].to_numpy(), data.valid_fraction * len(keys))
    held_B = keys.is_in(counts["key"].head(taken).implode()).fill_null(False).to_numpy()
    return held_B, f"validation split: all rows of {taken:,} of {len(counts):,} values of {data.split_column}"


def _closest(sizes: Array, wanted: float) -> int:
    """Return how many groups of rows, from the first one on, come closest to the wanted number of rows, at
    least one. sizes: rows of each group."""
    return 1 + int(np.abs(np.cumsum(sizes) - wanted).argmin()) if len(sizes) else 0


def key_texts(column: pl.Series) -> pl.Series:
    """Return the cells of a column of keys as texts, None for no value."""
    return as_names(column, form_as("categorical", column, Form()))


def extended_split(
    split_B: Array,
    base: Prepared,
    max_items: int,
    blocks: Iterable[Mapping[str, Array]],
    keys: pl.Series | None = None,
) -> tuple[Array, str, Array]:
    """Return the part of each row, corrected for a base, as rows that the base trained on are not held out,
    and rows that it held out still are; how they were chosen; and the numbers of the new rows.

    split_B: the part of each row without a base; test rows stay test rows. max_items: most items of a bag's
    cell. blocks: the rows' arrays in the base's encoding. keys: of data.split=key, so that all rows of a
    value follow those that the base has seen. Raises UserError if no row is left to hold out.
    """
    # Of equal rows, the first ones are those that the base trained on, the next ones those that it held out.
    number, own = pl.int_range(pl.len()).over("key").alias("number"), _row_keys(blocks, max_items)
    parts = {TRAIN: "train_rows", VALID: "valid_rows"}
    known = pl.concat(
        pl.DataFrame({"key": _stored_keys(base, rows, max_items)}).with_columns(part=part)
        for part, rows in parts.items()
    )
    rows = pl.DataFrame({"key": own}).with_columns(number)
    before = rows.join(known.with_columns(number), ["key", "number"], "left", maintain_order="left")["part"]
    before_B, is_test_B = before.fill_null(-1).to_numpy(), split_B == TEST
    trained_B, kept_B, new_B = before_B == TRAIN, before_B == VALID, (before_B < 0) & ~is_test_B
    chosen_B = split_B == VALID
    if keys is not None:
        by_key = pl.DataFrame({"key": keys, "trained": trained_B, "kept": kept_B}).select(
            pl.col("trained").any().over("key"), pl.col("kept").any().over("key")
        )
        trained_before_B, held_before_B = (column.to_numpy() for column in by_key)
        chosen_B = (chosen_B | held_before_B) & ~trained_before_B
    held_B = (chosen_B & new_B) | (kept_B & ~is_test_B)
    new = counted(int(new_B.sum()), "row is", "rows are")
    text = f"{new} new, and the validation split has no row that {base.path.name} trained on"
    if not held_B.any() and len(np.unique(own)) < _FEW_DISTINCT * len(own):
        # Nearly all rows equal earlier ones, whether they are the same or not.
        held_B = chosen_B & ~is_test_B
        text = f"{new} new; rows repeat so often that new ones look like known ones"
    part_B = np.where(is_test_B, TEST, np.where(held_B, VALID, TRAIN))
    if not held_B.any() or not (part_B == TRAIN).any():
        raise UserError(
            "data.base: the earlier model was trained on every row that could be held out; wait for more rows"
        )
    return part_B, text, np.flatnonzero(new_B)


def _row_keys(blocks: Iterable[Mapping[str, Array]], max_items: int) -> Array:
    """Return hashes (B,) uint64 of the rows' ids, numbers, labels and bags: equal rows have equal keys.
    blocks: arrays of the rows by name. max_items: most items of a bag's cell."""
    keys = [np.empty(0, np.uint64)]
    for arrays in blocks:
        cells = [arrays[name] for name in ("ids_BF", "dense_BN", "labels_B")]
        if "bags_BFL" in arrays:
            # An array is as wide as its table's longest bag, and equal rows of two tables must have equal
            # keys.
            cells.append(padded(arrays["bags_BFL"], max_items))
        columns = [column_B for array in cells for column_B in array.reshape(len(array), -1).T]
        frame = pl.DataFrame([pl.Series(str(place), column_B) for place, column_B in enumerate(columns)])
        # Only compared within this process, and never saved: another version of polars may hash differently.
        keys.append(frame.hash_rows().to_numpy())
    return np.concatenate(keys)


def _stored_keys(base: Prepared, part: str, max_items: int) -> Array:
    """Return the keys of some rows of the base. part: the array with their numbers."""
    arrays, rows_B = base.arrays, base.arrays[part]
    names, starts = base.manifest.batch_arrays, range(0, len(rows_B), BLOCK)
    blocks = ({name: arrays[name][rows_B[start : start + BLOCK]] for name in names} for start in starts)
    return _row_keys(blocks, max_items)
