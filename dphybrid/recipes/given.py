"""Data that a recipe's `rows` returns as arrays, a DataFrame or a map-style Dataset: the source from which it
becomes a prepared folder like any other."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dphybrid.data.batches import Array
from dphybrid.data.store import PARTS, Content, Progress, Source
from dphybrid.data.vocabulary import Vocabulary, write_vocabularies
from dphybrid.util.errors import UserError, counted, type_text

Given = Any
"""A split: a mapping of arrays or tensors with samples on dim 0, a DataFrame (polars, pandas) of numbers, or
a map-style `torch.utils.data.Dataset` whose samples are dicts, or tuples (input, label), of tensors, arrays
or numbers."""

_TUPLE_NAMES = ("inputs_B", "labels_B")
"""Names in the batch of the two elements of a Dataset's tuples."""


@dataclass(frozen=True)
class GivenSource(Source):
    """The source made of what a recipe's `rows` returns. name: of the recipe."""

    name: str
    rows: Callable[[Any, int], Any]
    data: Any
    seed: int

    @property
    def options(self) -> dict[str, object]:
        return dict(self.data.model_dump(mode="json"))

    @cached_property
    def _given(self) -> tuple[dict[str, dict[str, Array]], Mapping[str, Vocabulary]]:
        """The arrays of each part that rows() returned, and its vocabularies, {} if it returned none. Raises
        UserError for anything else, and for parts of other names or shapes."""
        # Called once: `rows` may draw random numbers, and the digest must be that of the saved arrays.
        given: Any = self.rows(self.data, self.seed)
        where, splits = f"recipe {self.name}", list(given) if isinstance(given, tuple) else []
        vocabularies: Mapping[str, Vocabulary] = {}
        # A split is a mapping of arrays.
        last = splits[-1] if len(splits) > 2 else None
        if isinstance(last, Mapping) and all(isinstance(value, Vocabulary) for value in last.values()):
            vocabularies = splits.pop()
        if len(splits) not in (2, 3):
            raise UserError(
                f"{where}: rows() returned {type_text(given)}; return (training split, validation split), "
                "then the test split and the vocabularies by name, if there are any"
            )
        parts = {
            part: as_arrays(split, f"{where}, {part} split")
            for part, split in zip(PARTS, splits, strict=False)
        }
        shapes = [{name: array.shape[1:] for name, array in arrays.items()} for arrays in parts.values()]
        for part, others in zip(parts, shapes, strict=True):
            if others != shapes[0]:
                found = f"samples have the shapes {shapes[0]} in the train split and {others} in {part}"
                raise UserError(f"{where}: {found}; give both the same names and shapes")
        for name in (*shapes[0], *vocabularies):
            if "/" in name or name in {f"{part}_rows" for part in PARTS}:
                raise UserError(
                    f"{where}: {name!r} cannot be the name of an array or vocabulary, as it also names a "
                    "file; choose another one, without slashes"
                )
        return parts, vocabularies

    def digests(self, progress: Progress) -> list[bytes]:
        # There are no files to digest, so the digest is of the arrays. It decides whether prepared data
        # can be used again.
        progress("read samples", 0, 1)
        parts, vocabularies = self._given
        arrays = [
            hashlib.sha256(f"{name} {array.dtype.str} {array.shape}\0".encode() + array.tobytes()).digest()
            for split in parts.values()
            for name, array in split.items()
        ]
        pages = {name: vocabulary.page() for name, vocabulary in vocabularies.items()}
        return [json.dumps(pages).encode(), *arrays] if pages else arrays

    @property
    def num_test_digests(self) -> int:
        return len(self._given[0].get("test", {}))

    def read(self, progress: Progress, scratch: Path) -> Content:
        parts, vocabularies = self._given
        arrays = {name: np.concatenate([split[name] for split in parts.values()]) for name in parts["train"]}
        rows, start = dict[str, Array](), 0
        for part, split in parts.items():
            stop = start + len(next(iter(split.values())))
            rows[f"{part}_rows"], start = np.arange(start, stop), stop
        counts = ", ".join(
            f"{len(rows[f'{part}_rows']):,} {'samples ' if part == 'train' else ''}{PARTS[part]}"
            for part in parts
        )
        shapes = {name: array.shape[1:] for name, array in arrays.items()}
        shown = ", ".join(f"{name} {shape} {arrays[name].dtype}" for name, shape in shapes.items())
        sizes = {name: len(vocabulary) for name, vocabulary in vocabularies.items()}
        lines = [f"  {self.name}: {counts}: {shown}"]
        lines += [f"  vocabulary {name}: {counted(size, 'row')}" for name, size in sizes.items()]
        # Rows of a table for each array of ids: the largest id in any split decides. A vocabulary of the same
        # name knows better: it also counts the rows of unknown values.
        ids = {n: int(a.max()) + 1 for n, a in arrays.items() if a.dtype.kind in "iu" and a.size}
        info = {"shapes": {name: list(shape) for name, shape in shapes.items()}, "num_ids": ids | sizes}
        save = partial(write_vocabularies, vocabularies)
        return Content(arrays | rows, info, lines, tuple(arrays), save=save)


