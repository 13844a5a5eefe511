"""Retrieval from histories: a user is the items met so far, so somebody who was not in training gets a list,
too.

The rows of these items come from a table in host memory, a network makes one vector of them, and the score of
an item is the product of that vector with the item's output vector, plus its bias. A bag learns to give back
all items of a history from a random part of them (Liang et al. 2018, "Variational Autoencoders for
Collaborative Filtering", without the variational part). A transformer predicts each next item (Kang and
McAuley 2018, "Self-Attentive Sequential Recommendation").

Where the output vectors are depends on model.softmax:

- full: a dense layer in the region, with a softmax over all items;
- sampled: a second table; the softmax is over candidates, which are the batch's items and drawn ones,
  corrected by how often an item is drawn.

Letters: B users, L items of a history (padded at the end), D width of a row and of a vector, V items, E width
of a vector and its 1 for the bias, T targets of a user (padded), C candidates, X places with a target.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dphybrid.config import ExperimentConfig
from dphybrid.data.batches import Array, Dataset, DrawnDataset, Draws
from dphybrid.embedding import HostEmbedding
from dphybrid.embedding.softmax import IGNORED, linear_cross_entropy
from dphybrid.parallel import DataParallel
from dphybrid.recipes.context import ModelContext
from dphybrid.recipes.lists import lists_of
from dphybrid.recipes.retrieval import RetrievalModelConfig
from dphybrid.recipes.retrieval.ranking import rank_held
from dphybrid.training.optimizers import make_dense_optimizer

NETWORK_DECAY = 0.1
"""Weight decay of a network's matrices as a share of train.weight_decay."""


class _Bag(nn.Module):
    """(rows_BLD, lengths_B) -> vectors_B1D: the sum of the items' rows, divided by the root of their number,
    through tanh; zeros for an empty history. lengths_B: in training the number that the sum stands for."""

    def forward(self, rows_BLD: Tensor, lengths_B: Tensor) -> Tensor:
        scale_B11 = lengths_B.to(rows_BLD.dtype).clamp(min=1e-6).rsqrt()[:, None, None]
        return torch.tanh(rows_BLD.sum(1, keepdim=True) * scale_B11)


class _Transformer(nn.Module):
    """(rows_BLD, lengths_B) -> vectors_BLD, one after each item, by causal attention and learned positions:
    the padding at the end changes no item before it."""

    def __init__(self, o: RetrievalModelConfig) -> None:
        super().__init__()
        self.positions_LD = nn.Parameter(torch.randn(longest_of(o), o.dim) * 0.02)
        self.enter = nn.Dropout(o.dropout)
        # No dropout of attention shares: torch draws it inside of its kernel, differently on each device.
        layer = nn.TransformerEncoderLayer(o.dim, o.heads, 4 * o.dim, 0.0, batch_first=True, norm_first=True)
        layer.dropout, layer.dropout1, layer.dropout2 = (nn.Dropout(o.dropout) for _ in range(3))
        self.network = nn.TransformerEncoder(layer, o.layers, nn.LayerNorm(o.dim), enable_nested_tensor=False)

    def forward(self, rows_BLD: Tensor, lengths_B: Tensor) -> Tensor:
        length, dim = rows_BLD.shape[1:]
        # Rows start small; the factor brings them to the size of the positions (Vaswani et al. 2017, section
        # 3.4).
        hidden_BLD = self.enter(rows_BLD * dim**0.5 + self.positions_LD[:length])
        mask_LL = torch.ones(length, length, dtype=torch.bool, device=rows_BLD.device).triu(1)
        vectors_BLD: Tensor = self.network(hidden_BLD, mask=mask_LL)
        return vectors_BLD


def longest_of(options: RetrievalModelConfig) -> int:
    """Return how many of a user's latest items are read."""
    return options.history or (1000 if options.kind == "bag" else 200)


def histories(items: Array, starts_B: Array, stops_B: Array, num_items: int) -> dict[str, Tensor]:
    """Return history_BL, each row's items[start:stop], in order and padded with `num_items`, whose row is
    zeros; and lengths_B."""
    history_BL = lists_of(items, starts_B, stops_B, num_items)
    return {"history_BL": history_BL, "lengths_B": torch.from_numpy(stops_B - starts_B).long()}


class _HistoryDataset(Dataset):
    """Users with two items or more. A transformer gets the next items as targets, a bag the whole history as
    input and as targets. Targets are the items' numbers, padded with IGNORED."""

    def __init__(self, arrays: Mapping[str, Array], options: RetrievalModelConfig) -> None:
        self.arrays, self.options, self.longest = arrays, options, longest_of(options)
        self.users = np.flatnonzero(np.diff(arrays["history_starts"]) > 1)

    def __len__(self) -> int:
        return len(self.users)

    def fetch(self, index_B: Array) -> dict[str, Tensor]:
        a, users_B = self.arrays, self.users[index_B]
        items, stops_B = a["history_items"], a["history_starts"][users_B + 1]
        # One item more than the longest history: the last one is a target only.
        one = int(self.options.kind == "transformer")
        starts_B = np.maximum(a["history_starts"][users_B], stops_B - self.longest - one)
        batch = histories(items, starts_B, stops_B - one, len(a["log_q_V"]))
        return batch | {"targets_BT": lists_of(items, starts_B + one, stops_B, IGNORED)}


