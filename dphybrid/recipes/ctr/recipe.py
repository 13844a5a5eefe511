"""Recipe ctr: click-through and other questions about the rows of a table: yes or no, which class, how much,
how many."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from dphybrid.config import ExperimentConfig, ModelConfig
from dphybrid.config.tables import TableDataConfig
from dphybrid.recipes.recipe import Recipe
from dphybrid.util.files import given_path

if TYPE_CHECKING:
    from torch import nn

    from dphybrid.data.batches import Dataset
    from dphybrid.data.store import Source
    from dphybrid.recipes.context import ModelContext
    from dphybrid.training.metrics import Task

SLOW_ROWS = 0.03
"""Share of the learning rate that rows learn at."""
ENDINGS = (".csv", ".csv.gz", ".tsv", ".tsv.gz", ".parquet", ".pq")


class CtrModelConfig(ModelConfig):
    """Which network, and how large."""

    of_training: ClassVar[frozenset[str]] = frozenset({"dropout", "frequency_scale", "unknown"})

    kind: Literal["mlp", "wide-deep", "deepfm", "dlrm"] = "mlp"
    """Network: a plain one of hidden layers, Wide & Deep, DeepFM or DLRM."""
    dim: int = Field(default=16, ge=1, le=65536)
    """Width of an embedding row."""
    hidden: int = Field(default=128, ge=1, le=65536)
    """Width of the hidden layers."""
    layers: int = Field(default=2, ge=1, le=64)
    """Number of hidden layers."""
    dropout: float = Field(default=0.1, ge=0.0, lt=1.0)
    """Share of activations dropped while training. With more than one device the masks differ from those of
    one device."""
    unknown: float = Field(default=0.3, ge=0.0, lt=1.0)
    """Share of the ids that training replaces by the unknown one (of a bucket: by no value), drawn anew in
    each epoch, so that the network learns what to make of values that it has not met. Bags keep theirs."""
    numbers: Literal["plain", "piecewise", "embedded", "periodic"] = "embedded"
    """How a number enters the network: plain, as itself; piecewise, also by its position in each bin of the
    training rows; embedded, by these through a layer of the column's own; periodic, by sines and cosines of
    learnt frequencies (Gorishniy et al. 2022)."""
    bins: int = Field(default=128, ge=1, le=1024)
    """Bins of a number, between quantiles of the training rows, at most one for each 8 rows; read where
    model.numbers is piecewise or embedded."""
    bin_width: int = Field(default=8, ge=1, le=1024)
    """Values that a number becomes; read where model.numbers is embedded."""
    frequencies: int = Field(default=16, ge=1, le=1024)
    """Frequencies of a number, a sine and a cosine each; read where model.numbers is periodic."""
    frequency_scale: float = Field(default=0.1, gt=0.0, le=1000.0)
    """Spread of the frequencies before training, in periods a standard deviation of the number; read where
    model.numbers is periodic."""


class Ctr(Recipe):
    """Click-through rate."""

    name = "ctr"
    summary = (
        "A table with a label (yes or no, classes, a number, counts): hidden layers, Wide & Deep, DeepFM or "
        "DLRM over one table for all categorical columns."
    )
    data = TableDataConfig
    model = CtrModelConfig
    table = {"optimizer": "adam", "lr": 0.0}
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

    def source(self, data: TableDataConfig, seed: int) -> "Source":
        from dphybrid.data.table.source import open_source

        return open_source(data, seed)

    def sized(self, config: ExperimentConfig, num_rows: int) -> tuple[ExperimentConfig, list[str]]:
        found, lines = super().sized(config, num_rows)
        if found.table.lr:
            return found, lines
        # Fast rows learn rare values by heart; a linear part, and products of rows, need them faster.
        share = SLOW_ROWS if found.model.model_dump()["kind"] == "mlp" else 1.0
        lr = share * found.train.lr
        lines.append(f"table.lr={lr:g}: {share:g} of train.lr")
        return found.model_copy(update={"table": found.table.model_copy(update={"lr": lr})}), lines

    def training_rows(self, rows: "Dataset", info: Mapping[str, Any], model: Any) -> "Dataset":
        from dphybrid.recipes.ctr.unknown import SomeUnknown

        return SomeUnknown(rows, info, model.unknown) if model.unknown else rows

    def build(self, context: "ModelContext[CtrModelConfig]") -> "nn.Module":
        from dphybrid.recipes.ctr.model import build_ctr

        return build_ctr(context)

    def task(self, info: Mapping[str, Any]) -> "Task":
        from dphybrid.training.label_tasks import label_task

        return label_task(info)

    def recognises(self, data: Mapping[str, Any]) -> str | None:
        if data.get("label") not in (None, ""):
            return f"data.label={data['label']} names the label of a table"
        path = str(data.get("path") or "")
        if path.lower().endswith(ENDINGS):
            return f"data.path={path} is a table"
        folder = given_path(path, "data.path")
        if path and folder.is_dir() and any(file.name.lower().endswith(ENDINGS) for file in folder.iterdir()):
            return f"data.path={path} is a folder of tables"
        return None
