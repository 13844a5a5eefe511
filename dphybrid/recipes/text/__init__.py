"""Recipe text: a language model of the user's own text, or of Python's language reference."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import Field, model_validator

from dphybrid.config import ExperimentConfig, ModelConfig
from dphybrid.config.tables import TextFiles
from dphybrid.recipes.recipe import Recipe, imported

if TYPE_CHECKING:
    from dphybrid.training.metrics import Task


class TextDataConfig(TextFiles):
    """The text, and how it is split into tokens."""

    used_with: ClassVar[Mapping[str, str]] = {
        "vocabulary": "data.tokens=bpe",
        "min_count": "data.tokens=words",
    }

    path: str | None = None
    """Your text: a file, or a folder of .txt, .md, .rst or of source code, in which files or folders named
    train, valid and test, such as wiki.train.tokens, are these parts. Empty: the language reference that
    comes with Python."""
    tokens: Literal["words", "bpe"] = "words"
    """words: in lower case, rare ones become `<unk>`; bpe: byte pairs, learned from the training split, for
    source code and any other text."""
    vocabulary: int = Field(default=4096, ge=300, le=2**20)
    """Number of byte pairs."""
    min_count: int = Field(default=2, ge=1)
    """Words that occur fewer times than this in the training split become `<unk>`."""
    window: int = Field(default=64, ge=2, le=8192)
    """Tokens in one training sample."""
    valid_fraction: float = Field(default=0.1, gt=0.0, lt=1.0)
    """Share of your text, in whole documents, in the validation split, if no file is named valid."""
    test_path: str | None = None
    """File with test text, instead of a file named test: the best checkpoint is measured on it once, at the
    end."""


class TextModelConfig(ModelConfig):
    """The network and its sizes."""

    used_with: ClassVar[Mapping[str, str]] = {
        "heads": "model.kind=decoder",
        "memory": "model.kind=decoder",
    }

    kind: Literal["lstm", "decoder"] = "lstm"
    """Network over the tokens' rows. decoder: a transformer with RMSNorm, rotary positions, squared ReLU and
    no biases."""
    dim: int = Field(default=256, ge=1, le=65536)
    """Width of an embedding row."""
    hidden: int = Field(default=256, ge=1, le=65536)
    """Width of the network."""
    layers: int = Field(default=1, ge=1, le=64)
    """Number of layers."""
    heads: int = Field(default=4, ge=1, le=256)
    """Attention heads of a decoder."""
    dropout: float = Field(default=0.1, ge=0.0, lt=1.0)
    """Share of activations dropped while training. On several GPUs the masks differ from those on one."""
    memory: int = Field(default=0, ge=0, le=2**40)
    """Rows of a memory of hashed n-grams in host memory, of 32 values each: each token also gets the rows of
    the last two and three tokens (kind decoder only). For text of millions of tokens. 0: none."""

    @model_validator(mode="after")
    def _heads_divide_hidden(self) -> Self:
        # Rotary positions turn pairs of a head's values.
        if self.kind == "decoder" and self.hidden % (2 * self.heads):
            raise ValueError(
                f"hidden={self.hidden} cannot be shared by heads={self.heads}; make hidden a multiple of "
                f"{2 * self.heads}, an even number of values a head"
            )
        return self


class Text(Recipe):
    """Language model of words or byte pairs."""

    name = "text"
    summary = "A language model: LSTM or decoder over a table of words or byte pairs."
    data = TextDataConfig
    model = TextModelConfig
    # Few epochs of small batches come further than twice as many of larger ones.
    train = {"epochs": 3, "batch_size": 8, "lr": 0.005}
    one_process = True
    sample = "window"
    source = imported("dphybrid.recipes.text.data:open_source")
    dataset = imported("dphybrid.recipes.text.data:part_of")
    build = imported("dphybrid.recipes.text.model:build_text")
    samples = imported("dphybrid.recipes.text.data:later_text")

    def threads(self, config: ExperimentConfig) -> int:
        model = config.model
        # A second thread only adds CPU time to the small products of an LSTM's steps.
        small = isinstance(model, TextModelConfig) and model.kind == "lstm" and model.hidden <= 512
        return 1 if small and not model.factory else 0

    def task(self, info: Mapping[str, object]) -> "Task":
        from dphybrid.training.metrics import BYTE_LANGUAGE_MODEL, LANGUAGE_MODEL

        # A model of words reads the text in lower case and without rare words.
        return BYTE_LANGUAGE_MODEL if info.get("bytes") else LANGUAGE_MODEL
