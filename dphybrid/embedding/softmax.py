"""Cross entropy over many classes: after a linear layer, without holding all scores at once, and over sampled
candidates.

The method is that of "Cut Your Losses in Large-Vocabulary Language Models" (Wijmans et al. 2024) and Liger
Kernel (Hsu et al. 2024): compute the scores of a few rows at a time, and from them the losses and at once the
gradients too, in forward.
Letters: X rows, H width of a row, V classes, N rows of a block whose scores are held, C of those rows, as
many as fit into a core's cache.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy, linear

from dphybrid.util.errors import UserError

IGNORED = -100
"""Target of a row that has no class; its loss is 0. The default of torch's cross_entropy."""
HELD = 2**24
"""Most scores held at a time."""
CACHED = {"cpu": 2**20}
"""Device type -> most scores processed at a time, so that they stay in a core's cache; other devices process
all that are held."""


def linear_cross_entropy(
    rows_XH: Tensor, weights_VH: Tensor, targets_X: Tensor, bias_V: Tensor | None = None
) -> Tensor:
    """Return loss_X, equal to `cross_entropy(linear(rows, weights, bias), targets, reduction="none")`.

    Under autocast, products are in its number format, sums and losses in float32. Forward computes the
    gradients too. Backward uses them if all losses have the same weight, as in a sum or mean; otherwise it
    computes the scores once more. There is no second derivative: asking for one raises RuntimeError. Raises
    UserError for targets of another shape or type, and on the CPU for a target that is not a class.
    """
    _check_targets(rows_XH, len(weights_VH), targets_X)
    # torch.compile fuses the plain form itself, and cannot trace the loop over blocks.
    if torch.compiler.is_compiling():
        scores_XV = linear(rows_XH, weights_VH, bias_V)
        return cross_entropy(scores_XV, targets_X, ignore_index=IGNORED, reduction="none")
    kind = rows_XH.device.type
    lower = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else rows_XH.dtype
    loss_X: Tensor = _LinearCrossEntropy.apply(
        rows_XH, weights_VH, bias_V, targets_X, lower, torch.is_grad_enabled()
    )
    return loss_X


def _check_targets(rows_XH: Tensor, num_classes: int, targets_X: Tensor) -> None:
    if rows_XH.dim() != 2 or targets_X.shape != rows_XH.shape[:1] or targets_X.dtype != torch.int64:
        raise UserError(
            f"linear_cross_entropy: targets of shape {tuple(targets_X.shape)} of {targets_X.dtype} for rows "
            f"of shape {tuple(rows_XH.shape)}; give rows (X, H) and a class (X,), of int64, for each"
        )
    # Not on a GPU: reading the targets would wait for it, and its gather asserts anyway.
    if not targets_X.is_cpu or torch.compiler.is_compiling():
        return
    wrong_X = (targets_X != IGNORED) & ((targets_X < 0) | (targets_X >= num_classes))
    if bool(wrong_X.any()):
        position = int(wrong_X.nonzero()[0])
        raise UserError(
            f"linear_cross_entropy: target {int(targets_X[position])} at position {position} is not a class; "
            f"classes are 0 to {num_classes - 1}, and {IGNORED} means no class"
        )


def sampled_softmax(
    scores_BC: Tensor, places_B: Tensor, log_q_C: Tensor, counts_C: Tensor | None = None
) -> Tensor:
    """Return loss_B: the cross entropy of a softmax over C candidates, of which the sample's own item is
    number places_B (Yi et al. 2019).

    The candidates are distinct items. log_q_C: log-probability that an item is drawn, subtracted from its
    scores. counts_C: how often an item was drawn (None: once); it counts that often for other samples, and
    once as a sample's own item.
    """
    if counts_C is None:
        return cross_entropy(scores_BC - log_q_C, places_B, reduction="none")
    log_counts_C = counts_C.to(scores_BC.dtype).log()
    own_B1 = places_B.unsqueeze(1)
    logits_BC = (scores_BC - (log_q_C - log_counts_C)).scatter_add(1, own_B1, -log_counts_C[own_B1])
    return cross_entropy(logits_BC, places_B, reduction="none")


