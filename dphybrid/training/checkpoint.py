"""Checkpoints as folders: tensors in safetensors files, everything else in a page of JSON; no pickle.

`step-000500/` holds `blocks.safetensors` (dense parameters and buffers), `blocks_optimizer.safetensors`,
`tables/NAME.safetensors` (table and its row states; see `tensor_file` for `changed/`) and `state.json` (step,
next batch, generator states, metrics, a checksum of each file). `saving` writes a temporary folder, fsyncs
and renames it, so a folder with its final name is complete. Names of parameters lack the `module.` of their
data-parallel block: a checkpoint loads on any number of devices, real or virtual, and into the bare module.
"""

import re
import shutil
import sys
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from pydantic import Field
from torch import Tensor, nn

from dphybrid.embedding import RowOptimizer, find_tables
from dphybrid.embedding.optim import misfits
from dphybrid.embedding.table import is_dense
from dphybrid.embedding.weights import all_rows
from dphybrid.parallel import find_data_parallel
from dphybrid.training.optimizers import swap_average
from dphybrid.training.tensor_file import (
    REMEDY,
    mapped_weight,
    read_table,
    read_tensors,
    table_file,
    tensor_shapes,
)
from dphybrid.util.digests import own_files, verify_files
from dphybrid.util.errors import UserError
from dphybrid.util.memory import is_out_of_memory
from dphybrid.util.pages import OtherVersion, Page

STATE = "state.json"
_LARGEST_PAGE = 2**28
"""Bytes of a `state.json`: a thousand times those of an ordinary one."""

_STEP = re.compile(r"step-\d+")
"""Names of checkpoint folders. `step-000500.damaged` does not match."""


class Stateful(Protocol):
    """An object whose state a checkpoint stores by name, as JSON."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def generator_states() -> dict[str, Any]:
    """Return the states of torch's random generators in this process, encoded in hex."""
    # Without the question, the call would start CUDA in a run on the CPU.
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    states = [state.numpy().tobytes().hex() for state in (torch.get_rng_state(), *cuda)]
    return {"torch": states[0], "cuda": states[1:]}


