"""`replicate`, like torch's but also for virtual devices: makes one copy of a module per device; backward
sums their gradients."""

import functools
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parallel import comm
from torch.nn.parallel._functions import ReduceAddCoalesced

from dphybrid.parallel.devices import resolve_devices
from dphybrid.parallel.scattering import DeviceNames, SharedTable, shared_tables
from dphybrid.util.errors import UserError


class _Broadcast(torch.autograd.Function):
    """Gives all parameters to all replicas in one autograd node. Replica 0 gets the originals, the others
    copies; backward sums gradients in device order."""

    @staticmethod
    def forward(ctx: Any, devices: tuple[torch.device, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.devices = devices
        ctx.set_materialize_grads(False)  # a parameter that no replica used has no gradient, as unsplit
        copies = [*tensors, *_copies(tensors, devices)]
        frozen = [i for i, needed in enumerate(ctx.needs_input_grad[1:]) if not needed]
        ctx.mark_non_differentiable(
            *(copies[r * len(tensors) + i] for i in frozen for r in range(len(devices)))
        )
        return tuple(copies)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        home, count = ctx.devices[0], len(grads) // len(ctx.devices)
        used = [[grad for grad in grads[i::count] if grad is not None] for i in range(count)]
        sums: dict[int, Tensor | None] = {}
        if distinct_gpus(ctx.devices):
            full = [i for i, of in enumerate(used) if len(of) == len(ctx.devices)]
            by_replica = [used[i][replica] for replica in range(len(ctx.devices)) for i in full]
            if full:
                sums |= zip(full, ReduceAddCoalesced.apply(home.index, len(full), *by_replica), strict=True)
        return None, *(sums[i] if i in sums else _sum(used[i], home) for i in range(count))


def _sum(grads: list[Tensor], home: torch.device) -> Tensor | None:
    if len(grads) < 2:
        return grads[0].to(home) if grads else None
    parts = [grad.to(home) for grad in grads]
    if len({part.is_sparse for part in parts}) > 1:  # nn.Embedding(sparse=True), also used as a whole
        parts = [part.to_dense() if part.is_sparse else part for part in parts]
    # Not added in place: a gradient of higher order may still need the first sum.
    return functools.reduce(torch.add, parts)


def _copies(tensors: Sequence[Tensor], devices: tuple[torch.device, ...]) -> list[Tensor]:
    """Return copies without a graph of the tensors, first all for devices[1], then all for devices[2], ..."""
    if distinct_gpus(devices) and tensors and not any(tensor.is_complex() for tensor in tensors):
        # A few large messages instead of one for each parameter.
        sent = comm.broadcast_coalesced([t.detach() for t in tensors], list(devices))
        return [copy for of_place in sent[1:] for copy in of_place]
    return [tensor.detach().to(device, copy=True) for device in devices[1:] for tensor in tensors]


def distinct_gpus(devices: tuple[torch.device, ...]) -> bool:
    """Return whether each replica has its own GPU."""
    return devices[0].type == "cuda" and len(set(devices)) == len(devices) > 1


def replicate(module: nn.Module, devices: DeviceNames, detach: bool = False) -> list[nn.Module]:
    """Return one replica of `module` per device. The replicas' gradients are added up in the module's
    parameters.

    detach: without gradients. Replica 0 shares storage with the module; changes of buffers in the other
    replicas are lost. Raises UserError for modules that cannot be replicated, see `refuse_unsuitable`.
    """
    refuse_unsuitable(module)
    copied, tables = copied_and_shared(module)
    return replicate_modules(copied, resolve_devices(devices).replicas, detach, tables)


def copied_and_shared(module: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return the parts of a module, itself first, that each replica has a copy of, and its tables, which all
    replicas share."""
    shared = list(shared_tables(module).values())
    of_tables = {id(part) for table in shared for part in table.modules()}
    return [part for part in module.modules() if id(part) not in of_tables], shared


def replicate_modules(
    modules: list[nn.Module],
    devices: tuple[torch.device, ...],
    detach: bool,
    tables: Sequence[nn.Module] = (),
) -> list[nn.Module]:
    """Return replicas of modules[0]. modules, tables: `copied_and_shared` of it."""
    # Each tensor once: a weight that two layers share must stay shared in every replica.
    shared: dict[int, Tensor] = {
        id(p): p for module in modules for p in module._parameters.values() if p is not None
    }
    buffers = {id(b): b for module in modules for b in module._buffers.values() if b is not None}
    if not detach:  # a buffer that requires a gradient gets it from every replica, as a parameter does
        shared |= {key: buffer for key, buffer in buffers.items() if buffer.requires_grad}
    tensors, rest = list(shared.values()), [b for key, b in buffers.items() if key not in shared]
    if detach or not tensors:
        flat = [*tensors, *_copies(tensors, devices)]
    else:
        flat = list(_Broadcast.apply(devices, *tensors))
    flat_rest = [*rest, *_copies(rest, devices)]
    keys, count, of_rest = [id(t) for t in (*tensors, *rest)], len(tensors), len(rest)
    replicas = []
    for j in range(len(devices)):
        own = flat[j * count : (j + 1) * count] + flat_rest[j * of_rest : (j + 1) * of_rest]
        proxies = {id(table): cast(SharedTable, table).for_replica(j) for table in tables}
        replicas.append(_replica(modules, proxies, dict(zip(keys, own, strict=True))))
    return replicas


def _replica(modules: list[nn.Module], tables: dict[int, nn.Module], tensors: dict[int, Tensor]) -> nn.Module:
    """Return a replica built like torch's: shallow copies of the modules, with parameters as plain tensor
    attributes. Unlike torch's, `parameters()` returns them. tables, tensors: id of an original -> the
    replica's."""
    copies: dict[int, nn.Module] = dict(tables)
    for module in modules:
        kind = type(module)
        # torch's hook; RNNs override it.
        if kind._replicate_for_data_parallel is not nn.Module._replicate_for_data_parallel:
            copy = module._replicate_for_data_parallel()
        else:
            copy = kind.__new__(kind)
            vars(copy).update(vars(module), _is_replica=True)
        copies[id(module)] = copy
    for module in modules:
        # Written to the module's dicts: nn.Module.__setattr__ took half of the time of making a replica.
        attributes = vars(copies[id(module)])
        former = attributes["_former_parameters"] = {}
        for key, parameter in module._parameters.items():
            if parameter is not None:
                tensor = former[key] = tensors[id(parameter)]
                if tensor is not parameter:
                    attributes[key] = tensor
        # Names whose parameter is None stay in the dict: layers without a bias look them up.
        attributes["_parameters"] = dict.fromkeys(module._parameters) | former
        for name, of in (("_modules", copies), ("_buffers", tensors)):
            mine = attributes[name]
            attributes[name] = {key: None if part is None else of[id(part)] for key, part in mine.items()}
    return copies[id(modules[0])]


def unsuitable(part: nn.Module) -> tuple[str, str] | None:
    """Return (why replicas of this module would not work, the remedy), or None if they would."""
    if isinstance(part, nn.DataParallel):
        return "is data-parallel itself", "wrap one region, not a region within a region"
    # A compiled module forwards attributes to the one it wraps: torch's replicate would empty the original.
    if type(part).__name__ == "OptimizedModule" or part._compiled_call_impl is not None:
        why = "is compiled, and replicas would run the original's code"
        return why, "compile outside or not at all"
    if isinstance(part, torch.jit.ScriptModule):
        why = "is scripted or traced, and its parameters cannot be replaced by a replica's"
        return why, "wrap the module that it was made from"
    if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
        why = "has max_norm, which changes its weight in every forward, and replicas lose that"
        return why, "look up outside of the region, or normalise the rows that it returns"
    if isinstance(part, nn.SyncBatchNorm):
        why = "is a SyncBatchNorm, which synchronises processes, not replicas"
        return why, "use GroupNorm or LayerNorm, or BatchNorm, which normalises each share by itself"
    if isinstance(part, LazyModuleMixin) and part.has_uninitialized_params():
        return "has parameters without a size yet", "run it once on a sample first"
    return None


def refuse_unsuitable(module: nn.Module, home: torch.device | None = None) -> None:
    """Raise UserError for a part that is `unsuitable`. home: where all parameters and buffers must be."""
    if isinstance(cast(object, module), SharedTable):
        raise UserError(
            "DataParallel: the module is a table; wrap the blocks, and give them region.rows(table, ids)"
        )
    tables = tuple(f"{name}." for name in shared_tables(module))
    for name, part in module.named_modules():
        if f"{name}.".startswith(tables):  # stays in host memory
            continue
        which = f"module {name!r}" if name else "the module"
        if reason := unsuitable(part):
            raise UserError(f"DataParallel: {which} {reason[0]}; {reason[1]}")
        for key, tensor in (*part._parameters.items(), *part._buffers.items()):
            if home is not None and tensor is not None and tensor.device != home:
                raise UserError(
                    f"DataParallel: {key} of {which} is on {tensor.device}, and parameters live on {home}; "
                    "move the module there"
                )
