"""The parts of a run: recipe, config, settings, data, engine; resolved once when a command or flow starts."""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Self

from torch import nn

from dphybrid.config import ExperimentConfig
from dphybrid.config.settings import Settings
from dphybrid.data import Dataset, Prepared
from dphybrid.data.batches import FirstRows
from dphybrid.embedding.storage import deferred_rows, unfilled_rows
from dphybrid.parallel import Devices, resolve_devices
from dphybrid.recipes.context import ModelContext
from dphybrid.recipes.recipe import Recipe
from dphybrid.recipes.registry import find_recipe
from dphybrid.training.checkpoint import Trained
from dphybrid.training.engine import Engine
from dphybrid.training.metrics import Task

if TYPE_CHECKING:
    from dphybrid.run.folder import Run


@dataclass
class Built:
    """The model of a run that this process has built, so that it is built once. filled: whether its rows are
    those of a checkpoint and not start values. trained: with its optimizers, until it is trained. model:
    after that, for the evaluation."""

    filled: bool = False
    trained: Trained | None = None
    model: nn.Module | None = None


@dataclass(frozen=True)
class Experiment:
    """Everything that defines a training. data: the recipe's prepared data. engine: trains in this process or
    in the processes of a cluster. previous: the run to resume. built: what this process has built of it so
    far."""

    recipe: Recipe
    config: ExperimentConfig
    settings: Settings
    data: Prepared
    engine: Engine
    previous: "Run | None" = None
    built: Built = field(default_factory=Built, compare=False, repr=False)

    @classmethod
    def open(cls, config: ExperimentConfig, settings: Settings, prepared: str | Path) -> Self:
        """Return the experiment on a folder of prepared data. Raises UserError when the folder is missing or
        damaged."""
        recipe = find_recipe(config.recipe)
        return cls.sized(recipe, config, settings, recipe.open(Path(prepared)))[0]

    @classmethod
    def sized(
        cls, recipe: Recipe, config: ExperimentConfig, settings: Settings, data: Prepared
    ) -> tuple[Self, list[str]]:
        """Return the experiment on prepared data, and a line about each value of the config that was chosen
        here because it depends on the number of rows."""
        config, lines = recipe.sized(config, len(data.dataset("train")), data.info)
        return cls(recipe, config, settings, data, choose_engine(config)), lines

    @cached_property
    def task(self) -> Task:
        """The recipe's task on this data."""
        return self.recipe.task_of(self.config, self.data.info)

    @property
    def training_rows(self) -> Dataset:
        """The rows of an epoch, in the recipe's form."""
        rows = self.recipe.training_rows(self.data.dataset("train"), self.data.info, self.config.model)
        return FirstRows(rows, self._overfit_rows) if self._overfit_rows else rows

    @property
    def validation_rows(self) -> Dataset:
        """The rows that decide which checkpoint is the best; with train.overfit_batches, trained ones."""
        if self._overfit_rows:
            return FirstRows(self.data.dataset("train"), self._overfit_rows)
        return self.data.dataset("valid")

    @property
    def _overfit_rows(self) -> int:
        return self.config.train.overfit_batches * self.config.train.batch_size

    def build(self, devices: Devices, rows: Dataset | None = None) -> nn.Module:
        """Build the model with its start values. rows: data that the model may read; see `ModelContext`."""
        folder = self.settings.table_folder
        context = ModelContext.of(self.config, self.data.info, devices, folder, rows)
        return self.recipe.new_model(context)

    def unfilled(self, devices: str, mapped: bool = False) -> nn.Module:
        """Build the model for existing weights: its rows get no start values.

        devices: a device text such as "cpu*2". mapped: the rows will be memory-mapped files.
        """
        with deferred_rows() if mapped else unfilled_rows():
            return self.build(resolve_devices(devices))

    @property
    def encoder(self) -> tuple[Path | None, dict[str, str]]:
        """The folder of the encoder that turns new rows into the model's input (None: no encoder), and the
        sha256 of the prepared files by name."""
        folder = self.data.path / "encoder"
        return folder if folder.is_dir() else None, self.data.manifest.files

    @property
    def source(self) -> str:
        """The source of the data, as text for people: its path, or the recipe that generates it."""
        path = self.config.data.model_dump().get("path")
        return str(path) if path else f"built in, recipe {self.config.recipe}"


def choose_engine(config: ExperimentConfig) -> Engine:
    """Return the engine that trains: in this process, or in the processes of a cluster."""
    if config.cluster.several:
        # Late: a run of one process never imports the cluster's code, which needs TorchRec.
        from dphybrid.cluster.engine import ClusterEngine

        return ClusterEngine(config)
    return Engine(config)
