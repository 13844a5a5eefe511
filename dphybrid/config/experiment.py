"""What an experiment is: one declaration that feeds the flow's form, TOML files, the command line and MLflow's params.

Needs pydantic alone. Every field changes results; where an experiment runs is in `dphybrid.config.settings`.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from dphybrid.util.device_spec import parse_device_spec

RecipeName = Literal["text", "ctr", "kge", "digits", "hybrid", "blocks", "convnet", "toy"]
Kind = Literal["lstm", "gru", "transformer", "wide-deep", "deepfm", "dlrm", "distmult", "complex", "rotate", "convnet", "capsule"]
KINDS: dict[str, tuple[Kind, ...]] = {
    "text": ("lstm", "gru", "transformer"),
    "ctr": ("wide-deep", "deepfm", "dlrm"),
    "kge": ("distmult", "complex", "rotate"),
    "digits": ("convnet", "capsule"),
}
"""What model.kind may be in the recipes that have more than one network."""


def _split_names(value: Any) -> Any:
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], BeforeValidator(_split_names)]


class Section(BaseModel):
    """A part of the config: frozen, and a name it does not know is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class DataConfig(Section):
    """Where the rows come from and how they are read."""

    path: str | None = None
    """Your data: CSV, TSV or Parquet for ctr (a file, a folder, a pattern like day-*.csv.gz); a text file or a folder of them for text;
    triples for kge. Empty: the data that comes with the recipe."""
    label: str | None = None
    """Column with the answer (ctr): its name, or its position 0, 1, ... in a file without a header."""
    numeric: Names = ()
    """Columns to read as numbers, separated by commas; the rest is inferred (ctr)."""
    categorical: Names = ()
    """Columns to read as categories, separated by commas (ctr)."""
    bags: Names = ()
    """Columns to read as bags: several values in a cell, such as drama|comedy, separated by commas (ctr)."""
    text: Names = ()
    """Columns to read as free text, whose words are a bag, separated by commas (ctr)."""
    ignore: Names = ()
    """Columns to leave out, separated by commas (ctr)."""
    schema_file: str | None = None
    """Roles and encodings of the columns, as a prepared folder's schema.toml has them (ctr)."""
    base: str | None = None
    """Prepared folder of an earlier run: its ids and statistics are kept and grown, so that its model can be trained on (ctr)."""
    header: Literal["auto", "yes", "no"] = "auto"
    """Does the first line name the columns? auto looks at the file (ctr)."""
    delimiter: str = "auto"
    """Character between columns; auto looks at the file (ctr)."""
    missing: Names = ("?", "NA", "NaN", "null")
    """Texts that mean "no value", besides the empty one, separated by commas (ctr)."""
    min_count: int = Field(default=2, ge=1)
    """Words or categories seen fewer times in the training part become the unknown one."""
    buckets: int = Field(default=32, ge=0, le=4096)
    """Quantile buckets that each numeric column also gets an embedding for; 0: none (ctr)."""
    window: int = Field(default=64, ge=2, le=8192)
    """Tokens in one training sample (text)."""
    negatives: int = Field(default=1024, ge=1, le=2**20)
    """Random entities that compete with the answers of a batch (kge)."""
    valid_fraction: float = Field(default=0.1, gt=0.0, lt=1.0)
    """Share of the rows (ctr, kge) or of the documents (text) that is held out for evaluation."""
    split: Literal["random", "time", "key"] = "random"
    """Held-out rows: random, the latest by data.split_column (time), or whole values of it, so that no user is in both parts (key) (ctr)."""
    split_column: str | None = None
    """Column that data.split goes by (ctr)."""
    valid_path: str | None = None
    """Held-out rows from files of their own; data.valid_fraction and data.split say nothing then (ctr)."""
    max_rejected: float = Field(default=0.001, ge=0.0, le=1.0)
    """Share of unreadable rows above which preparation stops."""

    @model_validator(mode="after")
    def _split_has_its_column(self) -> Self:
        if (self.split == "random") != (self.split_column is None):
            raise ValueError(
                f"split={self.split} with split_column={self.split_column}: time and key need a column, random has none"
            )
        if self.valid_path is not None and self.split != "random":
            raise ValueError(
                f"valid_path={self.valid_path} with split={self.split}: the files are the split; give one of the two"
            )
        return self


