"""A decoder as of today's language models: RMSNorm without weights, rotary positions (Su et al. 2021),
squared ReLU (So et al. 2021), no biases, and, if wanted, a memory of hashed n-grams before its second layer.

Letters: B samples, T tokens, H width of the network, A attention heads, E values of a head.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dphybrid.embedding.ngrams import NgramMemory

_ROTARY_BASE = 10_000.0


def _norm(hidden: Tensor) -> Tensor:
    return F.rms_norm(hidden, (hidden.shape[-1],))


class Decoder(nn.Module):
    """(rows_BTD, tokens_BT) -> hidden_BTH. memory: added to the hidden state before the second layer, or the
    only one."""

    def __init__(
        self, dim: int, hidden: int, layers: int, heads: int, dropout: float, memory: NgramMemory | None
    ) -> None:
        super().__init__()
        self.enter = nn.Identity() if dim == hidden else nn.Linear(dim, hidden, bias=False)
        self.layers = nn.ModuleList(_Layer(hidden, heads, dropout) for _ in range(layers))
        self.memory = memory

    def forward(self, rows_BTD: Tensor, tokens_BT: Tensor) -> Tensor:
        hidden_BTH = _norm(self.enter(rows_BTD))
        for number, layer in enumerate(self.layers):
            if self.memory is not None and number == min(1, len(self.layers) - 1):
                hidden_BTH = hidden_BTH + self.memory(hidden_BTH, tokens_BT)
            hidden_BTH = layer(hidden_BTH)
        return _norm(hidden_BTH)


class _Layer(nn.Module):
    """Causal attention and a feed-forward network, each added to the hidden state. Both start at zero."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.attend = nn.Linear(hidden, 3 * hidden, bias=False)
        self.leave = nn.Linear(hidden, hidden, bias=False)
        self.up = nn.Linear(hidden, 4 * hidden, bias=False)
        self.down = nn.Linear(4 * hidden, hidden, bias=False)
        self.dropout = nn.Dropout(dropout)
        nn.init.zeros_(self.leave.weight)
        nn.init.zeros_(self.down.weight)

    def forward(self, hidden_BTH: Tensor) -> Tensor:
        parts_BT3AE = self.attend(_norm(hidden_BTH)).unflatten(-1, (3, self.heads, -1))
        query_BATE, key_BATE, value_BATE = parts_BT3AE.permute(2, 0, 3, 1, 4)
        found_BATE = F.scaled_dot_product_attention(
            _turned(_norm(query_BATE)), _turned(_norm(key_BATE)), value_BATE, is_causal=True
        )
        hidden_BTH = hidden_BTH + self.dropout(self.leave(found_BATE.transpose(1, 2).flatten(2)))
        wide_BTX = F.relu(self.up(_norm(hidden_BTH))).square()
        return hidden_BTH + self.dropout(self.down(wide_BTX))


def _turned(values_BATE: Tensor) -> Tensor:
    """Turn each pair of values by an angle that grows with the position."""
    steps, width = values_BATE.shape[-2:]
    exponents_e = torch.arange(0, width, 2, device=values_BATE.device) / width
    angles_Te = torch.arange(steps, device=values_BATE.device)[:, None] * _ROTARY_BASE**-exponents_e
    cos_Te, sin_Te = angles_Te.cos().to(values_BATE.dtype), angles_Te.sin().to(values_BATE.dtype)
    first, second = values_BATE.chunk(2, -1)
    return torch.cat([first * cos_Te - second * sin_Te, first * sin_Te + second * cos_Te], -1)
