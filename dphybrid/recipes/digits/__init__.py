"""Recipe digits, images of handwritten digits: its own config."""

from typing import Literal

from pydantic import Field

from dphybrid.config import ModelConfig


class DigitsModelConfig(ModelConfig):
    """Which network, and how large."""

    kind: Literal["convnet", "capsule"] = "convnet"
    """Network: convolutions, or capsules with routing by agreement."""
    hidden: int = Field(default=128, ge=1, le=65536)
    """Width of the hidden layer (capsule: of the network that redraws the image)."""
    dropout: float = Field(default=0.2, ge=0.0, lt=1.0)
    """Share of activations dropped while training (convnet)."""
