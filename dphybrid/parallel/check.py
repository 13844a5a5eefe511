"""Finds what in a module differs or breaks when it runs as replicas; each finding has a place and a remedy.

`check_module` inspects the module; most of what it finds would fail only on two or more real GPUs.
`compare_split` computes a batch unsplit and split, to find modules that compute across the batch and so give
other results on several devices.
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
    """One problem of a module. breaks: it fails or computes something wrong; otherwise results only differ
    from those on one device.

    module: dotted name in the checked module. place: the module's class, its attribute, or its input or
    output that differs.
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
    """Return what data parallelism changes or breaks in `module`, in the order of its submodules."""
    found: list[Finding] = []
    for name, part in module.named_modules():
        found += [
            Finding(breaks, name, *words)
            for breaks, *words in (*_class_findings(part), *_attribute_findings(part))
        ]
    return found + _tied_tables(module)


_Words = tuple[bool, str, str, str]
"""(breaks, place, problem, remedy)."""


def _class_findings(part: nn.Module) -> Iterator[_Words]:
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
        yield True, kind, "expects the batch on dim 1, but the split is on dim 0", "set batch_first=True"
    if isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0 and not isinstance(part, Dropout):
        why = "masks differ from those of one device"
        remedy = "on the CPU, use dphybrid.parallel.Dropout, whose masks are the same; on GPUs there is none"
        yield False, kind, why, remedy


def _attribute_findings(part: nn.Module) -> Iterator[_Words]:
    for name, value in vars(part).items():
        if name in OF_TORCH or name == "_all_weights":  # of RNNs: their parameters' names
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


def _tied_tables(module: nn.Module) -> list[Finding]:
    """Find tables that share their weight with another layer. They must be on the GPU, so they cannot be host
    tables."""
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
"""(module to blame if the tensors differ, what they are, the tensors)."""


@torch.no_grad()
def compare_split(
    model: nn.Module, *args: object, rtol: float = 1e-3, atol: float = 1e-4, **kwargs: object
) -> list[Finding]:
    """Call `model` on one batch in eval mode and compare each data-parallel block in it, unsplit against
    split. Return, for each block that differs, the first place where it does.

    model: a `DataParallel` or a module that contains some; its parameters, buffers, modes and all random
    generators stay as they are. Each block is computed once for the whole batch and once per share, on copies
    of its parameters, on its first device, without gradients; that takes the memory of a whole batch's
    forward there. rtol, atol: tolerances for float32 as in `torch.testing.assert_close`; float64 is held to
    1e-9. A block with one device is compared in two shares. The list is empty if nothing differs or is split.
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

            # A block's inputs come from the model around it, so one call of the whole model collects them.
            hooks.callback(block.register_forward_pre_hook(keep, with_kwargs=True).remove)
            hooks.enter_context(block.off_the_record())
        model(*args, **kwargs)
        found = [_compare_block(name, blocks[name], *call, rtol, atol) for name, call in calls.items()]
    return [finding for finding in found if finding is not None]


def refuse_split_differences(model: nn.Module, *args: object, **kwargs: Any) -> None:
    """Raise UserError with the findings of `compare_split` on this batch, if there are any."""
    if found := compare_split(model, *args, **kwargs):
        findings = "\n".join(finding.text() for finding in found)
        raise UserError(f"the model computes something else when the first batch is split:\n{findings}")


def _compare_block(
    name: str,
    block: DataParallel,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    rtol: float,
    atol: float,
) -> Finding | None:
    """Compare a call of one block, unsplit against split, in its present mode. Return the first difference,
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
    # A share may have called fewer parts of the module, or others: pad, so that the loop finds that too.
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
                f"{','.join(map(str, sizes))} rows: it computes across the batch, or draws random numbers"
            )
            remedy = "compute that outside of the data-parallel block"
            return Finding(True, _dotted(name, module), what, problem, remedy)
    for (module, what), (held, version) in after.items():
        old, old_version = before.get((module, what), (None, 0))
        if held is not old or version != old_version:
            problem = "forward writes it, and all replicas but the first lose what they write"
            remedy = "return the value, or keep it outside of the data-parallel block"
            return Finding(True, _dotted(name, module), what, problem, remedy)
    return None


def _dotted(block: str, module: str) -> str:
    return ".".join(part for part in (block, module) if part) or "the model"


def _state(module: nn.Module) -> dict[tuple[str, str], tuple[object, int]]:
    """Return (value, version) of each attribute and buffer of a module's parts. torch raises a tensor's
    version with each write in place."""
    return {
        (name, f"self.{key}"): (
            held,
            held._version if isinstance(held, Tensor) and not held.is_inference() else 0,
        )
        for name, part in module.named_modules()
        if not part._forward_pre_hooks  # torch's own hooks, such as weight_norm, write attributes
        for key, held in (vars(part) | part._buffers).items()
        if key not in OF_TORCH and key not in part._parameters
    }


def _events(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> list[_Event]:
    """Run a throwaway module; return the inputs and outputs of each of its parts, in the order of the
    calls."""
    names = {id(part): name for name, part in module.named_modules()}
    stack: list[str] = [""]
    events: list[_Event] = []

    def copies(value: object) -> list[Tensor]:
        return [tensor.detach().clone() for _, tensor in tensors_of(value)]

    def enter(part: nn.Module, given: object, named: object) -> None:
        name = names.get(id(part), "")
        if part is not module:  # a part's inputs were computed by the part around it, which is to blame
            events.append((stack[-1], f"its input to {name}", copies((given, named))))
        stack.append(name)

    def leave(*call: object) -> None:
        events.append((stack.pop(), "its output", copies(call[-1])))

    with ExitStack() as hooks:
        for part in module.modules():
            # The throwaway module shares this dict with the original, which would keep an entry of the hook.
            part._forward_pre_hooks_with_kwargs = part._forward_pre_hooks_with_kwargs.copy()
            hooks.callback(part.register_forward_pre_hook(enter, with_kwargs=True).remove)
            hooks.callback(part.register_forward_hook(leave).remove)
        module(*args, **kwargs)
    return events


def _difference(whole: Tensor, parts: list[Tensor], rtol: float, atol: float) -> float:
    """Return the largest absolute difference beyond the tolerances, 0 if there is none.

    Inside of a block the batch may be on any dim, or flattened, so the shares are joined on each dim that
    allows it. A tensor that is the same in all shares, such as a mask, is compared as it is. The smallest
    difference of all these readings counts.
    """
    if whole.is_nested or whole.layout is not torch.strided:
        return 0.0
    if whole.is_floating_point() and whole.dtype == torch.float64:
        # Rounding errors of float64 are far below these.
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
    # Each module's mode by itself: model.train() afterwards would also switch those that were in eval mode.
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
