"""parallel_apply: call every replica, here or in threads that know what the caller's thread knows. Like
torch.nn.parallel.parallel_apply."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
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

    seeds: list[int] = []  # of dropout, which all replicas share

    def call(index: int, stream: "torch.cuda.Stream | None" = None) -> object:
        place, given = places.replicas[index], inputs[index]
        arguments = given if isinstance(given, tuple | list) else (given,)
        try:
            with as_replica(index, count, shares, seeds), _on(place, stream):
                return replicas[index](*arguments, **(kwargs[index] if kwargs is not None else {}))
        except Exception as error:
            error.add_note(f"in replica {index} of {count} on {places.labels[index]}")
            raise

    arguments = zip(inputs, kwargs or [{}] * count, strict=True)
    shares = [(*first_size(each), 0)[0] for each in arguments]
    at_once = places.at_once if mode is None else mode == "threads"
    if not at_once or count == 1 or under_functorch():
        return [call(index) for index in range(count)]
    # what torch keeps by thread is read here, in the caller's
    enter = _thread_state(places.home.type)
    # Streams are a thread's own affair: work of the replicas belongs behind what the caller has queued in its
    # current ones.
    streams = [
        torch.cuda.current_stream(place) if place.type == "cuda" else None
        for place in places.replicas[:count]
    ]

    with independent_streams(places.replicas[:count] if places.at_once else ()) as seed:

        def call_in_thread(index: int) -> object:
            seed(index)
            with enter():
                return call(index, streams[index])

        futures = [_pool(count).submit(call_in_thread, index) for index in range(count)]
        # All of them, before one's failure is raised: a second try must not meet replicas that still run.
        wait(futures)
    return [future.result() for future in futures]


@contextmanager
def independent_streams(gpus: Sequence[torch.device]) -> Iterator[Callable[[int], object]]:
    """Seed each GPU's generator by torch's CPU generator while the block runs; yields what seeds that of
    replica i, in its thread. GPUs seeded alike would draw equal dropout masks for equal shares."""
    if not gpus:
        yield lambda _: None
        return
    torch.cuda.init()
    # drawn on the CPU: a seed then does not depend on what ran on a GPU before
    generators = [torch.cuda.default_generators[gpu.index or 0] for gpu in gpus]
    seeds = torch.randint(2**62, (len(gpus),), device="cpu").tolist()
    states = [generator.get_state() for generator in generators]
    yield lambda index: generators[index].manual_seed(seeds[index])
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)


def _places(inputs: Sequence[object]) -> Devices:
    """The devices of the first tensors of each replica's inputs."""
    found = [
        next((tensor.device for _, tensor in tensors_of(given)), torch.device("cpu")) for given in inputs
    ]
    return Devices(",".join(map(str, found)), tuple(found), len(set(found)) < len(found))


def _on(place: torch.device, stream: "torch.cuda.Stream | None") -> ExitStack:
    stack = ExitStack()
    if place.type == "cuda":
        stack.enter_context(torch.cuda.device(place))
        stack.enter_context(torch.cuda.stream(stream))
    return stack


@cache
def _pool(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="dphybrid-replica")


def _thread_state(kind: str) -> Callable[[], ExitStack]:
    """Return a function that enters the caller's thread-local torch state: grad and inference mode, autocast
    with its number format."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    # torch hands on that autocast is on, not its number format: bfloat16 would be float16 in threads
    casts = [
        (k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k), torch.is_autocast_cache_enabled())
        for k in {kind, "cpu"}
    ]

    def enter() -> ExitStack:
        stack = ExitStack()
        stack.enter_context(torch.inference_mode(inference))
        stack.enter_context(torch.set_grad_enabled(grad))
        for k, enabled, dtype, caching in casts:
            stack.enter_context(torch.autocast(k, dtype=dtype, enabled=enabled, cache_enabled=caching))
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
