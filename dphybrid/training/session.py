"""Everything that one training run works with."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dphybrid.config import ExperimentConfig
from dphybrid.data import Dataset
from dphybrid.tracking import Tracker
from dphybrid.training.callbacks import Callback
from dphybrid.training.checkpoint import Stateful, Trained, way_on
from dphybrid.training.clock import StageClock
from dphybrid.training.engine import Engine
from dphybrid.training.finite import NotFinite
from dphybrid.training.metrics import Task
from dphybrid.training.saving import CheckpointWriter
from dphybrid.training.split_log import SplitLog
from dphybrid.util.errors import UserError
from dphybrid.util.stop import StopRequest

if TYPE_CHECKING:
    from dphybrid.training.step import Step

TakeStep = Callable[["Step", dict[str, Tensor]], tuple[Tensor, Tensor]]
"""A recipe's `step`: from a step and a batch to the summed loss to show and its number of terms."""

_EACH, _EVERY = 10, 100


@dataclass(frozen=True)
class Session:
    """Everything one training run works with.

    facts: what else goes into each checkpoint's page; saver writes them. dataset: name and digest of the
    data. engine: who trains. profile_steps: steps to record in detail. callbacks: the user's own functions,
    called after each epoch. take: the recipe's step. stateful: what a checkpoint holds besides `trained`, by
    name.
    """

    config: ExperimentConfig
    trained: Trained
    train_data: Dataset
    valid_data: Dataset
    task: Task
    tracker: Tracker
    clock: StageClock
    splits: SplitLog
    stop: StopRequest
    checkpoints: Path
    saver: CheckpointWriter
    facts: Mapping[str, Any]
    dataset: tuple[str, str]
    engine: Engine
    take: TakeStep
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
