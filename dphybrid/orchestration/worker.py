"""`dphybrid worker`: Prefect's process worker for a GPU workstation, which can be stopped without losing a
training.

On SIGTERM (`systemctl stop`, a new release) or Ctrl-C it takes no more runs and asks its runs to write a
checkpoint and go back to the queue. A third signal kills everything at once. Prefect's own worker kills its
runs within a second and leaves them `Running` for ever. This worker also queues runs again whose process or
machine died (`dphybrid.orchestration.queueing`).
"""

import asyncio
import logging
import os
import signal
import warnings
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

import psutil
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.exceptions import ObjectNotFound
from prefect.settings import (
    PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
    PREFECT_WORKER_QUERY_SECONDS,
    temporary_settings,
)
from prefect.workers.process import ProcessWorker, ProcessWorkerResult

from dphybrid.config.settings import Settings, load_settings
from dphybrid.gpus.inventory import Inventory, visible
from dphybrid.gpus.leases import free_now
from dphybrid.orchestration.queueing import (
    DELETED,
    OWNER_LABEL,
    STARTED_BY,
    UNREACHABLE,
    LostRuns,
    one_death_more,
    reaching_server,
    refusal,
    state_after_death,
    wants_gpu,
)
from dphybrid.util.alive import process_name
from dphybrid.util.errors import UserError, counted
from dphybrid.util.stop import watching

if TYPE_CHECKING:
    from prefect.client.schemas.objects import FlowRun
    from prefect.client.schemas.responses import WorkerFlowRunResponse

SHARED_QUEUES = ("urgent", "any", "night")
"""Queues that every worker serves, in order of priority. The worker's own queue, which has its name, comes
before them."""
_QUERY_S, _HEARTBEAT_S = 2, 60
_LOOK_EVERY_S = 0.5
_LOOK_FOR_LOST_EVERY_S = 20.0
_ASK_AGAIN_S = 10.0
_log = logging.getLogger("prefect.worker.dphybrid")


