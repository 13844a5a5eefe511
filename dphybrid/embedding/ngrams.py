"""Memory of a language model: rows of hashed n-grams in a host table, gated by the hidden state.

The rows that a token needs follow from the tokens before it alone. So they can be fetched while the step
before computes (give `RowPipeline` the `row_ids(tokens)`), so the table may be as large as the host's memory.

After Engram ("Conditional Memory via Scalable Lookup", arXiv 2601.07372), without its convolution: each order
and head hashes the last n tokens by multiply and xor, modulo a prime of its own; the rows of all heads are
concatenated, and a gate compares them with the hidden state.

Letters: B samples, T tokens, C width of the hidden state, H heads of all orders, D width of a row, R of the
rows of all heads.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dphybrid.embedding.lookup import is_integer, whole_numbers
from dphybrid.embedding.table import HostEmbedding
from dphybrid.util.errors import UserError

_SCALE = 5.0
"""Factor on the rows. With Adam it acts as a learning rate of so many times the given one."""


class NgramMemory(nn.Module):
    """Adds what a table in host memory holds for the last tokens: `h = h + memory(h, tokens)`.

    Args:
        hidden: Width C of the hidden state.
        rows: At most this many rows in all; each head has the largest prime, up to its share, that no other
            head has.
        dim: Width D of a row.
        orders: Lengths of the n-grams, each at least 2.
        heads: Hash functions for each order.
        separator: Token that ends a segment, such as the one between documents; n-grams do not reach across
            it.
        make: Builds the table from (num_rows, dim, std=, name=, and the options), as `HostEmbedding`.
        table: Its further options (dtype, path, seed of the initial values).

    The hash functions follow from rows, orders and heads alone: saved weights mean the same in every memory
    that is made with these. Orders, heads and separator are part of the state, and a state with others is
    refused.

    The output starts at zero, so that a trained decoder continues as it was. `table` is the host table. Its
    rows need no weight decay.

    Raises UserError for orders below 2, for rows that are too few for the heads, and for a separator that is
    no token.
    """

    def __init__(
        self,
        hidden: int,
        rows: int,
        dim: int = 32,
        *,
        orders: Sequence[int] = (2, 3),
        heads: int = 2,
        separator: int | None = None,
        make: Callable[..., HostEmbedding] = HostEmbedding,
        **table: Any,
    ) -> None:
        super().__init__()
        is_token = separator is None or (is_integer(separator) and separator >= 0)
        if not is_token or not is_integer(heads) or heads < 1:
            raise UserError(
                f"NgramMemory: heads={heads!r}, separator={separator!r}; give at least one head, and a token "
                "or None"
            )
        self.orders = orders = tuple(orders)
        wrong = not orders or any(not is_integer(n) or n < 2 for n in orders)
        if wrong or len(set(orders)) < len(orders):
            raise UserError(
                f"NgramMemory: orders={list(orders)}; give different lengths of at least 2, such as (2, 3). "
                "Single tokens have rows in the model's own embedding"
            )
        self.heads, self.separator = heads, separator
        sizes = _primes_up_to(rows, heads * len(self.orders))
        starts = np.cumsum([0, *sizes[:-1]])
        # Not buffers: they belong to the host table and must not follow the blocks to a GPU.
        self._sizes_H, self._starts_H = torch.tensor(sizes, device="cpu"), torch.from_numpy(starts)
        # Odd, so that no bit of a token is lost; products wrap around. Always the same numbers.
        drawn = np.random.default_rng([0, 0]).integers(2**62, size=max(self.orders))
        self._factors: list[int] = (2 * drawn + 1).tolist()
        self.table = make(sum(sizes), dim, std=0.02 / _SCALE, **{"name": "memory"} | table)
        width = dim * len(sizes)
        self.key = nn.Linear(width, hidden, bias=False)
        self.value = nn.Linear(width, hidden, bias=False)
        nn.init.zeros_(self.value.weight)

    def get_extra_state(self) -> Tensor:
        """Return what the rows mean beside their number and width: separator, heads and orders."""
        separator = -1 if self.separator is None else self.separator
        return torch.tensor([separator, self.heads, *self.orders], device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        """Raise UserError for a state of other options. torch calls this before it loads table and layers."""
        expected = self.get_extra_state()
        if not torch.equal(state.to(expected), expected):
            raise UserError(
                f"NgramMemory: the state's separator (-1: None), heads and orders are {state.tolist()}, here "
                f"they are {expected.tolist()}; make it with the options of the state"
            )

    def row_ids(self, tokens_BT: Tensor, before: Tensor | None = None) -> Tensor:
        """Return the rows (B, T, H) of `table` for token ids (B, T), on the CPU.

        before: the tokens (B, any number) in front of these, as under a key/value cache; the last
        max(orders) - 1 of them count. Tokens before the first one, and those before a separator, count as
        missing: the n-gram is then shorter, and has rows of its own. Raises UserError for negative ids and
        for other types.
        """
        tokens_BT = whole_numbers(tokens_BT, self.table.name)
        if tokens_BT.dim() != 2:
            raise UserError(f"NgramMemory: tokens of shape {tuple(tokens_BT.shape)}; give (B, T)")
        if before is not None:
            before = whole_numbers(before, self.table.name)[:, -(max(self.orders) - 1) :]
            return self.row_ids(torch.cat([before, tokens_BT], 1))[:, before.shape[1] :]
        if tokens_BT.numel() and int(tokens_BT.min()) < 0:
            raise UserError(
                f"NgramMemory: token {int(tokens_BT.min())} is negative; replace padding by a token"
            )
        length, longest = tokens_BT.shape[1], max(self.orders)
        padded_BX = F.pad(tokens_BT, (longest - 1, 0), value=-1)
        mixed_BT = (tokens_BT + 1) * self._factors[0]  # 0: no token
        # 1 where a token, counted back from here, belongs to the segment.
        inside_BT = torch.ones_like(tokens_BT)
        mixed_of: dict[int, Tensor] = {}
        for order in range(2, longest + 1):
            earlier_BT = padded_BX[:, longest - order :][:, :length]
            if self.separator is not None:
                inside_BT = inside_BT * (earlier_BT != self.separator)
            mixed_of[order] = mixed_BT = mixed_BT ^ ((earlier_BT + 1) * inside_BT * self._factors[order - 1])
        mixed_BTO = torch.stack([mixed_of[order] for order in self.orders], -1)
        return mixed_BTO.repeat_interleave(self.heads, -1).remainder(self._sizes_H) + self._starts_H

    def forward(self, hidden_BTC: Tensor, tokens_BT: Tensor, before: Tensor | None = None) -> Tensor:
        """Return what is to be added to hidden_BTC: value * sigmoid(norm(hidden) . norm(key) / sqrt(C)).
        before: see `row_ids`; a decoder with a key/value cache must give them."""
        if tokens_BT.shape != hidden_BTC.shape[:2]:
            raise UserError(
                f"NgramMemory: hidden state {tuple(hidden_BTC.shape)} and tokens {tuple(tokens_BT.shape)}; "
                "give (B, T, C) and (B, T)"
            )
        rows_BTHD = self.table(self.row_ids(tokens_BT, before), to=hidden_BTC.device)
        rows_BTR = rows_BTHD.flatten(-2).to(hidden_BTC.dtype)  # of a model in half precision, too
        value_BTC = self.value(rows_BTR)
        gate_BT1 = self._gate(hidden_BTC, self.key(rows_BTR)).unsqueeze(-1)
        added_BTC: Tensor = gate_BT1.to(value_BTC.dtype) * value_BTC
        return added_BTC

    def _gate(self, hidden_BTC: Tensor, key_BTC: Tensor) -> Tensor:
        """Return the gates (B, T), times the scale of the rows: so it multiplies B x T numbers. By the dot
        products of the normalized states, not the states: that takes a third less time."""
        # In float16, sums of squares overflow, and its epsilon is larger than the keys.
        wide = torch.promote_types(hidden_BTC.dtype, torch.float32)
        width, eps = hidden_BTC.shape[-1], torch.finfo(wide).eps
        hidden_BTC, key_BTC = hidden_BTC.to(wide), key_BTC.to(wide)
        dot = torch.linalg.vecdot
        hidden_BT = dot(hidden_BTC, hidden_BTC) / width + eps
        key_BT = _SCALE**2 * dot(key_BTC, key_BTC) / width + eps
        match_BT = _SCALE * dot(hidden_BTC, key_BTC) * (hidden_BT * key_BT).rsqrt()
        return _SCALE * torch.sigmoid(match_BT / math.sqrt(width))


def _primes_up_to(rows: int, count: int) -> list[int]:
    """Return the `count` largest primes up to an equal share of `rows`, descending. Raises UserError if there
    are fewer."""
    numbers = range(int(rows) // count, 1, -1)
    primes = (n for n in numbers if (n % np.arange(2, math.isqrt(n) + 1)).all())
    if len(largest := list(itertools.islice(primes, count))) < count:
        raise UserError(
            f"NgramMemory: rows={rows} are too few; {count} heads need a prime of their own each, up to an "
            "equal share of the rows; give more"
        )
    return largest
