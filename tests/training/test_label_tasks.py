"""Labels of every kind from the table to predictions: what was planted is found, and a weight counts rows."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from mlflow.models import Model
from sklearn import metrics

import dphybrid
from dphybrid.config.settings import load_settings
from dphybrid.parallel import resolve_devices
from dphybrid.recipes import find_recipe
from dphybrid.recipes.context import ModelContext
from dphybrid.recipes.ctr import CtrModelConfig
from dphybrid.recipes.ctr.model import build_ctr
from dphybrid.training.bootstrap import interval, resampled
from dphybrid.training.label_tasks import label_task
from dphybrid.training.metrics import BINARY, MULTICLASS
from tests.commands import command, models_of
from tests.refusing import refused

KINDS = ["red", "green", "blue"]
MODEL = {"dim": 4, "hidden": 16, "layers": 1, "dropout": 0.0}
VALUES: dict[str, Any] = {"devices": "cpu", "tracking": "none", "quiet": True, "epochs": 5, "batch_size": 32}
VALUES |= {"model": MODEL, "table": {"lr": 0.1}, "train": {"lr": 0.02}}


def rows(num_rows: int = 600) -> pl.DataFrame:
    """A table whose labels follow from its features: a class of shop, and a size of both."""
    random = np.random.default_rng(0)
    shop, price = random.integers(0, 6, num_rows), random.uniform(0, 10, num_rows).round(2)
    return pl.DataFrame(
        {
            "shop": [f"s{number}" for number in shop],
            "price": price,
            "kind": [KINDS[number % 3] for number in shop],
            "size": 5000 + 300.0 * shop + 100 * price + random.normal(0, 20, num_rows),
        }
    )


def trained(label: str, **more: Any) -> Any:
    ignore = [name for name in ("kind", "size") if name != label]
    return dphybrid.train(rows(), label=label, ignore=ignore, **{"run_name": label} | VALUES | more)


def predicted(run: Any, folder: Path, what: str) -> pl.DataFrame:
    rows().write_parquet(folder / "new.parquet")
    given = ["--data.path", str(folder / "new.parquet"), "--keep", "shop"]
    told = command("predict", run.name, *given, "--out", str(folder / "out.parquet"))
    assert f"600 predictions of {what}" in told
    return pl.read_parquet(folder / "out.parquet")


def recorded_outputs(run: Any) -> Any:
    """The columns that a run's model in MLflow returns."""
    best = next(model for model in models_of(run.report().values) if "best" in model.tags["dphybrid.role"])
    return Model.load(best.artifact_location.removeprefix("file://")).signature.outputs


def test_classes(data_dir: Path, tmp_path: Path) -> None:
    run = trained("kind", tracking=None, devices="cpu*2", model=MODEL | {"kind": "dcn"})
    assert run.metrics.keys() == {"accuracy", "macro_f1", "log_loss"}
    assert run.metrics["accuracy"] > 0.95
    assert run.metrics["macro_f1"] > 0.95
    assert run.metrics["log_loss"] < 0.4
    history = run.history["validation log_loss"]
    best = run.history["step"][int(np.argmin(history))]  # type: ignore[arg-type]
    assert run.checkpoint.name == f"step-{int(best):06d}"
    probabilities_BC = run.predict(rows())
    assert probabilities_BC.shape == (600, 3)
    assert probabilities_BC.sum(1) == pytest.approx(np.ones(600), abs=1e-5)
    found = predicted(run, tmp_path, "kind (3 classes)")
    names = [f"probability_{name}" for name in sorted(KINDS)]
    assert found.columns == ["file", "line", "prediction", *names, "shop"]
    assert (found["prediction"] == rows()["kind"]).mean() > 0.95  # type: ignore[operator]
    np.testing.assert_allclose(found.select(names).to_numpy(), probabilities_BC, atol=1e-6)
    predictor = dphybrid.load(str(run.checkpoint))
    assert predictor.classes == tuple(sorted(KINDS))
    assert "kind (3 classes)" in repr(predictor)
    with refused(r"--keep probability_red: .*new\.parquet has no such column"):
        predictor.predict_file(tmp_path / "new.parquet", tmp_path / "no.csv", keep=["probability_red"])
    assert recorded_outputs(run).input_names() == names


