"""Data that needs no files: random rows with a planted answer for the tutorials' models (toy, blocks, hybrid, convnet), and the handwritten
digits that come with scikit-learn."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dphybrid.data.batches import Array
from dphybrid.data.store import Content, Progress
from dphybrid.util.errors import UserError

Made = tuple[dict[str, Array], dict[str, Any], str]


@dataclass(frozen=True)
class SyntheticSource:
    """Draws a recipe's rows; the training part comes first."""

    recipe: str
    seed: int

    @property
    def options(self) -> dict[str, Any]:
        return {}

    @property
    def files(self) -> tuple[Path, ...]:
        return ()

    def digests(self, progress: Progress) -> list[bytes]:
        return []

    def read(self, progress: Progress, scratch: Path) -> Content:
        num_train, num_valid, make = _SHAPES[self.recipe]
        arrays, info, words = make(np.random.default_rng([self.seed, 7]), num_train + num_valid)
        parts = {"train_rows": np.arange(num_train), "valid_rows": np.arange(num_train, num_train + num_valid)}
        lines = [f"  {words}: {num_train:,} rows to train, {num_valid:,} held out"]
        return Content("arrays", arrays | parts, info, lines, tuple(arrays))


def open_source(recipe: str, seed: int) -> SyntheticSource:
    """Find the recipe. Raises UserError for one that has no data of its own."""
    if recipe not in _SHAPES:
        raise UserError(f"recipe={recipe!r}: there is none of that name; choose one of text, ctr, kge, {', '.join(_SHAPES)}")
    return SyntheticSource(recipe, seed)


def _linear(inputs: int, outputs: int) -> Callable[[np.random.Generator, int], Made]:
    def make(random: np.random.Generator, rows: int) -> Made:
        x_BI = random.standard_normal((rows, inputs), dtype=np.float32)
        planted_IO = random.standard_normal((inputs, outputs), dtype=np.float32)
        noise_BO = 0.1 * random.standard_normal((rows, outputs), dtype=np.float32)
        info = {"task": "regression", "num_inputs": inputs, "num_outputs": outputs}
        return {"x_BI": x_BI, "y_BO": x_BI @ planted_IO + noise_BO}, info, f"random rows of {inputs} features, {outputs} answers"

    return make


def _rows_of_table(random: np.random.Generator, rows: int) -> Made:
    num_ids, width = 1000, 10
    ids_B = random.integers(0, num_ids, rows, dtype=np.int64)
    planted_VO = random.standard_normal((num_ids, width), dtype=np.float32)
    noise_BO = 0.1 * random.standard_normal((rows, width), dtype=np.float32)
    info = {"task": "regression", "num_ids": num_ids, "num_outputs": width}
    return {"ids_B": ids_B, "y_BO": planted_VO[ids_B] + noise_BO}, info, f"random ids below {num_ids}, {width} answers"


def _images(random: np.random.Generator, rows: int) -> Made:
    classes, side = 10, 32
    labels_B = random.integers(0, classes, rows, dtype=np.int64)
    planted = random.standard_normal((classes, 3, side, side), dtype=np.float32)
    x_BCHW = 0.5 * planted[labels_B] + random.standard_normal((rows, 3, side, side), dtype=np.float32)
    return (
        {"x_BCHW": x_BCHW, "labels_B": labels_B},
        {"task": "multiclass", "num_classes": classes},
        f"noisy images of {classes} classes",
    )


def _digits(random: np.random.Generator, rows: int) -> Made:
    from sklearn.datasets import load_digits

    found = load_digits()
    order = random.permutation(len(found.target))[:rows]
    x_BCHW = (found.images[order, None] / 16).astype(np.float32)
    info = {"task": "multiclass", "num_classes": 10, "image": list(x_BCHW.shape[1:])}
    return {"x_BCHW": x_BCHW, "labels_B": found.target[order].astype(np.int64)}, info, "handwritten digits of 8 x 8 pixels (UCI)"


_SHAPES: dict[str, tuple[int, int, Callable[[np.random.Generator, int], Made]]] = {
    "toy": (100, 100, _linear(5, 2)),
    "blocks": (100, 100, _linear(10, 20)),
    "hybrid": (10_000, 1_000, _rows_of_table),
    "convnet": (512, 256, _images),
    "digits": (1437, 360, _digits),
}
