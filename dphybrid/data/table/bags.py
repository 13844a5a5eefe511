"""Columns of bags: several values in a cell, such as tags `drama|comedy`, or the words of a free text.

A cell becomes ids (L,): those of its first items in their order, then PADDING_ID; a cell without items is the
id of "no value" alone. An item that comes twice counts twice. Letters: B rows, L items of a row at most.
"""

from dataclasses import dataclass

import numpy as np
import polars as pl

from dphybrid.data.batches import Array
from dphybrid.data.table.categories import MISSING_ID, CategoryColumn
from dphybrid.util.errors import UserError

PADDING_ID = -1
MAX_ITEMS = 16
"""Items of a cell that are looked up, where a schema says nothing else."""
SEPARATOR = "|"
_WORD = r"\w+(?:['’]\w+)*"


def is_list_of_items(dtype: pl.DataType) -> bool:
    """Tell whether values of a type are lists of texts or whole numbers, which can be read as bags."""
    inner = getattr(dtype, "inner", None)
    return inner is not None and (inner.is_integer() or inner in (pl.String, pl.Categorical, pl.Enum))


def list_texts(column: pl.Series, where: str) -> pl.Series:
    """Return lists of items as text with `SEPARATOR` between the items; None among them is no item. Raises
    UserError when an item holds it."""
    lists = column.cast(pl.List(pl.String))
    items = lists.explode()
    if (odd := items.filter(items.str.contains(SEPARATOR, literal=True).fill_null(False))).len():
        raise UserError(
            f"{where}: column {column.name!r} holds the item {odd[0]!r} in a list; items are told apart by "
            f"{SEPARATOR!r}, so write it without, or the column as text and its separator in a schema file"
        )
    return lists.list.join(SEPARATOR, ignore_nulls=True)


@dataclass(frozen=True)
class Cells:
    """Cells taken apart. items_N: the kept items of all rows, one row after another; lengths_B: how many of
    them each row has; cut: cells that hold more; left_out: the items beyond."""

    items_N: pl.Series
    lengths_B: Array
    cut: int
    left_out: int


def take_apart(texts: pl.Series, separator: str | None, max_items: int) -> Cells:
    """Return the items of cells (None: no value): blanks around them are stripped, empty ones dropped.
    separator None: lower-cased words."""
    texts = texts.cast(pl.String)
    if separator is None:
        lists = texts.str.to_lowercase().str.extract_all(_WORD)
    else:
        stripped = pl.element().str.strip_chars()
        lists = texts.str.split(separator).list.eval(stripped.filter(stripped != ""))
    found_B = lists.list.len().fill_null(0).to_numpy().astype(np.int64)
    lengths_B = np.minimum(found_B, max_items)
    items_N = lists.filter(pl.Series(found_B > 0)).list.head(max_items).explode()
    return Cells(items_N, lengths_B, int((found_B > max_items).sum()), int((found_B - lengths_B).sum()))


def padded(codes_N: Array, lengths_B: Array, width: int) -> Array:
    """Return codes (B, width) of a dictionary, 0 behind the last item of a row."""
    codes_BL = np.zeros((len(lengths_B), width), codes_N.dtype)
    codes_BL[np.arange(width) < lengths_B[:, None]] = codes_N
    return codes_BL


def bag_ids(codes_BL: Array, ids_of_code: Array) -> Array:
    """Return ids (B, L) of `padded` codes; ids_of_code: as `CategoryColumn.ids_of_codes` gives them."""
    ids_BL = ids_of_code[codes_BL]
    ids_BL[:, 1:][codes_BL[:, 1:] == 0] = PADDING_ID
    return ids_BL


def one_width(bags: list[Array], width: int = 1) -> Array:
    """Return bags (B, L) of several columns as (B, columns, L), padded to the widest, `width` at least."""
    widest = max(width, *(ids_BL.shape[1] for ids_BL in bags))
    return np.stack([widened(ids_BL, widest) for ids_BL in bags], axis=1)


def widened(ids: Array, width: int) -> Array:
    """Return bags (..., L) with padding behind, L = width."""
    return np.pad(ids, [(0, 0)] * (ids.ndim - 1) + [(0, width - ids.shape[-1])], constant_values=PADDING_ID)


def form_text(separator: str | None, max_items: int) -> str:
    """Return in words how cells are taken apart."""
    return (
        f"{'words' if separator is None else f'a bag with {separator!r} between items'}, at most "
        f"{max_items} of a cell"
    )


@dataclass(frozen=True)
class BagColumn(CategoryColumn):
    """A fitted column of bags: its items are the categories. separator: between items, None for words;
    max_items: looked up of a cell."""

    separator: str | None = SEPARATOR
    max_items: int = MAX_ITEMS

    @property
    def role(self) -> str:
        return "text" if self.separator is None else "bag"

    def ids(self, texts: pl.Series) -> Array:
        """Return ids (B, L) of texts (None: no value), L as the fullest cell needs it."""
        cells = take_apart(texts, self.separator, self.max_items)
        ids_BL = padded(
            super().ids(cells.items_N), cells.lengths_B, max(1, int(cells.lengths_B.max(initial=1)))
        )
        ids_BL[np.arange(ids_BL.shape[1]) >= cells.lengths_B[:, None]] = PADDING_ID
        ids_BL[cells.lengths_B == 0, 0] = MISSING_ID
        return ids_BL
