"""The config of an experiment: sections of values, each declared once with type, default, bound, unit and a
sentence.

One declaration feeds the Prefect form, TOML files, the command line and MLflow's params. Every field changes
results; where an experiment runs is in `dphybrid.config.settings`. `table`, `train` and `checkpoint` are
common to all recipes; `data` and `model` are a recipe's own classes (`dphybrid.recipes`). Needs pydantic
alone.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializeAsAny,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic.fields import FieldInfo

from dphybrid.util.device_spec import parse_device_spec
from dphybrid.util.row_rules import RULES

# A type checker cannot read a Literal that is computed.
if TYPE_CHECKING:
    RowOptimizerName = str
else:
    RowOptimizerName = Literal[tuple(RULES)]


# Flags and overrides are texts; TOML and Python give lists.
def _split_names(value: object) -> object:
    if not isinstance(value, str):
        return value
    return tuple(part.strip() for part in value.split(",") if part.strip())


Names = Annotated[tuple[str, ...], BeforeValidator(_split_names)]


class Section(BaseModel):
    """A part of the config: frozen, and a name it does not know is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class DataConfig(Section):
    """Where the samples come from and how they are read."""

    @property
    def named_columns(self) -> list[tuple[str, str]]:
        """The columns of a table that are named, each with the field that names it."""
        return []

    def left_out(self, columns: Sequence[str]) -> Sequence[str]:
        """Return those of a table's columns that are not read: the ones that nothing names."""
        named = {column for _, column in self.named_columns}
        return [column for column in columns if column not in named]


class ModelConfig(Section):
    """The network and its sizes."""

    of_training: ClassVar[frozenset[str]] = frozenset()
    """Fields that change training alone: weights can be carried across them, as retraining does."""

    factory: str | None = None
    """Your own model, `package.module:function`; it is called with a dphybrid.recipes.ModelContext. Empty:
    the recipe's model."""
    dtype: Literal["float32", "float64"] = "float32"
    """Number format of tables and blocks; float64 is for comparing results to the last digit."""


@cache
def fields_of(section: type[BaseModel]) -> Mapping[str, FieldInfo]:
    """Return a section's fields in the order for people: a recipe's own before `factory` and `dtype`."""
    return dict(sorted(section.model_fields.items(), key=lambda item: item[0] in ModelConfig.model_fields))


class TableConfig(Section):
    """How rows of the host tables are trained."""

    # Not a docstring below it, as elsewhere: those cannot be computed.
    optimizer: RowOptimizerName = Field(
        default="adam",
        description="Optimizer of the batch's rows, and its state: "
        + "; ".join(f"{rule.name}, {rule.says}" for rule in RULES.values())
        + ".",
    )
    lr: float = Field(default=0.01, ge=0.0)
    """Learning rate of the rows. 0, for recipe ctr: set by train.lr, model.kind and the data; the run prints
    it."""
    weight_decay: float = Field(default=0.0, ge=0.0)
    """Weight decay, applied to the rows of the batch only (lazy). adamw: decoupled, and for the steps that a
    row was not in a batch, too."""
    dtype: Literal["model", "bfloat16"] = "model"
    """Number format of rows: the blocks' own, or bfloat16, half the memory, updated with
    stochastic rounding."""


class TrainConfig(Section):
    """How long and how the dense blocks are trained."""

    epochs: int = Field(default=8, ge=0)
    """Passes over the training part; 0: as many as make 4,000 steps, within 10 and 200."""
    batch_size: int = Field(default=16, ge=0)
    """Rows of a batch over all devices together; each device gets about batch_size / devices of them. 0: set
    by the number of training rows; the run prints it."""
    lr: float = Field(default=0.003, gt=0.0)
    """Learning rate of the dense blocks."""
    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    """Optimizer of the dense blocks."""
    weight_decay: float = Field(default=0.0, ge=0.0)
    """Weight decay of the dense blocks."""
    schedule: Literal["constant", "cosine", "linear"] = "cosine"
    """Course of both learning rates over the run: constant, or down to a hundredth by a half cosine or a
    line."""
    clip_norm: float = Field(default=1.0, ge=0.0)
    """Largest global norm of the gradients of blocks and rows together; 0: no clipping."""
    patience: int = Field(default=3, ge=-1)
    """Epochs without a better validation metric (ctr's classes: log loss) after which training stops; 0:
    never; -1: a tenth of the epochs, 3 or more."""
    average: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Decay a step of a moving average of the blocks' weights, which is evaluated and kept in their place; 0:
    none."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of every random choice: same seed, same devices, same bits."""
    precision: Literal["float32", "tf32", "bfloat16"] = "float32"
    """Number format that blocks compute in while training: float32; tf32, float32 whose products GPUs round
    to ten bits; or bfloat16 (autocast). Parameters, rows and all updates stay float32, and so does
    evaluation."""
    log_every: int = Field(default=20, ge=1)
    """Steps between two lines of metrics."""
    print_splits: Literal["new", "each"] = "new"
    """Print how a batch was split when that split is new, or in each step."""
    warm_start: str | None = None
    """Checkpoint folder whose weights a new run starts from. New values since data.base start from
    the "unknown" embedding."""
    callbacks: Names = ()
    """Functions of your own as package.module:NAME, separated by commas, called after each epoch with what it
    came to; numbers that they return are logged as own/NAME."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What follows a loss or gradient that is NaN or infinite: stop, or skip that step (no update of blocks
    nor rows; steps skipped are counted). A weight that is not finite ends training either way."""
    pipeline: Literal["off", "exact"] = "exact"
    """exact looks up the rows of the next batch while this one computes, and repairs those that changed: the
    same bits as off."""
    check_split: bool = False
    """Compute the first batch unsplit and split before training, in evaluation mode, and stop where a module
    computes across the batch. One device: in two shares. Costs about three forwards without gradients, and
    the memory of a whole batch's on the first device."""
    deterministic: bool = False
    """Refuse operations of the blocks that may give other bits from run to run on a GPU, instead of using
    them."""
    compile: bool = False
    """Compile the dense blocks with torch.compile, on one device. The first step takes a minute; results
    differ by rounding."""
    shuffle_rows: int = Field(default=2**24, ge=1)
    """Rows shuffled at once. A larger epoch is dealt out in blocks of 4,096 neighbours, and shuffled so
    many rows at a time: for files larger than memory, which are read in long runs then."""


