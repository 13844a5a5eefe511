"""Tables of clicks: a CSV, TSV or Parquet file with a binary label, categorical and numeric columns.

Roles are inferred, printed with a reason where it is not plain, and overridden by data.numeric, data.categorical and data.ignore:

- numeric: every value present is a number. A code with few values stays numeric on purpose: its buckets give each frequent value its own row;
- categorical: some value is no number; or numbers that are names: written with a leading zero (007), beyond 2^53, or whole numbers in a
  column whose name ends in id, code, zip, ... (user_id, itemId);
- ignore: a row number (whole numbers that grow by one from row to row, hardly any left out), as data frames write it; or no value at all.
"""

import difflib
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from dphybrid.config import DataConfig
from dphybrid.data.batches import Array
from dphybrid.data.encode import FIRST_ID, Numbers, encode_categories, encode_numeric
from dphybrid.data.rows import Rows, check_rejected, is_number, read_rows
from dphybrid.data.store import Content, Progress, source_digests
from dphybrid.errors import UserError

POSITIVE = ("1", "true", "yes", "y", "t", "positive", "click", "clicked")
"""Label values that mean 1 although they would sort first."""
FEW_OTHERS = 0.05
"""Share of values that are no numbers up to which a person is told which one made the column categorical."""
ROW_NUMBERS = 20
"""Rows from which on a column that counts them is taken for a row number."""
ROW_GAPS = 0.05
"""Share of numbers that may be left out between row numbers: rows that were filtered out or rejected."""

_NAMES_AN_ID = re.compile(r"(?:^|[\W_])(?:ids?|uid|uuid|guid|code|zip|zipcode|postcode)$", re.IGNORECASE)
_CAMEL_ID = re.compile(r"[a-z0-9](?:Id|ID|Code)$")


@dataclass(frozen=True)
class Column:
    """A column and what it is used as. reason: why, where it is not plain; samples: a few values for people."""

    name: str
    role: str
    reason: str
    samples: tuple[str, ...]


