"""Exact prefetching: while a step computes, a worker thread prepares the lookups of the next one.

Use in a training loop, which is the same with mode "off":

    with RowPipeline(model, mode="exact") as pipeline:
        for batch in pipeline.prefetch(batches, model.table_ids):   # table_ids(batch) -> {table name: ids}
            loss = model(batch)                                      # region.rows(table, ids) in `forward`
            ...                                                      # backward, clip, optimizer.step()
            metrics |= pipeline.counters()

The worker draws the next batch, sorts the ids of each replica's share, gathers their unique rows and sends
them to the replica's device. `HostEmbedding` recognises a prepared lookup by comparing its ids (0.05 ms for
53,248 ids), sends those rows again that an update has changed since, and continues as if it had gathered the
rows itself. A lookup that was not announced is done on the spot. So tables, losses and states have the same
bits as with mode "off"; `ahead` explains why.

A process that uses no GPU gets no worker, which would compete with the step for the same cores (measured on
two cores: steps of 3 ms took a tenth longer, on two virtual devices up to three quarters).

The worker never writes to a table, so an evaluation or a checkpoint between steps need not wait for it. (Rows
that change after they were gathered are also the hazard of FBGEMM's prefetch, with the same remedy; see the
comment on outdated caches in its table-batched embeddings.) The worker draws a batch while the step before
computes, and copies its tensors and arrays. So a source must not draw random numbers from a global generator
that the steps use, and a loop that is left early has drawn one batch more than it used.
"""

import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Generic, Self, TypeVar

import torch
from torch import Tensor, nn

from dphybrid.embedding.ahead import Lookup
from dphybrid.embedding.lookup import each_lookup
from dphybrid.embedding.replicas import copied
from dphybrid.embedding.table import HostEmbedding, find_tables
from dphybrid.util.compiling import labelled
from dphybrid.util.errors import UserError, type_text
from dphybrid.util.memory import is_out_of_memory
from dphybrid.util.threads import use_num_threads

Batch = TypeVar("Batch")
Ids = Mapping[str, Tensor | Sequence[Tensor]]
"""Table name -> the ids that will be looked up: one tensor, or a list of one tensor per lookup."""
_IdsOf = Callable[[Batch], Ids]
_Prepared = tuple[Batch, dict[str, list[Lookup]]]

_BATCHES_IN_TRANSIT = 2
"""The batch that the step computes, and the one that is prepared meanwhile."""

_JOIN_S = 5.0
"""How long `close` waits for a worker that is blocked in the batch source."""


