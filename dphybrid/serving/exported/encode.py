"""From the cells of a table to the arrays that the model takes, as in its training.

Letters: B rows, L items of a bag.
"""

import itertools
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from polars.selectors import by_name

MISSING_ID, UNKNOWN_ID, FIRST_ID, PADDING_ID = 0, 1, 2, -1
MOST = 100.0  # standard deviations at which a number is cut off
WORD = r"\w+(?:['’]\w+)*"
CLOCK = r"(:\d{2})(?:\.\d+)?\s*(?:Z|[+-]\d{2}:?\d{2})?$"
GROUPS = (("numeric", "time"), ("categorical",), ("bag", "text"))  # in the order of the arrays' columns

Column = dict[str, Any]


def number_of(cell: pl.Expr, is_text: bool, point: str, group: str) -> pl.Expr:
    """Return a finite number; None for any other text."""
    if is_text and (point, group) != (".", ""):
        whole = rf"(?:\d{{1,3}}(?:{re.escape(group)}\d{{3}})+|\d+)" if group else r"\d+"
        form = rf"^[+-]?(?:{whole}(?:{re.escape(point)}\d*)?|{re.escape(point)}\d+)(?:[eE][+-]?\d+)?$"
        plain = cell.str.replace_all(group, "", literal=True) if group else cell
        cell = pl.when(cell.str.contains(form)).then(plain.str.replace_all(point, ".", literal=True))
    number = cell.cast(pl.Float64, strict=False)
    return pl.when(number.is_finite()).then(number)


def time_of(cell: pl.Expr, day_first: bool) -> list[pl.Expr]:
    """Return hour, weekday (1: Monday) and days since 1970 of a date, with or without a time of the day."""
    words = cell.cast(pl.String).str.replace("T", " ", literal=True).str.replace(CLOCK, "$1")
    forms = ("%Y-%m-%d", "%Y/%m/%d", "%Y%m%d", "%d.%m.%Y", "%d/%m/%Y" if day_first else "%m/%d/%Y")
    date = pl.coalesce(words.str.extract(r"^(\S+)").str.to_date(form, strict=False) for form in forms)
    clock = words.str.extract(r"^\S+ (.+)$").fill_null("00:00:00").str.replace(r"^(\d{1,2}:\d{2})$", "$1:00")
    stamp = date.dt.combine(clock.str.to_time("%H:%M:%S", strict=False))
    return [part.cast(pl.Float64) for part in (stamp.dt.hour(), stamp.dt.weekday(), stamp.dt.epoch("d"))]


def items_of(cell: pl.Expr, is_list: bool, column: Column) -> pl.Expr:
    """Return the items of a bag, or the words of a text, as a list."""
    if column["role"] == "text":
        return cell.cast(pl.String).str.to_lowercase().str.extract_all(WORD).list.head(column["max_items"])
    items = cell if is_list else cell.cast(pl.String).str.split(column["separator"])
    item = pl.element().str.strip_chars()
    return items.cast(pl.List(pl.String)).list.eval(item.filter(item != "")).list.head(column["max_items"])


