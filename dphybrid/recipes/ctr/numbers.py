"""Piecewise-linear encoding: a number becomes several inputs, by quantile bins of the training rows.

Letters: B samples, N numeric columns, K bins of a column, E edges of bins (K + 1), D outputs of a column's
layer, I columns of the dense input (numbers and flags), X rows of the lookup table (N K), S its width (2 D).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding

import dphybrid.kernels as kernels
from dphybrid.data.batches import Array, Dataset, evenly_spaced

BIN_ROWS = 8
"""Fewest training rows for each bin."""
RUNS, RUN_ROWS = 64, 1024
"""Of long data, this many runs of this many neighbouring rows decide the bins."""


class EmbeddedBins(nn.Module):
    """dense_BI -> (B, N * (1 + D) + flags): for each number its squashed value, and D outputs of ReLU(linear
    layer), with a layer for each column. The layer's inputs are the squashed number and the number's position
    in each bin: 0 below the bin, 1 above, linear within. Then the flags.

    The piecewise-linear encoding of Gorishniy, Rubachev and Babenko 2022, "On Embeddings for Numerical
    Features in Tabular Deep Learning", sections 3.2.1 and 3.3, with three differences. Values beyond the
    outermost bins get the positions of their ends. A value that would fill several quantiles gets one bin, so
    that the other values share the rest. The number itself, `squashed`, is an input, too, because a few
    hundred rows are too few to learn a straight line from bins.

    Args:
        edges_NE: (N, K + 1), ascending; equal edges stand for bins that a column with few values does not
            need. A buffer: the bins of training belong to the checkpoint.
        width: D.
        flags: Columns of dense_BI that are 0 or 1. Bins would tell no more of them, so they follow the
            encoded numbers as they are.
    """

    edges_NE: Tensor
    places_I: Tensor
    table_XS: Tensor | None

    def __init__(self, edges_NE: Tensor, width: int, flags: Sequence[int] = ()) -> None:
        super().__init__()
        self.register_buffer("edges_NE", edges_NE)
        # The bins and the number itself: as many inputs as edges.
        num_dense, inputs = edges_NE.shape
        # The bound with which nn.Linear starts its weights.
        bound = inputs**-0.5
        self.weight_NED = nn.Parameter(torch.empty(num_dense, inputs, width).uniform_(-bound, bound))
        self.bias_ND = nn.Parameter(torch.empty(num_dense, width).uniform_(-bound, bound))
        numbers = sorted(set(range(num_dense + len(flags))).difference(flags))
        # Not persistent: facts of the data, which the builder gets again, and what is fixed for predictions.
        self.register_buffer("places_I", torch.tensor([*numbers, *flags]), persistent=False)
        self.register_buffer("table_XS", None, persistent=False)

    def forward(self, dense_BI: Tensor) -> Tensor:
        weights = self.edges_NE, self.weight_NED, self.bias_ND
        # The kernel has no gradient by the numbers themselves.
        if self.training and not dense_BI.requires_grad and kernels.may_train(dense_BI, *weights):
            found_BX: Tensor = _Embedded.apply(dense_BI, self.places_I, *weights)
            return found_BX
        table_XS = self.table() if self.table_XS is None else self.table_XS
        values_BN, flags_BF = dense_BI, dense_BI[:, :0]
        if len(self.places_I) > len(self.edges_NE):
            places = self.places_I.split([len(self.edges_NE), len(self.places_I) - len(self.edges_NE)])
            values_BN, flags_BF = (dense_BI.index_select(1, each) for each in places)
        encoded_BX = _by_torch(values_BN, self.edges_NE, self.weight_NED[:, :1], table_XS)
        return torch.cat([encoded_BX, flags_BF], dim=1)

    def table(self) -> Tensor:
        """Return the lookup table: each bin's start and slope. It depends on edges and weights alone."""
        # The layer's output is piecewise linear. All bins below the number's own have position 1, so the sum
        # of their weights is a constant of that bin ("start"); only its own bin is left to compute ("slope").
        edges_NE, bins = self.edges_NE, self.edges_NE.shape[1] - 1
        slope_NKD = self.weight_NED[:, 1:] * (edges_NE.diff(dim=1) > 0)[:, :, None]
        below_KK = torch.ones(bins, bins, device=edges_NE.device, dtype=slope_NKD.dtype).tril(-1)
        # A matrix product, as cumsum has no deterministic form on GPUs.
        start_NKD = self.bias_ND[:, None] + torch.einsum("kj,njd->nkd", below_KK, slope_NKD)
        return torch.cat([start_NKD, slope_NKD], dim=2).flatten(0, 1)

    def fix_for_predictions(self) -> None:
        """Compute the table once: the weights must not change any more."""
        self.table_XS = self.table().detach()