def test_a_number_and_the_run_goes_on(data_dir: Path, tmp_path: Path) -> None:
    run = trained("size", tracking=None, epochs=3)
    spread = float(rows()["size"].std())  # type: ignore[arg-type]
    run = trained("size", tracking=None, resume="size", run_name=None)
    assert run.metrics.keys() == {"rmse", "mae", "r2"}
    assert run.metrics["rmse"] < 0.3 * spread
    assert run.metrics["mae"] < run.metrics["rmse"]
    assert run.metrics["r2"] > 0.9
    best = run.history["validation rmse"].min()
    assert run.metrics["rmse"] == pytest.approx(best, rel=1e-5)
    found = predicted(run, tmp_path, "size")
    assert found.columns == ["file", "line", "prediction", "shop"]
    errors = found["prediction"].to_numpy() - rows()["size"].to_numpy()
    assert np.sqrt((errors**2).mean()) < 0.3 * spread
    assert found["prediction"].dtype == pl.Float64
    assert [column.type.name for column in recorded_outputs(run)] == ["double"]


def of_label(
    task: str, offset: float = 0.0, scale: float = 1.0, classes: Sequence[str] = ()
) -> dict[str, Any]:
    return {"label": {"task": task, "classes": list(classes), "offset": offset, "scale": scale}}


LABELS = {"binary": {}, "multiclass": of_label("multiclass", classes="abc")}
LABELS |= {"regression": of_label("regression", 40.0, 8.0)}


@pytest.mark.parametrize("kind", ["mlp", "dcn", "dlrm"])
@pytest.mark.parametrize("label", LABELS)
def test_a_weight_of_two_is_the_row_twice(kind: Any, label: str) -> None:
    facts: dict[str, Any] = {"num_ids": [5, 7], "num_dense": 3} | LABELS[label]
    options = CtrModelConfig(kind=kind, dim=4, hidden=8, layers=1, dropout=0.0, dtype="float64")
    torch.manual_seed(0)
    model = build_ctr(ModelContext(resolve_devices("cpu"), facts, options, seed=0)).double()
    batch = {
        "ids_BF": torch.tensor([[1, 2], [3, 6], [4, 0]]),
        "dense_BN": torch.randn(3, 3),
        "labels_B": torch.tensor([1.0, 0.0, 1.0]),
    }
    weighted = model(batch | {"weights_B": torch.tensor([2.0, 1.0, 0.5])})
    twice = model({name: values[[0, 0, 1, 2]] for name, values in batch.items()})
    halved = twice["loss"] * torch.tensor([1, 1, 1, 0.5])
    mean = weighted["loss"].sum() / weighted["weight"].sum()
    assert mean.item() == pytest.approx(halved.sum().item() / 3.5, rel=1e-6)
    task = label_task(facts)
    one = {"labels_B": batch["labels_B"], "logits": weighted["logits"].detach()}
    one["weight"] = torch.tensor([2, 1, 1])
    two = {n: values[[0, 0, 1, 2]] for n, values in one.items()} | {"weight": torch.ones(4)}
    assert task.compute(one) == pytest.approx(task.compute(two), rel=1e-6)


def test_the_metrics_of_numbers_are_those_of_scikit_learn() -> None:
    torch.manual_seed(1)
    logits_B, labels_B, weights_B = torch.randn(50, dtype=torch.float64), torch.randn(50), torch.rand(50)
    facts = of_label("regression", 10.0, 4.0)
    found = label_task(facts).compute({"logits": logits_B, "labels_B": labels_B, "weight": weights_B})
    given, weights = (10 + 4 * labels_B.double(), 10 + 4 * logits_B), weights_B.double()
    assert found["r2"] == pytest.approx(metrics.r2_score(*given, sample_weight=weights))
    assert found["rmse"] == pytest.approx(metrics.root_mean_squared_error(*given, sample_weight=weights))


