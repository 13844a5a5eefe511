"""Where a step's time goes: exclusive seconds a stage, a nested stage's time counted once."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from dphybrid.embedding import find_tables
from dphybrid.parallel import find_data_parallel


class StageClock:
    """Adds up seconds by stage. On a GPU each stage ends with a synchronisation, so that its work is counted in it.

    totals: stage -> seconds since the start. Stages nest: while the inner one runs, the outer one stands still.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.totals: dict[str, float] = {}
        self._sync = device if device is not None and device.type == "cuda" else None
        self._stack: list[str] = []
        self._since = 0.0
        self._window: dict[str, float] = {}

    def _switch(self) -> None:
        if self._sync is not None:
            torch.cuda.synchronize(self._sync)
        now = time.perf_counter()
        if self._stack:
            stage = self._stack[-1]
            self.totals[stage] = self.totals.get(stage, 0.0) + now - self._since
        self._since = now

    def enter(self, stage: str) -> None:
        self._switch()
        self._stack.append(stage)

    def leave(self) -> None:
        self._switch()
        self._stack.pop()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the block's time under `name`."""
        self.enter(name)
        try:
            yield
        finally:
            self.leave()

    def window(self) -> dict[str, float]:
        """Return the seconds by stage since the last call."""
        now = dict(self.totals)
        grown = {stage: seconds - self._window.get(stage, 0.0) for stage, seconds in now.items()}
        self._window = now
        return {stage: seconds for stage, seconds in grown.items() if seconds > 0}


@contextmanager
def timed_parts(clock: StageClock, model: nn.Module) -> Iterator[None]:
    """While the block runs, count table lookups of `model` as stage `lookup` and its data-parallel blocks as `region`.

    Only in training mode: an evaluation is one stage.
    """
    parts: list[tuple[nn.Module, str]] = [(table, "lookup") for table in find_tables(model).values()]
    parts += [(block, "region") for block in find_data_parallel(model).values()]
    handles: list[Any] = []
    for module, stage in parts:
        handles.append(
            module.register_forward_pre_hook(lambda module, _, stage=stage: clock.enter(stage) if module.training else None)
        )
        handles.append(
            module.register_forward_hook(lambda module, *_: clock.leave() if module.training else None, always_call=True)
        )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