def _by_torch(values_BN: Tensor, edges_NE: Tensor, of_itself_N1D: Tensor, table_XS: Tensor) -> Tensor:
    """Compute what the kernel `embed` does, to the bit, without flags."""
    squashed_BN = squashed(values_BN)
    values_NB, bins = values_BN.T.contiguous(), edges_NE.shape[1] - 1
    inner_NE = edges_NE[:, 1:-1].contiguous()
    bin_NB = torch.searchsorted(inner_NE, values_NB, right=True)
    left_NK, width_NK = edges_NE[:, :-1], edges_NE.diff(dim=1).clamp(min=1e-30)  # no division by 0
    share_NB = ((values_NB - left_NK.gather(1, bin_NB)) / width_NK.gather(1, bin_NB)).clamp(0, 1)
    first_N1 = bins * torch.arange(edges_NE.shape[0], device=edges_NE.device)[:, None]
    start_NBD, slope_NBD = embedding(bin_NB + first_N1, table_XS).chunk(2, dim=2)
    squashed_NB1, share_NB1 = squashed_BN.T[:, :, None], share_NB[:, :, None]
    found_NBD = (start_NBD + share_NB1 * slope_NBD + squashed_NB1 * of_itself_N1D).relu()
    return torch.cat([squashed_BN[:, :, None], found_NBD.transpose(0, 1)], dim=2).flatten(1)


class _Embedded(torch.autograd.Function):
    """Computes the encoding in one pass by a C kernel, and the gradients of weight and bias in another:
    together an eighth of the time of torch's operations."""

    @staticmethod
    def forward(ctx: Any, *given: Tensor) -> Tensor:
        dense_BI, places_I, edges_NE, weight_NED, bias_ND = given
        table_XS = _table(edges_NE, weight_NED, bias_ND)
        out_BX = _encoded(dense_BI, places_I, edges_NE, weight_NED, table_XS)
        ctx.save_for_backward(dense_BI, places_I, edges_NE, weight_NED, out_BX)
        return out_BX

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BX: Tensor) -> tuple[Tensor | None, ...]:
        dense_BI, places_I, edges_NE, weight_NED, out_BX = ctx.saved_tensors
        grads = torch.empty_like(weight_NED), torch.empty_like(weight_NED[:, 0])
        given = (dense_BI, places_I, edges_NE, None, None, _empty_table(weight_NED), out_BX, grad_BX, *grads)
        _call("embed_backward", weight_NED.shape, *given)
        return None, None, None, *grads


def _table(edges_NE: Tensor, weight_NED: Tensor, bias_ND: Tensor) -> Tensor:
    table_XS = _empty_table(weight_NED)
    _call("bin_table", weight_NED.shape, None, None, edges_NE, weight_NED, bias_ND, table_XS)
    return table_XS


def _empty_table(weight_NED: Tensor) -> Tensor:
    columns, inputs, width = weight_NED.shape
    return weight_NED.new_empty(columns * (inputs - 1), 2 * width)


def _encoded(
    dense_BI: Tensor, places_I: Tensor, edges_NE: Tensor, weight_NED: Tensor, table_XS: Tensor
) -> Tensor:
    columns, _, width = weight_NED.shape
    out_BX = dense_BI.new_empty(len(dense_BI), columns * width + len(places_I))
    given = (dense_BI, places_I, edges_NE, weight_NED, None, table_XS, out_BX)
    _call("embed", weight_NED.shape, *given)
    return out_BX


