"""This process as one of several ranks that train a run: `python -m dphybrid.run.joined RUN_FOLDER`, as
`cluster.launch` starts it, or the whole of `dphybrid train` under torchrun."""

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from dphybrid.cluster.engine import NODES
from dphybrid.cluster.launch import OUTCOME, Outcome, asked_from_outside, own_addresses, refuse_public
from dphybrid.cluster.rank_engine import RankEngine
from dphybrid.cluster.ranks import LostRanks, Ranks, joined
from dphybrid.cluster.refusals import refuse_differences
from dphybrid.config import ExperimentConfig
from dphybrid.config.settings import Settings, load_settings
from dphybrid.run.build import build_run, prepare_data
from dphybrid.run.evaluate import evaluate_run
from dphybrid.run.experiment import Experiment
from dphybrid.run.folder import Run, RunPage, find_tagged_run, read_run
from dphybrid.run.leasing import expected_devices
from dphybrid.run.pages import Report
from dphybrid.run.report import report_run
from dphybrid.run.train import closing_run, train_here
from dphybrid.util.device_spec import parse_device_spec
from dphybrid.util.errors import UserError
from dphybrid.util.stop import Interrupted, StopRequest, stop_signals

_JOB = "dphybrid.cluster_job"
"""Tag of a run: torchrun's `--rdzv-id`."""


def is_joined() -> bool:
    """Was this process started by torchrun, as one of several?"""
    return "TORCHELASTIC_RUN_ID" in os.environ


def _rank_device(devices: str) -> torch.device:
    """Return the device of this rank: the CPU, or its own among those that the run has."""
    names = parse_device_spec(devices).names
    return torch.device("cpu" if names == ("cpu",) else names[int(os.environ["LOCAL_RANK"])])


def _be_a_rank(run: Run) -> Outcome:
    """Train as the rank that this process's variables say, and write how it ended."""
    stop, device, settings = StopRequest(), _rank_device(run.page.devices), run.settings
    with (
        stop_signals(stop),
        asked_from_outside(stop),
        joined(settings.cluster_timeout_s, device, settings.cluster_wait_s, stop.obey) as ranks,
    ):
        outcome = _train(run, stop, ranks)
        # what one rank alone refuses, the others see as its end
        if ranks.leads or outcome.state == "refused":
            outcome.write(run.folder / OUTCOME)
        if outcome.state != "refused":
            torch.distributed.barrier()
    return outcome


def _train(run: Run, stop: StopRequest, ranks: Ranks) -> Outcome:
    try:
        train_here(run, replace(run.experiment(), engine=RankEngine(run.config, ranks)), stop)
    except UserError as error:
        return Outcome(state="refused", words=str(error))
    except Interrupted as interruption:
        return Outcome(state="stopped", words=str(interruption))
    return Outcome(state="trained")


def join_job(
    config: ExperimentConfig,
    settings: Settings,
    run_name: str | None = None,
    resume: str | None = None,
    tags: dict[str, str] | None = None,
) -> Report | None:
    """`run.train.run_job` as one of the ranks that torchrun started, on several machines perhaps.

    Every machine has the data and prepares it; rank 0's keeps run, record and checkpoints, and gets the
    report. Ranks that are started again, by their agent or by hand, go on with the run of the same
    `--rdzv-id`. Raises UserError, on all, before work starts, when config, machines or data do not fit
    together.
    """
    size, local_size = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    job, devices = os.environ["TORCHELASTIC_RUN_ID"], expected_devices(config, settings)
    if size != config.cluster.ranks:
        raise UserError(
            f"cluster.ranks={config.cluster.ranks}, and torchrun started {size}; make --nnodes times "
            "--nproc-per-node the same"
        )
    if job in ("", "none"):
        raise UserError("torchrun: give --rdzv-id NAME, by which ranks that start again find their run")
    if not settings.cluster_address:  # torchrun's store listens at all of them
        refuse_public(own_addresses())
    stop, own_tags = StopRequest(), {**(tags or {}), _JOB: job, NODES: str(size // local_size)}
    experiment = prepare_data(config, settings, here=local_size, run_name=run_name)
    with (
        joined(settings.cluster_timeout_s, _rank_device(devices)) as ranks,
        stop_signals(stop),
        asked_from_outside(stop),
    ):
        refuse_differences(ranks, experiment.data.digest)

        def build() -> Run:
            before = find_tagged_run(settings, _JOB, job) or resume
            return build_run(experiment, devices, run_name=run_name, resume=before, tags=own_tags)

        run = _built_by_the_first(ranks, experiment, build)
        with closing_run(run, settings) if ranks.leads else nullcontext():
            train_here(run, replace(experiment, engine=RankEngine(experiment.config, ranks)), stop)
        ranks.all_told(None)
    if not ranks.leads:
        return None
    with closing_run(run, settings):
        evaluate_run(run, experiment)
        return report_run(run, experiment)


def _built_by_the_first(ranks: Ranks, experiment: Experiment, build: Callable[[], Run]) -> Run:
    """Return the run that rank 0 builds, with this machine's prepared data. Raises UserError on all ranks."""
    problem, folder, page = "", Path(), None
    if ranks.leads:
        try:
            run = build()
            folder, page = run.folder, run.page
        except UserError as error:
            problem = str(error)
    told: tuple[str, Path, RunPage | None] = ranks.told((problem, folder, page))
    problem, folder, page = told
    if page is None:
        raise UserError(problem)
    return Run(folder, page.model_copy(update={"prepared": str(experiment.data.path)}), experiment.settings)


def main(argv: Sequence[str]) -> int:
    """Be a rank of the run of a folder. A failure ends this process alone; the agent sees to the others."""
    run = read_run(argv[0], load_settings())
    if (run.folder / OUTCOME).is_file():  # started again for the ranks that did not know the end
        return 0
    try:
        _be_a_rank(run)
    except Interrupted as interruption:  # before all ranks were here
        Outcome(state="stopped", words=str(interruption)).write(run.folder / OUTCOME)
    except LostRanks as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(1)
    except BaseException:  # noqa: BLE001 - printed, and the end of this process
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # not in torch's good time: the others wait
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
