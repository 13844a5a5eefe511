"""The training of a built run in this process; its results, as `result.json`."""

from collections.abc import Sequence
from contextlib import closing
from datetime import datetime
from functools import partial
from pathlib import Path

from dphybrid.data import num_batches
from dphybrid.run.experiment import Experiment
from dphybrid.run.folder import Run
from dphybrid.run.pages import ResultPage
from dphybrid.run.report import attached
from dphybrid.run.start import begin, build_trained, fill, make_session, newest_checkpoint
from dphybrid.tracking import Tracker
from dphybrid.tracking.system import system_metrics
from dphybrid.training.callbacks import Callback
from dphybrid.training.checkpoint import complete_checkpoints
from dphybrid.training.clock import StepTimes
from dphybrid.training.display import Display
from dphybrid.training.engine import Session
from dphybrid.training.loop import keep_checkpoints, train
from dphybrid.training.observing import Observer
from dphybrid.training.saving import best_checkpoint
from dphybrid.util.errors import UserError
from dphybrid.util.files import write_text
from dphybrid.util.stop import StopRequest


def train_here(
    run: Run, experiment: Experiment, stop: StopRequest, callbacks: Sequence[Callback] = ()
) -> ResultPage:
    """Train a built run; return what `result.json` holds. Raises as `run.train.train_run`."""
    engine = experiment.engine
    # Each file against its checksum: what a disk has damaged since the preparation would train another model.
    experiment.recipe.open(experiment.data.path, verified=True)
    devices = begin(run, experiment)
    done = newest_checkpoint(run) if engine.leads else None
    trained = build_trained(experiment, devices, done)
    saver = engine.writer(run.checkpoints, trained, *experiment.encoder)
    # One process reads the checkpoint; its engine hands the states on to the others.
    fills = engine.leads and (done or experiment.config.train.warm_start)
    states = engine.read(trained, partial(fill, trained, experiment, saver, done) if fills else None) or {}
    engine.obey(stop, f"after step {trained.progress.step}; it goes on with --resume")
    # The plain Tracker drops what it gets: only one process of a run records.
    record = attached(run) if engine.leads else Tracker()
    with closing(record) as tracker, Display() as display:
        session = make_session(run, experiment, devices, trained, saver, tracker, stop, callbacks)
        # Before the states are restored: its window of metrics goes on, too.
        session.stateful["meter"] = seen = Observer(session, display)
        session.restore(states)
        if len(devices) > 1:
            # Word for word as PyTorch's tutorials on data parallelism print it.
            line = f"Let's use {len(devices)} {devices.noun}!"
            # A resumed run has it from its checkpoint.
            if not states:
                session.splits.note([line])
            display.line(line)
        if done:
            keep_checkpoints(session, trained.progress)  # the process before may have ended in between
        started = datetime.fromisoformat(run.page.created).timestamp()
        system: dict[str, float] = {}
        try:
            with system_metrics(tracker, started, devices.gpu_uuids) as system, saver:
                train(session, seen)
        finally:
            # Of an interrupted run, too: its page names the checkpoint from which it goes on.
            result = _result_of(session, seen.times, system)
            if engine.leads:
                _keep_outcome(run, tracker, result)
    stop.obey("after its last step; it goes on with --resume")
    return result


def _result_of(session: Session, times: StepTimes, system: dict[str, float]) -> ResultPage:
    """Return the results of a training, up to now when it was interrupted. system: means of the machine's
    figures."""
    progress, folder = session.trained.progress, session.checkpoints
    done = complete_checkpoints(folder)
    best = best_checkpoint(done, progress, session.task)
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
        step_ms=times.summary() or _step_ms_before(folder.parent / "result.json", progress.step),
        steps_timed=times.count,
        stages={name: round(seconds, 6) for name, seconds in stages},
        saving=session.saver.costs,
        steps_per_epoch=num_batches(session.train_data, session.config.train.batch_size),
        steps_skipped=progress.skipped,
        splits=session.splits.rows(),
        split_lines=session.splits.lines,
    )


def _step_ms_before(page: Path, step: int) -> dict[str, float]:
    """Return how long steps took in the process before, where that one took the last step: it may have been
    killed before its report."""
    try:
        before = ResultPage.read(page)
    except UserError:  # there is none, or a damaged one
        return {}
    return before.step_ms if before.steps == step else {}


def _keep_outcome(run: Run, tracker: Tracker, result: ResultPage) -> None:
    """Write the results; record what each replica got of a batch, as it was printed and as a table."""
    text = "\n".join(result.split_lines) + "\n"
    write_text(run.folder / "splits.txt", text)
    result.write(run.folder / "result.json")
    tracker.log_text("splits.txt", text)
    tracker.log_table("split_shapes.json", [row.table_row() for row in result.splits])
