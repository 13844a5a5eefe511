"""Recipe ctr: predicts a column of a table, such as clicks: yes or no, a class, or a number."""

import math
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field

from dphybrid.config import ExperimentConfig, ModelConfig
from dphybrid.config.tables import TableDataConfig
from dphybrid.recipes.recipe import STEPS, Recipe, imported, with_chosen

if TYPE_CHECKING:
    from dphybrid.data.batches import Dataset

# Chosen by quality on public tables: docs/quality.md.
_MANY_ROWS, _MANY_VALUES = 100_000, 1000
"""An mlp makes one pass over at least so many training rows, if a column has more than so many values: more
passes overfit rare values. For a dlrm one pass is too short."""
_USUAL = {"table.optimizer": "adam", "model.unknown": 0.3, "model.dropout": 0.1}
_ONE_PASS = {
    "train.epochs": 1,
    "table.optimizer": "adagrad",
    # One pass learns nothing by heart, so it needs little regularization.
    "model.unknown": 0.02,
    "model.dropout": 0.0,
}
"""The two regimes: the values where the config has 0 or auto."""
_ONE_PASS_STEPS = 1000
"""One pass takes about so many steps, with batches from 512 to 2,048 rows: larger ones cost less a row."""
_SLOW_ROWS, _FAST_ROWS, _ONE_PASS_ROWS = 0.03, 5.0, 80.0
"""Learning rate of a table's rows as a multiple of train.lr: the lowest one of an mlp whose columns have many
values, the highest one of a short training, and that of one pass by adagrad."""
_ROWS_PER_VALUE = 4
"""Rows of a column of many values learn faster, if training has more rows for each value."""


def _share(value: object) -> object:
    with suppress(TypeError, ValueError):
        if value == "auto" or 0 <= float(value) < 1:  # type: ignore[arg-type]
            return value
    raise ValueError("give a share from 0 to below 1, or auto")


class CtrModelConfig(ModelConfig):
    """The network and its sizes."""

    of_training: ClassVar[frozenset[str]] = frozenset({"dropout", "unknown"})
    used_with: ClassVar[Mapping[str, str]] = {"cross_layers": "model.kind=dcn"}

    kind: Literal["mlp", "dlrm", "dcn"] = "mlp"
    """Network: a plain one of hidden layers, DLRM or DCN-v2."""
    dim: int = Field(default=16, ge=1, le=65536)
    """Width of an embedding row."""
    hidden: int = Field(default=128, ge=1, le=65536)
    """Width of the hidden layers."""
    layers: int = Field(default=2, ge=1, le=64)
    """Number of hidden layers."""
    cross_layers: int = Field(default=2, ge=1, le=16)
    """dcn: number of cross layers."""
    dropout: Annotated[float | Literal["auto"], BeforeValidator(_share)] = "auto"
    """Share of activations dropped while training. On several GPUs the masks differ from those on one. auto:
    0.1; in one pass over many rows 0."""
    unknown: Annotated[float | Literal["auto"], BeforeValidator(_share)] = "auto"
    """Share of the ids that training replaces by the unknown one, drawn anew in each epoch, so that the
    network learns to handle new values. Bags keep theirs. auto: 0.3; in one pass over many rows 0.02."""
    bins: int = Field(default=128, ge=1, le=1024)
    """Quantile bins of a number, at most one for each 8 training rows. The network gets the number, with
    outliers limited to 3 standard deviations, and its position in each bin, through a linear layer for each
    column (Gorishniy et al. 2022)."""
    bin_width: int = Field(default=8, ge=1, le=1024)
    """Width of a number's encoding, besides the number itself."""

    def settled(self) -> Self:
        """Return the usual values where they are auto: for a model that no training data has sized."""
        autos = {name: _USUAL[f"model.{name}"] for name in self.of_training if getattr(self, name) == "auto"}
        return self.model_copy(update=autos)


class Ctr(Recipe):
    """Click-through rate."""

    name = "ctr"
    summary = (
        "A table with a label (yes or no, classes, a number): hidden layers, DLRM or DCN-v2 "
        "over one table for all categorical columns."
    )
    data = TableDataConfig
    model = CtrModelConfig
    table = {"optimizer": "auto", "lr": 0.0}
    train = {
        "epochs": 0,
        "batch_size": 0,
        "patience": -1,
        "optimizer": "adamw",
        "lr": 0.001,
        "weight_decay": 0.3,
        "schedule": "constant",
        "average": 0.99,
    }
    tabular = True
    source = imported("dphybrid.data.table.source:open_source")
    build = imported("dphybrid.recipes.ctr.model:build_ctr")
    task = imported("dphybrid.training.label_tasks:label_task")

    def sized(
        self, config: ExperimentConfig, num_rows: int, info: Mapping[str, Any]
    ) -> tuple[ExperimentConfig, list[str]]:
        values, is_mlp = max(info["num_ids"], default=0), config.model.model_dump().get("kind") == "mlp"
        # A warm start has learned rows, which steps of a fresh adagrad would throw far off.
        once = is_mlp and config.train.epochs in (0, 1) and not config.train.warm_start
        once = once and num_rows >= _MANY_ROWS and values > _MANY_VALUES
        why, regime = "", _USUAL
        if once:
            why = f"one pass over {num_rows:,} training rows, with a column of {values:,} values"
            batch_size = 2 ** round(math.log2(num_rows / _ONE_PASS_STEPS))
            regime = _ONE_PASS | {"train.batch_size": min(max(batch_size, 512), 2048)}
        is_short = config.train.epochs > 0  # the user chose it
        config, lines = with_chosen(config, {name: (value, why) for name, value in regime.items()})
        config, more = super().sized(config, num_rows, info)
        steps = config.train.epochs * math.ceil(num_rows / config.train.batch_size)
        rate, reason = 1.0, ""
        if once and config.table.optimizer == "adagrad":
            rate, reason = _ONE_PASS_ROWS, ", as adagrad makes one pass"
        elif is_mlp:  # other networks have products of rows, which need the rate of the blocks
            if values > _MANY_VALUES:  # rare ones are overfitted
                per_value = num_rows / values
                rate = min(max(_SLOW_ROWS * (per_value / _ROWS_PER_VALUE) ** 2, _SLOW_ROWS), 1.0)
                reason = f", as a column of {values:,} values has {per_value:.3g} rows per value"
            if is_short and steps < STEPS:  # slower rows would not get far
                rate = min(rate * STEPS / max(steps, 1), _FAST_ROWS)
                reason += f", as there are only {steps:,} steps"
        told = f"{rate:.3g} x train.lr{reason}"
        config, last = with_chosen(config, {"table.lr": (rate * config.train.lr, told)})
        return config, lines + more + last

    def training_rows(self, rows: "Dataset", info: Mapping[str, Any], model: Any) -> "Dataset":
        from dphybrid.data.batches import DrawnDataset
        from dphybrid.recipes.ctr.model import some_unknown

        share = float(model.settled().unknown)
        return DrawnDataset(rows, some_unknown(info, share)) if share else rows
