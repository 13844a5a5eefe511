"""Recipe text: a word-level language model on the user's own text, or on the reference that ships with
Python."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from dphybrid.recipes.recipe import Recipe
from dphybrid.recipes.text import TextDataConfig, TextModelConfig

if TYPE_CHECKING:
    from torch import nn

    from dphybrid.data.batches import Dataset
    from dphybrid.data.store import Prepared, Source
    from dphybrid.recipes.context import ModelContext
    from dphybrid.training.metrics import Task


class Text(Recipe):
    """Word-level language model."""

    name = "text"
    summary = "A word-level language model: LSTM, GRU or transformer over a table of words."
    data = TextDataConfig
    model = TextModelConfig
    one_process = True

    def source(self, data: TextDataConfig, seed: int) -> "Source":
        from dphybrid.recipes.text.data import open_source

        return open_source(data, seed)

    def dataset(self, prepared: "Prepared", part: str) -> "Dataset":
        from dphybrid.recipes.text.data import WindowDataset

        return WindowDataset(prepared.arrays[f"{part}_tokens"], prepared.info["window"])

    def build(self, context: "ModelContext[TextModelConfig]") -> "nn.Module":
        from dphybrid.recipes.text.model import build_text

        return build_text(context)

    def task(self, info: Mapping[str, object]) -> "Task":
        from dphybrid.training.metrics import LANGUAGE_MODEL

        return LANGUAGE_MODEL