@pytest.mark.parametrize("weighted", [False, True])
def test_scores_of_classes_are_scikit_learns(weighted: bool) -> None:
    random = np.random.default_rng(5)
    weights_B = random.random(200) * (random.random(200) < 0.7) if weighted else None
    weight = {} if weights_B is None else {"weight": torch.from_numpy(weights_B)}
    labels_B, logits_BC = random.integers(0, 3, 200), random.normal(size=(200, 6))
    logits_BC[:, 5] = -9  # a class that is neither a label nor predicted
    outputs = {"logits": torch.from_numpy(logits_BC), "labels_B": torch.from_numpy(labels_B).float()}
    found = label_task(of_label("multiclass", classes=list("abcdef"))).compute(outputs | weight)
    given = labels_B, logits_BC.argmax(1)
    assert found["accuracy"] == pytest.approx(metrics.accuracy_score(*given, sample_weight=weights_B))
    expected = metrics.f1_score(*given, average="macro", sample_weight=weights_B, zero_division=0.0)
    assert found["macro_f1"] == pytest.approx(expected)


class OwnBinary(type(find_recipe("ctr"))):  # type: ignore[misc]
    """A recipe of before labels of other kinds."""

    name = "own-binary"

    def task(self, info: Any) -> Any:
        from dphybrid.training.metrics import BINARY

        return BINARY


def test_a_recipe_that_learns_two_classes_refuses_others(data_dir: Path) -> None:
    for more, words in (
        ({"recipe": f"{__name__}:OwnBinary"}, "own-binary learns binary labels only, .* is multiclass"),
        ({"weight": "gone"}, "weight='gone': data has no such column"),
        ({"times": ["gone"]}, "times='gone': data has no such column"),
    ):
        with refused(words):
            trained("kind", **more)
    assert not list(load_settings().runs_dir.glob("kind/checkpoints/*"))
    with refused("has 3 classes, but the model returns logits of shape"):
        label_task(LABELS["multiclass"]).compute({"logits": torch.zeros(4), "labels_B": torch.zeros(4)})


def test_weights_count_in_the_accuracy_of_any_multiclass_recipe() -> None:
    outputs = {
        "logits": torch.eye(3),
        "labels_B": torch.tensor([0, 1, 0]),
        "loss": torch.tensor([1.0, 3.0, 0.0]),
    }
    weights = {"weight": torch.tensor([1.0, 3.0, 0.0])}  # the wrong row does not count
    assert MULTICLASS.compute(outputs | weights) == {"accuracy": 1.0, "loss": 1.0}
    assert MULTICLASS.compute(outputs | {"weight": torch.ones(3)})["accuracy"] == pytest.approx(2 / 3)


def test_the_loss_of_sure_and_wrong_predictions_is_not_cut_off() -> None:
    outputs = {"logits": torch.tensor([800.0, -2.0]), "labels_B": torch.tensor([0.0, 1.0])}
    found = BINARY.compute(outputs | {"weight": torch.tensor([1.0, 3.0])})
    assert found["log_loss"] == pytest.approx((800 + 3 * np.log1p(np.exp(2))) / 4)


def test_resamples_take_the_same_rows_of_all_models() -> None:
    outputs = {"labels_B": torch.tensor([0.0, 1.0, 1.0]), "logits": torch.tensor([-1.0, 1.0, 2.0])}
    found = resampled(BINARY, [outputs, outputs], 100, seed=0)
    assert 0 < len(found) < 100  # of three rows, often all have one label
    assert all(first == second for first, second in found)


def test_rows_of_weight_zero_do_not_spoil_an_interval() -> None:
    low, high = interval([math.nan, *(number / 100 for number in range(101))])
    assert (low, high) == pytest.approx((0.025, 0.975))
    assert all(map(math.isnan, interval([math.nan])))