@dataclass(frozen=True)
class TableSource:
    """One file of rows."""

    data: DataConfig
    seed: int
    file: Path

    @property
    def options(self) -> dict[str, Any]:
        return self.data.model_dump(mode="json", exclude={"path", "window"})

    @property
    def files(self) -> tuple[Path, ...]:
        return (self.file,)

    def digests(self, progress: Progress) -> list[bytes]:
        return source_digests(self.files, progress)

    def read(self, progress: Progress) -> Content:
        progress("read rows", 0, 1)
        rows = read_rows(self.file, self.data)
        label = self._find(rows, self.data.label or "", "data.label")
        rows = self._with_label(rows, label)
        labels_B, classes = self._labels(rows.column(label), label)
        columns = self._roles(rows, label)
        parts = dict(zip(("train_rows", "valid_rows"), self._split(len(rows)), strict=True))
        arrays, info, statistics, vocabularies = self._encode(rows, columns, parts["train_rows"], progress)
        batch_arrays = arrays | {"labels_B": labels_B}
        extra = {
            "label": label,
            "classes": classes,
            "vocabularies": vocabularies,
            "numeric": statistics,
            "columns": [column.__dict__ for column in columns],
        }
        text = self._description(columns, label, classes, info, labels_B, parts, len(rows.rejected))
        return Content("arrays", batch_arrays | parts, info, text, tuple(batch_arrays), extra, rows.rejected)

    def _with_label(self, rows: Rows, label: str) -> Rows:
        """Reject the rows without a label."""
        labelled_B = rows.column(label).is_not_null()
        without = rows.lines[~labelled_B.to_numpy()].tolist()
        rejected = [*rows.rejected, *({"file": str(self.file), "line": line, "reason": "no label"} for line in without)]
        rejected.sort(key=lambda row: row["line"])
        check_rejected(self.file, rejected, len(rows) + len(rows.rejected), self.data.max_rejected)
        return replace(rows, values=rows.values.filter(labelled_B), lines=rows.lines[labelled_B.to_numpy()], rejected=rejected)

    def _encode(
        self, rows: Rows, columns: list[Column], train_rows: Array, progress: Progress
    ) -> tuple[dict[str, Array], dict[str, Any], dict[str, Any], dict[str, list[str]]]:
        """Return (ids_BF and dense_BN, info for models, statistics of numeric columns, vocabularies). Bucket ids come first."""
        numbers: dict[str, Numbers] = {}
        vocabularies: dict[str, list[str]] = {}
        bucket_ids: list[Array] = []
        category_ids: list[Array] = []
        for done, column in enumerate(columns):
            progress("encode columns", done, len(columns))
            if column.role == "numeric":
                encoded = numbers[column.name] = encode_numeric(rows.column(column.name), train_rows, self.data.buckets)
                bucket_ids += [encoded.buckets] if encoded.buckets is not None else []
            elif column.role == "categorical":
                ids_B, vocabularies[column.name] = encode_categories(rows.column(column.name), train_rows, self.data.min_count)
                category_ids.append(ids_B)
        progress("encode columns", len(columns), len(columns))
        id_columns = [
            *({"name": n, "role": "buckets", "num_ids": e.num_buckets} for n, e in numbers.items() if e.buckets is not None),
            *({"name": n, "role": "categorical", "num_ids": FIRST_ID + len(v)} for n, v in vocabularies.items()),
        ]
        if not id_columns:
            raise UserError(
                f"data.path={self.file}: no column is left to look up; ignore fewer columns or set data.buckets above 0"
            )
        dense = [part for e in numbers.values() for part in e.dense]
        arrays = {
            "ids_BF": np.stack(bucket_ids + category_ids, axis=1),
            "dense_BN": np.stack(dense, axis=1).astype(np.float32) if dense else np.zeros((len(rows), 0), np.float32),
        }
        num_ids = [column["num_ids"] for column in id_columns]
        info = {"task": "binary", "columns": id_columns, "num_ids": num_ids, "num_dense": len(dense)}
        return arrays, info, {name: e.facts for name, e in numbers.items()}, vocabularies

    def _find(self, rows: Rows, name: str, place: str) -> str:
        """Return the column of a name or a position."""
        columns = rows.names
        if name in columns:
            return name
        if name.isascii() and name.isdigit() and int(name) < len(columns):
            return columns[int(name)]
        listed = ", ".join(columns)
        if not name:
            raise UserError(f"{place} is not set; name the column with the answer, one of: {listed}")
        close = difflib.get_close_matches(name, columns, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        if not rows.header:
            hint += "its first line was read as values (data.header=yes reads it as names), so "
        raise UserError(f"{place}={name!r}: {self.file} has no such column; {hint}columns: {listed}")

    def _labels(self, values: pl.Series, label: str) -> tuple[Array, list[str]]:
        """Return labels (B,) of 0 and 1, and the two values: numbers by size, else by text, the positive one last."""
        found = values.unique().to_list()
        found.sort(key=lambda v: (is_number(v), float(v) if is_number(v) else 0.0, v))
        if len(found) != 2:
            shown = ", ".join(repr(v) for v in found[:6]) + (", ..." if len(found) > 6 else "")
            raise UserError(
                f"data.label={self.data.label}: needs two different values, column {label!r} has {len(found)}: {shown} ({self.file}); "
                "name another column, or make the label two-valued"
            )
        if found[0].lower() in POSITIVE:
            found.reverse()
        return (values == found[1]).to_numpy().astype(np.float32), found

    def _roles(self, rows: Rows, label: str) -> list[Column]:
        given: dict[str, str] = {}
        for role, names in (("numeric", self.data.numeric), ("categorical", self.data.categorical), ("ignore", self.data.ignore)):
            for name in names:
                found = self._find(rows, name, f"data.{role}")
                if found in given or found == label:
                    other = "label" if found == label else given[found]
                    raise UserError(f"data.{role}={name!r}: this column is already named as {other}; name it once")
                given[found] = role
        columns = []
        for name in rows.names:
            if name == label:
                continue
            present = rows.column(name).drop_nulls()
            if given.get(name) == "numeric":
                self._check_numeric(rows, name)
            role, reason = (given[name], "as given") if name in given else inferred_role(name, present, len(rows))
            columns.append(Column(name, role, reason, tuple(present.unique(maintain_order=True)[:3].to_list())))
        return columns

    def _check_numeric(self, rows: Rows, name: str) -> None:
        values = rows.column(name)
        wrong_B = (values.is_not_null() & ~_finite(values)).to_numpy()
        if wrong_B.any():
            row = int(np.argmax(wrong_B))
            raise UserError(
                f"data.numeric: column {name!r} holds {values[row]!r} in {rows.place} {rows.lines[row]} of {self.file}; "
                f"mend it, list it in data.missing, or name the column in data.categorical"
            )

    def _split(self, num_rows: int) -> tuple[Array, Array]:
        order = np.random.default_rng(self.seed).permutation(num_rows)
        held = min(max(1, round(num_rows * self.data.valid_fraction)), num_rows - 1)
        return np.sort(order[held:]), np.sort(order[:held])

    def _description(
        self,
        columns: list[Column],
        label: str,
        classes: list[str],
        info: dict[str, Any],
        labels_B: Array,
        parts: dict[str, Array],
        num_rejected: int,
    ) -> list[str]:
        num_ids = {column["name"]: column["num_ids"] for column in info["columns"]}
        wide = max(len("column"), *(len(column.name) for column in columns))
        lines = [f"  {self.file}: {len(labels_B):,} rows, label {label!r}: {classes[1]!r} is 1, {classes[0]!r} is 0"]
        lines += [f"  {'column':<{wide}}  role            ids  values such as"]
        for column in columns:
            samples = ", ".join(text if len(text) <= 24 else text[:21] + "..." for text in column.samples)
            reason = f"  ({column.reason})" if column.reason else ""
            lines.append(f"  {column.name:<{wide}}  {column.role:<11} {num_ids.get(column.name, 0):>7,}  {samples}{reason}")
        rates = {name: float(labels_B[rows].mean()) for name, rows in parts.items()}
        lines.append(
            f"  {len(parts['train_rows']):,} rows to train ({rates['train_rows']:.1%} of them 1), "
            f"{len(parts['valid_rows']):,} held out ({rates['valid_rows']:.1%}), {sum(info['num_ids']):,} table rows"
        )
        lines.append(
            "  Other roles: --data.numeric, --data.categorical, --data.ignore with column names; without a header columns are named 0, 1, ..."
        )
        if num_rejected:
            lines.append(f"  {num_rejected} rows rejected: rejected.jsonl in the prepared folder says which and why")
        return lines


def inferred_role(name: str, present: pl.Series, num_rows: int) -> tuple[str, str]:
    """Return (role, reason where it is not plain) of a column with the given values present, by the rules at the top of this file."""
    if not len(present):
        return "ignore", "no values"
    others = present.filter(~_finite(present))
    if len(others):
        few = len(others) <= FEW_OTHERS * len(present)
        return "categorical", f"{others[0]!r} is no number; data.missing can name it" if few else ""
    if present.str.contains(r"^-?0\d").any():
        return "categorical", "leading zeros"
    whole = present.cast(pl.Int64, strict=False)
    if whole.is_null().any():
        large = present.str.contains(r"^-?\d{17,}$").any()
        return ("categorical", "whole numbers beyond 2^53") if large else ("numeric", "")
    grows = len(present) == num_rows >= ROW_NUMBERS and (whole.diff().drop_nulls() > 0).all()
    if grows and int(whole[-1]) - int(whole[0]) < (1 + ROW_GAPS) * num_rows:
        return "ignore", "a row number"
    if whole.abs().max() > 2**53:  # type: ignore[operator]
        return "categorical", "whole numbers beyond 2^53"
    if _NAMES_AN_ID.search(name) or _CAMEL_ID.search(name):
        return "categorical", "named like an id"
    return "numeric", ""


def _finite(values: pl.Series) -> pl.Series:
    """Tell which values are finite numbers (none: False)."""
    return values.cast(pl.Float64, strict=False).is_finite().fill_null(False)


def open_source(data: DataConfig, seed: int) -> TableSource:
    """Find the file. Raises UserError for a missing path or an empty file."""
    if data.path is None:
        raise UserError(
            "data.path is not set; recipe ctr needs a CSV, TSV or Parquet file: --data.path clicks.csv --data.label clicked"
        )
    file = Path(data.path).expanduser()
    if not file.is_file():
        what = "is a folder; name one file" if file.is_dir() else "there is no such file"
        raise UserError(f"data.path={data.path}: {what}")
    if not file.stat().st_size:
        raise UserError(f"data.path={data.path}: is empty; give a file with rows")
    return TableSource(data, seed, file)
