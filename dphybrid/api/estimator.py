"""scikit-learn estimators: `fit` trains a run by `dphybrid.train`, `predict` uses the run's predictor."""

import re
from inspect import signature
from typing import Any, Self

import numpy as np
import polars as pl
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_consistent_length
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_array, check_is_fitted, column_or_1d, validate_data

from dphybrid.api.training import train
from dphybrid.data.table.frames import as_frame
from dphybrid.recipes.registry import OF_TABLES
from dphybrid.util.errors import UserError

_TARGET = "the label"
"""Column that `fit` adds to the table. With a blank, so that hardly any table has it already."""


class _Hybrid(BaseEstimator):
    """Base class of both estimators: their parameters, the table, and the run that `fit` trains."""

    def __init__(
        self,
        *,
        recipe: str = OF_TABLES,
        devices: str = "auto",
        tracking: str | None = "none",
        valid_fraction: float = 0.2,
        random_state: int = 0,
        **values: object,
    ) -> None:
        self.recipe = recipe
        self.devices = devices
        self.tracking = tracking
        self.valid_fraction = valid_fraction
        self.random_state = random_state
        # scikit-learn expects each parameter as an attribute of the same name, unchecked until `fit`.
        self.__dict__.update(values)

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the parameters by name, including the recipe's values that were given."""
        # By scikit-learn's convention, names that end in _ are results of `fit`.
        return {name: value for name, value in vars(self).items() if name[0] != "_" and name[-1] != "_"}

    def set_params(self, **params: Any) -> Self:
        """Set parameters; `fit` checks them."""
        self.__dict__.update(params)
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a pickle, without user and password in the address of MLflow."""
        state: dict[str, Any] = super().__getstate__()
        return state | {"tracking": self.tracking and re.sub(r"(?<=://)[^/?#]*@", "", self.tracking)}

    def _frame(self, X: object, *, reset: bool) -> pl.DataFrame:
        """Return X as a frame; an array's columns are named x0, x1, ... reset: whether this is `fit`."""
        if not hasattr(X, "columns") and not hasattr(X, "column_names"):
            array = validate_data(self, X, reset=reset, dtype="numeric", ensure_all_finite="allow-nan")
            return pl.DataFrame(array, schema=[f"x{number}" for number in range(array.shape[1])])
        frame = as_frame(X, "X").lazy().collect()
        if _TARGET in frame.columns:
            raise UserError(f"X: has a column {_TARGET!r}, a name that fit uses itself; rename the column")
        if reset:
            validate_data(self, frame, skip_check_array=True)
        return frame

    def _fit(self, X: object, y_B: np.ndarray, group_B: np.ndarray, task: str) -> Self:
        """Train on the rows of X (B), with a share of each group's rows as the validation split."""
        if not 0 < self.valid_fraction < 1:
            raise UserError(f"valid_fraction={self.valid_fraction!r}: must lie between 0 and 1")
        table, own = self._frame(X, reset=True), signature(_Hybrid).parameters
        check_consistent_length(table, y_B)
        table = table.with_columns(pl.Series(_TARGET, y_B))
        random, held_B = np.random.default_rng(self.random_state), np.zeros(len(y_B), bool)
        for group in np.unique(group_B):
            rows = random.permutation(np.flatnonzero(group_B == group))
            # Training needs a row of each group, so that it knows all classes.
            held_B[rows[: min(len(rows) - 1, max(1, round(self.valid_fraction * len(rows))))]] = True
        self.run_ = train(
            table.filter(~held_B),
            valid=table.filter(held_B) if held_B.any() else table,
            recipe=self.recipe,
            label=_TARGET,
            devices=self.devices,
            tracking=self.tracking,
            quiet=True,
            seed=self.random_state,
            task=task,
            **{name: value for name, value in self.get_params().items() if name not in own},
        )
        return self

    def _predicted(self, X: object) -> np.ndarray:
        check_is_fitted(self, "run_")
        return np.asarray(self.run_.predictor.predict(self._frame(X, reset=False)), np.float64)


class HybridClassifier(ClassifierMixin, _Hybrid):
    """Classes from a table, with recipe ctr. X: a frame of polars, pandas or Arrow, or an array (B, N) of
    numbers. Each `fit` trains a run in the data folder.

    Args:
        recipe: "ctr", or your own recipe that reads tables.
        devices: as for `dphybrid.train`.
        tracking: MLflow's address; "none", the default here, because searches fit often.
        valid_fraction: share of each class's rows for validation, at least one row of a class with several.
        random_state: the seed of the split, the start weights and the order of rows.
        values: any value of the recipe, by the names that `dphybrid.train` takes: `epochs=5, batch_size=128,
            train__lr=0.01, table__lr=0.1`.

    After `fit`: `classes_` (the labels, sorted), `n_features_in_`, `feature_names_in_` if X has names, `run_`
    (the run). A pickled estimator keeps the path of its run, not its model.
    """

    def fit(self, X: object, y: object) -> Self:
        """Train on the rows of X (B) and the labels y (B,), of two classes or more. Raises UserError, a
        ValueError."""
        labels_B = column_or_1d(np.asarray(y), warn=True)
        check_classification_targets(labels_B)
        classes, number_B = np.unique(labels_B, return_inverse=True)
        if len(classes) < 2:
            raise ValueError("y has one class; give labels of two or more classes")
        # Train on the classes' numbers: a label such as "NA" would be read as a missing value.
        self._fit(X, number_B.astype(np.int32), number_B, "auto" if len(classes) == 2 else "multiclass")
        self.classes_ = classes
        return self

    def predict_proba(self, X: object) -> np.ndarray:
        """Return the probabilities (B, C) float64 of the classes, in the order of `classes_`."""
        scores = self._predicted(X)
        # Of two classes the predictor gives only the second one's probability.
        return np.stack([1 - scores, scores], axis=1) if scores.ndim == 1 else scores

    def predict(self, X: object) -> np.ndarray:
        """Return the most probable class (B,) of each row."""
        return self.classes_[self.predict_proba(X).argmax(axis=1)]


class HybridRegressor(RegressorMixin, _Hybrid):
    """Numbers from a table, with recipe ctr. The arguments and attributes are those of `HybridClassifier`,
    except `classes_`."""

    def fit(self, X: object, y: object) -> Self:
        """Train on the rows of X (B) and the numbers y (B,). Raises UserError, a ValueError."""
        target_B = check_array(column_or_1d(np.asarray(y)), ensure_2d=False, dtype=np.float64, input_name="y")
        return self._fit(X, target_B, np.zeros(len(target_B)), "regression")

    def predict(self, X: object) -> np.ndarray:
        """Return the predicted number (B,) float64 of each row, in the units of y."""
        return self._predicted(X)
