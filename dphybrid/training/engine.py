"""`Engine`, which trains a run in this process, and `Session`, which holds the parts of one training.
`dphybrid.cluster` has the engine for several processes."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from dphybrid.config import ExperimentConfig
from dphybrid.config.settings import Settings
from dphybrid.data import Dataset, Prepared
from dphybrid.embedding.storage import unfilled_rows
from dphybrid.parallel import Devices, Split, resolve_devices
from dphybrid.training.callbacks import Callback
from dphybrid.training.checkpoint import Stateful, Trained, how_to_continue
from dphybrid.training.clock import StageClock
from dphybrid.training.metrics import Task
from dphybrid.training.parts import num_rows
from dphybrid.training.saving import CheckpointWriter
from dphybrid.training.split_log import SplitLog
from dphybrid.util.errors import UserError
from dphybrid.util.stop import StopRequest

if TYPE_CHECKING:
    from dphybrid.tracking import Tracker
    from dphybrid.training.step import Step

Batch = dict[str, Tensor]
TakeStep = Callable[["Step", Batch], tuple[Tensor, Tensor]]
"""Takes one step; returns the batch's summed loss and its number of terms, on their device."""


class Engine:
    """Trains a run in this process; `ClusterEngine` overrides what several processes do differently.

    mapped: whether the final evaluation reads the tables from the checkpoint's files, because they may not
    fit into memory. part: (number of this process, number of processes). prefetches_on_cpu: whether the
    pipeline also runs without a GPU; trials and tests do so to compare the bits.
    trains_here: whether the process that builds a run trains it, too.
    """

    mapped = False
    prefetches_on_cpu = False
    trains_here = True
    part: tuple[int, int] = (0, 1)

    def __init__(self, config: ExperimentConfig) -> None:
        self.config = config

    # Before training.

    def check(
        self, one_process: bool, settings: Settings, devices: str, callbacks: Sequence[Callback]
    ) -> None:
        """Raise UserError for an experiment that this engine cannot train.

        one_process: whether the recipe supports one process only (it says so, or has its own `step`).
        """

    def check_data(self, data: Prepared, tabular: bool) -> None:
        """Raise UserError for data that this engine cannot train on. tabular: whether its samples are rows of
        a table with typed columns."""

    def check_model(self, model: nn.Module) -> None:
        """Raise UserError for a model that this engine cannot train."""

    def launch(self, folder: Path, settings: Settings, stop: StopRequest) -> bool:
        """Train a built run to its end in other processes; return whether that was done. False: the caller
        trains in this process."""
        return False

    def shown_devices(self, devices: str) -> str:
        """Return the text that reports show as the devices of a run."""
        return devices

    def num_parts(self, devices: str) -> int:
        """Return how many parts a batch is split into."""
        return len(resolve_devices(devices))

    # In training.

    @property
    def leads(self) -> bool:
        """Whether this process writes the checkpoints and the record."""
        return self.part[0] == 0

    def devices(self, text: str) -> Devices:
        """Return the devices of this process, out of those of the run."""
        return resolve_devices(text)

    def new_tables(self, filled: bool) -> AbstractContextManager[None]:
        """Return the context in which a model is built. filled: whether a checkpoint is loaded afterwards."""
        # Drawing initial rows that the checkpoint replaces would cost a pass over the table.
        return unfilled_rows() if filled else nullcontext()

    def place(self, model: nn.Module) -> None:
        """Move the tables of a built model to where they are trained."""

    def obey(self, stop: StopRequest, when: str) -> None:
        """Raise Interrupted before the first step if a stop was requested."""
        stop.obey(when)

    def take(self, recipe_step: TakeStep) -> TakeStep:
        """Return the function that takes each step of a training. recipe_step: the recipe's."""
        return recipe_step

    def num_rows(self, batch: dict[str, Tensor], model: nn.Module) -> int:
        """Return the number of rows of the last whole batch; `batch` is this process's part of it."""
        return num_rows(batch, model)

    def asked(self, stop: StopRequest) -> bool:
        """Return whether a stop was requested and all processes know it."""
        return stop.pending

    def metrics(self, outputs: dict[str, Tensor], rows: int, batch_size: int, task: Task) -> dict[str, float]:
        """Return the task's metrics. outputs: of `rows` rows that were evaluated in batches."""
        return task.compute(outputs)

    def writer(self, folder: Path, trained: Trained, *encoder: Any) -> CheckpointWriter:
        """Return the writer of checkpoints; see `CheckpointWriter` for `encoder`."""
        return CheckpointWriter(folder, trained, self.config.checkpoint.full_every, *encoder)

    def read(self, trained: Trained, load: Callable[[], object] | None) -> Any:
        """Call `load`, which fills `trained` from a checkpoint; return its result. None: a new run."""
        return load() if load else None

    def split(self, split: Split) -> Split:
        """Return the split of a block's batch over all processes. split: over this process's devices."""
        return split

    def measured(self) -> Mapping[str, float]:
        """Return metrics that only this engine has, to be logged with the others."""
        return {}


@dataclass(frozen=True)
class Session:
    """The parts of one training.

    Attributes:
        saver: Writes the checkpoints.
        facts: Further values of each checkpoint's page.
        callbacks: User functions called after each epoch.
        take: The recipe's `step`, which takes a `Step` and a batch and returns the summed loss and its number
            of terms.
        stateful: Further objects whose state checkpoints store, by name.
        named: Steps of the checkpoints that the results of an earlier attempt name, which therefore must
            stay.
        best_outputs: The `validation_outputs` of the best evaluation, if this process made it.
        norms: The gradients' norms before they were clipped, since the last line of metrics.
    """

    config: ExperimentConfig
    trained: Trained
    train_data: Dataset
    valid_data: Dataset
    task: Task
    tracker: "Tracker"
    clock: StageClock
    splits: SplitLog
    stop: StopRequest
    checkpoints: Path
    saver: CheckpointWriter
    facts: Mapping[str, Any]
    engine: Engine
    take: TakeStep
    callbacks: Sequence[Callback] = ()
    stateful: dict[str, Stateful] = field(default_factory=dict)
    named: set[int] = field(default_factory=set)
    best_outputs: dict[str, Tensor] = field(default_factory=dict)
    norms: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.stateful.update(splits=self.splits, clock=self.clock)

    def restore(self, states: Mapping[str, Any]) -> None:
        """Load the states that a checkpoint stored, by name."""
        for name, state in states.items():
            self.stateful[name].load_state_dict(state)

    def how_to_continue(self) -> str:
        """Return the remedy for a run that fails now. Waits for a checkpoint that is being written, so that
        the text can name it."""
        self.saver.wait()
        return how_to_continue(self.checkpoints)

    def stop_at(self, problem: str) -> UserError:
        """Return the error for a step in which something is NaN or infinite. problem: which tensor."""
        return UserError(
            f"step {self.trained.progress.step + 1}: {problem}; lower train.lr or table.lr, or set "
            f"train.clip_norm, and {self.how_to_continue()}"
        )
