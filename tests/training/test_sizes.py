"""Batches and epochs by the number of training rows."""

from typing import Any

import pytest

from dphybrid.config import ExperimentConfig
from dphybrid.recipes.configs import build_config
from dphybrid.recipes.registry import find_recipe

NO_IDS: dict[str, Any] = {"num_ids": []}


def of_ctr(rows: int, **train: Any) -> tuple[ExperimentConfig, list[str]]:
    return find_recipe("ctr").sized(build_config({"recipe": "ctr", "train": train}), rows, NO_IDS)


SIZES = [(5, 32, 200, 5), (300, 32, 200, 5), (1000, 32, 125, 5), (6000, 256, 167, 5)]
SIZES += [(26_000, 512, 78, 5), (10**8, 512, 10, 3)]


@pytest.mark.parametrize(("rows", "batch_size", "epochs", "patience"), SIZES)
def test_they_follow_the_rows(rows: int, batch_size: int, epochs: int, patience: int) -> None:
    config, lines = of_ctr(rows)
    assert (config.train.batch_size, config.train.epochs) == (batch_size, epochs)
    assert config.train.patience == patience
    names = ["train.batch_size", "train.epochs", "train.patience", "table.lr"]
    assert [line.partition("=")[0] for line in lines] == names
    assert lines[0].startswith(f"train.batch_size={batch_size}: {rows:,} training rows / 32")
    assert find_recipe("ctr").sized(config, rows, NO_IDS) == (config, [])


@pytest.mark.parametrize(("rows", "batch_size"), [(100, 32), (86_835, 256), (272_115, 1024), (10**8, 4096)])
def test_triples_have_about_as_many_batches_an_epoch(rows: int, batch_size: int) -> None:
    config, (line,) = find_recipe("kge").sized(build_config({"recipe": "kge"}), rows, NO_IDS)
    assert config.train.batch_size == batch_size
    assert line.startswith(f"train.batch_size={batch_size}: {rows:,} training rows / 256, rounded")


def test_given_values_win() -> None:
    config, lines = of_ctr(1000, batch_size=100, epochs=7, patience=0, lr=0.01)
    assert (config.train.batch_size, config.train.epochs, config.train.patience) == (100, 7, 0)
    assert lines == ["table.lr=0.05: 5 x train.lr, as there are only 70 steps"]


@pytest.mark.parametrize(
    ("rows", "values", "share"),
    [(64_000, 1000, 1.0), (4800, 1200, 0.03), (12_800, 1600, 0.12), (90_000, 1600, 1.0)],
)
def test_rows_of_columns_of_many_values_learn_slowly(rows: int, values: int, share: float) -> None:
    config = build_config({"recipe": "ctr"})
    found, lines = find_recipe("ctr").sized(config, rows, {"num_ids": [7, values]})
    assert found.table.lr == pytest.approx(share * config.train.lr)
    why = f", as a column of {values:,} values has {rows / values:.3g} rows per value"
    told = why if values > 1000 else ""
    assert lines[-1] == f"table.lr={found.table.lr:g}: {share:g} x train.lr{told}"


@pytest.mark.parametrize("train", [{}, {"epochs": 1}])
def test_many_rows_and_values_take_one_pass_in_which_rows_learn_fast(train: dict[str, Any]) -> None:
    recipe, info = find_recipe("ctr"), {"num_ids": [50_000, 7]}
    config = build_config({"recipe": "ctr", "train": train})
    found, lines = recipe.sized(config, 160_000, info)
    assert (found.train.batch_size, found.train.epochs) == (512, 1)
    assert (found.table.optimizer, found.model.unknown) == ("adagrad", 0.02)
    assert found.model.dropout == 0
    why = "one pass over 160,000 training rows, with a column of 50,000 values"
    assert {f"table.optimizer=adagrad: {why}", f"model.dropout=0: {why}"} <= {*lines}
    assert found.table.lr == pytest.approx(80 * found.train.lr)
    assert recipe.sized(found, 160_000, info) == (found, [])
    assert recipe.sized(config, 1_600_000, info)[0].train.batch_size == 2048
    # What is set stays, and so do the rules for fewer rows or values, other networks and learned rows.
    of_user = {"batch_size": 64, "epochs": 1, "patience": 0}
    table = {"optimizer": "adam", "lr": 0.5}
    of_model = {"unknown": 0.1, "dropout": 0.2}
    given = build_config({"recipe": "ctr", "train": of_user, "table": table, "model": of_model})
    assert recipe.sized(given, 160_000, info) == (given, [])
    dcn = build_config({"recipe": "ctr", "model": {"kind": "dcn"}})
    of_warm = train | {"warm_start": "checkpoint"}
    warm = build_config({"recipe": "ctr", "train": of_warm})
    cases = (
        (config, 90_000, 50_000),
        (config, 160_000, 1000),
        (dcn, 160_000, 50_000),
        (warm, 160_000, 50_000),
        (build_config({"recipe": "ctr", "train": {"epochs": 4}}), 160_000, 50_000),
    )
    for other, rows, values in cases:
        usual = recipe.sized(other, rows, {"num_ids": [values]})[0]
        assert (usual.table.optimizer, usual.model.unknown) == ("adam", 0.3)
        assert usual.model.dropout == 0.1


def test_rows_learn_faster_in_a_short_training() -> None:
    cases = ((3, 5, 5.0), (50, 5, 2.5), (500, 5, 1.0), (3, 5000, 1.25), (500, 5000, 0.03))
    for epochs, values, share in cases:
        config = build_config({"recipe": "ctr", "train": {"epochs": epochs}})
        found, _ = find_recipe("ctr").sized(config, 1000, {"num_ids": [values]})
        assert found.table.lr == pytest.approx(share * found.train.lr)
    config = build_config({"recipe": "ctr", "model": {"kind": "dcn"}})
    assert find_recipe("ctr").sized(config, 1000, {"num_ids": [5000]})[0].table.lr == config.train.lr
