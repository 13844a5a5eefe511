"""The main job as five plain functions - prepare, build, train, evaluate, report - that pass paths, and
`run_job`, which calls them in turn.

The flow and the command line share them. A run is a folder: `run.json` (what it is), `checkpoints/`,
`result.json`, `splits.json`, `splits.txt`, `report.json`; its MLflow run holds the same for people to
compare.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dphybrid.cluster.launch import Meeting
from dphybrid.cluster.ranks import Ranks
from dphybrid.config import ExperimentConfig
from dphybrid.config.settings import Settings
from dphybrid.data import Prepared, num_batches
from dphybrid.data.reread import Rereading
from dphybrid.embedding import RowOptimizer, find_tables, make_row_optimizer
from dphybrid.embedding.kernels import use_threads
from dphybrid.embedding.machine_code import compiled_folder, keep_compiled_in
from dphybrid.embedding.storage import deferred_rows, unfilled_rows
from dphybrid.gpus.leasing import leased_devices
from dphybrid.gpus.politeness import giving_way
from dphybrid.parallel import (
    compile_regions,
    resolve_devices,
    start_on,
)
from dphybrid.recipes.context import build_from_config
from dphybrid.recipes.registry import find_recipe
from dphybrid.run.build import build_run, prepare_data, resumed_replicas
from dphybrid.run.evaluate import evaluate_run
from dphybrid.run.folder import (
    Run,
    read_run,
    running,
)
from dphybrid.run.pages import Report, ResultPage, SplitsPage
from dphybrid.run.report import attached, report_run
from dphybrid.tracking import Status, Tracker
from dphybrid.tracking.system import Averages, system_metrics
from dphybrid.training.callbacks import Callback, find_callbacks
from dphybrid.training.checkpoint import (
    Progress,
    Trained,
    complete_checkpoints,
    load_checkpoint,
    newest_whole_checkpoint,
    step_of,
)
from dphybrid.training.clock import StageClock
from dphybrid.training.display import Display
from dphybrid.training.loop import keep_checkpoints, train
from dphybrid.training.observing import Meter
from dphybrid.training.optimizers import make_dense_optimizer, make_states
from dphybrid.training.retention import best_checkpoint
from dphybrid.training.saving import CheckpointWriter, SavingCosts
from dphybrid.training.session import Session
from dphybrid.training.split_log import SplitLog, announcement
from dphybrid.training.together import ALONE
from dphybrid.training.warm_start import warm_start
from dphybrid.util.files import clear_leftovers, disk_errors_told, make_folder, write_text
from dphybrid.util.memory import keep_freed_memory
from dphybrid.util.stop import Interrupted, StopRequest, stop_signals


def run_job(
    config: ExperimentConfig,
    settings: Settings,
    run_name: str | None = None,
    resume: str | None = None,
    tags: dict[str, str] | None = None,
    stop: StopRequest | None = None,
    callbacks: Sequence[Callback] = (),
) -> Report:
    """Prepare, build, train, evaluate and report in this process.

    stop: by which others can ask the run to stop; signals do in any case. callbacks: called after each epoch,
    before those that train.callbacks names. Raises UserError before work starts, Interrupted on request.
    """
    stop = stop or StopRequest()
    with stop_signals(stop, at_once=True), ExitStack() as held:
        prepared = prepare_data(config, settings)
        stop.obey("before it was built")
        replicas = resumed_replicas(config, settings, prepared, resume)
        run = run_name or resume or find_recipe(config.recipe).name
        devices = held.enter_context(leased_devices(config, settings, run=run, replicas=replicas, stop=stop))
        with giving_way(devices, settings, stop), stop_signals(stop):
            folder = build_run(
                config,
                settings,
                prepared,
                devices.text,
                run_name=run_name,
                resume=resume,
                tags=devices.tags | (tags or {}),
            )
            with closing_run(folder, settings):
                train_run(folder, settings, stop, callbacks)
        with closing_run(folder, settings):
            evaluate_run(folder, settings)
            return report_run(folder, settings)


@contextmanager
def closing_run(folder: str, settings: Settings) -> Iterator[None]:
    """End the MLflow run as KILLED when the block is interrupted, which is told the run's name, and as FAILED
    when it fails.

    Nobody else runs it meanwhile. Raises UserError when somebody does, or when the disk takes no more.
    """
    with running(Path(folder)), disk_errors_told("then go on with --resume"):
        try:
            yield
        except BaseException as error:
            if isinstance(error, Interrupted):
                error.run = Path(folder).name
            fail_run(folder, settings, "KILLED" if _is_stop(error) else "FAILED")
            raise


def _is_stop(error: BaseException) -> bool:
    return not isinstance(error, Exception)


def train_run(
    run_folder: str,
    settings: Settings,
    stop: StopRequest,
    callbacks: Sequence[Callback] = (),
    meeting: Meeting | None = None,
) -> ResultPage:
    """Train a built run to its end, from its latest checkpoint where it has one; return what `result.json`
    holds. callbacks: beside those that train.callbacks names. meeting: of several ranks with other machines.

    Raises Interrupted when `stop` was asked: as soon as the model is built and its checkpoint loaded, or
    after a checkpoint. Raises UserError when the loss is no number any more.
    """
    stop.obey("before it was trained; it goes on with --resume")
    run = read_run(run_folder)
    if run.config.cluster.ranks:
        from dphybrid.run.cluster import train_in_ranks

        return train_in_ranks(run, settings, stop, meeting)
    return train_here(run, settings, stop, callbacks=callbacks)


def train_here(
    run: Run,
    settings: Settings,
    stop: StopRequest,
    ranks: Ranks | None = None,
    callbacks: Sequence[Callback] = (),
) -> ResultPage:
    """`train_run` in this process, or this process's part of it where it is one of several ranks."""
    config, data, leads = run.config, run.open_data(verified=True), ranks is None or ranks.leads
    recipe = find_recipe(config.recipe)
    if settings.threads:
        use_threads(settings.threads)
    keep_freed_memory()
    keep_compiled_in(compiled_folder(settings.data_dir))
    devices = resolve_devices(run.page.devices if ranks is None else str(ranks.device))
    start_on(devices)
    done = _newest_checkpoint(run) if leads else None
    filled = bool(done or config.train.warm_start)  # by a checkpoint
    with deferred_rows() if ranks else unfilled_rows() if filled else nullcontext():
        seen = None if filled else data.dataset("train")
        model = build_from_config(config, data.info, devices, settings.table_folder, seen)
    together = ALONE
    if ranks is not None:
        from dphybrid.cluster.engine import spread_over

        together = spread_over(ranks, model, config)
    if config.train.compile:
        compile_regions(model)
    tables = find_tables(model)
    rows: RowOptimizer | None = None
    if tables:
        rows = make_row_optimizer(
            config.table.optimizer, tables, lr=config.table.lr, weight_decay=config.table.weight_decay
        )
    trained = Trained(model, make_dense_optimizer(model, config.train), rows, Progress())
    if devices.home.type == "cuda" and trained.dense is not None:
        make_states(trained.dense, config.train.batch_size, model)
    torch.manual_seed(config.train.seed)
    encoder = data.path / "encoder"
    saver = together.writer(
        run.checkpoints,
        trained,
        config.checkpoint.full_every,
        encoder if encoder.is_dir() else None,
        data.manifest.files,
    )
    load = _starting_point(done, config, trained, data, saver) if leads else None
    record: dict[str, Any] = together.read(trained, load) or {}
    if ranks is None:  # several agree on it, in their first step
        stop.obey(f"after step {trained.progress.step}; it goes on with --resume")
    with (
        closing(attached(run, settings)) if leads else nullcontext(Tracker()) as tracker,
        Display() as display,
    ):
        session = Session(
            config=config,
            trained=trained,
            train_data=data.dataset("train"),
            valid_data=data.dataset("valid"),
            task=recipe.task(data.info),
            tracker=tracker,
            clock=StageClock.of(devices.home),
            splits=SplitLog(
                model, config.train.print_splits == "each", together.split, short=not recipe.prints_shapes
            ),
            stop=stop,
            checkpoints=run.checkpoints,
            facts={
                "data_digest": data.digest,
                "prepared": str(data.path),
                "devices": devices.text,
                "recipe": config.recipe,
                "info": data.info,
            },
            dataset=(data.path.name, data.digest),
            rereading=Rereading(data if leads and config.train.verify_data == "beside" else None),
            saver=saver,
            profile_steps=settings.profile_steps if leads else range(0),
            together=together,
            callbacks=[*callbacks, *find_callbacks(config.train.callbacks)],
        )
        meter = Meter(session)
        if record:
            session.splits.restore(record["splits"])
            session.clock.restore(record["clock"])
            meter.restore(record["meter"])
            saver.costs = SavingCosts.model_validate(record.get("saving", {}))
        if line := announcement(devices):
            if not record:
                session.splits.note([line])
            display.line(line)
        if done:
            keep_checkpoints(session, trained.progress)  # the process before may have ended in between
        started = datetime.fromisoformat(run.page.created).timestamp()
        averages = Averages()
        try:
            with system_metrics(tracker, started, devices.gpu_uuids, averages), saver, session.rereading:
                train(session, display, meter)
        finally:
            result = _result(run, session, meter, averages.means)
            if leads:
                _write_result(run, session, result)
            tracker.log_text("splits.txt", "\n".join(session.splits.lines) + "\n")
            tracker.log_table("split_shapes.json", [row.table_row() for row in session.splits.rows()])
    stop.obey("after its last step; it goes on with --resume")
    return result


