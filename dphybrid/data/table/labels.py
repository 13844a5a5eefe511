"""The task of a label column, inferred from its values or set by `data.task`:

- binary: two values;
- multiclass: three or more texts, or 3 to 20 different whole numbers from -99 to 99;
- regression: other numbers.

Letters: B rows."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import numpy as np
import polars as pl

from dphybrid.config import Section
from dphybrid.config.tables import TableDataConfig
from dphybrid.data.batches import Array
from dphybrid.data.table.kinds import form_as, none_of
from dphybrid.data.table.numbers import mean_and_std
from dphybrid.data.table.values import BLOCK, Form, type_of, typed, with_gaps
from dphybrid.util.errors import UserError

_POSITIVE = ("1", "true", "yes", "y", "t", "positive", "click", "clicked")
"""Label values that are the positive class even if they sort first."""
_MAX_CLASSES = 1000
_FEW_NUMBERS = 20
"""Maximum number of different whole numbers that are taken for classes."""
_FEW_OTHERS = 0.05
"""Largest share of other texts among numbers that is taken for mistakes."""
_SMALL_NUMBER = 99
"""Largest absolute value of whole numbers that are taken for classes."""


class Label(Section):
    """What a model learns, and its task.

    Attributes:
        name: The column's.
        form: What its values are.
        classes: Texts in the order of their numbers, the positive one of two last; empty for numbers.
        offset, scale: Models learn (number - offset) / scale.
    """

    task: Literal["binary", "multiclass", "regression"] = "binary"
    name: str = ""
    form: Form = Form()
    classes: tuple[str, ...] = ()
    offset: float = 0.0
    scale: float = 1.0

    @property
    def columns(self) -> dict[str, str]:
        """The columns of a prediction, with numpy's names of their types: the probability of the second of
        two classes; the class and the probability of each; or the number."""
        match self.task:
            case "binary":
                return {"probability": "float32"}
            case "multiclass":
                return {"prediction": "str", **{f"probability_{name}": "float32" for name in self.classes}}
        return {"prediction": "float64"}

    def text(self) -> str:
        """Return a short text that names what is predicted."""
        if self.task == "binary":
            return f"{self.name}={self.classes[1]}"
        kind = f"{len(self.classes)} classes" if self.classes else self.task
        return f"{self.name} ({kind})"

    def summary(self) -> str:
        """Return how the label was read, for the summary of a table."""
        if self.task == "binary":
            return f"{self.classes[1]!r} is 1, {self.classes[0]!r} is 0"
        if self.classes:
            shown = ", ".join(map(repr, self.classes[:8])) + ", ..." * (len(self.classes) > 8)
            return f"{len(self.classes)} classes, {shown}"
        return f"mean {self.offset:.6g}, standard deviation {self.scale:.6g} in training"

    def fitted(self, values_B: Array, weights_B: Array | None, train_B: Array) -> Self:
        """Return the label with the offset and scale of the training rows (a mask), if it is a number."""
        if self.task != "regression":
            return self
        mean, std = mean_and_std(values_B[train_B], None if weights_B is None else weights_B[train_B])
        return self.model_copy(update={"offset": mean, "scale": std})

    def read(self, cells: pl.Series, no_value: Sequence[str] | None = None) -> Array:
        """Return the numbers, or the numbers of the classes (B,), of cells of any container; nan for no
        value. Raises UserError that names a cell that is neither."""
        blocks = (block.to_series() for block in cells.to_frame().iter_slices(BLOCK))
        return np.concatenate([np.empty(0), *(self._read(block, no_value) for block in blocks)])

    def _read(self, cells: pl.Series, no_value: Sequence[str] | None) -> Array:
        filled_B = with_gaps(cells, no_value, self.form).is_not_null()
        numbers, wanted = typed(cells, self.form, no_value), "a number"
        if self.classes:
            places = {name: float(place) for place, name in enumerate(self.classes)}
            numbers = numbers.cast(pl.String).replace_strict(places, default=None, return_dtype=pl.Float64)
            wanted = f"one of the model's classes, {', '.join(map(repr, self.classes[:6]))}"
        if len(odd := cells.filter(filled_B & numbers.is_null())):
            raise UserError(
                f"label {self.name!r}: {odd[0]!r} is not {wanted}; correct it, or remove its rows"
            )
        found: Array = numbers.cast(pl.Float64).fill_null(np.nan).to_numpy()
        return found

    def encoded(self, values_B: Array) -> Array:
        """Return the targets (B,) float32 of models. values_B: numbers, or class numbers."""
        scaled_B = values_B if self.classes else (values_B - self.offset) / self.scale
        return scaled_B.astype(np.float32)

    def facts(self) -> dict[str, object]:
        """Return the label in the form of JSON, for the facts about prepared data."""
        return {"label": self.model_dump(mode="json")}

    @staticmethod
    def of(facts: Mapping[str, Any]) -> "Label":
        """Return the label from the facts about prepared data; a binary label if they have none."""
        return Label(**facts.get("label", {}))


def label_of(name: str, cells: pl.Series, data: TableDataConfig) -> Label:
    """Return the label of a column, given its cells of all rows as the reader typed them. Raises UserError if
    `data.task` does not fit the values, or if there are fewer than two."""
    cells = with_gaps(cells, None)
    known = cells.unique(maintain_order=True)
    form = form_as("categorical", known.drop_nulls(), Form(none=none_of(data.missing)))
    known = with_gaps(known, None, form).drop_nulls()
    distinct = typed(known, form).unique().sort()
    is_number = data.task == "regression"
    if data.task == "auto" and type_of(cells.dtype) in ("number", "whole"):
        is_number = _are_too_many(distinct)
    odd = known.filter(typed(known, Form(type="number")).is_null())
    if len(odd) and data.task == "auto" and len(distinct) > _FEW_NUMBERS:  # are they slips?
        is_number |= bool(cells.is_in(odd.implode()).sum() <= _FEW_OTHERS * cells.count())
    if len(odd) and is_number:
        raise UserError(
            f"data.label={data.label}: column {name!r} holds {odd[0]!r}, which is not a number; correct "
            "it, list it in data.missing (which leaves its rows out), or give data.task=multiclass"
        )
    shown = ", ".join(map(repr, distinct.head(6).cast(pl.String))) + ", ..." * (len(distinct) > 6)
    if len(distinct) < 2 or (data.task == "binary" and len(distinct) != 2):
        other = "" if len(distinct) < 2 else ", or give another data.task"
        raise UserError(
            f"data.label={data.label}: needs two different values, but column {name!r} has "
            f"{len(distinct):,}: {shown} ({data.path}); name another column{other}"
        )
    if is_number:
        return Label(task="regression", name=name, form=form.model_copy(update={"type": "number"}))
    if len(distinct) > _MAX_CLASSES:
        raise UserError(
            f"data.label={data.label}: column {name!r} has {len(distinct):,} different values, such as "
            f"{shown}, but at most {_MAX_CLASSES:,} classes are supported ({data.path}); name another "
            "column, or merge rare values"
        )
    classes = distinct.cast(pl.String).to_list()
    two = len(classes) == 2 and data.task != "multiclass"
    if two and classes[0].lower() in _POSITIVE and classes[1].lower() not in _POSITIVE:
        classes.reverse()
    return Label(task="binary" if two else "multiclass", name=name, form=form, classes=tuple(classes))


def _are_too_many(numbers: pl.Series) -> bool:
    """Return whether different numbers are too many, too large or too fine to be names of classes."""
    numbers = numbers.cast(pl.Float64, strict=False)
    odd = (numbers.floor() != numbers) | (numbers.abs() > _SMALL_NUMBER)
    return len(numbers) > 2 and (len(numbers) > _FEW_NUMBERS or bool(odd.any()))
