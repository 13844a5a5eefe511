"""Recipe text: a word-level language model of the user's own text, or of Python's language reference."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from dphybrid.config import DataConfig, ModelConfig
from dphybrid.config.tables import Encoding
from dphybrid.recipes.recipe import Recipe, imported

if TYPE_CHECKING:
    from dphybrid.training.metrics import Task


class TextDataConfig(DataConfig):
    """The text, and how it is split into words."""

    path: str | None = None
    """Your text: a file, or a folder of .txt, .md, .rst, in which files or folders named train, valid and
    test are these parts. Empty: the language reference that comes with Python."""
    encoding: Encoding = "auto"
    """Encoding of the text, such as latin-1 or utf-16; auto: UTF-8 or UTF-16, else Latin-1."""
    min_count: int = Field(default=2, ge=1)
    """Words that occur fewer times than this in the training split become `<unk>`."""
    window: int = Field(default=64, ge=2, le=8192)
    """Tokens in one training sample."""
    valid_fraction: float = Field(default=0.1, gt=0.0, lt=1.0)
    """Share of the text, in whole documents, in the validation split, if no file is named valid."""
    test_path: str | None = None
    """File with test text, instead of a file named test: the best checkpoint is measured on it once, at the
    end."""


class TextModelConfig(ModelConfig):
    """The network and its sizes."""

    kind: Literal["lstm", "gru", "transformer"] = "lstm"
    """Network over the words' rows."""
    output: Literal["full", "adaptive"] = "full"
    """Output layer: full, a softmax over all words; adaptive, for large vocabularies, reaches rare words
    through narrow layers."""
    dim: int = Field(default=256, ge=1, le=65536)
    """Width of an embedding row."""
    hidden: int = Field(default=256, ge=1, le=65536)
    """Width of the network."""
    layers: int = Field(default=2, ge=1, le=64)
    """Number of layers."""
    heads: int = Field(default=4, ge=1, le=256)
    """Attention heads of the transformer."""
    dropout: float = Field(default=0.2, ge=0.0, lt=1.0)
    """Share of activations dropped while training. On several GPUs the masks differ from those on one."""

    @model_validator(mode="after")
    def _heads_divide_hidden(self) -> Self:
        if self.kind == "transformer" and self.hidden % self.heads:
            raise ValueError(
                f"hidden={self.hidden} cannot be shared by heads={self.heads}; make hidden a multiple of "
                "heads"
            )
        return self


class Text(Recipe):
    """Word-level language model."""

    name = "text"
    summary = "A word-level language model: LSTM, GRU or transformer over a table of words."
    data = TextDataConfig
    model = TextModelConfig
    one_process = True
    source = imported("dphybrid.recipes.text.data:open_source")
    dataset = imported("dphybrid.recipes.text.data:part_of")
    build = imported("dphybrid.recipes.text.model:build_text")

    def task(self, info: Mapping[str, object]) -> "Task":
        from dphybrid.training.metrics import LANGUAGE_MODEL

        return LANGUAGE_MODEL
