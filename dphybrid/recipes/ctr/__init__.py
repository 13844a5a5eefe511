"""Recipe ctr: predicts a column of a table, such as clicks: yes or no, a class, a number, or a count."""

import math
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field

from dphybrid.config import ExperimentConfig, ModelConfig
from dphybrid.config.tables import PACKED, TableDataConfig
from dphybrid.recipes.recipe import STEPS, Recipe, imported
from dphybrid.util.errors import counted
from dphybrid.util.files import given_path

if TYPE_CHECKING:
    from dphybrid.data.batches import Dataset
    from dphybrid.training.metrics import Task

# Chosen by quality on public tables: docs/quality.md.
_SLOW_ROWS, _FAST_ROWS = 0.03, 5.0
"""Learning rate of a table's rows as a share of train.lr: the usual one, and the highest."""
_MANY_VALUES, _ROWS_PER_VALUE = 1000, 4
"""Rows learn faster if a column has more values than this, and training has more rows per value."""
_MANY_ROWS = 100_000
"""From this many training rows on, with a column of more than `_MANY_VALUES` values, an mlp makes one pass,
in which rows learn fast: more passes overfit rare values. For a dlrm one pass is too short."""
_ONE_PASS_SHARE = 80.0
"""Learning rate of the rows in one pass by adagrad, as a multiple of train.lr."""
_USUAL = {"unknown": 0.3, "dropout": 0.1, "numbers": "embedded"}
_ONE_PASS = {"unknown": 0.02, "dropout": 0.0, "numbers": "squashed"}
"""Values of the model for auto: usually, and in one pass. One pass learns nothing by heart, so it needs
little regularization; and the rows of numbers' buckets learn so much that encoding numbers adds nothing."""
_ONE_PASS_STEPS = 1000
"""One pass takes about so many steps, with batches from 512 to 2,048 rows: larger ones cost less a row."""
_ENDINGS = (
    *(text + packed for text in (".csv", ".tsv", ".jsonl", ".ndjson") for packed in PACKED),
    *(".parquet", ".pq", ".arrow", ".feather", ".ipc"),
)


def _threshold(value: object) -> object:
    with suppress(TypeError, ValueError):
        if value == "best-f1" or 0 <= float(value) <= 1:  # type: ignore[arg-type]
            return value
    raise ValueError("give a probability from 0 to 1, or best-f1")


def _share(value: object) -> object:
    with suppress(TypeError, ValueError):
        if value == "auto" or 0 <= float(value) < 1:  # type: ignore[arg-type]
            return value
    raise ValueError("give a share from 0 to below 1, or auto")


