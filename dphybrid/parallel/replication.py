"""replicate: one copy of a module a device, gradients summed on the way back. Like
torch.nn.parallel.replicate, for virtual devices too."""

import copy
import types
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from dphybrid.parallel.devices import resolve_devices
from dphybrid.parallel.nests import PLAIN, is_nest, map_leaves
from dphybrid.parallel.scattering import Places
from dphybrid.util.errors import UserError


def _copy(tensor: Tensor, place: torch.device) -> Tensor:
    """Return a copy of a tensor without its graph. On the tensor's own device the two share memory until one
    is written to."""
    if tensor.device == place:
        try:
            return torch._lazy_clone(tensor.detach())
        except RuntimeError:  # memory that is not torch's own: shared, pinned, numpy's
            pass
    return tensor.detach().to(place, copy=True)


class _Broadcast(torch.autograd.Function):
    """All parameters to all replicas in one node: replica 0 sees the originals, the others copies; gradients
    are summed in device order."""

    @staticmethod
    def forward(ctx: Any, devices: tuple[torch.device, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.count = len(tensors)
        ctx.home = devices[0]
        copies = [*tensors, *(_copy(t, device) for device in devices[1:] for t in tensors)]
        frozen = [i for i, needed in enumerate(ctx.needs_input_grad[1:]) if not needed]
        ctx.mark_non_differentiable(
            *(copies[r * len(tensors) + i] for i in frozen for r in range(len(devices)))
        )
        return tuple(copies)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        sums: list[Tensor | None] = [None]
        for i in range(ctx.count):
            parts = [grad.to(ctx.home) for grad in grads[i :: ctx.count]]
            if len({part.is_sparse for part in parts}) > 1:  # nn.Embedding(sparse=True), also used as a whole
                parts = [part.to_dense() if part.is_sparse else part for part in parts]
            # a replica that did not use a parameter gives zeros, so nobody's gradient is None, as upstream
            total = parts[0] if len(parts) == 1 else parts[0] + parts[1]
            for part in parts[2:]:
                total += part
            sums.append(total)
        return tuple(sums)


def under_functorch() -> bool:
    """Is a transform of torch.func running around this? Its bookkeeping knows neither this module's autograd
    function nor other threads."""
    return torch._C._are_functorch_transforms_active()


def _copies(tensors: Sequence[Tensor], places: tuple[torch.device, ...], detach: bool) -> Sequence[Tensor]:
    """Return the tensors for the first place, copies of them for the second, ..., in one row."""
    if tensors and not detach and not under_functorch():
        return _Broadcast.apply(places, *tensors)
    copy = _copy if detach else partial(Tensor.to, copy=True)
    return (*tensors, *(copy(t, place) for place in places[1:] for t in tensors))


def replicate(module: nn.Module, devices: Places, detach: bool = False) -> list[nn.Module]:
    """Return one replica of `module` a device. Gradients of the replicas add up in the module's parameters.

    detach: without a way back for gradients. Replica 0 shares storage with the module; buffers that the
    others change are lost. Raises UserError for modules that cannot be replicated, see `refuse_unsuitable`.
    """
    refuse_unsuitable(module)
    return replicate_modules(list(module.modules()), resolve_devices(devices).replicas, detach)


def replicate_modules(
    modules: list[nn.Module], places: tuple[torch.device, ...], detach: bool
) -> list[nn.Module]:
    """Return replicas of modules[0], of which `modules` are all the parts."""
    if places[0].type == "cuda" and len(set(places)) == len(places) > 1:
        # GPUs of their own: torch copies all parameters in a few large messages between them
        from torch.nn.parallel import replicate as torch_replicate

        replicas = list(torch_replicate(modules[0], list(places), detach))
        # torch's replicas have no parameters(); modules that ask for them in forward find these
        for part in (part for replica in replicas for part in replica.modules()):
            part._parameters = part._former_parameters | part._parameters  # type: ignore[operator]
        return replicas
    # each once: a weight that two layers share must stay one in every replica
    buffers = {id(b): b for module in modules for b in module._buffers.values() if b is not None}
    # a buffer may carry a graph or want a gradient: its copies then have a way back, as those of parameters
    broadcast = {key: b for key, b in buffers.items() if b.requires_grad and not detach}
    broadcast |= {id(p): p for module in modules for p in module._parameters.values() if p is not None}
    flat, count = _copies(list(broadcast.values()), places, detach), len(broadcast)
    replicas = []
    for j, place in enumerate(places):
        tensors = {
            key: b if j == 0 else _copy(b, place) for key, b in buffers.items() if key not in broadcast
        }
        tensors |= zip(broadcast, flat[j * count : (j + 1) * count], strict=True)
        replicas.append(_replica(modules, tensors))
    return replicas


def throwaway(module: nn.Module, home: torch.device) -> nn.Module:
    """Return a replica on `home` that shares nothing with the module: what it changes is lost, also in lists
    of its own, and the user's hooks do not see it."""
    replica = replicate_modules(list(module.modules()), (home, home), detach=True)[1]
    for part in replica.modules():
        held = vars(part)
        for name, value in held.items():
            if name in _HOOKS:
                held[name] = type(value)(
                    (key, hook) for key, hook in value.items() if type(hook).__module__.startswith("torch.")
                )
            elif name not in OF_TORCH:
                held[name] = _of_its_own(value)
    return replica


OF_TORCH = frozenset(vars(nn.Module())) | {"_former_parameters", "_flat_weights", "_flat_weight_refs"}
"""Attributes of a module that torch keeps for itself."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def _of_its_own(value: object) -> object:
    """Return a copy of what a module holds besides parameters, buffers and modules."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, nn.Module | types.FunctionType | types.MethodType | type) or type(value) in PLAIN:
        return value
    try:
        return map_leaves(_of_its_own, value) if is_nest(value) else copy.deepcopy(value)
    except Exception:  # noqa: BLE001 # what cannot be copied stays shared
        return value


def _replica(modules: list[nn.Module], tensors: dict[int, Tensor]) -> nn.Module:
    """The structure of torch's own replicas, shallow module copies whose parameters are plain tensor
    attributes; `parameters()` finds these too, which torch's replicas have none of. tensors: by the ids of
    the modules' own."""
    copies = {id(module): _shallow(module) for module in modules}
    for module in modules:
        # Into its dicts: nn.Module's way of setting attributes took half of a replica's time.
        held = vars(copies[id(module)])
        former = held["_former_parameters"] = {}
        for key, parameter in module._parameters.items():
            if parameter is not None:
                tensor = former[key] = tensors[id(parameter)]
                if tensor is not parameter:
                    held[key] = tensor
        held["_parameters"] = dict.fromkeys(module._parameters) | former
        held["_modules"] = {k: None if m is None else copies[id(m)] for k, m in module._modules.items()}
        held["_buffers"] = {k: None if b is None else tensors[id(b)] for k, b in module._buffers.items()}
    return copies[id(modules[0])]


def _shallow(module: nn.Module) -> nn.Module:
    """Return a copy of one module whose parts are still to be replaced."""
    kind = type(module)
    if kind._replicate_for_data_parallel is not nn.Module._replicate_for_data_parallel:  # RNNs have their own
        return module._replicate_for_data_parallel()
    replica: nn.Module = kind.__new__(kind)
    vars(replica).update(vars(module), _is_replica=True)
    return replica


def unsuitable(part: nn.Module) -> tuple[str, str] | None:
    """Return (why replicas would not run this part right, the remedy), or None."""
    if isinstance(part, nn.DataParallel):
        return "is data-parallel itself", "wrap one region, not a region within a region"
    # such a module hands attributes on to the one that it wraps: torch's replicate would empty the original
    if type(part).__name__ == "OptimizedModule" or part._compiled_call_impl is not None:
        why = "is compiled, and replicas would run the original's code"
        return why, "compile outside or not at all"
    if isinstance(part, nn.SyncBatchNorm):
        why = "is a SyncBatchNorm, which synchronises processes, not replicas"
        return why, "use GroupNorm or LayerNorm, or BatchNorm, which normalises each share by itself"
    if isinstance(part, LazyModuleMixin) and part.has_uninitialized_params():
        return "has parameters without a size yet", "run it once on a sample first"
    return None


def refuse_unsuitable(module: nn.Module, home: torch.device | None = None) -> None:
    """Raise UserError for a part that is `unsuitable`. home: where all parameters and buffers must be."""
    for name, part in module.named_modules():
        place = f"module {name!r}" if name else "the module"
        if found := unsuitable(part):
            raise UserError(f"DataParallel: {place} {found[0]}; {found[1]}")
        for key, tensor in (*part._parameters.items(), *part._buffers.items()):
            if home is not None and tensor is not None and tensor.device != home:
                raise UserError(
                    f"DataParallel: {key} of {place} is on {tensor.device}, and parameters live on {home}; "
                    "move the module there"
                )
