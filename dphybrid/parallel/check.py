"""Reads a module for layers that compute something else, or fail, when they run as replicas."""

from collections.abc import Iterator

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from dphybrid.parallel.replication import unsuitable


def check_module(module: nn.Module) -> list[str]:
    """Return one line for each part of a region's module that differs on several devices, or fails there:
    its name and class, why, and the remedy."""
    return [
        f"{name or 'the module'} ({type(part).__name__}) {why}; {remedy}"
        for name, part in module.named_modules()
        for why, remedy in _findings(part)
    ]


def _findings(part: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield (why it differs or fails, remedy) of one module."""
    if refused := unsuitable(part):
        yield refused
    elif isinstance(part, _BatchNorm):
        yield (
            "normalises each device's rows by themselves and keeps the first device's statistics",
            "use GroupNorm or LayerNorm, or batches large enough for each device",
        )
    elif isinstance(part, _InstanceNorm) and part.track_running_stats:
        yield "keeps the statistics of the first device's rows", "use track_running_stats=False, or GroupNorm"
    elif isinstance(part, nn.RNNBase | nn.MultiheadAttention) and not part.batch_first:
        yield "expects the batch on dim 1, but the split is on dim 0", "set batch_first=True"
