"""The class `Recipe`: one object describes one kind of experiment, so that no other code asks for a recipe's
name."""

import math
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import Field, create_model
from pydantic.fields import FieldInfo

from dphybrid.config import (
    DataConfig,
    ExperimentConfig,
    ModelConfig,
    Section,
    TableConfig,
    TrainConfig,
)
from dphybrid.util.errors import UserError, type_text
from dphybrid.util.importing import import_callable

# The command line and the forms read recipes, too. Torch and polars load slowly, so only methods import them.
if TYPE_CHECKING:
    import polars as pl
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from dphybrid.data.batches import Dataset
    from dphybrid.data.store import Prepared, Progress, Source
    from dphybrid.data.vocabulary import Vocabulary
    from dphybrid.recipes.context import ModelContext
    from dphybrid.recipes.given import Given
    from dphybrid.training.metrics import Task
    from dphybrid.training.step import Step

S = TypeVar("S", bound=Section)

_SMALLEST_BATCH = 32
STEPS, _FEWEST_EPOCHS, _MOST_EPOCHS = 4000, 10, 200
"""Where the data decides (`sized`): the smallest batch, the steps to aim at, the bounds of the epochs."""
_OPEN = {"train.batch_size": 0, "train.epochs": 0, "train.patience": -1, "table.lr": 0.0}
"""Values of fields for which the data decides; of other fields "auto"."""


def imported(path: str) -> Any:
    """Return a method that imports the function `package.module:NAME` when it is called, and calls it."""
    module, _, name = path.partition(":")

    # As a class attribute this becomes a method; the functions are plain ones, so `self` is not passed on.
    def call(_recipe: "Recipe", *given: Any, **options: Any) -> Any:
        return getattr(import_module(module), name)(*given, **options)

    return call


def with_chosen(
    config: ExperimentConfig, values: Mapping[str, tuple[object, str]]
) -> tuple[ExperimentConfig, list[str]]:
    """Return the config with values for those fields that it leaves open, and a line for each with a reason.
    values: dotted name -> (value, reason)."""
    lines = []
    for name, (value, reason) in values.items():
        section_name, _, field = name.partition(".")
        section = getattr(config, section_name)
        if getattr(section, field, None) == _OPEN.get(name, "auto"):
            config = config.model_copy(update={section_name: section.model_copy(update={field: value})})
            shown = f"{value:g}" if isinstance(value, float) else value
            lines += [f"{name}={shown}: {reason}"] if reason else []
    return config, lines


