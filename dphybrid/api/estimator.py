"""scikit-learn estimators: `fit` trains a run by `dphybrid.train`, `predict` uses the run's predictor."""

from collections.abc import Mapping
from inspect import signature
from typing import Any, Self

import numpy as np
import polars as pl
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import Tags
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.validation import check_array, check_is_fitted, column_or_1d, validate_data

from dphybrid.api.run import TrainedRun
from dphybrid.api.training import nested, train
from dphybrid.data.table.frames import as_frame
from dphybrid.recipes.registry import OF_TABLES
from dphybrid.serving.predict import Predictor
from dphybrid.util.errors import UserError, suggestion
from dphybrid.util.text import without_credentials

_TARGET, _WEIGHT = "the label", "the weight"
"""Columns that `fit` adds to the table; their names have a blank, so that hardly any table has them
already."""


_OF_BLOCKS = ("lr", "optimizer", "weight_decay")
"""Fields of both `train` (blocks) and `table`. Without a section they mean those of `train`."""


def _value(name: str) -> str:
    """Return the keyword of `dphybrid.train` for a parameter."""
    return f"train__{name}" if name in _OF_BLOCKS else name


class _HybridEstimator(BaseEstimator):
    """Base class of both estimators: their parameters, the table, and the run that `fit` trains."""

    def __init__(
        self,
        *,
        recipe: str = OF_TABLES,
        devices: str = "auto",
        tracking: str | None = "none",
        valid_fraction: float = 0.2,
        random_state: int = 0,
        verbose: bool = False,
        quiet: bool = True,
        label: str | None = None,
        valid: Any = None,
        **values: object,
    ) -> None:
        self.recipe = recipe
        self.devices = devices
        self.tracking = tracking
        self.valid_fraction = valid_fraction
        self.random_state = random_state
        self.verbose = verbose
        self.quiet = quiet
        self.label = label
        self.valid = valid
        # scikit-learn expects each parameter as an attribute of the same name, unchecked until `fit`.
        self.__dict__.update(values)

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the parameters by name, including the recipe's values that were given."""
        # From the attributes, not the constructor's signature, which does not list a recipe's values. By
        # scikit-learn's convention, names that end in _ are results of `fit`.
        return {name: value for name, value in vars(self).items() if name[0] != "_" and name[-1] != "_"}

    def set_params(self, **params: Any) -> Self:
        """Set parameters. Raises UserError, a ValueError, for names that the recipe does not have."""
        recipe, own = params.get("recipe", self.recipe), signature(_HybridEstimator).parameters
        # Checks only the names; None stands for any value.
        nested({_value(name): None for name in params if name not in own}, recipe)
        self.__dict__.update(params)
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a pickle, without user and password in the address of MLflow."""
        state: dict[str, Any] = super().__getstate__()
        return state | {"tracking": self.tracking and without_credentials(self.tracking)[0]}

    def _weighed(
        self, frame: pl.DataFrame, y: object, sample_weight: object
    ) -> tuple[pl.DataFrame, np.ndarray]:
        """Return the table's rows, with a column of weights if there are any, and y as an array (B,). Rows of
        weight 0 are left out."""
        if y is None:
            raise ValueError(f"{type(self).__name__} requires y to be passed, but the target y is None")
        labels = np.asarray(y.to_numpy() if hasattr(y, "to_numpy") else y)
        labels = column_or_1d(labels, warn=True)
        if len(labels) != len(frame):
            raise ValueError(
                f"X has {len(frame)} rows and y {len(labels)} labels; inconsistent numbers of samples"
            )
        if sample_weight is None:
            return frame, labels
        weights_B = column_or_1d(np.asarray(sample_weight), dtype=np.float64)
        if len(weights_B) != len(frame):
            raise ValueError(f"X has {len(frame)} rows and sample_weight {len(weights_B)} numbers")
        used_B = weights_B != 0
        if not used_B.any():
            raise ValueError("sample_weight: every weight is zero; give some rows a weight above 0")
        return frame.with_columns(pl.Series(_WEIGHT, weights_B)).filter(used_B), labels[used_B]

    def _with_y(self, X: object, y: object) -> tuple[object, object]:
        """Return X without the column `label`, and y, which that column holds if it is not given."""
        if self.label is None:
            return X, y
        frame = as_frame(X, "X").lazy().collect()
        if self.label not in frame.columns:
            if y is None:
                raise UserError(
                    f"label={self.label!r}: X has no such column{suggestion(self.label, frame.columns)}"
                )
            return X, y
        return frame.drop(self.label), frame[self.label] if y is None else y

    def _validation(self) -> tuple[pl.DataFrame, np.ndarray] | None:
        """Return the rows of `valid` and their y; None if it is not given."""
        if self.valid is None:
            return None
        pair = (
            self.valid
            if isinstance(self.valid, tuple | list) and len(self.valid) == 2
            else (self.valid, None)
        )
        X, y = self._with_y(*pair)
        frame, labels = self._weighed(self._frame(X, reset=False), y, None)
        return frame, labels

    def _held(self, group_B: np.ndarray) -> np.ndarray:
        """Return held_B (B,) bool, the validation rows: a share of each group, at least one row."""
        if not 0 < self.valid_fraction < 1:
            raise UserError(f"valid_fraction={self.valid_fraction!r}: must lie between 0 and 1")
        random, held_B = np.random.default_rng(self.random_state), np.zeros(len(group_B), bool)
        # By group, so that each class is in the validation split.
        for number in range(group_B.max() + 1):
            rows = np.flatnonzero(group_B == number)
            held_B[random.permutation(rows)[: max(1, round(self.valid_fraction * len(rows)))]] = True
        return held_B

    def _train(
        self,
        frame: pl.DataFrame,
        target_B: np.ndarray,
        group_B: np.ndarray,
        task: str,
        given: tuple[pl.DataFrame, np.ndarray] | None,
    ) -> None:
        """Train a run on a table and its target. given: validation rows and their target; without them a
        share of each group is the validation split. group_B: each row's group. The only row of a group is in
        both splits, so that training has every class."""
        values: dict[str, Any] = {"seed": self.random_state, "task": task, **self._values}
        table = frame.with_columns(pl.Series(_TARGET, target_B))
        if _WEIGHT in frame.columns:
            values["weight"] = _WEIGHT
        if given is None:
            held_B, alone_B = self._held(group_B), np.bincount(group_B)[group_B] == 1
            table, valid = table.filter(~held_B | alone_B), table.filter(held_B)
        else:
            valid = given[0].with_columns(pl.Series(_TARGET, given[1]))
            if _WEIGHT in frame.columns:
                valid = valid.with_columns(pl.lit(1.0).alias(_WEIGHT))
        self.run_ = train(
            table,
            valid=valid,
            recipe=self.recipe,
            label=_TARGET,
            devices=self.devices,
            tracking=self.tracking,
            quiet=self.quiet and not self.verbose,
            **values,
        )

    @property
    def _values(self) -> dict[str, object]:
        """The recipe's values, by the names that `dphybrid.train` takes."""
        own = signature(_HybridEstimator).parameters
        return {_value(name): value for name, value in self.get_params().items() if name not in own}

    @property
    def _predictor(self) -> Predictor:
        return self.run_.predictor

    def _frame(self, X: object, *, reset: bool) -> pl.DataFrame:
        """Return X as a frame; an array's columns are named x0, x1, ... reset: whether this is `fit`."""
        # hasattr: some sparse arrays of scipy are dicts, too, and must be refused as arrays are.
        columns = isinstance(X, Mapping) and not hasattr(X, "shape")
        if not (columns or hasattr(X, "columns") or hasattr(X, "column_names")):
            array = validate_data(self, X, reset=reset, dtype="numeric", ensure_all_finite="allow-nan")
            return pl.DataFrame({f"x{number}": array[:, number] for number in range(array.shape[1])})
        frame = as_frame(X, "X").lazy().collect()
        if self.label in frame.columns:
            frame = frame.drop(str(self.label))
        for name in (_TARGET, _WEIGHT):
            if name in frame.columns:
                raise UserError(f"X: has a column {name!r}, a name that fit uses itself; rename the column")
        if not frame.width or not frame.height:
            # scikit-learn's own words, which its checks of estimators look for.
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
        tags.input_tags.allow_nan = True
        tags.input_tags.string = True
        tags.input_tags.categorical = True
        return tags