def training_histories(rows: Dataset, info: Mapping[str, Any], options: RetrievalModelConfig) -> Dataset:
    """Return the training split for a network, with what is drawn anew in each epoch: the items of a
    bag that are dropped, and the candidates of a softmax outside of the region. rows: the prepared pairs."""
    arrays: Mapping[str, Array] = rows.arrays  # type: ignore[attr-defined]
    num_items = len(arrays["log_q_V"])
    sampled, num_drawn = options.is_sampled(num_items), int(info["negatives"])
    longest, share = longest_of(options), options.dropped

    def draw(batch: dict[str, Tensor], draws: Draws) -> dict[str, Tensor]:
        drawn = dict[str, Tensor]()
        lengths_B, history_BL = batch["lengths_B"], batch["history_BL"]
        if options.kind == "bag":
            kept_BL = torch.from_numpy(draws.uniform(longest, first=history_BL.shape[1]) >= share)
            num_B = (kept_BL & (torch.arange(kept_BL.shape[1]) < lengths_B[:, None])).sum(1)
            drawn["history_BL"] = history_BL.where(kept_BL, num_items)
            # The sum is then as large as that of the whole history, on average.
            drawn["lengths_B"] = num_B.clamp(min=1) * (1 - share)
        if sampled:
            targets_BT = batch["targets_BT"].numpy()
            known = arrays["train_pairs"]
            frequent_K = known[draws.of_batch().integers(0, len(known), num_drawn), 1]
            chosen = np.concatenate([targets_BT[targets_BT != IGNORED], frequent_K])
            items_C, counts_C = np.unique(chosen, return_counts=True)
            places_BT = np.where(targets_BT == IGNORED, IGNORED, np.searchsorted(items_C, targets_BT))
            drawn["targets_BT"] = torch.from_numpy(places_BT)
            drawn["candidates_C"] = torch.from_numpy(items_C).long()
            drawn["weight_C"] = torch.from_numpy(np.log(counts_C) - arrays["log_q_V"][items_C]).float()
        return drawn

    return DrawnDataset(_HistoryDataset(arrays, options), draw)


