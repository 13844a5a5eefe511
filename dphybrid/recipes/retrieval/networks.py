"""Networks over a user's history: the items that the user has met, in order, become one vector, or one after
each item.

- bag: the sum of the items' rows, divided by the root of their number, through tanh;
- transformer: SASRec (Kang and McAuley 2018, "Self-Attentive Sequential Recommendation"): one vector after
  each item, by causal attention and learned positions.

A further network is a class here, its entry in `NETWORKS`, and its name in `model.kind`. It is made from the
config and the most items of a history. It takes (rows_BLD, lengths_B): rows of items, zeros where a history
is padded, and the number of items; for a bag in training the number that its sum stands for. `longest` is how
many of a user's latest items it reads by default. `next_item` says what it learns: a vector after each item,
which predicts the next one, or one vector of a part of the history, which gives back all of it.

Letters: B users, L items of a history (padded at the end), D width of a row and of a vector.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dphybrid.recipes.retrieval import RetrievalModelConfig


class Bag(nn.Module):
    """(rows_BLD, lengths_B) -> vectors_B1D; zeros for an empty history."""

    longest: ClassVar[int] = 1000
    next_item: ClassVar[bool] = False

    def __init__(self, options: RetrievalModelConfig, longest: int) -> None:
        super().__init__()

    def forward(self, rows_BLD: Tensor, lengths_B: Tensor) -> Tensor:
        scale_B11 = lengths_B.to(rows_BLD.dtype).clamp(min=1e-6).rsqrt()[:, None, None]
        return torch.tanh(rows_BLD.sum(1, keepdim=True) * scale_B11)


class Transformer(nn.Module):
    """(rows_BLD, lengths_B) -> vectors_BLD, by causal attention: the padding at the end changes no item
    before it."""

    longest: ClassVar[int] = 200
    next_item: ClassVar[bool] = True

    def __init__(self, options: RetrievalModelConfig, longest: int) -> None:
        super().__init__()
        o = options
        self.positions_LD = nn.Parameter(torch.randn(longest, o.dim) * 0.02)
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


NETWORKS: dict[str, Any] = {"bag": Bag, "transformer": Transformer}
