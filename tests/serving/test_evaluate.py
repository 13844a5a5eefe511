"""`dphybrid evaluate` and `run.evaluate` against scikit-learn on the run's own predictions."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from sklearn import metrics

import dphybrid
from dphybrid.api.run import TrainedRun
from tests.commands import command
from tests.conftest import own_settings
from tests.refusing import refused


def table(num_rows: int, seed: int) -> pl.DataFrame:
    random = np.random.default_rng(seed)
    price_B, shop_B = random.normal(size=num_rows), random.integers(0, 4, num_rows)
    score_B = 2 * price_B + (shop_B == 1) + 0.5 * random.normal(size=num_rows)
    return pl.DataFrame(
        {
            "price": price_B.round(4),
            "shop": [f"shop {n}" for n in shop_B],
            "noise": random.normal(size=num_rows).round(3),
            "clicked": np.where(score_B > 0, "yes", "no"),
            "kind": np.array(["low", "middle", "high"])[np.digitize(price_B, [-0.5, 0.5])],
            "amount": (10 * score_B).round(2),
        }
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TrainedRun]:
    folder = tmp_path_factory.mktemp("evaluate")
    with pytest.MonkeyPatch.context() as patch:
        own_settings(patch, folder / "data", TRACKING_URI="none")
        return {
            label: dphybrid.train(
                table(900, 0).select("price", "shop", "noise", label),
                label=label,
                epochs=4,
                devices="cpu",
                quiet=True,
                run_name=label,
            )
            for label in ("clicked", "kind", "amount")
        }


def test_metrics_are_those_of_the_predictions_and_lie_in_their_intervals(runs: dict[str, TrainedRun]) -> None:
    held = table(400, 1)
    yes_B, wanted_B = runs["clicked"].predict(held), (held["clicked"] == "yes").to_numpy()
    found = runs["clicked"].evaluate(held)
    assert found.metrics["auc"] == pytest.approx(metrics.roc_auc_score(wanted_B, yes_B))
    assert found.metrics["log_loss"] == pytest.approx(metrics.log_loss(wanted_B, yes_B), rel=1e-4)
    for name, (low, high) in found.intervals.items():
        assert low < found.metrics[name] < high
    tiny = replace(found, metrics={"rmse": 0.00003}, intervals={"rmse": (0.00002, 0.00004)})
    assert tiny.text().splitlines()[2].split() == ["rmse", "3e-05", "2e-05", "4e-05"]
    assert found.classes is not None
    yes = found.classes.filter(pl.col("class") == "yes")
    assert yes["precision"].item() == pytest.approx(metrics.precision_score(wanted_B, yes_B >= 0.5))
    assert yes["f1"].item() == pytest.approx(metrics.f1_score(wanted_B, yes_B >= 0.5))

    classes = runs["kind"].evaluate(held)
    assert classes.classes is not None
    predicted = np.array(runs["kind"].predictor.classes)[runs["kind"].predict(held).argmax(1)]
    recalls = metrics.recall_score(held["kind"], predicted, average=None, labels=classes.classes["class"])
    assert classes.classes["recall"].to_list() == pytest.approx(list(recalls))

    numbers = runs["amount"].evaluate(held)
    expected = metrics.root_mean_squared_error(held["amount"], runs["amount"].predict(held))
    assert numbers.metrics["rmse"] == pytest.approx(expected, rel=1e-5)
    assert numbers.classes is None


def test_a_file_is_evaluated_like_a_frame_without_unlabelled_rows(
    runs: dict[str, TrainedRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = table(300, 2)
    lacking = held.with_columns(clicked=pl.when(pl.int_range(300) >= 10).then("clicked"))
    lacking.write_csv(tmp_path / "held.csv")
    run = runs["clicked"]
    monkeypatch.setenv("DPHYBRID_DATA_DIR", str(run.folder.parent.parent))
    from_frame, from_file = run.evaluate(lacking), run.evaluate(tmp_path / "held.csv")
    assert from_frame.metrics == from_file.metrics == run.evaluate(held.tail(290)).metrics
    told = command("evaluate", "clicked", "--data.path", str(tmp_path / "held.csv"))
    assert "Evaluated on 290 rows" in told
    assert "Left out: 10 rows without a label" in told
    assert re.search(rf"^auc .decides. +{from_file.metrics['auc']:.4f} ", told, re.MULTILINE)
    assert "null" not in told


def test_what_cannot_be_evaluated_is_named(runs: dict[str, TrainedRun]) -> None:
    held, run = table(50, 3), runs["clicked"]
    with refused("the rows have no column 'clicked', the label"):
        run.evaluate(held.drop("clicked"))
    with refused("label 'clicked': 'maybe' is not one of the model's classes, 'no', 'yes'"):
        run.evaluate(held.with_columns(clicked=pl.lit("maybe")))
    with refused("the rows have no label: 'clicked' is empty in all of them"):
        run.evaluate(held.with_columns(clicked=pl.lit(None, pl.String)))
    with refused("the rows: column 'price', .* is missing"):
        run.evaluate(held.drop("price"))
    with refused("label 'amount': 'much' is not a number"):
        runs["amount"].evaluate(held.with_columns(amount=pl.lit("much")))


DOCUMENTS = [f"some words about number {i % 5} and more.\n\n" for i in range(90)]


@pytest.mark.parametrize("values", [{}, {"tokens": "bpe", "vocabulary": 300}])
def test_a_later_file_is_measured_as_the_test_part_is(
    values: dict[str, Any], data_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "own.txt").write_text("".join(DOCUMENTS[10:]))
    (tmp_path / "later.txt").write_text("".join(DOCUMENTS[:10]))
    given = {"recipe": "text", "window": 8, "epochs": 1, "devices": "cpu", "quiet": True} | values
    path, test = str(tmp_path / "own.txt"), str(tmp_path / "later.txt")
    run = dphybrid.train(path, test=test, run_name="text", tracking="none", **given)
    found = run.evaluate(tmp_path / "later.txt")
    assert found.metrics == pytest.approx(run.test_metrics)
    assert found.intervals.keys() == found.metrics.keys()
    told = command("evaluate", "text", "--data.path", test)
    assert f"{found.metric} (decides)  {found.metrics[found.metric]:.4f} " in told
    assert "10 documents, " in told
    (tmp_path / "empty.txt").write_text("\n \n")
    told = command("evaluate", "text", "--data.path", str(tmp_path / "empty.txt"), ends=2)
    assert "empty.txt: holds no words" in told
