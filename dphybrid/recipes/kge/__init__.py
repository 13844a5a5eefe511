"""Recipe kge, knowledge-graph embeddings: its own config."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from dphybrid.config import DataConfig, ModelConfig


class KgeDataConfig(DataConfig):
    """Which triples, and what answers compete with."""

    path: str | None = None
    """Your triples (required): a folder with train.txt, valid.txt and perhaps test.txt, or one file; head,
    relation, tail, separated by tabs, commas or blanks."""
    delimiter: str = "auto"
    """Character between head, relation and tail; auto looks at the file."""
    negatives: int = Field(default=1024, ge=0, le=2**20)
    """Random entities that compete with the answers of a batch; 0: all entities do (1-vs-all), so that a step
    costs a lookup and an update of the whole table."""
    valid_fraction: float = Field(default=0.1, gt=0.0, lt=1.0)
    """Share of the triples in the validation split, where there is no valid.txt."""
    max_rejected: float = Field(default=0.001, ge=0.0, le=1.0)
    """Share of unreadable lines above which preparation stops."""


class KgeModelConfig(ModelConfig):
    """Which scoring function, and how large."""

    kind: Literal["complex", "distmult", "rotate"] = "complex"
    """Scoring function: ComplEx, DistMult or RotatE."""
    dim: int = Field(default=128, ge=1, le=65536)
    """Width of an entity's row."""
    penalty: float = Field(default=0.3, ge=0.0)
    """Weight of the cubed moduli of a triple's rows (N3, Lacroix et al. 2018), divided by the root of the
    training triples an entity: the fewer there are, the sooner they are learnt by heart."""


_SUFFIXES = (".txt", ".tsv", ".csv", "")


def files_of(folder: Path, part: str) -> list[Path]:
    """Return the files of a folder that are named as those of a part are: train.txt, train.tsv, ..."""
    return [file for suffix in _SUFFIXES if (file := folder / f"{part}{suffix}").is_file()]
