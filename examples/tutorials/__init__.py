"""Small recipes whose data is a few arrays: the four models of PyTorch's data-parallel tutorials, on random
data with a planted answer, and handwritten digits."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from pydantic import Field

from dphybrid.config import DataConfig, ModelConfig
from dphybrid.recipes.recipe import Recipe

if TYPE_CHECKING:
    import numpy as np
    from torch import nn

    from dphybrid.recipes.context import ModelContext
    from dphybrid.training.metrics import Task

    Arrays = dict[str, np.ndarray]

# No schedule and no gradient clipping, to keep to the tutorials' plain steps.
_PLAIN = {"schedule": "constant", "clip_norm": 0.0}


class HybridModelConfig(ModelConfig):
    """The sizes of the model."""

    dim: int = Field(default=10, ge=1, le=65536)
    """Width of an embedding row."""


class DigitsModelConfig(ModelConfig):
    """The sizes of the model."""

    hidden: int = Field(default=128, ge=1, le=65536)
    """Width of the hidden layer."""
    dropout: float = Field(default=0.2, ge=0.0, lt=1.0)
    """Share of activations dropped while training."""


class _Small(Recipe):
    """Base class: `draw` makes the arrays, and `build_NAME` of the module `model` builds recipe NAME's model.

    num_rows: in the training and the validation split. widths: numbers of inputs and outputs per sample; the
    outputs are a linear map of the inputs, with noise.
    """

    prints_shapes = True
    num_rows = (100, 100)
    widths = (5, 2)

    def draw(self, random: "np.random.Generator", rows: int) -> "Arrays":
        """Return the samples of both splits as arrays by name, samples on dim 0."""
        inputs, outputs = self.widths
        x_BI = random.standard_normal((rows, inputs), dtype="float32")
        planted_IO = random.standard_normal((inputs, outputs), dtype="float32")
        noise_BO = 0.1 * random.standard_normal((rows, outputs), dtype="float32")
        return {"x_BI": x_BI, "y_BO": x_BI @ planted_IO + noise_BO}

    def rows(self, data: DataConfig, seed: int) -> "tuple[Arrays, Arrays]":
        import numpy as np

        first, second = self.num_rows
        # One draw for both splits: they must share the planted answer.
        arrays = self.draw(np.random.default_rng([seed, 7]), first + second)
        train = {name: array[:first] for name, array in arrays.items()}
        return train, {name: array[first:] for name, array in arrays.items()}

    def build(self, context: "ModelContext[Any]") -> "nn.Module":
        from . import model

        return cast("nn.Module", getattr(model, f"build_{self.name}")(context))

    def task(self, info: Mapping[str, Any]) -> "Task":
        from dphybrid.training.metrics import MULTICLASS, REGRESSION

        return MULTICLASS if "labels_B" in info["shapes"] else REGRESSION


class Toy(_Small):
    """The first model of the tutorial: one linear layer."""

    name = "toy"
    summary = "The tutorial's linear layer, all data-parallel: each replica prints its shapes."
    train = {
        **_PLAIN,
        "epochs": 1,
        "batch_size": 30,
        "optimizer": "sgd",
        "lr": 0.05,
        "patience": 0,
        "log_every": 4,
        "print_splits": "each",
    }


class Blocks(_Small):
    """A data-parallel block between two blocks on the first device."""

    name = "blocks"
    summary = "The tutorial's three layers, of which only the middle one is data-parallel."
    train = {**_PLAIN, "epochs": 20, "batch_size": 30, "lr": 0.01, "log_every": 4}
    widths = (10, 20)


class Hybrid(_Small):
    """Embedding on the CPU, linear layer on the devices."""

    name = "hybrid"
    summary = "The tutorial's hybrid model: a table in host memory, a linear layer on the devices."
    model = HybridModelConfig
    table = {"optimizer": "adagrad", "lr": 0.5}
    train = {**_PLAIN, "epochs": 10, "batch_size": 64, "lr": 0.01}
    num_rows = (10_000, 1_000)

    def draw(self, random: "np.random.Generator", rows: int) -> "Arrays":
        num_ids, width = 1000, 10
        ids_B = random.integers(0, num_ids, rows, dtype="int64")
        planted_VO = random.standard_normal((num_ids, width), dtype="float32")
        y_BO = planted_VO[ids_B] + 0.1 * random.standard_normal((rows, width), dtype="float32")
        return {"ids_B": ids_B, "y_BO": y_BO}


class Convnet(_Small):
    """Convolution and linear layer."""

    name = "convnet"
    summary = "The tutorial's convolution and linear layer, on noisy images."
    train = {**_PLAIN, "epochs": 5, "batch_size": 64, "optimizer": "sgd", "lr": 0.01, "log_every": 4}
    num_rows = (512, 256)

    def draw(self, random: "np.random.Generator", rows: int) -> "Arrays":
        classes, image = 10, (3, 32, 32)
        labels_B = random.integers(0, classes, rows, dtype="int64")
        planted = random.standard_normal((classes, *image), dtype="float32")
        x_BCHW = 0.5 * planted[labels_B] + random.standard_normal((rows, *image), dtype="float32")
        return {"x_BCHW": x_BCHW, "labels_B": labels_B}


class Digits(_Small):
    """Handwritten digits."""

    name = "digits"
    summary = "Handwritten digits of 8 x 8 pixels, from scikit-learn: two convolutions, no table."
    model = DigitsModelConfig
    one_process = True
    prints_shapes = False
    train = {"epochs": 15, "batch_size": 64, "log_every": 10}
    num_rows = (1437, 360)

    def draw(self, random: "np.random.Generator", rows: int) -> "Arrays":
        from sklearn.datasets import load_digits

        digits = load_digits()
        order = random.permutation(len(digits.target))[:rows]
        # Pixels are from 0 to 16.
        x_BCHW = (digits.images[order, None] / 16).astype("float32")
        return {"x_BCHW": x_BCHW, "labels_B": digits.target[order].astype("int64")}
