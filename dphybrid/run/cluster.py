"""A run whose training is done by several ranks: starting them, and what each of them does.

`python -m dphybrid.run.cluster RUN_FOLDER`, started by `cluster.launch`, is a rank of a run of this machine.
"""

import os
import platform
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch

from dphybrid import __version__
from dphybrid.cluster.launch import (
    OUTCOME,
    Meeting,
    Outcome,
    asked_from_outside,
    own_addresses,
    rank_environment,
    refuse_public,
    run_ranks,
)
from dphybrid.cluster.plan import ClusterPlan, Workload
from dphybrid.cluster.ranks import LostRanks, Ranks, joined
from dphybrid.cluster.refusals import (
    installed_version,
    refuse_label_for_ranks,
    refuse_model_for_ranks,
)
from dphybrid.config import ExperimentConfig
from dphybrid.config.settings import Settings, load_settings
from dphybrid.data.batches import batches
from dphybrid.embedding import DeclaresIds, dense_parameters, find_tables
from dphybrid.embedding.lookup import each_lookup
from dphybrid.embedding.storage import available_memory_bytes, deferred_rows
from dphybrid.gpus.leasing import expected_devices
from dphybrid.parallel import resolve_devices
from dphybrid.recipes.context import build_from_config
from dphybrid.recipes.registry import find_recipe
from dphybrid.run.build import build_run, prepare_data
from dphybrid.run.folder import Run, find_tagged_run, read_run
from dphybrid.run.pages import Report, ResultPage, RunPage
from dphybrid.run.report import report_run
from dphybrid.run.train import closing_run, evaluate_run, train_here
from dphybrid.util.device_spec import parse_device_spec
from dphybrid.util.errors import UserError
from dphybrid.util.stop import Interrupted, StopRequest, stop_signals

JOB = "dphybrid.cluster_job"
"""Tag of a run: torchrun's `--rdzv-id`."""

RANK_PROGRAM = "dphybrid.run.cluster"
"""What a rank runs: this module. Tests of what is around it put another one here."""

PAPER_COLUMNS, PAPER_DENSE = 26, 5_000_000
"""Of a model whose data is not there yet: id columns, and parameters of its blocks."""


def ranks_plan(
    config: ExperimentConfig,
    settings: Settings,
    batch_size: int,
    nodes: int,
    link_gbit: float,
    table_rows: int | None = None,
) -> str:
    """Return what `dphybrid plan --cluster.ranks W` prints; see `dphybrid.cluster.plan`.

    table_rows: of a table that is not there yet; None: the data is prepared and the model built from it.
    Raises UserError for numbers that make no plan.
    """
    ranks = config.cluster.ranks
    if not 1 <= nodes <= ranks or link_gbit <= 0 or batch_size < 1 or (table_rows or 1) < 1:
        raise UserError(
            f"--nodes {nodes} --link-gbit {link_gbit:g} --batch-size {batch_size} --table-rows {table_rows}: "
            f"use 1 to {ranks} machines (there are {ranks} ranks), and numbers above 0"
        )
    states = 0 if config.table.optimizer == "sgd" else 1
    if table_rows is not None:
        dim = int(config.model.model_dump().get("dim", 64))
        work = Workload(table_rows, dim, batch_size * PAPER_COLUMNS, PAPER_DENSE, states)
    else:
        data = find_recipe(config.recipe).prepare(config.data, settings.prepared_dir, config.train.seed)
        refuse_label_for_ranks(config, data)
        with deferred_rows():
            model = build_from_config(config, data.info, resolve_devices("cpu"))
        refuse_model_for_ranks(config, model)
        (table,) = find_tables(model).values()
        if not isinstance(model, DeclaresIds):
            raise UserError("the model declares no table_ids(batch); give --table-rows N")
        sample = next(batches(data.dataset("train"), batch_size, seed=0, epoch=0, shuffle=False))
        ids = sum(ids.numel() for wanted in model.table_ids(sample).values() for ids in each_lookup(wanted))
        dense = sum(parameter.numel() for parameter in dense_parameters(model))
        work = Workload(table.num_rows, table.dim, ids, dense, states)
    return ClusterPlan(work, ranks, nodes, link_gbit).text(available_memory_bytes())


def train_in_ranks(
    run: Run, settings: Settings, stop: StopRequest, meeting: Meeting | None = None
) -> ResultPage:
    """Train a built run by `cluster.ranks` processes; see `jobs.train.train_run`.

    A rank that dies is started again with all others, from the newest checkpoint, `cluster_restarts` times.
    meeting: with other machines, each of which starts as many (`follow_ranks`); None: all are here.
    """
    (run.folder / OUTCOME).unlink(missing_ok=True)
    outcome = _run_ranks(run, settings, stop, meeting)
    if outcome.state == "refused":
        raise UserError(outcome.words)
    if outcome.state == "stopped":
        if not stop.pending:  # a signal to the ranks themselves; or another machine is wanted for others
            stop.ask("a request to a rank", requeue=meeting is not None)
        interruption = stop.interruption()
        raise Interrupted(outcome.words, interruption.signal_number, interruption.requeue)
    return ResultPage.read(run.folder / "result.json")


def follow_ranks(run: Run, settings: Settings, stop: StopRequest, meeting: Meeting) -> Outcome:
    """Be one of the other machines of a `train_in_ranks`; return how it ended. Raises UserError."""
    return _run_ranks(run, settings, stop, meeting)