class HybridClassifier(ClassifierMixin, _HybridEstimator):
    """Classes from a table of numbers, categories, bags and texts, with recipe ctr.

    X: a frame of polars, pandas or Arrow, a dict of columns, or an array (B, N) of numbers. Each `fit` trains
    a run in the data folder (`run_`) and sets a share of each class's rows aside for validation.

    Args:
        recipe: "ctr", or your own recipe that reads tables.
        devices: as for `dphybrid.train`.
        tracking: MLflow's address; "none", the default here, because searches fit often.
        valid_fraction: share of each class's rows for validation, at least one row.
        random_state: the seed of the split, the start weights and the order of rows.
        verbose, quiet: verbose=True or quiet=False prints the lines of the training.
        label: the column of X that holds y, for `fit(X)` without y; it is no feature.
        valid: validation rows in place of a share of the training rows: a pair (X, y), or a table with the
            column `label`.
        values: any value of the recipe, by the names that `dphybrid.train` takes: `epochs=5, batch_size=128,
            table__lr=0.1`. `lr`, `optimizer` and `weight_decay`
            without a section are those of the blocks.

    After `fit`: `classes_` (the labels, sorted), `n_features_in_`, `feature_names_in_` if X has names, `run_`
    (the run). A pickled estimator keeps the path of its run, not its model.
    """

    def fit(self, X: object, y: object = None, sample_weight: object = None) -> Self:
        """Train on the rows of X (B) and the labels y (B,), of two classes or more. sample_weight: (B,), 0 or
        more. Raises UserError, a ValueError."""
        X, y = self._with_y(X, y)
        frame = self._frame(X, reset=True)
        frame, labels = self._weighed(frame, y, sample_weight)
        check_classification_targets(labels)
        if type_of_target(labels) not in ("binary", "multiclass"):
            raise ValueError(f"Unknown label type: {type_of_target(labels)}; give classes")
        classes, number_B = np.unique(labels, return_inverse=True)
        if len(classes) < 2:
            raise ValueError("y has one class; give labels of two or more classes")
        task = "auto" if len(classes) == 2 else "multiclass"
        # Train on the classes' numbers: a label such as "NA" would be read as a missing value.
        target_B = number_B.astype(np.int8 if len(classes) <= 128 else np.int32)
        given = self._validation()
        if given is not None:
            if unseen := sorted({*map(str, given[1])} - {*map(str, classes)}):
                raise UserError(f"valid: has the class {unseen[0]!r}, which y has not")
            given = given[0], np.searchsorted(classes, given[1].astype(classes.dtype)).astype(target_B.dtype)
        self._train(frame, target_B, number_B, task, given)
        self.classes_ = classes
        return self

    def predict_proba(self, X: object) -> np.ndarray:
        """Return the probabilities (B, C) float64 of the classes, in the order of `classes_`."""
        check_is_fitted(self, "run_")
        found = self._predictor.predict(self._frame(X, reset=False)).astype(np.float64)
        # Of two classes the predictor gives only the second one's probability.
        return np.stack([1 - found, found], axis=1) if found.ndim == 1 else found

    def predict(self, X: object) -> np.ndarray:
        """Return the class (B,) of each row: the most probable one."""
        return self.classes_[self.predict_proba(X).argmax(axis=1)]

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        # scikit-learn's checks expect high scores on a few rows, where trees and linear models do better.
        tags.classifier_tags.poor_score = True
        return tags


