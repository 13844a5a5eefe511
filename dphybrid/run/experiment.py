"""The parts of a run, resolved once where a command or flow begins."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

from torch import nn

from dphybrid.config import ExperimentConfig
from dphybrid.config.settings import Settings
from dphybrid.data import Dataset, Prepared
from dphybrid.embedding.storage import deferred_rows, unfilled_rows
from dphybrid.parallel import Devices, resolve_devices
from dphybrid.recipes.context import ModelContext
from dphybrid.recipes.recipe import Recipe
from dphybrid.recipes.registry import find_recipe
from dphybrid.training.engine import Engine
from dphybrid.training.metrics import Task


@dataclass(frozen=True)
class Experiment:
    """What is trained on what, where, and how. data: the recipe's prepared data. engine: who trains."""

    recipe: Recipe
    config: ExperimentConfig
    settings: Settings
    data: Prepared
    engine: Engine

    @classmethod
    def open(cls, config: ExperimentConfig, settings: Settings, prepared: str | Path) -> Self:
        """Return the experiment on a folder of prepared data. Raises UserError when that is gone or
        damaged."""
        recipe = find_recipe(config.recipe)
        return cls.sized(recipe, config, settings, recipe.open(Path(prepared)))[0]

    @classmethod
    def sized(
        cls, recipe: Recipe, config: ExperimentConfig, settings: Settings, data: Prepared
    ) -> tuple[Self, list[str]]:
        """Return the experiment on prepared data with what its config leaves to their number of rows, and a
        line about each such value."""
        config, lines = recipe.sized(config, len(data.dataset("train")), data.info)
        return cls(recipe, config, settings, data, choose_engine(config)), lines

    @cached_property
    def task(self) -> Task:
        """The recipe's task on this data."""
        return self.recipe.task(self.data.info)

    def build(self, devices: Devices, rows: Dataset | None = None) -> nn.Module:
        """Build the model with its start values. rows: what it may look at; see `ModelContext`."""
        folder = self.settings.table_folder
        context = ModelContext.of(self.config, self.data.info, devices, folder, rows)
        return self.recipe.new_model(context)

    def unfilled(self, devices: str, mapped: bool = False) -> nn.Module:
        """Build the model for weights that are there: its rows get no start values.

        devices: their text. mapped: its rows will be files.
        """
        with deferred_rows() if mapped else unfilled_rows():
            return self.build(resolve_devices(devices))

    @property
    def encoder(self) -> tuple[Path | None, dict[str, str]]:
        """The folder of what turns new rows into the model's input, and the sha256 of its files by name."""
        folder = self.data.path / "encoder"
        return folder if folder.is_dir() else None, self.data.manifest.files

    @property
    def source(self) -> str:
        """What the data was read from, for people: the path, or the recipe that makes it."""
        path = self.config.data.model_dump().get("path")
        return str(path) if path else f"built in, recipe {self.config.recipe}"


def choose_engine(config: ExperimentConfig) -> Engine:
    """Return what trains: this process, or the processes of a cluster."""
    if config.cluster.several:
        # Late: a run of one process never imports the cluster's half.
        from dphybrid.cluster.engine import ClusterEngine

        return ClusterEngine(config)
    return Engine(config)
