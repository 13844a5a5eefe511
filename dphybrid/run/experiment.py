"""The parts of a run: recipe, config, settings, data, engine, devices, folder. Each is found once, by the
command or step that needs it first, and from there it is only passed down."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Self

from torch import Tensor, nn

from dphybrid.config import ExperimentConfig
from dphybrid.config.settings import Settings
from dphybrid.data import Dataset, Prepared
from dphybrid.embedding.storage import deferred_rows, unfilled_rows
from dphybrid.parallel import Devices, resolve_devices
from dphybrid.recipes.context import ModelContext
from dphybrid.recipes.recipe import Recipe
from dphybrid.recipes.registry import find_recipe
from dphybrid.run.folder import Run, changed_values, named_run
from dphybrid.training.checkpoint import Trained
from dphybrid.training.engine import Engine
from dphybrid.training.metrics import Task
from dphybrid.util.errors import UserError

# With other values of these, the checkpoint would not fit the model, or training would continue on other rows
# and batches.
_FIXED = (
    "recipe",
    "model.",
    "table.optimizer",
    "table.dtype",
    "train.optimizer",
    "train.seed",
    "train.batch_size",
    "train.shuffle_rows",
    "data.",
)
"""Values that a resumed run cannot change."""


@dataclass
class Built:
    """The model of a run that this process has built, so that it is built once.

    Attributes:
        checkpoint: The checkpoint that will fill it; None for a new run.
        trained: With its optimizers, until it is trained.
        model: After that, for the evaluation.
        outputs: The `validation_outputs` of the best checkpoint, if this process evaluated it.
    """

    checkpoint: Path | None = None
    trained: Trained | None = None
    model: nn.Module | None = None
    outputs: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Experiment:
    """Everything that defines a training.

    Attributes:
        data: The recipe's prepared data.
        engine: Trains in this process or in the processes of a cluster.
        devices: Text such as "cpu*2", once they are leased.
        found: The run to resume, and each run once it is built.
        built: What this process has built of it so far.
    """

    recipe: Recipe
    config: ExperimentConfig
    settings: Settings
    data: Prepared
    engine: Engine
    devices: str = ""
    found: Run | None = None
    built: Built = field(default_factory=Built, compare=False, repr=False)

    @classmethod
    def open(cls, config: ExperimentConfig, settings: Settings, prepared: str | Path) -> Self:
        """Return the experiment on a folder of prepared data. Raises UserError when the folder is missing or
        damaged."""
        recipe = find_recipe(config.recipe)
        data = recipe.open(Path(prepared))
        config, _ = recipe.sized(config, len(data.dataset("train")), data.info)
        return cls(recipe, config, settings, data, choose_engine(config))

    @classmethod
    def of(cls, run: Run) -> Self:
        """Return the experiment of a run. Raises UserError when its prepared data is missing or damaged."""
        made = cls.open(run.config, run.settings, run.page.prepared)
        return replace(made, devices=run.page.devices, found=run)

    @classmethod
    def continuing(cls, which: str, config: ExperimentConfig, settings: Settings) -> Self:
        """Return the experiment that continues a run, the recipe's newest ("latest") or one by its name, on
        the data that was prepared for it: later files do not change it.

        Raises UserError when there is none, and when its model, tables or data differ from the config's,
        naming each difference.
        """
        run = named_run(settings, which, config.recipe)
        changed = {"recipe": f"{run.page.recipe} -> {config.recipe}"}
        if run.page.recipe == config.recipe:
            made = cls.open(config, settings, run.page.prepared)
            differing = changed_values(run.config.model_dump(mode="json"), made.config)
            changed = {name: both for name, both in differing.items() if name.startswith(_FIXED)}
            if not changed:
                return replace(made, found=run)
        raise UserError(
            f"--resume: run {run.folder.name} was started with other values "
            f"({'; '.join(map(': '.join, changed.items()))}); give the same ones, or start a new run"
        )

    @property
    def run(self) -> Run:
        """The run, once it is built."""
        assert self.found is not None
        return self.found

    @cached_property
    def task(self) -> Task:
        """The recipe's task on this data."""
        return self.recipe.task_of(self.config, self.data.info)

    def build(self, devices: Devices, rows: Dataset | None = None) -> nn.Module:
        """Build the model with its initial values. rows: data that the model may read; see `ModelContext`."""
        folder = self.settings.table_folder
        context = ModelContext.of(self.config, self.data.info, devices, folder, rows)
        return self.recipe.new_model(context)

    def unfilled(self, devices: str, mapped: bool = False) -> nn.Module:
        """Build the model for existing weights: its rows get no initial values.

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


def choose_engine(config: ExperimentConfig) -> Engine:
    """Return the engine that trains: in this process, or in the processes of a cluster."""
    if config.cluster.several:
        # Late: a run of one process never imports the cluster's code, which needs TorchRec.
        from dphybrid.cluster.engine import ClusterEngine

        return ClusterEngine(config)
    return Engine(config)
