"""Checkpoints as folders: tensors in safetensors files, everything else in a page of JSON; no pickle.

`step-000500/` holds `blocks.safetensors` (dense parameters and buffers), `blocks_optimizer.safetensors`,
`tables/NAME.safetensors` (table and its row states; see `tensor_file` for `changed/`) and `state.json` (step,
cursor, generator states, metrics, checksums of all files). Written beside, fsynced, renamed (see `saving`): a
folder with its final name is complete. The keys carry no `module.`, so 1, 8 or virtual devices read each
other's files.
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
from dphybrid.training.optimizers import swap
from dphybrid.training.tensor_file import (
    REMEDY,
    mapped_weight,
    read_table,
    read_tensors,
    table_file,
    tensor_shapes,
)
from dphybrid.util.digests import value_digest, verify_files
from dphybrid.util.errors import UserError
from dphybrid.util.pages import Page

_FORMAT = 3
_STEP = re.compile(r"step-\d+")
"""Name of a checkpoint's folder."""


class Stateful(Protocol):
    """What a checkpoint holds by name: its state fits into JSON."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Generators:
    """torch's random generators of this process; their states in hex."""

    def state_dict(self) -> dict[str, Any]:
        cuda = (
            [state.numpy().tobytes().hex() for state in torch.cuda.get_rng_state_all()]
            if torch.cuda.is_initialized()  # by this run: a run on the CPU must not start it
            else []
        )
        return {"torch": torch.get_rng_state().numpy().tobytes().hex(), "cuda": cuda}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        def as_tensor(text: str) -> Tensor:
            return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)

        torch.set_rng_state(as_tensor(state["torch"]))
        if torch.cuda.is_initialized():
            # A run may go on with fewer GPUs than it had.
            for index, text in enumerate(state["cuda"][: torch.cuda.device_count()]):
                torch.cuda.set_rng_state(as_tensor(text), index)


VALIDATION = "validation "
"""Before the names of the validation split's metrics in an epoch's row of a run's history."""


@dataclass
class Progress:
    """How far training is. step counts optimizer steps; batch is the next batch of the epoch; history has a
    row an epoch.

    micro_batches: parts that a batch is computed in, after it did not fit into memory. skipped: steps without
    an update, as their loss or gradients were no numbers.
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
    micro_batches: int = 1
    skipped: int = 0
    history: list[dict[str, float]] = field(default_factory=list)

    def become(self, other: "Progress") -> None:
        """Take over how far another one is, in place: a training keeps its own object."""
        vars(self).update(vars(other))


class CheckpointState(Page):
    """`state.json` of a checkpoint: all of it but its tensors. block_sums: of each file of tensors by its
    name in the folder; sha256: of the other files. since_full: 0, or how many checkpoints before it the last
    full one was.

    progress, generators, record: the states of `Session.stateful`; record holds those by name from which the
    run's record goes on without a gap (splits, the window of metrics, seconds by stage).
    """

    format: int = _FORMAT
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
    block_sums: dict[str, str] = Field(default_factory=dict)
    record: dict[str, Any] = Field(default_factory=dict)

    @property
    def digests(self) -> dict[str, str]:
        """A sha256 by file; of tensors, that of their sums."""
        return {**self.sha256, **{name: value_digest(sums) for name, sums in self.block_sums.items()}}


@dataclass(frozen=True)
class Trained:
    """The four things that training changes.

    blocks: optimizers of the dense parameters by name, where a recipe has several; `dense` has their groups
    and states then. rates: learning rates of dense's groups as they were built, which a schedule scales.
    """

    model: nn.Module
    dense: torch.optim.Optimizer | None
    rows: RowOptimizer | None
    progress: Progress
    blocks: Mapping[str, torch.optim.Optimizer] = field(default_factory=dict)
    rates: list[float] = field(init=False)

    def __post_init__(self) -> None:
        groups = self.dense.param_groups if self.dense is not None else []
        rates = [group["lr"] for group in groups]  # before a checkpoint's replace them
        object.__setattr__(self, "rates", rates)

    @property
    def named(self) -> dict[str, torch.optim.Optimizer]:
        """All optimizers, by the names that a recipe's `step` uses, in the order of their updates."""
        dense = self.blocks or ({} if self.dense is None else {"blocks": self.dense})
        return {**dense, **({} if self.rows is None else {"rows": self.rows})}


