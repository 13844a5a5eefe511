"""What of a module will differ or break when it runs as replicas, each finding with its place and a remedy.

`check_module` looks at the module: most of what it lists shows only on two or more distinct GPUs.
`compare_split` computes a batch unsplit and split: which module computes across the batch, and so cannot be
right on several devices.
"""

import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dphybrid.parallel.data_parallel import DataParallel, find_data_parallel
from dphybrid.parallel.dropout import Dropout
from dphybrid.parallel.nests import batch_rows, joined, map_tensors, reachable, tensors_of
from dphybrid.parallel.probing import own_random_state
from dphybrid.parallel.replication import OF_TORCH, throwaway, unsuitable
from dphybrid.parallel.scattering import split
from dphybrid.parallel.splits import split_sizes
from dphybrid.util.errors import UserError


@dataclass(frozen=True)
class Finding:
    """breaks: it fails, or computes something else than it should; otherwise results differ from those of one
    device.

    module: dotted name in the checked module. place: its class, its attribute, or what of it differs.
    """

    breaks: bool
    module: str
    place: str
    problem: str
    remedy: str

    def text(self) -> str:
        """Return the finding as two lines."""
        return (
            f"{'BREAKS ' if self.breaks else 'differs'} {self.module or '(top)'} [{self.place}]: "
            f"{self.problem}\n        remedy: {self.remedy}"
        )


def check_module(module: nn.Module) -> list[Finding]:
    """Return what data parallelism changes in `module`, in the order of its submodules."""
    found: list[Finding] = []
    for name, part in module.named_modules():
        found += [Finding(breaks, name, *words) for breaks, *words in (*_kind(part), *_attributes(part))]
    return found + _tied(module)


_Words = tuple[bool, str, str, str]


def _kind(part: nn.Module) -> Iterator[_Words]:
    kind = type(part).__name__
    if found := unsuitable(part):
        yield True, kind, *found
    if isinstance(part, _BatchNorm) and not isinstance(part, nn.SyncBatchNorm):
        yield (
            False,
            kind,
            "each device normalises its own rows, and only the first device's running statistics are kept",
            "use GroupNorm or LayerNorm, or batches large enough for each device",
        )
    if isinstance(part, nn.RNNBase | nn.MultiheadAttention) and not part.batch_first:
        yield True, kind, "reads the batch on dim 1, and the split is on dim 0", "set batch_first=True"
    if isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0 and not isinstance(part, Dropout):
        why = "masks differ from those of one device"
        yield False, kind, why, "on the CPU, dphybrid.parallel.Dropout draws the same; else nothing"


def _attributes(part: nn.Module) -> Iterator[_Words]:
    for name, value in vars(part).items():
        if name in OF_TORCH or name == "_all_weights":
            continue
        held = list(reachable(value, but_not_in=(nn.Module, Tensor)))
        if any(isinstance(each, nn.Module) for each in held):
            if any(isinstance(each, types.MethodType | types.FunctionType | partial) for each in held):
                why = "a stored function or bound method keeps the first device's module"
                remedy = "look the method up when it is called"
            else:
                why = "a module outside the module tree is not replicated"
                remedy = "put it into an nn.ModuleList or nn.ModuleDict"
        elif any(isinstance(each, Tensor) for each in held):
            why = "a tensor that is not registered stays on the first device"
            remedy = "make it a buffer with register_buffer"
        else:
            continue
        yield True, f"self.{name}", why, remedy


def _tied(module: nn.Module) -> list[Finding]:
    """A table shared with another layer must lie on the GPU, so it cannot be a host table."""
    users: dict[int, list[tuple[str, nn.Module]]] = {}
    for name, part in module.named_modules():
        for parameter in part._parameters.values():
            if parameter is not None:
                users.setdefault(id(parameter), []).append((name, part))
    return [
        Finding(
            False,
            names[0][0],
            "weight",
            f"a table shared with {', '.join(name for name, _ in names[1:])} is copied to every device in "
            "each step",
            "give the output layer weights of its own and make the table a HostEmbedding",
        )
        for names in users.values()
        if len(names) > 1 and any(isinstance(part, nn.Embedding | nn.EmbeddingBag) for _, part in names)
    ]


