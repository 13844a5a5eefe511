"""The task of a label column, by its values or by `data.task`:

- binary: two values;
- multiclass: texts, or up to 20 whole numbers below 100 (either sign), three or more;
- regression: other numbers;
- counts: whole numbers from 0 on, when `data.task` says so, never inferred.

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
from dphybrid.data.table.numbers import FEW_OTHERS, is_number, notation_of
from dphybrid.util.errors import UserError

_TaskName = Literal["binary", "multiclass", "regression", "counts"]

_POSITIVE = ("1", "true", "yes", "y", "t", "positive", "click", "clicked")
"""Label values that mean 1 although they would sort first."""
_MAX_CLASSES = 1000
_FEW_NUMBERS = 20
"""Different whole numbers up to which they are taken for classes."""
_SMALL_NUMBER = 99
"""Size up to which whole numbers are taken for classes."""


class Label(Section):
    """A kind of label. name: of its column. classes: texts by number, the positive one of two last; none of
    numbers. offset, scale: models learn (number - offset) / scale."""

    task: ClassVar[_TaskName]
    name: str = ""
    classes: tuple[str, ...] = ()
    offset: float = 0.0
    scale: float = 1.0

    @property
    def columns(self) -> dict[str, str]:
        """What a prediction consists of: names and numpy's types."""
        return {"prediction": "float64"}

    def text(self) -> str:
        """Say what is predicted."""
        return f"{self.name} ({self.task})"

    @abstractmethod
    def told(self) -> str:
        """Say what the label was taken for."""

    def fitted(self, train_B: Array, weights_B: Array | None) -> Self:
        """Return the label with the offset and the scale of its training rows."""
        return self

    def encoded(self, values_B: Array) -> Array:
        """Return what models learn (B,) float32, of numbers, or of numbers of classes."""
        return ((values_B - self.offset) / self.scale).astype(np.float32)

    def facts(self) -> dict[str, object]:
        """Return the label as JSON has it, among the facts about prepared data."""
        return {"label": {"task": self.task, **self.model_dump(mode="json")}}

    @staticmethod
    def of(facts: Mapping[str, Any]) -> "Label":
        """Return the label of facts about prepared data; without one a binary label."""
        page = dict(facts.get("label", {}))
        return _LABELS[page.pop("task", "binary")](**page)


class _Binary(Label):
    """One of two values: the probability of the second one."""

    task = "binary"

    @property
    def columns(self) -> dict[str, str]:
        return {"probability": "float32"}

    def text(self) -> str:
        return f"{self.name}={self.classes[1]}"

    def told(self) -> str:
        return f"{self.classes[1]!r} is 1, {self.classes[0]!r} is 0"


class _Multiclass(Label):
    """One of several values: a probability each."""

    task = "multiclass"

    @property
    def columns(self) -> dict[str, str]:
        return {"prediction": "str", **{f"probability_{name}": "float32" for name in self.classes}}

    def text(self) -> str:
        return f"{self.name} ({len(self.classes)} classes)"

    def told(self) -> str:
        shown = ", ".join(map(repr, self.classes[:8])) + ", ..." * (len(self.classes) > 8)
        return f"{len(self.classes)} classes, {shown}"


class _Regression(Label):
    """A number, standardized by the training rows."""

    task = "regression"

    def told(self) -> str:
        return f"mean {self.offset:.6g}, standard deviation {self.scale:.6g} in training"

    def fitted(self, train_B: Array, weights_B: Array | None) -> Self:
        mean = float(np.average(train_B, weights=weights_B))
        std = float(np.sqrt(np.average((train_B - mean) ** 2, weights=weights_B)))
        # A constant label has no deviation, and nothing to divide by.
        return self.model_copy(update={"offset": mean, "scale": std or 1.0})


class _Counts(Label):
    """A count, divided by the mean of the training rows."""

    task = "counts"

    def told(self) -> str:
        return f"mean {self.scale:.6g} in training"

    def fitted(self, train_B: Array, weights_B: Array | None) -> Self:
        return self.model_copy(update={"scale": float(np.average(train_B, weights=weights_B)) or 1.0})


