"""replicate, scatter, parallel_apply and gather for real and virtual devices alike.

They do what torch.nn.parallel's functions of the same names do (torch/nn/parallel/*.py), and differ where those lose or break something:
every replica gets copies also where devices share hardware, inputs travel straight to their device, worker threads know the caller's autocast
number format and inference mode, and what cannot be split or joined is refused with its place.
"""

import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dphybrid.parallel.devices import Devices, resolve_devices
from dphybrid.util.errors import UserError

Mode = Literal["inline", "serial", "threads"]
Randomness = Literal["shared", "same", "independent"]


@dataclasses.dataclass(frozen=True)
class Whole:
    """Marks a value (tensor, or a nest of them) that every replica gets unsplit, such as a (T, T) attention mask."""

    value: Any


@dataclasses.dataclass(frozen=True)
class Parts:
    """Marks a value that is split already: one tensor a used replica, each on its replica's device and with the sizes of the batch's split."""

    tensors: Sequence[Tensor]


def parts(tensors: Sequence[Tensor]) -> Tensor | Parts:
    """Return what a region takes for a value that is split already, such as the rows of `HostEmbedding.replica_rows`."""
    return tensors[0] if len(tensors) == 1 else Parts(tensors)


class _Broadcast(torch.autograd.Function):
    """All parameters to all replicas in one node: replica 0 sees the originals, the others copies; gradients are summed in device order."""

    @staticmethod
    def forward(ctx: Any, devices: tuple[torch.device, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.count = len(tensors)
        ctx.home = devices[0]
        copies = [*tensors, *(t.detach().to(device, copy=True) for device in devices[1:] for t in tensors)]
        frozen = [i for i, needed in enumerate(ctx.needs_input_grad[1:]) if not needed]
        ctx.mark_non_differentiable(*(copies[r * len(tensors) + i] for i in frozen for r in range(len(devices))))
        return tuple(copies)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        sums: list[Tensor | None] = [None]
        for i in range(ctx.count):
            parts = [grad.to(ctx.home) for grad in grads[i :: ctx.count]]
            if len({part.is_sparse for part in parts}) > 1:
                parts = [part.to_dense() if part.is_sparse else part for part in parts]
            total = parts[0]
            for part in parts[1:]:
                total = total + part
            sums.append(total)
        return tuple(sums)


def replicate(module: nn.Module, devices: str | Devices | Sequence[int], detach: bool = False) -> list[nn.Module]:
    """Return one replica of `module` a device. Gradients of the replicas add up in the module's parameters.

    detach: without a way back for gradients. Replica 0 shares storage with the module; buffers that the others change are lost.
    """
    devices = resolve_devices(devices)
    if devices.home.type == "cuda" and not devices.virtual and len(devices) > 1:
        from torch.nn.parallel import replicate as torch_replicate

        return list(torch_replicate(module, list(devices.replicas), detach))
    parameters = list(module.parameters())
    if parameters and not detach:
        flat = _Broadcast.apply(devices.replicas, *parameters)
    else:
        flat = (*parameters, *(p.detach().to(device, copy=True) for device in devices.replicas[1:] for p in parameters))
    buffers = list(module.buffers())
    modules = list(module.modules())
    return [
        _replica(
            modules,
            dict(zip(map(id, parameters), flat[j * len(parameters) : (j + 1) * len(parameters)], strict=True)),
            {id(b): b if j == 0 else b.detach().to(device, copy=True) for b in buffers},
        )
        for j, device in enumerate(devices.replicas)
    ]


def _replica(modules: list[nn.Module], parameters: dict[int, Tensor], buffers: dict[int, Tensor]) -> nn.Module:
    """The structure of torch's own replicas: shallow module copies whose parameters are plain tensor attributes."""
    copies: dict[int, Any] = {id(module): module._replicate_for_data_parallel() for module in modules}
    for module in modules:
        copy = copies[id(module)]
        copy._former_parameters = {}
        for key, child in module._modules.items():
            if child is None:
                copy._modules[key] = None
            else:
                setattr(copy, key, copies[id(child)])
        for key, parameter in module._parameters.items():
            if parameter is None:
                copy._parameters[key] = None
            else:
                setattr(copy, key, parameters[id(parameter)])
                copy._former_parameters[key] = parameters[id(parameter)]
        for key, buffer in module._buffers.items():
            if buffer is None:
                copy._buffers[key] = None
            else:
                setattr(copy, key, buffers[id(buffer)])
    replica: nn.Module = copies[id(modules[0])]
    return replica


def scatter(value: Any, devices: str | Devices | Sequence[int], sizes: Sequence[int], dim: int = 0) -> list[Any]:
    """Split every tensor of a nest (tuples, lists, dicts, namedtuples, dataclasses) on `dim`; return one nest a size.

    sizes: rows of each used device, as `split_sizes` gives them. `Whole` values and everything that is no tensor go to each replica.
    """
    devices = resolve_devices(devices)
    return _scatter(value, devices.replicas[: len(sizes)], list(sizes), dim)


def _scatter(value: Any, places: Sequence[torch.device], sizes: list[int], dim: int) -> list[Any]:
    if isinstance(value, Tensor):
        # A copy also where the device is the same: an in-place first operation must not reach the caller's batch.
        return [part.to(place, non_blocking=True, copy=True) for part, place in zip(value.split(sizes, dim), places, strict=True)]
    if isinstance(value, Whole):
        return [map_tensors(lambda t, p=place: t.to(p, copy=True), value.value) for place in places]  # type: ignore[misc]
    if isinstance(value, Parts):
        found = [part.shape[dim] for part in value.tensors]
        if found != sizes:
            raise UserError(
                f"parts of {found} rows in a batch that is split into {sizes}; split them as the region does, with its `sizes`"
            )
        return list(value.tensors)
    if isinstance(value, tuple | list | dict) or _is_dataclass(value):
        items = _items(value)
        columns = [_scatter(item, places, sizes, dim) for item in items]
        return [_rebuild(value, [column[j] for column in columns]) for j in range(len(places))]
    return [value] * len(places)


def parallel_apply(
    replicas: Sequence[nn.Module],
    inputs: Sequence[tuple[Any, ...]],
    kwargs: Sequence[dict[str, Any]],
    devices: str | Devices | Sequence[int],
    mode: Mode | None = None,
    around: Callable[[int], AbstractContextManager[Any]] | None = None,
) -> list[Any]:
    """Call each replica on its inputs; return the outputs in device order.

    mode: `inline` calls one after the other in this thread (deterministic, fit for a debugger), `serial` one after the other in threads of
    their own, as strangers to this thread as on GPUs, `threads` all at once. None: threads for GPUs of their own, else inline.
    around: makes a context to enter around the call of replica i. The first failing replica's exception is raised, its place noted.
    """
    devices = resolve_devices(devices)
    if mode is None:
        mode = "threads" if devices.home.type == "cuda" and not devices.virtual else "inline"
    count = len(replicas)

    def call(index: int) -> Any:
        place = devices.replicas[index]
        try:
            with (
                _as_replica(index, count),
                torch.cuda.device(place) if place.type == "cuda" else nullcontext(),
                around(index) if around else nullcontext(),
            ):
                return replicas[index](*inputs[index], **kwargs[index])
        except Exception as error:
            error.add_note(f"in replica {index} of {count} on {devices.labels[index]}")
            raise

    if mode == "inline" or count == 1:
        return [call(index) for index in range(count)]
    enter = _thread_state(devices.home.type)

    def call_in_thread(index: int) -> Any:
        with enter():
            return call(index)

    if mode == "serial":
        return [_pool(count).submit(call_in_thread, index).result() for index in range(count)]
    futures = [_pool(count).submit(call_in_thread, index) for index in range(count)]
    return [future.result() for future in futures]


@cache
def _pool(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="dphybrid-replica")


def _thread_state(kind: str) -> Callable[[], ExitStack]:
    """Return a function that enters the caller's thread-local torch state: grad and inference mode, autocast with its number format."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    kinds = {kind, "cpu"}
    casts = [(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k), torch.is_autocast_cache_enabled()) for k in kinds]

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
def _as_replica(index: int, count: int) -> Iterator[None]:
    before = current_replica()
    _local.place = (index, count)
    try:
        yield
    finally:
        _local.place = before


def current_replica() -> tuple[int, int]:
    """Return (index, number of replicas) of the replica that is computing in this thread; (0, 1) outside of any."""
    return vars(_local).get("place", (0, 1))


@contextmanager
def random_streams(kind: Randomness, device: torch.device, count: int) -> Iterator[Callable[[int], AbstractContextManager[Any]]]:
    """Give replicas that share a generator streams of their own; yields the `around` of `parallel_apply`.

    shared: one stream runs through all replicas. same: every replica starts alike, as GPUs seeded alike do. independent: every replica has
    a stream of its own, drawn from the common one. Not for `threads`, where the order of draws is chance.
    """

    def get() -> Tensor:
        return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()

    def put(state: Tensor) -> None:
        if device.type == "cuda":
            torch.cuda.set_rng_state(state, device)
        else:
            torch.set_rng_state(state)

    def reseed(seed: int) -> None:
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        else:
            torch.default_generator.manual_seed(seed)

    start = get() if kind == "same" else None
    seeds = torch.randint(2**62, (count,)).tolist() if kind == "independent" else []
    after = get()

    @contextmanager
    def around(index: int) -> Iterator[None]:
        if start is not None:
            put(start)
        elif seeds:
            reseed(seeds[index])
        yield

    yield around
    if seeds:
        put(after)


def differing_replicas(replicas: Sequence[nn.Module]) -> list[str]:
    """Return the names of parameters that are not equal, bit for bit, in all replicas: none, unless something wrote to one of them."""
    names: list[str] = []
    for copies in zip(*(replica.named_modules() for replica in replicas), strict=True):
        values = [vars(copy).get("_former_parameters", {}) for _, copy in copies]
        for key, first in values[0].items():
            if any(not torch.equal(first, other[key].to(first.device)) for other in values[1:]):
                names.append(f"{copies[0][0]}.{key}".lstrip("."))
    return names


def gather(outputs: Sequence[Any], target: torch.device | str, dim: int = 0, sizes: Sequence[int] | None = None) -> Any:
    """Join the replicas' outputs on `dim`, on the device `target`. Raises UserError for what cannot be joined, with its place.

    sizes: the samples of each replica's share. With it, a tensor must have the same whole number of rows for each sample: one that has its
    batch elsewhere, such as an RNN's state (layers, B, H), is refused instead of joined on the wrong dim.
    """
    return _gather(list(outputs), torch.device(target), dim, "output", sizes)


def _gather(outputs: list[Any], target: torch.device, dim: int, path: str, sizes: Sequence[int] | None) -> Any:
    first = outputs[0]
    if len({type(output) for output in outputs}) > 1:
        raise UserError(
            f"{path}: replicas returned different types, {', '.join(type(o).__name__ for o in outputs)}; return the same from each"
        )
    if isinstance(first, Tensor):
        if any(output.dim() <= dim for output in outputs):
            raise UserError(
                f"{path}: a {first.dim()}-dim tensor has no dim {dim} to join on; return one value a sample, such as a loss of shape (B,)"
            )
        if sizes is not None:
            _check_rows(outputs, dim, path, sizes)
        rests = [(*output.shape[:dim], *output.shape[dim + 1 :]) for output in outputs]
        if len(set(rests)) > 1:
            shapes = ", ".join(str(tuple(output.shape)) for output in outputs)
            raise UserError(
                f"{path}: shapes {shapes} cannot be joined on dim {dim}; return tensors with the batch on dim {dim} and the rest equal"
            )
        return torch.cat([output.to(target) for output in outputs], dim)
    if first is None:
        return None
    if isinstance(first, tuple | list | dict) or _is_dataclass(first):
        if isinstance(first, dict) and any(output.keys() != first.keys() for output in outputs):
            raise UserError(f"{path}: replicas returned dicts with different keys; return the same keys from each")
        columns = [_items(output) for output in outputs]
        if len({len(column) for column in columns}) > 1:
            raise UserError(
                f"{path}: replicas returned sequences of {[len(c) for c in columns]} items; return the same number from each"
            )
        names = list(first) if isinstance(first, dict) else range(len(columns[0]))
        joined = [
            _gather(list(parts), target, dim, f"{path}[{name!r}]", sizes)
            for name, parts in zip(names, zip(*columns, strict=True), strict=True)
        ]
        return _rebuild(first, joined)
    raise UserError(
        f"{path}: a {type(first).__name__} cannot be joined over replicas; return tensors with the batch on dim {dim}"
    )


def _check_rows(outputs: list[Tensor], dim: int, path: str, sizes: Sequence[int]) -> None:
    per_sample, rest = divmod(outputs[0].shape[dim], sizes[0])
    for output, size in zip(outputs, sizes, strict=True):
        if rest or output.shape[dim] != per_sample * size:
            raise UserError(
                f"{path}: size {tuple(output.shape)} for a share of {size} samples; return the batch on dim {dim}, "
                "with the same number of rows for each sample (transpose an RNN's state, expand a value of the whole share)"
            )


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Return the nest with `function` applied to every tensor."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Whole):
        return map_tensors(function, value.value)
    if isinstance(value, Parts):
        raise UserError(f"{len(value.tensors)} parts for a region with one device; place the table on this region's devices")
    if isinstance(value, tuple | list | dict) or _is_dataclass(value):
        return _rebuild(value, [map_tensors(function, item) for item in _items(value)])
    return value


def batch_rows(args: Any, kwargs: Any, dim: int) -> int | None:
    """Return the rows on `dim` that all tensors share, or None when there is no tensor.

    Raises UserError that lists the sizes when they disagree, instead of losing the rows beyond the smallest.
    """
    sizes: dict[str, int | None] = {}
    for index, value in enumerate(args):
        _collect(value, dim, f"input {index}", sizes)
    for name, value in kwargs.items():
        _collect(value, dim, name, sizes)
    if not sizes:
        return None
    found = set(sizes.values())
    if len(found) > 1 or None in found:
        listed = ", ".join(f"{path}: {'0-dim' if size is None else size}" for path, size in sizes.items())
        raise UserError(
            f"tensors disagree on their rows (dim {dim}): {listed}; give each one row a sample, or wrap what all replicas share in Whole(...)"
        )
    return found.pop()


def _collect(value: Any, dim: int, path: str, sizes: dict[str, int | None]) -> None:
    if isinstance(value, Tensor):
        sizes[path] = value.shape[dim] if value.dim() > dim else None
    elif isinstance(value, Parts):
        sizes[path] = sum(part.shape[dim] for part in value.tensors)
    elif isinstance(value, tuple | list | dict) or _is_dataclass(value):
        names = list(value) if isinstance(value, dict) else range(len(_items(value)))
        for name, item in zip(names, _items(value), strict=True):
            _collect(item, dim, f"{path}[{name!r}]", sizes)


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type | Whole | Parts)


def _items(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, tuple | list):
        return list(value)
    return [vars(value)[field.name] for field in dataclasses.fields(value)]


def _rebuild(like: Any, items: list[Any]) -> Any:
    if isinstance(like, dict):
        return type(like)(zip(like, items, strict=True))
    if isinstance(like, tuple):
        return type(like)(*items) if hasattr(like, "_fields") else type(like)(items)
    if isinstance(like, list):
        return type(like)(items)
    return dataclasses.replace(like, **{field.name: item for field, item in zip(dataclasses.fields(like), items, strict=True)})
