"""The arrays of prepared data, made block by block from the columns of a table that was read.

Letters: B rows, F id columns, N dense columns, L items of a bag.
"""

import itertools
from collections.abc import Iterator

import numpy as np

from dphybrid.data.ahead import mapped
from dphybrid.data.batches import Array
from dphybrid.data.table.bags import bag_ids, form_text, one_width
from dphybrid.data.table.columns import ColumnStore
from dphybrid.data.table.encode import TableEncoder, side_by_side
from dphybrid.data.table.extend import row_keys
from dphybrid.data.table.reading import Table
from dphybrid.data.table.roles import bag_form
from dphybrid.util.errors import UserError


def ids_blocks(encoder: TableEncoder, lookups: dict[str, Array], store: ColumnStore) -> Iterator[Array]:
    """Yield the ids (B, F) of the store's blocks. lookups: of `Table.lookups`."""
    buckets = [column for column in encoder.numeric if column.edges is not None]

    def block(number: int) -> Array:
        num_rows = store.lengths[number]
        parts = [column.ids(store.block(column.name, number)) for column in buckets]
        parts += [lookups[c.name].take(store.block(c.name, number)) for c in encoder.categories]
        return side_by_side(parts, np.int32, num_rows)

    return mapped(block, range(len(store.lengths)))


def bags_blocks(
    encoder: TableEncoder, lookups: dict[str, Array], store: ColumnStore, longest: int
) -> Iterator[Array]:
    """Yield the ids of the bags' items (B, bags, L), all `longest` items wide."""

    def block(number: int) -> Array:
        return one_width(
            [bag_ids(store.block(c.name, number)[:, :longest], lookups[c.name]) for c in encoder.bags],
            longest,
        )

    return mapped(block, range(len(store.lengths)))


def dense_blocks(encoder: TableEncoder, store: ColumnStore) -> Iterator[Array]:
    """Yield the dense features (B, N)."""

    def block(number: int) -> Array:
        raw = {column.name: store.block(column.name, number) for column in encoder.numeric}
        return encoder.dense(raw, store.lengths[number])

    return mapped(block, range(len(store.lengths)))


def keys_of(table: Table, store: ColumnStore, encoder: TableEncoder, labels_B: Array) -> Array:
    """Return the rows' keys in another table's encoding, with their labels in it. Raises UserError where a
    column of that one is gone, or used otherwise."""
    before = {c.name: "numeric" for c in encoder.numeric} | {
        c.name: "categorical" for c in encoder.categories
    }
    before |= {c.name: form_text(c.separator, c.max_items) for c in encoder.bags}
    now = {
        c.name: form_text(*bag_form(c)) if c.role in ("bag", "text") else c.role
        for c in table.columns
        if c.role not in ("ignore", "time")
    }
    for name, form in before.items():
        if name not in now:
            raise UserError(
                f"data.base: the earlier table has a column {name!r} that is used no more; train a new model"
            )
        if now[name] != form:
            raise UserError(
                f"data.base: column {name!r} was {form} and is {now[name]}; a model cannot be carried over, "
                "train a new one"
            )
    lookups = table.lookups(encoder)
    start = 0

    def blocks() -> Iterator[tuple[Array, Array, Array, Array | None]]:
        nonlocal start
        bags = (
            bags_blocks(encoder, lookups, store, table.longest_bag)
            if encoder.bags
            else itertools.repeat(None)
        )
        for ids_BF, dense_BN in zip(
            ids_blocks(encoder, lookups, store),
            dense_blocks(encoder, store),
            strict=True,
        ):
            yield ids_BF, dense_BN, labels_B[start : start + len(ids_BF)], next(bags)
            start += len(ids_BF)

    return row_keys(blocks(), encoder)
