"""A recipe from a package outside the project: data, model and task of its own, prepared, trained, resumed,
compared and loaded."""

import json
import os
from pathlib import Path

import pytest
import torch

import dphybrid
from dphybrid.cli.main import main
from dphybrid.data import batches
from dphybrid.recipes import find_recipe
from dphybrid.recipes.configs import load_config
from dphybrid.recipes.registry import announced
from dphybrid.util.errors import UserError
from tests.commands import command

PACKAGE = '''
import numpy as np
import torch
from pydantic import Field

from dphybrid.parallel import DataParallel
from dphybrid.recipes import DataConfig, ModelConfig, Recipe, Task


class RatingsData(DataConfig):
    """Made-up ratings."""

    users: int = Field(default=40, ge=1)
    """Number of users."""


class RatingsModel(ModelConfig):
    """How large."""

    dim: int = Field(default=8, ge=1)
    """Width of a row."""


class Ratings(Recipe):
    name = "ratings"
    summary = "Ratings of films by users."
    data = RatingsData
    model = RatingsModel
    train = {"epochs": 2, "batch_size": 50, "lr": 0.01}
    table = {"optimizer": "adagrad", "lr": 0.2}

    def rows(self, data, seed):
        random = np.random.default_rng(seed)
        taste = random.normal(size=data.users)
        split = []
        for count in (600, 200):
            users = random.integers(0, data.users, count)
            labels = taste[users] + 0.1 * random.normal(size=count)
            split.append({"users_B": users, "labels_B": labels.astype(np.float32)})
        return tuple(split)

    def build(self, context):
        return Net(context)

    def task(self, info):
        return Task("mae", False, mean_error, reads=("error_B",))


def mean_error(outputs):
    return {"mae": float(outputs["error_B"].mean()), "worst": float(outputs["error_B"].max())}


class Net(torch.nn.Module):
    def __init__(self, context):
        super().__init__()
        self.table = context.table(context.info["num_ids"]["users_B"], context.options.dim, name="users")
        self.region = DataParallel(torch.nn.Linear(context.options.dim, 1), context.devices)

    def table_ids(self, batch):
        return {"table": batch["users_B"]}

    def forward(self, batch):
        rating_B = self.region(self.table(batch["users_B"])).squeeze(1)
        error_B = rating_B - batch["labels_B"].to(rating_B)
        weight_B = torch.ones_like(error_B)
        return {"loss": error_B.square(), "weight": weight_B, "error_B": error_B.detach().abs()}
'''


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
def test_a_recipe_of_a_foreign_package_does_all_that_built_in_ones_do(
    package: Path, data_dir: Path, tmp_path: Path
) -> None:
    help_text = command("train", "--help", "--recipe", "ratings")
    assert "--data.users" in help_text
    assert "--model.dim" in help_text
    assert "--data.schema-file" not in help_text
    assert "600 samples to train, 200 to validate" in command(
        "prepare", "--recipe", "film_club.recipe:Ratings"
    )
    values = ["--recipe", "ratings", "--devices", "cpu*2", "--run-name", "first"]
    command("train", *values, "--report", str(tmp_path / "first.json"))
    command(
        "train", *values, "--resume", "first", "--train.epochs", "6", "--report", str(tmp_path / "more.json")
    )
    command(
        "train",
        *values[:4],
        "--run-name",
        "second",
        "--train.epochs",
        "6",
        "--report",
        str(tmp_path / "second.json"),
    )
    first, more, second = (
        json.loads((tmp_path / f"{name}.json").read_text()) for name in ("first", "more", "second")
    )
    assert more["run_id"] == first["run_id"]
    assert set(more["metrics"]) == {"mae", "worst"}
    assert more["metrics"]["mae"] < first["metrics"]["mae"]
    assert second["metrics"]["mae"] < first["metrics"]["mae"]

    from mlflow.tracking import MlflowClient

    run = MlflowClient(more["tracking_uri"]).get_run(more["run_id"])
    assert run.data.metrics["final/mae"] == pytest.approx(more["metrics"]["mae"])
    assert run.data.params["recipe"] == "ratings"
    assert run.data.params["data.users"] == "40"
    assert "model.kind" not in run.data.params
    page = command("compare", "first", "second", "--out", str(tmp_path / "page"))
    assert "2 runs" in page

    model = dphybrid.load_model("second")
    config = load_config(None, ["recipe=ratings"])
    data = find_recipe("ratings").prepare(config.data, data_dir / "prepared", 0)
    assert data.reused
    (batch,) = batches(data.dataset("valid"), 200, seed=0, epoch=0, shuffle=False)
    with torch.no_grad():
        assert float(model.eval()(batch)["error_B"].mean()) == pytest.approx(
            second["metrics"]["mae"], rel=1e-5
        )


def test_mistakes_of_a_recipe_are_told(
    package: Path, data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path, words in (
        ("film_club.recipe:Nothing", ["no recipe 'Nothing'", "Ratings"]),
        ("film_club.nowhere:Ratings", ["no module named 'film_club.nowhere'"]),
        ("film_club.recipe:mean_error", ["no recipe 'mean_error'"]),
        ("rating", ["did you mean", "package.module:NAME"]),
    ):
        with pytest.raises(UserError) as told:
            load_config(None, [f"recipe={path}"])
        for word in words:
            assert word in str(told.value)
    with pytest.raises(UserError, match=r"data\.users = '0'.*greater than or equal to 1"):
        load_config(None, ["recipe=film_club.recipe:Ratings", "data.users=0"])


def test_an_interruption_while_a_recipe_is_imported_is_told(
    tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "slow_import.py").write_text("raise KeyboardInterrupt  # as Ctrl-C does\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["train", "--recipe", "slow_import:R"]) == 130
    assert capsys.readouterr().err == "\ninterrupted\n"


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ("{'a': [1, 2]}, {'b': [1]}", ["training split has ['a']", "['b']"]),
        ("{'a': ['x']}, {'a': ['y']}", ["'a'", "give numbers"]),
        ("{'a': [1, 2], 'b': [1]}, {'a': [1], 'b': [1]}", ["samples", "same number"]),
        ("[1, 2]", ["returned a list", "training split, validation split"]),
        ("{'a': [[1, 2]]}, {'a': [[1, 2, 3]]}", ["(2,) in training and (3,) in validation"]),
        ("{}, {}", ["no samples"]),
    ],
)
def test_rows_that_do_not_fit_are_told(
    rows: str,
    words: list[str],
    tmp_path: Path,
    data_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = f"mistaken_{abs(hash(rows))}"
    (tmp_path / f"{name}.py").write_text(
        "from dphybrid.recipes import Recipe\n\n\nclass R(Recipe):\n    name = 'r'\n\n    def rows(self, "
        f"data, seed):\n        return {rows}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["prepare", "--recipe", f"{name}:R"]) == 2
    told = capsys.readouterr().err
    for word in words:
        assert word in told


def test_a_recipe_that_lacks_a_part_says_which(
    tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "half_made.py").write_text(
        "from dphybrid.recipes import Recipe\n\n\nclass R(Recipe):\n    name = 'half'\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    recipe = find_recipe("half_made:R")
    for part, ask in (
        ("rows", lambda: recipe.prepare(recipe.data(), data_dir, 0)),
        ("build", lambda: recipe.build(None)),  # type: ignore[arg-type]
        ("task", lambda: recipe.task({})),
    ):
        with pytest.raises(UserError, match=rf"recipe half: define {part}\("):
            ask()
