"""parallel_apply: call every replica, here or in threads that know what the caller's thread knows. Like
torch.nn.parallel.parallel_apply."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

import torch
from torch import nn

from dphybrid.parallel.devices import Devices, resolve_devices
from dphybrid.parallel.nests import tensors_of
from dphybrid.parallel.replication import under_functorch
from dphybrid.parallel.scattering import Places
from dphybrid.parallel.splits import first_size
from dphybrid.util.errors import UserError


def parallel_apply(
    replicas: Sequence[nn.Module],
    inputs: Sequence[object],
    kwargs: Sequence[dict[str, object]] | None = None,
    devices: Places | None = None,
    mode: Literal["inline", "threads"] | None = None,
) -> list[object]:
    """Call each replica on its inputs (a tuple or list of arguments, or one argument); return the outputs in
    device order.

    devices: None for those of the replicas' first inputs. mode: `inline` calls one after the other in this
    thread (deterministic, fit for a debugger), `threads` all at once; None: threads for GPUs of their own.
    Always inline below a transform of torch.func, which other threads know nothing of. When all have ended
    the first failing replica's exception is raised, its place noted. Raises UserError for numbers that do not
    fit.
    """
    count = len(replicas)
    places = _places(inputs) if devices is None else resolve_devices(devices)
    if len(inputs) != count or (kwargs is not None and len(kwargs) != count) or len(places) < count:
        given = "none" if kwargs is None else len(kwargs)
        raise UserError(
            f"parallel_apply: {count} replicas, {len(inputs)} inputs, kwargs: {given}, {len(places)} "
            "devices; give one of each a replica"
        )

    of_dropout: list[int] = []  # seeds, which all replicas share
    named = [{}] * count if kwargs is None else kwargs
    shares = [(*first_size(each), 0)[0] for each in zip(inputs, named, strict=True)]

    def call(index: int, around: Callable[[int], AbstractContextManager[object]]) -> object:
        given = inputs[index]
        arguments = given if isinstance(given, tuple | list) else (given,)
        try:
            with around(index), as_replica(index, count, shares, of_dropout):
                return replicas[index](*arguments, **named[index])
        except Exception as error:
            error.add_note(f"in replica {index} of {count} on {places.labels[index]}")
            raise

    at_once = places.at_once if mode is None else mode == "threads"
    if not at_once or count == 1 or under_functorch():
        return [call(index, lambda index: _on(places.replicas[index])) for index in range(count)]
    enter = _thread_state(places, count)
    futures = [_pool(count).submit(call, index, enter) for index in range(count)]
    # All of them, before one's failure is raised: a second try must not meet replicas that still run.
    wait(futures)
    return [future.result() for future in futures]


def _places(inputs: Sequence[object]) -> Devices:
    """The devices of the first tensors of each replica's inputs."""
    found = [
        next((tensor.device for _, tensor in tensors_of(given)), torch.device("cpu")) for given in inputs
    ]
    return Devices(",".join(map(str, found)), tuple(found), len(set(found)) < len(found))


def _on(place: torch.device, stream: "torch.cuda.Stream | None" = None) -> ExitStack:
    stack = ExitStack()
    if place.type == "cuda":
        stack.enter_context(torch.cuda.device(place))
        stack.enter_context(torch.cuda.stream(stream))
    return stack


@contextmanager
def seeded(gpu: torch.device, seed: int) -> Iterator[None]:
    """While the block runs, a GPU draws by this seed; its generator then goes on as if it had not."""
    # Kernels take their numbers when they are launched, here: no stream needs to be waited for.
    generator = torch.cuda.default_generators[gpu.index or 0]
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(state)


@cache
def _pool(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="dphybrid-replica")


def _thread_state(places: Devices, count: int) -> Callable[[int], ExitStack]:
    """Return a function that enters, in the thread of replica i, what torch keeps by thread and the caller's
    has: grad and inference mode, autocast with its number format, the current stream of the replica's GPU.

    GPUs of their own get seeds: torch seeds all alike, and equal shares would have equal dropout masks.
    """
    used = places.replicas[:count]
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    # torch hands on that autocast is on, not its number format: bfloat16 would be float16 in threads
    casts = [
        (k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k), torch.is_autocast_cache_enabled())
        for k in {places.home.type, "cpu"}
    ]
    # work of the replicas belongs behind what the caller has queued
    streams = [torch.cuda.current_stream(place) if place.type == "cuda" else None for place in used]
    # drawn on the CPU: what ran on a GPU before then does not matter
    seeds = torch.randint(2**62, (count,), device="cpu").tolist() if places.at_once else []

    def enter(index: int) -> ExitStack:
        stack = ExitStack()
        stack.enter_context(_on(used[index], streams[index]))
        stack.enter_context(torch.inference_mode(inference))
        stack.enter_context(torch.set_grad_enabled(grad))
        for k, enabled, dtype, caching in casts:
            stack.enter_context(torch.autocast(k, dtype=dtype, enabled=enabled, cache_enabled=caching))
        if seeds:
            stack.enter_context(seeded(used[index], seeds[index]))
        return stack

    return enter


_local = threading.local()


@dataclass
class Replica:
    """What computes in a thread: replica `index` of `count`. shares: rows of each replica's inputs, empty
    where they are not known. seeds: drawn by the replicas' calls of dropout so far, one for the first call of
    each, and so on; calls: of this one."""

    index: int = 0
    count: int = 1
    shares: Sequence[int] = ()
    seeds: list[int] = field(default_factory=list)
    calls: int = 0


@contextmanager
def as_replica(
    index: int, count: int, shares: Sequence[int] = (), seeds: list[int] | None = None
) -> Iterator[None]:
    """While the block runs, this thread computes replica `index` of `count`."""
    before = running()
    _local.replica = Replica(index, count, shares, [] if seeds is None else seeds)
    try:
        yield
    finally:
        _local.replica = before


def running() -> Replica:
    """Return what computes in this thread."""
    return vars(_local).get("replica") or Replica()


def current_replica() -> tuple[int, int]:
    """Return (index, number of replicas) of the replica that is computing in this thread; (0, 1) outside of
    any."""
    replica = running()
    return replica.index, replica.count
