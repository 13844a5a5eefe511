"""Cross entropy over many classes after a linear layer, by torch's `linear_cross_entropy`.

Letters: X rows, H width of a row, V classes.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

IGNORED = -100
"""Target of a row that has no class; its loss is 0. The default of torch's cross_entropy."""
_WHOLE = 2**26
"""Most scores that are computed at once. On CPUs this is faster than torch's chunks: their backward computes
the scores once more."""
_CHUNK = 2**24
"""Scores of a chunk. On CPUs, smaller chunks take several times as long."""


def linear_cross_entropy(
    rows_XH: Tensor, weights_VH: Tensor, targets_X: Tensor, bias_V: Tensor | None = None
) -> Tensor:
    """Return loss_X, equal to `cross_entropy(linear(rows, weights, bias), targets, reduction="none")`.

    Up to 67 million scores are held at once, more are computed in chunks. Under autocast, products are in its
    number format. Needs torch 2.13.
    """
    options = None
    if len(rows_XH) * len(weights_VH) > _WHOLE:
        chunk = max(1, _CHUNK // len(weights_VH))
        options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=chunk)
        kind = rows_XH.device.type
        if torch.is_autocast_enabled(kind):  # the chunked operator does not follow it by itself
            lower = torch.get_autocast_dtype(kind)
            rows_XH, weights_VH = rows_XH.to(lower), weights_VH.to(lower)
            bias_V = None if bias_V is None else bias_V.to(lower)
    loss_X: Tensor = F.linear_cross_entropy(
        rows_XH, weights_VH, targets_X, linear_bias=bias_V, reduction="none", options=options
    )
    return loss_X.float() if loss_X.element_size() < 4 else loss_X
