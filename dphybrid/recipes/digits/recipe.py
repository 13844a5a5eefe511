"""Recipe digits: scikit-learn's handwritten digits, by a convolutional or a capsule network."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from dphybrid.config import DataConfig
from dphybrid.recipes.digits import DigitsModelConfig
from dphybrid.recipes.recipe import Recipe

if TYPE_CHECKING:
    import numpy as np
    from torch import nn

    from dphybrid.data.store import Source
    from dphybrid.recipes.context import ModelContext
    from dphybrid.recipes.given import Made
    from dphybrid.training.metrics import Task


class Digits(Recipe):
    """Handwritten digits."""

    name = "digits"
    summary = (
        "Handwritten digits of 8 x 8 pixels, which come with scikit-learn: convolutions or capsules, "
        "without a table."
    )
    model = DigitsModelConfig
    one_process = True
    train = {"epochs": 15, "batch_size": 64, "log_every": 10}

    def source(self, data: DataConfig, seed: int) -> "Source":
        from dphybrid.recipes.given import MadeSource

        return MadeSource(seed, 1437, 360, _digits)

    def build(self, context: "ModelContext[DigitsModelConfig]") -> "nn.Module":
        from dphybrid.recipes.digits.model import build_digits

        return build_digits(context)

    def task(self, info: Mapping[str, object]) -> "Task":
        from dphybrid.training.metrics import MULTICLASS

        return MULTICLASS


def _digits(random: "np.random.Generator", rows: int) -> "Made":
    """Take `rows` of the images (UCI, 8 x 8 pixels) in random order."""
    from sklearn.datasets import load_digits

    found = load_digits()
    order = random.permutation(len(found.target))[:rows]
    x_BCHW = (found.images[order, None] / 16).astype("float32")
    arrays = {"x_BCHW": x_BCHW, "labels_B": found.target[order].astype("int64")}
    info = {"num_classes": 10, "image": list(x_BCHW.shape[1:])}
    return arrays, info, "handwritten digits of 8 x 8 pixels (UCI)"