# Prefect warns about a second worker class of type "process". DrainingWorker is meant to replace the first.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")

    class DrainingWorker(ProcessWorker):
        """Takes no more runs once `draining`."""

        type = "process"
        draining = False
        nvml_told = False

        def __init__(self, *args: Any, follows_gpus: bool = False, **named: Any) -> None:
            super().__init__(*args, **named)
            self.follows_gpus = follows_gpus
            self.inventory = Inventory(load_settings().nvml)
            self.without_gpu = set[UUID]()
            self.num_left = 0

        async def get_and_submit_flow_runs(self) -> "list[FlowRun]":
            if self.draining:
                return []
            if self.follows_gpus:
                # In a thread: the GPUs' driver may take its time, and the loop sends heartbeats.
                self.limiter.total_tokens = await asyncio.to_thread(self._num_gpus) or 1
            try:
                return await super().get_and_submit_flow_runs()
            except RuntimeError as error:
                # A run that gave way may be due again before its old process has fully ended here. The next
                # query will take it.
                if "already holding" not in str(error):
                    raise
                return []

        def _num_gpus(self) -> int:
            return len(visible(self.inventory.read()))

        async def _submit_scheduled_flow_runs(
            self, flow_run_response: "list[WorkerFlowRunResponse]"
        ) -> "list[FlowRun]":
            settings, taken = load_settings(), []
            try:
                room = await asyncio.to_thread(self._room, settings)
            except UserError:
                room = None  # the run will say what is wrong here
            for entry in flow_run_response:
                if room is None or not wants_gpu(entry.flow_run, settings):
                    taken.append(entry)
                elif room > 0:
                    taken.append(entry)
                    room -= 1
            num_left = len(flow_run_response) - len(taken)
            if num_left and not self.num_left:
                _log.info(
                    f"no GPU is free here; left in the queue, for other workers: {counted(num_left, 'run')}"
                )
            self.num_left = num_left
            return await super()._submit_scheduled_flow_runs(taken)

        def _room(self, settings: Settings) -> int | None:
            """Return how many GPUs are free for new runs; None on a machine without GPUs."""
            free = free_now(self.inventory, settings)
            if self.inventory.broken and not self.nvml_told:
                _log.warning(f"{self.inventory.reason}; runs that need a GPU stay in the queue")
            self.nvml_told = self.inventory.broken
            if free is None:
                return None
            count, served = free
            own = {child.pid for child in psutil.Process().children(recursive=True)}
            # Runs that are still starting will want one of the free GPUs soon.
            return count - max(0, self.num_running - len(self.without_gpu) - len(served & own))

        async def run(
            self, flow_run: "FlowRun", configuration: Any, task_status: Any = None
        ) -> ProcessWorkerResult:
            started_by = f"{process_name()} {uuid4()}"
            configuration.env |= {STARTED_BY: started_by}
            await self.client.update_flow_run_labels(flow_run.id, {OWNER_LABEL: started_by})
            if not wants_gpu(flow_run, load_settings()):
                self.without_gpu.add(flow_run.id)
            try:
                result = await super().run(flow_run, configuration, task_status)
            finally:
                self.without_gpu.discard(flow_run.id)
            while not await self._is_settled(flow_run, started_by, result.status_code):
                await asyncio.sleep(_ASK_AGAIN_S)
            # 0, because Prefect's worker marks a run as crashed for any other code.
            return ProcessWorkerResult(status_code=0, identifier=result.identifier)

        async def _is_settled(self, flow_run: "FlowRun", started_by: str, status: int) -> bool:
            """Queue a run again whose process died, or set the final state that fits. Return False if the
            server has to be asked again."""
            try:
                now = await self.client.read_flow_run(flow_run.id)
                # A run's process exits with 0 once it has reported its final state to Prefect. Any other exit
                # code means that the process died.
                if status == 0 or now.labels.get(OWNER_LABEL) != started_by or now.state is None:
                    return True  # ended well, or another process owns the run by now
                state = state_after_death(now, f"its process died ({status})")
                if state is not None:
                    await self.client.update_flow_run_labels(flow_run.id, one_death_more(now))
                    await self.client.set_flow_run_state(flow_run.id, state, force=True)
                    _log.warning(f"flow run {now.name}: {state.message}")
            except ObjectNotFound:
                _log.warning(f"flow run {flow_run.name}: {DELETED}; it has ended, its run folder stays")
            except UNREACHABLE as error:
                if why := refusal(error):
                    _log.error(f"flow run {flow_run.name}: Prefect refuses its new state: {why}")
                    return True
                # A process that ended with 0 has reported its run's state. A worker that stops leaves the
                # run to another one, which queues it once its heartbeats stop.
                return status == 0 or self.draining
            return True

        @property
        def num_running(self) -> int:
            return int(self.limiter.borrowed_tokens)


async def make_queues(pool: str, hosts: Sequence[str], new_pool: bool = False) -> list[str]:
    """Create the queues of `hosts` and the shared ones that do not exist. Return all by priority: the new
    ones of hosts, the existing ones in their order, the new shared ones.

    A worker that asks for a missing queue gets no runs from its other queues either. new_pool: create the
    pool, too; without it, raises UserError when the pool does not exist.
    """
    async with get_client() as client:
        try:
            await client.read_work_pool(pool)
        except ObjectNotFound as error:
            if not new_pool:
                remedy = "create it with `dphybrid deploy`"
                raise UserError(f"the server has no work pool {pool!r}; {remedy}") from error
            await client.create_work_pool(WorkPoolCreate(name=pool, type="process"))
        there = {queue.name: queue for queue in await client.read_work_queues(work_pool_name=pool)}
        kept = sorted(there.keys() - {"default"}, key=lambda name: there[name].priority)
        wanted = [name for name in hosts if name not in there] + kept
        wanted += [name for name in SHARED_QUEUES if name not in there]
        # Lower numbers come first, and Prefect gives a new queue the highest number: a host's own queue would
        # come after `any`. Set all of them, in order: giving one a number in use moves the queues from there
        # on back.
        for priority, name in enumerate(wanted if wanted != kept else (), start=1):
            if name in there:
                await client.update_work_queue(there[name].id, priority=priority)
            else:
                await client.create_work_queue(name, work_pool_name=pool, priority=priority)
    return wanted


