"""Flows that gather machines as a training does, with ranks that train nothing (`standin`)."""

from contextlib import ExitStack

from dphybrid.flows.join_hybrid import join_hybrid
from prefect import flow, runtime

import dphybrid.cluster.launch
from dphybrid.cluster.launch import OUTCOME, train_in_ranks
from dphybrid.config.settings import load_settings
from dphybrid.gpus.devices import leased_devices
from dphybrid.orchestration.machines import gathered, named_workers
from dphybrid.orchestration.supervised import supervised, watched_flow_run
from dphybrid.run.folder import read_run
from dphybrid.util.stop import stop_signals

__all__ = ["join_hybrid", "together"]
dphybrid.cluster.launch.PROGRAM = "tests.flows.standin"


@flow(name="together", log_prints=True)
def together(run: str, machines: list[str] = [], wait_again_s: float = 100) -> str:  # noqa: B006
    """Hold a run's devices together with another machine. wait_again_s: how long to wait for that machine
    when the flow run was started again."""
    settings = load_settings()
    if runtime.flow_run.run_count > 1:
        settings = settings.model_copy(update={"cluster_wait_s": wait_again_s})
    with supervised() as stop, watched_flow_run(runtime.flow_run.id, stop), ExitStack() as held:
        others = named_workers(2, machines)
        page = read_run(settings.runs_dir / run, settings)
        held.enter_context(leased_devices(page.config, settings, run=run, stop=stop))
        held.enter_context(stop_signals(stop))
        (page.folder / OUTCOME).unlink(missing_ok=True)
        meeting = held.enter_context(gathered(others, str(page.folder), settings, "join-hybrid/together"))
        outcome = train_in_ranks(page.folder, 2, settings, stop, meeting)
        if outcome.state == "stopped" and not stop.pending:
            stop.ask("another machine", requeue=True)
        stop.obey()
        return outcome.state
