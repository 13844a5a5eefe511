"""Recipe ctr: click-through and other questions about the rows of a table: yes or no, which class, how much,
how many."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from dphybrid.config import ModelConfig
from dphybrid.config.tables import TableDataConfig
from dphybrid.recipes.recipe import Recipe
from dphybrid.util.files import given_path

if TYPE_CHECKING:
    from torch import nn

    from dphybrid.data.store import Source
    from dphybrid.recipes.context import ModelContext
    from dphybrid.training.metrics import Task

ENDINGS = (".csv", ".csv.gz", ".tsv", ".tsv.gz", ".parquet", ".pq")


class CtrModelConfig(ModelConfig):
    """Which network, and how large."""

    of_training: ClassVar[frozenset[str]] = frozenset({"dropout", "frequency_scale"})

    kind: Literal["wide-deep", "deepfm", "dlrm"] = "wide-deep"
    """Network: Wide & Deep, DeepFM or DLRM."""
    dim: int = Field(default=16, ge=1, le=65536)
    """Width of an embedding row."""
    hidden: int = Field(default=256, ge=1, le=65536)
    """Width of the hidden layers."""
    layers: int = Field(default=2, ge=1, le=64)
    """Number of hidden layers."""
    dropout: float = Field(default=0.2, ge=0.0, lt=1.0)
    """Share of activations dropped while training. With more than one device the masks differ from those of
    one device."""
    numbers: Literal["plain", "piecewise", "periodic"] = "plain"
    """How a number enters the network: as itself, or also by how far it has come through each bin of the
    training rows, or by sines and cosines of learnt frequencies (Gorishniy et al. 2022)."""
    bins: int = Field(default=16, ge=1, le=1024)
    """Bins of a number, between quantiles of the training rows; read where model.numbers is piecewise."""
    frequencies: int = Field(default=16, ge=1, le=1024)
    """Frequencies of a number, a sine and a cosine each; read where model.numbers is periodic."""
    frequency_scale: float = Field(default=0.1, gt=0.0, le=1000.0)
    """Spread of the frequencies before training, in periods a standard deviation of the number; read where
    model.numbers is periodic."""


class Ctr(Recipe):
    """Click-through rate."""

    name = "ctr"
    summary = (
        "A table with a label (yes or no, classes, a number, counts): Wide & Deep, DeepFM or DLRM over one "
        "table for all categorical columns."
    )
    data = TableDataConfig
    model = CtrModelConfig
    table = {"optimizer": "adagrad", "lr": 0.02}
    train = {"epochs": 10, "batch_size": 512, "lr": 0.001}
    tabular = True

    def source(self, data: TableDataConfig, seed: int) -> "Source":
        from dphybrid.data.table.source import open_source

        return open_source(data, seed)

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