class ModelConfig(Section):
    """Which network, and how large."""

    factory: str | None = None
    """Your own model, `package.module:function`; it is called with a dphybrid.recipes.ModelContext. Empty: the recipe's model."""
    kind: Kind = "lstm"
    """Network: lstm, gru, transformer (text); wide-deep, deepfm, dlrm (ctr); distmult, complex, rotate (kge); convnet, capsule (digits)."""
    output: Literal["full", "adaptive"] = "full"
    """Output layer: a softmax over all words, or one in which rare words share narrow clusters, for large vocabularies (text)."""
    dim: int = Field(default=256, ge=1, le=65536)
    """Width of an embedding row."""
    hidden: int = Field(default=256, ge=1, le=65536)
    """Width of the hidden layers."""
    layers: int = Field(default=2, ge=1, le=64)
    """Number of hidden layers."""
    heads: int = Field(default=4, ge=1, le=256)
    """Attention heads of the transformer."""
    dropout: float = Field(default=0.2, ge=0.0, lt=1.0)
    """Share of activations dropped while training. With more than one device the masks differ from those of one device."""
    penalty: float = Field(default=0.0, ge=0.0)
    """Weight of the cubed moduli of a triple's rows, Lacroix's N3 (kge)."""
    dtype: Literal["float32", "float64"] = "float32"
    """Number format of tables and blocks; float64 is for comparing results to the last digit."""

    @model_validator(mode="after")
    def _heads_divide_hidden(self) -> Self:
        if self.kind == "transformer" and self.hidden % self.heads:
            raise ValueError(f"hidden={self.hidden} cannot be shared by heads={self.heads}; make hidden a multiple of heads")
        return self


class TableConfig(Section):
    """How rows of the host tables are trained."""

    optimizer: Literal["adagrad", "adam", "lazy-adam", "sgd"] = "adam"
    """Row-wise optimizer: adagrad and adam keep one number a row, lazy-adam two a weight, sgd none. Only rows of the batch change."""
    lr: float = Field(default=0.01, gt=0.0)
    """Learning rate of the rows."""
    weight_decay: float = Field(default=0.0, ge=0.0)
    """Weight decay, applied to the rows of the batch only (lazy)."""
    dtype: Literal["model", "bfloat16"] = "model"
    """Number format of rows: the blocks' own, or bfloat16, half the memory: updates are then rounded up or down by chance, fair on average."""


class TrainConfig(Section):
    """How long and how the dense blocks are trained."""

    epochs: int = Field(default=8, ge=1)
    """Passes over the training part."""
    batch_size: int = Field(default=16, ge=1)
    """Rows of a batch over all devices together; each device gets about batch_size / devices of them."""
    warm_start: str | None = None
    """Checkpoint folder whose weights a new run starts from. Rows of values that are new since data.base start as the unknown one's."""
    shuffle_rows: int = Field(default=2**24, ge=1)
    """Rows shuffled as one. An epoch of more rows is dealt out in blocks of 4,096 neighbours, and shuffled so many rows at a time: for files larger
    than memory, which are read in long runs then."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Start of every random choice: same seed, same devices, same bits."""
    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    """Optimizer of the dense blocks."""
    lr: float = Field(default=0.003, gt=0.0)
    """Learning rate of the dense blocks."""
    weight_decay: float = Field(default=0.0, ge=0.0)
    """Weight decay of the dense blocks."""
    schedule: Literal["constant", "cosine", "linear"] = "cosine"
    """Course of both learning rates over the run: constant, or down to a hundredth by a half cosine or a line."""
    clip_norm: float = Field(default=1.0, ge=0.0)
    """Largest global norm of the gradients of blocks and rows together; 0: no clipping."""
    patience: int = Field(default=3, ge=0)
    """Epochs without a better held-out metric after which training stops; 0: never."""
    log_every: int = Field(default=20, ge=1)
    """Steps between two lines of metrics."""
    pipeline: Literal["off", "exact"] = "exact"
    """exact looks up the rows of the next batch while this one computes, and repairs those that changed: the same bits as off."""
    print_splits: Literal["new", "each"] = "new"
    """Print how a batch was split when that split is new, or in each step."""


class CheckpointConfig(Section):
    """What is kept of a run."""

    every_steps: int = Field(default=0, ge=0)
    """Steps between checkpoints, besides the one after each epoch; 0: only those."""
    keep_last: int = Field(default=2, ge=1)
    """Newest checkpoints to keep."""
    keep_best: int = Field(default=1, ge=1)
    """Checkpoints with the best held-out metric to keep."""
    keep_every: int = Field(default=0, ge=0)
    """Also keep each checkpoint whose step is a multiple of this; 0: none."""
    register_as: str | None = Field(default=None, min_length=1, max_length=200, pattern=r"^[^/:]+$")
    """Name in MLflow's model registry; the best checkpoint becomes its newest version, with the alias challenger. Empty: not registered."""