class CtrModelConfig(ModelConfig):
    """The network and its sizes."""

    of_training: ClassVar[frozenset[str]] = frozenset({"dropout", "unknown", "threshold"})
    used_with: ClassVar[Mapping[str, str]] = {
        "cross_layers": "model.kind=dcn",
        "cross_rank": "model.kind=dcn",
        "bins": "model.numbers=auto,embedded",
        "bin_width": "model.numbers=auto,embedded",
    }

    kind: Literal["mlp", "wide-deep", "deepfm", "dlrm", "dcn"] = "mlp"
    """Network: a plain one of hidden layers, Wide & Deep, DeepFM, DLRM or DCN-v2."""
    dim: int = Field(default=16, ge=1, le=65536)
    """Width of an embedding row."""
    hidden: int = Field(default=128, ge=1, le=65536)
    """Width of the hidden layers."""
    layers: int = Field(default=2, ge=1, le=64)
    """Number of hidden layers."""
    cross_layers: int = Field(default=2, ge=1, le=16)
    """dcn: number of cross layers."""
    cross_rank: int = Field(default=0, ge=0, le=65536)
    """dcn: rank of a cross layer's matrix; 0: full, as wide as the input."""
    attend: str = ""
    """COLUMN:BAG, such as item:history: the bag's items are weighted by a small network that sees each beside
    the row of the column, instead of averaged (DIN, Zhou et al. 2018). Empty: the mean."""
    dropout: Annotated[float | Literal["auto"], BeforeValidator(_share)] = "auto"
    """Share of activations dropped while training. On several GPUs the masks differ from those on one. auto:
    0.1; in one pass over many rows 0."""
    unknown: Annotated[float | Literal["auto"], BeforeValidator(_share)] = "auto"
    """Share of the ids that training replaces by the unknown one (a number's bucket: by the missing one),
    drawn anew in each epoch, so that the network learns to handle new values. Bags keep theirs. auto: 0.3; in
    one pass over many rows 0.02."""
    numbers: Literal["auto", "squashed", "embedded"] = "auto"
    """Encoding of numbers, besides their buckets in the table: squashed, the number itself, with outliers
    limited to 3 standard deviations; embedded, also its position in each quantile bin of the
    training rows, through a linear layer for each column (Gorishniy et al. 2022). auto: embedded; squashed in
    one pass over many rows, if numbers have buckets; after a warm start as before."""
    bins: int = Field(default=128, ge=1, le=1024)
    """Quantile bins of a number, at most one for each 8 training rows; used if model.numbers is embedded."""
    bin_width: int = Field(default=8, ge=1, le=1024)
    """Width of a number's encoding, besides the number itself; used if model.numbers is embedded."""
    threshold: Annotated[float | Literal["best-f1"], BeforeValidator(_threshold)] = 0.5
    """Label of two values: the probability from which on a row is of the positive class; best-f1: the one
    with the best F1 on the validation rows. The model keeps it."""

    def settled(self) -> Self:
        """Return the usual values where they are auto: for a model that no training data has sized."""
        return self.model_copy(
            update={name: v for name, v in _USUAL.items() if getattr(self, name) == "auto"}
        )


def _numbers_before(checkpoint: str | None) -> str:
    """Return model.numbers of the checkpoint that a training starts from: it has that network."""
    if checkpoint is None:
        return "embedded"
    from dphybrid.training.checkpoint import read_state

    return str(
        read_state(given_path(checkpoint, "train.warm_start")).config["model"].get("numbers", "embedded")
    )


