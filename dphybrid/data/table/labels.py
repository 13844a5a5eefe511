"""What the column with the answer is learnt as, told by its values or by `data.task`:

- binary: two values;
- multiclass: texts, or up to 20 whole numbers below 100 (either sign), three or more;
- regression: other numbers;
- counts: whole numbers from 0 on, when `data.task` says so, never inferred.

Letters: B rows."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
import polars as pl

from dphybrid.config.tables import TableDataConfig
from dphybrid.data.batches import Array
from dphybrid.data.table.fields import is_number
from dphybrid.data.table.rows import as_numbers
from dphybrid.data.table.schema import FEW_OTHERS
from dphybrid.util.errors import UserError

TaskName = Literal["binary", "multiclass", "regression", "counts"]

POSITIVE = ("1", "true", "yes", "y", "t", "positive", "click", "clicked")
"""Label values that mean 1 although they would sort first."""
MAX_CLASSES = 1000
FEW_NUMBERS = 20
"""Different whole numbers up to which they are taken for classes."""
SMALL_NUMBER = 99
"""Size up to which whole numbers are taken for classes."""


@dataclass(frozen=True)
class Label:
    """What a label is learnt as. classes: texts by number, the positive one of two last; none of numbers.

    offset, scale: of numbers; models learn (number - offset) / scale, whose mean over the training rows is 0
    with a standard deviation of 1 (regression), or 1 (counts).
    """

    task: TaskName = "binary"
    classes: tuple[str, ...] = ()
    offset: float = 0.0
    scale: float = 1.0

    @property
    def columns(self) -> dict[str, str]:
        """What a prediction consists of: names and numpy's types."""
        if self.task == "binary":
            return {"probability": "float32"}
        if self.task == "multiclass":
            return {"prediction": "str", **{f"probability_{name}": "float32" for name in self.classes}}
        return {"prediction": "float64"}

    def text(self, column: str) -> str:
        """Say what is predicted."""
        if self.task == "binary":
            return f"{column}={self.classes[1]}"
        return f"{column} ({f'{len(self.classes)} classes' if self.classes else self.task})"

    def fitted(self, train_B: Array, weights_B: Array | None) -> "Label":
        """Return the label with the offset and the scale of its training rows."""
        if self.classes:
            return self
        mean = float(np.average(train_B, weights=weights_B))
        if self.task == "counts":
            return replace(self, scale=mean or 1.0)
        std = float(np.sqrt(np.average((train_B - mean) ** 2, weights=weights_B)))
        return replace(self, offset=mean, scale=std or 1.0)

    def encoded(self, values_B: Array) -> Array:
        """Return what models learn (B,) float32, of class numbers or numbers."""
        if self.classes:
            return values_B.astype(np.float32)
        return ((values_B - self.offset) / self.scale).astype(np.float32)

    def facts(self) -> dict[str, Any]:
        """Return the label as JSON has it, by the name it has in the facts about prepared data. A binary one
        is told by their absence, as in data of before."""
        return {} if self.task == "binary" else {"label": asdict(self)}

    @classmethod
    def of(cls, facts: Mapping[str, Any], classes: tuple[str, ...] = ()) -> "Label":
        """Return the label of facts. classes: of a binary one, which facts do not name."""
        page = facts.get("label")
        return cls(**{**page, "classes": tuple(page["classes"])}) if page else cls(classes=classes)


def are_numbers(name: str, sample: pl.Series, data: TableDataConfig) -> bool:
    """Tell by its first values, None for no value, whether a label is read as numbers, not as classes. Raises
    UserError for numbers with a few texts among them."""
    if data.task != "auto":
        return data.task in ("regression", "counts")
    present = sample.drop_nulls()
    numbers = as_numbers(present, data)
    is_other = ~numbers.is_finite().fill_null(False)
    known, others = numbers.filter(~is_other), present.filter(is_other)
    if len(others) > FEW_OTHERS * len(present) or not _too_many_for_classes(known):
        return False
    if len(others):
        raise UserError(
            f"data.label={data.label}: column {name!r} holds {others[0]!r} among numbers; list it in "
            "data.missing, which leaves its rows out, mend it, or give data.task=multiclass"
        )
    return True


def _too_many_for_classes(numbers: pl.Series) -> bool:
    """Are numbers too many, too large or too fine for the names of classes?"""
    if numbers.n_unique() <= 2:
        return False
    odd = (numbers.floor() != numbers) | (numbers.abs() > SMALL_NUMBER)
    return numbers.n_unique() > FEW_NUMBERS or bool(odd.any())


def decided(name: str, values: list[str], data: TableDataConfig) -> tuple[Label, Array]:
    """Return what a label is, and the class number or the number of each of its different values.

    Raises UserError where `data.task` does not fit, or there is nothing to tell apart.
    """
    place, there = f"data.label={data.label}", f"column {name!r} has {len(values):,}"
    shown = ", ".join(repr(value) for value in sorted(values)[:6]) + (", ..." if len(values) > 6 else "")
    if len(values) < 2 or (data.task == "binary" and len(values) != 2):
        other = "" if len(values) < 2 else ", make the label two-valued, or give another data.task"
        raise UserError(
            f"{place}: needs two different values, {there}: {shown} ({data.path}); name another column{other}"
        )
    numbers = as_numbers(pl.Series(values, dtype=pl.String), data)
    if data.task == "auto" and numbers.is_finite().fill_null(False).all() and _too_many_for_classes(numbers):
        return Label("regression"), numbers.to_numpy()
    if len(values) > MAX_CLASSES:
        raise UserError(
            f"{place}: {there} different values, such as {shown}, and classes are {MAX_CLASSES:,} at most "
            f"({data.path}); name another column, or bring rare values together"
        )
    classes = sorted(values, key=lambda v: (is_number(v), float(v) if is_number(v) else 0.0, v))
    two = len(classes) == 2 and data.task != "multiclass"
    if two and classes[0].lower() in POSITIVE:
        classes.reverse()
    number = {value: float(place) for place, value in enumerate(classes)}
    label = Label("binary" if two else "multiclass", tuple(classes))
    return label, np.array([number[value] for value in values])


def wrong_counts(values_B: Array) -> Array:
    """Return which numbers (B,) are no counts; nan, no value, is not told."""
    return (values_B < 0) | (values_B != np.floor(values_B)) & ~np.isnan(values_B)


def wrong_weights(values_B: Array) -> Array:
    """Return which numbers (B,) are no weights; nan, no value, is none."""
    with np.errstate(invalid="ignore"):
        return ~((values_B >= 0) & (values_B < np.inf))