async def work(worker: DrainingWorker, pool: str) -> int:
    """Run the worker until it is asked to stop and its runs have ended; return the exit code."""
    requests, asked = 0, set[int]()
    loop = asyncio.get_running_loop()

    def end() -> None:
        nonlocal requests
        requests += 1
        worker.draining = True
        runs = counted(worker.num_running, "run")
        if requests > 2:
            print("Ending everything now", flush=True)
            _signal_runs(signal.SIGKILL)
        elif not worker.num_running:
            print("Stopping", flush=True)
        elif requests == 1:
            print(f"Stopping: {runs} will write a checkpoint and go back to the queue", flush=True)
        else:  # the runs are not signalled again: a second SIGTERM ends a training without a checkpoint
            print(f"Still stopping: waiting for {runs}; a third signal kills without checkpoints", flush=True)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)  # replaces Prefect's handler, which kills the runs in a second
    loop.add_signal_handler(signal.SIGHUP, lambda: None)  # continue when the terminal is closed
    working = asyncio.create_task(worker.start())
    try:
        # end_s=0: a thread that waits for an unreachable server must not hold up the worker's end.
        look = partial(_look_for_lost, LostRuns(pool))
        with watching(look, _LOOK_FOR_LOST_EVERY_S, "dphybrid-lost-runs", end_s=0):
            while not working.done():
                await asyncio.sleep(_LOOK_EVERY_S)
                # At every turn, not once: the process of a run that was just taken may start after the
                # signal.
                if requests:
                    asked |= _signal_runs(signal.SIGTERM, asked)
                if worker.draining and not worker.num_running:
                    break
        if working.done():
            working.result()
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
    return 0


def _look_for_lost(lost: LostRuns) -> bool:
    for line in lost.queue():
        _log.warning(line)
    return False


def _signal_runs(number: int, but: Collection[int] = ()) -> set[int]:
    """Signal the process groups of this worker's flow runs, except those in `but`; return the pids that were
    signalled."""
    signalled = set()
    for pid in {child.pid for child in psutil.Process().children()}.difference(but):
        with suppress(ProcessLookupError, PermissionError):  # it has ended, or is not a group leader yet
            os.killpg(pid, number)
            signalled.add(pid)
    return signalled


def run(pool: str, name: str, limit: int | None, queues: Sequence[str] | None) -> int:
    """Run a worker; return the exit code.

    Args:
        limit: How many runs may train at once; None: one for each GPU that answers, at least one. The rest
            would wait here, and be ahead of an urgent run that comes later.
        queues: The queues to serve; None: its own and the shared ones.
    """
    # The runs' processes inherit them. Prefect's automation depends on heartbeats: not the user's to choose.
    with temporary_settings(
        {PREFECT_FLOWS_HEARTBEAT_FREQUENCY: _HEARTBEAT_S},
        set_defaults={PREFECT_WORKER_QUERY_SECONDS: _QUERY_S},
    ):
        # With 9 retries, a finished run can still report its state after an outage of a quarter of an hour.
        os.environ.setdefault("PREFECT_CLIENT_MAX_RETRIES", "9")
        settings = load_settings()
        # Absolute: the runs work in folders of their own.
        os.environ["DPHYBRID_DATA_DIR"] = str(settings.data_dir)
        free_now(Inventory(settings.nvml), settings)  # or the lease folder's fault would end the worker later
        wanted = list(queues or [name, *SHARED_QUEUES])
        with reaching_server():
            asyncio.run(make_queues(pool, [name for name in wanted if name not in SHARED_QUEUES]))
        worker = DrainingWorker(
            work_pool_name=pool,
            work_queues=wanted,
            name=name,
            limit=limit or 1,
            follows_gpus=limit is None,
            create_pool_if_not_found=False,
        )
        return asyncio.run(work(worker, pool))
