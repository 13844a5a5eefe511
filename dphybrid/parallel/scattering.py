"""scatter: the rows of a batch to the replicas' devices. Like torch.nn.parallel.scatter, but copies also
where devices share hardware."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dphybrid.parallel.devices import Devices, resolve_devices
from dphybrid.parallel.nests import Parts, Whole, batch_rows, is_nest, items_of, map_tensors, rebuild
from dphybrid.parallel.splits import split_sizes
from dphybrid.util.errors import UserError

Places = str | Devices | Sequence[int | str | torch.device]


def scatter(inputs: object, devices: Places, dim: int = 0, sizes: Sequence[int] | None = None) -> list[Any]:
    """Split every tensor of a nest (tuples, lists, dicts, namedtuples, dataclasses) on `dim`; return one nest
    a used device.

    sizes: rows of each used device; None: those of torch.chunk. `Whole` values and everything that is no
    tensor go to each device. Raises UserError for tensors that disagree on their rows and for what carries
    tensors and is not a known container.
    """
    devices = resolve_devices(devices)
    if sizes is None:
        sizes = _sizes((inputs,), {}, len(devices), dim)
    return split(inputs, devices.replicas[: len(sizes)], list(sizes), dim)


def scatter_kwargs(
    inputs: tuple[object, ...], kwargs: dict[str, object] | None, devices: Places, dim: int = 0
) -> tuple[tuple[object, ...], tuple[dict[str, object], ...]]:
    """Split positional and keyword arguments alike; return one tuple and one dict a used device, as torch's
    function of this name does."""
    devices = resolve_devices(devices)
    sizes = _sizes(inputs, kwargs or {}, len(devices), dim)
    places = devices.replicas[: len(sizes)]
    shares = split((tuple(inputs), dict(kwargs or {})), places, sizes, dim)
    return tuple(share[0] for share in shares), tuple(share[1] for share in shares)


def _sizes(args: tuple[object, ...], kwargs: dict[str, object], num_devices: int, dim: int) -> list[int]:
    rows = batch_rows(args, kwargs, dim)
    if rows is None:
        return [0] * num_devices
    return split_sizes(rows, num_devices) if rows else [0]


def split(
    value: object,
    places: Sequence[torch.device],
    sizes: list[int],
    dim: int,
    seen: dict[int, list[object]] | None = None,
) -> list[Any]:
    """Split what `batch_rows` has found fit to be split. seen: tensors that were split before; one given
    twice stays one in each share."""
    if isinstance(value, Tensor):
        if seen is not None:
            if id(value) not in seen:
                seen[id(value)] = split(value, places, sizes, dim)
            return seen[id(value)]
        shares = _rows(value, sizes, dim) if value.dim() else [value] * len(places)
        # A copy also where the device is the same: an in-place first operation must not reach the caller's
        # batch.
        return [
            part.to(place, non_blocking=True, copy=True) for part, place in zip(shares, places, strict=True)
        ]
    if isinstance(value, Whole):
        copies = [partial(Tensor.to, device=place, non_blocking=True, copy=True) for place in places]
        return [map_tensors(copy, value.value) for copy in copies]
    if isinstance(value, Parts):
        found = [part.shape[dim] for part in value.tensors]
        if found != sizes:
            raise UserError(
                f"parts of {found} rows in a batch that is split into {sizes}; split them as the region "
                "does, with its `sizes`"
            )
        return list(value.tensors)
    if is_nest(value):
        seen = {} if seen is None else seen
        columns = [split(item, places, sizes, dim, seen) for item in items_of(value)]
        return [rebuild(value, [column[j] for column in columns]) for j in range(len(places))]
    return [value] * len(places)


def _rows(value: Tensor, sizes: list[int], dim: int) -> Sequence[Tensor]:
    if value.layout is not torch.sparse_coo:
        return value.split(sizes, dim)
    starts = [sum(sizes[:j]) for j in range(len(sizes))]
    return [torch.narrow_copy(value, dim, start, size) for start, size in zip(starts, sizes, strict=True)]