def _run_ranks(run: Run, settings: Settings, stop: StopRequest, meeting: Meeting | None) -> Outcome:
    logs, meeting = run.folder / "ranks", meeting or Meeting()
    ranks = run.config.cluster.ranks // meeting.nodes
    print(f"Starting {ranks} ranks; what the others than the first print is in {logs}", flush=True)
    module = (RANK_PROGRAM, str(run.folder))
    environment = rank_environment(settings.model_dump(mode="json"), meeting.address)
    code = run_ranks(ranks, module, run.folder, environment, settings.cluster_restarts, stop, meeting)
    if not (run.folder / OUTCOME).is_file():
        raise UserError(
            f"the ranks of run {run.folder.name} ended with exit code {code}, after "
            f"{settings.cluster_restarts} restarts at most; what they said is above and in {logs}; go on "
            "from the newest checkpoint with --resume"
        )
    return Outcome.read(run.folder / OUTCOME)


def rank_device(devices: str, local_rank: int) -> torch.device:
    """Return the device of a rank: the CPU, or its own among those that the run has."""
    names = parse_device_spec(devices).names
    return torch.device("cpu" if names == ("cpu",) else names[local_rank])


def be_a_rank(run: Run, settings: Settings) -> Outcome:
    """Train as the rank that this process's variables say, and tell how it ended."""
    page, stop = run.folder / OUTCOME, StopRequest()
    device = rank_device(run.page.devices, int(os.environ["LOCAL_RANK"]))
    with (
        stop_signals(stop),
        asked_from_outside(stop),
        joined(settings.cluster_timeout_s, device, settings.cluster_wait_s, stop.obey) as ranks,
    ):
        outcome = _train(run, settings, stop, ranks)
        # what one rank alone refuses, the others see as its end
        if ranks.leads or outcome.state == "refused":
            outcome.write(page)
        if outcome.state != "refused":
            torch.distributed.barrier()
    return outcome


def is_joined() -> bool:
    """Was this process started by torchrun, as one of several?"""
    return "TORCHELASTIC_RUN_ID" in os.environ


def join_job(
    config: ExperimentConfig,
    settings: Settings,
    run_name: str | None = None,
    resume: str | None = None,
    tags: dict[str, str] | None = None,
) -> Report | None:
    """`jobs.train.run_job` as one of the ranks that torchrun started, on several machines perhaps.

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
    stop = StopRequest()
    prepared = prepare_data(config, settings, local_size)
    data = find_recipe(config.recipe).open(Path(prepared))
    with (
        joined(settings.cluster_timeout_s, rank_device(devices, int(os.environ["LOCAL_RANK"]))) as ranks,
        stop_signals(stop),
        asked_from_outside(stop),
    ):
        _refuse_differences(ranks, data.digest)
        own_tags = {**(tags or {}), JOB: job, "dphybrid.nodes": str(size // local_size)}

        def build() -> tuple[str, str, RunPage | None]:
            try:
                before = find_tagged_run(settings, JOB, job) or resume
                folder = build_run(
                    config, settings, prepared, devices, run_name=run_name, resume=before, tags=own_tags
                )
            except UserError as error:
                return str(error), "", None
            return "", folder, read_run(folder).page

        problem, folder, page = ranks.told(build() if ranks.leads else None)
        if problem or page is None:
            raise UserError(problem)
        run = Run(Path(folder), page.model_copy(update={"prepared": prepared}))
        with closing_run(folder, settings) if ranks.leads else nullcontext():
            train_here(run, settings, stop, ranks)
        ranks.all_told(None)
    if not ranks.leads:
        return None
    with closing_run(folder, settings):
        evaluate_run(folder, settings)
        return report_run(folder, settings)


def versions() -> dict[str, str]:
    """Return what must be the same on all machines of a job."""
    return {"dphybrid": __version__} | {name: installed_version(name) for name in ("torch", "torchrec")}


def difference(host: str, facts: Mapping[str, str], wanted_on: str, wanted: Mapping[str, str]) -> str | None:
    """Return which of its facts a host has otherwise than another one, and what to do; None: none."""
    for what, value in facts.items():
        if value != wanted.get(what, ""):
            return (
                f"{host} has {what} {value[:16] or 'not at all'}, {wanted_on} has "
                f"{wanted.get(what, '')[:16]}; give all machines the same files and versions"
            )
    return None


def _refuse_differences(ranks: Ranks, digest: str) -> None:
    """Raise UserError that names the first rank whose versions or data are not rank 0's."""
    everyone = ranks.all_told((platform.node(), {"prepared data": digest, **versions()}))
    for rank, (host, facts) in enumerate(everyone):
        if found := difference(
            f"rank {rank} on {host}", facts, f"rank 0 on {everyone[0][0]}", everyone[0][1]
        ):
            raise UserError(found)


def _train(run: Run, settings: Settings, stop: StopRequest, ranks: Ranks) -> Outcome:
    try:
        train_here(run, settings, stop, ranks)
    except UserError as error:
        return Outcome(state="refused", words=str(error))
    except Interrupted as interruption:
        return Outcome(state="stopped", words=str(interruption))
    return Outcome(state="trained")


def main(argv: Sequence[str]) -> int:
    """Be a rank of the run of a folder. A failure ends this process alone; the agent sees to the others."""
    run = read_run(argv[0])
    if (run.folder / OUTCOME).is_file():  # started again for the ranks that did not know the end
        return 0
    try:
        be_a_rank(run, load_settings())
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