def scaled(numbers_B: np.ndarray, scale: Column) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the network's inputs and, where there are buckets, the numbers' bucket. nan: no value."""
    none_B = np.isnan(numbers_B)
    by_size_B = np.sign(numbers_B) * np.log1p(np.abs(numbers_B)) if scale["log"] else numbers_B
    with np.errstate(over="ignore"):
        far_B = (by_size_B - scale["mean"]) / scale["std"]
    dense = [np.where(none_B, 0.0, np.clip(far_B, -MOST, MOST)), *([none_B] if scale["indicator"] else [])]
    if scale["edges"] is None:
        return dense, []
    return dense, [np.where(none_B, 0, 1 + np.searchsorted(scale["edges"], numbers_B, side="right"))]


class Encoder:
    """folder: the page of the columns, and their values by id."""

    def __init__(self, folder: Path) -> None:
        page = json.loads((folder / "encoder.json").read_text(encoding="utf-8"))
        texts = iter(pl.read_parquet(folder / "vocabularies.parquet")["values"])
        for column in page["columns"]:
            if column["role"] in ("categorical", "bag", "text"):
                known = {text: number for number, text in enumerate(next(texts), FIRST_ID)}
                column |= {"known": {None: MISSING_ID, **known}, "first": FIRST_ID + len(known)}
        self.columns = [c for group in GROUPS for c in page["columns"] if c["role"] in group]
        self.no_value: list[str] = page["no_value"]

    def encode(self, rows: Any) -> dict[str, np.ndarray]:
        """Return the arrays of rows. Raises ValueError for a missing column, by its name."""
        frame = rows if isinstance(rows, pl.DataFrame) else pl.DataFrame(rows, strict=False)
        names = [column["name"] for column in self.columns]
        if missing := [name for name in names if name not in frame.columns]:
            raise ValueError(f"the rows: have no column {missing[0]!r}; columns: {', '.join(frame.columns)}")
        cells = frame.select(by_name(*names))
        cells.columns = [str(place) for place in range(len(names))]
        reads = (self._read(pl.col(str(n)), cells.dtypes[n], c) for n, c in enumerate(self.columns))
        parts = [part.alias(str(number)) for number, part in enumerate(itertools.chain(*reads))]
        return self._arrays(iter(cells.select(parts)), len(cells))

    def _read(self, cell: pl.Expr, dtype: pl.DataType, column: Column) -> list[pl.Expr]:
        is_list, is_text = dtype == pl.List, not dtype.is_numeric() and dtype != pl.List
        if is_text:
            text = cell.cast(pl.String).str.strip_chars()
            cell = pl.when(~text.is_in(self.no_value)).then(text)
        match column["role"]:
            case "numeric":
                return [number_of(cell, is_text, column["decimal"], column["thousands"])]
            case "time":
                return time_of(cell, column["dayfirst"])
            case "categorical":
                text = cell.cast(pl.String)
                return [text.str.to_lowercase() if column["ignore_case"] else text]
        return [items_of(cell, is_list, column)]

    def _arrays(self, values: Iterator[pl.Series], num_rows: int) -> dict[str, np.ndarray]:
        dense: list[np.ndarray] = []
        ids: list[np.ndarray] = []
        bags: list[list[list[int]]] = []
        for column in self.columns:
            if column["role"] in ("numeric", "time"):
                for part in column["learned"] if column["role"] == "time" else [column]:
                    inputs, buckets = scaled(next(values).to_numpy(), part["learned"])
                    dense, ids = dense + inputs, ids + buckets
            elif column["role"] == "categorical":
                ids.append(np.array(ids_of(next(values).to_list(), column), np.int64))
            else:
                bags.append([ids_of(items or [None], column) for items in next(values).to_list()])
        arrays = {
            "ids_BF": np.stack(ids, 1) if ids else np.zeros((num_rows, 0), np.int64),
            "dense_BN": np.array(dense, np.float32).reshape(len(dense), num_rows).T.copy(),
        }
        if bags:
            # the programs are traced for two items and more; a bag's padding adds zeros
            longest = max([2, *(len(items) for bag in bags for items in bag)])
            pad = [[[*items, *[PADDING_ID] * (longest - len(items))] for items in bag] for bag in bags]
            arrays["bags_BFL"] = np.array(pad, np.int64).reshape(len(bags), num_rows, longest).swapaxes(0, 1)
        return arrays


def ids_of(texts: Iterable[str | None], column: Column) -> list[int]:
    """Return the id of each text (None: no value)."""
    known, buckets, first = column["known"], column["hash_buckets"], column["first"]
    if not buckets:
        return [known.get(text, UNKNOWN_ID) for text in texts]
    return [known[t] if t in known else first + zlib.crc32(str(t).encode()) % buckets for t in texts]
