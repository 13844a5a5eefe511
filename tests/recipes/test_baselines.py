"""What a run is compared with: the best constant prediction."""

from pathlib import Path

import numpy as np
import polars as pl
import pytest
from sklearn.metrics import log_loss, roc_auc_score
from sklearn.metrics import roc_curve as sklearns_roc_curve

from dphybrid.data import Prepared
from dphybrid.recipes.configs import build_config
from dphybrid.recipes.registry import find_recipe
from dphybrid.run.pages import MetricsPage
from dphybrid.training.label_tasks import label_task
from dphybrid.util.roc import area_under_roc, roc_curve
from tests.commands import run_with

ROWS = 600


def table(**more: object) -> pl.DataFrame:
    random = np.random.default_rng(3)
    price_B, shop_B = random.normal(size=ROWS), random.integers(0, 3, ROWS)
    score_B = price_B + 0.8 * (shop_B == 1) + 0.7 * random.normal(size=ROWS)
    columns = {"price": price_B.round(4), "shop": [f"shop {n}" for n in shop_B], "score": score_B}
    return pl.DataFrame({**columns, "clicked": (score_B > 0).astype(int), **more})


def thirds(frame: pl.DataFrame) -> pl.Series:
    names = np.array(["low", "middle", "high"])
    return pl.Series(names[np.digitize(frame["price"], [-0.5, 0.5])])


def prepared(frame: pl.DataFrame, folder: Path, label: str, **data: object) -> Prepared:
    file = folder / "table.csv"
    frame.write_csv(file)
    config = build_config({"recipe": "ctr", "data": {"path": str(file), "label": label, **data}})
    return find_recipe("ctr").prepare(config.data, folder / "prepared", 0)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("label", ["clicked", "kind", "score"])
def test_the_floor_is_the_best_constant_of_the_training_rows(
    label: str, weighted: bool, tmp_path: Path
) -> None:
    frame = table()
    frame = frame.with_columns(kind=thirds(frame), w=pl.int_range(ROWS) % 3)
    ignore = [name for name in ("clicked", "kind", "score") if name != label]
    data = prepared(frame.drop(ignore), tmp_path, label, **({"weight": "w"} if weighted else {}))
    outputs = find_recipe("ctr").floor(data)
    assert outputs is not None
    task = label_task(data.info)
    rows = pl.DataFrame({"y": frame[label], "w": frame["w"] if weighted else np.ones(ROWS)})
    rows = rows.filter(pl.col("w") > 0)  # rows without weight are left out
    train, valid = (rows[data.arrays[f"{part}_rows"]] for part in ("train", "valid"))
    found = task.compute(outputs)
    if label == "score":
        mean = np.average(train["y"], weights=train["w"])
        expected = np.sqrt(np.average((valid["y"] - mean) ** 2, weights=valid["w"]))
        assert found["rmse"] == pytest.approx(expected, rel=1e-4)
        return
    classes = list(data.info["label"]["classes"])
    shares = [float(train.filter(pl.col("y").cast(pl.String) == name)["w"].sum()) for name in classes]
    shares_C = np.array(shares) / train["w"].sum()
    predicted = np.tile(shares_C, (len(valid), 1))
    names = valid["y"].cast(pl.String).to_list()
    expected = log_loss(names, predicted, sample_weight=valid["w"], labels=classes)
    assert found["log_loss"] == pytest.approx(expected, rel=1e-4)


def test_a_run_says_what_it_adds(data_dir: Path, tmp_path: Path, unrecorded: None) -> None:
    file = tmp_path / "table.csv"
    table().write_csv(file)
    values = ["recipe=ctr", f"data.path={file}", "data.label=clicked", "train.epochs=2"]
    report = run_with(*values)
    assert report.beside.startswith("constant prediction auc 0.5000 (this run is 0.")
    assert f"Baseline: {report.beside}" in " ".join(report.text.split())  # which wraps at 80 columns
    found = MetricsPage.read(data_dir / "runs" / report.run_name / "metrics.json").baselines
    assert found["constant prediction"]["auc"] == 0.5


def test_the_area_under_the_curve_is_scikit_learns() -> None:
    random = np.random.default_rng(0)
    labels_B, scores_B = random.integers(0, 2, 500), random.normal(size=500).round(1)  # with equal scores
    for weights_B in (None, random.random(500)):
        expected = roc_auc_score(labels_B, scores_B, sample_weight=weights_B)
        assert area_under_roc(labels_B, scores_B, weights_B) == pytest.approx(expected, rel=1e-12)
        *rates, _ = sklearns_roc_curve(labels_B, scores_B, sample_weight=weights_B, drop_intermediate=False)
        np.testing.assert_allclose(roc_curve(labels_B, scores_B, weights_B), rates, rtol=1e-12)
    assert np.isnan(area_under_roc(np.ones(3), scores_B[:3]))
    assert np.isnan(area_under_roc(labels_B[:2], np.array([0.0, np.nan])))
