"""Piecewise-linear encoding: a number becomes several inputs, by quantile bins of the training rows.

Letters: B samples, N numeric columns, K bins of a column, E edges of bins (K + 1), D outputs of a column's
layer, X rows of the lookup table (N K), S its width (2 D).
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding

import dphybrid.kernels as kernels
from dphybrid.data.batches import Array, Dataset
from dphybrid.embedding.gradients import is_captured

BIN_ROWS = 8
"""Fewest training rows for each bin."""
RUNS, RUN_ROWS = 64, 1024
"""Of long data, this many runs of this many neighbouring rows decide the bins."""


class EmbeddedBins(nn.Module):
    """dense_BN -> (B, N * (1 + D)): for each number its squashed value, and D outputs of ReLU(linear layer),
    with a layer for each column. The layer's inputs are the squashed number and the number's position in each
    bin: 0 below the bin, 1 above, linear within.

    The piecewise-linear encoding of Gorishniy, Rubachev and Babenko 2022, "On Embeddings for Numerical
    Features in Tabular Deep Learning", sections 3.2.1 and 3.3, with three differences. Values beyond the
    outermost bins get the positions of their ends. A value that would fill several quantiles gets one bin, so
    that the other values share the rest. The number itself, `squashed`, is an input, too, because a few
    hundred rows are too few to learn a straight line from bins.

    edges_NE: (N, K + 1), ascending; equal edges stand for bins that a column with few values does not need.
    A buffer: the bins of training belong to the checkpoint. width: D.
    """

    edges_NE: Tensor

    def __init__(self, edges_NE: Tensor, width: int) -> None:
        super().__init__()
        self.register_buffer("edges_NE", edges_NE)
        # The bins and the number itself: as many inputs as edges.
        num_dense, inputs = edges_NE.shape
        # The bound with which nn.Linear starts its weights.
        bound = inputs**-0.5
        self.weight_NED = nn.Parameter(torch.empty(num_dense, inputs, width).uniform_(-bound, bound))
        self.bias_ND = nn.Parameter(torch.empty(num_dense, width).uniform_(-bound, bound))

    def forward(self, dense_BN: Tensor) -> Tensor:
        # `fix_numbers` keeps the computed table as buffers, after edges_NE.
        _, *fixed = self.buffers()
        return _embed(dense_BN, fixed or self.table())

    def table(self) -> list[Tensor]:
        """Return all that depends on edges and weights alone: the inner edges, the bins' left edges, their
        widths, each column's first row in the lookup table, the lookup table with each bin's start and slope,
        and the weights of the number itself."""
        edges_NE, bins = self.edges_NE, self.edges_NE.shape[1] - 1
        widths_NK = edges_NE.diff(dim=1)
        # The layer's output is piecewise linear. All bins below the number's own have position 1, so the sum
        # of their weights is a constant of that bin ("start"); only its own bin is left to compute ("slope").
        slope_NKD = self.weight_NED[:, 1:] * (widths_NK > 0)[:, :, None]
        below_KK = torch.ones(bins, bins, device=edges_NE.device, dtype=slope_NKD.dtype).tril(-1)
        # A matrix product, as cumsum has no deterministic form on GPUs.
        start_NKD = self.bias_ND[:, None] + torch.einsum("kj,njd->nkd", below_KK, slope_NKD)
        return [
            edges_NE[:, 1:-1].contiguous(),
            edges_NE[:, :-1].contiguous(),
            widths_NK.clamp(min=1e-30),  # an empty bin must not divide by 0
            bins * torch.arange(len(edges_NE), device=edges_NE.device)[:, None],
            torch.cat([start_NKD, slope_NKD], dim=2).flatten(0, 1),
            self.weight_NED[:, :1],
        ]


def _embed(dense_BN: Tensor, table: Iterable[Tensor]) -> Tensor:
    """Compute `EmbeddedBins` from its `table`."""
    inner_NE, left_NK, width_NK, first_N1, table_XS, of_itself_N1D = table
    squashed_BN = squashed(dense_BN)
    given = (dense_BN, squashed_BN, inner_NE, left_NK, width_NK, table_XS, of_itself_N1D)
    # A compiler or an export cannot look into the kernel, and it has no gradient by the numbers themselves.
    recorded = torch.compiler.is_compiling() or is_captured(dense_BN, table_XS) or dense_BN.requires_grad
    if not recorded and all(tensor.dtype == torch.float32 and kernels.is_plain(tensor) for tensor in given):
        found_BX: Tensor = _Embedded.apply(*(tensor.contiguous() for tensor in given))
        return found_BX
    values_NB = dense_BN.T.contiguous()
    # ONNX has no searchsorted: count the edges instead, in int32, which takes two thirds of the time.
    if torch.compiler.is_exporting():
        bin_NB = (values_NB[:, :, None] >= inner_NE[:, None]).sum(2, dtype=torch.int32).long()
    else:
        bin_NB = torch.searchsorted(inner_NE, values_NB, right=True)
    share_NB = ((values_NB - left_NK.gather(1, bin_NB)) / width_NK.gather(1, bin_NB)).clamp(0, 1)
    start_NBD, slope_NBD = embedding(bin_NB + first_N1, table_XS).chunk(2, dim=2)
    squashed_NB1, share_NB1 = squashed_BN.T[:, :, None], share_NB[:, :, None]
    found_NBD = (start_NBD + share_NB1 * slope_NBD + squashed_NB1 * of_itself_N1D).relu()
    return torch.cat([squashed_BN[:, :, None], found_NBD.transpose(0, 1)], dim=2).flatten(1)


class _Embedded(torch.autograd.Function):
    """Computes the same bits in one pass by a C kernel, and the gradients of table_XS and of_itself_N1D in
    another: together a third of the time of torch's operations. given: the inputs of `_embed`."""

    @staticmethod
    def forward(ctx: Any, *given: Tensor) -> Tensor:
        columns, width = given[0].shape[1], given[6].shape[2]
        out_BX = given[0].new_empty(len(given[0]), columns * (1 + width))
        _call("embed", given, out_BX)
        ctx.save_for_backward(*given, out_BX)
        return out_BX

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BX: Tensor) -> tuple[Tensor | None, ...]:
        *given, out_BX = ctx.saved_tensors
        grads = torch.zeros_like(given[5]), torch.zeros_like(given[6])
        _call("embed_backward", given, out_BX, grad_BX.contiguous(), *grads)
        return None, None, None, None, None, *grads


