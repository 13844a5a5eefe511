"""The engine that trains a run in this process, and the session that it works with. `dphybrid.cluster` has
the engine of several processes."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from dphybrid.config import ExperimentConfig
from dphybrid.config.settings import Settings
from dphybrid.data import Dataset, Prepared
from dphybrid.embedding.storage import unfilled_rows
from dphybrid.parallel import Devices, Split, resolve_devices
from dphybrid.training.callbacks import Callback
from dphybrid.training.checkpoint import Stateful, Trained, way_on
from dphybrid.training.clock import StageClock
from dphybrid.training.finite import NotFinite
from dphybrid.training.memory import num_rows
from dphybrid.training.metrics import Task
from dphybrid.training.saving import CheckpointWriter
from dphybrid.training.split_log import SplitLog
from dphybrid.util.errors import UserError
from dphybrid.util.stop import StopRequest

Batch = dict[str, Tensor]
TrainStep = Callable[["Session", Batch], tuple[Tensor, Tensor]]
"""`loop.train_step`: from a session and a batch to the batch's summed loss and its number of terms."""

_EACH, _EVERY = 10, 100  # skipped steps that are told: the first ten, then each hundredth


class Engine:
    """Trains a run in this process; `ClusterEngine` overrides what several processes do differently.

    mapped: an evaluation reads the tables from the checkpoint's files: they may not fit into memory. part:
    this process's number, and how many there are. prefetches_on_cpu: also without a GPU, which shows that the
    bits stay the same.
    """

    mapped = False
    prefetches_on_cpu = False
    part: tuple[int, int] = (0, 1)

    def __init__(self, config: ExperimentConfig) -> None:
        self.config = config

    # Before training.

    def check(
        self, one_process: bool, settings: Settings, devices: str, callbacks: Sequence[Callback], here: int
    ) -> None:
        """Raise UserError for an experiment that this engine cannot train.

        one_process: the recipe says so, or has its own step. here: processes on this machine; 0: all.
        """

    def check_data(self, data: Prepared, tabular: bool) -> None:
        """Raise UserError for data that this engine cannot train on. tabular: the data is a table's rows."""

    def check_model(self, model: nn.Module) -> None:
        """Raise UserError for a model that this engine cannot train."""

    def launch(self, folder: Path, devices: str, settings: Settings, stop: StopRequest, meeting: Any) -> bool:
        """Train a built run in other processes to its end; False: it is trained in this one."""
        return False

    def tags(self, tags: Mapping[str, str]) -> dict[str, str]:
        """Return a run's tags with those that this engine adds."""
        return dict(tags)

    def shown_devices(self, devices: str, tags: Mapping[str, str]) -> str:
        """Return what a run with these tags computes on, for people."""
        return devices

    def num_parts(self, devices: str, in_first_split: int = 0) -> int:
        """Return how many parts a batch is split into. in_first_split: as the splits of a run say."""
        return len(resolve_devices(devices))

    # In training.

    @property
    def leads(self) -> bool:
        """Is this the process that keeps checkpoints and the record?"""
        return self.part[0] == 0

    def devices(self, text: str) -> Devices:
        """Return this process's own devices of a run's."""
        return resolve_devices(text)

    def new_tables(self, filled: bool) -> AbstractContextManager[None]:
        """Return the context in which a model is built. filled: from a checkpoint, afterwards."""
        # Start values that a checkpoint replaces would cost a pass over the table.
        return unfilled_rows() if filled else nullcontext()

    def place(self, model: nn.Module) -> None:
        """Put a built model's tables where they are trained."""

    def obey(self, stop: StopRequest, when: str) -> None:
        """Raise Interrupted before the first step when somebody asked to stop."""
        stop.obey(when)

    def step(self, session: "Session", batch: Batch, alone: TrainStep) -> tuple[Tensor, Tensor]:
        """Take one optimizer step; return the whole batch's summed loss and its number of terms."""
        return alone(session, batch)

    def num_rows(self, batch: dict[str, Tensor]) -> int:
        """Return the rows of the whole batch that was trained last, of which `batch` is this process's
        part."""
        return num_rows(batch)

    def asked(self, stop: StopRequest) -> bool:
        """Has somebody asked to stop, and do all processes know it?"""
        return stop.pending

    def metrics(self, outputs: dict[str, Tensor], rows: int, batch_size: int, task: Task) -> dict[str, float]:
        """Return the task's metrics over the outputs of `rows` rows, computed in batches."""
        return task.compute(outputs)

    def writer(self, folder: Path, trained: Trained, *encoder: Any) -> CheckpointWriter:
        """Return what writes the checkpoints; see `CheckpointWriter` for the values."""
        return CheckpointWriter(folder, trained, self.config.checkpoint.full_every, *encoder)

    def read(self, trained: Trained, load: Callable[[], object] | None) -> Any:
        """Fill what is trained by `load`, or not; return what it returns."""
        return load() if load else None

    def split(self, split: Split) -> Split:
        """Return a block's split over all processes."""
        return split

    def measured(self) -> Mapping[str, float]:
        """Return the engine's own figures for a line of metrics."""
        return {}


