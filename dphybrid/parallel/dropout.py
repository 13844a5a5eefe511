"""Dropout whose masks on the CPU do not depend on how a batch is split."""

import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dphybrid.kernels as kernels
from dphybrid.kernels import STORED, address, may_read, team
from dphybrid.parallel.applying import running

_DRAWING = threading.Lock()


class Dropout(nn.Dropout):
    """`nn.Dropout` with the same masks on `cpu` and `cpu*8`, in a half to a seventh of its time there.

    p: probability of a zero, 0 to 1. On the CPU, a hash of three numbers decides whether a value is dropped:
    a seed that each call draws from torch's CPU generator, the value's row (dim 0) in the whole batch, and
    its place in the row. Samples are on the region's `dim`, maybe flattened with further dims. Backward
    computes the mask again, so no mask is stored.

    On GPUs, in torch.compile and inside transforms of torch.func, this is torch's own dropout. If a forward
    may be computed again, as in activation checkpointing, each replica draws its own seed.
    """

    def __init__(self, p: float = 0.5) -> None:
        super().__init__(p)

    def forward(self, input: Tensor) -> Tensor:
        """Return `input` or, in training mode, a copy with values set to zero and the rest scaled by
        1 / (1 - p)."""
        hashed = may_read(input) and input.is_floating_point()
        if not self.training or self.p in (0, 1) or not hashed:
            return F.dropout(input, self.p, self.training)
        values = input if input.dtype is torch.float64 else input.float()
        seed, first, rows, dim = _draw(input)
        if dim == 0:
            dropped: Tensor = _Dropped.apply(values, self.p, seed, first)
        else:  # the share's part of the whole batch's mask
            shape = [rows if at == dim else size for at, size in enumerate(values.shape)]
            mask = _kernel(torch.ones(shape, dtype=values.dtype, device="cpu"), self.p, seed, 0)
            dropped = values * mask.narrow(dim, first, values.shape[dim])
        return dropped.to(input.dtype)


class _Dropped(torch.autograd.Function):
    """Dropout with a given mask is linear, so backward and jvp apply the same function. given: (p, seed,
    number of the first row)."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, *given: Any) -> Tensor:
        ctx.given = given
        return _kernel(values, *given)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if not may_read(grad):  # a batch of gradients (`is_grads_batched`), which the kernel cannot read
            ones = torch.ones(grad.shape, dtype=grad.dtype, device="cpu")
            return grad * _kernel(ones, *ctx.given), None, None, None
        again = _Dropped.apply if torch.is_grad_enabled() else _kernel
        return again(grad, *ctx.given), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Any:
        return _Dropped.apply(tangent, *ctx.given)


def _draw(input: Tensor) -> tuple[int, int, int, int]:
    """Return (seed, number of the first of these rows in the whole batch, its rows, dim of the rows)."""
    # All replicas use the same seed in their k-th call; the first one to get there draws it.
    replica = running()
    if not any(replica.shares) or _may_be_computed_again():
        return _seed(), 0, 0, 0
    with _DRAWING:
        if replica.calls == len(replica.seeds):
            replica.seeds.append(_seed())
    seed = replica.seeds[replica.calls]
    replica.calls += 1
    own, before = replica.shares[replica.index], sum(replica.shares[: replica.index])
    rank, dim = input.dim(), replica.dim
    each, rest = divmod(input.shape[dim], own) if own and -rank <= dim < rank else (0, 1)
    if not rest:
        return seed, before * each, sum(replica.shares) * each, dim % rank
    return seed ^ replica.index << 48, 0, 0, 0  # not the batch's rows: a separate mask per replica


def _may_be_computed_again() -> bool:
    """Return whether autograd may repeat this forward in backward, or this is the repetition, which does not
    know the replica's share."""
    hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    return hooked or not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1


def _seed() -> int:
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_())


def _kernel(values: Tensor, p: float, seed: int, first: int) -> Tensor:
    values = values.contiguous()
    out = torch.empty_like(values)
    rows, width = (len(values) if values.dim() else 1), values[:1].numel() if values.dim() else 1
    if not values.numel():
        return out
    real, size = values.dtype, width * values.itemsize
    arguments = kernels.Dropout(
        team(rows, size), address(values, "dropout", real, values.shape), out.data_ptr(), rows, width, first,
        STORED[real], seed, min(round(p * 2**32), 2**32 - 1), 1 / (1 - p),
    )  # fmt: skip
    if not kernels.call("drop_out", arguments):
        raise TypeError(f"dropout: {tuple(values.shape)} of {real}")
    return out
