"""What a run is compared with, columns that give the label away, and the floor of a first model."""

from pathlib import Path

import numpy as np
import polars as pl
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss, roc_auc_score
from sklearn.preprocessing import TargetEncoder

import dphybrid
from dphybrid.data import Prepared
from dphybrid.recipes.configs import build_config
from dphybrid.recipes.ctr.leaks import _means_of_values
from dphybrid.recipes.registry import find_recipe
from dphybrid.run.pages import MetricsPage
from dphybrid.util.roc import area_under_roc
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


def test_they_are_a_constant_and_scikit_learns_linear_model(tmp_path: Path) -> None:
    data = prepared(table().drop("score"), tmp_path, "clicked", buckets=0)
    found = find_recipe("ctr").baselines(data)
    assert list(found) == ["majority class", "linear model"]
    assert found["majority class"]["auc"] == 0.5
    frame, arrays = table(), data.arrays
    inputs = np.column_stack([frame["price"], *(frame["shop"] == f"shop {n}" for n in range(3))])
    clicked, train, valid = frame["clicked"].to_numpy(), arrays["train_rows"], arrays["valid_rows"]
    model = LogisticRegression().fit(inputs[train], clicked[train])
    expected = roc_auc_score(clicked[valid], model.decision_function(inputs[valid]))
    assert found["linear model"]["auc"] == pytest.approx(expected, abs=0.005)


def test_two_of_three_classes_in_training_have_scikit_learns_probabilities(tmp_path: Path) -> None:
    frame = table().drop("score").with_row_index("day")
    newest = frame["day"].max()
    clicked = (
        pl.when(pl.col("day") == newest).then(pl.lit("new")).otherwise(pl.col("clicked").cast(pl.String))
    )
    data = prepared(
        frame.with_columns(clicked=clicked), tmp_path, "clicked", split="time", split_column="day", buckets=0
    )
    found = find_recipe("ctr").baselines(data)["linear model"]["log_loss"]
    train, valid = (frame[data.arrays[f"{part}_rows"]] for part in ("train", "valid"))
    known = valid.filter(pl.col("day") != newest)
    share = len(known) / len(valid)

    def inputs(part: pl.DataFrame) -> np.ndarray:
        return np.column_stack([part["price"], *(part["shop"] == f"shop {n}" for n in range(3))])

    model = LogisticRegression().fit(inputs(train), train["clicked"].to_numpy())
    loss = log_loss(known["clicked"].to_numpy(), model.predict_proba(inputs(known)))
    assert found == pytest.approx(share * loss + (1 - share) * 30, abs=0.04)  # 0.09 with doubled scores


@pytest.mark.parametrize(
    ("label", "task", "metric"),
    [("score", "regression", "r2"), ("visits", "counts", "mae"), ("kind", "multiclass", "accuracy")],
)
def test_they_are_there_for_every_kind_of_label(label: str, task: str, metric: str, tmp_path: Path) -> None:
    frame = table()
    visits = (2 * frame["price"].exp()).round().cast(pl.Int64)
    kind = thirds(frame)
    frame = frame.drop("clicked").with_columns(visits=visits, kind=kind)
    others = {"score", "visits", "kind"} - {label}
    data = prepared(frame.drop(others), tmp_path, label, task=task)
    constant, linear = find_recipe("ctr").baselines(data).values()
    better = linear[metric] - constant[metric]
    assert (better if metric != "mae" else -better) > 0.1


@pytest.mark.parametrize(
    ("label", "leaking"), [("clicked", ["score"]), ("score", ["twice"]), ("kind", ["copy"])]
)
def test_a_column_that_gives_the_label_away_is_named(label: str, leaking: list[str], tmp_path: Path) -> None:
    frame = table()
    kind = thirds(frame)
    more = {"score": {"twice": 2 * frame["score"] + 1}, "kind": {"kind": kind, "copy": "a " + kind}}
    frame = frame.with_columns(**more.get(label, {}))
    if label != "clicked":
        frame = frame.drop("clicked", *(["score", "price"] if label == "kind" else []))
    said = find_recipe("ctr").doubts(prepared(frame, tmp_path, label))
    assert [line.split("'")[1] for line in said] == leaking
    assert f"--data.ignore {leaking[0]}" in said[0]
    honest = table().drop("score")
    assert find_recipe("ctr").doubts(prepared(honest, tmp_path / "..", "clicked")) == []


