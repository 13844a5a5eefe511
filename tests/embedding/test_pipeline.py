"""What the pipeline prepares, counts and refuses, and that it leaves nothing behind; test_programs.py shows
that it changes no bit."""

import gc
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from dphybrid.embedding import HostEmbedding, RowPipeline, row_optimizer
from dphybrid.embedding.gradients import sparse

AlwaysAhead = partial(RowPipeline, on_cpu=True)


def test_without_a_gpu_no_worker_takes_turns_with_the_step() -> None:
    table = placed(10, 2)
    with RowPipeline({"t": table}) as pipeline:
        for _ in pipeline.prefetch([torch.tensor([1, 2])] * 3, lambda ids: {"t": ids}):
            assert not [thread for thread in threading.enumerate() if thread.name == "dphybrid-rows"]
            rows_of(table, torch.tensor([1, 2]))
    counters = pipeline.counters()
    assert counters["unique"] == 6
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
    table._info.changes = deque(maxlen=3)
    lookup = table.ahead.prepare(table.weight, torch.arange(50))
    table.weight.grad = sparse(torch.tensor([7, 60]), torch.ones(2, 4), table.weight.shape)
    row_optimizer("sgd", {"t": table}, lr=1.0).step()
    table.ahead.repair(lookup)
    assert torch.equal(torch.cat([share.rows_UD for share in lookup.shares]), table.weight[:50])
    assert table.counters.repaired == 1
    table.weight.detach()[3] = 5.0  # by hand: not on record
    table.ahead.repair(lookup)
    assert torch.equal(torch.cat([share.rows_UD for share in lookup.shares]), table.weight[:50])
    assert table.counters.repaired == 51


def test_wrong_ids_and_unknown_tables_are_named() -> None:
    table = placed(10, 2, name="words")
    pipeline = AlwaysAhead({"t": table})
    _, wrong = pipeline.prefetch([torch.tensor([1, 2]), torch.tensor([1, 10])], lambda ids: {"t": ids})
    with pytest.raises(ValueError, match=r"'words': id 10 at position \[1\]"):
        table.replica_rows(wrong)  # not before: the step before might have made the table longer
    with pytest.raises(ValueError, match=r"ids of \['other'\]; return \{table name: ids\}, with the names t"):
        list(pipeline.prefetch([torch.tensor([1])], lambda ids: {"other": ids}))


LOOPS = pytest.mark.parametrize(
    ("split", "mode"), [(split, mode) for split in (False, True) for mode in ("off", "exact")]
)


@LOOPS
def test_a_list_starts_anew_in_each_loop(split: bool, mode: str) -> None:
    table, seen = placed(50, 4) if split else HostEmbedding(50, 4), list[int]()
    with AlwaysAhead({"t": table}, mode=mode) as pipeline:
        for _ in range(2):
            for ids in pipeline.prefetch(list(torch.arange(15).view(5, 3)), lambda ids: {"t": ids}):
                seen.append(int(ids[0]) // 3)
                rows_of(table, ids)
                if len(seen) == 3:
                    break
    assert seen == [0, 1, 2, 0, 1, 2, 3, 4]


@LOOPS
def test_a_source_may_refill_its_memory(split: bool, mode: str) -> None:
    table, seen = placed(50, 4) if split else HostEmbedding(50, 4), list[list[int]]()
    buffer = torch.zeros(3, dtype=torch.int64)
    refilled = ({"ids": buffer.fill_(n), "same": buffer, "array": buffer.numpy()} for n in range(50))
    with AlwaysAhead({"t": table}, mode=mode) as pipeline:
        for number, batch in enumerate(pipeline.prefetch(refilled, lambda batch: {"t": batch["ids"]})):
            rows_of(table, batch["ids"])
            time.sleep(0.005)  # for a worker to draw the next batch
            seen += [value.tolist() for value in batch.values()]
            if number == 8:
                break
    assert seen == [[n] * 3 for n in range(9) for _ in range(3)]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_leaving_the_loop_ends_the_worker(error: type[BaseException]) -> None:
    def leave() -> None:
        with AlwaysAhead({"t": placed(10, 2)}) as pipeline:
            source = (torch.tensor([n % 10]) for n in range(1000))
            for number, _ in enumerate(pipeline.prefetch(source, lambda ids: {"t": ids})):
                if number == 2:
                    raise error

    with pytest.raises(error):
        leave()
    assert_no_worker()


def test_a_batch_source_computes_the_same_bits_in_the_worker() -> None:
    table, x, weight = placed(10, 2), torch.randn(40, 8, dtype=torch.float64), torch.randn(64, 8).double()

    def products() -> list[torch.Tensor]:  # MKL's last bits depend on the number of threads
        return [x[:size] @ weight.t() for size in range(1, 40)]

    expected = torch.cat(products())
    with AlwaysAhead({"t": table}) as pipeline:
        ids = torch.tensor([1, 2])
        batches = ((ids, torch.cat(products())) for _ in range(3))
        for batch in pipeline.prefetch(batches, lambda batch: {"t": batch[0]}):
            rows_of(table, batch[0])
            assert torch.equal(batch[1], expected)


def test_prepares_one_batch_ahead() -> None:
    drawn: list[int] = []

    def source() -> Iterator[torch.Tensor]:
        for number in range(20):
            drawn.append(number)
            yield torch.tensor([0])

    with AlwaysAhead({"t": placed(10, 2)}) as pipeline:
        for used, _ in enumerate(pipeline.prefetch(source(), lambda ids: {"t": ids}), start=1):
            assert len(drawn) <= used + 1


def test_wrong_settings_are_named() -> None:
    with pytest.raises(ValueError, match="'fast': use off or exact"):
        AlwaysAhead({}, mode="fast")


def test_a_loop_that_goes_on_after_closing_ends_with_an_error() -> None:
    batches = [torch.arange(2)] * 4
    pipeline = AlwaysAhead({"t": placed(10, 2)})
    given = pipeline.prefetch(batches, lambda ids: {"t": ids})
    for _ in range(2):
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
    rows = row_optimizer("sgd", {"t": table}, lr=0.1)
    first, last = (
        torch.tensor([[1, 2], [2, 2], [3, 1], [1, 1]]),
        torch.tensor([[5, 2], [6, 7], [8, 9], [9, 9]]),
    )
    with AlwaysAhead({"t": table}) as pipeline:
        for ids in pipeline.prefetch([first, first, last], lambda ids: {"t": ids}):
            rows.zero_grad()
            sum(part.sum() for part in table.replica_rows(ids)).backward()
            rows.step()
            with torch.no_grad():
                table.replica_rows(ids)
        found = pipeline.counters(steps=2)
        assert pipeline.counters()["unique"] == 0
    assert found["unique"] == (2 + 2 + 2 + 2 + 4 + 2) / 2
    assert found["prepared_ratio"] == 10 / 14  # all but those of the first batch
    # Row 2 is the one that the last batch shares with the one before.
    assert found["repaired"] <= 0.5
    assert found["prepare_ms"] > 0
    assert found["wait_ms"] > 0


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
def test_an_error_in_the_worker_is_raised_at_its_batch(
    source: Any, ids_of: Any, good: int, words: str, place: str
) -> None:
    seen = list[torch.Tensor]()
    with pytest.raises((OSError, LookupError), match=words) as caught:
        seen.extend(AlwaysAhead({"t": placed(10, 2)}).prefetch(source, ids_of))
    assert len(seen) == good
    assert place in "".join(traceback.format_tb(caught.value.__traceback__))
    assert_no_worker()