_Event = tuple[str, str, list[Tensor]]
"""Who is to blame when these tensors differ, what they are, and they themselves."""


@torch.no_grad()
def compare_split(
    model: nn.Module, *args: object, rtol: float = 1e-3, atol: float = 1e-4, **kwargs: object
) -> list[Finding]:
    """Call `model` on one batch in eval mode and compare each data-parallel block in it, unsplit against
    split; return where each that differs does so first.

    model: a `DataParallel` or a module with some inside; its parameters, buffers, modes and all generators
    are left as they were. Each block is computed as often as it has shares and once more, on copies of its
    parameters, on its first device, without gradients: the memory of a whole batch's forward there. rtol,
    atol: tolerances of float32 as in `torch.testing.assert_close`; a float64 block is held to 1e-9. A block
    with one device is compared in two shares. Empty when nothing differs or nothing is split.
    """
    calls: dict[str, tuple[tuple[object, ...], dict[str, object]]] = {}
    blocks = find_data_parallel(model)
    homes = [block.devices.home for block in blocks.values()]
    with own_random_state(*homes), _evaluating(model), ExitStack() as hooks:
        for name, block in blocks.items():

            def keep(
                _: nn.Module, given: tuple[object, ...], named: dict[str, object], name: str = name
            ) -> None:
                calls.setdefault(name, (given, named))

            # what a block is given depends on the model around it: one call of the whole model tells it
            hooks.callback(block.register_forward_pre_hook(keep, with_kwargs=True).remove)
            hooks.enter_context(block.off_the_record())
        model(*args, **kwargs)
        found = [_compare_block(name, blocks[name], *call, rtol, atol) for name, call in calls.items()]
    return [finding for finding in found if finding is not None]


def refuse_split_differences(model: nn.Module, *args: object, **kwargs: Any) -> None:
    """Raise UserError with what `compare_split` finds on this batch, if anything."""
    if found := compare_split(model, *args, **kwargs):
        told = "\n".join(one.text() for one in found)
        raise UserError(f"the first batch is not what it is when split:\n{told}")


def _compare_block(
    name: str,
    block: DataParallel,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    rtol: float,
    atol: float,
) -> Finding | None:
    """Compare one block's call unsplit and split, in the mode that it is in; return where it first differs,
    or None."""
    home = block.devices.home
    args, kwargs = joined((args, block.with_wholes(kwargs)), home, block.dim)
    rows = max(batch_rows(args, kwargs, block.dim).values(), default=0)
    if rows < 2:
        return None
    sizes = block.sizes(rows) if len(block.devices) > 1 else split_sizes(rows, 2)
    copy = throwaway(block.module, home)
    before = _state(copy)
    whole = _events(copy, *map_tensors(lambda t: t.to(home, copy=True), (args, kwargs)))
    after = _state(copy)
    shares = [
        _events(throwaway(block.module, home), *share)
        for share in split((args, kwargs), [home] * len(sizes), sizes, block.dim)
    ]
    # a share may have called fewer parts, or others
    of_shares = zip(*(share + [("", "", [])] * (len(whole) - len(share)) for share in shares), strict=False)
    for (module, what, tensors), parts in zip(whole, of_shares, strict=True):
        largest = float("inf")
        if all(part[:2] == (module, what) and len(part[2]) == len(tensors) for part in parts):
            shared = zip(*(part[2] for part in parts), strict=True)
            apart = [_difference(t, list(of), rtol, atol) for t, of in zip(tensors, shared, strict=True)]
            largest = max(apart, default=0.0)
        if largest > 0:
            problem = (
                f"differs by {largest:.3g} between the batch as a whole and in shares of "
                f"{','.join(map(str, sizes))} rows: it computes across the batch, or draws at random"
            )
            remedy = "compute that outside of the data-parallel block"
            return Finding(True, _dotted(name, module), what, problem, remedy)
    for (module, what), (held, version) in after.items():
        old, old_version = before.get((module, what), (None, 0))
        if held is not old or version != old_version:
            problem = "forward writes it, which is lost on all replicas but the first"
            remedy = "return the value, or keep it outside of the data-parallel block"
            return Finding(True, _dotted(name, module), what, problem, remedy)
    return None


