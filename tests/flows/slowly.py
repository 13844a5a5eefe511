"""A slow model that records when two processes use its GPU at once. Workers find it through PYTHONPATH."""

import json
import os
import time
from pathlib import Path
from typing import Any

from dphybrid.tutorials.model import build_hybrid
from torch import Tensor, nn

from dphybrid.orchestration import supervised
from dphybrid.recipes import ModelContext

supervised.AGAIN_AFTER_S = 1.0


def build(context: ModelContext) -> nn.Module:
    """Return the tutorial's hybrid model, which uses its leased GPUs for SLOW more seconds per batch."""
    folder = Path(os.environ["DPHYBRID_LEASE_DIR"])
    model, slow = build_hybrid(context), float(os.environ.get("SLOW", "0"))

    def use(_module: nn.Module, _args: Any, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        marks = [mark(file) for file in own_leases(folder)]
        time.sleep(slow)
        for file in marks:
            file.unlink(missing_ok=True)
        return outputs

    model.register_forward_hook(use)
    return model


def own_leases(folder: Path) -> list[Path]:
    """Return the lock files whose page names this process."""
    return [
        file
        for file in folder.glob("gpu-*.lock")
        if json.loads(file.read_text().partition("\n")[0] or "{}").get("pid") == os.getpid()
    ]


def mark(lock: Path) -> Path:
    """Mark a GPU as in use. If another living process has marked it, leave a `collision` file."""
    file = lock.with_name(lock.name.rsplit(".", 2)[0] + ".mark")
    if file.exists() and Path(f"/proc/{file.read_text() or 0}").exists():
        file.with_suffix(f".collision-{file.read_text()}-{os.getpid()}").touch()
    file.write_text(str(os.getpid()))
    return file