class _LinearCrossEntropy(torch.autograd.Function):
    """Computes the gradients of the summed losses in forward; backward scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        rows_XH: Tensor,
        weights_VH: Tensor,
        bias_V: Tensor | None,
        targets_X: Tensor,
        lower: torch.dtype,
        grad_enabled: bool,
    ) -> Tensor:
        given = (rows_XH, weights_VH, bias_V, targets_X)
        known_X = (targets_X != IGNORED).to(torch.promote_types(rows_XH.dtype, torch.float32))
        trains = grad_enabled and any(ctx.needs_input_grad)
        loss_X, grads = _chunk_by_chunk(*given, known_X, lower, trains)
        ctx.lower = lower
        ctx.save_for_backward(*given, known_X, *grads)
        return loss_X

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, weight_X: Tensor) -> tuple[Tensor | None, ...]:
        rows_XH, weights_VH, bias_V, targets_X, known_X, *grads = ctx.saved_tensors
        # The gradients from forward are those of the sum of losses: right only if all have the same weight.
        if bool((weight_X == weight_X[:1]).all()):
            weight = weight_X[:1].sum()  # a sum, as there may be no row
            grads = [None if grad is None else grad * weight for grad in grads]
        else:
            weighted_X = known_X * weight_X
            _, grads = _chunk_by_chunk(
                rows_XH, weights_VH, bias_V, targets_X, weighted_X, ctx.lower, trains=True
            )
        return (*grads, None, None, None)


def _chunk_by_chunk(
    rows_XH: Tensor,
    weights_VH: Tensor,
    bias_V: Tensor | None,
    targets_X: Tensor,
    weight_X: Tensor,
    lower: torch.dtype,
    trains: bool,
) -> tuple[Tensor, list[Tensor | None]]:
    """Return the losses times weight_X, and the gradients of their sum with respect to rows, weights and
    bias. All gradients are None if `trains` is False; that of the bias is also None if there is no bias.

    Products are in the number format `lower`, sums in that of weight_X.
    """
    num_rows, num_classes = len(rows_XH), len(weights_VH)
    held = max(1, min(num_rows, HELD // num_classes))
    cached = max(1, CACHED.get(rows_XH.device.type, HELD) // num_classes)
    loss_X = torch.empty_like(weight_X)
    grads: list[Tensor | None] = [None, None, None]
    if trains:
        grads = [
            None if given is None else torch.zeros_like(given) for given in (rows_XH, weights_VH, bias_V)
        ]
    grad_rows_XH, grad_weights_VH, grad_bias_V = grads
    # Allocated once and reused: fresh memory for each block would cost as much time as the sums.
    scores_held_NV = rows_XH.new_empty(held, num_classes, dtype=lower)
    powers_held_CV = None if lower == loss_X.dtype else loss_X.new_empty(min(held, cached), num_classes)
    lower_VH, lower_V = weights_VH.to(lower), None if bias_V is None else bias_V.to(lower)
    # Copied, not only transposed: on CPUs, bfloat16 products with a transposed view take several times as
    # long.
    lower_HV = lower_VH.T if powers_held_CV is None else lower_VH.T.contiguous()
    with torch.autocast(rows_XH.device.type, enabled=False):
        for start in range(0, num_rows, held):
            block = slice(start, start + held)
            rows_NH, weight_N, targets_N, loss_N = (
                given[block] for given in (rows_XH, weight_X, targets_X, loss_X)
            )
            scores_NV, share_N = scores_held_NV[: len(rows_NH)], torch.empty_like(weight_N)
            if lower_V is None:
                torch.mm(rows_NH.to(lower), lower_HV, out=scores_NV)
            else:
                torch.addmm(lower_V, rows_NH.to(lower), lower_HV, out=scores_NV)
            for first in range(0, len(rows_NH), cached):
                part = slice(first, first + cached)
                powers_CV = scores_NV[part]
                if powers_held_CV is not None:
                    powers_CV = powers_held_CV[: len(powers_CV)].copy_(powers_CV)
                target_C = targets_N[part]
                target_C1 = target_C.where(target_C != IGNORED, 0).unsqueeze(1)
                best_C1 = powers_CV.amax(1, keepdim=True)
                own_C1 = powers_CV.gather(1, target_C1) - best_C1
                sum_C1 = powers_CV.sub_(best_C1).exp_().sum(1, keepdim=True)
                loss_N[part] = (sum_C1.log() - own_C1).squeeze(1) * weight_N[part]
                share_N[part] = weight_N[part] / sum_C1.squeeze(1)
                # The gradient by the scores is weight * (softmax - 1 at the target). The row now holds the
                # exponentials, sum_C1 times the softmax. Factors weight / sum_C1 (share_N) are applied to the
                # narrow sides of the products below, not to these V columns.
                powers_CV.scatter_(1, target_C1, own_C1.exp() - sum_C1)
                if grad_bias_V is not None:
                    grad_bias_V += share_N[part] @ powers_CV
                if powers_held_CV is not None:
                    scores_NV[part] = powers_CV
            if grad_rows_XH is not None and grad_weights_VH is not None:
                torch.mul(scores_NV @ lower_VH, share_N.unsqueeze(1), out=grad_rows_XH[block])
                shared_NH = (rows_NH * share_N.unsqueeze(1)).to(lower)
                if lower == grad_weights_VH.dtype:
                    grad_weights_VH.addmm_(scores_NV.T, shared_NH)
                else:
                    grad_weights_VH += scores_NV.T @ shared_NH
    return loss_X, grads
