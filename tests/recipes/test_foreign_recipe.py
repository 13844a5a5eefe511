"""A recipe of a package outside the project is prepared, trained, resumed and loaded."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import dphybrid
from dphybrid.data import batches
from dphybrid.recipes import find_recipe
from dphybrid.recipes.configs import load_config
from dphybrid.recipes.registry import announced
from dphybrid.tracking.tracker import CONTINUES_TAG
from tests.commands import command
from tests.conftest import REPOSITORY

PACKAGE = (REPOSITORY / "examples/own_recipe.py").read_text(encoding="utf-8")


@pytest.fixture
def package(tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package `film_club` with a recipe, on the path, which announces it as `ratings` by an entry point."""
    root = tmp_path / "site"
    (root / "film_club").mkdir(parents=True)
    (root / "film_club" / "__init__.py").write_text("")
    (root / "film_club" / "recipe.py").write_text(PACKAGE)
    facts = root / "film_club-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: film-club\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[dphybrid.recipes]\nratings = film_club.recipe:Ratings\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.syspath_prepend(str(root))
    announced.cache_clear()
    return root


@pytest.mark.slow
def test_a_recipe_of_a_foreign_package_is_as_a_built_in_one(
    package: Path, data_dir: Path, tmp_path: Path
) -> None:
    help_text = command("train", "--help", "--recipe", "ratings")
    assert "--data.num-ratings" in help_text
    assert "--data.min-count" not in help_text
    few = ["--data.num-ratings", "1000"]
    assert "900 samples to train, 100 to validate" in command(
        "prepare", "--recipe", "film_club.recipe:Ratings", *few
    )

    def trained(name: str, epochs: int, *more: str) -> Any:
        values = ["--recipe", "ratings", "--devices", "cpu*2", *few, "--train.epochs", str(epochs)]
        command("train", *values, *more, name)
        return json.loads((data_dir / "runs" / name / "report.json").read_text())

    first = trained("first", 1, "--run-name")
    more, second = trained("first", 3, "--resume"), trained("second", 3, "--run-name")
    assert set(more["metrics"]) == {"right"}
    assert min(more["metrics"]["right"], second["metrics"]["right"]) > first["metrics"]["right"]

    from mlflow.tracking import MlflowClient

    run = MlflowClient(more["tracking_uri"]).get_run(more["run_id"])
    assert run.data.tags[CONTINUES_TAG] == first["run_id"]
    assert run.data.metrics["final_right"] == pytest.approx(more["metrics"]["right"])
    assert run.data.params["recipe"] == "ratings"
    assert run.data.params["data.num_ratings"] == "1000"
    assert "model.kind" not in run.data.params

    model = dphybrid.load_model("second")
    config = load_config(None, ["recipe=ratings", "data.num_ratings=1000"])
    data = find_recipe("ratings").prepare(config.data, data_dir / "prepared", 0)
    assert data.reused
    (batch,) = batches(data.dataset("valid"), 200, seed=0, epoch=0, shuffle=False)
    with torch.no_grad():
        right_B = model.eval()(batch)["said"].sign() == batch["stars"].sign()
    assert float(right_B.double().mean()) == pytest.approx(second["metrics"]["right"])
