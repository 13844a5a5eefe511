"""The four small models of PyTorch's data-parallel tutorials, each a recipe, on random data with a planted
answer."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from dphybrid.config import DataConfig, ModelConfig
from dphybrid.recipes.recipe import Recipe
from dphybrid.recipes.tutorial.config import BlocksModelConfig, ConvnetModelConfig, HybridModelConfig

if TYPE_CHECKING:
    from torch import nn

    from dphybrid.data.store import Source
    from dphybrid.recipes.context import ModelContext
    from dphybrid.training.metrics import Task

PLAIN = {"schedule": "constant", "clip_norm": 0.0}


class _Tutorial(Recipe):
    prints_shapes = True


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
        **PLAIN,
        "epochs": 1,
        "batch_size": 30,
        "optimizer": "sgd",
        "lr": 0.05,
        "patience": 0,
        "log_every": 4,
        "print_splits": "each",
    }

    def source(self, data: DataConfig, seed: int) -> "Source":
        from dphybrid.data.made import MadeSource
        from dphybrid.recipes.tutorial.data import linear

        return MadeSource(seed, 100, 100, linear(5, 2))

    def build(self, context: "ModelContext[ModelConfig]") -> "nn.Module":
        from dphybrid.recipes.tutorial.model import build_toy

        return build_toy(context)


class Blocks(_Regression):
    """One data-parallel block between two that are not."""

    name = "blocks"
    summary = "The tutorial's three layers, of which only the middle one is data-parallel."
    model = BlocksModelConfig
    train = {**PLAIN, "epochs": 20, "batch_size": 30, "lr": 0.01, "log_every": 4}

    def source(self, data: DataConfig, seed: int) -> "Source":
        from dphybrid.data.made import MadeSource
        from dphybrid.recipes.tutorial.data import linear

        return MadeSource(seed, 100, 100, linear(10, 20))

    def build(self, context: "ModelContext[BlocksModelConfig]") -> "nn.Module":
        from dphybrid.recipes.tutorial.model import build_blocks

        return build_blocks(context)


class Hybrid(_Regression):
    """Embedding on the CPU, linear layer on the devices."""

    name = "hybrid"
    summary = "The tutorial's hybrid model: a table in host memory, a linear layer on the devices."
    model = HybridModelConfig
    table = {"optimizer": "adagrad", "lr": 0.5}
    train = {**PLAIN, "epochs": 10, "batch_size": 64, "lr": 0.01}

    def source(self, data: DataConfig, seed: int) -> "Source":
        from dphybrid.data.made import MadeSource
        from dphybrid.recipes.tutorial.data import rows_of_table

        return MadeSource(seed, 10_000, 1_000, rows_of_table)

    def build(self, context: "ModelContext[HybridModelConfig]") -> "nn.Module":
        from dphybrid.recipes.tutorial.model import build_hybrid

        return build_hybrid(context)


class Convnet(_Tutorial):
    """Convolution and linear layer."""

    name = "convnet"
    summary = "The tutorial's convolution and linear layer, on noisy images."
    model = ConvnetModelConfig
    train = {**PLAIN, "epochs": 5, "batch_size": 64, "optimizer": "sgd", "lr": 0.01, "log_every": 4}

    def source(self, data: DataConfig, seed: int) -> "Source":
        from dphybrid.data.made import MadeSource
        from dphybrid.recipes.tutorial.data import images

        return MadeSource(seed, 512, 256, images)

    def build(self, context: "ModelContext[ConvnetModelConfig]") -> "nn.Module":
        from dphybrid.recipes.tutorial.model import build_convnet

        return build_convnet(context)

    def task(self, info: Mapping[str, object]) -> "Task":
        from dphybrid.training.metrics import MULTICLASS

        return MULTICLASS