class Recipe:
    """Subclass it, set the attributes, and write `rows` (or `source` and `dataset`), `build` and `task`.

    Attributes:
        name: Names runs, prepared folders and registered models.
        summary: One sentence for help and forms.
        data, model: The recipe's own config sections, pydantic classes with a default for every field.
        table, train: This recipe's defaults in these common sections, where they differ.
        batches: About how many batches an epoch has where train.batch_size is 0, and the largest batch size.
        tabular: Its samples are rows of a table read by `dphybrid.data.table`. Its data may grow by new files
            (retraining), and it scores the rows of new files (predict).
        sample: What a sample is called where an evaluation counts them.
        one_process: Not tested with several processes; a config with `cluster` is refused.
        example: Columns of a few rows as `predict` takes them, for `dphybrid.testing.check_recipe`.
        prints_shapes: Print a split as PyTorch's data-parallel tutorial does, one line per replica.
    """

    name: str = ""
    summary: str = ""
    data: type[DataConfig] = DataConfig
    model: type[ModelConfig] = ModelConfig
    table: Mapping[str, object] = {}
    train: Mapping[str, object] = {}
    batches: tuple[int, int] = (32, 512)
    tabular: bool = False
    sample: str = "row"
    one_process: bool = False
    prints_shapes: bool = False
    example: Mapping[str, Any] = {}

    key: str = ""
    """The value of `recipe` in a config that finds this recipe: its name, or `package.module:NAME`. The
    registry sets it."""

    def rows(self, data: Any, seed: int) -> "tuple[Given | Mapping[str, Vocabulary], ...]":
        """Return the training split, the validation split and, if there are any, the test split and the
        vocabularies that made their ids, by name. A split is a dict of arrays, a DataFrame, or a map-style
        torch Dataset. The best checkpoint is measured on the test split once, at the end.

        The simple way to bring data: read everything here. The splits are saved as a prepared folder, the
        vocabularies also in each checkpoint. seed: for a random split.
        """
        raise UserError(f"recipe {self.name}: define rows(data, seed), or source and dataset")

    def source(self, data: Any, seed: int) -> "Source":
        """Return the source of the samples, opened but not yet read; see `dphybrid.data.store.Source`. Raises
        UserError."""
        from dphybrid.recipes.given import GivenSource

        return GivenSource(self.name, self.rows, data, seed)

    def dataset(self, prepared: "Prepared", part: str) -> "Dataset":
        """Return a split of the prepared data ("train", "valid", "test") as samples by number."""
        return prepared.rows(part)

    def training_rows(self, rows: "Dataset", info: Mapping[str, Any], model: Any) -> "Dataset":
        """Return the training split with what is drawn anew in each epoch, such as negatives; see
        `dphybrid.data.DrawnDataset`. info: facts about the prepared data. model: the `model` section."""
        return rows

    def sized(
        self, config: ExperimentConfig, num_rows: int, info: Mapping[str, Any]
    ) -> tuple[ExperimentConfig, list[str]]:
        """Return the config with values chosen from the data where batch size or epochs are 0, patience is -1
        or the rows' optimizer is auto, and lines that print the arithmetic. num_rows: of the training split.
        info: facts about the prepared data.

        Batch size: training rows / `batches`, rounded to a power of two from 32 to the largest. Epochs: 4,000
        steps, from 10 to 200 epochs. Patience: a tenth of the epochs, from 3 to 5.
        """
        batches, largest = self.batches
        size = 2 ** round(math.log2(max(1.0, num_rows / batches)))
        why = f"{num_rows:,} training rows / {batches}, rounded to a power of two, from {_SMALLEST_BATCH} to "
        chosen: dict[str, tuple[object, str]] = {
            "train.batch_size": (min(max(size, _SMALLEST_BATCH), largest), f"{why}{largest}")
        }
        config, of_batch = with_chosen(config, chosen)
        steps = math.ceil(num_rows / config.train.batch_size)
        epochs = min(max(round(STEPS / steps), _FEWEST_EPOCHS), _MOST_EPOCHS)
        why = f"{STEPS:,} steps / {steps:,} an epoch, from {_FEWEST_EPOCHS} to {_MOST_EPOCHS}"
        config, of_epochs = with_chosen(config, {"train.epochs": (epochs, why)})
        patience = min(max(3, config.train.epochs // 10), 5), "a tenth of the epochs, from 3 to 5"
        config, of_rest = with_chosen(config, {"train.patience": patience, "table.optimizer": ("adam", "")})
        return config, of_batch + of_epochs + of_rest

    def threads(self, config: ExperimentConfig) -> int:
        """Return the number of CPU threads with which a training is fastest; 0: torch's own number."""
        return 0

    def build(self, context: "ModelContext[Any]") -> "nn.Module":
        """Return the model: batch (dict of CPU tensors, samples on dim 0) -> dict with

        - `loss` (B,): each sample's loss, summed over its terms,
        - `weight` (B,): the number of these terms (ones where a sample has one label),
        - what the task reads, such as `logits` (B,) or (B, C).

        The mean loss is `loss.sum() / weight.sum()`. Unlike a mean of means it is exact when the last batch,
        or a replica's share, is shorter.
        """
        raise UserError(f"recipe {self.name}: define build(context)")

    def new_model(self, context: "ModelContext[Any]") -> "nn.Module":
        """Build the model by `build` or by the user's `model.factory`, with torch's generator seeded, so that
        equal configs start from equal weights. Raises UserError when the factory cannot be imported or does
        not return a module."""
        import torch

        path = context.options.factory
        # Before the seed is set: importing user code may draw random numbers.
        factory = import_callable(path, "model.factory") if path else self.build
        torch.manual_seed(context.seed)
        default = torch.get_default_dtype()
        # Modules create parameters in torch's default dtype, so factories need not mention model.dtype.
        torch.set_default_dtype(context.dtype)
        try:
            model: object = factory(context)
        finally:
            torch.set_default_dtype(default)
        if not isinstance(model, torch.nn.Module):
            where = f"model.factory={path!r}" if path else f"recipe {self.key}: build"
            raise UserError(f"{where}: returned {type_text(model)}; return a torch.nn.Module")
        return model

    def optimizers(self, model: "nn.Module", config: Any) -> "Mapping[str, Optimizer]":
        """Return the optimizers of the model's dense parameters by name, each parameter in exactly one. By
        default there is one, "blocks", set by the `train` section. Tables have their own, called "rows".

        A learning-rate schedule scales each parameter group's rate. Checkpoints hold the optimizers' states.
        """
        from dphybrid.training.optimizers import make_dense_optimizer

        optimizer = make_dense_optimizer(model, config.train)
        return {} if optimizer is None else {"blocks": optimizer}

    def step(self, step: "Step", batch: "dict[str, Tensor]") -> "tuple[Tensor, Tensor]":
        """Take one training step: one `step.update` or several; see `dphybrid.training.step.Step`.

        Returns the summed loss and its number of terms, for the printed lines and the curves.
        """
        return step.update(batch)

    def task(self, info: Mapping[str, Any]) -> "Task":
        """Return the task: the metrics of the validation outputs, the one that decides, and its direction.
        info: facts about the prepared data."""
        raise UserError(f"recipe {self.name}: define task(info)")

    def task_of(self, config: ExperimentConfig, info: Mapping[str, Any]) -> "Task":
        """Return the task of an experiment, where its config says how to measure: by default `task(info)`."""
        return self.task(info)

    def predict(
        self, model: Any, rows: "pl.DataFrame", vocabularies: "Mapping[str, Vocabulary]"
    ) -> "pl.DataFrame":
        """Return the trained model's predictions for new rows: a frame of any length, whose columns are the
        same in every call. `dphybrid.load`, `dphybrid predict` and the registered model call it. Raise
        UserError for a column that is missing.

        Args:
            model: In evaluation mode, called without gradients.
            rows: When read from a file, all columns are texts, None where a value is missing.
            vocabularies: Those that `rows(data, seed)` returned.
        """
        raise UserError(
            f"recipe {self.name}: makes no predictions from rows; dphybrid.load_model gives its module. A "
            "recipe of your own defines predict(model, rows, vocabularies)"
        )

    def samples(
        self, checkpoint: Path, config: ExperimentConfig, model: "nn.Module", rows: Any
    ) -> "tuple[Dataset, list[str]]":
        """Return new rows whose answers are known as samples of the model, and notes about them, for
        `run.evaluate`. rows: by default a split as `rows` returns it; a path from `dphybrid evaluate`. Raises
        UserError."""
        if type(self).rows is Recipe.rows or isinstance(rows, str | Path):
            raise UserError(
                f"recipe {self.name}: evaluates no files; measure them as the test part of a training, or "
                "define samples(checkpoint, config, model, rows)"
            )
        from dphybrid.recipes.predicting import samples_of

        return samples_of(self.name, checkpoint, rows), []

    def predictor(
        self, checkpoint: Path, config: ExperimentConfig, build: "Callable[[], nn.Module]", batch_size: int
    ) -> Any:
        """Return the object that `dphybrid.load` returns and `dphybrid predict` uses, with the methods
        `predict(rows)`, `predict_file` and `summary`. The default one calls the recipe's `predict`. None for
        a tabular recipe, which has `dphybrid.serving.predict.Predictor`. Raises UserError without a
        `predict`.

        checkpoint: its folder, with the files of the prepared data's `encoder/`. build: returns the model
        with the checkpoint's weights.
        """
        # `serving` may import recipes, not the other way round; it makes the predictor of tables itself.
        if self.tabular:
            return None
        # Raises the UserError of `Recipe.predict` now, before the model is built.
        if type(self).predict is Recipe.predict:
            self.predict(None, None, {})  # type: ignore[arg-type]
        from dphybrid.recipes.predicting import RowsPredictor

        return RowsPredictor(self.name, self.predict, checkpoint, build(), batch_size)

    def prepare(
        self, data: DataConfig, folder: Path, seed: int, on_progress: "Progress | None" = None
    ) -> "Prepared":
        """Return the prepared data below `folder`; build it if it does not exist. Raises UserError for
        unusable input."""
        from dphybrid.data.store import prepare_source

        return prepare_source(self.name, self.source(data, seed), folder, seed, on_progress, self.dataset)

    def open(self, folder: Path, verified: bool = False) -> "Prepared":
        """Open a folder that `prepare` made. verified: also compare its files with their checksums, once.
        Raises UserError for a damaged folder, and for a folder without prepared data."""
        from dphybrid.data.store import open_prepared, verify_prepared

        return replace(verify_prepared(folder) if verified else open_prepared(folder), view=self.dataset)

    @cached_property
    def config_class(self) -> type[ExperimentConfig]:
        """The class of this recipe's configs: its own sections, and the common ones with its defaults."""
        sections = {
            "data": self.data,
            "model": self.model,
            "table": _with_defaults(TableConfig, self.table),
            "train": _with_defaults(TrainConfig, self.train),
        }
        # Every section gets a default, so that `{"recipe": NAME}` alone is a whole config.
        fields: dict[str, Any] = {n: (kind, Field(default_factory=kind)) for n, kind in sections.items()}
        key = self.key or self.name
        fields["recipe"] = (Literal[key], _with_default(ExperimentConfig.model_fields["recipe"], key))
        name = f"{type(self).__name__}Config"
        return create_model(name, __base__=ExperimentConfig, __doc__=self.summary, **fields)


def _with_defaults(section: type[S], defaults: Mapping[str, object]) -> type[S]:
    """Return a section's class with other defaults; bounds and descriptions stay."""
    known = section.model_fields
    fields: dict[str, Any] = {
        name: (known[name].annotation, _with_default(known[name], value)) for name, value in defaults.items()
    }
    return create_model(section.__name__, __base__=section, __doc__=section.__doc__, **fields)


def _with_default(field: FieldInfo, value: object) -> FieldInfo:
    """Return a copy of a field, which the classes of all recipes share, with another default."""
    changed = copy(field)
    changed.default = value
    return changed