def _newest_checkpoint(run: Run) -> Path | None:
    make_folder(run.checkpoints)
    clear_leftovers(run.folder)
    clear_leftovers(run.checkpoints)
    return newest_whole_checkpoint(run.checkpoints)


def _starting_point(
    done: Path | None,
    config: ExperimentConfig,
    trained: Trained,
    data: Prepared,
    saver: CheckpointWriter,
) -> Callable[[], dict[str, Any]] | None:
    """Return what fills `trained` and returns the record to go on with; None: it stays as it was built."""

    def go_on(done: Path) -> dict[str, Any]:
        page = load_checkpoint(done, trained)
        saver.resumed(done, page)
        progress = trained.progress
        print(f"Going on from {done}: step {progress.step}, epoch {progress.epoch + 1}", flush=True)
        return page.record

    def start_warm(checkpoint: str) -> dict[str, Any]:
        warm_start(Path(checkpoint), trained.model, data)
        print(f"Starting from the weights of {checkpoint}", flush=True)
        return {}

    if done:
        return partial(go_on, done)
    return partial(start_warm, config.train.warm_start) if config.train.warm_start else None


def _result(run: Run, session: Session, meter: Meter, system: dict[str, float]) -> ResultPage:
    progress = session.trained.progress
    done = complete_checkpoints(run.checkpoints)
    best = best_checkpoint(done, progress, session.task)
    if best is not None and progress.best_step not in (None, step_of(best)):
        print(
            f"Note: the best checkpoint, of step {progress.best_step}, is gone from {run.checkpoints}; "
            f"{best.name} takes its place",
            file=sys.stderr,
            flush=True,
        )
    stages = sorted(session.clock.totals.items(), key=lambda item: -item[1])
    return ResultPage(
        checkpoint=str(done[-1]) if done else "",
        best_checkpoint=str(best or ""),
        steps=progress.step,
        epochs=progress.epoch,
        devices=session.facts["devices"],
        system=system,
        history=progress.history,
        best_value=progress.best_value,
        step_ms=meter.times.summary(),
        steps_timed=meter.times.count,
        stages={name: round(seconds, 6) for name, seconds in stages},
        saving=session.saver.costs,
        steps_per_epoch=num_batches(session.train_data, session.config.train.batch_size),
        steps_skipped=progress.skipped,
    )


def _write_result(run: Run, session: Session, result: ResultPage) -> None:
    write_text(run.folder / "splits.txt", "\n".join(session.splits.lines) + "\n")
    SplitsPage(rows=session.splits.rows(), lines=session.splits.lines).write(run.folder / "splits.json")
    result.write(run.folder / "result.json")


def fail_run(run_folder: str, settings: Settings, status: Status) -> None:
    """End the MLflow run of a run folder as FAILED or KILLED."""
    attached(read_run(run_folder), settings).finish(status)


__all__ = [
    "Report",
    "build_run",
    "closing_run",
    "evaluate_run",
    "fail_run",
    "prepare_data",
    "report_run",
    "resumed_replicas",
    "run_job",
    "train_run",
]
