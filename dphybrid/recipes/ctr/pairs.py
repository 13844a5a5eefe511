"""Dot products of all pairs of a sample's vectors, as DLRM multiplies them.

Letters: B samples, F rows of a sample, V its vectors (rows, and the first one), D their width, P pairs, X
width of the output.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import dphybrid.kernels as kernels

_MOST = 128
"""Most vectors, and most values of one, that the kernel multiplies: as in pairs.h."""


class Pairs(nn.Module):
    """(rows_BFD, first_BD) -> (B, D + P): first_BD, and behind it the dot products of all pairs of first_BD
    and the rows. Without first_BD: (B, P). num_vectors: V."""

    places_P: Tensor

    def __init__(self, num_vectors: int) -> None:
        super().__init__()
        first_P, second_P = torch.tril_indices(num_vectors, num_vectors, offset=-1)
        self.num_pairs = len(first_P)
        # Each pair's place in the flat matrix of all products: one index is twice as fast as two. Not
        # persistent: the sizes decide these numbers, so checkpoints need not hold them.
        self.register_buffer("places_P", first_P * num_vectors + second_P, persistent=False)

    def forward(self, rows_BFD: Tensor, first_BD: Tensor | None = None) -> Tensor:
        given = [rows_BFD] if first_BD is None else [rows_BFD, first_BD]
        fits = rows_BFD.shape[1] + len(given) - 1 <= _MOST and rows_BFD.shape[2] <= _MOST
        if fits and self.training and kernels.may_train(*given):
            found: Tensor = _Pairs.apply(rows_BFD, first_BD)
            return found
        vectors_BVD = rows_BFD if first_BD is None else torch.cat([first_BD[:, None], rows_BFD], dim=1)
        dots_BP = (vectors_BVD @ vectors_BVD.mT).flatten(1).index_select(1, self.places_P)
        return dots_BP if first_BD is None else torch.cat([first_BD, dots_BP], dim=1)


class _Pairs(torch.autograd.Function):
    """Computes `Pairs` by a C kernel, which needs neither the matrix of all products nor copies of the
    inputs: half of the time of torch's operations."""

    @staticmethod
    def forward(ctx: Any, rows_BFD: Tensor, first_BD: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows_BFD, first_BD)
        (batch, columns, dim), firsts = rows_BFD.shape, first_BD is not None
        vectors = columns + firsts
        out_BX = rows_BFD.new_empty(batch, firsts * dim + vectors * (vectors - 1) // 2)
        _call("multiply_pairs", rows_BFD, first_BD, out_BX)
        return out_BX

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BX: Tensor) -> tuple[Tensor | None, ...]:
        rows_BFD, first_BD = ctx.saved_tensors
        first_grad = None if first_BD is None else torch.empty_like(first_BD)
        rows_grad = rows_BFD.new_empty(rows_BFD.shape)
        _call("multiply_pairs_backward", rows_BFD, first_BD, None, grad_BX, first_grad, rows_grad)
        return rows_grad, first_grad


def _call(name: str, rows_BFD: Tensor, first_BD: Tensor | None, *others: Tensor | None) -> None:
    """Call a kernel. others: the further tensors of `struct pairs`, in its order; None for those that it does
    not use."""
    (batch, columns, dim), firsts = rows_BFD.shape, int(first_BD is not None)
    vectors = columns + firsts
    out = (batch, firsts * dim + vectors * (vectors - 1) // 2)
    shapes = ((batch, dim), tuple(rows_BFD.shape), out, out, (batch, dim), tuple(rows_BFD.shape))
    held = [None if each is None else each.contiguous() for each in (first_BD, rows_BFD, *others)]
    addresses = [
        None if each is None else kernels.address(each, "pairs", torch.float32, shape)
        for each, shape in zip(held, shapes, strict=False)
    ]
    team = kernels.team(batch, 4 * out[1])
    addresses += [None] * (6 - len(addresses))
    if not kernels.call(name, kernels.Pairs(team, *addresses, batch, vectors, dim)):
        raise TypeError(f"pairs of {tuple(rows_BFD.shape)}")
