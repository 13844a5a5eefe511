"""Streams of random numbers for replicas: shared, alike, or each its own, whatever the order in which
replicas happen to run."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Randomness = Literal["shared", "same", "independent"]

Around = Callable[[int], AbstractContextManager[Any]]


def _generator(device: torch.device) -> torch.Generator:
    if device.type != "cuda":
        return torch.default_generator
    torch.cuda.init()
    return torch.cuda.default_generators[device.index or 0]


@contextmanager
def random_streams(kind: Randomness, places: Sequence[torch.device], at_once: bool) -> Iterator[Around]:
    """Give replicas streams of their own; yields the `around` of `parallel_apply`.

    same: every replica starts alike, as GPUs seeded alike do. independent: every replica has a stream of its
    own, drawn from torch's CPU generator.
    places: each replica's device, whose generator it uses. at_once: replicas run in threads; those that share
    a generator then take turns with it at each draw, so that what they draw does not depend on scheduling.
    """
    generators = [_generator(place) for place in places]
    seeds = torch.randint(2**62, (len(places),), device="cpu").tolist() if kind == "independent" else []
    kept = {id(generator): (generator, generator.get_state()) for generator in generators}
    start = generators[0].get_state()
    lock, crowded = threading.Lock(), at_once and len(kept) < len(places)

    @contextmanager
    def around(index: int) -> Iterator[None]:
        generator = generators[index]
        if crowded:
            own = torch.Generator(places[index])
            with _Turns(_set_out(own, start, seeds, index).get_state(), generator, lock):
                yield
        else:
            _set_out(generator, start, seeds, index)
            yield

    yield around
    if seeds or crowded:
        for generator, state in kept.values():
            generator.set_state(state)
    if crowded and not seeds:
        torch.rand((), generator=generators[0], device=places[0])  # the next forward starts elsewhere


def _set_out(generator: torch.Generator, start: Tensor, seeds: list[int], index: int) -> torch.Generator:
    if seeds:
        generator.manual_seed(seeds[index])
    else:
        generator.set_state(start)
    return generator


class _Turns(TorchDispatchMode):
    """Puts a state of its own into a generator that others use too, for the length of each operation that
    draws."""

    def __init__(self, state: Tensor, generator: torch.Generator, lock: threading.Lock) -> None:
        super().__init__()
        self._state, self._generator, self._lock = state, generator, lock

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        with self._lock:
            before = self._generator.get_state()
            self._generator.set_state(self._state)
            try:
                return func(*args, **kwargs)
            finally:
                self._state = self._generator.get_state()
                self._generator.set_state(before)
