"""Recipes with random data: shapes and parts; tests/training/test_training.py learns what was planted."""

from pathlib import Path

import numpy as np
import pytest

from dphybrid.recipes import find_recipe
from tests.preparing import prepare


@pytest.mark.parametrize(
    ("recipe", "shapes", "sizes", "task"),
    [
        ("toy", {"x_BI": (5,), "y_BO": (2,)}, (100, 100), "mse"),
        ("blocks", {"x_BI": (10,), "y_BO": (20,)}, (100, 100), "mse"),
        ("hybrid", {"ids_B": (), "y_BO": (10,)}, (10_000, 1_000), "mse"),
        ("convnet", {"x_BCHW": (3, 32, 32), "labels_B": ()}, (512, 256), "accuracy"),
    ],
)
def test_shapes(
    tmp_path: Path, recipe: str, shapes: dict[str, tuple[int, ...]], sizes: tuple[int, int], task: str
) -> None:
    prepared = prepare(recipe, None, tmp_path, 0)
    assert find_recipe(recipe).task(prepared.info).metric == task
    assert (len(prepared.dataset("train")), len(prepared.dataset("valid"))) == sizes
    batch = prepared.dataset("valid").fetch(np.array([3, 1, 2]))
    assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == {
        name: (3, *shape) for name, shape in shapes.items()
    }
