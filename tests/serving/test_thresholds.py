"""Class weights and chosen thresholds: scikit-learn's formulas, and every way to use a model agrees."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import polars as pl
import pytest
from sklearn.metrics import f1_score
from sklearn.utils.class_weight import compute_class_weight

import dphybrid
from dphybrid.api.estimator import HybridClassifier
from dphybrid.data.table.labels import class_weights
from dphybrid.recipes import find_recipe
from dphybrid.serving.pyfunc import LoadedCheckpoint
from dphybrid.training.label_tasks import label_task
from dphybrid.training.metrics import best_threshold
from tests.commands import command
from tests.preparing import table_of
from tests.refusing import refused


def rare(num_rows: int, seed: int) -> pl.DataFrame:
    """Rows of which one in seven is positive, which the price tells in part."""
    random = np.random.default_rng(seed)
    price_B = random.normal(size=num_rows)
    score_B = price_B + random.normal(size=num_rows)
    label_B = np.where(score_B > 1.5, "sold", "kept")
    return pl.DataFrame({"price": price_B.round(3), "shop": random.integers(0, 3, num_rows), "end": label_B})


def test_balanced_class_weights_are_those_of_scikit_learn() -> None:
    random = np.random.default_rng(0)
    for classes in (2, 5):
        labels_B = random.choice(classes, 300, p=np.arange(1, classes + 1) / sum(range(1, classes + 1)))
        expected = compute_class_weight("balanced", classes=np.arange(classes), y=labels_B)
        assert class_weights(labels_B, classes) == pytest.approx(expected)
        weights_B = random.random(300)
        sums = np.bincount(labels_B, weights_B)
        assert class_weights(labels_B, classes, weights_B) * sums == pytest.approx([sums.mean()] * classes)
    assert class_weights(np.array([0, 0, 2]), 3).tolist() == [0.75, 1.0, 1.5]


@pytest.mark.parametrize("label", ["two", "three"])
def test_training_batches_weigh_classes_and_validation_rows_do_not(label: str, tmp_path: Path) -> None:
    words = {"two": ["a", "b"], "three": ["a", "b", "c"]}[label]
    cells = {
        "x": [f"v{i % 5}" for i in range(90)],
        "w": [1 + i % 2 for i in range(90)],
        "y": [words[min(i % 7, len(words) - 1)] for i in range(90)],
    }
    data = table_of(tmp_path, cells, class_weight="balanced", weight="w")
    recipe: Any = find_recipe("ctr")
    model = recipe.model()
    batch = recipe.training_rows(data.dataset("train"), data.info, model).fetch(
        np.arange(len(data.arrays["train_rows"]))
    )
    plain = data.dataset("train").fetch(np.arange(len(data.arrays["train_rows"])))
    labels_B, own_B = plain["labels_B"].numpy(), plain["weights_B"].numpy()
    sums = np.bincount(labels_B.astype(int), batch["weights_B"].numpy())
    assert sums == pytest.approx([own_B.sum() / len(words)] * len(words), rel=1e-5)
    assert sorted(set(data.dataset("valid").fetch(np.arange(10))["weights_B"].tolist())) == [1, 2]
    task = label_task(data.info)
    assert "weights of classes in training, balanced: a " in data.describe()
    assert task.chosen_by == "balanced_log_loss"
    assert task.metric == {"two": "auc", "three": "macro_f1"}[label]
    with refused("data.class_weight=balanced: is for classes, and label 'y' is regression"):
        table_of(tmp_path, {**cells, "y": [i / 7 for i in range(90)]}, class_weight="balanced")


def test_the_best_threshold_is_that_of_a_search_over_all() -> None:
    random = np.random.default_rng(1)
    for _ in range(20):
        labels_B = (random.random(60) < 0.3).astype(np.float32)
        found_B = (random.random(60) * 0.7 + labels_B * 0.3).round(1).astype(np.float32)
        weights_B = random.random(60)
        threshold, f1 = best_threshold(labels_B, found_B, weights_B)
        scores = [
            f1_score(labels_B, found_B >= t, sample_weight=weights_B, zero_division=0)
            for t in np.unique(found_B)
        ]
        assert f1 == pytest.approx(max(scores))
        assert f1_score(labels_B, found_B >= threshold, sample_weight=weights_B) == pytest.approx(f1)


def test_a_chosen_threshold_is_used_by_every_way_to_predict(
    data_dir: Path, unrecorded: None, tmp_path: Path
) -> None:
    rows, held = rare(800, 0), rare(300, 1)
    run = dphybrid.train(
        rows,
        test=held,
        label="end",
        epochs=3,
        devices="cpu",
        quiet=True,
        threshold="best-f1",
        class_weight="balanced",
    )
    predictor = run.predictor
    threshold = run.metrics["threshold"]
    assert predictor.threshold == threshold != 0.5
    probability = run.predict(held)
    expected = np.where(probability >= np.float32(threshold), "sold", "kept").tolist()
    assert 0 < expected.count("sold") < len(held)
    # The test part is measured with the threshold of the validation rows.
    is_sold_B = (held["end"] == "sold").to_numpy()
    assert run.test_metrics["f1"] == pytest.approx(f1_score(is_sold_B, np.array(expected) == "sold"))
    assert "threshold" not in run.test_metrics

    assert predictor.predict_classes(held).tolist() == expected
    held.write_csv(tmp_path / "held.csv")
    command(
        "predict", run.name, "--data.path", str(tmp_path / "held.csv"), "--out", str(tmp_path / "out.csv")
    )
    assert pl.read_csv(tmp_path / "out.csv")["prediction"].to_list() == expected
    given = tmp_path / "given.csv"
    predictor.predict_file(tmp_path / "held.csv", given, threshold=0.99)
    assert (
        pl.read_csv(given)["prediction"].to_list() == np.where(probability >= 0.99, "sold", "kept").tolist()
    )
    loaded = LoadedCheckpoint(run.checkpoint)
    assert cast(Any, loaded.predict(held, {"classes": True})).tolist() == expected
    assert np.array_equal(cast(Any, loaded.predict(held)), probability)
    found = run.evaluate(held)
    assert found.thresholds is not None
    assert found.thresholds.filter(pl.col("") == "the model's")["threshold"].to_list() == [threshold]
    assert found.metrics["f1"] == pytest.approx(run.test_metrics["f1"])


def test_scikit_learn_takes_class_weight_and_threshold(data_dir: Path, unrecorded: None) -> None:
    rows = rare(500, 2)
    X, y = rows.drop("end"), rows["end"].to_numpy()
    model = HybridClassifier(epochs=2, class_weight="balanced", threshold=0.3, devices="cpu").fit(X, y)
    sold_B = model.predict_proba(X)[:, 1]
    assert model.predict(X).tolist() == np.where(sold_B >= np.float32(0.3), "sold", "kept").tolist()
    assert model.run_.config.data.class_weight == "balanced"
    with refused("model.threshold=0.3: is for a label of two values, and 'y' is regression"):
        dphybrid.train({"x": list("abc") * 30, "y": [i / 7 for i in range(90)]}, label="y", threshold=0.3)
