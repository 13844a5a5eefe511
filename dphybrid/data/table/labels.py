"""The task of a label column, inferred from its values or set by `data.task`:

- binary: two values;
- multiclass: three or more texts, or 3 to 20 different whole numbers from -99 to 99;
- regression: other numbers.

Letters: B rows."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

import numpy as np
import polars as pl

from dphybrid.config import Section
from dphybrid.config.tables import TableDataConfig
from dphybrid.data.batches import Array
from dphybrid.data.table.cells import read_numbers
from dphybrid.data.table.column import Column, Sample
from dphybrid.data.table.kinds import Category, Numeric
from dphybrid.data.table.numbers import FEW_OTHERS, flag_of, is_number, mean_and_std
from dphybrid.util.errors import UserError

_TaskName = Literal["binary", "multiclass", "regression"]

_POSITIVE = ("1", "true", "yes", "y", "t", "positive", "click", "clicked")
"""Label values that are the positive class even if they sort first."""
_MAX_CLASSES = 1000
_FEW_NUMBERS = 20
"""Maximum number of different whole numbers that are taken for classes."""
_SMALL_NUMBER = 99
"""Largest absolute value of whole numbers that are taken for classes."""


class Label(Section):
    """A kind of label.

    Attributes:
        name: The column's.
        classes: Texts in the order of their numbers, the positive one of two last; empty for numbers.
        offset, scale: Models learn (number - offset) / scale.
    """

    task: ClassVar[_TaskName]
    name: str = ""
    classes: tuple[str, ...] = ()
    offset: float = 0.0
    scale: float = 1.0

    @property
    def columns(self) -> dict[str, str]:
        """The columns of a prediction, with numpy's names of their types."""
        return {"prediction": "float64"}

    def text(self) -> str:
        """Return a short text that names what is predicted."""
        return f"{self.name} ({self.task})"

    @abstractmethod
    def summary(self) -> str:
        """Return how the label was read, for the summary of a table."""

    def fitted(self, train_B: Array, weights_B: Array | None) -> Self:
        """Return the label with the offset and scale of the training rows."""
        return self

    def encoded(self, values_B: Array) -> Array:
        """Return the targets (B,) float32 of models. values_B: numbers, or class numbers."""
        return ((values_B - self.offset) / self.scale).astype(np.float32)

    def facts(self) -> dict[str, object]:
        """Return the label in the form of JSON, for the facts about prepared data."""
        return {"label": {"task": self.task, **self.model_dump(mode="json")}}

    @staticmethod
    def of(facts: Mapping[str, Any]) -> "Label":
        """Return the label from the facts about prepared data; a binary label if they have none."""
        page = dict(facts.get("label", {}))
        return _LABELS[page.pop("task", "binary")](**page)


class _Binary(Label):
    """One of two values; models predict the probability of the second one."""

    task = "binary"

    @property
    def columns(self) -> dict[str, str]:
        return {"probability": "float32"}

    def text(self) -> str:
        return f"{self.name}={self.classes[1]}"

    def summary(self) -> str:
        return f"{self.classes[1]!r} is 1, {self.classes[0]!r} is 0"


class _Multiclass(Label):
    """One of several values; models predict the probability of each."""

    task = "multiclass"

    @property
    def columns(self) -> dict[str, str]:
        return {"prediction": "str", **{f"probability_{name}": "float32" for name in self.classes}}

    def text(self) -> str:
        return f"{self.name} ({len(self.classes)} classes)"

    def summary(self) -> str:
        shown = ", ".join(map(repr, self.classes[:8])) + ", ..." * (len(self.classes) > 8)
        return f"{len(self.classes)} classes, {shown}"


class _Regression(Label):
    """A number, standardized with the mean and deviation of the training rows."""

    task = "regression"

    def summary(self) -> str:
        return f"mean {self.offset:.6g}, standard deviation {self.scale:.6g} in training"

    def fitted(self, train_B: Array, weights_B: Array | None) -> Self:
        mean, std = mean_and_std(train_B, weights_B)
        return self.model_copy(update={"offset": mean, "scale": std})


_LABELS: dict[str, type[Label]] = {kind.task: kind for kind in (_Binary, _Multiclass, _Regression)}


