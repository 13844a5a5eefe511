"""The scikit-learn estimator: its contract, by scikit-learn's own checks, and frames with names."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

pytest.importorskip("sklearn")

from sklearn.base import clone, is_regressor
from sklearn.calibration import CalibratedClassifierCV
from sklearn.inspection import permutation_importance
from sklearn.metrics import f1_score, make_scorer
from sklearn.model_selection import TunedThresholdClassifierCV
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import estimator_checks_generator

import dphybrid
from tests.refusing import refused

VALUES = {"epochs": 1, "batch_size": 64, "model": {"dim": 4, "hidden": 8}}
CHECKS = ("check_dict_unchanged", "check_n_features_in_after_fitting")
"""Each fit is a training: those that the estimator could most easily break."""


def estimator(**more: Any) -> dphybrid.HybridClassifier:
    return dphybrid.HybridClassifier(devices="cpu", **VALUES | more)


@pytest.mark.parametrize("name", CHECKS)
def test_scikit_learns_own_checks(name: str, data_dir: Path) -> None:
    (check,) = [pair for pair in estimator_checks_generator(estimator()) if _name(pair[1]) == name][:1]
    check[1](check[0])


def _name(check: Any) -> str:
    return getattr(check, "func", check).__name__


def table(num_rows: int = 300) -> tuple[pl.DataFrame, np.ndarray]:
    random = np.random.default_rng(0)
    shop, price = random.choice(["books", "music", "tea"], num_rows), random.uniform(1, 20, num_rows).round(2)
    return pl.DataFrame({"shop": shop, "price": price}), np.where(shop == "books", "yes", "a no")


def test_frames_of_texts_and_numbers_in_a_pipeline(data_dir: Path) -> None:
    rows, labels = table()
    model = estimator(epochs=4, batch_size=32, table={"lr": 0.1}, train={"lr": 0.02}).fit(rows, labels)
    assert model.classes_.tolist() == ["a no", "yes"]
    assert model.score(rows.to_pandas(), labels) > 0.95
    assert model.feature_names_in_.tolist() == ["shop", "price"]
    assert model.predict_proba(rows).sum(1).tolist() == pytest.approx([1.0] * len(rows))
    assert model.run_.metrics["auc"] > 0.9
    assert dphybrid.runs()[0].name == model.run_.name
    again = pickle.loads(pickle.dumps(model))
    assert np.array_equal(again.predict_proba(rows), model.predict_proba(rows))
    with refused("column 'shop', .* is missing"):
        model.predict(rows.drop("shop"))


def test_several_classes(data_dir: Path) -> None:
    rows, _ = table()
    model = estimator(epochs=4, batch_size=32, table={"lr": 0.1}, train={"lr": 0.02})
    model.fit(rows, rows["shop"])
    assert model.classes_.tolist() == ["books", "music", "tea"]
    assert model.predict_proba(rows).shape == (300, 3)
    assert model.predict_proba(rows).sum(1) == pytest.approx(np.ones(300), abs=1e-6)
    assert model.score(rows, rows["shop"]) > 0.95


def test_a_regressor_gives_numbers_in_the_labels_units(data_dir: Path) -> None:
    rows, _ = table()
    number = 1000 + 10 * rows["price"] + 50 * (rows["shop"] == "tea").cast(pl.Int64)
    values = VALUES | {"epochs": 8, "batch_size": 32, "table__lr": 0.1, "train__lr": 0.02}
    model = dphybrid.HybridRegressor(devices="cpu", **values).fit(rows, number)
    assert model.predict(rows).dtype == np.float64
    assert model.score(rows.to_pandas(), number) > 0.9
    assert model.run_.metrics["r2"] > 0.8
    assert not hasattr(model, "classes_")
    assert is_regressor(clone(model))


@pytest.mark.parametrize(
    ("labels", "more", "message"),
    [
        (["a"] * 60, {}, "y has one class"),
        ([0.5 + i for i in range(60)], {}, "Unknown label type"),
        (["a", "b"] * 30, {"valid_fraction": 1.5}, "valid_fraction=1.5: must lie between 0 and 1"),
        (["a", "b"] * 30, {"epoch": 1}, "did you mean 'train.epochs'"),
        (["a", "b"] * 20, {}, "inconsistent numbers of samples"),
    ],
)
def test_what_it_cannot_learn_is_told(labels: Any, more: Any, message: str, data_dir: Path) -> None:
    with pytest.raises(ValueError, match=message):
        dphybrid.HybridClassifier(**more).fit(table(60)[0], labels)
    assert not data_dir.exists()


def test_scikit_learn_finds_thresholds_importance_and_calibration(data_dir: Path) -> None:
    rows, labels = table(120)
    X, f1 = rows.to_pandas(), make_scorer(f1_score, pos_label="yes")
    tuned = TunedThresholdClassifierCV(estimator(), scoring=f1, cv=2).fit(X, labels)
    assert 0 <= tuned.best_threshold_ <= 1
    calibrated = CalibratedClassifierCV(make_pipeline("passthrough", estimator()), cv=2).fit(X, labels)
    assert calibrated.predict_proba(X).shape == (120, 2)
    trained = estimator(epochs=8, batch_size=16, table={"lr": 0.1}, train={"lr": 0.02}).fit(X, labels)
    lost = permutation_importance(trained, X, labels, n_repeats=2, random_state=0).importances_mean
    assert lost[0] > lost[1]  # the label follows from the shop alone