def test_a_run_says_what_it_adds(
    data_dir: Path, tmp_path: Path, unrecorded: None, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "table.csv"
    table().write_csv(file)
    values = ["recipe=ctr", f"data.path={file}", "data.label=clicked", "train.epochs=2"]
    report = run_with(*values)
    doubt = "column 'score' alone predicts the label (AUC 1.0000)"
    assert f"Note: {doubt}" in capsys.readouterr().out
    assert report.text.rpartition("Doubt: ")[2].strip().startswith(doubt)  # the last lines
    (run,) = dphybrid.runs()
    assert run.doubts == report.doubts
    assert doubt in repr(run)
    assert doubt.replace("'", "&#x27;") in run._repr_html_()
    assert report.beside.startswith("majority class auc 0.5000 (this run is 0.")
    assert f"Baselines: {report.beside}" in " ".join(report.text.split())  # which wraps at 80 columns
    found = MetricsPage.read(data_dir / "runs" / report.run_name / "metrics.json").baselines
    assert found["majority class"]["auc"] == 0.5


def test_the_area_under_the_curve_is_scikit_learns() -> None:
    random = np.random.default_rng(0)
    labels_B, scores_B = random.integers(0, 2, 500), random.normal(size=500).round(1)  # with equal scores
    for weights_B in (None, random.random(500)):
        expected = roc_auc_score(labels_B, scores_B, sample_weight=weights_B)
        assert area_under_roc(labels_B, scores_B, weights_B) == pytest.approx(expected, rel=1e-12)
    assert np.isnan(area_under_roc(np.ones(3), scores_B[:3]))
    assert np.isnan(area_under_roc(labels_B[:2], np.array([0.0, np.nan])))


@pytest.mark.parametrize("classes", [1, 3])
def test_means_of_values_are_scikit_learns_target_encoding(classes: int) -> None:
    random = np.random.default_rng(0)
    ids_B, labels_B = random.integers(0, 40, 300), random.integers(0, max(2, classes), 300).astype(float)
    kind = "multiclass" if classes > 1 else "binary"
    encoder = TargetEncoder(target_type=kind, smooth=1.0).fit(ids_B[:, None], labels_B)
    found = _means_of_values(ids_B, labels_B, 40, classes)
    np.testing.assert_allclose(found[ids_B], encoder.transform(ids_B[:, None]), rtol=1e-12)


def test_facts_of_the_data_are_computed_once_and_a_damaged_one_again(tmp_path: Path) -> None:
    data, calls = prepared(table().drop("score"), tmp_path, "clicked"), []

    def compute() -> list[int]:
        calls.append(1)
        return [len(calls)]

    assert data.fact("calls", compute) == data.fact("calls", compute) == [1]
    file = data.path / "facts" / "calls.json"
    page = file.read_text()
    for damaged in ("{", page.replace("1\n", "7\n"), '{"value": [7]}', page.replace('"calls"', '"others"')):
        assert damaged != page
        file.write_text(damaged)
        assert data.fact("calls", compute) == [len(calls)], "computed again"
    assert len(calls) == 5
    file.rename(file.with_name("other.json"))
    assert data.fact("other", compute) == [6], "it is of another name"
    assert find_recipe("ctr").baselines(data) == find_recipe("ctr").baselines(data)
    assert sorted(file.name for file in (data.path / "facts").iterdir()) == ["baselines-5.json", "other.json"]
    assert (
        find_recipe("ctr").open(data.path, verified=True).digest == data.digest
    )  # no file of the data itself
