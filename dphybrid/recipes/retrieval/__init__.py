"""Recipe retrieval: predicts which items a user will want next, by the items met so far."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from dphybrid.config import ExperimentConfig, ModelConfig
from dphybrid.config.tables import RowFiles
from dphybrid.recipes.recipe import Recipe, imported, with_chosen

if TYPE_CHECKING:
    from dphybrid.training.metrics import Task

FULL_ITEMS = 100_000
"""With at most this many items model.softmax=auto compares with all of them."""


class RetrievalDataConfig(RowFiles):
    """The interactions, their columns, and the items that compete with a user's item in training."""

    used_with: ClassVar[Mapping[str, str]] = {
        "negatives": "model.softmax=auto,sampled",
        "valid_fraction": "data.split=auto,random,time",
    }

    path: str | None = None
    """Your interactions, one per row: CSV, TSV or Parquet; a file, a folder of files, or a pattern. Empty: a
    generated sample."""
    user: str = "user"
    """Column with the user: its name, or its position 0, 1, ... in a file without a header."""
    item: str = "item"
    """Column with the item."""
    time: str | None = None
    """Column with a number, date or time: the order of a user's history, and of the validation split. Empty:
    the order of the rows, and random rows by train.seed for validation."""
    split: Literal["auto", "random", "time", "last"] = "auto"
    """Validation split: random rows, the latest rows by data.time, or each user's last row by data.time;
    auto: time if data.time is given, else random."""
    valid_fraction: float = Field(default=0.03, gt=0.0, lt=1.0)
    """Share of the rows in the validation split; not used by data.split=last."""
    test_path: str | None = None
    """Files with later interactions, in the same columns. At the end, the best checkpoint is evaluated on
    them once; all other rows are the users' histories."""
    exclude_seen: bool = True
    """Leave out the items that a user has met, in evaluation and in recommendations."""
    negatives: int = Field(default=2048, ge=1, le=2**20)
    """Items drawn by frequency that compete in addition to those of the batch, with model.softmax=sampled."""
    cutoffs: tuple[Annotated[int, Field(ge=1, le=1000)], ...] = (10, 50)
    """Lengths k of the lists for recall@k and NDCG@k, separated by commas; NDCG at the first one decides."""

    @model_validator(mode="after")
    def _columns_and_cutoffs_differ(self) -> Self:
        if self.user == self.item:
            raise ValueError(f"item={self.item!r}: is the column of users, too; name two columns")
        if not self.cutoffs or len(set(self.cutoffs)) < len(self.cutoffs):
            raise ValueError(f"cutoffs={self.cutoffs}: give one or more lengths that differ")
        if self.split in ("time", "last") and self.time is None:
            raise ValueError(f"split={self.split!r}: needs data.time, the column to order the rows by")
        return self

    @property
    def chosen_split(self) -> str:
        """The validation split: "random", "time" or "last"."""
        if self.split == "auto":
            return "random" if self.time is None else "time"
        return self.split

    @property
    def named_columns(self) -> list[tuple[str, str]]:
        """The columns that fields name, as pairs (field, column)."""
        time = [] if self.time is None else [("time", self.time)]
        return [("user", self.user), ("item", self.item), *time]


