"""The recipes of the data-parallel tutorials' models: their own configs."""

from pydantic import Field

from dphybrid.config import ModelConfig


class HybridModelConfig(ModelConfig):
    """The sizes of the model."""

    dim: int = Field(default=10, ge=1, le=65536)
    """Width of an embedding row."""


class BlocksModelConfig(ModelConfig):
    """The sizes of the model."""

    hidden: int = Field(default=20, ge=1, le=65536)
    """Width of the middle layer."""


class ConvnetModelConfig(ModelConfig):
    """The sizes of the model."""

    hidden: int = Field(default=64, ge=1, le=65536)
    """Channels of the convolution."""