class HybridRegressor(RegressorMixin, _HybridEstimator):
    """Numbers from a table of numbers, categories, bags and texts, with recipe ctr. The arguments and
    attributes are those of `HybridClassifier`, except `classes_`.

    """

    def fit(self, X: object, y: object = None, sample_weight: object = None) -> Self:
        """Train on the rows of X (B) and the numbers y (B,). sample_weight: (B,), 0 or more. Raises
        UserError, a ValueError."""
        X, y = self._with_y(X, y)
        frame = self._frame(X, reset=True)
        frame, labels = self._weighed(frame, y, sample_weight)
        target_B = check_array(labels, ensure_2d=False, dtype=np.float64, input_name="y")
        # One group: the validation rows are any of them.
        given = self._validation()
        if given is not None:
            given = given[0], check_array(given[1], ensure_2d=False, dtype=np.float64, input_name="valid")
        self._train(frame, target_B, np.zeros(len(target_B), np.int64), "regression", given)
        return self

    def predict(self, X: object) -> np.ndarray:
        """Return the predicted number (B,) float64 of each row, in the units of y."""
        check_is_fitted(self, "run_")
        return self._predictor.predict(self._frame(X, reset=False))

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.regressor_tags.poor_score = True
        return tags


__all__ = ["HybridClassifier", "HybridRegressor", "TrainedRun"]
