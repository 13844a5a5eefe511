"""The config of an experiment: sections of fields, each declared once with type, default, bounds, unit and
description.

The Prefect form, TOML files, the command line and MLflow's params all come from these declarations. Every
field can change results; where an experiment runs is set in `dphybrid.config.settings`. All recipes share the
sections `table`, `train`, `checkpoint` and `cluster`; each has its own classes for `data` and `model`
(`dphybrid.recipes`). Needs no package but pydantic.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from inspect import get_annotations
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializeAsAny,
    model_validator,
)
from pydantic.fields import FieldInfo

from dphybrid.util.device_spec import parse_device_spec
from dphybrid.util.errors import UserError
from dphybrid.util.row_rules import RULES
from dphybrid.util.text import split_items

# Type checkers reject a Literal whose values are computed; pydantic accepts it.
if TYPE_CHECKING:
    RowOptimizerName = str
else:
    RowOptimizerName = Literal["auto", *RULES]


# A flag or an override gives one text; TOML and Python give lists.
def _split_names(value: object) -> object:
    if not isinstance(value, str):
        return value
    return tuple(split_items(value))


Names = Annotated[tuple[str, ...], BeforeValidator(_split_names)]
# Stored as parsed: lower case and without blanks.
DeviceText = Annotated[str, AfterValidator(lambda text: parse_device_spec(text).text)]


class Section(BaseModel):
    """A section of the config: frozen, and an unknown field is an error."""

    # ser_json_inf_nan: an infinite value, which JSON has not, must not become null.
    # defer_build: of most recipes a process needs no config.
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants", defer_build=True)

    used_with: ClassVar[Mapping[str, str]] = {}
    """Fields that do something only with some values of another one: name -> `section.field=value,value`; no
    value: where the other is not given."""
    shared: ClassVar[bool] = False
    """Whether several recipes have the fields that this class itself declares; a recipe's own are shown
    before them."""


class DataConfig(Section):
    """Where the samples come from and how they are read."""

    def check_unset(self, field: str, why: str) -> None:
        """Raise UserError if a field, which does nothing because of `why`, has another value than its
        default."""
        if (value := getattr(self, field)) != type(self).model_fields[field].get_default():
            raise UserError(f"data.{field}={value!r} does nothing: {why}; leave it out")

    @property
    def named_columns(self) -> list[tuple[str, str]]:
        """The columns that this section names, as pairs of field and column."""
        return []


class ModelConfig(Section):
    """The network and its sizes."""

    shared = True
    of_training: ClassVar[frozenset[str]] = frozenset()
    """Fields that affect only training: retraining can change them and still reuse the old weights."""

    factory: str | None = None
    """Function that builds your own model, `package.module:function`; it receives a
    dphybrid.recipes.ModelContext. Empty: the recipe's model."""
    dtype: Literal["float32", "float64"] = "float32"
    """Number format of tables and blocks; use float64 to compare results to the last digit."""


@cache
def fields_of(section: type[BaseModel]) -> Mapping[str, FieldInfo]:
    """Return a section's fields in the order shown to users: a recipe's own before those that it shares."""

    def is_shared(name: str) -> bool:
        owner = next(base for base in section.__mro__ if name in get_annotations(base))
        return vars(owner).get("shared", False)

    # pydantic lists inherited fields first; the sort is stable, so that all others keep their order.
    return dict(sorted(section.model_fields.items(), key=lambda item: is_shared(item[0])))