class RetrievalModelConfig(ModelConfig):
    """The network of a user, and its sizes. A score is the dot product of a user's and an item's vector."""

    used_with: ClassVar[Mapping[str, str]] = {
        "dropped": "model.kind=bag",
        "dropout": "model.kind=transformer",
        "layers": "model.kind=transformer",
        "heads": "model.kind=transformer",
    }

    kind: Literal["bag", "transformer"] = "bag"
    """Network that makes a vector of the items that a user has met: bag sums them, transformer reads them in
    order (SASRec)."""
    dim: int = Field(default=64, ge=1, le=65536)
    """Width of an embedding row, and of a vector."""
    history: int = Field(default=0, ge=0, le=100_000)
    """How many of a user's latest items are read; 0: 1,000 by a bag, 200 by a transformer."""
    softmax: Literal["auto", "full", "sampled"] = "auto"
    """What competes with a user's item in training. full: all items. sampled: the items of the batch and
    drawn ones, corrected by how often each is drawn, so that a step's memory depends on the batch. auto: full
    up to 100,000 items."""
    dropped: float = Field(default=0.7, ge=0.0, lt=1.0)
    """bag: share of a history's items that are left out at random in training."""
    dropout: float = Field(default=0.2, ge=0.0, lt=1.0)
    """transformer: share of the numbers set to zero in training."""
    layers: int = Field(default=2, ge=1, le=64)
    """transformer: number of layers."""
    heads: int = Field(default=2, ge=1, le=64)
    """transformer: attention heads; model.dim must be a multiple."""

    def is_sampled(self, num_items: int) -> bool:
        """Return whether the softmax is over a sample of the items."""
        return self.softmax == "sampled" or (self.softmax == "auto" and num_items > FULL_ITEMS)

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.kind == "transformer" and self.dim % self.heads:
            raise ValueError(f"heads={self.heads}: does not divide dim={self.dim}")
        return self


class Retrieval(Recipe):
    """Retrieval by histories."""

    name = "retrieval"
    summary = "Interactions of users with items: recommendations by a user's history, also for new users."
    data = RetrievalDataConfig
    model = RetrievalModelConfig
    one_process = True
    sample = "user"
    # Chosen on MovieLens-100k (docs/quality.md), where it beats Adam whose moments count only the
    # row's own steps.
    table = {"optimizer": "adamw", "lr": 0.003, "weight_decay": 1.0}
    train = {
        "epochs": 150,
        "schedule": "constant",
        "batch_size": 0,
        "patience": 15,
        "lr": 0.003,
        "optimizer": "adamw",
        "weight_decay": 1.0,
        "average": 0.98,
    }
    source = imported("dphybrid.recipes.retrieval.data:open_source")
    dataset = imported("dphybrid.recipes.retrieval.data:part_of")
    build = imported("dphybrid.recipes.retrieval.histories:build_histories")
    training_rows = imported("dphybrid.recipes.retrieval.histories:training_histories")
    optimizers = imported("dphybrid.recipes.retrieval.histories:optimizers")
    task = imported("dphybrid.recipes.retrieval.ranking:recommending")
    predictor = imported("dphybrid.recipes.retrieval.recommend:Recommender")

    def samples(self, checkpoint: Path, config: ExperimentConfig, model: Any, rows: object) -> Any:
        return self.predictor(checkpoint, config, lambda: model, 1).held(rows)

    def task_of(self, config: ExperimentConfig, info: Mapping[str, Any]) -> "Task":
        # In time, a network of next items ranks ever better while its loss on later rows rises; the loss of
        # a bag is less noisy than its ranks.
        in_order = config.model.model_dump().get("kind") == "transformer"
        task = self.task(info)
        return replace(task, chosen_by="") if in_order else task

    def sized(
        self, config: ExperimentConfig, num_rows: int, info: Mapping[str, Any]
    ) -> tuple[ExperimentConfig, list[str]]:
        # A network of next items has as many targets a user as a bag, but needs more steps.
        model: Any = config.model
        share, least = (16, 32) if model.kind == "bag" else (64, 16)
        users, items = info["num_users"], info["num_items"]
        size = min(max(2 ** round(math.log2(max(1.0, users / share))), least), 512)
        chosen: dict[str, tuple[object, str]] = {
            "train.batch_size": (size, f"counts users, of whom there are {users:,}"),
            "model.softmax": (
                "sampled" if model.is_sampled(items) else "full",
                f"{items:,} items, full up to {FULL_ITEMS:,}",
            ),
        }
        config, lines = with_chosen(config, chosen)
        config, more = super().sized(config, num_rows, info)
        return config, lines + more
