"""With and without the pipeline: the same bits, the same errors, nothing left behind."""

import gc
import threading
import traceback
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from dphybrid.embedding import (
    HostEmbedding,
    RowPipeline,
    RowSGD,
    clip_grad_norm_,
    find_tables,
    row_optimizer,
)
from dphybrid.embedding.gradients import sparse
from dphybrid.parallel import DataParallel, parts

ROWS, DIM, BATCH, COLUMNS, STEPS = 2000, 8, 24, 4, 130


AlwaysAhead = partial(RowPipeline, on_cpu=True)


class Scores(nn.Module):
    def __init__(self, devices: str) -> None:
        super().__init__()
        self.words = HostEmbedding(ROWS, DIM, seed=1, name="words")
        self.places = HostEmbedding(50, DIM, seed=2, name="places")
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(COLUMNS * DIM, 16), nn.ReLU(), nn.Linear(16, 1))
        self.region = DataParallel(layers, devices)
        for table in (self.words, self.places):
            table.place_on(self.region.devices.replicas, self.region.sizes)

    def table_ids(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"words": batch["ids_BF"] + 0, "places": batch["ids_BF"] % 50}

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        ids = self.table_ids(batch)
        words, places = self.words.replica_rows(ids["words"]), self.places.replica_rows(ids["places"])
        rows = parts([(word * place).flatten(1) for word, place in zip(words, places, strict=True)])
        loss: torch.Tensor = (self.region(rows).squeeze(1) - batch["target_B"]).square().mean()
        return loss


def zipf_batches(steps: int = STEPS) -> Iterator[dict[str, torch.Tensor]]:
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        chance = torch.rand(BATCH - step % 5, COLUMNS, generator=generator, dtype=torch.float64)
        ids = ((ROWS**-0.05 * chance + 1 - chance) ** -20).long().clamp_(1, ROWS) - 1
        yield {"ids_BF": ids, "target_B": torch.rand(len(ids), generator=generator)}


def train(
    mode: str,
    optimizer: str,
    devices: str = "cpu",
) -> tuple[list[torch.Tensor], dict[str, float]]:
    model = Scores(devices)
    tables = find_tables(model)
    rows = row_optimizer(optimizer, tables, lr=0.1, weight_decay=0.01)
    dense = torch.optim.SGD(model.region.parameters(), lr=0.05)
    seen: list[torch.Tensor] = []
    with AlwaysAhead(tables, mode=mode) as pipeline:
        for step, batch in enumerate(pipeline.prefetch(zipf_batches(), model.table_ids)):
            dense.zero_grad()
            rows.zero_grad()
            loss = model(batch)
            loss.backward()
            clip_grad_norm_(model.region.parameters(), 0.05)
            dense.step()
            rows.step()
            seen.append(loss.detach())
            if step == 90:  # an evaluation and a checkpoint in between
                with torch.no_grad():
                    seen.append(model(next(zipf_batches())))
                seen += [value.clone() for value in {**model.state_dict(), **rows.states()}.values()]
            if step == 120:
                model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})
    return [*seen, *model.state_dict().values(), *rows.states().values()], pipeline.counters()