def load_checkpoint(path: Path, trained: Trained) -> CheckpointState:
    """Fill model, optimizers and progress from a checkpoint that was verified; return its state page.

    Raises UserError that names every missing, unexpected or differently shaped entry.
    """
    page = read_state(path)
    load_weights(path, trained.model)
    if trained.dense is not None:
        tensors = read_tensors(path / "blocks_optimizer.safetensors")
        trained.dense.load_state_dict(_unflatten_optimizer(tensors, page.optimizer))
        # The file's blocks are the averages; training goes on with the weights.
        swap(trained.dense)
    if trained.rows is not None:
        _load_row_states(path, trained.rows, find_tables(trained.model))
    trained.progress.become(page.progress)
    # Last: nothing above may draw from them any more.
    Generators().load_state_dict(page.generators)
    return page


def verify_checkpoint(path: Path, mapped: bool = False) -> CheckpointState:
    """Check every file of a checkpoint against its page, which is returned. Raises UserError that names the
    first damaged one.

    mapped: leave out the tables' files, whose blocks are checked when they are looked up.
    """
    page = read_state(path)
    # No name starts with one of an empty tuple.
    later = "tables/" if mapped else ()
    blocks = {name: sums for name, sums in page.block_sums.items() if not name.startswith(later)}
    verify_files(path, {"sha256": page.sha256, "block_sums": blocks}, REMEDY)
    return page


def newest_whole_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint whose files all match their checksums, or None when there is no
    checkpoint.

    Later ones that are damaged are named and put aside (`step-N.damaged`, until there is a new checkpoint of
    that step or a later one). Raises UserError when every one is damaged.
    """
    damaged: dict[Path, UserError] = {}
    for path in reversed(complete_checkpoints(folder)):
        try:
            verify_checkpoint(path)
        except UserError as error:
            damaged[path] = error
            continue
        # Only now: where no checkpoint is whole, none is moved, and somebody may still mend one.
        for other, why in damaged.items():
            print(f"Note: left out a damaged checkpoint: {why}", file=sys.stderr, flush=True)
            aside = other.with_name(f"{other.name}.damaged")
            shutil.rmtree(aside, ignore_errors=True)
            other.rename(aside)
        return path
    if damaged:
        reasons = "; ".join(map(str, damaged.values()))
        raise UserError(f"{folder}: no checkpoint is whole ({reasons}); start a new run")
    return None


def load_weights(path: Path, model: nn.Module, mapped: bool = False, skip: Container[str] = ()) -> None:
    """Fill tables (but those named in `skip`) and blocks of `model` in place from a checkpoint, on whatever
    devices they are.

    mapped: the tables stay in the checkpoint's files, and memory holds only rows that were looked up; each
    lookup checks the blocks of the file that it is the first to read. Raises UserError on mismatch.
    """
    tables = find_tables(model)
    blocks = read_tensors(path / "blocks.safetensors")
    wanted = dense_state(model)
    problems = [f"missing {name}" for name in wanted.keys() - blocks.keys()]
    problems += [f"unexpected {name}" for name in blocks.keys() - wanted.keys()]
    problems += [
        f"{name} is {tuple(blocks[name].shape)} in the file and {tuple(wanted[name].shape)} in the model"
        for name in wanted.keys() & blocks.keys()
        if blocks[name].shape != wanted[name].shape
    ]
    problems += [f"missing table {name}" for name in tables if not table_file(path, name).is_file()]
    if problems:
        raise UserError(
            f"{path}: does not fit this model: {'; '.join(sorted(problems))}; use the config it was trained "
            "with; where the model has changed since, train again"
        )
    with torch.no_grad():
        for name, tensor in wanted.items():
            tensor.copy_(blocks[name])
        for name, table in tables.items():
            if mapped:
                sums = read_state(path).block_sums[table_file(path, name).relative_to(path).as_posix()]
                table.map_rows(mapped_weight(path, name, table.weight, sums))
            elif name not in skip:
                read_table(path, name, "weight", table.settled())


def dense_state(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers of the blocks by portable name, as references."""
    weights = {id(table.weight) for table in find_tables(model).values()}
    rows = {name for name, weight in model.named_parameters(remove_duplicate=False) if id(weight) in weights}
    values = {key: value for key, value in model.state_dict().items() if key not in rows}
    # A module's `get_extra_state` may put other things there.
    return {key: value for key, value in values.items() if isinstance(value, Tensor)}


