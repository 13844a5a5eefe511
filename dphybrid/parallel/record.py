"""The record of a data-parallel block: its splits and the findings about its module."""

from torch import Tensor, nn

from dphybrid.parallel.gathering import Leaf
from dphybrid.parallel.splits import Size

Key = tuple[tuple[Size, ...], tuple[Size, ...]]


class Record:
    """What was seen so far. Apart from the module: setting a module's attribute costs more than all the rest
    of recording.

    last, repeats: the latest split and how often it has come since another one. earlier: how often each came
    before. modules: the parts found fit to be replicated. settled: outputs whose rows are the samples', with
    the mode of the module. asked: names of inputs that have been examined. in_place: does the module change
    its inputs? None until it has run once.
    """

    __slots__ = ("asked", "earlier", "in_place", "last", "modules", "repeats", "settled")

    def __init__(self) -> None:
        self.earlier: dict[Key, int] = {}
        self.last: Key | None = None
        self.repeats = 0
        self.modules: list[nn.Module] = []
        self.settled: set[tuple[bool, Leaf]] = set()
        self.asked: set[tuple[str, ...]] = set()
        self.in_place: bool | None = None

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
