"""A recipe: one object that describes one kind of experiment, so that no other code needs its name."""

import math
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import create_model

from dphybrid.config import (
    CheckpointConfig,
    DataConfig,
    ExperimentConfig,
    ModelConfig,
    Section,
    TableConfig,
    TrainConfig,
)
from dphybrid.util.errors import UserError, type_text
from dphybrid.util.importing import import_callable

# The command line and the forms look at recipes, too: torch and polars wait until work begins.
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

_SMALLEST = 32
STEPS, _FEWEST, _MOST = 4000, 10, 200
"""Of a training that leaves its batch size or its epochs to the data."""


def imported(path: str) -> Any:
    """Return a method that calls the function `package.module:NAME` and imports it only then."""
    module, _, name = path.partition(":")

    def call(_recipe: "Recipe", *given: Any) -> Any:
        return getattr(import_module(module), name)(*given)

    return call


class Recipe:
    """Subclass it, set the attributes, and write `rows` (or `source` and `dataset`), `build` and `task`.

    name: names runs, prepared folders and registered models. summary: one sentence for help and forms.
    data, model: the recipe's own sections, pydantic classes with a default for every field.
    table, train, checkpoint: what differs from the defaults of these common sections. batches: how many an
    epoch has, about, where train.batch_size is 0, and the largest.
    tabular: its samples are rows of a table read by `dphybrid.data.table`: they have a schema file, grow when
    files arrive (retraining), and rows of new files can be scored (predict).
    one_process: it was not tried with several processes, and a config with `cluster` is refused.
    example: columns of a few rows as `predict` takes them; `dphybrid check recipe` predicts these.
    prints_shapes: say of a split what PyTorch's data-parallel tutorial says, a line a replica, not one line.
    """

    name: str = ""
    summary: str = ""
    data: type[DataConfig] = DataConfig
    model: type[ModelConfig] = ModelConfig
    table: Mapping[str, object] = {}
    train: Mapping[str, object] = {}
    batches: tuple[int, int] = (32, 512)
    checkpoint: Mapping[str, object] = {}
    tabular: bool = False
    one_process: bool = False
    prints_shapes: bool = False
    example: Mapping[str, Any] = {}

    key: str = ""
    """What finds this recipe again: its name, or `package.module:NAME`. The registry sets it; configs carry
    it."""

    def rows(
        self, data: Any, seed: int
    ) -> "tuple[Given, Given] | tuple[Given, Given, Mapping[str, Vocabulary]]":
        """Return the training and the validation split: each a dict of arrays, a DataFrame, or a map-style
        torch Dataset; and, as a third, the vocabularies by name that made their ids, if any.

        The simple way to bring data: everything is read here and kept as a prepared folder, the vocabularies
        in each checkpoint, too. seed: for a random split.
        """
        raise UserError(f"recipe {self.name}: define rows(data, seed), or source and dataset")

    def source(self, data: Any, seed: int) -> "Source":
        """Return where the samples come from, opened but not read; see `dphybrid.data.store.Source`. Raises
        UserError."""
        from dphybrid.recipes.given import GivenSource

        return GivenSource(self.name, self.rows, data, seed)

    def dataset(self, prepared: "Prepared", part: str) -> "Dataset":
        """Return a split of the prepared data ("train", "valid", "test") as samples by number."""
        return prepared.rows(part)

    def training_rows(self, rows: "Dataset", info: Mapping[str, Any], model: Any) -> "Dataset":
        """Return the training split as it is trained on: with what differs by epoch, such as negatives; see
        `dphybrid.data.DrawnDataset`. info: facts about the prepared data. model: the `model` section."""
        return rows

    def baselines(self, data: "Prepared") -> dict[str, dict[str, float]]:
        """Return metrics of simple predictions on the validation split by name, to tell how good a model is.
        Without any, a constant takes the place of the task's `prediction`, where the task names it."""
        return {}

    def floor(self, data: "Prepared") -> "dict[str, Tensor] | None":
        """Return outputs, as the model's on the validation split, of the simplest prediction: a first model
        that does not beat it is not promoted. None: there is none."""
        return None

    def doubts(self, data: "Prepared") -> list[str]:
        """Return what a person should know of the prepared data before training goes on."""
        return []

    def sized(
        self, config: ExperimentConfig, num_rows: int, info: Mapping[str, Any]
    ) -> tuple[ExperimentConfig, list[str]]:
        """Return the config with what it leaves to the data, where batch size or epochs are 0 (patience -1),
        and lines that say so with the arithmetic. num_rows: of the training split. info: facts about the
        prepared data.

        Batches by `batches`, rounded to a power of two within 32 and the largest; epochs for 4,000 steps,
        within 10 and 200; patience of a tenth of the epochs, 3 or more.
        """
        train, lines, (batches, largest) = config.train, [], self.batches
        batch_size, epochs, patience = train.batch_size, train.epochs, train.patience
        if not batch_size:
            wanted = 2 ** round(math.log2(max(1.0, num_rows / batches)))
            batch_size = min(max(wanted, _SMALLEST), largest)
            lines.append(
                f"train.batch_size={batch_size}: {num_rows:,} training rows / {batches}, rounded to a power "
                f"of two, within {_SMALLEST} and {largest}"
            )
        steps = math.ceil(num_rows / batch_size)
        if not epochs:
            epochs = min(max(round(STEPS / steps), _FEWEST), _MOST)
            within = f"within {_FEWEST} and {_MOST}"
            lines.append(f"train.epochs={epochs}: {STEPS:,} steps / {steps:,} an epoch, {within}")
        if patience < 0:
            patience = max(3, epochs // 10)
            lines.append(f"train.patience={patience}: a tenth of the epochs, 3 or more")
        found = {"batch_size": batch_size, "epochs": epochs, "patience": patience}
        sized = config.model_copy(update={"train": train.model_copy(update=found)}) if lines else config
        return sized, lines

    def build(self, context: "ModelContext[Any]") -> "nn.Module":
        """Return the model: batch (dict of CPU tensors, samples on dim 0) -> dict with

        - `loss` (B,): each sample's loss, summed over its terms,
        - `weight` (B,): the number of these terms (ones where a sample has one label),
        - what the task reads, such as `logits` (B,) or (B, C).

        The mean loss is `loss.sum() / weight.sum()`: right for short last chunks, where a mean of means is
        not.
        """
        raise UserError(f"recipe {self.name}: define build(context)")

    def new_model(self, context: "ModelContext[Any]") -> "nn.Module":
        """Build the model, or that of the user's `model.factory`, with torch's generator seeded, so that
        equal configs start from equal weights. Raises UserError when the factory cannot be imported or
        returns something else than a module."""
        import torch

        path = context.options.factory
        # Before the seed is set, as an import may draw numbers.
        factory = import_callable(path, "model.factory") if path else self.build
        torch.manual_seed(context.seed)
        default = torch.get_default_dtype()
        # Modules make their parameters in torch's default type, so factories need not name one.
        torch.set_default_dtype(context.dtype)
        try:
            model: object = factory(context)
        finally:
            torch.set_default_dtype(default)
        if not isinstance(model, torch.nn.Module):
            where = f"model.factory={path!r}" if path else f"recipe {self.key}: build"
            raise UserError(f"{where}: returned {type_text(model)}; return a torch.nn.Module")
        return model

    def fixed(self, model: "nn.Module") -> None:
        """Compute once what depends on the weights alone: the model predicts from now on, to the same bits,
        and is not trained any more."""

    def for_many_rows(self, model: "nn.Module") -> "nn.Module":
        """Return what gives the `logits` of many rows faster, to all but their last bits. model: `fixed`."""
        return model

    def optimizers(self, model: "nn.Module", config: Any) -> "Mapping[str, Optimizer]":
        """Return the optimizers of the model's dense parameters by name, each parameter in one of them; rows
        of tables have their own, called "rows". Here it is one, "blocks", as the `train` section says.

        A learning-rate schedule scales the rate that each group has here. Checkpoints hold their states.
        """
        from dphybrid.training.optimizers import make_dense_optimizer

        optimizer = make_dense_optimizer(model, config.train)
        return {} if optimizer is None else {"blocks": optimizer}

    def step(self, step: "Step", batch: "dict[str, Tensor]") -> "tuple[Tensor, Tensor]":
        """Take one training step: one `step.update` or several; see `dphybrid.training.step.Step`.

        Returns the summed loss and its number of terms that lines and curves show.
        """
        return step.update(batch)

    def task(self, info: Mapping[str, Any]) -> "Task":
        """Return the metrics over the validation outputs, which one decides, and its direction. info: the
        prepared data's facts."""
        raise UserError(f"recipe {self.name}: define task(info)")

    def predict(
        self, model: Any, rows: "pl.DataFrame", vocabularies: "Mapping[str, Vocabulary]"
    ) -> "pl.DataFrame":
        """Return what the trained model says of new rows: a frame, of any length, with the same columns each
        time. `dphybrid.load`, `dphybrid predict` and the registered model call it.

        model: in evaluation mode; no gradients are kept. rows: from files all texts, None for no value.
        vocabularies: those that `rows(data, seed)` returned. Raise UserError for a column that is missing.
        """
        raise UserError(
            f"recipe {self.name}: makes no predictions from rows; dphybrid.load_model gives its module. A "
            "recipe of your own defines predict(model, rows, vocabularies)"
        )

    @property
    def predicts(self) -> bool:
        """Does it say what its trained model makes of new rows?"""
        own = type(self)
        return self.tabular or own.predict is not Recipe.predict or own.predictor is not Recipe.predictor

    def predictor(
        self, checkpoint: Path, config: ExperimentConfig, build: "Callable[[], nn.Module]", batch_size: int
    ) -> Any:
        """Return what `dphybrid.load` gives and `dphybrid predict` asks: an object with `predict(rows)`,
        `predict_file` and `told`. Here it calls `predict`; None for a tabular recipe, which has
        `dphybrid.serving.predict.Predictor`. Raises UserError where there is no `predict`.

        checkpoint: its folder, with the files of the prepared data's `encoder/`. build: makes its filled
        model.
        """
        # `serving` is above this room: it makes its own predictor for tables.
        if self.tabular:
            return None
        if not self.predicts:
            self.predict(None, None, {})  # type: ignore[arg-type]
        from dphybrid.recipes.predicting import RowsPredictor

        return RowsPredictor(self.name, self.predict, checkpoint, build(), batch_size)

    def recognises(self, data: Mapping[str, object]) -> str | None:
        """Say why these values of the data section call for this recipe, or None. Asked only when no recipe
        is given."""
        return None

    def prepare(
        self, data: DataConfig, folder: Path, seed: int, on_progress: "Progress | None" = None
    ) -> "Prepared":
        """Return the prepared data under `folder`, built when it is not there. Raises UserError for unusable
        input."""
        from dphybrid.data.store import prepare_source

        return prepare_source(self.name, self.source(data, seed), folder, seed, on_progress, self.dataset)

    def open(self, folder: Path, verified: bool = False) -> "Prepared":
        """Open a folder that `prepare` made. verified: by its sums, too, once. Raises UserError when it is
        none, or damaged."""
        from dphybrid.data.store import open_prepared, verify_prepared

        return replace(verify_prepared(folder) if verified else open_prepared(folder), view=self.dataset)

    @cached_property
    def config_class(self) -> type[ExperimentConfig]:
        """The recipe's class of config: the common sections with its defaults, and its own."""
        sections = {
            "data": self.data,
            "model": self.model,
            "table": _with_defaults(TableConfig, self.table),
            "train": _with_defaults(TrainConfig, self.train),
            "checkpoint": _with_defaults(CheckpointConfig, self.checkpoint),
        }
        # With a default each: `{"recipe": NAME}` alone is a whole config.
        fields: dict[str, Any] = {name: (kind, kind()) for name, kind in sections.items()}
        # A copy: all recipes' classes share the field of the class above them.
        named = copy(ExperimentConfig.model_fields["recipe"])
        named.default = self.key or self.name
        fields["recipe"] = (Literal[self.key or self.name], named)
        name = f"{type(self).__name__}Config"
        return create_model(name, __base__=ExperimentConfig, __doc__=self.summary, **fields)


def _with_defaults(section: type[S], defaults: Mapping[str, object]) -> type[S]:
    """Return the section's class with other defaults; bounds and sentences stay."""
    if not defaults:
        return section
    fields: dict[str, Any] = {}
    for name, value in defaults.items():
        field = copy(section.model_fields[name])
        field.default = value
        fields[name] = (field.annotation, field)
    return create_model(section.__name__, __base__=section, __doc__=section.__doc__, **fields)