def as_arrays(given: Given, where: str) -> dict[str, Array]:
    """Return a split as arrays by name, samples on dim 0. where: for messages. Raises UserError for anything
    that is not a split."""
    # polars and pandas frames, without importing either
    if hasattr(given, "columns") and hasattr(given, "shape") and not isinstance(given, Mapping):
        given = {str(name): np.asarray(given[name]) for name in given.columns}
    elif not isinstance(given, Mapping):
        given = _items(given, where)
    arrays: dict[str, Array] = {}
    for name, values in given.items():
        array = values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
        if array.dtype.kind not in "biuf" or array.ndim < 1:
            raise UserError(
                f"{where}: {name!r} is {array.dtype} of {array.ndim} dimensions; give numbers with samples "
                "on dim 0 (recipe ctr reads texts)"
            )
        arrays[str(name)] = np.ascontiguousarray(
            # float64 is mostly numpy's default, and not meant.
            array.astype(np.float32) if array.dtype == np.float64 and _fits_float32(array) else array
        )
    lengths = {name: len(array) for name, array in arrays.items()}
    if not lengths or len(set(lengths.values())) > 1 or not min(lengths.values()):
        raise UserError(f"{where}: {lengths or 'no'} samples; give each array the same number, one or more")
    return arrays


def _fits_float32(array: Array) -> bool:
    """Return whether the differences between numbers survive in float32, unlike those of times in seconds or
    of large whole numbers."""
    known = array[np.isfinite(array)]
    if not known.size or (known == known.flat[0]).all():
        return True
    step = float(np.spacing(np.abs(known).max().astype(np.float32)))
    merges_whole = step > 1.0 and bool((known == np.floor(known)).all())
    return not merges_whole and step < 1e-3 * float(known.std())


def _items(dataset: object, where: str) -> dict[str, Array]:
    """Return the samples of a map-style Dataset as arrays by name."""
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise UserError(f"{where}: is {type_text(dataset)}; give arrays, a DataFrame or a map-style Dataset")
    columns: dict[str, list[Any]] = {}
    for number in range(len(dataset)):
        sample = dataset[number]
        if isinstance(sample, tuple | list):
            sample = dict(zip(_TUPLE_NAMES, sample, strict=len(sample) == len(_TUPLE_NAMES)))
        if not isinstance(sample, Mapping):
            raise UserError(f"{where}: sample {number} is {type_text(sample)}; give dicts or (input, label)")
        for name, value in sample.items():
            columns.setdefault(str(name), []).append(np.asarray(value))
    try:
        return {name: np.stack(values) for name, values in columns.items()}
    except ValueError as error:
        raise UserError(f"{where}: its samples have different shapes ({error}); pad them to one") from error
