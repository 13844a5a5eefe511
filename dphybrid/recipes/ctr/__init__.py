"""Recipe ctr, click-through rate: its own config."""

from typing import ClassVar, Literal

from pydantic import Field

from dphybrid.config import ModelConfig


class CtrModelConfig(ModelConfig):
    """Which network, and how large."""

    of_training: ClassVar[frozenset[str]] = frozenset({"dropout", "unknown"})

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
    numbers: Literal["plain", "embedded"] = "embedded"
    """How a number enters the network: plain, as itself; embedded, also by its position in each quantile bin
    of the training rows, through a layer of the column's own (Gorishniy et al. 2022)."""
    bins: int = Field(default=128, ge=1, le=1024)
    """Bins of a number, between quantiles of the training rows, at most one for each 8 rows; read where
    model.numbers is embedded."""
    bin_width: int = Field(default=8, ge=1, le=1024)
    """Values that a number becomes besides itself; read where model.numbers is embedded."""
