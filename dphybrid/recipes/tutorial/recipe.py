"""The four small models of PyTorch's data-parallel tutorials, each a recipe, on random data with a planted
answer."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from dphybrid.config import DataConfig, ModelConfig
from dphybrid.recipes.recipe import Recipe
from dphybrid.recipes.tutorial import BlocksModelConfig, ConvnetModelConfig, HybridModelConfig

if TYPE_CHECKING:
    import numpy as np
    from torch import nn

    from dphybrid.data.store import Source
    from dphybrid.recipes.context import ModelContext
    from dphybrid.recipes.given import Made
    from dphybrid.training.metrics import Task

_PLAIN = {"schedule": "constant", "clip_norm": 0.0}


class _Tutorial(Recipe):
    """Random rows with a planted answer, that `make` draws. num_rows: to train, to validate."""

    prints_shapes = True
    num_rows = (100, 100)

    def make(self, random: "np.random.Generator", rows: int) -> "Made":
        """Return arrays, facts for the model, and a phrase for people."""
        raise NotImplementedError

    def source(self, data: DataConfig, seed: int) -> "Source":
        from dphybrid.recipes.given import MadeSource

        return MadeSource(seed, *self.num_rows, self.make)


class _Regression(_Tutorial):
    def task(self, info: Mapping[str, object]) -> "Task":
        from dphybrid.training.metrics import REGRESSION

        return REGRESSION


class Toy(_Regression):
    """The tutorial's first model."""

    name = "toy"
    summary = (
        "The tutorial's linear layer, all of it data-parallel, which prints its shapes from inside "
        "each replica."
    )
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

    def make(self, random: "np.random.Generator", rows: int) -> "Made":
        return _linear(random, rows, 5, 2)

    def build(self, context: "ModelContext[ModelConfig]") -> "nn.Module":
        from dphybrid.recipes.tutorial.model import build_toy

        return build_toy(context)


class Blocks(_Regression):
    """One data-parallel block between two that are not."""

    name = "blocks"
    summary = "The tutorial's three layers, of which only the middle one is data-parallel."
    model = BlocksModelConfig
    train = {**_PLAIN, "epochs": 20, "batch_size": 30, "lr": 0.01, "log_every": 4}

    def make(self, random: "np.random.Generator", rows: int) -> "Made":
        return _linear(random, rows, 10, 20)

    def build(self, context: "ModelContext[BlocksModelConfig]") -> "nn.Module":
        from dphybrid.recipes.tutorial.model import build_blocks

        return build_blocks(context)


class Hybrid(_Regression):
    """Embedding on the CPU, linear layer on the devices."""

    name = "hybrid"
    summary = "The tutorial's hybrid model: a table in host memory, a linear layer on the devices."
    model = HybridModelConfig
    table = {"optimizer": "adagrad", "lr": 0.5}
    train = {**_PLAIN, "epochs": 10, "batch_size": 64, "lr": 0.01}

    num_rows = (10_000, 1_000)

    def make(self, random: "np.random.Generator", rows: int) -> "Made":
        num_ids, width = 1000, 10
        ids_B = random.integers(0, num_ids, rows, dtype="int64")
        planted_VO = random.standard_normal((num_ids, width), dtype="float32")
        y_BO = planted_VO[ids_B] + 0.1 * random.standard_normal((rows, width), dtype="float32")
        info = {"num_ids": num_ids, "num_outputs": width}
        return {"ids_B": ids_B, "y_BO": y_BO}, info, f"random ids below {num_ids}, {width} answers"

    def build(self, context: "ModelContext[HybridModelConfig]") -> "nn.Module":
        from dphybrid.recipes.tutorial.model import build_hybrid

        return build_hybrid(context)


class Convnet(_Tutorial):
    """Convolution and linear layer."""

    name = "convnet"
    summary = "The tutorial's convolution and linear layer, on noisy images."
    model = ConvnetModelConfig
    train = {**_PLAIN, "epochs": 5, "batch_size": 64, "optimizer": "sgd", "lr": 0.01, "log_every": 4}

    num_rows = (512, 256)

    def make(self, random: "np.random.Generator", rows: int) -> "Made":
        classes, image = 10, (3, 32, 32)
        labels_B = random.integers(0, classes, rows, dtype="int64")
        planted = random.standard_normal((classes, *image), dtype="float32")
        x_BCHW = 0.5 * planted[labels_B] + random.standard_normal((rows, *image), dtype="float32")
        arrays = {"x_BCHW": x_BCHW, "labels_B": labels_B}
        return arrays, {"num_classes": classes}, f"noisy images of {classes} classes"

    def build(self, context: "ModelContext[ConvnetModelConfig]") -> "nn.Module":
        from dphybrid.recipes.tutorial.model import build_convnet

        return build_convnet(context)

    def task(self, info: Mapping[str, object]) -> "Task":
        from dphybrid.training.metrics import MULTICLASS

        return MULTICLASS


def _linear(random: "np.random.Generator", rows: int, inputs: int, outputs: int) -> "Made":
    """Draw rows whose answers are a linear map of their features, and noise."""
    x_BI = random.standard_normal((rows, inputs), dtype="float32")
    planted_IO = random.standard_normal((inputs, outputs), dtype="float32")
    y_BO = x_BI @ planted_IO + 0.1 * random.standard_normal((rows, outputs), dtype="float32")
    info = {"num_inputs": inputs, "num_outputs": outputs}
    return {"x_BI": x_BI, "y_BO": y_BO}, info, f"random rows of {inputs} features, {outputs} answers"
