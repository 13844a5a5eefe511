"""Trains a built run in this process and writes its results, `result.json`."""

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
from dphybrid.run.start import build_trained, fill, make_session, newest_checkpoint, set_up_process
from dphybrid.tracking import Tracker
from dphybrid.tracking.system import system_metrics
from dphybrid.training.callbacks import Callback
from dphybrid.training.checkpoint import complete_checkpoints
from dphybrid.training.clock import StepTimes
from dphybrid.training.display import Display
from dphybrid.training.engine import Session
from dphybrid.training.loop import keep_checkpoints, log_kept, train
from dphybrid.training.observing import Observer
from dphybrid.training.saving import best_checkpoint
from dphybrid.util.errors import UserError
from dphybrid.util.files import write_text
from dphybrid.util.stop import StopRequest


def train_here(
    run: Run, experiment: Experiment, stop: StopRequest, callbacks: Sequence[Callback] = ()
) -> ResultPage:
    """Train a built run; return the page `result.json`. Raises as `run.train.train_run` does."""
    engine = experiment.engine
    # Compare each file with its checksum: data damaged on disk since preparation would train another model.
    experiment.recipe.open(experiment.data.path, verified=True)
    devices = set_up_process(run, experiment)
    done = newest_checkpoint(run) if engine.leads else None
    trained = build_trained(experiment, devices, done)
    saver = engine.writer(run.checkpoints, trained, *experiment.encoder)
    # One process reads the checkpoint, and the engine passes the states on to the others.
    fills = engine.leads and (done or experiment.config.train.warm_start)
    states = engine.read(trained, partial(fill, trained, experiment, saver, done) if fills else None) or {}
    engine.obey(stop, f"after step {trained.progress.step}; --resume continues it")
    # Only one process of a run records; the others get the base Tracker, which discards everything.
    record = attached(run) if engine.leads else Tracker()
    with closing(record) as tracker, Display() as display:
        session = make_session(run, experiment, devices, trained, saver, tracker, stop, callbacks)
        # Before `restore`, because the observer's window of metrics is one of the restored states.
        session.stateful["meter"] = seen = Observer(session, display)
        session.restore(states)
        if len(devices) > 1:
            # The exact words of PyTorch's tutorials on data parallelism.
            line = f"Let's use {len(devices)} {devices.noun}!"
            # A resumed run already has this line in the split log of its checkpoint.
            if not states:
                session.splits.note([line])
            display.line(line)
        if done:
            # The previous process may have ended after writing a checkpoint and before removing older ones.
            keep_checkpoints(session, trained.progress)
        started = datetime.fromisoformat(run.page.created).timestamp()
        system: dict[str, float] = {}
        try:
            with system_metrics(tracker, started, devices.gpu_uuids) as system, saver:
                train(session, seen)
        finally:
            # Also after an interruption: the page then names the checkpoint to resume from.
            result = _result_of(session, seen.times, system)
            if engine.leads:
                _keep_outcome(run, tracker, result)
                log_kept(session)
    stop.obey("after its last step; --resume continues it")
    return result


def _result_of(session: Session, times: StepTimes, system: dict[str, float]) -> ResultPage:
    """Return the results of a training; after an interruption, those so far. system: means of the system
    metrics."""
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
        splits=session.splits.rows(),
        split_lines=session.splits.lines,
    )


def _step_ms_before(page: Path, step: int) -> dict[str, float]:
    """Return the previous process's step times if it took the last step.

    A process killed between its last step and its report is resumed by one that takes no step to time.
    """
    try:
        before = ResultPage.read(page)
    except UserError:  # no page, or a damaged one
        return {}
    return before.step_ms if before.steps == step else {}


def _keep_outcome(run: Run, tracker: Tracker, result: ResultPage) -> None:
    """Write the results; record which rows each replica received, as printed and as a table."""
    text = "\n".join(result.split_lines) + "\n"
    write_text(run.folder / "splits.txt", text)
    result.write(run.folder / "result.json")
    tracker.log_text("splits.txt", text)
    tracker.log_table("split_shapes.json", [row.table_row() for row in result.splits])