_LABELS: dict[str, type[Label]] = {kind.task: kind for kind in (_Binary, _Multiclass, _Regression, _Counts)}


def label_column(sample: Sample) -> Column:
    """Return how the cells of a label are read, by the first ones: as numbers, or as the names of classes.
    Raises UserError for numbers with a few texts among them."""
    data, numeric = sample.data, Numeric(name=sample.name, **Numeric.told(sample))
    category = Category(name=sample.name, **Category.told(sample))
    if data.task != "auto":
        return numeric if data.task in ("regression", "counts") else category
    # A label of many different numbers is one to predict; a few texts among them are more likely slips than
    # classes, which only the person knows.
    numbers = numeric.read(sample.cells)
    others = sample.cells.filter(numbers.is_null())
    if len(others) > FEW_OTHERS * len(numbers) or not _too_many_for_classes(numbers.drop_nulls()):
        return category
    if len(others):
        raise UserError(
            f"data.label={data.label}: column {sample.name!r} holds {others[0]!r} among numbers; list it in "
            "data.missing, which leaves its rows out, mend it, or give data.task=multiclass"
        )
    return numeric


def _too_many_for_classes(numbers: pl.Series) -> bool:
    """Are numbers too many, too large or too fine for the names of classes?"""
    if numbers.n_unique() <= 2:
        return False
    odd = (numbers.floor() != numbers) | (numbers.abs() > _SMALL_NUMBER)
    return numbers.n_unique() > _FEW_NUMBERS or bool(odd.any())


def label_of_numbers(name: str, numbers_B: Array, data: TableDataConfig) -> Label:
    """Return the label of a column of numbers. Raises UserError where all are the same."""
    if len(numbers_B) and numbers_B.min() == numbers_B.max():
        _check_values(name, [f"{numbers_B[0]:g}"], data)
    return _LABELS["counts" if data.task == "counts" else "regression"](name=name)


def label_of_texts(name: str, values: list[str], data: TableDataConfig, typed: bool) -> tuple[Label, Array]:
    """Return the label of a column of texts, and the class number, or the number, of each different one.
    typed: the files hold numbers, no texts.

    Raises UserError where `data.task` does not fit, or there is nothing to tell apart.
    """
    _check_values(name, values, data)
    cells = pl.Series(values, dtype=pl.String)
    # The first rows were too few to tell: by now all values are known.
    sample = Sample(name, cells, len(cells), whole=True, data=data)
    numbers = read_numbers(cells, *((".", "") if typed else notation_of(sample)[0]))
    if data.task == "auto" and not numbers.null_count() and _too_many_for_classes(numbers):
        return _Regression(name=name), numbers.to_numpy()
    if len(values) > _MAX_CLASSES:
        raise UserError(
            f"data.label={data.label}: column {name!r} has {len(values):,} different values, such as "
            f"{_shown(values)}, and classes are {_MAX_CLASSES:,} at most ({data.path}); name another column, "
            "or bring rare values together"
        )
    # Texts first, then numbers by size: 2 comes before 10.
    classes = sorted(values, key=lambda v: (is_number(v), float(v) if is_number(v) else 0.0, v))
    two = len(classes) == 2 and data.task != "multiclass"
    if two and classes[0].lower() in _POSITIVE:
        classes.reverse()
    number = {value: float(place) for place, value in enumerate(classes)}
    label = (_Binary if two else _Multiclass)(name=name, classes=tuple(classes))
    return label, np.array([number[value] for value in values])


def _check_values(name: str, values: list[str], data: TableDataConfig) -> None:
    if len(values) < 2 or (data.task == "binary" and len(values) != 2):
        other = "" if len(values) < 2 else ", make the label two-valued, or give another data.task"
        raise UserError(
            f"data.label={data.label}: needs two different values, column {name!r} has {len(values):,}: "
            f"{_shown(values)} ({data.path}); name another column{other}"
        )


def _shown(values: list[str]) -> str:
    return ", ".join(repr(value) for value in sorted(values)[:6]) + (", ..." if len(values) > 6 else "")