def _call(
    name: str, shape: Sequence[int], dense_BI: Tensor | None, places_I: Tensor | None, *given: Tensor | None
) -> None:
    """Call a kernel. shape: of the weights. given: the further tensors of `struct bins`, in its order; None
    for those that the kernel does not use."""
    columns, inputs, width = shape
    rows, places = (0, columns) if dense_BI is None or places_I is None else (len(dense_BI), len(places_I))
    out = (rows, columns * width + places)
    of_weights = ((columns, inputs), (columns, inputs, width), (columns, width))
    shapes = (*of_weights, (columns * (inputs - 1), 2 * width), out, out, *of_weights[1:])
    held = [None if each is None else each.contiguous() for each in (dense_BI, *given)]
    addresses = [
        None if each is None else kernels.address(each, "bins", torch.float32, size)
        for each, size in zip(held, ((rows, places), *shapes), strict=False)
    ]
    at = None if places_I is None else kernels.address(places_I, "bins", torch.int64, (places,))
    missing = [None] * (9 - len(addresses))
    sizes = (rows, columns, places - columns, inputs - 1, width)
    call = kernels.Bins(kernels.team(rows, 4 * out[1]), addresses[0], at, *addresses[1:], *missing, *sizes)
    if not kernels.call(name, call):
        raise TypeError(f"bins: {sizes}, {places_I}")


def squashed(dense_BN: Tensor) -> Tensor:
    """Return each number z as z / sqrt(1 + (z / 3)^2): nearly itself near 0, outliers limited to 3."""
    dense_BN = dense_BN.clamp(-1e9, 1e9)  # whose squares float32 can hold
    # By the root of a double: torch's root of a float is not correctly rounded, the kernel's is.
    return dense_BN / (1 + (dense_BN / 3).square()).double().sqrt().to(dense_BN.dtype)


class OnNumbers(nn.Module):
    """(rows_BFD, dense_BI) -> network(rows_BFD, numbers(dense_BI))."""

    def __init__(self, network: nn.Module, numbers: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.numbers = numbers

    def forward(self, rows_BFD: Tensor, dense_BI: Tensor) -> Tensor:
        return self.network(rows_BFD, self.numbers(dense_BI))


def bins_of(rows: Dataset | None, columns: Sequence[int], num_bins: int) -> Tensor:
    """Return edges_NE of these columns of the training rows; without rows zeros, which a checkpoint
    replaces."""
    if rows is None:
        return torch.zeros(len(columns), num_bins + 1)
    dense_BN = sample_dense(rows)[:, columns]
    return torch.from_numpy(quantile_bins(dense_BN, num_bins)).to(torch.get_default_dtype())


def quantile_bins(dense_BN: Array, num_bins: int) -> Array:
    """Return edges_NE (N, num_bins + 1) float32: `quantile_edges` of each column, with at most one bin per
    `BIN_ROWS` rows. The other bins are empty; in a constant column all edges are equal."""
    num_rows, columns = dense_BN.shape
    edges_NE = np.empty((columns, num_bins + 1), np.float32)
    for column in range(columns):
        edges = quantile_edges(dense_BN[:, column], max(1, min(num_bins, num_rows // BIN_ROWS)))
        # All columns get the same number of edges; repeating the last one makes empty bins.
        edges_NE[column] = np.pad(edges, (0, num_bins + 1 - len(edges)), mode="edge")
    return edges_NE


def quantile_edges(numbers: Array, most: int) -> Array:
    """Return the ends of at most `most` bins (at least one) that hold about as many numbers each, ascending.
    Each end is one of the numbers. None counts for more of them than a bin has: a frequent value begins one
    bin and leaves the rest to others."""
    values, counts = np.unique(numbers, return_counts=True)
    rank = np.cumsum(np.minimum(counts, len(numbers) / most))
    places = np.searchsorted(rank, np.linspace(0, rank[-1], most + 1)[1:-1])
    return np.unique(np.concatenate([values[:1], values[places], values[-1:]]))


def sample_dense(rows: Dataset) -> Array:
    """Return dense_BN of evenly spaced runs of the rows, or of all rows if they are few."""
    index_B = np.arange(len(rows))
    if len(rows) > RUNS * RUN_ROWS:
        starts = evenly_spaced(len(rows) - RUN_ROWS + 1, RUNS)
        index_B = (starts[:, None] + np.arange(RUN_ROWS)).ravel()
    return np.asarray(rows.fetch(index_B)["dense_BN"])
