"""`NgramMemory`: rows of hashed n-grams, gated by the hidden state."""

import pytest
import torch
from torch import nn

from dphybrid.embedding import NgramMemory, RowPipeline, dense_parameters, find_tables, row_optimizer
from dphybrid.parallel import DataParallel
from dphybrid.util.errors import UserError


class Language(nn.Module):
    """Predicts each token from the ones before; returns each sample's loss."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(30, 8)
        self.memory = NgramMemory(8, 2000, 4, seed=1, separator=0)
        self.out = nn.Linear(8, 30)
        nn.init.normal_(self.memory.value.weight, std=0.1)

    def forward(self, tokens_BT: torch.Tensor, next_BT: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(tokens_BT)
        scores = self.out(hidden + self.memory(hidden, tokens_BT))
        return nn.functional.cross_entropy(scores.transpose(1, 2), next_BT, reduction="none").mean(1)


def memory(**options: object) -> NgramMemory:
    return NgramMemory(8, 2000, 4, **{"seed": 1, "orders": (2, 3), "heads": 2, **options})  # type: ignore[arg-type]


def test_rows_follow_from_the_last_tokens_alone() -> None:
    ids = memory().row_ids(torch.tensor([[5, 6, 7, 8], [9, 6, 7, 8]]))
    assert ids.shape == (2, 4, 4)
    assert not (ids[0, 0] == ids[1, 0]).any()  # other tokens
    assert torch.equal(ids[0, 2, :2], ids[1, 2, :2])  # the same last two
    assert not (ids[0, 2, 2:] == ids[1, 2, 2:]).any()  # but not the last three
    assert torch.equal(ids[0, 3], ids[1, 3])
    assert torch.equal(ids, memory(seed=2).row_ids(torch.tensor([[5, 6, 7, 8], [9, 6, 7, 8]])))


def test_each_head_has_rows_and_a_prime_of_its_own() -> None:
    of = memory()
    ids = of.row_ids(torch.randint(1000, (50, 40), generator=torch.Generator().manual_seed(0)))
    sizes = [499, 491, 487, 479]
    starts = [0, 499, 990, 1477]
    for head, (size, start) in enumerate(zip(sizes, starts, strict=True)):
        used = ids[..., head].unique()
        assert start <= int(used.min())
        assert int(used.max()) < start + size
        assert len(used) > 0.9 * size  # spread over all of them
    assert of.table.num_rows == sum(sizes)


@pytest.mark.parametrize("separator", [0, 7])
def test_no_n_gram_reaches_across_a_separator(separator: int) -> None:
    ids = memory(separator=separator).row_ids(
        torch.tensor([[1, 2, separator, 3, 4], [5, 6, separator, 3, 4]])
    )
    assert torch.equal(ids[0, 3:], ids[1, 3:])
    assert not torch.equal(ids[0, 2], ids[1, 2])  # the separator itself belongs to the segment before
    alone = memory(separator=separator).row_ids(torch.tensor([[3, 4]]))
    assert torch.equal(ids[0, 3:], alone[0])


def test_rows_under_a_cache_are_those_of_the_whole_text() -> None:
    tokens, hidden = torch.randint(1, 30, (2, 9)), torch.randn(2, 9, 8)
    tokens[0, 5] = 0
    for of in (memory(orders=(2, 4)), memory(orders=(2, 4), separator=0)):
        nn.init.ones_(of.value.weight)
        whole = of(hidden, tokens)
        for start, stop in ((0, 1), (1, 2), (4, 9), (7, 8)):
            part = of(hidden[:, start:stop], tokens[:, start:stop], before=tokens[:, :start])
            torch.testing.assert_close(part, whole[:, start:stop])


@pytest.mark.parametrize("options", [{"orders": (3, 2)}, {"orders": (3, 4)}, {"heads": 1}, {"separator": 0}])
def test_a_state_of_other_options_is_refused_before_it_changes_anything(options: dict[str, object]) -> None:
    saved = memory().state_dict()
    other = memory(seed=2, **options)
    before = other.table.weight.detach().clone()
    with pytest.raises(UserError, match=r"the state's .* are \[-1, 2, 2, 3\], here"):
        other.load_state_dict(saved)
    assert torch.equal(other.table.weight, before)
    same = memory(seed=2)
    same.load_state_dict(saved)
    assert torch.equal(same.table.weight, saved["table.weight"])


def test_the_output_starts_at_zero_and_is_gated() -> None:
    of, hidden, tokens = memory(), torch.randn(2, 5, 8), torch.randint(30, (2, 5))
    assert not of(hidden, tokens).any()
    nn.init.ones_(of.value.weight)
    rows = 5.0 * of.table(of.row_ids(tokens)).flatten(-2)
    norm = lambda x: x / (x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt()  # noqa: E731
    gate = torch.sigmoid((norm(hidden) * norm(rows @ of.key.weight.T)).sum(-1, keepdim=True) / 8**0.5)
    torch.testing.assert_close(of(hidden, tokens), gate * (rows @ of.value.weight.T))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_model_of_another_precision_adds_its_own(dtype: torch.dtype) -> None:
    drawn = torch.Generator().manual_seed(0)
    hidden, tokens = 300 * torch.randn(2, 5, 8, generator=drawn), torch.randint(30, (2, 5), generator=drawn)
    of = memory()
    nn.init.normal_(of.key.weight, std=0.1, generator=drawn)
    nn.init.ones_(of.value.weight)
    wanted = of(hidden, tokens)
    added = of.to(dtype)(hidden.to(dtype), tokens)
    assert added.dtype == dtype
    torch.testing.assert_close(added.float(), wanted, atol=0.002, rtol=0.02)


def losses(devices: str, mode: str = "off") -> list[float]:
    """Return the losses of some steps. mode: of the pipeline."""
    torch.manual_seed(0)
    model = DataParallel(Language().double(), devices)
    dense = torch.optim.Adam(dense_parameters(model), lr=0.05)
    rows = row_optimizer("adam", model, lr=0.05)
    windows = torch.randint(30, (6, 7, 10), generator=torch.Generator().manual_seed(2))
    batches = [(window[:, :-1], window[:, 1:]) for window in windows]
    (table,) = find_tables(model)
    found = []
    with RowPipeline(model, mode=mode, on_cpu=True) as pipeline:
        for batch in pipeline.prefetch(batches, lambda batch: {table: model.module.memory.row_ids(batch[0])}):
            loss = model(*batch).mean()
            loss.backward()
            for optimizer in (dense, rows):
                optimizer.step()
                optimizer.zero_grad()
            found.append(loss.item())
        if mode == "exact" and len(model.devices) > 1:
            assert pipeline.counters()["prepared_ratio"] > 0.5
    return found


def test_a_memory_inside_a_region_trains_as_unsplit() -> None:
    assert losses("cpu*3") == pytest.approx(losses("cpu"), rel=1e-9)


def test_its_declared_rows_are_fetched_ahead() -> None:
    assert losses("cpu*2", "exact") == losses("cpu*2")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"orders": (1, 2)}, "at least 2"),
        ({"orders": ()}, "at least 2"),
        ({"orders": (2, 2)}, "different lengths"),
        ({"heads": 0}, "heads=0"),
        ({"dim": 0}, "at least 1"),
        ({"rows": 20}, "too few"),
        ({"orders": (True, 2)}, "at least 2"),
        ({"separator": "</s>"}, "separator='</s>'; give at least one head, and a token"),
        ({"separator": -1}, "separator=-1"),
        ({"seed": 1.5}, "seed=1.5"),
    ],
)
def test_refuses_before_it_makes_a_table(options: dict[str, object], told: str) -> None:
    with pytest.raises(UserError, match=told):
        NgramMemory(8, **{"rows": 2000, "dim": 4, **options})  # type: ignore[arg-type]


def test_refuses_tokens_that_are_none() -> None:
    with pytest.raises(UserError, match="-100 is negative"):
        memory().row_ids(torch.tensor([[1, -100]]))
    with pytest.raises(UserError, match=r"tokens \(2, 4\)"):
        memory()(torch.zeros(2, 5, 8), torch.zeros(2, 4, dtype=torch.long))
