"""Recipe kge: knowledge-graph embeddings, which complete triples (head, relation, tail)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from dphybrid.config import ModelConfig
from dphybrid.config.tables import DelimitedFiles
from dphybrid.recipes.recipe import Recipe, imported

if TYPE_CHECKING:
    from dphybrid.training.metrics import Task


class KgeDataConfig(DelimitedFiles):
    """The triples, and the entities that answers compete with in training."""

    path: str | None = None
    """Your triples: a folder with train.txt, valid.txt and perhaps test.txt, or one file. Delimited text,
    Parquet, Arrow or JSON lines with three named columns, or text without a header, whose columns are head,
    relation and tail."""
    head: str = "head"
    """Column with the head of a triple, in files with a header."""
    relation: str = "relation"
    """Column with the relation."""
    tail: str = "tail"
    """Column with the tail."""
    negatives: int = Field(default=1024, ge=1, le=2**20)
    """Random entities that compete with the answers of a batch."""
    valid_fraction: float = Field(default=0.1, gt=0.0, lt=1.0)
    """Share of the triples in the validation split, if there is no valid.txt."""
    test_path: str | None = None
    """File with test triples, instead of test.txt in the folder: the best checkpoint ranks them once, at the
    end."""

    @property
    def columns(self) -> list[str]:
        """The names of the three columns."""
        return [self.head, self.relation, self.tail]


class KgeModelConfig(ModelConfig):
    """The scoring function and its size."""

    kind: Literal["complex", "distmult", "rotate", "transe"] = "complex"
    """Scoring function: ComplEx, DistMult, RotatE or TransE (L1 distance)."""
    dim: int = Field(default=128, ge=1, le=65536)
    """Width of an entity's row."""
    penalty: float = Field(default=0.3, ge=0.0)
    """Weight of the cubed moduli of a triple's rows (N3, Lacroix et al. 2018), divided by the square root of
    the training triples per entity: with fewer triples an entity overfits sooner and needs more of it."""


class Kge(Recipe):
    """Knowledge-graph embeddings."""

    name = "kge"
    summary = "Triples of a knowledge graph: ComplEx, DistMult or RotatE over a table of entities."
    data = KgeDataConfig
    model = KgeModelConfig
    one_process = True
    batches = (256, 4096)
    # As Lacroix et al. 2018 train: Adagrad, and no clipping.
    table = {"optimizer": "lazy-adagrad", "lr": 0.2}
    train = {"epochs": 36, "batch_size": 0, "lr": 0.01, "clip_norm": 0.0, "patience": 0}
    source = imported("dphybrid.recipes.kge.data:open_source")
    dataset = imported("dphybrid.recipes.kge.data:part_of")
    build = imported("dphybrid.recipes.kge.model:build_kge")

    def task(self, info: Mapping[str, object]) -> "Task":
        from dphybrid.training.metrics import RANKING

        return RANKING
