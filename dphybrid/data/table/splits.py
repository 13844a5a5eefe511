"""Which rows are for training, validation and test. Validation: random rows, the latest rows, all rows of
some keys, those that a column names, or separate files. When a model is retrained, no row that it was trained
on is for validation or test. Letters: B rows."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import polars as pl

from dphybrid.config.tables import TableDataConfig
from dphybrid.data.batches import Array
from dphybrid.data.table.cells import PADDING_ID
from dphybrid.data.table.encoder import Base, Encoder, old_ids
from dphybrid.data.table.order import positions_in_time
from dphybrid.data.table.reading import Table
from dphybrid.util.errors import UserError, counted

_BLOCK = 2**20
"""Rows that are split or compared at a time, to limit memory."""


TRAIN, VALID, TEST, LEFT_OUT = range(4)
_PART_WORDS = {
    **dict.fromkeys(("train", "training"), TRAIN),
    **dict.fromkeys(("valid", "validation", "val", "dev"), VALID),
    **dict.fromkeys(("test", "testing"), TEST),
}
"""Values of the column of data.split=named, in lower case."""


@dataclass(frozen=True)
class RowSplit:
    """part_B: the part of each row, TRAIN, VALID, TEST or LEFT_OUT. text: how they were chosen, for the
    summary."""

    part_B: Array
    text: str


def split_rows(table: Table, seed: int, classes_B: Array) -> RowSplit:
    """Choose the rows of each part. classes_B: classes by which random rows are stratified, so that each
    gives its share. Raises UserError if a part would be empty."""
    data = table.plan.data
    part_B, text = table.column("part").to_numpy().copy(), ""  # TRAIN, or that of the row's file
    if data.split == "named":
        part_B, text = _named(table, part_B)
    # Validation rows are chosen among these.
    open_B = part_B == TRAIN
    if data.valid_path is not None:
        text = f"validation split: the rows of {data.valid_path}"
    elif data.split in ("random", "named"):
        if not (part_B == VALID).any():
            part_B[open_B] = VALID * _random(seed, classes_B[open_B].astype(np.int64), data.valid_fraction)
            text = f"{text and text + '; '}validation split: rows at random, by train.seed={seed}"
        elif data.split == "named":
            data.check_unset("valid_fraction", f"data.split_column={data.split_column} names validation rows")
    else:
        codes_B, texts = table.column("split").to_numpy(), table.texts("split").to_list()
        held_B, text = _by_value(data, seed, codes_B[open_B], texts)
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
    return RowSplit(part_B, text)


def _named(table: Table, part_B: Array) -> tuple[Array, str]:
    """Return the rows' parts by the words of the split column, and the line for the summary. part_B: those of
    the rows' files. Raises UserError for another word, and for a row without one."""
    data = table.plan.data
    where, known = f"data.split_column={data.split_column}", ", ".join(_PART_WORDS)
    codes_B, of_file_B = table.column("split").to_numpy(), part_B != TRAIN
    words = [_PART_WORDS.get(text.strip().lower(), LEFT_OUT) for text in table.texts("split")]
    found_B = np.array([LEFT_OUT, *words])[codes_B]  # code 0: no value
    if (odd := np.flatnonzero((found_B == LEFT_OUT) & ~of_file_B)).size:
        code = codes_B[odd[0]]
        shown = repr(table.texts("split")[int(code) - 1]) if code else "an empty cell"
        raise UserError(f"{where}: {shown} names no part ({len(odd):,} such rows); give {known}")
    if data.test_path is not None and (found_B[~of_file_B] == TEST).any():
        raise UserError(f"{where} names test rows, and so does data.test_path={data.test_path}; give one")
    return np.where(of_file_B, part_B, found_B), f"parts by {data.split_column}"


def _random(seed: int, classes_B: Array, fraction: float) -> Array:
    """Hold out the same share of every class in every block of rows: at least one row of a class with two or
    more, and none of a class with a single row. Blocks save the memory of a permutation of all rows."""
    held_B = np.zeros(len(classes_B), bool)
    for number, start in enumerate(range(0, len(classes_B), _BLOCK)):
        block_B = classes_B[start : start + _BLOCK]
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


