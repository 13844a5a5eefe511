"""parallel_apply: call every replica, here or in threads that know what the caller's thread knows. Like
torch.nn.parallel.parallel_apply."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache
from typing import Any, Literal

import torch
from torch import nn

from dphybrid.parallel.devices import Devices, resolve_devices
from dphybrid.parallel.nests import tensors_of
from dphybrid.parallel.replication import under_functorch
from dphybrid.parallel.scattering import Places
from dphybrid.util.errors import UserError

Mode = Literal["inline", "serial", "threads"]


def default_mode(devices: Devices) -> Mode:
    """Return how replicas run unless asked otherwise: at once on GPUs of their own, else one after the
    other."""
    return "threads" if devices.home.type == "cuda" and not devices.virtual else "inline"


def parallel_apply(
    replicas: Sequence[nn.Module],
    inputs: Sequence[Any],
    kwargs: Sequence[dict[str, Any]] | None = None,
    devices: Places | None = None,
    mode: Mode | None = None,
    around: Callable[[int], AbstractContextManager[Any]] | None = None,
) -> list[Any]:
    """Call each replica on its inputs (a tuple or list of arguments, or one argument); return the outputs in
    device order.

    devices: None for those of the replicas' first inputs. mode: `inline` calls one after the other in this
    thread (deterministic, fit for a debugger), `serial` one after the other in threads of their own, as
    strangers to this thread as on GPUs, `threads` all at once. None: threads for GPUs of their own, else
    inline; always inline below a transform of torch.func, which other threads know nothing of.
    around: makes a context to enter around the call of replica i. When all have ended the first failing
    replica's exception is raised, its place noted.
    """
    count = len(replicas)
    places = _places(inputs) if devices is None else resolve_devices(devices)
    if len(inputs) != count or (kwargs is not None and len(kwargs) != count) or len(places) < count:
        given = "none" if kwargs is None else len(kwargs)
        raise UserError(
            f"parallel_apply: {count} replicas, {len(inputs)} inputs, kwargs: {given}, {len(places)} "
            "devices; give one of each a replica"
        )
    mode = mode or default_mode(places)

    def call(index: int, stream: "torch.cuda.Stream | None" = None) -> Any:
        place, given = places.replicas[index], inputs[index]
        arguments = given if isinstance(given, tuple | list) else (given,)
        try:
            with (
                as_replica(index, count),
                _on(place, stream),
                around(index) if around else nullcontext(),
            ):
                return replicas[index](*arguments, **(kwargs[index] if kwargs is not None else {}))
        except Exception as error:
            error.add_note(f"in replica {index} of {count} on {places.labels[index]}")
            raise

    if mode == "inline" or count == 1 or under_functorch():
        return [call(index) for index in range(count)]
    enter = _thread_state(places.home.type)
    # Streams are a thread's own affair: work of the replicas belongs behind what the caller has queued in its
    # current ones.
    streams = [
        torch.cuda.current_stream(place) if place.type == "cuda" else None
        for place in places.replicas[:count]
    ]

    def call_in_thread(index: int) -> Any:
        with enter():
            return call(index, streams[index])

    if mode == "serial":
        return [_pool(count).submit(call_in_thread, index).result() for index in range(count)]
    futures = [_pool(count).submit(call_in_thread, index) for index in range(count)]
    # All of them, before one's failure is told: whoever mends it and tries again shall not meet replicas that
    # still run.
    wait(futures)
    return [future.result() for future in futures]


def _places(inputs: Sequence[Any]) -> Devices:
    """The devices of the first tensors of each replica's inputs."""
    found = [
        next((tensor.device for _, tensor in tensors_of(given)), torch.device("cpu")) for given in inputs
    ]
    return Devices(",".join(map(str, found)), tuple(found), len(set(found)) < len(found))


def _on(place: torch.device, stream: "torch.cuda.Stream | None") -> AbstractContextManager[Any]:
    if place.type != "cuda":
        return nullcontext()
    stack = ExitStack()
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
    kinds = {kind, "cpu"}
    casts = [
        (k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k), torch.is_autocast_cache_enabled())
        for k in kinds
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


@contextmanager
def as_replica(index: int, count: int) -> Iterator[None]:
    """While the block runs, this thread computes replica `index` of `count`."""
    before = current_replica()
    _local.place = (index, count)
    try:
        yield
    finally:
        _local.place = before


def current_replica() -> tuple[int, int]:
    """Return (index, number of replicas) of the replica that is computing in this thread; (0, 1) outside of
    any."""
    return vars(_local).get("place", (0, 1))
