"""Recipe retrieval: which items a user will want next, by a vector for each user and item."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dphybrid.config import ExperimentConfig
from dphybrid.recipes.recipe import Recipe
from dphybrid.recipes.retrieval import RetrievalDataConfig, RetrievalModelConfig

if TYPE_CHECKING:
    from torch import nn

    from dphybrid.data.batches import Dataset
    from dphybrid.data.store import Prepared, Source
    from dphybrid.recipes.context import ModelContext
    from dphybrid.recipes.retrieval.recommend import Recommender
    from dphybrid.training.metrics import Task


class Retrieval(Recipe):
    """Two-tower retrieval."""

    name = "retrieval"
    summary = "Interactions of users with items: a vector for each, or two towers, and recommendations."
    data = RetrievalDataConfig
    model = RetrievalModelConfig
    one_process = True
    table = {"optimizer": "adamw", "lr": 0.003, "weight_decay": 1.0}
    train = {"epochs": 100, "schedule": "constant", "batch_size": 512, "lr": 0.003}

    def source(self, data: RetrievalDataConfig, seed: int) -> "Source":
        from dphybrid.recipes.retrieval.data import open_source

        return open_source(data, seed)

    def dataset(self, prepared: "Prepared", part: str) -> "Dataset":
        from dphybrid.recipes.retrieval.data import part_of

        return part_of(part, prepared.arrays, prepared.info)

    def build(self, context: "ModelContext[RetrievalModelConfig]") -> "nn.Module":
        from dphybrid.recipes.retrieval.model import build_retrieval

        return build_retrieval(context)

    def task(self, info: Mapping[str, Any]) -> "Task":
        from dphybrid.recipes.retrieval.model import recommending

        return recommending(info["cutoffs"])

    def predictor(
        self, checkpoint: Path, config: ExperimentConfig, build: "Callable[[], nn.Module]", batch_size: int
    ) -> "Recommender":
        from dphybrid.recipes.retrieval.recommend import Recommender

        return Recommender(checkpoint, config, build(), batch_size)