class CheckpointConfig(Section):
    """What is kept of a run."""

    every_steps: int = Field(default=0, ge=0)
    """Steps between checkpoints, besides the one after each epoch; 0: only those."""
    full_every: int = Field(default=10, ge=1)
    """One checkpoint in so many holds whole tables; those between hold the rows changed since, where
    these are at most half of them, and share the others' file by a hard link. 1: each one is written
    whole."""
    keep_last: int = Field(default=2, ge=1)
    """Newest checkpoints to keep."""
    keep_best: int = Field(default=1, ge=1)
    """Checkpoints with the best validation metric to keep."""
    keep_every: int = Field(default=0, ge=0)
    """Also keep each checkpoint whose step is a multiple of this; 0: none."""
    register_as: str | None = Field(default=None, min_length=1, max_length=200, pattern=r"^[^/:]+$")
    """Name in MLflow's model registry; the best checkpoint becomes its newest version, with the alias
    challenger. Empty: not registered."""


class ClusterConfig(Section):
    """Over how many processes, perhaps on several machines, a training is spread."""

    ranks: int = Field(default=0, ge=0, le=4096)
    """Processes that hold the table in rows and train together, on TorchRec; 0: one process with the table in
    its host memory."""

    @property
    def several(self) -> bool:
        """Do several processes train?"""
        return self.ranks > 0

    def on_each(self, machines: int) -> int:
        """Return how many processes each of so many machines has; 0: one that has no part in a cluster."""
        return self.ranks // machines


class ExperimentConfig(Section):
    """A whole experiment. Each recipe has a class of its own below this one, with its own sections and
    defaults.

    Build one with `dphybrid.recipes.build_config`, which finds the recipe's class.
    """

    recipe: str = "text"
    """Kind of experiment: a recipe's name, or your own as `package.module:NAME`. It sets every value that is
    not given."""
    devices: str = "auto"
    """Where the blocks run: auto, auto*2 (two free GPUs), cpu, cpu*8 (eight virtual devices), cuda:0,
    cuda:0,cuda:1, cuda:0*4 (four of one GPU)."""
    # SerializeAsAny: pydantic dumps a field as its declared class, which lacks the recipe's own values.
    data: SerializeAsAny[DataConfig] = DataConfig()
    model: SerializeAsAny[ModelConfig] = ModelConfig()
    table: TableConfig = TableConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    cluster: ClusterConfig = ClusterConfig()

    @model_serializer(mode="wrap")
    def _without_an_unused_cluster(self, dump: SerializerFunctionWrapHandler) -> dict[str, object]:
        values: dict[str, object] = dump(self)
        if not self.cluster.several:
            values.pop("cluster", None)  # pages of one process are what they were before there were more
        return values

    @model_validator(mode="after")
    def _formats_agree(self) -> Self:
        if self.train.precision != "float32" and self.model.dtype != "float32":
            raise ValueError(
                f"train.precision={self.train.precision} is for model.dtype=float32, not {self.model.dtype}; "
                "leave one of them out"
            )
        return self

    @field_validator("devices")
    @classmethod
    def _devices_parse(cls, value: str) -> str:
        return parse_device_spec(value).text


def merge(base: dict[str, object], top: dict[str, object]) -> dict[str, Any]:
    """Return `base` with the values of `top` over it, section by section."""
    out = dict(base)
    for key, value in top.items():
        if isinstance(value, Section):
            # What was given, alone: the section's other defaults must not overrule `base`.
            value = value.model_dump(exclude_unset=True)
        if isinstance(value, dict):
            below = out.get(key)
            value = merge(below if isinstance(below, dict) else {}, value)
        out[key] = value
    return out


def flatten(values: dict[str, object], prefix: str = "") -> dict[str, object]:
    """Return nested values under dotted names: `{"train": {"lr": 1}}` -> `{"train.lr": 1}`."""
    flat: dict[str, object] = {}
    for key, value in values.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def nest(flat: Mapping[str, object]) -> dict[str, Any]:
    """Return values under dotted names as nested ones: what `flatten` is given."""
    out: dict[str, Any] = {}
    for name, value in flat.items():
        section, dot, rest = name.partition(".")
        out = merge(out, {section: nest({rest: value}) if dot else value})
    return out
