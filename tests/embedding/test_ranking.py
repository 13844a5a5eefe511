"""Ranks and lists over a whole table, block by block, against a naive reference."""

import math

import pytest
import torch

from dphybrid.embedding import HostEmbedding, rank_rows


@pytest.mark.parametrize("of_table", [True, False])
@pytest.mark.parametrize("held", [1, 4 * 7, 2**23])
def test_it_is_what_sorting_all_scores_gives(
    of_table: bool, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dphybrid.embedding.ranking.SCORES", held)
    table = HostEmbedding(23, 5, dtype=torch.float64, seed=3)
    with torch.no_grad():
        table.weight[6] = table.weight[4]  # equal scores
    random = torch.Generator().manual_seed(0)
    queries_QD = torch.randn(4, 5, generator=random, dtype=torch.float64)
    answers_Q = torch.tensor([4, 0, 22, 9])
    hidden_QS = torch.tensor([[1, 2, -1], [-1, -1, -1], [22, 3, 5], [0, 23, 40]])
    rows = table if of_table else table.weight.detach()
    found = rank_rows(queries_QD, rows, answers_Q, hidden_QS=hidden_QS, k=6)
    scores_QV = (queries_QD @ table.weight.detach().T).tolist()
    for q, scores in enumerate(scores_QV):
        answer = int(answers_Q[q])
        open_rows = [v for v in range(23) if v not in hidden_QS[q].tolist()]
        others = [v for v in open_rows if v != answer]
        above = sum(scores[v] > scores[answer] + 1e-9 for v in others)
        equal = sum(abs(scores[v] - scores[answer]) <= 1e-9 for v in others)
        assert float(found.ranks_Q[q]) == 1 + above + equal / 2
        total = sum(math.exp(scores[v] - scores[answer]) for v in [answer, *others])
        assert float(found.loss_Q[q]) == pytest.approx(math.log(total))
        best = sorted((scores[v] for v in open_rows), reverse=True)[:6]
        assert found.scores_QK[q].tolist() == pytest.approx(best)
        assert [scores[v] for v in found.rows_QK[q].tolist()] == pytest.approx(best)


def test_the_best_of_many_rows_are_what_sorting_all_scores_gives() -> None:
    """More rows than are looked at one by one; hidden ones among the best, ties, and a NaN."""
    rows_VD = torch.randn(64 * 41 + 17, 3, generator=torch.Generator().manual_seed(0))
    rows_VD[-1] = rows_VD[100] = rows_VD[101] = 9.0  # ties, one of them behind the last whole group
    queries_QD = torch.eye(3)
    hidden_QS = torch.tensor([[100, 5], [-1, -1], [-1, -1]])
    scores_QV = queries_QD @ rows_VD.T
    scores_QV[0, [100, 5]] = -torch.inf
    for k in (1, 3, 10, 11):
        best = rank_rows(queries_QD, rows_VD, hidden_QS=hidden_QS, k=k)
        assert best.scores_QK.equal(scores_QV.sort(1, descending=True).values[:, :k])
        assert best.scores_QK.equal(scores_QV.gather(1, best.rows_QK))
        assert all(len(set(rows)) == k for rows in best.rows_QK.tolist())
    rows_VD[70, 1] = torch.nan
    assert rank_rows(queries_QD[1:2], rows_VD, k=2).scores_QK[0].isnan().tolist() == [True, False]


def test_a_list_ends_where_no_row_is_left() -> None:
    hidden_QS = torch.tensor([[0, 1]])
    found = rank_rows(torch.ones(1, 2), torch.eye(3, 2), hidden_QS=hidden_QS, k=4)
    assert found.rows_QK.tolist() == [[2, -1, -1, -1]]
    assert found.scores_QK[0, 1:].tolist() == [-math.inf] * 3
    assert found.ranks_Q.isnan().all()


def test_short_queries_are_scored_in_float32() -> None:
    queries_QD = torch.tensor([[1.0, 1.0]], dtype=torch.bfloat16)
    rows_VD = torch.tensor([[1.0, 0.001], [1.0, 0.002]])  # equal in bfloat16
    assert rank_rows(queries_QD, rows_VD, torch.tensor([1])).ranks_Q.tolist() == [1.0]


def test_scores_that_are_no_number_rank_an_answer_last() -> None:
    rows_VD = torch.eye(4)
    queries_QD = torch.stack([torch.full((4,), math.nan), torch.tensor([0.0, 0.0, 1.0, 0.0])])
    assert rank_rows(queries_QD, rows_VD, torch.tensor([2, 2])).ranks_Q.tolist() == [5.0, 1.0]
    rows_VD[0] = math.nan  # a row that no answer can beat
    assert rank_rows(queries_QD[1:], rows_VD, torch.tensor([2])).ranks_Q.tolist() == [2.0]