def _by_value(data: TableDataConfig, seed: int, codes_B: Array, texts: list[str]) -> tuple[Array, str]:
    """Hold out all rows of some values of the split column; return the mask (B,) and the line for the
    summary. codes_B: codes of `texts`, 0 for no value."""
    counts = np.bincount(codes_B, minlength=len(texts) + 1)[1:]
    if data.split == "time":
        field = f"data.split_column={data.split_column}"
        positions, how = positions_in_time(pl.Series(texts, dtype=pl.String), field, data)
        # The place of each value, the latest first; texts of one time, such as those of two zones, share one.
        _, places = np.unique(-positions, return_inverse=True)
    else:
        # Sorted first, as the codes of texts depend on the threads that read them.
        by_name = np.argsort(np.array(texts, dtype=object), kind="stable")
        places = np.empty(len(texts), np.int64)
        places[by_name[np.random.default_rng(seed).permutation(len(texts))]] = np.arange(len(texts))
    wanted = data.valid_fraction * len(codes_B)
    sums = np.cumsum(np.bincount(places, counts))
    taken = int(np.searchsorted(sums, wanted)) + 1  # as many places as reach the wanted number of rows
    # Without the last place, the number of rows may be closer to the wanted one.
    if taken > 1 and sums[min(taken, len(sums)) - 1] - wanted > wanted - sums[taken - 2]:
        taken -= 1
    is_held = np.append(False, places < taken)
    if data.split == "time":
        first = min(
            text for text, place in zip(texts, places, strict=True) if place == min(taken, len(sums)) - 1
        )
        text = (
            f"validation split: {data.split_column} from {first!r} on{how and f' ({how})'}; "
            "earlier rows, and rows without a value, are for training"
        )
    else:
        held = int(is_held.sum())
        text = f"validation split: all rows of {held:,} of {len(texts):,} values of {data.split_column}"
    return is_held[codes_B], text


def rows_in_both(table: Table, split: RowSplit) -> str:
    """Return what is to say of validation rows that are training rows, too, label included; empty if there
    are none. Looks at the first `_BLOCK` rows."""
    keys, start = list[pl.Series](), 0
    for number, length in enumerate(table.lengths):
        if start < _BLOCK:
            keys.append(table.block(number).hash_rows())
        start += length
    keys_B = pl.concat(keys)
    train, valid = (keys_B.filter(pl.Series(split.part_B[: len(keys_B)] == part)) for part in (TRAIN, VALID))
    both = int(valid.is_in(train.unique().implode()).sum())
    if not both:
        return ""
    return f"{both:,} of {len(valid):,} validation rows equal a training row, label included"


def _row_keys(blocks: Iterable[Mapping[str, Array]], max_items: int) -> Array:
    """Return hashes (B,) uint64 of the rows' ids, numbers, labels and bags: equal rows have equal keys.
    blocks: arrays of the rows by name. max_items: most items of a bag's cell."""
    keys = [np.empty(0, np.uint64)]
    for arrays in blocks:
        cells = {name: arrays[name] for name in ("ids_BF", "dense_BN", "labels_B")}
        if "bags_BFL" in arrays:
            # Padded to one width: an array is as wide as its table's longest bag, and equal rows of two
            # tables must have equal keys.
            beyond = max_items - arrays["bags_BFL"].shape[2]
            cells["bags_BFL"] = np.pad(
                arrays["bags_BFL"], ((0, 0), (0, 0), (0, beyond)), constant_values=PADDING_ID
            )
        columns = [
            pl.Series(f"{name} {position}", column_B)
            for name, array in cells.items()
            for position, column_B in enumerate(array.reshape(len(array), -1).T)
        ]
        # Only compared within this process, and never saved: another version of polars may hash differently.
        keys.append(pl.DataFrame(columns).hash_rows().to_numpy())
    return np.concatenate(keys)