class RowPipeline:
    """Yields batches while a worker thread prepares the lookups of later ones; see the module's docstring.

    Args:
        model: The model whose tables are looked up ahead, or its tables as from `find_tables`.
        mode: "exact", or "off" to yield batches without a worker.
        on_cpu: Use a worker even without a GPU; slower, for tests that the bits stay the same.

    Raises UserError for another mode.
    """

    def __init__(
        self,
        model: nn.Module | Mapping[str, HostEmbedding],
        *,
        mode: str = "exact",
        on_cpu: bool = False,
    ) -> None:
        if mode not in ("off", "exact"):
            raise UserError(f"pipeline={mode!r}: use off or exact")
        self.tables = find_tables(model) if isinstance(model, nn.Module) else dict(model)
        self.mode, self.on_cpu = mode, on_cpu
        self._workers: list[_Worker] = []
        self.times_ms = {"prepare_ms": 0.0, "wait_ms": 0.0}
        self._last_totals = self._totals()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the worker and drop the lookups that it has prepared. Leaving the `with` block calls this."""
        for worker in list(self._workers):
            worker.stop()

    def prefetch(self, batches: Iterable[Batch], ids_of: _IdsOf[Batch] | None) -> Iterator[Batch]:
        """Yield the batches in order, as a plain loop does: a generator goes on where another loop left it.

        ids_of: function from a batch to the ids that the model will look up, by table (one tensor, or a list
        of one tensor per lookup), such as `model.table_ids`; None: nothing is fetched ahead.

        The first forward places the tables (see `DataParallel.rows`), so the rows of a loop's first batch are
        looked up on the spot; those of all later batches are prepared ahead. An exception in the batch source
        or in `ids_of` is raised when the loop asks for that batch, with the worker's traceback. Leaving the
        loop early, by `break` or an exception, stops the worker; the batch that it had drawn is lost.
        """
        source = iter(batches)
        if self.mode == "exact" and self.tables and ids_of is not None:
            for batch in itertools.islice(source, 1):
                self._checked_ids(ids_of(batch))
                yield batch
            # One replica on the CPU reads rows from the table itself: there is nothing to prepare.
            is_split = any(table.ahead.is_placed for table in self.tables.values())
            if is_split and (self.on_cpu or torch.cuda.is_initialized()):
                yield from self._prefetched(source, ids_of)
        for batch in source:  # not `yield from`, which would close a generator when this loop is left
            yield batch

    def _checked_ids(self, ids: Ids) -> Ids:
        unknown = sorted(ids.keys() - self.tables.keys()) if isinstance(ids, Mapping) else type_text(ids)
        if unknown:
            raise UserError(
                f"RowPipeline: ids of {unknown}; return {{table name: ids}}, with the names "
                f"{', '.join(self.tables)}"
            )
        return ids

    def _prefetched(self, batches: Iterator[Batch], ids_of: _IdsOf[Batch]) -> Iterator[Batch]:
        worker = _Worker(batches, lambda batch: self._checked_ids(ids_of(batch)), self)
        self._workers.append(worker)
        # Between a lookup's gathering and its use come one update for the batch ahead, and the one that was
        # running. If fewer were recorded, `repair` would read all rows again.
        recording = [table._info for table in self.tables.values()]
        for info in recording:
            info.changes = deque(maxlen=_BATCHES_IN_TRANSIT + 1)
        try:
            while (item := worker.next()) is not None:
                batch, lookups = item
                for name, table in self.tables.items():
                    table.ahead.expect(lookups.get(name, []))
                del item, lookups  # or this frame would keep them alive while the loop's body runs
                yield batch
        finally:
            worker.stop()
            self._workers.remove(worker)
            for table in self.tables.values():
                table.ahead.expect([])
            for info in recording:
                info.changes = None

    def counters(self, steps: int = 1) -> dict[str, float]:
        """Return the counts since the last call, summed over tables and divided by `steps`.

        The fields of `lookup.Counters`, and: prepare_ms: the worker's whole time per batch. wait_ms: how long
        the loop waited for the worker. Two ratios, not divided: prepared_ratio: prepared / unique rows.
        conflict_ratio: repaired / prepared rows.
        """
        before, self._last_totals = self._last_totals, self._totals()
        now = {key: total - before.get(key, 0.0) for key, total in self._last_totals.items()}
        return {name: amount / steps for name, amount in now.items()} | {
            "prepared_ratio": now["prepared"] / max(1.0, now["unique"]),
            "conflict_ratio": now["repaired"] / max(1.0, now["prepared"]),
        }

    def _totals(self) -> dict[str, float]:
        totals = dict(self.times_ms)
        for table in {table.ahead: table for table in self.tables.values()}.values():
            for name, amount in asdict(table.counters).items():
                totals[name] = totals.get(name, 0.0) + amount
        return totals


class _Worker(Generic[Batch]):
    """One worker thread over one iterable of batches."""

    def __init__(self, batches: Iterator[Batch], ids_of: _IdsOf[Batch], pipeline: RowPipeline) -> None:
        self._source, self._ids_of, self._tables = batches, ids_of, pipeline.tables
        self._times_ms = pipeline.times_ms
        self._pins = torch.cuda.is_initialized()
        # Items: (batch, lookups by table); last, the exception that ended the worker, or None.
        self._done: queue.Queue[_Prepared[Batch] | BaseException | None] = queue.Queue()
        self._permits = threading.Semaphore(1)  # for each batch that may be prepared
        self._stopping = threading.Event()
        self._num_threads, self._records = torch.get_num_threads(), torch.is_grad_enabled()
        # A daemon: a batch source that hangs must not keep the interpreter from exiting.
        self._thread = threading.Thread(target=self._work, name="dphybrid-rows", daemon=True)
        self._thread.start()

    def next(self) -> "_Prepared[Batch] | None":
        start = time.perf_counter()
        item = self._done.get()
        self._times_ms["wait_ms"] += 1e3 * (time.perf_counter() - start)
        if self._stopping.is_set():
            raise UserError("RowPipeline: closed while a loop draws its batches; leave the loop first")
        if isinstance(item, BaseException):
            raise item
        self._permits.release()
        return item

    def stop(self) -> None:
        self._stopping.set()
        self._permits.release()  # wakes a worker that waits until a batch has been taken
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)
        self._done.put(None)  # else a loop that continues would wait forever for the stopped worker

    def _lookups(self, ids: Ids) -> dict[str, list[Lookup]]:
        """Prepare a batch's lookups. Returns none if one fails: the step then looks up by itself, and raises
        its own error, unless the step before has made the table longer or freed memory."""
        lookups: dict[str, list[Lookup]] = {}
        try:
            for name, wanted in ids.items():
                table = self._tables[name]
                made = [table._prepared(of_lookup) for of_lookup in each_lookup(wanted)]
                lookups[name] = [lookup for lookup in made if lookup is not None]
        except (UserError, IndexError):
            return {}
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return {}
        return lookups

    def _work(self) -> None:
        use_num_threads(self._num_threads)  # a batch source may compute
        torch.set_grad_enabled(self._records)  # only training makes rows of a published table trained ones
        try:
            for number in itertools.count():
                self._permits.acquire()
                if self._stopping.is_set():
                    return
                try:
                    batch = next(self._source)
                except StopIteration:
                    self._done.put(None)
                    return
                start = time.perf_counter()
                with labelled("copy batch"):  # the source may refill its memory for the next batch
                    batch = copied(batch, pin=self._pins)
                with labelled("prepare rows"):
                    lookups = self._lookups(self._ids_of(batch))
                if number == 0 and self._pins:
                    # Pinned memory for all batches that will be in transit at once, which torch's allocator
                    # uses again for later ones. Allocating it while a forward broadcasts to several GPUs has
                    # been reported to hang (pytorch#31095).
                    for_later = [
                        (copied(batch, pin=True), self._lookups(self._ids_of(batch)))
                        for _ in range(_BATCHES_IN_TRANSIT)
                    ]
                    del for_later
                self._times_ms["prepare_ms"] += 1e3 * (time.perf_counter() - start)
                self._done.put((batch, lookups))
                del batch, lookups  # or this frame would keep them alive while it waits for a permit
        except BaseException as error:  # noqa: BLE001 - the waiting loop must get it, whatever it is
            self._done.put(error)
