"""The splits of all batches, as the lines of the data-parallel tutorials and as table rows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from torch import nn

from dphybrid.parallel import Devices, Split, find_data_parallel
from dphybrid.util.errors import counted

_MAX_LINES = 2000
"""Lines that are kept for the record; all are printed."""


def announcement(devices: Devices) -> str | None:
    """Return "Let's use n GPUs!" when there is more than one device ("devices" for virtual ones)."""
    return f"Let's use {len(devices)} {devices.noun}!" if len(devices) > 1 else None


class SplitRow(BaseModel):
    """The share of one replica in a split. Two splits differ when the rows of a replica differ, not when
    other sizes vary, such as a length.

    number: of the split, in the order of their first steps. first_shape, latest_shape: "input size -> output
    size".
    """

    number: int
    replica: int
    block: str
    device: str
    rows: int
    batch_rows: int
    first_shape: str
    latest_shape: str
    first_step: int
    last_step: int
    steps: int

    def table_row(self) -> dict[str, Any]:
        """Return the row for MLflow, which needs one column that tells rows apart: `where`, for people; code
        reads `number` and `replica`."""
        return {
            "where": f"split {self.number} / replica {self.replica} / {self.block}",
            "split": self.first_shape,
            **self.model_dump(
                include={"block", "batch_rows", "rows", "device", "first_step", "last_step", "steps"}
            ),
            "latest": self.latest_shape,
            "number": self.number,
            "replica": self.replica,
        }


@dataclass(slots=True)
class _Seen:
    """A split of a block: its rows of the table at its first step (`steps` not counted), and what has come
    since."""

    rows: list[SplitRow]
    latest: Split | None = None
    last_step: int = 0
    steps: int = 0

    def table(self) -> list[SplitRow]:
        if self.latest is None:
            return self.rows
        shapes = _shapes(self.latest)
        return [
            row.model_copy(
                update={"latest_shape": shape, "last_step": self.last_step, "steps": row.steps + self.steps}
            )
            for row, shape in zip(self.rows, shapes, strict=True)
        ]


class SplitLog:
    """Collects the splits of training steps. `each`: every step gives lines; otherwise only a split not seen
    before.

    short: print a line a split, and none where nothing is split, instead of the tutorials' line a replica.
    lines: the tutorials' ones for the record, up to `_MAX_LINES`. whole: from this process's split to that of
    all that train.
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
        self._seen: dict[tuple[object, ...], _Seen] = {}
        self.lines: list[str] = []

    def after_step(self, step: int) -> list[str]:
        """Note the latest split of every block; return the lines to print."""
        fresh: list[str] = []
        printed: list[str] = []
        for name, block in self._blocks.items():
            split = block.last_split
            if split is None:
                continue
            split = self._whole(split)
            key = (name or "model", *_rows(split), *split.devices)
            seen = self._seen.get(key)
            if self._each or seen is None:
                fresh += split.lines()
                if len(split.devices) > 1:
                    printed.append(_short_line(name, split))
            if seen is None:
                seen = self._seen[key] = _Seen(_new_rows(len(self._seen) + 1, name or "model", split, step))
            seen.latest, seen.last_step = split, step
            seen.steps += 1
        self.note(fresh)
        return printed if self._short else fresh

    def note(self, lines: Sequence[str]) -> None:
        """Keep lines for the record."""
        self.lines += lines[: max(0, _MAX_LINES - len(self.lines))]

    def rows(self) -> list[SplitRow]:
        """Return a row for each replica of each split."""
        return [row for seen in self._seen.values() for row in seen.table()]

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` takes, fit for JSON."""
        return {"rows": [row.model_dump() for row in self.rows()], "lines": self.lines}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what a checkpoint kept."""
        self.lines, self._seen = list(state["lines"]), {}
        by_split: dict[int, list[SplitRow]] = {}
        for values in state["rows"]:
            row = SplitRow.model_validate(values)
            by_split.setdefault(row.number, []).append(row)
        for rows in by_split.values():
            key = (rows[0].block, *(row.rows for row in rows), *(row.device for row in rows))
            self._seen[key] = _Seen(rows)


def _short_line(block: str, split: Split) -> str:
    rows = _rows(split)
    where = f" ({block})" if block not in ("", "region") else ""
    shares, batch = ", ".join(map(str, rows)), counted(sum(rows), "row")
    return f"A batch of {batch} is split {shares} over {counted(len(rows), 'device')}{where}"


def _rows(split: Split) -> list[int]:
    return [size[0] if size else 0 for size in split.input_sizes]


def _shapes(split: Split) -> list[str]:
    sizes = zip(split.input_sizes, split.output_sizes, strict=True)
    return [f"{list(inputs)} -> {list(outputs)}" for inputs, outputs in sizes]


def _new_rows(number: int, block: str, split: Split, step: int) -> list[SplitRow]:
    replicas = zip(_rows(split), _shapes(split), split.devices, strict=True)
    return [
        SplitRow(
            number=number,
            replica=replica,
            block=block,
            device=device,
            rows=rows,
            batch_rows=sum(_rows(split)),
            first_shape=shape,
            latest_shape=shape,
            first_step=step,
            last_step=step,
            steps=0,
        )
        for replica, (rows, shape, device) in enumerate(replicas)
    ]
