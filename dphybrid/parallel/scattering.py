"""Sends each replica its share of the inputs, and connects tables in host memory to a region.

`scatter` is like torch.nn.parallel.scatter, but copies also if devices share hardware. `RowSource` is the
interface to tables: anything with its two methods is a table, so `dphybrid.parallel` and
`dphybrid.embedding` do not import each other.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from dphybrid.parallel.devices import Devices, resolve_devices
from dphybrid.parallel.nests import Parts, Whole, batch_rows, flatten, map_leaves, map_tensors
from dphybrid.parallel.splits import shares
from dphybrid.util.errors import UserError, type_text

DeviceNames = str | Devices | Sequence[int | str | torch.device]


def scatter(inputs: object, devices: DeviceNames, dim: int = 0) -> list[Any]:
    """Split every tensor of a nest (pytrees, dataclasses) on `dim`; return one nest per used device.

    Every device gets all `Whole` values and everything that is not a tensor. Raises UserError for tensors
    with different numbers of rows, and for unknown containers of tensors.
    """
    return [share for (share,) in scatter_kwargs((inputs,), None, devices, dim)[0]]


def scatter_kwargs(
    inputs: tuple[object, ...], kwargs: dict[str, object] | None, devices: DeviceNames, dim: int = 0
) -> tuple[tuple[Any, ...], tuple[dict[str, object], ...]]:
    """Split positional and keyword arguments; return (tuples, dicts), one of each per used device, like
    torch's function of this name."""
    arguments, replicas = (tuple(inputs), dict(kwargs or {})), resolve_devices(devices).replicas
    rows = batch_rows(*arguments, dim)
    sizes = [0] * len(replicas) if rows is None else shares(len(replicas), rows)
    # Only used devices: torch calls idle ones too, without their tensors (pytorch#31460).
    parts = split(arguments, replicas[: len(sizes)], sizes, dim)
    return tuple(share[0] for share in parts), tuple(share[1] for share in parts)


def split(value: object, devices: Sequence[torch.device], sizes: list[int], dim: int) -> list[Any]:
    """Split a value that `batch_rows` has checked; return one value per device. sizes: rows of each device. A
    tensor that is passed twice stays one tensor in each share."""
    of_value, rebuilt = flatten(value)
    unique = {id(leaf): leaf for leaf in of_value}
    parts_of = {key: _split_leaf(leaf, devices, sizes, dim) for key, leaf in unique.items()}
    return [rebuilt([parts_of[id(leaf)][j] for leaf in of_value]) for j in range(len(devices))]


def _split_leaf(leaf: Any, devices: Sequence[torch.device], sizes: list[int], dim: int) -> list[Any]:
    if isinstance(leaf, Tensor):
        sections = leaf.split(sizes, dim) if leaf.dim() else [leaf] * len(devices)
        # Copied even on the same device: an in-place first operation must not change the caller's batch.
        return [
            part.to(device, non_blocking=True, copy=True)
            for part, device in zip(sections, devices, strict=True)
        ]
    if isinstance(leaf, Whole):
        copies = [partial(Tensor.to, device=device, non_blocking=True, copy=True) for device in devices]
        value = map_leaves(
            lambda part: part.joined(devices[0], dim) if isinstance(part, Parts) else part, leaf.value
        )
        return [map_tensors(copy, value) for copy in copies]
    if isinstance(leaf, Parts):
        rows = [part.shape[dim] for part in leaf.tensors]
        if rows != sizes:
            raise UserError(
                f"parts of {rows} rows in a batch that is split into {sizes}; split them as the region "
                "does, with region.sizes(rows)"
            )
        return list(leaf.tensors)
    return [leaf] * len(devices)


@runtime_checkable
class RowSource(Protocol):
    """A table that sends rows to the replicas of a region, such as `HostEmbedding`."""

    def place_on(self, devices: Sequence[torch.device], sizes_of: Callable[[int], Sequence[int]], /) -> None:
        """Set the devices that `replica_rows` sends rows to. sizes_of: function from the rows of a batch to
        the rows of each share."""
        ...

    def replica_rows(self, ids: Tensor, /) -> list[Tensor]:
        """Return, for each used replica, the rows of its share of `ids` on its device."""
        ...


@runtime_checkable
class SharedTable(RowSource, Protocol):
    """A table that may be inside a region: replicas have no copy of it, but all look up in the same one."""

    def for_replica(self, index: int, /) -> nn.Module:
        """Return what replica `index` has in place of the table."""
        ...

    def shared_copy(self) -> nn.Module:
        """Return a copy that has the same rows, and may be placed on other devices."""
        ...


def shared_tables(module: nn.Module) -> dict[str, nn.Module]:
    """Return the tables inside a module by name."""
    parts = module.named_modules()
    return {name: part for name, part in parts if isinstance(cast(object, part), SharedTable)}


class _Region(Protocol):
    """The attributes of a `DataParallel` that decide where rows go."""

    devices: Devices
    dim: int


# Weak on both sides, so that this dict keeps neither tables nor regions alive.
_regions: "weakref.WeakKeyDictionary[RowSource, weakref.ref[_Region]]" = weakref.WeakKeyDictionary()


def connect(table: RowSource, region: _Region) -> None:
    """Make `table` send its rows to the replicas of `region`; only the first call does something. Raises
    UserError for a table that sends rows to another region on other devices."""
    if not hasattr(table, "place_on"):  # nn.Embedding, or the arguments in the other order
        raise UserError(
            f"DataParallel.rows: {type_text(table)} is not a table; give a HostEmbedding, or call "
            "the region with embedding(ids)"
        )
    reference = _regions.get(table)
    before = None if reference is None else reference()
    if before is region:
        return
    if region.dim != 0:
        raise UserError(
            f"DataParallel.rows: rows are split on dim 0, and this region splits on dim {region.dim}; use "
            "dim=0, or look up with table(ids)"
        )
    if before is None:
        table.place_on(region.devices.replicas, partial(shares, len(region.devices)))
        _regions[table] = weakref.ref(region)
    elif before.devices.replicas != region.devices.replicas:
        raise UserError(
            f"DataParallel.rows: the table's rows go to {before.devices.text} already, for another region, "
            f"and this one is on {region.devices.text}; give both the same devices, or look up with "
            "table(ids) for one of them"
        )
