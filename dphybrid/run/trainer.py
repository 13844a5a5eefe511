"""The training of a built run in this process."""

from collections.abc import Sequence
from contextlib import closing
from datetime import datetime

import torch

from dphybrid.parallel import Devices, start_on
from dphybrid.run.experiment import Experiment
from dphybrid.run.folder import Run
from dphybrid.run.outcome import keep_outcome, result_of
from dphybrid.run.pages import ResultPage
from dphybrid.run.report import attached
from dphybrid.run.start import build_trained, make_session, newest_checkpoint, starting_point
from dphybrid.tracking import Tracker
from dphybrid.tracking.system import Averages, system_metrics
from dphybrid.training.callbacks import Callback
from dphybrid.training.display import Display
from dphybrid.training.engine import Engine
from dphybrid.training.loop import keep_checkpoints, train
from dphybrid.training.observing import Meter
from dphybrid.training.split_log import announcement
from dphybrid.util.memory import keep_freed_memory
from dphybrid.util.stop import StopRequest


def train_here(
    run: Run,
    experiment: Experiment,
    stop: StopRequest,
    engine: Engine | None = None,
    callbacks: Sequence[Callback] = (),
) -> ResultPage:
    """Train a built run; return what `result.json` holds. engine: the experiment's, or of this process's part
    in it. Raises as `run.train.train_run`."""
    engine = engine or experiment.engine
    experiment.recipe.open(experiment.data.path, verified=True)
    devices = _begin(run, experiment, engine)
    done = newest_checkpoint(run) if engine.leads else None
    trained = build_trained(experiment, engine, devices, done)
    saver = engine.writer(run.checkpoints, trained, *experiment.encoder)
    load = starting_point(done, experiment, trained, saver) if engine.leads else None
    states = engine.read(trained, load) or {}
    engine.obey(stop, f"after step {trained.progress.step}; it goes on with --resume")
    record = attached(run, experiment.settings) if engine.leads else Tracker()
    with closing(record) as tracker, Display() as display:
        session = make_session(run, experiment, engine, devices, trained, saver, tracker, stop, callbacks)
        meter = Meter(session)
        session.stateful["meter"] = meter
        # The meter is one of those that go on: it has to be there.
        session.restore(states)
        if line := announcement(devices):
            if not states:
                session.splits.note([line])
            display.line(line)
        if done:
            keep_checkpoints(session, trained.progress)  # the process before may have ended in between
        averages, started = Averages(), datetime.fromisoformat(run.page.created).timestamp()
        try:
            with system_metrics(tracker, started, devices.gpu_uuids, averages), saver:
                train(session, display, meter)
        finally:
            result = result_of(session, meter, averages.means)
            if engine.leads:
                keep_outcome(run, session, result)
    stop.obey("after its last step; it goes on with --resume")
    return result


def _begin(run: Run, experiment: Experiment, engine: Engine) -> Devices:
    """Set the process up for training; return its devices."""
    settings = experiment.settings
    if settings.threads:
        torch.set_num_threads(settings.threads)
    keep_freed_memory()
    devices = engine.devices(run.page.devices)
    start_on(devices)
    return devices
