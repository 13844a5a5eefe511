"""`parallel_apply`, like torch's: calls every replica, in this thread or in threads that get the calling
thread's torch state."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Literal

import torch
from torch import nn

from dphybrid.parallel.devices import Devices, resolve_devices
from dphybrid.parallel.nests import leaves
from dphybrid.parallel.scattering import DeviceNames
from dphybrid.util.errors import UserError
from dphybrid.util.threads import use_num_threads


def parallel_apply(
    replicas: Sequence[nn.Module],
    inputs: Sequence[object],
    kwargs: Sequence[dict[str, object]] | None = None,
    devices: DeviceNames | None = None,
    mode: Literal["inline", "threads"] | None = None,
) -> list[object]:
    """Call each replica on its inputs (a tuple or list of arguments, or one argument); return the outputs in
    device order.

    After all replicas have ended, raises the exception of the first one that failed, with a note that names
    it. Raises UserError if the numbers of replicas, inputs and devices do not match.

    Args:
        devices: None for the devices of the replicas' first inputs.
        mode: `inline` calls one after the other in this thread (deterministic, works in a debugger),
            `threads` calls all at once; None: threads if each replica has its own GPU.
    """
    if mode not in (None, "inline", "threads"):
        raise UserError(f"parallel_apply: mode={mode!r}; use inline or threads")
    count = len(replicas)
    resolved = _devices_of(inputs) if devices is None else resolve_devices(devices)
    if len(inputs) != count or (kwargs is not None and len(kwargs) != count) or len(resolved) < count:
        given = "none" if kwargs is None else len(kwargs)
        raise UserError(
            f"parallel_apply: {count} replicas, {len(inputs)} inputs, kwargs: {given}, {len(resolved)} "
            "devices; give one of each per replica"
        )

    named = [{}] * count if kwargs is None else kwargs
    at_once = (resolved.at_once if mode is None else mode == "threads") and count > 1
    enter = _thread_state(resolved, count) if at_once else lambda index: _on(resolved.replicas[index])

    def call(index: int) -> object:
        given = inputs[index]
        arguments = given if isinstance(given, tuple | list) else (given,)
        before, _local.replica = running_replica(), index
        try:
            with enter(index):
                return replicas[index](*arguments, **named[index])
        except Exception as error:
            error.add_note(f"in replica {index} of {count} on {resolved.labels[index]}")
            raise
        finally:
            _local.replica = before

    if not at_once:
        return [call(index) for index in range(count)]
    futures = [_pool(count).submit(call, index) for index in range(count)]
    # Wait for all before raising: replicas that still run hold memory.
    wait(futures)
    return [future.result() for future in futures]


def _devices_of(inputs: Sequence[object]) -> Devices:
    """Return the devices of the first tensor of each replica's inputs."""
    devices = [
        next(
            (leaf.device for leaf in leaves(arguments) if isinstance(leaf, torch.Tensor)), torch.device("cpu")
        )
        for arguments in inputs
    ]
    return Devices(",".join(map(str, devices)), tuple(devices), len(set(devices)) < len(devices))


def _on(device: torch.device, stream: "torch.cuda.Stream | None" = None) -> ExitStack:
    stack = ExitStack()
    if device.type == "cuda":
        stack.enter_context(torch.cuda.device(device))
        stack.enter_context(torch.cuda.stream(stream))
    return stack


@contextmanager
def seeded(gpu: torch.device, seed: int) -> Iterator[None]:
    """While the block runs, a GPU draws random numbers from this seed; afterwards its generator is as
    before."""
    # A kernel gets its seed and offset when it is launched, so the state can be set back without waiting for
    # the stream.
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


os.register_at_fork(after_in_child=_pool.cache_clear)  # a forked child has no threads: it would wait for them


def _thread_state(devices: Devices, count: int) -> Callable[[int], ExitStack]:
    """Return a function that gives the thread of replica i the calling thread's state, which torch keeps per
    thread: grad and inference mode, autocast with its number format, number of threads of an operation,
    current stream of the replica's GPU.

    If each replica has its own GPU, each gets its own seed. torch seeds all GPUs alike, so replicas with
    equal shares would draw equal dropout masks.
    """
    used = devices.replicas[:count]
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    num_threads = torch.get_num_threads()
    # torch's parallel_apply passes on that autocast is on, but not its number format: in threads, bfloat16
    # would become float16.
    casts = [
        (k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k), torch.is_autocast_cache_enabled())
        for k in {devices.home.type, "cpu"}
    ]
    # Replicas must run after the work that the caller has queued on each GPU.
    streams = [torch.cuda.current_stream(device) if device.type == "cuda" else None for device in used]
    # Drawn on the CPU, so that they do not depend on earlier random draws on a GPU.
    seeds = torch.randint(2**62, (count,), device="cpu").tolist() if devices.at_once else []

    def enter(index: int) -> ExitStack:
        use_num_threads(num_threads)
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


def running_replica() -> int:
    """Return the number of the replica that this thread computes; 0 outside of any."""
    return int(vars(_local).get("replica", 0))
