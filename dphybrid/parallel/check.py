"""What of a module will differ or break when it runs as replicas, each finding with its place and a remedy.

Most of these show only on two or more distinct GPUs. What a module computes across the batch, `comparison`
finds.
"""

import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dphybrid.parallel.dropout import Dropout
from dphybrid.parallel.nests import reachable
from dphybrid.parallel.replication import OF_TORCH, unsuitable


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
