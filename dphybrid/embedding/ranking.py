"""Scores queries against every row of a table, one block of rows at a time: finds the best rows, and the
ranks of known answers.

Letters: Q queries, D width of a row, V rows of the table, N rows of a block, S hidden rows per query
(padded), H hidden rows of all queries, K best rows to return.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dphybrid.embedding.table import HostEmbedding

SCORES = 2**23
"""Number of scores held at a time, which sets the size of a block."""
_TIE = 1e-6
"""Relative difference below which scores count as equal: the same sum in another order may differ by that."""

Score = Callable[[Tensor, Tensor], Tensor]


def dot_products(queries_QD: Tensor, rows_ND: Tensor) -> Tensor:
    """Return scores_QN. Both arguments may have further dimensions in front."""
    return queries_QD @ rows_ND.transpose(-1, -2)


@dataclass(frozen=True)
class Ranked:
    """Result of `rank_rows`.

    Attributes:
        rows_QK, scores_QK: The best rows and their scores, best first; padded with row -1 and score -inf.
        ranks_Q: Rank of each answer, 1 for the best; equal scores share the mean of their ranks, and scores
            that are NaN count as better than the answer.
        loss_Q: Cross entropy of a softmax over the answer and all rows that are not hidden.
    """

    rows_QK: Tensor
    scores_QK: Tensor
    ranks_Q: Tensor
    loss_Q: Tensor


@torch.no_grad()
def rank_rows(
    queries_QD: Tensor,
    table: HostEmbedding | Tensor,
    answers_Q: Tensor | None = None,
    *,
    hidden_QS: Tensor | None = None,
    k: int = 0,
    score: Score = dot_products,
    numbers_a_score: int = 1,
) -> Ranked:
    """Score each query against all rows of a table; return the `k` best rows and the rank of its answer.

    Holds one block of rows and scores at a time, on the queries' device.

    Args:
        table: A host table, or rows (V, D).
        answers_Q: One row per query; None: ranks and losses are NaN.
        hidden_QS: Rows that do not compete (known answers, items that a user has seen), padded with -1; an
            answer among them is still ranked.
        score: Function from (..., Q, D) and (..., N, D) to (..., Q, N).
        numbers_a_score: Numbers that `score` holds for each score while it computes; a larger one gives
            smaller blocks.
    """
    if hidden_QS is None:
        hidden_QS = torch.empty(len(queries_QD), 0, dtype=torch.int64, device="cpu")
    # Autocast may have made the queries 16-bit, too coarse for scores, which are sums of many products.
    queries_QD = queries_QD.to(torch.promote_types(queries_QD.dtype, torch.float32))
    best = Best(queries_QD, k)
    # own_Q: the answers' scores. total_Q: logarithm of the softmax's denominator so far.
    ranks_Q = own_Q = total_Q = queries_QD.new_full((len(queries_QD),), torch.nan)
    if answers_Q is not None:
        ids_Q, answers_Q = answers_Q.to("cpu"), answers_Q.to(queries_QD.device)
        rows_QD = (table(ids_Q) if isinstance(table, HostEmbedding) else table[ids_Q]).to(queries_QD)
        own_Q = total_Q = score(queries_QD.unsqueeze(1), rows_QD.unsqueeze(1))[:, 0, 0]
        ranks_Q = torch.ones_like(own_Q)
    for start, scores_QN in score_blocks(queries_QD, table, hidden_QS, score, numbers_a_score):
        if k:
            best.add(start, scores_QN)
        if answers_Q is not None:
            here_Q = (answers_Q >= start) & (answers_Q < start + scores_QN.shape[1])
            scores_QN[here_Q, answers_Q[here_Q] - start] = -torch.inf  # it does not compete with itself
            ranks_Q = ranks_Q + _better(scores_QN, own_Q)
            total_Q = torch.logaddexp(total_Q, scores_QN.logsumexp(1))
    return Ranked(best.rows_QK, best.scores_QK, ranks_Q, total_Q - own_Q)


def _better(scores_QN: Tensor, own_Q: Tensor) -> Tensor:
    """Return the number of scores that are better than each answer's own, and half of those equal to it."""
    own_Q1, close_Q1 = own_Q.unsqueeze(1), (_TIE * (1 + own_Q.abs())).unsqueeze(1)
    # `<=`, not `>`: NaN must count as better, or a model of NaNs would have the best ranks.
    halves_QN = (scores_QN <= own_Q1 + close_Q1).view(torch.int8)  # summing bools takes twice as long
    halves_QN += scores_QN <= own_Q1 - close_Q1
    # 2 for each worse score and 1 for each equal one, halved: ties share the mean of their ranks.
    return (2 * scores_QN.shape[1] - halves_QN.sum(1, dtype=torch.int32)) / 2


def score_blocks(
    queries_QD: Tensor,
    table: HostEmbedding | Tensor,
    hidden_QS: Tensor,
    score: Score = dot_products,
    numbers_a_score: int = 1,
) -> Iterator[tuple[int, Tensor]]:
    """Yield (first row of a block, the block's scores on the queries' device). Hidden rows score -inf."""
    num_rows = table.num_rows if isinstance(table, HostEmbedding) else len(table)
    step = max(1, SCORES // max(1, len(queries_QD) * numbers_a_score))
    query_H, column_H = (hidden_QS := hidden_QS.to(queries_QD.device)).ge(0).nonzero(as_tuple=True)
    row_H = hidden_QS[query_H, column_H]  # indices, not a mask of all scores: few rows are hidden
    for start in range(0, num_rows, step):
        stop = min(start + step, num_rows)
        ids_N = torch.arange(start, stop, device="cpu")
        # A slice of a tensor is no copy of it.
        block_ND = table(ids_N) if isinstance(table, HostEmbedding) else table[start:stop]
        rows_ND = block_ND.to(queries_QD)
        here_H = (row_H >= start) & (row_H < start + len(rows_ND))
        scores_QN = score(queries_QD, rows_ND)
        scores_QN[query_H[here_H], row_H[here_H] - start] = -torch.inf
        yield start, scores_QN


class Best:
    """Keeps the k best scores over all blocks: scores_QK and rows_QK, best first, padded with -inf and row
    -1."""

    def __init__(self, queries_QD: Tensor, k: int) -> None:
        self.scores_QK = queries_QD.new_full((len(queries_QD), k), -torch.inf)
        self.rows_QK = torch.full((len(queries_QD), k), -1, device=queries_QD.device)

    def add(self, start: int, scores_QN: Tensor) -> None:
        """Add a block of scores, whose first row is `start`."""
        top_QK, offset_QK = scores_QN.topk(min(self.scores_QK.shape[1], scores_QN.shape[1]))
        row_QK = (offset_QK + start).where(top_QK > -torch.inf, -1)
        both_Q2K = torch.cat([self.scores_QK, top_QK], 1)
        self.scores_QK, chosen_QK = both_Q2K.topk(self.scores_QK.shape[1])
        self.rows_QK = torch.cat([self.rows_QK, row_QK], 1).gather(1, chosen_QK)
