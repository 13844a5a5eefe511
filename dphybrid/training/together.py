"""The processes that train one model together: one, here. `dphybrid.cluster` has the plural."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dphybrid.parallel import Split
from dphybrid.training.checkpoint import Trained
from dphybrid.training.memory import num_rows
from dphybrid.training.metrics import Task
from dphybrid.training.saving import CheckpointWriter
from dphybrid.util.stop import StopRequest

if TYPE_CHECKING:
    from dphybrid.training.session import Session

Step = Callable[["Session", dict[str, Tensor]], tuple[Tensor, Tensor]]
"""`loop.train_step`: from a session and a batch to the batch's summed loss and its number of terms."""


class Together:
    """What one process decides and does for itself, and several do with each other.

    part: this process's number, and how many there are.
    """

    part: tuple[int, int] = (0, 1)

    @property
    def leads(self) -> bool:
        """Is this the process that keeps checkpoints and the record?"""
        return self.part[0] == 0

    def step(self, session: "Session", batch: dict[str, Tensor], alone: Step) -> tuple[Tensor, Tensor]:
        """Take one optimizer step; return the whole batch's summed loss and its number of terms."""
        return alone(session, batch)

    def num_rows(self, batch: dict[str, Tensor]) -> int:
        """Return the rows of the whole batch that was trained last, of which `batch` is this process's
        part."""
        return num_rows(batch)

    def asked(self, stop: StopRequest) -> bool:
        """Has somebody asked to stop, and do all know by now?"""
        return stop.pending

    def metrics(self, outputs: dict[str, Tensor], rows: int, batch_size: int, task: Task) -> dict[str, float]:
        """Return the task's metrics over the outputs of `rows` rows, computed in batches."""
        return task.compute(outputs)

    def writer(self, folder: Path, trained: Trained, full_every: int, *encoder: Any) -> CheckpointWriter:
        """Return what writes the checkpoints; see `CheckpointWriter` for the values."""
        return CheckpointWriter(folder, trained, full_every, *encoder)

    def read(self, trained: Trained, load: Callable[[], Any] | None) -> Any:
        """Fill what is trained by `load`, or not; return what it returns."""
        return load() if load else None

    def split(self, split: Split) -> Split:
        """Return a block's split as it is over all processes."""
        return split

    def measured(self) -> Mapping[str, float]:
        """Return what else a line of metrics should hold."""
        return {}


ALONE = Together()
