"""A recipe of one's own: mistakes in its name, data and parts are told; numbers of its rows keep their
differences."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from torch.utils.data import TensorDataset

from dphybrid.data import Vocabulary
from dphybrid.recipes import Recipe
from dphybrid.recipes.configs import load_config
from dphybrid.recipes.given import GivenSource, as_arrays
from tests.refusing import refused, refused_with


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("examples.own_recipe:Nothing", ["no recipe 'Nothing'", "Ratings"]),
        ("examples.nowhere:Ratings", ["no module named 'examples.nowhere'"]),
        ("examples.own_recipe:share_right", ["no recipe 'share_right'"]),
        (
            "examples.own_recipe:Ratings data.num_ratings=0",
            ["data.num_ratings = '0'", "than or equal to 100"],
        ),
    ],
)
def test_mistakes_of_a_recipe_are_told(path: str, words: list[str]) -> None:
    with refused_with(words):
        load_config(None, f"recipe={path}".split())


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (({"a": [1, 2]}, {"b": [1]}), ["{'a': ()} in the train split and {'b': ()} in valid"]),
        (({"a": ["x"]}, {"a": ["y"]}), ["'a'", "give numbers"]),
        (({"a": [1, 2], "b": [1]}, {"a": [1], "b": [1]}), ["samples", "same number"]),
        ([1, 2], ["returned a list", "training split, validation split"]),
        (({"a": [[1, 2]]}, {"a": [[1, 2, 3]]}), ["{'a': (2,)} in the train split and {'a': (3,)} in valid"]),
        (({}, {}), ["no samples"]),
        (({"a/b": [1]}, {"a/b": [1]}), ["'a/b' cannot be the name", "without slashes"]),
        (({"a": [1]}, {"a": [1]}, {"a/b": Vocabulary()}), ["'a/b' cannot be the name"]),
        (({"train_rows": [7]}, {"train_rows": [7]}), ["'train_rows' cannot be the name"]),
    ],
)
def test_rows_that_do_not_fit_are_told(rows: Any, words: list[str], tmp_path: Path) -> None:
    recipe = Recipe()
    recipe.name, recipe.rows = "r", lambda data, seed: rows  # type: ignore[method-assign]
    with refused_with(words):
        recipe.prepare(recipe.data(), tmp_path, 0)


def test_a_split_is_arrays_a_frame_or_a_dataset() -> None:
    columns = {"inputs_B": np.arange(4), "labels_B": np.linspace(0, 1, 4, dtype=np.float32)}
    tensors = {name: torch.from_numpy(values) for name, values in columns.items()}
    of_dicts = [{name: values[row] for name, values in tensors.items()} for row in range(4)]
    for split in (columns, tensors, pl.DataFrame(columns), of_dicts, TensorDataset(*tensors.values())):
        found = as_arrays(split, "split")
        assert {name: (array.dtype, array.tolist()) for name, array in found.items()} == {
            name: (values.dtype, values.tolist()) for name, values in columns.items()
        }


def test_an_array_named_like_a_part_is_none(tmp_path: Path) -> None:
    recipe = Recipe()
    recipe.name, split = "r", {"test_score": [1.5, 2.5]}
    recipe.rows = lambda data, seed: (split, split)  # type: ignore[method-assign]
    assert recipe.prepare(recipe.data(), tmp_path, 0).parts == ["train", "valid"]


def test_a_recipe_that_lacks_a_part_says_which(tmp_path: Path) -> None:
    recipe = Recipe()
    recipe.name = "half"
    for part, ask in (
        ("rows", lambda: recipe.prepare(recipe.data(), tmp_path, 0)),
        ("build", lambda: recipe.build(None)),  # type: ignore[arg-type]
        ("task", lambda: recipe.task({})),
    ):
        with refused(rf"recipe half: define {part}\("):
            ask()


@pytest.mark.parametrize(
    ("numbers", "dtype"),
    [
        (1.7e9 + 60.0 * np.arange(100), np.float64),  # times a minute apart
        (16_777_216.0 + np.arange(100), np.float64),  # whole numbers beyond those of float32
        (np.linspace(-3, 3, 100), np.float32),
        (np.full(100, 1e12), np.float32),
        (np.array([np.nan, 0.5, np.inf]), np.float32),
    ],
)
def test_float64_stays_where_float32_would_merge_values(
    numbers: np.ndarray, dtype: type[np.floating], tmp_path: Path
) -> None:
    source = GivenSource("mine", lambda *_: ({"x": numbers}, {"x": numbers}), SimpleNamespace(), 0)
    assert source.read(print, tmp_path).arrays["x"].dtype == dtype