class Ctr(Recipe):
    """Click-through rate."""

    name = "ctr"
    summary = (
        "A table with a label (yes or no, classes, a number, counts): hidden layers, Wide & Deep, DeepFM, "
        "DLRM or DCN-v2 over one table for all categorical columns."
    )
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
    fixed = imported("dphybrid.recipes.ctr.numbers:fix_numbers")
    task = imported("dphybrid.training.label_tasks:label_task")
    baselines = imported("dphybrid.recipes.ctr.baselines:baselines")
    floor = imported("dphybrid.recipes.ctr.baselines:floor")
    doubts = imported("dphybrid.recipes.ctr.leaks:leaks")

    @property
    def data(self) -> type[TableDataConfig]:  # type: ignore[override]
        """The data section, with a field for each kind of column. Imports polars."""
        # Not cached: a package may have added a kind of column since.
        from dphybrid.data.table.kinds import table_config

        return table_config()

    def sized(
        self, config: ExperimentConfig, num_rows: int, info: Mapping[str, Any]
    ) -> tuple[ExperimentConfig, list[str]]:
        values, kind = max(info["num_ids"], default=0), config.model.model_dump().get("kind")
        why = f"for {num_rows:,} training rows and a column of {values:,} values"
        # A warm start has learned rows, which steps of a fresh adagrad would throw far off.
        many = kind == "mlp" and num_rows >= _MANY_ROWS and values > _MANY_VALUES
        many, lines = many and not config.train.warm_start, list[str]()
        train, table = dict[str, object](), dict[str, object]()
        if many and not config.train.epochs:
            train["epochs"] = 1
            lines.append(f"train.epochs=1: {why}")
        if many and config.table.optimizer == "auto":
            table["optimizer"] = "adagrad"
            lines.append(f"table.optimizer=adagrad: {why}")
        one_pass = many and config.train.epochs in (0, 1)
        if one_pass and not config.train.batch_size:
            batch_size = min(max(2 ** round(math.log2(num_rows / _ONE_PASS_STEPS)), 512), 2048)
            train["batch_size"] = batch_size
            lines.append(f"train.batch_size={batch_size}: {why}, in one pass")
        # Only these: a network of one's own may have other fields that are auto.
        autos = [name for name in _USUAL if config.model.model_dump().get(name) == "auto"]
        model = {name: (_ONE_PASS if one_pass else _USUAL)[name] for name in autos}
        buckets = any(column["role"] == "buckets" for column in info.get("columns", []))
        if "numbers" in autos and not (one_pass and buckets):
            model["numbers"] = _numbers_before(config.train.warm_start)
        unusual = {name: value for name, value in model.items() if one_pass and value != _USUAL[name]}
        lines += [f"model.{name}={value}: in one pass" for name, value in unusual.items()]
        chosen = {
            "train": config.train.model_copy(update=train),
            "table": config.table.model_copy(update=table),
            "model": config.model.model_copy(update=model),
        }
        config = config.model_copy(update=chosen)
        found, more = super().sized(config, num_rows, info)
        lines += more
        if found.table.lr:
            return found, lines
        # At the full rate, rows overfit rare values, so the rows of an mlp learn slowly. The other networks
        # have linear parts or products of rows, which need the full rate. Columns of many values with enough
        # rows for each need more than the slow rate, too.
        share, why = _SLOW_ROWS if kind == "mlp" else 1.0, ""
        if many and found.table.optimizer == "adagrad":
            share = _ONE_PASS_SHARE / found.train.epochs
            passes = counted(found.train.epochs, "pass", "passes")
            why = f" instead of {_SLOW_ROWS:g} x, for {passes} of adagrad"
        elif share == _SLOW_ROWS and values > _MANY_VALUES and num_rows > _ROWS_PER_VALUE * values:
            share = min(share * (num_rows / values / _ROWS_PER_VALUE) ** 2, 1.0)
            rows = f"{num_rows / values:.3g} rows per value ({values:,} values)"
            why = f" instead of {_SLOW_ROWS:g} x, for {rows}"
        # The user chose the number of epochs: in a short training slow rows would not get far.
        if share == _SLOW_ROWS and config.train.epochs:
            steps = config.train.epochs * math.ceil(num_rows / found.train.batch_size)
            share = min(max(share * (STEPS / max(1, steps)) ** 2, share), _FAST_ROWS)
            why = f" instead of {_SLOW_ROWS:g} x, for only {steps:,} steps" if share > _SLOW_ROWS else ""
        lr = share * found.train.lr
        lines.append(f"table.lr={lr:g}: {share:.3g} x train.lr{why}")
        return found.model_copy(update={"table": found.table.model_copy(update={"lr": lr})}), lines

    def task_of(self, config: ExperimentConfig, info: Mapping[str, Any]) -> "Task":
        from dphybrid.training.label_tasks import HALF, label_task

        threshold = config.model.model_dump().get("threshold", HALF)
        return self.task(info) if threshold == HALF else label_task(info, threshold)

    def training_rows(self, rows: "Dataset", info: Mapping[str, Any], model: Any) -> "Dataset":
        from dphybrid.data.batches import DrawnDataset
        from dphybrid.recipes.ctr.model import some_unknown, weighted_classes

        if info.get("class_weights"):
            rows = DrawnDataset(rows, weighted_classes(info["class_weights"]))
        share = float(model.settled().unknown)
        return DrawnDataset(rows, some_unknown(info, share)) if share else rows

    def recognises(self, data: Mapping[str, object]) -> str | None:
        if data.get("label") not in (None, ""):
            return f"data.label={data['label']} is set"
        path = str(data.get("path") or "")
        if path.lower().endswith(_ENDINGS):
            return f"data.path={path} is a table"
        files = folder.iterdir() if path and (folder := given_path(path, "data.path")).is_dir() else ()
        if any(file.name.lower().endswith(_ENDINGS) for file in files):
            return f"data.path={path} is a folder of tables"
        return None
