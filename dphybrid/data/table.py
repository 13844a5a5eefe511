"""Tables of clicks: a CSV, TSV or Parquet file with a binary label, categorical and numeric columns.

Roles are inferred and printed: a column is numeric when every value present is a number and none is written with a leading zero (007),
else categorical; integer codes need to be named in `data.categorical`. All statistics and vocabularies come from the training part.
Ids of a column: 0 = no value, 1 = unknown value, from 2 on the values, most frequent first; buckets: 0 = no value, then by size.
"""

import csv
import difflib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from dphybrid.config import DataConfig
from dphybrid.data.batches import Array
from dphybrid.data.store import Content, source_digests
from dphybrid.errors import UserError

MISSING_ID, UNKNOWN_ID, FIRST_ID = 0, 1, 2
_POSITIVE = ("1", "true", "yes", "y", "t", "positive", "click", "clicked")


@dataclass(frozen=True)
class Column:
    """A column and what it is used as. samples: a few values for people."""

    name: str
    role: str
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

    def digests(self) -> list[bytes]:
        return source_digests([self.file])

    def read(self) -> Content:
        frame, lines, rejected = self._frame()
        label = self._find(frame, self.data.label or "", "data.label")
        frame = frame.with_columns(
            pl.when(pl.col(c).is_in(list(self.data.missing))).then(None).otherwise(pl.col(c)).alias(c) for c in frame.columns
        )
        labelled = frame[label].is_not_null().to_numpy()
        rejected += [{"file": str(self.file), "line": lines[i], "reason": "no label"} for i in np.flatnonzero(~labelled).tolist()]
        self._check_rejected(rejected, len(frame) + len(rejected))
        frame, lines = frame.filter(pl.Series(labelled)), [line for line, good in zip(lines, labelled, strict=True) if good]
        labels_B, classes = self._labels(frame[label])
        columns = self._roles(frame, label, lines)
        train_rows, valid_rows = self._split(len(frame))
        encoded = [_encode_numeric(frame[c.name], train_rows, self.data) for c in columns if c.role == "numeric"]
        dense = [part for e in encoded for part in e.dense]
        ids, sizes, id_columns = [], [], []
        for column, numbers in zip([c for c in columns if c.role == "numeric"], encoded, strict=True):
            if numbers.buckets is not None:
                ids.append(numbers.buckets)
                sizes.append(numbers.num_buckets)
                id_columns.append({"name": column.name, "role": "buckets", "num_ids": numbers.num_buckets})
        vocabularies: dict[str, list[str]] = {}
        for column in (c for c in columns if c.role == "categorical"):
            codes, vocabulary = _encode_categories(frame[column.name], train_rows, self.data.min_count)
            vocabularies[column.name] = vocabulary
            ids.append(codes)
            sizes.append(FIRST_ID + len(vocabulary))
            id_columns.append({"name": column.name, "role": "categorical", "num_ids": sizes[-1]})
        if not ids:
            raise UserError(
                f"data.path={self.file}: no column is left to look up; ignore fewer columns or set data.buckets above 0"
            )
        rows = len(frame)
        arrays = {
            "ids_BF": np.stack(ids, axis=1),
            "dense_BN": np.stack(dense, axis=1).astype(np.float32) if dense else np.zeros((rows, 0), np.float32),
            "labels_B": labels_B,
        }
        info = {"task": "binary", "columns": id_columns, "num_ids": sizes, "num_dense": len(dense)}
        statistics = {c.name: e.facts for c, e in zip([c for c in columns if c.role == "numeric"], encoded, strict=True)}
        extra = {
            "classes": classes,
            "vocabularies": vocabularies,
            "numeric": statistics,
            "columns": [c.__dict__ for c in columns],
        }
        parts = {"train_rows": train_rows, "valid_rows": valid_rows}
        text = self._description(columns, label, classes, sizes, id_columns, labels_B, parts, len(rejected))
        return Content("arrays", arrays | parts, info, text, tuple(arrays), extra, rejected)

    def _frame(self) -> tuple[pl.DataFrame, list[int], list[dict[str, Any]]]:
        """Return all values as stripped text (None: empty), the line of each row, and the rows that do not fit."""
        if self.file.suffix.lower() in (".parquet", ".pq"):
            try:
                frame = pl.read_parquet(self.file)
            except (pl.exceptions.PolarsError, OSError) as error:
                raise UserError(f"data.path={self.file}: cannot be read as Parquet: {error}") from error
            lines = list(range(1, len(frame) + 1))
            rejected: list[dict[str, Any]] = []
        else:
            frame, lines, rejected = self._csv()
        frame = frame.with_columns(pl.all().cast(pl.String).str.strip_chars())
        frame = frame.with_columns(pl.when(pl.col(c) == "").then(None).otherwise(pl.col(c)).alias(c) for c in frame.columns)
        if len(frame) < 2:
            raise UserError(f"data.path={self.file}: has {len(frame)} rows; at least 2 are needed, one of them held out")
        return frame, lines, rejected

    def _csv(self) -> tuple[pl.DataFrame, list[int], list[dict[str, Any]]]:
        try:
            all_lines = self.file.read_text(encoding="utf-8-sig").splitlines()
        except UnicodeDecodeError as error:
            raise UserError(
                f"data.path={self.file}: is no UTF-8 text (byte {error.start}); save it as UTF-8, or give a Parquet file"
            ) from error
        numbered = [(number, line) for number, line in enumerate(all_lines, start=1) if line.strip()]
        if not numbered:
            raise UserError(f"data.path={self.file}: is empty; give a file with rows")
        separator = self._separator([line for _, line in numbered[:50]])
        head = next(csv.reader([numbered[0][1]], delimiter=separator))
        has_header = self._has_header(head, [next(csv.reader([line], delimiter=separator)) for _, line in numbered[1:20]])
        names = _unique([name.strip() for name in head]) if has_header else [str(i) for i in range(len(head))]
        body = numbered[1:] if has_header else numbered
        good: list[tuple[int, str]] = []
        rejected: list[dict[str, Any]] = []
        for number, line in body:
            found = len(next(csv.reader([line], delimiter=separator))) if '"' in line else line.count(separator) + 1
            if found == len(names):
                good.append((number, line))
            else:
                rejected.append(
                    {
                        "file": str(self.file),
                        "line": number,
                        "reason": f"{found} values, expected {len(names)}",
                        "text": line[:500],
                    }
                )
        self._check_rejected(rejected, len(body))
        if not good:
            raise UserError(f"data.path={self.file}: has a header and no rows")
        text = "\n".join(line for _, line in good).encode()
        frame = pl.read_csv(io.BytesIO(text), has_header=False, separator=separator, new_columns=names, infer_schema=False)
        return frame, [number for number, _ in good], rejected

    def _separator(self, lines: Sequence[str]) -> str:
        if self.data.delimiter != "auto":
            wanted = {"tab": "\t", "\\t": "\t"}.get(self.data.delimiter, self.data.delimiter)
            if len(wanted) != 1:
                raise UserError(f"data.delimiter={self.data.delimiter!r}: give one character, or tab")
            return wanted
        try:
            return csv.Sniffer().sniff("\n".join(lines), delimiters=",;\t|").delimiter
        except csv.Error:
            return max(",;\t|", key=lines[0].count)

    def _has_header(self, first: list[str], others: list[list[str]]) -> bool:
        """A first line is a header when none of its values is a number or empty and it names a column whose other values are numbers,
        or when none of its values appears below it."""
        if self.data.header != "auto":
            return self.data.header == "yes"
        cells = [cell.strip() for cell in first]
        if any(cell == "" or _is_number(cell) for cell in cells) or len(set(cells)) < len(cells):
            return False
        below = [{row[i].strip() for row in others if i < len(row)} for i in range(len(cells))]
        numbers_below = any(values and all(_is_number(v) for v in values if v) for values in below)
        return numbers_below or not any(cell in values for cell, values in zip(cells, below, strict=True))

    def _find(self, frame: pl.DataFrame, name: str, place: str) -> str:
        if name in frame.columns:
            return name
        if name.isdigit() and int(name) < len(frame.columns):
            return frame.columns[int(name)]
        listed = ", ".join(frame.columns)
        if not name:
            raise UserError(f"{place} is not set; name the column with the answer, one of: {listed}")
        close = difflib.get_close_matches(name, frame.columns, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise UserError(f"{place}={name!r}: {self.file} has no such column; {hint}columns: {listed}")

    def _check_rejected(self, rejected: list[dict[str, Any]], rows: int) -> None:
        if len(rejected) > self.data.max_rejected * rows:
            first = rejected[0]
            raise UserError(
                f"data.path={self.file}: {len(rejected)} of {rows} rows cannot be read, more than "
                f"data.max_rejected={self.data.max_rejected:g} allows; "
                f"the first is line {first['line']}: {first['reason']}; mend the file, set data.delimiter, or raise data.max_rejected"
            )

    def _labels(self, values: pl.Series) -> tuple[Array, list[str]]:
        counts = values.value_counts(sort=True)
        found = sorted(counts[values.name].to_list(), key=lambda v: (_is_number(v), float(v) if _is_number(v) else 0.0, v))
        if len(found) != 2:
            shown = ", ".join(repr(v) for v in counts[values.name].to_list()[:6]) + (", ..." if len(found) > 6 else "")
            raise UserError(
                f"data.label={self.data.label}: needs two different values, column {values.name!r} has {len(found)}: {shown}"
            )
        if found[0].lower() in _POSITIVE:
            found.reverse()
        return (values == found[1]).to_numpy().astype(np.float32), found

    def _roles(self, frame: pl.DataFrame, label: str, lines: list[int]) -> list[Column]:
        given: dict[str, str] = {}
        for role, names in (("numeric", self.data.numeric), ("categorical", self.data.categorical), ("ignore", self.data.ignore)):
            for name in names:
                found = self._find(frame, name, f"data.{role}")
                if found in given or found == label:
                    other = "label" if found == label else given[found]
                    raise UserError(f"data.{role}={name!r}: this column is already named as {other}; name it once")
                given[found] = role
        columns = []
        for name in frame.columns:
            if name == label:
                continue
            values = frame[name]
            present = values.drop_nulls()
            numbers = present.cast(pl.Float64, strict=False)
            bad = numbers.is_null() | ~numbers.is_finite()
            wanted = given.get(name)
            if wanted == "numeric" and bad.any():
                wrong = present.filter(bad)[0]
                row = int(np.flatnonzero((values == wrong).fill_null(False).to_numpy())[0])
                raise UserError(
                    f"data.numeric: column {name!r} holds {wrong!r} in line {lines[row]} of {self.file}; "
                    f"mend it, list it in data.missing, or name the column in data.categorical"
                )
            padded = bool(present.str.contains(r"^-?0\d").any())
            inferred = "categorical" if bad.any() or padded or not len(present) else "numeric"
            columns.append(Column(name, wanted or inferred, tuple(present.unique(maintain_order=True)[:3].to_list())))
        return columns

    def _split(self, rows: int) -> tuple[Array, Array]:
        order = np.random.default_rng(self.seed).permutation(rows)
        held = min(max(1, round(rows * self.data.valid_fraction)), rows - 1)
        return np.sort(order[held:]), np.sort(order[:held])

    def _description(
        self,
        columns: list[Column],
        label: str,
        classes: list[str],
        sizes: list[int],
        id_columns: list[dict[str, Any]],
        labels_B: Array,
        parts: dict[str, Array],
        num_rejected: int,
    ) -> list[str]:
        num_ids = {column["name"]: column["num_ids"] for column in id_columns}
        wide = max(len(column.name) for column in columns)
        lines = [f"  {self.file}: {len(labels_B):,} rows, label {label!r}: {classes[1]!r} is 1, {classes[0]!r} is 0"]
        lines += [f"  {'column':<{wide}}  role         ids  values such as"]
        for column in columns:
            lines.append(
                f"  {column.name:<{wide}}  {column.role:<11} {num_ids.get(column.name, 0):>4}  {', '.join(column.samples)}"
            )
        rates = {name: float(labels_B[parts[f"{name}_rows"]].mean()) for name in ("train", "valid")}
        lines.append(
            f"  {len(parts['train_rows']):,} rows to train ({rates['train']:.1%} of them 1), "
            f"{len(parts['valid_rows']):,} held out ({rates['valid']:.1%}), {sum(sizes):,} table rows"
        )
        lines.append(
            "  Other roles: --data.numeric, --data.categorical, --data.ignore with column names; without a header columns are named 0, 1, ..."
        )
        if num_rejected:
            lines.append(f"  {num_rejected} rows rejected: rejected.jsonl in the prepared folder says which and why")
        return lines


@dataclass(frozen=True)
class Numbers:
    """A numeric column: dense parts (B,), bucket ids (B,) and the statistics they rest on."""

    dense: list[Array]
    buckets: Array | None
    num_buckets: int
    facts: dict[str, Any]


def _encode_numeric(values: pl.Series, train_rows: Array, data: DataConfig) -> Numbers:
    raw_B = values.cast(pl.Float64).to_numpy().astype(np.float64)
    missing_B = np.isnan(raw_B)
    known = raw_B[train_rows][~missing_B[train_rows]]
    low, middle, high, top = np.quantile(known, [0.05, 0.5, 0.95, 0.999]) if len(known) else (0.0, 0.0, 0.0, 0.0)
    use_log = bool(top - middle > 10 * max(high - low, 1e-12) or (low >= 0 and high > 30 * max(middle, 1e-12)))
    scaled_B = np.sign(raw_B) * np.log1p(np.abs(raw_B)) if use_log else raw_B
    fit = scaled_B[train_rows][~missing_B[train_rows]]
    mean, std = (float(fit.mean()), float(fit.std()) or 1.0) if len(fit) else (0.0, 1.0)
    dense = [np.where(missing_B, 0.0, (scaled_B - mean) / std)]
    if missing_B.any():
        dense.append(missing_B.astype(np.float64))
    buckets, edges = None, np.empty(0)
    if data.buckets and len(known):
        edges = _bucket_edges(known, data.buckets)
        buckets = np.where(
            missing_B, MISSING_ID, 1 + np.searchsorted(edges, np.where(missing_B, 0.0, raw_B), side="right")
        ).astype(np.int64)
    facts = {"log": use_log, "mean": mean, "std": std, "edges": edges.tolist(), "indicator": len(dense) > 1}
    return Numbers(dense, buckets, len(edges) + 2, facts)


def _bucket_edges(known: Array, buckets: int) -> Array:
    """Return at most `buckets` - 1 edges at quantiles. A value that fills whole buckets gets its own, and the rest share the others."""
    shares = np.linspace(0, 1, buckets + 1)[1:-1]
    distinct, counts = np.unique(known, return_counts=True)
    large = distinct[counts * buckets > len(known)]
    rest = known[~np.isin(known, large)]
    if not len(large) or not len(rest):
        return np.unique(np.quantile(known, shares))
    around = np.concatenate([large, np.nextafter(large, np.inf)])
    spare = max(0, buckets - 1 - len(around))
    edges = np.concatenate([around, np.quantile(rest, np.linspace(0, 1, spare + 2)[1:-1])]) if spare else around
    return np.unique(edges)


def _encode_categories(values: pl.Series, train_rows: Array, min_count: int) -> tuple[Array, list[str]]:
    counts = values[train_rows].drop_nulls().value_counts()
    kept = counts.filter(pl.col("count") >= min_count).sort(["count", values.name], descending=[True, False])
    vocabulary = kept[values.name].to_list()
    codes = values.replace_strict(
        vocabulary, list(range(FIRST_ID, FIRST_ID + len(vocabulary))), default=UNKNOWN_ID, return_dtype=pl.Int64
    )
    return np.where(values.is_null().to_numpy(), MISSING_ID, codes.to_numpy()).astype(np.int64), vocabulary


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _unique(names: list[str]) -> list[str]:
    seen: dict[str, int] = {}
    out = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        out.append(name if seen[name] == 1 else f"{name}_{seen[name]}")
    return out


def open_source(data: DataConfig, seed: int) -> TableSource:
    """Find the file. Raises UserError for a missing path or label."""
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
