"""Dot products of all pairs of a sample's vectors, as DLRM multiplies them.

Letters: B samples, F rows of a sample, V its vectors (rows, and the first one), D their width, P pairs, X
pairs of any two vectors (V V).
"""

from typing import Any

import torch
from torch import Tensor, nn

import dphybrid.kernels as kernels

_MOST = 128
"""Most vectors, and most values of one, that the kernel multiplies: as in pairs.h."""


class Pairs(nn.Module):
    """(rows_BFD, first_BD) -> (B, D + P): first_BD, and behind it the dot products of all pairs of first_BD
    and the rows. Without first_BD: (B, P). num_vectors: V."""

    places_P: Tensor
    pair_of_X: Tensor

    def __init__(self, num_vectors: int) -> None:
        super().__init__()
        first_P, second_P = torch.tril_indices(num_vectors, num_vectors, offset=-1)
        pair_of_VV = torch.zeros((num_vectors, num_vectors), dtype=torch.int64)
        pair_of_VV[first_P, second_P] = pair_of_VV[second_P, first_P] = torch.arange(len(first_P))
        self.num_pairs = len(first_P)
        # Not persistent: the sizes decide these numbers, so checkpoints need not hold them.
        self.register_buffer("places_P", first_P * num_vectors + second_P, persistent=False)
        self.register_buffer("pair_of_X", pair_of_VV.flatten(), persistent=False)

    def forward(self, rows_BFD: Tensor, first_BD: Tensor | None = None) -> Tensor:
        given = [rows_BFD] if first_BD is None else [rows_BFD, first_BD]
        fits = rows_BFD.shape[1] + len(given) - 1 <= _MOST and rows_BFD.shape[2] <= _MOST
        if fits and self.training and kernels.may_train(*given):
            found: Tensor = _Pairs.apply(rows_BFD, first_BD, self.pair_of_X)
            return found
        vectors_BVD = _vectors(rows_BFD, first_BD)
        dots_BP: Tensor = _Dots.apply(vectors_BVD, self.places_P, self.pair_of_X)
        return dots_BP if first_BD is None else torch.cat([first_BD, dots_BP], dim=1)


def _vectors(rows_BFD: Tensor, first_BD: Tensor | None) -> Tensor:
    return rows_BFD if first_BD is None else torch.cat([first_BD[:, None], rows_BFD], dim=1)


def _gradient(vectors_BVD: Tensor, grads_BP: Tensor, pair_of_X: Tensor) -> Tensor:
    """Return the gradient of the vectors. The matrix of all products is symmetric, so one matrix product
    gives it, where autograd computes two."""
    vectors = vectors_BVD.shape[1]
    if not grads_BP.shape[1]:
        return torch.zeros_like(vectors_BVD)
    grads_BVV = grads_BP.to(vectors_BVD).index_select(1, pair_of_X).unflatten(1, (vectors, vectors))
    grads_BVV.diagonal(dim1=1, dim2=2).zero_()  # no pair
    return grads_BVV @ vectors_BVD


class _Dots(torch.autograd.Function):
    """(vectors_BVD, places_P, pair_of_X) -> dots_BP, by torch's operations. places_P: each pair's place in
    the flat matrix of all products. pair_of_X: for each place of this matrix the number of its pair."""

    generate_vmap_rule = True

    @staticmethod
    def forward(vectors_BVD: Tensor, places_P: Tensor, pair_of_X: Tensor) -> Tensor:
        # One flat index is twice as fast as indexing rows and columns.
        return (vectors_BVD @ vectors_BVD.mT).flatten(1).index_select(1, places_P)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], inputs[2])

    @staticmethod
    def backward(ctx: Any, grads_BP: Tensor) -> tuple[Tensor, None, None]:
        vectors_BVD, pair_of_X = ctx.saved_tensors
        return _gradient(vectors_BVD, grads_BP, pair_of_X), None, None


class _Pairs(torch.autograd.Function):
    """Computes `Pairs` by a C kernel, which needs neither the matrix of all products nor copies of the
    inputs: half of the time of torch's operations."""

    @staticmethod
    def forward(ctx: Any, rows_BFD: Tensor, first_BD: Tensor | None, pair_of_X: Tensor) -> Tensor:
        ctx.save_for_backward(rows_BFD, first_BD, pair_of_X)
        (batch, columns, dim), firsts = rows_BFD.shape, first_BD is not None
        vectors = columns + firsts
        out_BX = rows_BFD.new_empty(batch, firsts * dim + vectors * (vectors - 1) // 2)
        _call("multiply_pairs", rows_BFD, first_BD, out_BX)
        return out_BX

    @staticmethod
    def backward(ctx: Any, grad_BX: Tensor) -> tuple[Tensor | None, ...]:
        rows_BFD, first_BD, pair_of_X = ctx.saved_tensors
        # By torch's operations for a gradient of the gradient, and for a batch of gradients.
        if torch.is_grad_enabled() or not kernels.may_read(grad_BX):
            if first_BD is None:
                return _gradient(rows_BFD, grad_BX, pair_of_X), None, None
            dim = first_BD.shape[1]
            grad_BVD = _gradient(_vectors(rows_BFD, first_BD), grad_BX[:, dim:], pair_of_X)
            return grad_BVD[:, 1:], grad_BVD[:, 0] + grad_BX[:, :dim], None
        first_grad = None if first_BD is None else torch.empty_like(first_BD)
        rows_grad = rows_BFD.new_empty(rows_BFD.shape)
        _call("multiply_pairs_backward", rows_BFD, first_BD, None, grad_BX, first_grad, rows_grad)
        return rows_grad, first_grad, None


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