def complete_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints, oldest first: by number, as names of seven digits sort before those of
    six."""
    there = (page.parent for page in folder.glob("step-*/state.json") if page.is_file())
    return sorted((path for path in there if _STEP.fullmatch(path.name)), key=step_of)


def way_on(folder: Path) -> str:
    """Say how a training with its checkpoints in `folder` goes on when it ends here."""
    there = complete_checkpoints(folder)
    if not there:
        return "start again: there is no checkpoint yet"
    return f"go on from the last good checkpoint, {there[-1]}, with --resume"


def step_of(checkpoint: Path) -> int:
    """Return the step in a checkpoint's name."""
    return int(checkpoint.name.removeprefix("step-"))


def read_state(path: Path) -> CheckpointState:
    """Return the page of a checkpoint. Raises UserError when there is none, or when it is damaged or of
    another format."""
    if not (path / "state.json").is_file():
        raise UserError(f"{path}: is not a checkpoint (it has no state.json); name a step-... folder")
    page = CheckpointState.read(path / "state.json")
    if page.format != _FORMAT:
        raise UserError(
            f"{path}: has checkpoint format {page.format}, this dphybrid reads format {_FORMAT}; train again "
            "or use the version that wrote it"
        )
    return page


def _load_row_states(path: Path, rows: RowOptimizer, tables: Mapping[str, Any]) -> None:
    places: dict[str, tuple[str, str]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for name in [*tables, "_optimizer"]:
        file = table_file(path, name)
        for key, shape in tensor_shapes(file).items() if file.is_file() else ():
            if key != "weight":
                whole = key if name == "_optimizer" else f"{name}.{key}"
                places[whole], shapes[whole] = (name, key), shape
    rows.check_shapes(shapes)
    for key, target in rows.states().items():
        read_table(path, *places[key], target)


def flatten_optimizer(state: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of an optimizer's state by name, as references, and all else of it; of a combined
    one, each with its number before the names."""
    tensors: dict[str, Tensor] = {}
    if "optimizers" in state:
        parts = [flatten_optimizer(one) for one in state["optimizers"]]
        named = {f"{number}/{name}": own[name] for number, (own, _) in enumerate(parts) for name in own}
        return named, {"optimizers": [page for _, page in parts]}
    numbers: dict[str, Any] = {}
    for index, entries in state["state"].items():
        for key, value in entries.items():
            place = tensors if isinstance(value, Tensor) else numbers
            place[f"{index}.{key}"] = value
    return tensors, {"groups": state["param_groups"], "numbers": numbers}


def _unflatten_optimizer(tensors: dict[str, Tensor], page: dict[str, Any]) -> dict[str, Any]:
    if "optimizers" in page:
        own: list[dict[str, Tensor]] = [{} for _ in page["optimizers"]]
        for name, tensor in tensors.items():
            number, _, key = name.partition("/")
            own[int(number)][key] = tensor
        return {"optimizers": list(map(_unflatten_optimizer, own, page["optimizers"]))}
    state: dict[int, dict[str, Any]] = {}
    for name, value in {**tensors, **page["numbers"]}.items():
        index, _, key = name.partition(".")
        state.setdefault(int(index), {})[key] = value
    return {"state": state, "param_groups": page["groups"]}
