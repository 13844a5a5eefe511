"""Everything that one training run works with."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dphybrid.config import ExperimentConfig
from dphybrid.data import Dataset
from dphybrid.tracking import Tracker
from dphybrid.training.checkpoint import Trained
from dphybrid.training.clock import StageClock
from dphybrid.training.metrics import Task
from dphybrid.training.split_log import SplitLog
from dphybrid.util.stop import StopRequest


@dataclass(frozen=True)
class Session:
    """Everything one training run works with.

    facts: what else goes into each checkpoint's page. dataset: name and digest of the data. profile_steps:
    steps to record in detail.
    encoder: folder that goes into each checkpoint, so that it can predict; encoder_sums: sha256 of its files,
    by `encoder/NAME`.
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
    facts: Mapping[str, Any]
    dataset: tuple[str, str]
    profile_steps: range = range(0)
    encoder: Path | None = None
    encoder_sums: Mapping[str, str] = field(default_factory=dict)
