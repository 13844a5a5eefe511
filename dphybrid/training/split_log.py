"""What each batch was split into, as the plain lines of the data-parallel tutorials and as table rows."""

from torch import nn

from dphybrid.parallel import DataParallel, Devices, Split, find_data_parallel


def announcement(devices: Devices) -> str | None:
    """Return "Let's use n GPUs!" when there is more than one device ("devices" for virtual ones)."""
    return f"Let's use {len(devices)} {devices.noun}!" if len(devices) > 1 else None


def split_lines(split: Split) -> list[str]:
    """Return one line a replica, in device order, and one for the whole batch."""
    lines = [
        f"\tIn Model: input size {_size(inputs)} output size {_size(outputs)}"
        for inputs, outputs in zip(split.input_sizes, split.output_sizes, strict=True)
    ]
    return [*lines, f"Outside: input size {_size(_whole(split.input_sizes))} output_size {_size(_whole(split.output_sizes))}"]


def _size(size: tuple[int, ...]) -> str:
    return f"torch.Size([{', '.join(map(str, size))}])"


def _whole(sizes: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    return (sum(size[0] for size in sizes), *sizes[0][1:]) if sizes[0] else ()


class SplitLog:
    """Collects the splits of training steps. `each`: every step gives lines; otherwise only a split not seen before."""

    def __init__(self, model: nn.Module, each: bool) -> None:
        self._blocks: dict[str, DataParallel] = find_data_parallel(model)
        self._each = each
        self._seen: dict[tuple[str, object], int] = {}
        self._steps: dict[tuple[str, Split], list[int]] = {}
        self.lines: list[str] = []

    def after_step(self, step: int) -> list[str]:
        """Note the latest split of every block; return the lines to print."""
        fresh: list[str] = []
        for name, block in self._blocks.items():
            split = block.last_split
            if split is None:
                continue
            key = (name, (split.input_sizes, split.output_sizes, split.devices))
            if self._each or key not in self._seen:
                fresh += split_lines(split)
            self._seen[key] = self._seen.get(key, 0) + 1
            span = self._steps.setdefault(key, [step, step])  # type: ignore[arg-type]
            span[1] = step
        self.lines += fresh
        return fresh

    def rows(self) -> list[dict[str, object]]:
        """Return one row for each (block, split, replica): where, split, rows, device, sizes, first and last step, steps."""
        table: list[dict[str, object]] = []
        for number, (key, count) in enumerate(self._seen.items(), start=1):
            name, (input_sizes, output_sizes, devices) = key  # type: ignore[misc]
            first, last = self._steps[key]  # type: ignore[index]
            batch = sum(size[0] for size in input_sizes if size)
            for replica, (inputs, outputs, device) in enumerate(zip(input_sizes, output_sizes, devices, strict=True)):
                table.append(
                    {
                        "where": f"split {number} / {name or 'model'} / replica {replica}",
                        "split": f"{list(inputs)} -> {list(outputs)}",
                        "batch_rows": batch,
                        "rows": inputs[0] if inputs else 0,
                        "device": device,
                        "first_step": first,
                        "last_step": last,
                        "steps": count,
                    }
                )
        return table
