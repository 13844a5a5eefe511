"""How a run is trained: by this process alone. `dphybrid.cluster` has the engine of several processes."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from dphybrid.config import ExperimentConfig
from dphybrid.config.settings import Settings
from dphybrid.data import Prepared
from dphybrid.embedding.storage import unfilled_rows
from dphybrid.parallel import Devices, Split, resolve_devices
from dphybrid.training.checkpoint import Trained
from dphybrid.training.memory import num_rows
from dphybrid.training.metrics import Task
from dphybrid.training.saving import CheckpointWriter
from dphybrid.util.stop import StopRequest

if TYPE_CHECKING:
    from dphybrid.training.callbacks import Callback
    from dphybrid.training.step import Session

Step = Callable[["Session", dict[str, Tensor]], tuple[Tensor, Tensor]]
"""`loop.train_step`: from a session and a batch to the batch's summed loss and its number of terms."""


class Engine:
    """What one process decides and does for itself.

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
        self, one_process: bool, settings: Settings, devices: str, callbacks: Sequence["Callback"], here: int
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
        return unfilled_rows() if filled else nullcontext()

    def place(self, model: nn.Module) -> None:
        """Put a built model's tables where they are trained."""

    def obey(self, stop: StopRequest, when: str) -> None:
        """Raise Interrupted before the first step when somebody asked to stop."""
        stop.obey(when)

    def step(self, session: "Session", batch: dict[str, Tensor], alone: Step) -> tuple[Tensor, Tensor]:
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