def extended_split(
    split: RowSplit, base: Base, blocks: Iterable[Mapping[str, Array]]
) -> tuple[RowSplit, Array]:
    """Return the split, corrected for a base: rows that the base trained on are not held out, and rows that
    it held out still are. Test rows that it has seen are left out. Also return the numbers of the new rows.

    blocks: the rows' arrays in the base's encoding. Raises UserError if no row is left to hold out.
    """
    keys_B = _row_keys(blocks, base.encoder.max_items)
    num_trained_B, num_kept_B = (_counts(keys_B, _part_keys(base, part)) for part in ("train", "valid"))
    # Of equal rows, the first ones are those that the base trained on, the next ones those that it held out.
    before_B = _equal_before(keys_B)
    seen_B = before_B < num_trained_B + num_kept_B
    kept_B = seen_B & (before_B >= num_trained_B)
    is_test_B = split.part_B == TEST
    new_B = ~seen_B & ~is_test_B
    held_B = ((split.part_B == VALID) & new_B) | (kept_B & ~is_test_B)
    # A test row counts as seen however often its like occurs among the other rows.
    known_B = num_trained_B + num_kept_B > 0
    part_B = np.where(is_test_B, np.where(known_B, LEFT_OUT, TEST), np.where(held_B, VALID, TRAIN))
    if not held_B.any() or not (part_B == TRAIN).any():
        raise UserError(
            "data.base: the earlier model was trained on every row that could be held out; wait for more rows"
        )
    new = counted(int(new_B.sum()), "row is", "rows are")
    text = (
        f"{split.text}; {new} new, and the validation split has no row that {base.prepared.path.name} "
        "trained on"
    )
    if left := int((part_B == LEFT_OUT).sum()):
        seen = counted(left, "test row that it has seen is", "test rows that it has seen are")
        text += f"; {seen} left out"
    return RowSplit(part_B, text), np.flatnonzero(new_B)


def _equal_before(keys_B: Array) -> Array:
    """Return how many earlier rows equal each row (B,)."""
    before = pl.DataFrame({"key": keys_B}).select(pl.int_range(pl.len()).over("key"))
    return before.to_series().to_numpy()


def _counts(keys_B: Array, among: Array) -> Array:
    """Return how many rows of `among` equal each row (B,)."""
    values, counts = np.unique(among, return_counts=True)
    place_B = np.searchsorted(values, keys_B).clip(max=len(values) - 1)
    found_B: Array = np.where(values[place_B] == keys_B, counts[place_B], 0)
    return found_B


def _part_keys(base: Base, part: str, within: Encoder | None = None) -> Array:
    """Return the keys of the rows of a part of the base. within: an earlier encoder, in whose encoding the
    rows are compared (None: the base's own)."""
    arrays, rows_B = base.prepared.arrays, base.prepared.arrays[f"{part}_rows"]
    ids_of = old_ids(within, base.encoder) if within else []
    num_singles = len(ids_of) - len(base.encoder.bags)

    def blocks() -> Iterator[dict[str, Array]]:
        for start in range(0, len(rows_B), _BLOCK):
            rows = rows_B[start : start + _BLOCK]
            found = {name: arrays[name][rows] for name in base.prepared.manifest.batch_arrays}
            for position, ids in enumerate(ids_of):
                name, place = (
                    ("ids_BF", position) if position < num_singles else ("bags_BFL", position - num_singles)
                )
                found[name][:, place] = ids[found[name][:, place]]
            yield found

    return _row_keys(blocks(), max(base.encoder.max_items, within.max_items if within else 0))


def unseen_rows(held: Base, trained: Base) -> Array:
    """Return the mask (B,) of the validation rows of `held` on which `trained` was not trained. The encoder
    of `held` must cover that of `trained`, in whose encoding the rows are compared."""
    train_B, valid_B = (_part_keys(held, part, trained.encoder) for part in ("train", "valid"))
    keys_B = np.concatenate([train_B, valid_B])
    new_B = _equal_before(keys_B) >= _counts(keys_B, _part_keys(trained, "train"))
    return new_B[len(train_B) :]
