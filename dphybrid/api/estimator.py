"""A scikit-learn estimator over the same job: `fit` trains a run, `predict_proba` asks its predictor."""

from collections.abc import Mapping
from typing import Any, Self

import numpy as np
import polars as pl
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import Tags
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data

from dphybrid.api.run import TrainedRun
from dphybrid.api.training import train
from dphybrid.data.table.frames import as_frame
from dphybrid.jobs.predict import Predictor
from dphybrid.util.errors import UserError

TARGET = "the label"
"""The label's column in the table that `fit` writes; with a blank, so that few tables have one of this
name."""


class HybridClassifier(ClassifierMixin, BaseEstimator):
    """Two classes from a table of numbers, categories, bags and texts, with recipe ctr.

    X: a frame of polars, pandas or Arrow, columns by name, or an array (B, N) of numbers. Each `fit` is a run
    in the data folder (`run_`), of whose rows a share of each class validates.

    Args:
        recipe: "ctr", or your own that reads tables.
        devices: as for `dphybrid.train`.
        tracking: MLflow's address; "none", the default here, since searches fit often.
        valid_fraction: share of each class's rows that validates, one row at least.
        values: more values of the recipe, such as `{"epochs": 5, "batch_size": 128}`.
        random_state: the seed, for splits, weights and order.
        verbose: print what a training prints.

    After `fit`: `classes_` (the two labels, sorted), `n_features_in_`, `feature_names_in_` where X has names,
    `run_` (the run). A pickled estimator keeps the path of its run, not its tables.
    """

    def __init__(
        self,
        *,
        recipe: str = "ctr",
        devices: str = "auto",
        tracking: str | None = "none",
        valid_fraction: float = 0.2,
        values: dict[str, Any] | None = None,
        random_state: int = 0,
        verbose: bool = False,
    ) -> None:
        self.recipe = recipe
        self.devices = devices
        self.tracking = tracking
        self.valid_fraction = valid_fraction
        self.values = values
        self.random_state = random_state
        self.verbose = verbose

    def fit(self, X: Any, y: Any) -> Self:
        """Train on the rows of X (B) and the labels y (B,), which have two values. Raises UserError, a
        ValueError."""
        frame = self._frame(X, reset=True)
        if y is None:
            raise ValueError(f"{type(self).__name__} requires y to be passed, but the target y is None")
        labels = np.asarray(y.to_numpy() if hasattr(y, "to_numpy") else y)
        labels = column_or_1d(labels, warn=True)
        check_classification_targets(labels)
        if type_of_target(labels) not in ("binary", "multiclass"):
            raise ValueError(f"Unknown label type: {type_of_target(labels)}; give two classes")
        if len(labels) != len(frame):
            raise ValueError(
                f"X has {len(frame)} rows and y {len(labels)} labels; inconsistent numbers of samples"
            )
        classes, number_B = np.unique(labels, return_inverse=True)
        if len(classes) != 2:
            what = "one class" if len(classes) == 1 else f"{len(classes)} classes"
            raise ValueError(
                f"y has {what}; Only binary classification is supported. The type of the target is "
                f"{type_of_target(labels)}."
            )
        values = {"seed": self.random_state, **(self.values or {})}
        table = frame.with_columns(pl.Series(TARGET, number_B.astype(np.int8)))
        held_B = self._held(number_B)
        self.run_ = train(
            table.filter(~held_B | _alone(number_B)),
            valid=table.filter(held_B),
            recipe=self.recipe,
            label=TARGET,
            devices=self.devices,
            tracking=self.tracking,
            quiet=not self.verbose,
            **values,
        )
        self.classes_ = classes
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return the probabilities (B, 2) float64 of the two classes, in the order of `classes_`."""
        check_is_fitted(self, "run_")
        positive_B = self._predictor.predict(self._frame(X, reset=False)).astype(np.float64)
        return np.stack([1 - positive_B, positive_B], axis=1)

    def predict(self, X: Any) -> np.ndarray:
        """Return the more probable class (B,) of each row."""
        chosen_B = self.predict_proba(X).argmax(axis=1)
        return self.classes_[chosen_B]

    def _held(self, number_B: np.ndarray) -> np.ndarray:
        """Choose the validation rows (B,) bool: a share of each class, so that each is there to be ranked."""
        if not 0 < self.valid_fraction < 1:
            raise UserError(f"valid_fraction={self.valid_fraction!r}: must lie between 0 and 1")
        random, held_B = np.random.default_rng(self.random_state), np.zeros(len(number_B), bool)
        for number in (0, 1):
            rows = np.flatnonzero(number_B == number)
            held_B[random.permutation(rows)[: max(1, round(self.valid_fraction * len(rows)))]] = True
        return held_B

    @property
    def _predictor(self) -> Predictor:
        return self.run_.predictor

    def _frame(self, X: Any, *, reset: bool) -> pl.DataFrame:
        """X as a frame; an array's columns are named x0, x1, ..."""
        columns = isinstance(X, Mapping) and not hasattr(X, "shape")  # scipy has sparse arrays that are dicts
        if not (columns or hasattr(X, "columns") or hasattr(X, "column_names")):
            array = validate_data(self, X, reset=reset, dtype="numeric", ensure_all_finite="allow-nan")
            return pl.DataFrame({f"x{number}": array[:, number] for number in range(array.shape[1])})
        frame = as_frame(X, "X").lazy().collect()
        if TARGET in frame.columns:
            raise UserError(f"X: has a column {TARGET!r}, which is the label's name here; rename it")
        if not frame.width or not frame.height:
            raise ValueError(
                f"Found array with {frame.height} sample(s) and {frame.width} feature(s) (shape="
                f"{frame.shape}) while a minimum of 1 is required."
            )
        if reset:
            self.n_features_in_ = frame.width
            self.feature_names_in_ = np.asarray(frame.columns, dtype=object)
        return frame

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = False
        tags.classifier_tags.poor_score = True  # of a few rows, where trees and lines do better
        tags.input_tags.allow_nan = True
        tags.input_tags.string = True
        tags.input_tags.categorical = True
        return tags


def _alone(number_B: np.ndarray) -> np.ndarray:
    """Rows (B,) bool that are the only ones of their class: they train, too."""
    return np.bincount(number_B, minlength=2)[number_B] == 1


__all__ = ["HybridClassifier", "TrainedRun"]
