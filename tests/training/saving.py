"""Save one full checkpoint, for tests of code that reads checkpoints."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dphybrid.training.checkpoint import Trained
from dphybrid.training.saving import CheckpointWriter


def save_checkpoint(
    folder: Path, trained: Trained, config: Mapping[str, Any], facts: Mapping[str, Any]
) -> Path:
    with CheckpointWriter(folder, trained) as writer:
        return writer.save(config, facts)
