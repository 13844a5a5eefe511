"""A model that takes its time, and that notes when its GPU is used by two processes at once. Found by workers through PYTHONPATH."""

import atexit
import json
import os
import time
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from dphybrid.models import ModelContext
from dphybrid.models.tutorial import build_hybrid


def build(context: ModelContext) -> nn.Module:
    """The tutorials' hybrid model, SLOW seconds a batch slower."""
    mark_gpus(Path(os.environ["DPHYBRID_LEASE_DIR"]))
    model, slow = build_hybrid(context), float(os.environ.get("SLOW", "0"))

    def wait(_module: nn.Module, _args: Any, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        time.sleep(slow)
        return outputs

    model.register_forward_hook(wait)
    return model


def mark_gpus(folder: Path) -> None:
    """Leave a mark on each GPU that is leased to this process, and complain if a living one left one before."""
    for file in folder.glob("gpu-*.lock"):
        page = json.loads(file.read_text() or "{}")
        if page.get("pid") != os.getpid():
            continue
        mark = file.with_suffix(".mark")
        if mark.exists():
            other = int(mark.read_text())
            if other != os.getpid() and Path(f"/proc/{other}").exists():
                file.with_suffix(f".collision-{other}-{os.getpid()}").touch()
        mark.write_text(str(os.getpid()))
        atexit.register(remove_own, mark)


def remove_own(mark: Path) -> None:
    if mark.exists() and mark.read_text() == str(os.getpid()):
        mark.unlink()