def _losses(
    vectors_BTD: Tensor, targets_BT: Tensor, weight_VD: Tensor, bias_V: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (loss_B, weight_B): the cross entropies of a user's targets, summed, and their number.

    vectors_BTD: one vector a target, or (B, 1, D): one of a user, which all targets share.
    """
    known_BT = targets_BT != IGNORED
    num_B = known_BT.sum(1)
    if vectors_BTD.shape[1] == 1:
        scores_BV = torch.addmm(bias_V, vectors_BTD[:, 0], weight_VD.T)
        own_BT = scores_BV.gather(1, targets_BT.clamp(min=0)) * known_BT
        return num_B * scores_BV.logsumexp(1) - own_BT.sum(1), num_B.to(scores_BV.dtype)
    # Only the places with a target; a padded one would cost a product with all items.
    loss_X = linear_cross_entropy(vectors_BTD[known_BT], weight_VD, targets_BT[known_BT], bias_V)
    loss_BT = loss_X.new_zeros(known_BT.shape).masked_scatter(known_BT, loss_X)
    return loss_BT.sum(1), num_B.to(loss_BT.dtype)


class _Region(nn.Module):
    """The network over histories and, unless candidates' vectors come from a table, output layer and loss."""

    def __init__(self, network: nn.Module, output: nn.Linear | None) -> None:
        super().__init__()
        self.network, self.output = network, output

    def forward(
        self, rows_BLD: Tensor, lengths_B: Tensor, targets_BT: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return vectors_BTD, in training (loss_B, weight_B) if there is an output layer. Without targets
        vectors_B1D of whole histories."""
        vectors_BTD: Tensor = self.network(rows_BLD, lengths_B)
        if targets_BT is None:
            last_B = (lengths_B - 1).clamp(0, vectors_BTD.shape[1] - 1)
            last_B1D = vectors_BTD.gather(1, last_B[:, None, None].expand(-1, 1, vectors_BTD.shape[2]))
            return last_B1D * (lengths_B > 0)[:, None, None]
        if self.output is None:
            return vectors_BTD
        return _losses(vectors_BTD, targets_BT, self.output.weight, self.output.bias)


class HistoryModel(nn.Module):
    """Trains a network over histories; in evaluation ranks all items for each user.

    Args:
        inputs: Rows of a history's items, and of the padding.
        items: Output vectors of candidates with the bias in the last column; None where the region has an
            output layer.
        depth: Length of the longest list that is evaluated.
        longest: How many of a user's latest items are read.
    """

    whole = ("candidates_C", "weight_C")

    def __init__(
        self,
        inputs: HostEmbedding,
        items: HostEmbedding | None,
        region: DataParallel,
        depth: int,
        longest: int,
    ) -> None:
        super().__init__()
        self.inputs, self.items, self.region = inputs, items, region
        # Each device gets a share of the candidates, and the home device all of them.
        self.outputs = None if items is None else DataParallel(nn.Identity(), region.devices)
        self.depth, self.longest = depth, longest
        self._catalog_VE: Tensor | None = None

    def train(self, mode: bool = True) -> "HistoryModel":
        # Weights may change before the next evaluation. `eval()` calls this, too.
        self._catalog_VE = None
        return super().train(mode)

    def table_ids(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the ids that `forward` looks up in training, so that their rows can be prefetched."""
        ids = {"inputs": batch["history_BL"]}
        return ids if self.items is None else ids | {"items": batch["candidates_C"]}

    def _candidates(self, items_C: Tensor) -> Tensor:
        """Return vectors_CE of items, with the bias in the last column."""
        assert self.items is not None
        assert self.outputs is not None
        vectors_CE: Tensor = self.outputs(self.outputs.rows(self.items, items_C))
        return vectors_CE

    def vectors(self, history_BL: Tensor, lengths_B: Tensor) -> Tensor:
        """Return vectors_BE of users by their histories (items in order, padded at the end, and their
        number); the last column is the 1 that the items' biases are multiplied by."""
        if history_BL.shape[1] > self.longest:
            first_B1 = (lengths_B - self.longest).clamp(min=0).unsqueeze(1)
            history_BL = history_BL.gather(1, first_B1 + torch.arange(self.longest))
            lengths_B = lengths_B.clamp(max=self.longest)
        vectors_B1D: Tensor = self.region(self.region.rows(self.inputs, history_BL), lengths_B)
        return F.pad(vectors_B1D.squeeze(1).float(), (0, 1), value=1.0)

    def catalog(self) -> Tensor:
        """Return catalog_VE, the vectors of all items with their biases in the last column, on the CPU. They
        are kept until `train` or `eval` is called."""
        # A local name: another thread may call `eval` meanwhile.
        vectors_VE = self._catalog_VE
        if vectors_VE is None:
            with torch.no_grad():
                if self.items is not None:
                    blocks = torch.arange(self.items.num_rows).split(2**14)
                    parts = [self._candidates(block).cpu() for block in blocks]
                else:
                    output = self.region.module.output
                    parts = [torch.cat([output.weight, output.bias.unsqueeze(1)], 1).cpu()]
            vectors_VE = torch.cat(parts).float()
            if self.region.devices.home.type == "cpu":
                # Column by column, so that the product with one user's vector reads memory at its full speed:
                # it takes 60 % of the time.
                vectors_VE = vectors_VE.T.contiguous().T
            self._catalog_VE = vectors_VE
        return vectors_VE

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        history_BL, lengths_B = batch["history_BL"], batch["lengths_B"]
        if "targets_BT" not in batch:
            return rank_held(self.vectors(history_BL, lengths_B), self.catalog(), batch, self.depth)
        found = self.region(self.region.rows(self.inputs, history_BL), lengths_B, batch["targets_BT"])
        if self.items is not None:
            # The batch's candidates compete for all users: scores and loss are the home device's.
            items_CE = self._candidates(batch["candidates_C"])
            bias_C = items_CE[:, -1] + batch["weight_C"].to(items_CE)
            found = _losses(found, batch["targets_BT"].to(found.device), items_CE[:, :-1], bias_C)
        loss_B, weight_B = found
        return {"loss": loss_B, "weight": weight_B}


def build_histories(context: ModelContext[RetrievalModelConfig]) -> HistoryModel:
    o, num_items = context.options, int(context.info["num_items"])
    output = items = None
    if o.is_sampled(num_items):
        items = context.table(num_items, o.dim + 1, std=0.05, name="items")
    else:
        output = nn.Linear(o.dim, num_items)
        nn.init.normal_(output.weight, std=0.05)
        nn.init.zeros_(output.bias)
    network = _Bag() if o.kind == "bag" else _Transformer(o)
    region = DataParallel(_Region(network, output), context.devices)
    # One row more, of zeros: the padding of histories.
    inputs = context.table(num_items + 1, o.dim, std=0.05, name="inputs", padding_idx=num_items)
    return HistoryModel(inputs, items, region, max(context.info["cutoffs"]), longest_of(o))


def optimizers(model: nn.Module, config: ExperimentConfig) -> Mapping[str, torch.optim.Optimizer]:
    """Return the optimizer of the dense parameters. Output vectors decay by train.weight_decay, like the rows
    of items; a network's matrices by a tenth of it, and its biases and norms not at all."""
    inside = set()
    if isinstance(model, HistoryModel):
        inside = {id(parameter) for parameter in model.region.module.network.parameters()}

    def share(parameter: nn.Parameter) -> float:
        if id(parameter) not in inside:
            return 1.0
        return NETWORK_DECAY if parameter.dim() > 1 else 0.0

    optimizer = make_dense_optimizer(model, config.train, share)
    return {} if optimizer is None else {"blocks": optimizer}