def leaves(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield the fields of a class, those of its sections by dotted name."""
    for name, field in fields_of(model).items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from leaves(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


class TableConfig(Section):
    """How the rows of the host tables are trained."""

    # The description is an argument here because it is computed from RULES, which a docstring cannot be.
    optimizer: RowOptimizerName = Field(
        default="adam",
        description="Optimizer of the table rows. auto: adagrad if the mlp of recipe ctr makes one pass over "
        "many rows, else adam; the run prints the choice. State that each keeps: "
        + "; ".join(f"{rule.name}, {rule.says}" for rule in RULES.values())
        + ".",
    )
    lr: float = Field(default=0.01, ge=0.0)
    """Learning rate of the rows. 0 (recipe ctr only): computed from train.lr, model.kind and the data; the
    run prints it."""
    weight_decay: float = Field(default=0.0, ge=0.0)
    """Weight decay, applied only to the rows of the batch (lazy). With adamw it is decoupled, and makes up
    for the steps since the row's last batch."""
    dtype: Literal["model", "bfloat16"] = "model"
    """Number format of rows: model, the same as the blocks; or bfloat16, which halves the memory and is
    updated with stochastic rounding."""


class TrainConfig(Section):
    """How long training runs, and how the dense blocks are trained."""

    epochs: int = Field(default=8, ge=0)
    """Passes over the training rows. 0: enough for about 4,000 steps, at least 10 and at most 200. Over
    many rows with columns of many values, recipe ctr's mlp makes one pass."""
    batch_size: int = Field(default=16, ge=0)
    """Rows per batch, over all devices together; each device gets about batch_size / devices of them. 0:
    computed from the number of training rows; the run prints it."""
    accumulate: int = Field(default=1, ge=1)
    """Parts in which a batch is computed, one after another; their gradients are added up before the update,
    so that the result is that of the whole batch, with a part of its memory."""
    limit_batches: int = Field(default=0, ge=0)
    """Number of batches to train in each epoch, to try things out. 0: all."""
    lr: float = Field(default=0.003, gt=0.0)
    """Learning rate of the dense blocks."""
    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    """Optimizer of the dense blocks."""
    weight_decay: float = Field(default=0.0, ge=0.0)
    """Weight decay of the dense blocks."""
    schedule: Literal["constant", "cosine", "linear"] = "cosine"
    """Schedule of both learning rates over the run: constant, or a decay to a hundredth along a half cosine
    or a line."""
    warm_up_share: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of all steps in which both learning rates rise from zero in a line. 0: no warm-up."""
    clip_norm: float = Field(default=1.0, ge=0.0)
    """Gradient clipping: the largest global norm of the gradients of blocks and rows together. 0: off."""
    patience: int = Field(default=3, ge=-1)
    """Early stopping: epochs without a better validation metric (log loss for ctr's classes) before training
    stops. 0: off. -1: a tenth of the epochs, at least 3."""
    average: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Decay per step of a moving average of the blocks' weights; the average is evaluated and saved in place
    of the weights. 0: off."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of every random choice. The same seed on the same devices gives the same bits."""
    precision: Literal["float32", "tf32", "bfloat16"] = "float32"
    """Number format in which blocks compute during training: float32; tf32, where GPUs round the factors of
    products to ten bits; or bfloat16 (autocast). Parameters, rows, updates and evaluation stay float32."""
    log_every: int = Field(default=20, ge=1)
    """Steps between two lines of metrics."""
    print_splits: Literal["new", "each"] = "new"
    """When to print how a batch was split: new, when the split differs from all before; each, at every
    step."""
    warm_start: str | None = None
    """Checkpoint folder whose weights a new run starts from. New values since data.base start from
    the "unknown" embedding."""
    callbacks: Names = ()
    """Your own functions as package.module:NAME, separated by commas. Each is called with the results of
    every epoch; the numbers it returns are logged as own/NAME."""
    pipeline: Literal["off", "exact"] = "exact"
    """exact looks up the rows of the next batch while this one computes, and then replaces those that
    changed. Results are the same bits as with off."""
    check_split: bool = True
    """With several devices: before training, compute the first batch both unsplit and split, and stop if a
    module computes something else when it is split. Costs about four steps, and is left out if the first
    device cannot hold the whole batch."""
    deterministic: bool = False
    """Stop with an error when a block uses a GPU operation whose bits may differ from run to run."""
    shuffle_rows: int = Field(default=2**24, ge=1)
    """Number of rows that are shuffled as a whole. Of more rows, blocks of 4,096 neighbours are first dealt
    at random to windows of this size, so that files larger than memory are read in long runs."""


class CheckpointConfig(Section):
    """Which checkpoints of a run are written and kept."""

    every_steps: int = Field(default=0, ge=0)
    """Steps between checkpoints, in addition to the one after each epoch. 0: only after epochs."""
    full_every: int = Field(default=10, ge=1)
    """Every n-th checkpoint holds whole tables; the others hold only the rows changed since, if these are at
    most half of the table, and share the whole table's file by a hard link. 1: all are whole."""
    keep_last: int = Field(default=2, ge=1)
    """How many of the newest checkpoints to keep."""
    keep_best: int = Field(default=1, ge=1)
    """How many of the checkpoints with the best validation metric to keep."""
    # MLflow addresses models as models:/NAME/VERSION, and its filters have no escapes for quotes.
    register_as: str | None = Field(default=None, min_length=1, max_length=200, pattern=r"^[^/:'\"]+$")
    """Name in MLflow's model registry; the best checkpoint becomes its newest version, with the alias
    challenger. Empty: not registered."""


class ClusterConfig(Section):
    """The number of processes that train together."""

    ranks: int = Field(default=0, ge=0, le=4096)
    """Processes that share one table by rows and train together, on TorchRec. 0: a single process, with the
    table in its host memory."""

    @property
    def several(self) -> bool:
        """Whether processes train as ranks of a cluster."""
        return self.ranks > 0


class ExperimentConfig(Section):
    """A whole experiment. Each recipe has its own subclass, with its own sections and defaults.

    Build one with `dphybrid.recipes.build_config`, which finds the recipe's class.
    """

    recipe: str = "text"
    """Kind of experiment: a recipe's name, or your own as `package.module:NAME`. It determines the default of
    every value that you do not set."""
    devices: DeviceText = "auto"
    """Where the blocks run: auto, auto*2 (two free GPUs), cpu, cpu*8 (eight virtual devices), cuda:0,
    cuda:0,cuda:1, cuda:0*4 (four virtual devices on one GPU)."""
    # Without SerializeAsAny pydantic dumps only the fields of the declared class, not the recipe's own.
    data: SerializeAsAny[DataConfig] = Field(default_factory=DataConfig)
    model: SerializeAsAny[ModelConfig] = Field(default_factory=ModelConfig)
    table: TableConfig = Field(default_factory=TableConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)

    @model_validator(mode="after")
    def _formats_agree(self) -> Self:
        if self.train.accumulate > 1 and self.cluster.several:
            raise ValueError(
                f"train.accumulate={self.train.accumulate}: ranks compute their part of a batch at once; "
                "leave it out, or raise cluster.ranks"
            )
        if self.train.precision != "float32" and self.model.dtype != "float32":
            raise ValueError(
                f"train.precision={self.train.precision} needs model.dtype=float32, not {self.model.dtype}; "
                "leave one of them out"
            )
        return self


def merge(base: dict[str, object], top: dict[str, object]) -> dict[str, Any]:
    """Return `base` overridden by the values of `top`, section by section."""
    out = dict(base)
    for key, value in top.items():
        if isinstance(value, Section):
            # Only the values that were set: the section's defaults must not override `base`.
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
    """Return values under dotted names as nested dicts: the inverse of `flatten`."""
    out: dict[str, Any] = {}
    for name, value in flat.items():
        section, dot, rest = name.partition(".")
        # Merged, not assigned: several names share a section.
        out = merge(out, {section: nest({rest: value}) if dot else value})
    return out
