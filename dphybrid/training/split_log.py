"""A log of how batches are split over replicas: as lines like those of torch's data-parallel tutorial, and as
rows of a table."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from torch import nn

from dphybrid.parallel import Split, find_data_parallel
from dphybrid.parallel.splits import Key
from dphybrid.training.results import SplitRow
from dphybrid.util.errors import counted

_MAX_LINES = 2000
"""Most lines that are kept for the record. Further lines are only printed."""


class SplitLog:
    """Collects the splits of training steps.

    Args:
        each: Print lines at every step; otherwise only for a new split.
        whole: From the split over this process's devices to the one over all processes.
        short: Print one line for each split, and none on a single device, instead of the tutorial's line for
            each replica.

    Attributes:
        lines: The tutorial's lines for the record, at most `_MAX_LINES`.
    """

    def __init__(
        self,
        model: nn.Module,
        each: bool,
        whole: Callable[[Split], Split] = lambda split: split,
        short: bool = False,
    ) -> None:
        self._whole = whole
        self._blocks = find_data_parallel(model)
        self._each, self._short = each, short
        self._seen: dict[tuple[object, ...], list[SplitRow]] = {}
        self._now: dict[str, tuple[Key, int, list[SplitRow]]] = {}
        self.lines: list[str] = []

    def after_step(self, step: int, rows: int) -> list[str]:
        """Count the latest split of every block; return the lines to print. rows: of the whole batch."""
        printed: list[str] = []
        for name, block in self._blocks.items():
            if (sizes := block.last_sizes) is None:
                continue
            # Nearly every step repeats the last split, whose sizes are then the same object: `is` suffices.
            before, batch_rows, shares = self._now.get(name, (None, 0, []))
            if self._each or sizes is not before or rows != batch_rows:
                split = block.last_split
                assert split is not None
                shares, lines = self._noted(name or "model", self._whole(split), step)
                printed += lines
                self._now[name] = sizes, rows, shares
            for share in shares:
                share.last_step, share.steps = step, share.steps + 1
        return printed

    def _noted(self, block: str, split: Split, step: int) -> tuple[list[SplitRow], list[str]]:
        """Return the table rows of a block's split, which differs from the one before, and the lines to
        print."""
        sizes = [size[0] if size else 0 for size in split.input_sizes]
        both = zip(split.input_sizes, split.output_sizes, strict=True)
        shapes = [f"{list(inputs)} -> {list(outputs)}" for inputs, outputs in both]
        key, lines = (block, *sizes, *split.devices), list[str]()
        if self._each or key not in self._seen:
            self.note(lines := split.lines())
            if self._short:
                lines = [_short_line(block, sizes)] if len(sizes) > 1 else []
        if key not in self._seen:
            number, shares = len(self._seen) + 1, zip(split.devices, sizes, shapes, strict=True)
            self._seen[key] = [
                SplitRow(number, replica, block, device, rows, sum(sizes), shape, shape, step, step, 0)
                for replica, (device, rows, shape) in enumerate(shares)
            ]
        for row, shape in zip(self._seen[key], shapes, strict=True):
            row.latest_shape = shape
        return self._seen[key], lines

    def note(self, lines: Sequence[str]) -> None:
        """Keep lines for the record."""
        # At most `_MAX_LINES`, as every checkpoint's page holds them all.
        self.lines += lines[: max(0, _MAX_LINES - len(self.lines))]

    def rows(self) -> list[SplitRow]:
        """Return one row for each replica of each split."""
        return [row for rows in self._seen.values() for row in rows]

    def state_dict(self) -> dict[str, Any]:
        """Return rows and lines, fit for JSON."""
        return {"rows": [asdict(row) for row in self.rows()], "lines": self.lines}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the log that a checkpoint stored."""
        self.lines, self._seen, self._now = list(state["lines"]), {}, {}
        by_split: dict[int, list[SplitRow]] = {}
        for values in state["rows"]:
            row = SplitRow(**values)
            by_split.setdefault(row.number, []).append(row)
        for rows in by_split.values():
            # The same key as in `_noted`, so that a split seen before the resume is not printed again.
            key = (rows[0].block, *(row.rows for row in rows), *(row.device for row in rows))
            self._seen[key] = rows


def _short_line(block: str, sizes: Sequence[int]) -> str:
    where = f" ({block})" if block not in ("model", "region") else ""
    shares, batch = ", ".join(map(str, sizes)), counted(sum(sizes), "row")
    return f"A batch of {batch} is split {shares} over {counted(len(sizes), 'device')}{where}"
