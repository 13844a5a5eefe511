"""Recipe retrieval: predicts which items a user will want next, by a vector for each user and item."""

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from dphybrid.config import DataConfig, ModelConfig, Names
from dphybrid.config.tables import Encoding, Quote, TableDataConfig
from dphybrid.recipes.recipe import Recipe, imported

# Flags and overrides are texts such as "10,50".
_Numbers = Annotated[
    tuple[Annotated[int, Field(ge=1, le=1000)], ...],
    BeforeValidator(lambda v: [part for part in v.split(",") if part.strip()] if isinstance(v, str) else v),
]


class RetrievalDataConfig(DataConfig):
    """The interactions, their columns, and the items that compete with a user's item in training."""

    path: str | None = None
    """Your interactions, one per row: CSV, TSV or Parquet; a file, a folder of files, or a pattern. Empty: a
    generated sample."""
    user: str = "user"
    """Column with the user: its name, or its position 0, 1, ... in a file without a header."""
    item: str = "item"
    """Column with the item."""
    user_features: Names = ()
    """Columns with categories of the user, separated by commas; the value of a user's last training row is
    used."""
    item_features: Names = ()
    """Columns with categories of the item, separated by commas; the value of an item's last training row is
    used."""
    time: str | None = None
    """Column with a number, date or time: the latest rows are the validation split. Empty: random rows by
    train.seed."""
    valid_fraction: float = Field(default=0.1, gt=0.0, lt=1.0)
    """Share of the rows in the validation split."""
    negatives: int = Field(default=0, ge=0, le=2**20)
    """Items drawn by frequency that compete in addition to those of the batch; 0: only those of the batch."""
    cutoffs: _Numbers = (10, 50)
    """Lengths k of the lists for recall@k and NDCG@k, separated by commas; NDCG at the first one decides."""
    header: Literal["auto", "yes", "no"] = "auto"
    """Whether the first line names the columns; auto: inferred from the file."""
    delimiter: str = "auto"
    """Text between columns, such as ;, tab or ::, or blank for any number of blanks; auto: inferred from
    the file."""
    quote: Quote = "auto"
    """Character around cells that hold separators or line ends; none: quotes are plain text; auto: the double
    quote, unless the file's lines rule it out."""
    encoding: Encoding = "auto"
    """Encoding of text files, such as latin-1, utf-16 or shift_jis; auto: UTF-8 or UTF-16, else Latin-1."""
    dayfirst: bool | None = None
    """true reads 3/12/2024 in data.time as 3 December, false as 12 March. Empty: inferred from the dates."""
    missing: Names = ()
    """Further texts that mean "no value", separated by commas."""
    max_rejected: float = Field(default=0.001, ge=0.0, le=1.0)
    """Largest share of rows that are unreadable or lack user or item; with more, preparation stops."""

    @model_validator(mode="after")
    def _columns_and_cutoffs_differ(self) -> Self:
        columns = [self.user, self.item, *self.user_features, *self.item_features]
        if twice := {name for name in columns if columns.count(name) > 1}:
            raise ValueError(f"column {min(twice)!r} is named twice; give each column one purpose")
        if not self.cutoffs or len(set(self.cutoffs)) < len(self.cutoffs):
            raise ValueError(f"cutoffs={self.cutoffs}: give one or more lengths that differ")
        return self

    @property
    def named_columns(self) -> list[tuple[str, str]]:
        """The columns that fields name, as pairs (field, column)."""
        features = [
            (side, name) for side in ("user_features", "item_features") for name in getattr(self, side)
        ]
        time = [] if self.time is None else [("time", self.time)]
        return [("user", self.user), ("item", self.item), *features, *time]

    @property
    def reading(self) -> TableDataConfig:
        """How files are read, for `dphybrid.data.table`."""
        return TableDataConfig(
            path=self.path,
            header=self.header,
            delimiter=self.delimiter,
            quote=self.quote,
            encoding=self.encoding,
            dayfirst=self.dayfirst,
            missing=self.missing,
            max_rejected=self.max_rejected,
        )


class RetrievalModelConfig(ModelConfig):
    """The width of rows and the size of the towers over them. A score is the dot product of two vectors."""

    dim: int = Field(default=64, ge=1, le=65536)
    """Width of an embedding row, and of a vector."""
    layers: int = Field(default=0, ge=0, le=64)
    """Number of a tower's hidden layers; 0: no tower, a vector is the sum of the embedding rows."""
    hidden: int = Field(default=64, ge=1, le=65536)
    """Width of a tower's hidden layers."""


class Retrieval(Recipe):
    """Two-tower retrieval."""

    name = "retrieval"
    summary = "Interactions of users with items: a vector for each, or two towers, and recommendations."
    data = RetrievalDataConfig
    model = RetrievalModelConfig
    one_process = True
    # Chosen on MovieLens-100k (docs/quality.md), where it beats Adam whose moments count only the row's own
    # steps.
    table = {"optimizer": "adamw", "lr": 0.003, "weight_decay": 1.0}
    train = {"epochs": 100, "schedule": "constant", "batch_size": 512, "lr": 0.003}
    source = imported("dphybrid.recipes.retrieval.data:open_source")
    dataset = imported("dphybrid.recipes.retrieval.data:part_of")
    build = imported("dphybrid.recipes.retrieval.model:build_retrieval")
    task = imported("dphybrid.recipes.retrieval.model:recommending")
    predictor = imported("dphybrid.recipes.retrieval.recommend:Recommender")