def same_bits(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
    return len(one) == len(two) and all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


OPTIMIZERS = ["sgd", "adagrad", "lazy-adagrad", "adam", "lazy-adam", "adamw"]


@pytest.mark.parametrize(
    ("devices", "optimizer"),
    [("cpu", "adam"), *[("cpu*3", name) for name in OPTIMIZERS], ("cpu*8", "lazy-adagrad")],
)
def test_same_bits_as_without(devices: str, optimizer: str) -> None:
    plain, _ = train("off", optimizer, devices)
    ahead, counters = train("exact", optimizer, devices)
    assert same_bits(plain, ahead)
    if devices == "cpu":  # rows are read from the table itself when they are used
        assert counters["prepared"] == counters["bytes_to_devices"] == 0
    else:
        assert counters["prepared_ratio"] > 0.95
        assert 0.1 < counters["conflict_ratio"] <= 1


def test_without_a_gpu_no_worker_takes_turns_with_the_step() -> None:
    table = placed(10, 2)
    with RowPipeline({"t": table}) as pipeline:
        for _ in pipeline.prefetch([torch.tensor([1, 2])] * 3, lambda ids: {"t": ids}):
            assert not [thread for thread in threading.enumerate() if thread.name == "dphybrid-rows"]
            rows_of(table, torch.tensor([1, 2]))
    counters = pipeline.counters()
    assert counters["ids"] == 6
    assert counters["prepared"] == counters["prepare_ms"] == 0


def placed(*sizes: int, **options: object) -> HostEmbedding:
    """A table with two replicas."""
    table = HostEmbedding(*sizes, **options)  # type: ignore[arg-type]
    table.place_on([torch.device("cpu")] * 2, lambda rows: [rows // 2, rows - rows // 2])
    return table


def rows_of(table: HostEmbedding, ids: torch.Tensor) -> torch.Tensor:
    return torch.cat(table.replica_rows(ids))


def test_a_few_changed_rows_are_read_again_one_by_one() -> None:
    table = placed(100, 4)
    table.ahead.record_changes(3)
    lookup = table.ahead.prepare(table.weight, "t", torch.arange(50))
    table.weight.grad = sparse(torch.tensor([7, 60]), torch.ones(2, 4), table.weight.shape)
    RowSGD({"t": table}, lr=1.0).step()
    table.ahead.repair(table.weight, lookup)
    assert torch.equal(torch.cat([share.rows_UD for share in lookup.shares]), table.weight[:50])
    assert table.totals()["repaired"] == 1
    table.settled()[3] = 5.0  # by hand: not on record
    table.ahead.repair(table.weight, lookup)
    assert torch.equal(torch.cat([share.rows_UD for share in lookup.shares]), table.weight[:50])
    assert table.totals()["repaired"] == 51


def test_wrong_ids_and_unknown_tables_are_named() -> None:
    pipeline = AlwaysAhead({"t": placed(10, 2, name="words")})
    with pytest.raises(ValueError, match=r"'words': id 10 at position \[1\]"):
        list(pipeline.prefetch([torch.tensor([1, 10])], lambda ids: {"t": ids}))
    with pytest.raises(ValueError, match=r"\['other'\].* it has t"):
        list(pipeline.prefetch([torch.tensor([1])], lambda ids: {"other": ids}))


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_leaving_the_loop_ends_the_worker(error: type[BaseException]) -> None:
    def leave() -> None:
        with AlwaysAhead({"t": placed(10, 2)}, lookahead=3) as pipeline:
            for _ in pipeline.prefetch((torch.tensor([n % 10]) for n in range(1000)), lambda ids: {"t": ids}):
                raise error

    with pytest.raises(error):
        leave()
    assert_no_worker()


def test_prepares_no_more_than_lookahead() -> None:
    drawn: list[int] = []

    def source() -> Iterator[torch.Tensor]:
        for number in range(20):
            drawn.append(number)
            yield torch.tensor([0])

    with AlwaysAhead({"t": placed(10, 2)}, lookahead=2) as pipeline:
        for used, _ in enumerate(pipeline.prefetch(source(), lambda ids: {"t": ids}), start=1):
            assert len(drawn) <= used + 2


def test_wrong_settings_are_named() -> None:
    with pytest.raises(ValueError, match="'fast': use off or exact"):
        AlwaysAhead({}, mode="fast")
    with pytest.raises(ValueError, match="lookahead=0"):
        AlwaysAhead({}, lookahead=0)


def test_a_loop_that_goes_on_after_closing_ends_with_an_error() -> None:
    batches = [torch.arange(2)] * 4
    pipeline = AlwaysAhead({"t": placed(10, 2)})
    given = pipeline.prefetch(batches, lambda ids: {"t": ids})
    assert torch.equal(next(given), batches[0])
    pipeline.close()
    with pytest.raises(ValueError, match="closed while a loop draws its batches"):
        next(given)
    assert_no_worker()


def assert_no_worker() -> None:
    gc.collect()
    assert not [thread for thread in threading.enumerate() if thread.name == "dphybrid-rows"]


def test_counters_tell_what_moved() -> None:
    table = placed(100, 4)
    rows = RowSGD({"t": table}, lr=0.1)
    batches = [torch.tensor([[1, 2], [2, 2], [3, 1], [1, 1]]), torch.tensor([[5, 2], [6, 7], [8, 9], [9, 9]])]
    with AlwaysAhead({"t": table}) as pipeline:
        for ids in pipeline.prefetch(batches, lambda ids: {"t": ids}):
            rows.zero_grad()
            sum(part.sum() for part in table.replica_rows(ids)).backward()
            rows.step()
            with torch.no_grad():
                table.replica_rows(ids)
        found = pipeline.counters(steps=2)
        assert pipeline.counters()["ids"] == 0
    assert found["ids"] == 8
    assert found["unique"] == (2 + 2 + 4 + 2) / 2
    assert found["unique_ratio"] == 10 / 16
    assert found["prepared_ratio"] == 1
    # Row 2 is the one that the second batch shares with the first.
    assert found["repaired"] <= 0.5
    row, index = 4 * 4, 4
    assert found["bytes_gathered"] == 5 * row
    assert found["bytes_from_devices"] == 5 * row
    assert found["bytes_to_devices"] >= 5 * row + 2 * 8 * index + 5 * index
    for name in ("dedup_ms", "gather_ms", "h2d_ms", "update_ms", "prepare_ms", "wait_ms"):
        assert found[name] > 0, name


def broken_source() -> Iterator[torch.Tensor]:
    yield torch.tensor([4])
    raise OSError("the disk is gone")


def broken_ids(batch: torch.Tensor) -> dict[str, torch.Tensor]:
    raise LookupError(f"no ids for {batch.tolist()}")


@pytest.mark.parametrize(
    ("source", "ids_of", "good", "words", "place"),
    [
        (broken_source(), lambda ids: {"t": ids}, 1, "the disk is gone", "broken_source"),
        ([torch.tensor([4])], broken_ids, 0, r"no ids for \[4\]", "broken_ids"),
    ],
)
def test_an_error_in_the_worker_is_raised_where_its_batch_would_have_come(
    source: Any, ids_of: Any, good: int, words: str, place: str
) -> None:
    seen = list[torch.Tensor]()
    with pytest.raises((OSError, LookupError), match=words) as caught:
        seen.extend(AlwaysAhead({"t": placed(10, 2)}).prefetch(source, ids_of))
    assert len(seen) == good
    assert place in "".join(traceback.format_tb(caught.value.__traceback__))
    assert_no_worker()