def _dotted(block: str, module: str) -> str:
    return ".".join(part for part in (block, module) if part) or "the model"


def _state(module: nn.Module) -> dict[tuple[str, str], tuple[object, int]]:
    """Return the value of each attribute and buffer of a module's parts, and how often it was changed in
    place."""
    return {
        (name, f"self.{key}"): (
            held,
            held._version if isinstance(held, Tensor) and not held.is_inference() else 0,
        )
        for name, part in module.named_modules()
        if not part._forward_pre_hooks  # those of torch's own, such as weight_norm, write attributes
        for key, held in (vars(part) | part._buffers).items()
        if key not in OF_TORCH and key not in part._parameters
    }


def _events(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> list[_Event]:
    """Run a throwaway module; return what went into and came out of each of its parts, in the order in which
    it happened."""
    names = {id(part): name for name, part in module.named_modules()}
    stack: list[str] = [""]
    events: list[_Event] = []

    def copies(value: object) -> list[Tensor]:
        return [tensor.detach().clone() for _, tensor in tensors_of(value)]

    def enter(part: nn.Module, given: object, named: object) -> None:
        name = names.get(id(part), "")
        if part is not module:  # what a part gets, the part around it has computed
            events.append((stack[-1], f"what it gives to {name}", copies((given, named))))
        stack.append(name)

    def leave(*call: object) -> None:
        events.append((stack.pop(), "its output", copies(call[-1])))

    with ExitStack() as hooks:
        for part in module.modules():
            # the original's, which would keep an entry
            part._forward_pre_hooks_with_kwargs = part._forward_pre_hooks_with_kwargs.copy()
            hooks.callback(part.register_forward_pre_hook(enter, with_kwargs=True).remove)
            hooks.callback(part.register_forward_hook(leave).remove)
        module(*args, **kwargs)
    return events


def _difference(whole: Tensor, parts: list[Tensor], rtol: float, atol: float) -> float:
    """Return the largest absolute difference beyond the tolerances, 0 for none.

    Inside of a block the batch may be on any dim, or flattened: the shares are joined where their sizes add
    up to the whole's, and a tensor that is the same in all shares, such as a mask, is compared as it is.
    """
    if whole.is_nested or whole.layout is not torch.strided:
        return 0.0
    if whole.is_floating_point() and whole.dtype == torch.float64:
        # what float64 rounds is far below these
        rtol, atol = min(rtol, 1e-9), min(atol, 1e-9)
    found = [max(_distance(whole, part, rtol, atol) for part in parts)]
    for axis in range(whole.dim()):
        rests = {(*part.shape[:axis], ..., *part.shape[axis + 1 :]) for part in (whole, *parts)}
        if len(rests) == 1:
            found.append(_distance(whole, torch.cat(parts, axis), rtol, atol))
    return min(found)


def _distance(one: Tensor, two: Tensor, rtol: float, atol: float) -> float:
    if one.shape != two.shape:
        return float("inf")
    if not one.numel() or torch.allclose(one.to(two.dtype), two, rtol=rtol, atol=atol, equal_nan=True):
        return 0.0
    apart = (one.to(torch.complex128 if one.is_complex() else torch.float64) - two).abs()
    largest = float(apart[apart.isfinite()].max()) if bool(apart.isfinite().any()) else 0.0
    return largest or float("inf")


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
