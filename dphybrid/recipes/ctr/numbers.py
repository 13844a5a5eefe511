"""Numbers as several inputs each, by bins of the training rows.

Letters: B samples, N numeric columns, K bins of a column, E edges of bins (K + 1), D outputs of a column's
layer, S what is looked up of a bin (2 D).
"""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

import dphybrid.kernels as kernels
from dphybrid.data.batches import Array, Dataset
from dphybrid.embedding.gradients import is_captured

BIN_ROWS = 8
"""Training rows for each bin, at least."""
RUNS, RUN_ROWS = 64, 1024
"""Of long data, this many runs of so many neighbouring rows say where the bins are."""


class EmbeddedBins(nn.Module):
    """dense_BN -> (B, N * (1 + D)): each number, squashed, then D values: it and its share of each of its
    bins, 0 below the bin and 1 above, through a linear layer of the column's own and ReLU.

    The piecewise linear encoding of Gorishniy, Rubachev and Babenko 2022, "On Embeddings for Numerical
    Features in Tabular Deep Learning", sections 3.2.1 and 3.3, with three differences: values beyond the
    outermost bins stay at their ends; a value that would fill several quantiles begins a bin, so that the
    rest has the others; and the number itself is an input, because a few hundred rows are too few to learn a
    straight line from bins. Squashed, z / sqrt(1 + (z / 3)^2), an outlier is no more than large.

    edges_NE: (N, K + 1), ascending, equal ones for the bins that a column with fewer values lacks. A buffer:
    the bins that a model was trained with belong to its checkpoint. width: D.
    """

    edges_NE: Tensor

    def __init__(self, edges_NE: Tensor, width: int) -> None:
        super().__init__()
        self.register_buffer("edges_NE", edges_NE)
        num_dense, inputs = edges_NE.shape  # as many inputs as edges: the bins and the number
        bound = inputs**-0.5
        self.weight_NED = nn.Parameter(torch.empty(num_dense, inputs, width).uniform_(-bound, bound))
        self.bias_ND = nn.Parameter(torch.empty(num_dense, width).uniform_(-bound, bound))

    def forward(self, dense_BN: Tensor) -> Tensor:
        _, *fixed = self.buffers()
        return _pieces(dense_BN, fixed or self.table())

    def table(self) -> list[Tensor]:
        """Return what depends on edges and weights alone: inner edges, and of each bin its left edge, width,
        first place, and what is looked up; and the weights of the number itself."""
        edges_NE, bins = self.edges_NE, self.edges_NE.shape[1] - 1
        widths_NK = edges_NE.diff(dim=1)
        # All bins below a number's own have a share of 1: their sum is looked up, not computed for each row.
        slope_NKD = self.weight_NED[:, 1:] * (widths_NK > 0)[:, :, None]
        below_KK = torch.ones(bins, bins, device=edges_NE.device, dtype=slope_NKD.dtype).tril(-1)
        # A product, as cumsum has no deterministic form on GPUs.
        start_NKD = self.bias_ND[:, None] + torch.einsum("kj,njd->nkd", below_KK, slope_NKD)
        return [
            edges_NE[:, 1:-1].contiguous(),
            edges_NE[:, :-1].contiguous(),
            widths_NK.clamp(min=1e-30),
            bins * torch.arange(len(edges_NE), device=edges_NE.device)[:, None],
            torch.cat([start_NKD, slope_NKD], dim=2).flatten(0, 1),
            self.weight_NED[:, :1],
        ]


