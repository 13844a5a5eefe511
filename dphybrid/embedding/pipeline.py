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
computes, and copies its tensors and arrays. A source that draws random numbers from a global generator would
get others; one that does so for the second batch is not drawn ahead, with a warning.
"""

import itertools
import queue
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, Generic, Protocol, Self, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from dphybrid.embedding.ahead import Lookup
from dphybrid.embedding.collection import find_tables
from dphybrid.embedding.following import joined, learned_ids
from dphybrid.embedding.lookup import each_lookup
from dphybrid.embedding.ngrams import NgramMemory
from dphybrid.embedding.replicas import copied
from dphybrid.embedding.sources import Source, generators
from dphybrid.embedding.table import HostEmbedding
from dphybrid.util.compiling import labelled
from dphybrid.util.errors import UserError, type_text
from dphybrid.util.memory import is_out_of_memory
from dphybrid.util.threads import use_num_threads

Batch = TypeVar("Batch")
Ids = Mapping[str, Tensor | Sequence[Tensor]]
"""Table name -> the ids that will be looked up: one tensor, or a list of one tensor per lookup."""
_IdsOf = Callable[[Batch], Ids]
_Prepared = tuple[Batch, Ids, dict[str, list[Lookup]]]

_BATCHES_IN_TRANSIT = 2
"""The batch that the step computes, and the one that is prepared meanwhile."""

_JOIN_S = 5.0
"""How long `close` waits for a worker that is blocked in the batch source."""


@runtime_checkable
class DeclaresIds(Protocol):
    """A model that announces which rows its `forward` will look up, so that they can be fetched ahead."""

    def table_ids(self, batch: dict[str, Tensor]) -> Ids:
        """Return table name -> ids, as one tensor or one per lookup. Names are those of
        `dphybrid.embedding.find_tables`."""
        ...


class RowPipeline:
    """Yields batches while a worker thread prepares the lookups of later ones; see the module's docstring.

    Args:
        model: The model whose tables are looked up ahead, or its tables as from `find_tables`.
        mode: "exact", or "off" to yield batches without a worker.
        on_cpu: Use a worker even without a GPU; slower, for tests that the bits stay the same.

    Raises UserError for other values.
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
        if not isinstance(model, nn.Module | Mapping):
            raise UserError(f"RowPipeline: {type_text(model)}; give the model, or its tables by name")
        self.tables = find_tables(model) if isinstance(model, nn.Module) else dict(model)
        self.mode, self.on_cpu = mode, on_cpu
        self._table_ids: Callable[[Any], Ids] | None = None
        if isinstance(model, DeclaresIds):
            self._table_ids = model.table_ids
        self._memories = {
            name: module
            for name, table in self.tables.items()
            for module in (model.modules() if isinstance(model, nn.Module) else ())
            if isinstance(module, NgramMemory) and module.table is table
        }
        self._warned: set[str] = set()
        self._watched = False
        self.draws: bool | None = None  # whether batches draw from a global generator, once it is known
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

    def prefetch(self, batches: Iterable[Batch], ids_of: _IdsOf[Batch] | None = None) -> Iterator[Batch]:
        """Yield the batches in order, as a plain loop does: a generator goes on where another loop left it.

        ids_of: function from a batch to the ids that the model will look up, by table (one tensor, or a list
        of one tensor per lookup); None: the model's own `table_ids`, or what the first batch shows: its
        tensors that are looked up, or whose n-grams are.

        The first forward places the tables (see `DataParallel.rows`), so its rows are looked up on the spot;
        those of all later batches are prepared ahead. Warns once, with the reason, if rows cannot be fetched
        ahead; what forward looks up is compared with what was announced in the first batch, without a GPU,
        too. An exception in the batch source or in `ids_of` is raised when the loop asks for that batch, with
        the worker's traceback. Leaving the loop early, by `break` or an
        exception, stops the worker; the next loop over the same generator begins with what it had drawn.
        """
        source = Source(batches)
        if self.mode == "exact" and self.tables:
            yield from self._ahead(source, ids_of or self._table_ids)
        yield from source  # a `Source` is not closed with this loop: others go on with its generator
        if source.is_exhausted():
            warnings.warn(
                "RowPipeline: the iterator of batches had no batch left; give prefetch a list, a DataLoader, "
                "or a new generator for each epoch",
                RuntimeWarning,
                stacklevel=2,
            )

    def _ahead(self, source: "Source[Batch]", ids_of: _IdsOf[Batch] | None) -> Iterator[Batch]:
        """Yield batches as long as there is something to watch or to prepare."""
        uses_worker = self.on_cpu or torch.cuda.is_initialized()
        # Without a worker: `forward` must run once before it is known where rows are sent.
        is_new = ids_of is None or not (uses_worker or self._watched)
        if is_new or any(not table.is_placed for table in self.tables.values()):
            for batch in itertools.islice(source, 1):
                with self._watching(None if ids_of is None else self._checked_ids(ids_of(batch))) as seen:
                    yield batch
                if ids_of is None:
                    ids_of = self._table_ids = learned_ids(batch, seen, self._memories)
        if ids_of is None:
            if source.num_drawn and torch.is_grad_enabled():  # else nothing was there to learn from
                self._warn_once(
                    "the ids are not known ahead, and no tensor of the first batch is looked up as it is; "
                    "give prefetch a function from a batch to {table: ids}, or the model a method "
                    "table_ids(batch)"
                )
            return
        # One replica on the CPU reads rows from the table itself: there is nothing to prepare.
        if uses_worker and any(table.ahead.is_placed for table in self.tables.values()):
            yield from self._prefetched(source, ids_of)

    @contextmanager
    def _watching(self, announced: Ids | None) -> Iterator[dict[str, list[Tensor]]]:
        """While the block runs, note what is looked up in training; then warn if that was not announced.
        announced: None if nothing is. Yields the ids by table, which are there at the end of the block."""
        looked_up: dict[str, list[Tensor]] = {}
        lookups: dict[str, list[tuple[int | None, Tensor]]] = {}

        def note(name: str, table: HostEmbedding, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if torch.is_grad_enabled():
                ids = (*args, *kwargs.values())[0].detach().cpu()
                lookups.setdefault(name, []).append((table.replica, ids))

        hooks = [
            table.register_forward_pre_hook(partial(note, name), with_kwargs=True)
            for name, table in self.tables.items()
        ]
        try:
            yield looked_up
        finally:
            for hook in hooks:
                hook.remove()
        self._watched = True
        looked_up |= {name: joined(found) for name, found in lookups.items()}
        if announced is None:
            return
        used = {name: self.tables[name] for name in {**announced, **looked_up}}
        if missing := [name for name, table in used.items() if not table.is_placed]:
            self._warn_once(
                f"no region takes the rows of {', '.join(missing)}; look them up in forward with "
                "region.rows(table, ids)"
            )
        if left_out := [name for name in looked_up if name not in announced]:
            self._warn_once(
                f"forward also looks up rows of {', '.join(left_out)}; have prefetch's function return their "
                "ids, too"
            )
        for name in looked_up.keys() & announced.keys():
            known = [ids.cpu() for ids in each_lookup(announced[name])]
            if not all(any(torch.equal(ids, each) for each in known) for ids in looked_up[name]):
                self._warn_once(
                    f"forward looks up other ids of {name} than those announced; have prefetch's function "
                    "return the very ids that forward gives to region.rows"
                )

    def _checked_ids(self, ids: Ids) -> Ids:
        if not isinstance(ids, Mapping):
            raise UserError(
                f"RowPipeline: the ids of a batch are {type_text(ids)}; return {{table name: ids}}, with the "
                f"names {', '.join(self.tables)}"
            )
        if unknown := ids.keys() - self.tables.keys():
            raise UserError(
                f"RowPipeline: ids for the tables {sorted(unknown)}, which the model lacks; it has "
                f"{', '.join(self.tables)}"
            )
        return ids

    def _warn_once(self, why: str) -> None:
        """Warn that rows are not fetched ahead, once for each reason."""
        if why not in self._warned:
            self._warned.add(why)
            warnings.warn(f"RowPipeline: rows are not fetched ahead: {why}", RuntimeWarning, stacklevel=3)

    def _prefetched(self, batches: "Source[Batch]", ids_of: _IdsOf[Batch]) -> Iterator[Batch]:
        worker = _Worker(batches, lambda batch: self._checked_ids(ids_of(batch)), self)
        self._workers.append(worker)
        # Between a lookup's gathering and its use come one update for the batch ahead, and the one that was
        # running. If fewer were recorded, `repair` would read all rows again.
        recording = [table.info for table in self.tables.values()]
        for info in recording:
            info.changes = deque(maxlen=_BATCHES_IN_TRANSIT + 1)
        try:
            while (item := worker.next()) is not None:
                if self.draws:
                    self._warn_once(
                        "the batches draw random numbers from a global generator, which would be others "
                        "ahead of the step; give the data set a generator of its own, or a DataLoader "
                        "num_workers of at least 1"
                    )
                batch, ids, lookups = item
                for name, table in self.tables.items():
                    table.ahead.expect(lookups.get(name, []))
                watching: AbstractContextManager[object] = (
                    nullcontext() if self._watched else self._watching(ids)
                )
                del item, ids, lookups  # or this frame would keep them alive while the loop's body runs
                with watching:
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
        the loop waited for the worker. Three ratios, not divided: unique_ratio: unique rows / ids.
        prepared_ratio: prepared / unique rows. conflict_ratio: repaired / prepared rows.
        """
        totals, seen = self._totals(), self._last_totals
        self._last_totals = totals
        now = {key: totals[key] - seen.get(key, 0.0) for key in totals}
        return {name: amount / steps for name, amount in now.items()} | {
            "unique_ratio": now["unique"] / max(1.0, now["ids"]),
            "prepared_ratio": now["prepared"] / max(1.0, now["unique"]),
            "conflict_ratio": now["repaired"] / max(1.0, now["prepared"]),
        }

    def _totals(self) -> dict[str, float]:
        totals = dict(self.times_ms)
        for table in {table.ahead: table for table in self.tables.values()}.values():
            for name, amount in table.totals().items():
                totals[name] = totals.get(name, 0.0) + amount
        return totals


class _Worker(Generic[Batch]):
    """One worker thread over one iterable of batches."""

    def __init__(self, batches: Source[Batch], ids_of: _IdsOf[Batch], pipeline: RowPipeline) -> None:
        self._source, self._ids_of, self._tables = batches, ids_of, pipeline.tables
        self._pipeline, self._times_ms = pipeline, pipeline.times_ms
        self._pins = any(table.ahead.is_on_gpus for table in self._tables.values())
        # Items: (batch, its ids, lookups by table); last, the exception that ended the worker, or None.
        self._done: queue.Queue[_Prepared[Batch] | BaseException | None] = queue.Queue()
        self._permits = threading.Semaphore(0)
        self._is_ahead = False  # whether one batch is prepared ahead
        self._stopping = threading.Event()
        self._num_threads = torch.get_num_threads()
        # A daemon: a batch source that hangs must not keep the interpreter from exiting.
        self._thread = threading.Thread(target=self._work, name="dphybrid-rows", daemon=True)
        self._thread.start()

    def next(self) -> "_Prepared[Batch] | None":
        start = time.perf_counter()
        if not self._is_ahead:
            self._permits.release()
        item = self._done.get()
        self._times_ms["wait_ms"] += 1e3 * (time.perf_counter() - start)
        if self._stopping.is_set():
            raise UserError("RowPipeline: closed while a loop draws its batches; leave the loop first")
        if isinstance(item, BaseException):
            raise item
        # Only once the second batch, drawn while this thread waits, has shown that none draws random numbers.
        # (For the first one, a shuffle may draw its seed.)
        self._is_ahead = self._pipeline.draws is False
        if self._is_ahead:
            self._permits.release()
        return item

    def stop(self) -> None:
        self._stopping.set()
        self._permits.release()  # wakes a worker that waits until a batch has been taken
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)
        self._hand_back()
        self._done.put(None)  # else a loop that continues would wait forever for the stopped worker

    def _hand_back(self) -> None:
        """Give what was drawn and not used back to the source."""
        left = []
        with suppress(queue.Empty):
            while True:
                left.append(self._done.get_nowait())
        self._source.put_back(
            [item[0] if isinstance(item, tuple) else item for item in left if item is not None]
        )

    def _lookups(self, ids: Ids) -> dict[str, list[Lookup]]:
        """Prepare a batch's lookups. Returns none if one fails: the step then looks up by itself, and raises
        its own error, unless the step before has made the table longer or freed memory."""
        lookups: dict[str, list[Lookup]] = {}
        try:
            for name, wanted in ids.items():
                table = self._tables[name]
                made = [table.prepared(each) for each in each_lookup(wanted)]
                lookups[name] = [lookup for lookup in made if lookup is not None]
        except UserError:
            return {}
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return {}
        return lookups

    def _reserve(self, lookups: dict[str, list[Lookup]], batch: Batch) -> None:
        """Allocate pinned memory for all batches that will be in transit at once, before the first forward;
        see `Channel.reserve`."""
        if self._pins:
            # Allocated all together, then freed to torch's allocator, which reuses the memory for later
            # batches.
            held = [copied(batch, pin=True) for _ in range(_BATCHES_IN_TRANSIT)]
            del held
        for lookup in itertools.chain(*lookups.values()):
            for share in lookup.shares:
                share.channel.reserve(len(share.memory), _BATCHES_IN_TRANSIT)

    def _work(self) -> None:
        use_num_threads(self._num_threads)  # a batch source may compute
        try:
            for number in itertools.count():
                self._permits.acquire()
                if self._stopping.is_set():
                    return
                looks = self._pipeline.draws is None and self._source.num_drawn > 0
                before = generators() if looks else ()
                try:
                    batch = next(self._source)
                except StopIteration:
                    self._done.put(None)
                    return
                if looks:
                    self._pipeline.draws = generators() != before
                start = time.perf_counter()
                with labelled("copy batch"):  # the source may refill its memory for the next batch
                    batch = copied(batch, pin=self._pins)
                with labelled("prepare rows"):
                    ids = self._ids_of(batch)
                    lookups = self._lookups(ids)
                if number == 0:
                    self._reserve(lookups, batch)
                self._times_ms["prepare_ms"] += 1e3 * (time.perf_counter() - start)
                self._done.put((batch, ids, lookups))
                del batch, ids, lookups  # or this frame would keep them alive while it waits for a permit
        except BaseException as error:  # noqa: BLE001 - the waiting loop must get it, whatever it is
            self._done.put(error)
        finally:
            if self._stopping.is_set():  # `stop` may not have waited so long
                self._hand_back()