# What a recipe sets; anything given by the user comes on top.
RECIPES: dict[str, dict[str, Any]] = {
    "text": {},
    "ctr": {
        "data": {"valid_fraction": 0.2},
        "model": {"kind": "wide-deep", "dim": 16, "hidden": 256, "layers": 2, "dropout": 0.2},
        "table": {"optimizer": "adagrad", "lr": 0.02},
        "train": {"epochs": 10, "batch_size": 512, "lr": 0.001},
    },
    "kge": {
        "model": {"kind": "complex", "dim": 256, "penalty": 0.01},
        "table": {"optimizer": "adagrad", "lr": 0.1},
        "train": {"epochs": 20, "batch_size": 1024, "lr": 0.01, "clip_norm": 0.0, "patience": 0},
    },
    "digits": {
        "model": {"kind": "convnet", "hidden": 128, "dropout": 0.2},
        "train": {"epochs": 15, "batch_size": 64, "lr": 0.003, "log_every": 10},
    },
    "hybrid": {
        "model": {"dim": 10, "hidden": 10, "layers": 1, "dropout": 0.0},
        "table": {"optimizer": "adagrad", "lr": 0.5},
        "train": {"epochs": 10, "batch_size": 64, "lr": 0.01, "schedule": "constant", "clip_norm": 0.0},
    },
    "blocks": {
        "model": {"hidden": 20, "layers": 1, "dropout": 0.0},
        "train": {"epochs": 20, "batch_size": 30, "lr": 0.01, "schedule": "constant", "clip_norm": 0.0, "log_every": 4},
    },
    "convnet": {
        "model": {"hidden": 64, "layers": 1, "dropout": 0.0},
        "train": {
            "epochs": 5,
            "batch_size": 64,
            "optimizer": "sgd",
            "lr": 0.01,
            "schedule": "constant",
            "clip_norm": 0.0,
            "log_every": 4,
        },
    },
    "toy": {
        "model": {"hidden": 2, "layers": 1, "dropout": 0.0},
        "train": {
            "epochs": 1,
            "batch_size": 30,
            "optimizer": "sgd",
            "lr": 0.05,
            "schedule": "constant",
            "clip_norm": 0.0,
            "patience": 0,
            "log_every": 4,
            "print_splits": "each",
        },
    },
}


class ExperimentConfig(Section):
    """A whole experiment. The recipe sets every value that is not given."""

    recipe: RecipeName = "text"
    """Ready config: text (words), ctr (clicks), kge (triples of a knowledge graph), digits (images); hybrid, blocks, convnet, toy (the
    tutorials' models)."""
    devices: str = "auto"
    """Where the blocks run: auto, auto*2 (two free GPUs), cpu, cpu*8 (eight virtual devices), cuda:0, cuda:0,cuda:1, cuda:0*4 (four of one GPU)."""
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    table: TableConfig = TableConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @model_validator(mode="before")
    @classmethod
    def _recipe_first(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        # An unknown recipe is left for the field's own check, which lists the known ones.
        return merge(RECIPES.get(str(values.get("recipe", "text")), {}), values)

    @model_validator(mode="after")
    def _kind_is_the_recipes(self) -> Self:
        kinds = KINDS.get(self.recipe)
        if kinds and self.model.kind not in kinds and self.model.factory is None:
            raise ValueError(f"model.kind={self.model.kind}: recipe {self.recipe} has {', '.join(kinds)}")
        return self

    @field_validator("devices")
    @classmethod
    def _devices_parse(cls, value: str) -> str:
        return parse_device_spec(value).text


def merge(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    """Return `base` with the values of `top` over it, section by section."""
    out = dict(base)
    for key, value in top.items():
        if isinstance(value, Section):
            value = value.model_dump(exclude_unset=True)
        below = out.get(key)
        out[key] = merge(below if isinstance(below, dict) else {}, value) if isinstance(value, dict) else value
    return out


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values under dotted names: `{"train": {"lr": 1}}` -> `{"train.lr": 1}`."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def given_values(config: ExperimentConfig) -> dict[str, Any]:
    """Return the nested values in which `config` differs from its recipe."""

    def differing(values: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key, value in values.items():
            if isinstance(value, dict):
                if inner := differing(value, base[key]):
                    out[key] = inner
            elif value != base[key]:
                out[key] = value
        return out

    recipe_only = ExperimentConfig(recipe=config.recipe).model_dump()
    return {"recipe": config.recipe} | differing(config.model_dump(), recipe_only)
