"""The rows of each replica, planned and recorded."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from dphybrid.parallel.gathering import Leaf
from dphybrid.util.errors import UserError, counted

Size = tuple[int, ...]
Key = tuple[tuple[Size, ...], tuple[Size, ...]]
"""The replicas' input sizes and output sizes."""


def split_sizes(batch_size: int, num_devices: int, weights: Sequence[float] | None = None) -> list[int]:
    """Return the rows of each used device, in device order: what `torch.chunk` gives, at most `num_devices`
    numbers, none of them 0.

    weights: one positive number a device; rows are then shared in proportion, every used device getting at
    least one. Raises UserError for sizes below 1 and for a wrong number of weights.
    """
    if batch_size < 1 or num_devices < 1:
        raise UserError(f"cannot split {batch_size} rows over {num_devices} devices; both must be at least 1")
    if weights is None:
        chunk = -(-batch_size // num_devices)
        return [min(chunk, batch_size - start) for start in range(0, batch_size, chunk)]
    if len(weights) != num_devices or not all(0 < weight < float("inf") for weight in weights):
        raise UserError(
            f"weights={list(weights)}: give one number above 0 for each of the {num_devices} devices"
        )
    used = list(weights)[:batch_size]
    spare = batch_size - len(used)  # one row each first, the rest by largest remainder
    shares = [spare * weight / sum(used) for weight in used]
    sizes = [1 + int(share) for share in shares]
    # ties by place, so that the same weights always give the same split
    by_remainder = sorted(range(len(used)), key=lambda i: (int(shares[i]) - shares[i], i))
    for index in by_remainder[: batch_size - sum(sizes)]:
        sizes[index] += 1
    return sizes


def shares(count: int, weights: Sequence[float] | None, rows: int) -> list[int]:
    """Return `split_sizes`, and one share of no rows for an empty batch: the module still runs once."""
    return split_sizes(rows, count, weights) if rows else [0]


class Record:
    """What was seen so far. Apart from the module: setting a module's attribute costs more than all the rest
    of recording.

    last, repeats: the latest split and how often it has come since another one. earlier: how often each came
    before. modules: the parts found fit to be replicated. settled: outputs whose rows are the samples', with
    the mode of the module. asked: names of inputs that have been examined.
    """

    __slots__ = ("asked", "earlier", "last", "modules", "repeats", "settled")

    def __init__(self) -> None:
        self.earlier: dict[Key, int] = {}
        self.last: Key | None = None
        self.repeats = 0
        self.modules: list[nn.Module] = []
        self.settled: set[tuple[bool, Leaf]] = set()
        self.asked: set[tuple[str, ...]] = set()

    def note(self, key: Key) -> None:
        """Count a split. One that comes again and again, as nearly all do, is compared and not looked up:
        that takes half the time."""
        if key == self.last:
            self.repeats += 1
            return
        self.earlier = self.counts()
        self.last, self.repeats = key, 1
        self.earlier.setdefault(key, 0)

    def counts(self) -> dict[Key, int]:
        """Return how often each split came, in order of first appearance."""
        return {key: count + self.repeats * (key == self.last) for key, count in self.earlier.items()}


def first_size(value: object) -> Size:
    """Return the size of the first tensor in a value that has dims, () where there is none."""
    if isinstance(value, Tensor):
        return (value.size(0),) if value.is_nested else value.shape
    if isinstance(value, (tuple, list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            if size := first_size(item):
                return size
    return ()


@dataclass(frozen=True)
class Split:
    """What one forward was split into, replicas in device order.

    input_sizes, output_sizes: size of the first tensor that went into and came out of each replica (() where
    there was none).
    devices: the replicas' device labels. count: forwards that were split this way.
    """

    input_sizes: tuple[Size, ...]
    output_sizes: tuple[Size, ...]
    devices: tuple[str, ...]
    count: int = 1

    def lines(self) -> list[str]:
        """Return one line a replica, in device order, and one for the whole batch, in the words of PyTorch's
        data-parallel tutorial."""
        replicas = zip(self.input_sizes, self.output_sizes, strict=True)
        inside = [
            f"\tIn Model: input size {_size(inputs)} output size {_size(outputs)}"
            for inputs, outputs in replicas
        ]
        return [
            *inside,
            f"Outside: input size {_size(_whole(self.input_sizes))} output_size "
            f"{_size(_whole(self.output_sizes))}",
        ]


def _size(size: Size) -> str:
    return f"torch.Size([{', '.join(map(str, size))}])"


def _whole(sizes: tuple[Size, ...]) -> Size:
    return (sum(size[0] for size in sizes), *sizes[0][1:]) if sizes[0] else ()


@dataclass(frozen=True)
class SplitPlan:
    """The split of an epoch before anything runs. full, last: rows a device of a full and of the last batch
    (None: none is short)."""

    rows: int
    batch_size: int
    labels: tuple[str, ...]
    full: tuple[int, ...]
    num_full: int
    last: tuple[int, ...] | None

    def text(self) -> str:
        """Return the plan as a table with what to do about idle devices."""
        batches: list[tuple[str, tuple[int, ...]]] = []
        if self.num_full:
            batches.append((f"{self.num_full} x {counted(self.batch_size, 'row')}", self.full))
        if self.last:
            batches.append((f"last: {counted(sum(self.last), 'row')}", self.last))
        wide = max(len(label) for label, _ in batches)
        lines = [
            f"{counted(self.rows, 'row')} in batches of {self.batch_size} over "
            f"{counted(len(self.labels), 'device')}:",
            "",
        ]
        lines += [f"  {label:<{wide}}  {','.join(map(str, sizes))}" for label, sizes in batches]
        lines.append("")
        name_wide = max(len(label) for label in self.labels)
        lines.append(f"  {'device':<{name_wide}}  " + "  ".join(f"{label:>{wide}}" for label, _ in batches))
        for index, label in enumerate(self.labels):
            cells = [str(sizes[index]) if index < len(sizes) else "idle" for _, sizes in batches]
            lines.append(f"  {label:<{name_wide}}  " + "  ".join(f"{cell:>{wide}}" for cell in cells))
        return "\n".join([*lines, "", *self._advice(batches)])

    def _advice(self, batches: list[tuple[str, tuple[int, ...]]]) -> list[str]:
        count, advice = len(self.labels), []
        for label, sizes in batches:
            if idle := self.labels[len(sizes) :]:
                advice.append(f"{label}: {len(idle)} of {count} devices idle ({', '.join(idle)}).")
        if len(self.full) < count or max(self.full) != min(self.full):
            better = -(-self.batch_size // count) * count
            advice.append(
                f"A batch size that fills {count} devices evenly is a multiple of {count}: {better} gives "
                f"{counted(better // count, 'row')} each."
            )
        return advice or ["Every device is used by every batch."]


def split_plan(rows: int, batch_size: int, labels: Sequence[str]) -> SplitPlan:
    """Return how an epoch of `rows` rows will be split over the labelled devices. Raises UserError for
    numbers below 1."""
    if rows < 1:
        raise UserError(f"rows={rows}: must be at least 1")
    full = tuple(split_sizes(batch_size, len(labels)))
    num_full, rest = divmod(rows, batch_size)
    last = tuple(split_sizes(rest, len(labels))) if rest else None
    return SplitPlan(rows, batch_size, tuple(labels), full, num_full, last)