def _pieces(dense_BN: Tensor, table: Iterable[Tensor]) -> Tensor:
    inner_NE, left_NK, width_NK, first_N1, table_XS, of_itself_N1D = table
    squashed_BN = dense_BN / (1 + (dense_BN / 3).square()).sqrt()
    given = (dense_BN, squashed_BN, inner_NE, left_NK, width_NK, table_XS, of_itself_N1D)
    recorded = torch.is_grad_enabled() or torch.compiler.is_compiling() or is_captured(dense_BN, table_XS)
    if not recorded and all(tensor.dtype == torch.float32 for tensor in given):
        return _in_one_pass(*(tensor.contiguous() for tensor in given))
    values_NB = dense_BN.T.contiguous()
    if torch.compiler.is_exporting():  # ONNX has no search
        bin_NB = (values_NB[:, :, None] >= inner_NE[:, None]).sum(2)
    else:
        bin_NB = torch.searchsorted(inner_NE, values_NB, right=True)
    share_NB = ((values_NB - left_NK.gather(1, bin_NB)) / width_NK.gather(1, bin_NB)).clamp(0, 1)
    start_NBD, slope_NBD = embedding(bin_NB + first_N1, table_XS).chunk(2, dim=2)
    squashed_NB1, share_NB1 = squashed_BN.T[:, :, None], share_NB[:, :, None]
    found_NBD = (start_NBD + share_NB1 * slope_NBD + squashed_NB1 * of_itself_N1D).relu()
    return torch.cat([squashed_BN[:, :, None], found_NBD.transpose(0, 1)], dim=2).flatten(1)


def _in_one_pass(*given: Tensor) -> Tensor:
    """Return the same bits by a kernel, for predictions and evaluations."""
    (rows, columns), bins, width = given[0].shape, given[3].shape[1], given[6].shape[2]
    out_BX = given[0].new_empty(rows, columns * (1 + width))
    places = (kernels.address(tensor, "bins", torch.float32, tensor.shape) for tensor in given)
    size = kernels.team(rows, out_BX.shape[1] * out_BX.itemsize)
    kernels.call("embed", kernels.Bins(size, *places, out_BX.data_ptr(), rows, columns, bins, width))
    return out_BX


class OnNumbers(nn.Module):
    """(rows_BFD, dense_BN) -> what a network makes of the rows and of what `numbers` makes of dense_BN."""

    def __init__(self, network: nn.Module, numbers: EmbeddedBins) -> None:
        super().__init__()
        self.network = network
        self.numbers = numbers

    def forward(self, rows_BFD: Tensor, dense_BN: Tensor) -> Tensor:
        return self.network(rows_BFD, self.numbers(dense_BN))


def fix_numbers(model: nn.Module) -> None:
    """Compute the bins' tables of a model once, for predictions: its weights do not change any more."""
    for module in model.modules():
        if isinstance(module, EmbeddedBins):
            for place, tensor in enumerate(module.table()):
                module.register_buffer(f"table_{place}", tensor.detach().clone(), persistent=False)


def bins_of(rows: Dataset | None, num_dense: int, num_bins: int) -> Tensor:
    """Return edges_NE of the training rows; without rows those of no bins, for a checkpoint to fill."""
    if rows is None:
        return torch.zeros(num_dense, num_bins + 1)
    return torch.from_numpy(quantile_bins(sample_dense(rows), num_bins)).to(torch.get_default_dtype())


def quantile_bins(dense_BN: Array, num_bins: int) -> Array:
    """Return edges_NE (N, num_bins + 1) float32, see `EmbeddedBins`: of at most a bin for each
    `BIN_ROWS` rows, the others empty; of a constant column all are equal.

    Edges lie at quantiles for which no value counts for more rows than a bin has: a frequent value, the zeros
    of a capital gain say, takes one bin and leaves the rest to the others.
    """
    num_rows, columns = dense_BN.shape
    edges_NE = np.empty((columns, num_bins + 1), np.float32)
    wanted = max(1, min(num_bins, num_rows // BIN_ROWS))
    for column in range(columns):
        values, counts = np.unique(dense_BN[:, column], return_counts=True)
        rank = np.cumsum(np.minimum(counts, num_rows / wanted))
        places = np.searchsorted(rank, np.linspace(0, rank[-1], wanted + 1)[1:-1])
        found = np.unique(np.concatenate([values[:1], values[places], values[-1:]]))
        edges_NE[column] = np.pad(found, (0, num_bins + 1 - len(found)), mode="edge")
    return edges_NE


def sample_dense(rows: Dataset) -> Array:
    """Return dense_BN of evenly spaced runs of the rows, of all where they are few."""
    index_B = np.arange(len(rows))
    if len(rows) > RUNS * RUN_ROWS:
        starts = np.linspace(0, len(rows) - RUN_ROWS, RUNS).astype(np.int64)
        index_B = (starts[:, None] + np.arange(RUN_ROWS)).ravel()
    return np.asarray(rows.fetch(index_B)["dense_BN"])
