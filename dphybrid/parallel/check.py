"""Inspects a module for what differs or breaks when it runs as replicas; each finding has a place and a
remedy. Most of what it finds would fail only on two or more real GPUs. `comparison` computes a batch instead.
"""

import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from dphybrid.parallel.dropout import Dropout
from dphybrid.parallel.nests import PLAIN
from dphybrid.parallel.replication import unsuitable

OF_TORCH = frozenset(vars(nn.Module())) | {"_former_parameters", "_flat_weights", "_flat_weight_refs"}
"""Names of torch's internal attributes of a module."""


@dataclass(frozen=True)
class Finding:
    """One problem of a module.

    Attributes:
        breaks: It fails or computes something wrong; otherwise results only differ from those on one device.
        module: Dotted name in the checked module.
        where: The module's class, its attribute, or its input or output that differs.
    """

    breaks: bool
    module: str
    where: str
    problem: str
    remedy: str

    def text(self) -> str:
        """Return the finding as two lines."""
        return (
            f"{'BREAKS ' if self.breaks else 'differs'} {self.module or '(top)'} [{self.where}]: "
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
"""(breaks, where, problem, remedy)."""


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
    if isinstance(part, _InstanceNorm) and part.track_running_stats:
        yield (
            False,
            kind,
            "only the running statistics of the first device's rows are kept",
            "use track_running_stats=False, or GroupNorm",
        )
    if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.scale_grad_by_freq:
        yield (
            True,
            kind,
            "scale_grad_by_freq counts how often a row occurs in the device's share, not in the batch",
            "look up outside of the data-parallel block",
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
        held = list(reached(value))
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


def reached(value: object, depth: int = 4) -> Iterator[object]:
    """Yield a value and what it holds: items, attributes, and what a function or method refers to."""
    yield value
    if isinstance(value, nn.Module | Tensor | type | types.ModuleType) or type(value) in PLAIN or not depth:
        return
    held: Iterable[object] = getattr(value, "__dict__", {}).values()
    if isinstance(value, types.MethodType):
        held = [value.__self__]
    elif isinstance(value, types.FunctionType):
        held = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
    elif isinstance(value, partial):
        held = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, Mapping):
        held = value.values()
    elif isinstance(value, list | tuple | set | frozenset | deque):
        held = value
    for each in held:
        yield from reached(each, depth - 1)


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