def _call(name: str, given: Sequence[Tensor], out_BX: Tensor, *grads: Tensor) -> None:
    (rows, columns), bins, width = given[0].shape, given[3].shape[1], given[6].shape[2]
    places = [
        kernels.address(tensor, "bins", torch.float32, tensor.shape) for tensor in (*given, out_BX, *grads)
    ]
    size = kernels.team(rows, out_BX.shape[1] * out_BX.itemsize)
    kernels.call(name, kernels.Bins(size, *places, *[None] * (11 - len(places)), rows, columns, bins, width))


def squashed(dense_BN: Tensor) -> Tensor:
    """Return each number z as z / sqrt(1 + (z / 3)^2): nearly itself near 0, outliers limited to 3."""
    dense_BN = dense_BN.clamp(-1e9, 1e9)  # whose squares float32 can hold
    return dense_BN / (1 + (dense_BN / 3).square()).sqrt()


class Squashed(nn.Module):
    """dense_BN -> (B, N): `squashed`."""

    def forward(self, dense_BN: Tensor) -> Tensor:
        return squashed(dense_BN)


class OnNumbers(nn.Module):
    """(rows_BFD, dense_BN) -> network(rows_BFD, numbers(dense_BN)).

    flags: columns of dense_BN that are 0 or 1. Bins would tell no more of them, so they follow the encoded
    numbers as they are. values: the other columns.
    """

    values_N: Tensor
    flags_N: Tensor

    def __init__(
        self, network: nn.Module, numbers: nn.Module, values: Sequence[int] = (), flags: Sequence[int] = ()
    ) -> None:
        super().__init__()
        self.network = network
        self.numbers = numbers
        # Not persistent: facts of the data, which the builder gets again.
        self.register_buffer("values_N", torch.tensor(values, dtype=torch.int64), persistent=False)
        self.register_buffer("flags_N", torch.tensor(flags, dtype=torch.int64), persistent=False)

    def forward(self, rows_BFD: Tensor, dense_BN: Tensor) -> Tensor:
        if not len(self.flags_N):
            return self.network(rows_BFD, self.numbers(dense_BN))
        flags_BN = dense_BN.index_select(1, self.flags_N)
        encoded_BN = self.numbers(dense_BN.index_select(1, self.values_N))
        return self.network(rows_BFD, torch.cat([encoded_BN, flags_BN], dim=1))


def fix_numbers(model: nn.Module) -> None:
    """Compute each `EmbeddedBins.table` of a model once, for predictions: the weights must not change any
    more."""
    for module in model.modules():
        if isinstance(module, EmbeddedBins):
            for place, tensor in enumerate(module.table()):
                module.register_buffer(f"table_{place}", tensor.detach().clone(), persistent=False)


def bins_of(rows: Dataset | None, columns: Sequence[int], num_bins: int) -> Tensor:
    """Return edges_NE of these columns of the training rows; without rows zeros, which a checkpoint
    replaces."""
    if rows is None:
        return torch.zeros(len(columns), num_bins + 1)
    dense_BN = sample_dense(rows)[:, columns]
    return torch.from_numpy(quantile_bins(dense_BN, num_bins)).to(torch.get_default_dtype())


def quantile_bins(dense_BN: Array, num_bins: int) -> Array:
    """Return edges_NE (N, num_bins + 1) float32, see `EmbeddedBins`. There is at most one bin per `BIN_ROWS`
    rows, the other bins are empty; in a constant column all edges are equal.

    Edges are quantiles in which no value counts for more rows than one bin has. So a frequent value, such as
    0 in a column of capital gains, takes one bin and leaves the rest to other values.
    """
    num_rows, columns = dense_BN.shape
    edges_NE = np.empty((columns, num_bins + 1), np.float32)
    wanted = max(1, min(num_bins, num_rows // BIN_ROWS))
    for column in range(columns):
        values, counts = np.unique(dense_BN[:, column], return_counts=True)
        rank = np.cumsum(np.minimum(counts, num_rows / wanted))
        places = np.searchsorted(rank, np.linspace(0, rank[-1], wanted + 1)[1:-1])
        edges = np.unique(np.concatenate([values[:1], values[places], values[-1:]]))
        # All columns get the same number of edges; repeating the last one makes empty bins.
        edges_NE[column] = np.pad(edges, (0, num_bins + 1 - len(edges)), mode="edge")
    return edges_NE


def sample_dense(rows: Dataset) -> Array:
    """Return dense_BN of evenly spaced runs of the rows, or of all rows if they are few."""
    index_B = np.arange(len(rows))
    if len(rows) > RUNS * RUN_ROWS:
        starts = np.linspace(0, len(rows) - RUN_ROWS, RUNS).astype(np.int64)
        index_B = (starts[:, None] + np.arange(RUN_ROWS)).ravel()
    return np.asarray(rows.fetch(index_B)["dense_BN"])
