"""What each batch was split into, as the plain lines of the data-parallel tutorials and as table rows."""

from dataclasses import dataclass

from torch import nn

from dphybrid.parallel import Devices, Split, find_data_parallel


def announcement(devices: Devices) -> str | None:
    """Return "Let's use n GPUs!" when there is more than one device ("devices" for virtual ones)."""
    return f"Let's use {len(devices)} {devices.noun}!" if len(devices) > 1 else None


@dataclass
class Seen:
    """A split of one block and the steps it happened in."""

    block: str
    split: Split
    first_step: int
    last_step: int
    steps: int = 1


class SplitLog:
    """Collects the splits of training steps. `each`: every step gives lines; otherwise only a split not seen before."""

    def __init__(self, model: nn.Module, each: bool) -> None:
        self._blocks = find_data_parallel(model)
        self._each = each
        self._seen: dict[tuple[object, ...], Seen] = {}
        self.lines: list[str] = []

    def after_step(self, step: int) -> list[str]:
        """Note the latest split of every block; return the lines to print."""
        fresh: list[str] = []
        for name, block in self._blocks.items():
            split = block.last_split
            if split is None:
                continue
            key = (name, split.input_sizes, split.output_sizes)
            if self._each or key not in self._seen:
                fresh += split.lines()
            if key in self._seen:
                self._seen[key].last_step = step
                self._seen[key].steps += 1
            else:
                self._seen[key] = Seen(name or "model", split, step, step)
        self.lines += fresh
        return fresh

    def rows(self) -> list[dict[str, object]]:
        """Return one row for each (block, split, replica): where (block, split and replica, as MLflow needs one column that tells rows apart), split,
        block, batch_rows, rows, device, first and last step, steps.
        """
        return [
            {
                "where": f"split {number} / replica {replica} / {seen.block}",
                "split": f"{list(inputs)} -> {list(outputs)}",
                "block": seen.block,
                "batch_rows": sum(size[0] for size in seen.split.input_sizes if size),
                "rows": inputs[0] if inputs else 0,
                "device": device,
                "first_step": seen.first_step,
                "last_step": seen.last_step,
                "steps": seen.steps,
            }
            for number, seen in enumerate(self._seen.values(), start=1)
            for replica, (inputs, outputs, device) in enumerate(
                zip(seen.split.input_sizes, seen.split.output_sizes, seen.split.devices, strict=True)
            )
        ]
