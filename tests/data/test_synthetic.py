"""Recipes with random data: shapes, parts, and an answer that can be learnt."""

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


def test_the_planted_map_explains_the_held_out_rows(tmp_path: Path) -> None:
    for recipe in ("toy", "blocks"):
        arrays = prepare(recipe, None, tmp_path, 0).arrays
        train, valid = arrays["train_rows"], arrays["valid_rows"]
        weights = np.linalg.lstsq(arrays["x_BI"][train], arrays["y_BO"][train], rcond=None)[0]
        error = arrays["y_BO"][valid] - arrays["x_BI"][valid] @ weights
        assert error.std() == pytest.approx(0.1, rel=0.2)  # the noise that was added


def test_images_of_a_class_resemble_each_other(tmp_path: Path) -> None:
    arrays = prepare("convnet", None, tmp_path, 0).arrays
    train, valid, x_BI = arrays["train_rows"], arrays["valid_rows"], arrays["x_BCHW"].reshape(768, -1)
    labels = arrays["labels_B"]
    means = np.stack([x_BI[train][labels[train] == c].mean(axis=0) for c in range(10)])
    assert ((x_BI[valid] @ means.T).argmax(axis=1) == labels[valid]).mean() > 0.9