def set_generators(states: Mapping[str, Any]) -> None:
    """Set torch's random generators to `generator_states`."""

    def as_tensor(text: str) -> Tensor:
        return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)

    torch.set_rng_state(as_tensor(states["torch"]))
    if torch.cuda.is_initialized():
        # The run may have had more GPUs when the checkpoint was written.
        for index, text in enumerate(states["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(as_tensor(text), index)


VALIDATION = "validation "
"""Prefix of the validation metrics in `Progress.history`."""


@dataclass
class Progress:
    """How far training has come.

    Attributes:
        step: Optimizer steps so far.
        batch: Index of the epoch's next batch.
        stale_epochs: Epochs since the best one.
        history: One row for each epoch.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    stale_epochs: int = 0
    best_value: float | None = None
    best_step: int | None = None
    epoch_loss: float = 0.0
    epoch_weight: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    history: list[dict[str, float]] = field(default_factory=list)

    def copy_from(self, other: "Progress") -> None:
        """Take over all values of `other` in place, so that references to this object stay valid."""
        vars(self).update(vars(other))


class CheckpointState(Page):
    """`state.json` of a checkpoint: everything but its tensors.

    Attributes:
        since_full: How many checkpoints ago the last full one was; 0 for a full one.
        optimizer: Of the blocks, without tensors; see `flatten_optimizer`.
        record: The states of `Session.stateful` by name (splits, the current window of metrics, seconds by
            stage), with which a resumed run's record continues without a gap.
        crc32: Checksums of the tensor files, by their name in the folder.
        sha256: Checksums of the other files.
    """

    since_full: int = 0
    progress: Progress
    config: dict[str, Any]
    data_digest: str = ""
    prepared: str = ""
    devices: str = ""
    recipe: str = ""
    info: dict[str, Any] = Field(default_factory=dict)
    optimizer: dict[str, Any]
    generators: dict[str, Any]
    sha256: dict[str, str] = Field(default_factory=dict)
    crc32: dict[str, str] = Field(default_factory=dict)
    record: dict[str, Any] = Field(default_factory=dict)

    @property
    def digests(self) -> dict[str, str]:
        """One checksum for each file: the CRC-32 of a tensor file, the sha256 of another one."""
        return {**self.sha256, **self.crc32}


@dataclass(frozen=True)
class Trained:
    """Everything that training changes: the model, its optimizers and the progress.

    Attributes:
        dense: Optimizer of the dense parameters.
        rows: Optimizer of the table rows.
        blocks: Where a recipe has several dense optimizers, these by name; `dense` then combines them.
        rates: Initial learning rates of dense's parameter groups, which the schedule scales.
    """

    model: nn.Module
    dense: torch.optim.Optimizer | None
    rows: RowOptimizer | None
    progress: Progress
    blocks: Mapping[str, torch.optim.Optimizer] = field(default_factory=dict)
    rates: list[float] = field(init=False)

    def __post_init__(self) -> None:
        groups = self.dense.param_groups if self.dense is not None else []
        # Read now: loading a checkpoint replaces `lr` by the rate that the schedule had reached.
        rates = [group["lr"] for group in groups]
        object.__setattr__(self, "rates", rates)  # the dataclass is frozen

    @property
    def named(self) -> dict[str, torch.optim.Optimizer]:
        """All optimizers, by the names that a recipe's `step` uses, in the order of their updates."""
        dense = self.blocks or ({} if self.dense is None else {"blocks": self.dense})
        return {**dense, **({} if self.rows is None else {"rows": self.rows})}


def load_checkpoint(path: Path, trained: Trained) -> CheckpointState:
    """Load a verified checkpoint into model, optimizers and progress; return its state page.

    Raises UserError that names every missing, unexpected or differently shaped entry.
    """
    page = read_state(path)
    load_weights(path, trained.model)
    try:
        if trained.dense is not None:
            tensors = read_tensors(path / "blocks_optimizer.safetensors")
            trained.dense.load_state_dict(_unflatten_optimizer(tensors, page.optimizer))
            # blocks.safetensors holds the averaged weights; training continues with the raw ones.
            swap_average(trained.dense)
        if trained.rows is not None:
            _load_row_states(path, trained.rows, find_tables(trained.model))
        trained.progress.copy_from(page.progress)
        # Last, because a random number drawn by the steps above would change the restored state.
        set_generators(page.generators)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        if isinstance(error, UserError) or is_out_of_memory(error):
            raise
        # torch's optimizers take any state and fail at its first value of another kind.
        raise UserError(
            f"{path}: its states of optimizers or generators do not fit ({type(error).__name__}: {error}); "
            f"{REMEDY}"
        ) from error
    return page


def verify_checkpoint(path: Path) -> CheckpointState:
    """Check every file of a checkpoint against the checksums of its page; return the page. Raises UserError
    that names the first damaged file, and for links, pipes, devices and files that the page does not list."""
    own_files(path, REMEDY)  # before the page is opened
    page = read_state(path)
    verify_files(path, STATE, {"sha256": page.sha256, "crc32": page.crc32}, REMEDY)
    return page


def newest_whole_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint whose files all match their checksums, or None when there is no
    checkpoint.

    Damaged checkpoints newer than that are reported and renamed to `step-N.damaged`; they are removed once
    there is a new checkpoint of that step or a later one. Raises UserError when all are damaged.
    """
    damaged: dict[Path, UserError] = {}
    for path in reversed(complete_checkpoints(folder)):
        try:
            verify_checkpoint(path)
        except OtherVersion:
            raise
        except UserError as error:
            damaged[path] = error
            continue
        # Only after a whole one was found: otherwise all stay in place, for somebody to repair.
        for other, why in damaged.items():
            print(f"Note: skipped a damaged checkpoint: {why}", file=sys.stderr, flush=True)
            aside = other.with_name(f"{other.name}.damaged")
            shutil.rmtree(aside, ignore_errors=True)
            other.rename(aside)
        return path
    if damaged:
        reasons = "; ".join(map(str, damaged.values()))
        raise UserError(f"{folder}: no checkpoint is whole ({reasons}); start a new run")
    return None


def load_weights(path: Path, model: nn.Module, mapped: bool = False, skip: Container[str] = ()) -> None:
    """Load tables (except those named in `skip`) and blocks of `model` from a checkpoint, in place and on any
    device.

    mapped: leave the tables in the checkpoint's files, so that memory holds only the rows that were looked
    up. Raises UserError on mismatch.
    """
    tables = find_tables(model)
    blocks = read_tensors(path / "blocks.safetensors")
    wanted = dense_state(model)
    saved_shapes, shapes = ({name: tuple(t.shape) for name, t in some.items()} for some in (blocks, wanted))
    problems = misfits(saved_shapes, shapes)
    problems += [f"missing table {name}" for name in tables if not table_file(path, name).is_file()]
    if problems:
        raise UserError(
            f"{path}: does not fit this model: {'; '.join(problems)}; use the config it was trained with; "
            "where the model has changed since, train again"
        )
    with torch.no_grad():
        # copy_ instead of assignment: optimizers hold references to these tensors.
        for name, tensor in wanted.items():
            tensor.copy_(blocks[name])
        for name, table in tables.items():
            if mapped:
                rows_VD = mapped_weight(path, name, table.weight)
                table.weight = nn.Parameter(rows_VD, requires_grad=False)
            elif name not in skip:
                read_table(path, name, "weight", all_rows(table.weight))


def dense_state(model: nn.Module) -> dict[str, Tensor]:
    """Return references to the blocks' parameters and buffers, by names that do not depend on the devices."""
    dense = is_dense(model)
    regions = [f"{name}." if name else "" for name in find_data_parallel(model)]

    def bare(key: str) -> str:
        region = next((name for name in regions if key.startswith(f"{name}module.")), None)
        return key if region is None else region + key.removeprefix(f"{region}module.")

    # Without what `get_extra_state` of modules adds, which is not copied to by `load_weights`.
    return {
        bare(key): value.detach()
        for key, value in model.state_dict(keep_vars=True).items()
        if isinstance(value, Tensor) and dense(value) and not key.endswith("_extra_state")
    }


def complete_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints of a run, oldest first."""
    folders = (page.parent for page in folder.glob("step-*/state.json") if page.is_file())
    # By number: as text, a step of seven digits would come before those of six.
    return sorted((path for path in folders if _STEP.fullmatch(path.name)), key=step_of)


def how_to_continue(folder: Path) -> str:
    """Return the remedy for a training that fails now, by what checkpoints `folder` has."""
    checkpoints = complete_checkpoints(folder)
    if not checkpoints:
        return "start again: there is no checkpoint yet"
    return f"continue from the last good checkpoint, {checkpoints[-1]}, with --resume"


def step_of(checkpoint: Path) -> int:
    """Return the step number in a checkpoint's name."""
    return int(checkpoint.name.removeprefix("step-"))


def read_state(path: Path) -> CheckpointState:
    """Return the page of a checkpoint. Raises UserError when it is missing, damaged or of another version."""
    if not (path / "state.json").is_file():
        raise UserError(f"{path}: is not a checkpoint (it has no state.json); name a step-... folder")
    if (size := (path / "state.json").stat().st_size) > _LARGEST_PAGE:
        raise UserError(f"{path / 'state.json'}: is damaged (it has {size:,} bytes); {REMEDY}")
    return CheckpointState.read(path / "state.json")


def _load_row_states(path: Path, rows: RowOptimizer, tables: Mapping[str, Any]) -> None:
    sources: dict[str, tuple[str, str]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for name in [*tables, "_optimizer"]:
        file = table_file(path, name)
        for key, shape in tensor_shapes(file).items() if file.is_file() else ():
            if key != "weight":
                # `_optimizer` holds, by full names, states of tables that are not among the model's modules.
                whole = key if name == "_optimizer" else f"{name}.{key}"
                sources[whole], shapes[whole] = (name, key), shape
    # All shapes before the first read, so that a mismatch leaves no state half loaded.
    rows.check_shapes(shapes)
    for key, target in rows.states().items():
        read_table(path, *sources[key], target)


def flatten_optimizer(state: dict[str, Any], prefix: str = "") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Split an optimizer's state into its tensors by name (references) and a page of everything else.

    The tensor names of a combined optimizer start with the number of their part: `1/0.exp_avg`.
    """
    tensors, numbers = dict[str, Tensor](), dict[str, Any]()
    if "optimizers" in state:
        parts = [flatten_optimizer(part, f"{prefix}{n}/") for n, part in enumerate(state["optimizers"])]
        for of_part, _ in parts:
            tensors |= of_part
        return tensors, {"optimizers": [page for _, page in parts]}
    for index, entries in state["state"].items():
        for key, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"{prefix}{index}.{key}"] = value
            else:
                numbers[f"{index}.{key}"] = value
    return tensors, {"groups": state["param_groups"], "numbers": numbers}


def _unflatten_optimizer(
    tensors: Mapping[str, Tensor], page: dict[str, Any], prefix: str = ""
) -> dict[str, Any]:
    if "optimizers" in page:
        parts = enumerate(page["optimizers"])
        return {"optimizers": [_unflatten_optimizer(tensors, part, f"{prefix}{n}/") for n, part in parts]}
    of_part = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
    state: dict[int, dict[str, Any]] = {}
    for name, value in {**of_part, **page["numbers"]}.items():
        index, _, key = name.partition(".")
        state.setdefault(int(index), {})[key] = value
    return {"state": state, "param_groups": page["groups"]}