def label_column(sample: Sample, data: TableDataConfig) -> Column:
    """Return how the cells of a label are read, inferred from the first ones: as numbers, or as names of
    classes. Raises UserError for numbers with a few texts among them."""
    numeric = Numeric(name=sample.name, **Numeric.inferred(sample))
    category = Category(name=sample.name, **Category.inferred(sample))
    if data.task != "auto":
        return numeric if data.task == "regression" else category
    # Many different numbers are values to predict, not classes. A few texts among them are probably mistakes,
    # but only the user knows.
    numbers = numeric.read(sample.cells)
    others = sample.cells.filter(numeric.wrong(sample.cells, numbers))
    if len(others) > FEW_OTHERS * len(numbers) or not _too_many_for_classes(numbers.drop_nulls()):
        return category
    if len(others):
        raise UserError(
            f"data.label={data.label}: column {sample.name!r} holds {others[0]!r} among numbers; correct it, "
            "list it in data.missing (which leaves its rows out), or give data.task=multiclass"
        )
    return numeric


def _too_many_for_classes(numbers: pl.Series) -> bool:
    """Return whether numbers are too many, too large or too fine to be names of classes."""
    if numbers.n_unique() <= 2:
        return False
    odd = (numbers.floor() != numbers) | (numbers.abs() > _SMALL_NUMBER)
    return numbers.n_unique() > _FEW_NUMBERS or bool(odd.any())


def label_of_numbers(name: str, numbers_B: Array, data: TableDataConfig) -> Label:
    """Return the label for a column of numbers. Raises UserError if all numbers are equal."""
    if len(numbers_B) and numbers_B.min() == numbers_B.max():
        _check_values(name, [f"{numbers_B[0]:g}"], data)
    return _Regression(name=name)


def label_of_texts(column: Category, values: list[str], data: TableDataConfig) -> tuple[Label, Column, Array]:
    """Return the label for a column of distinct texts, how its cells are read from now on, and the class
    number (or the number) of each text.

    Raises UserError if `data.task` does not fit the values, or if there are fewer than two.
    """
    name = column.name
    # Looked at again, now that all values are known: the first rows may have held only a few numbers, or only
    # 0 and 1 where others have yes and no.
    forms = pl.Series(values, dtype=pl.String)
    if flag := flag_of(forms):
        words = "0/1" if {"0", "1"} <= {*values} else flag
        column = column.model_copy(update={"type": words})
        forms = column.read(forms)
        values = forms.unique().to_list()
    _check_values(name, values, data)
    numbers = read_numbers(forms)
    if data.task == "auto" and not numbers.null_count() and _too_many_for_classes(numbers):
        numeric = Numeric(name=name, **column.model_dump(include={"decimal", "thousands", "marks"}))
        return _Regression(name=name), numeric, numbers.to_numpy()
    if len(values) > _MAX_CLASSES:
        raise UserError(
            f"data.label={data.label}: column {name!r} has {len(values):,} different values, such as "
            f"{_shown(values)}, but at most {_MAX_CLASSES:,} classes are supported ({data.path}); name "
            "another column, or merge rare values"
        )
    # Texts first, then numbers by size, so that 2 comes before 10.
    classes = sorted(values, key=lambda v: (is_number(v), float(v) if is_number(v) else 0.0, v))
    two = len(classes) == 2 and data.task != "multiclass"
    if two and classes[0].lower() in _POSITIVE:
        classes.reverse()
    number = {value: float(position) for position, value in enumerate(classes)}
    label = (_Binary if two else _Multiclass)(name=name, classes=tuple(classes))
    return label, column, np.array([number[form] for form in forms])


def _check_values(name: str, values: list[str], data: TableDataConfig) -> None:
    if len(values) < 2 or (data.task == "binary" and len(values) != 2):
        other = "" if len(values) < 2 else ", or give another data.task"
        raise UserError(
            f"data.label={data.label}: needs two different values, but column {name!r} has "
            f"{len(values):,}: {_shown(values)} ({data.path}); name another column{other}"
        )


def _shown(values: list[str]) -> str:
    return ", ".join(repr(value) for value in sorted(values)[:6]) + (", ..." if len(values) > 6 else "")
