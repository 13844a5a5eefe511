"""The batches of a loop: an iterator that takes batches back and keeps them for the next loop over it."""

import random
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from typing import Any, Generic, Self, TypeVar

import numpy as np
import torch

Batch = TypeVar("Batch")

_HELD = 16
"""Iterators of types without weak references, such as those of lists, that are kept for their batches."""

# Iterators that a loop has left -> what had been drawn ahead.
_left: "weakref.WeakKeyDictionary[Iterator[Any], deque[Any]]" = weakref.WeakKeyDictionary()
_left_held: "OrderedDict[int, tuple[Iterator[Any], deque[Any]]]" = OrderedDict()


class Source(Generic[Batch]):
    """Draws the batches. Those that were put back, also by an earlier loop over the same iterator, come
    first; exceptions among them are raised."""

    def __init__(self, batches: Iterable[Batch]) -> None:
        self._iterator = iter(batches)
        self._is_shared = self._iterator is batches  # else another loop starts anew, as always in Python
        self.num_drawn = 0
        self._back: deque[Batch | BaseException] = deque()
        if self._is_shared:
            held = _left_held.pop(id(batches), None)
            self._back = held[1] if held is not None else _taken(self._iterator)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        batch = self._back.popleft() if self._back else next(self._iterator)
        if isinstance(batch, BaseException):
            raise batch
        self.num_drawn += 1
        return batch

    def put_back(self, batches: list[Any]) -> None:
        """Take batches back, in order, and keep them for the next loop if it can go on with this iterator."""
        self._back.extendleft(reversed(batches))
        if not self._is_shared or not self._back:
            return
        try:
            _left[self._iterator] = self._back
        except TypeError:  # no weak references
            _left_held[id(self._iterator)] = self._iterator, self._back
            if len(_left_held) > _HELD:
                _left_held.popitem(last=False)

    def is_exhausted(self) -> bool:
        """Whether an iterator that was passed in had no batch at all."""
        return self._is_shared and not self.num_drawn


def _taken(iterator: Iterator[Any]) -> deque[Any]:
    try:
        return _left.pop(iterator, deque())
    except TypeError:  # no weak references
        return deque()


def generators() -> tuple[object, ...]:
    """Return the states of the generators that a source may share with the steps."""
    # As bytes, which can be compared.
    of_numpy: Any = np.random.get_state(legacy=False)["state"]
    return (
        torch.get_rng_state().numpy().tobytes(),
        random.getstate(),
        of_numpy["key"].tobytes(),
        of_numpy["pos"],
    )
