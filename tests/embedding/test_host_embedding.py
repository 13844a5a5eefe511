"""The table stays where it is, and its rows train as torch's own embedding and optimizers would train
them."""

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dphybrid.embedding import HostEmbedding, clip_grad_norm_, row_optimizer
from dphybrid.embedding.lookup import RUN, sort_ids, sum_by_row

ROWS, DIM = 50, 4


def table(**options: object) -> HostEmbedding:
    return HostEmbedding(ROWS, DIM, dtype=torch.float64, seed=3, name="words", **options)  # type: ignore[arg-type]


def test_nothing_moves_or_casts_the_table() -> None:
    model = nn.Sequential(table(), nn.Linear(DIM, 2))
    weight = model[0].weight
    model.to("meta").half()
    assert model[0].weight is weight
    assert (weight.device.type, weight.dtype) == ("cpu", torch.float64)
    assert model[1].weight.device.type == "meta"
    assert model[0](torch.tensor([1])).dtype == torch.float16  # looked-up rows have the model's type


@pytest.mark.parametrize("count", [0, 1, 100, 20_000])
@pytest.mark.parametrize("num_rows", [1, 700, 3_000_000, 2**40])
def test_occurrences_of_unique_ids(count: int, num_rows: int) -> None:
    ids_N = (
        torch.randint(0, 700, (count,), generator=torch.Generator().manual_seed(count))
        * (num_rows // 700)
        % num_rows
    )
    where = sort_ids(ids_N, num_rows)
    unique_U, inverse_N, counts_U = torch.unique(ids_N, return_inverse=True, return_counts=True)
    assert torch.equal(where.unique_U, unique_U)
    assert torch.equal(where.inverse_N.long(), inverse_N)
    assert torch.equal(where.order_N.long(), torch.argsort(ids_N, stable=True))
    ends = list(itertools.accumulate(counts_U.tolist(), initial=0))
    runs = [list(range(start, end, RUN)) for start, end in itertools.pairwise(ends)]
    assert where.starts_P.tolist() == [start for own in runs for start in own]
    firsts = list(itertools.accumulate(map(len, runs), initial=0))[:-1]
    assert where.first_U.tolist() == (firsts if len(where.starts_P) > len(runs) else [])


def test_gradients_of_a_frequent_id_are_summed_in_short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    ids_N = torch.cat([torch.zeros(5000, dtype=torch.int64), torch.arange(40), torch.full((RUN,), 7)])
    ids_N = ids_N[torch.randperm(len(ids_N), generator=torch.Generator().manual_seed(0))]
    grads_ND = torch.randn(len(ids_N), DIM, generator=torch.Generator().manual_seed(1))
    longest: list[int] = []
    embedding_bag = torch.embedding_bag

    def watched(weight: Tensor, places: Tensor, starts: Tensor) -> Any:
        longest.append(int(torch.diff(starts, append=torch.tensor([len(places)])).max()))
        return embedding_bag(weight, places, starts)

    monkeypatch.setattr(torch, "embedding_bag", watched)
    before, sums = torch.get_num_threads(), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        sums.append(sum_by_row(grads_ND, *sort_ids(ids_N, 40).indices()[1:]))
    torch.set_num_threads(before)
    assert max(longest) == -(-5001 // RUN)
    assert torch.equal(sums[0], sums[1])
    assert torch.equal(sums[0], sums[2])
    expected = torch.zeros(40, DIM, dtype=torch.float64).index_add_(0, ids_N, grads_ND.double())
    torch.testing.assert_close(sums[0].double(), expected, rtol=1e-5, atol=2e-5)


def test_adamw_makes_up_for_the_steps_that_a_row_missed() -> None:
    """Weight decay and second moments of all rows are those of torch's AdamW without momentum."""
    ours = table()
    dense = nn.Parameter(ours.weight.detach().clone())
    mine = row_optimizer("adamw", {"t": ours}, lr=0.05, beta2=0.9, weight_decay=0.3)
    theirs = torch.optim.AdamW([dense], lr=0.05, betas=(0.0, 0.9), weight_decay=0.3)
    for step in range(101):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randperm(ROWS, generator=generator)[: 2 if step < 100 else ROWS]  # at last all of them
        grads = torch.randn(len(ids), ours.dim, generator=generator, dtype=dense.dtype)
        for optimizer in (mine, theirs):
            optimizer.zero_grad()
        ours(ids).backward(grads)
        F.embedding(ids, dense).backward(grads)
        mine.step()
        theirs.step()
    torch.testing.assert_close(ours.weight.detach(), dense.detach(), rtol=1e-9, atol=1e-12)


def test_rows_that_are_not_trained_do_not_count_in_the_norm() -> None:
    def norm(whole: bool) -> float:
        table = HostEmbedding(9, 4, padding_idx=2, seed=1)
        loss = table(torch.tensor([1, 2, 2])).square().sum() + table(torch.tensor([2, 5])).sum()
        (loss + 0 * table.weight.sum() if whole else loss).backward()
        return clip_grad_norm_(table.parameters(), 1.0)

    assert norm(whole=True) == pytest.approx(norm(whole=False))


def test_clipping_joins_dense_parameters_and_rows() -> None:
    ours, layer = table(), nn.Linear(DIM, 1, dtype=torch.float64)
    dense, twin = ours.weight.detach().clone().requires_grad_(), copy.deepcopy(layer)
    ids = torch.tensor([3, 3, 7])
    layer(ours(ids)).square().sum().backward()
    twin(F.embedding(ids, dense)).square().sum().backward()
    norm = clip_grad_norm_([*layer.parameters(), ours.weight], 0.01)
    expected = nn.utils.clip_grad_norm_([*twin.parameters(), dense], 0.01)
    assert norm == pytest.approx(float(expected), rel=1e-9)
    torch.testing.assert_close(ours.weight.grad.to_dense(), dense.grad, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(layer.weight.grad, twin.weight.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (torch.tensor([[1, 2], [ROWS, 0]]), ["'words'", str(ROWS), "[1, 0]"]),
        (torch.tensor([-1]), ["'words'", "-1", "[0]"]),
        (torch.tensor([1.0]), ["'words'", "int64"]),
    ],
)
def test_wrong_ids_are_named(ids: torch.Tensor, words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        table()(ids)
    for word in words:
        assert word in str(caught.value)


def test_state_dict_is_that_of_an_embedding_and_a_reference() -> None:
    model = nn.Sequential(table())
    assert list(model.state_dict()) == ["0.weight"]
    assert model.state_dict()["0.weight"].data_ptr() == model[0].weight.data_ptr()
    plain = nn.Sequential(nn.Embedding(ROWS, DIM, dtype=torch.float64))
    model.load_state_dict(plain.state_dict())
    assert torch.equal(model[0].weight, plain[0].weight)
    plain.load_state_dict(model.state_dict())
    with pytest.raises(RuntimeError, match="shape"):
        nn.Sequential(HostEmbedding(3, DIM)).load_state_dict(plain.state_dict())