# A protocol, as training does not import tracking.
class _Recorder(Protocol):
    """Where a training records what it does; `dphybrid.tracking.Tracker` is one, and says what each takes."""

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None: ...

    def log_file(self, path: Path, folder: str) -> None: ...

    def log_checkpoints(self, kept: Sequence[Mapping[str, Any]], dataset: tuple[str, str] | None) -> None: ...

    def set_tags(self, tags: Mapping[str, str]) -> None: ...

    def keep(self) -> None: ...


@dataclass(frozen=True)
class Session:
    """Everything one training run works with.

    facts: what else goes into each checkpoint's page; saver writes them. engine: who trains.
    profile_steps: steps to record in detail. callbacks: the user's own functions, called after each epoch.
    take: the recipe's `step`, from a `Step` and a batch to the summed loss and its number of terms.
    stateful: what a checkpoint holds besides `trained`, by name.
    """

    config: ExperimentConfig
    trained: Trained
    train_data: Dataset
    valid_data: Dataset
    task: Task
    tracker: _Recorder
    clock: StageClock
    splits: SplitLog
    stop: StopRequest
    checkpoints: Path
    saver: CheckpointWriter
    facts: Mapping[str, Any]
    engine: Engine
    take: Callable[..., tuple[Tensor, Tensor]]
    profile_steps: range = range(0)
    callbacks: Sequence[Callback] = ()
    stateful: dict[str, Stateful] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.stateful.update(splits=self.splits, clock=self.clock, saving=self.saver)

    def restore(self, states: Mapping[str, Any]) -> None:
        """Go on from the states of a checkpoint, by name."""
        for name, state in states.items():
            self.stateful[name].load_state_dict(state)

    def way_on(self) -> str:
        """Say how the run goes on when it ends here; the checkpoint in hand is written first."""
        self.saver.wait()
        return way_on(self.checkpoints)

    def skip_or_stop(self, found: NotFinite) -> None:
        """Count and tell a step without an update. Raises UserError where train.on_nonfinite does not say
        skip, and where a weight itself is not a number: no later step could be sound."""
        progress = self.trained.progress
        text = f"step {progress.step + 1}: {found.text}"
        if self.config.train.on_nonfinite == "stop" or found.weight:
            other = "" if found.weight else ", or train.on_nonfinite=skip,"
            raise UserError(
                f"{text}; lower train.lr or table.lr, or set train.clip_norm{other} and {self.way_on()}"
            )
        progress.skipped += 1
        if progress.skipped <= _EACH or progress.skipped % _EVERY == 0:
            self.splits.note([told := f"{text}; skipped ({progress.skipped} by now)"])
            print(told, flush=True)
