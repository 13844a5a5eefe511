"""Trains a run in this process: builds the model and its optimizers, loads the checkpoint, makes the session,
trains, and writes the results, `result.json`."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dphybrid.data import Prepared
from dphybrid.data.table.encoder import Encoder, old_rows, open_base
from dphybrid.embedding import find_tables, row_optimizer
from dphybrid.embedding.weights import all_rows
from dphybrid.parallel import Devices, start_on
from dphybrid.run.experiment import Experiment
from dphybrid.run.folder import Run, attached
from dphybrid.run.pages import ResultPage
from dphybrid.tracking import Tracker
from dphybrid.training.callbacks import Callback, find_callbacks
from dphybrid.training.checkpoint import (
    Progress,
    Trained,
    complete_checkpoints,
    load_checkpoint,
    load_weights,
    newest_whole_checkpoint,
    step_of,
    verify_checkpoint,
)
from dphybrid.training.clock import StageClock
from dphybrid.training.display import Display
from dphybrid.training.engine import Session
from dphybrid.training.loop import keep_checkpoints, log_kept, train
from dphybrid.training.observing import Observer
from dphybrid.training.optimizers import combined, keep_average
from dphybrid.training.saving import CheckpointWriter, best_checkpoint
from dphybrid.training.split_log import SplitLog
from dphybrid.training.tensor_file import read_table, table_file, tensor_shapes
from dphybrid.util.errors import UserError
from dphybrid.util.files import clear_leftovers, given_path, make_folder, write_text
from dphybrid.util.memory import keep_freed_memory
from dphybrid.util.stop import StopRequest


def build_trained(experiment: Experiment) -> Trained:
    """Build the model and its optimizers in this process; find the checkpoint that will fill them. Raises
    UserError when they do not fit into memory."""
    config, engine, built = experiment.config, experiment.engine, experiment.built
    devices = _set_up_process(experiment)
    if experiment.found and engine.leads:
        built.checkpoint = _newest_checkpoint(experiment.found)
    # Rows that a checkpoint will fill need no initial values, which take long to draw for a large table.
    filled = bool(built.checkpoint or config.train.warm_start)
    with engine.new_tables(filled):
        model = experiment.build(devices, None if filled else experiment.data.dataset("train"))
    engine.place(model)
    tables, table = find_tables(model), config.table
    decay = table.weight_decay
    rows = row_optimizer(table.optimizer, tables, lr=table.lr, weight_decay=decay) if tables else None
    blocks = experiment.recipe.optimizers(model, config)
    dense = combined(blocks, model, f"recipe {experiment.recipe.name}")
    built.trained = Trained(model, dense, rows, Progress(), blocks)
    for optimizer in blocks.values() if config.train.average else ():
        keep_average(optimizer, config.train.average)
    return built.trained


def _set_up_process(experiment: Experiment) -> Devices:
    """Set the process up for training; return its devices."""
    if threads := experiment.settings.threads:
        torch.set_num_threads(threads)
    keep_freed_memory()
    devices = experiment.engine.devices(experiment.devices)
    start_on(devices)
    return devices


def _newest_checkpoint(run: Run) -> Path | None:
    """Return the checkpoint to resume from, None for a new run; see `newest_whole_checkpoint`."""
    # Remove the partial files of a killed process. This process holds the run's lock, so nobody writes them.
    for folder in (run.folder, run.checkpoints):
        clear_leftovers(folder)
    return newest_whole_checkpoint(run.checkpoints)


def train_here(experiment: Experiment, stop: StopRequest, callbacks: Sequence[Callback] = ()) -> ResultPage:
    """Train a built run; return the page `result.json`. Raises as `run.job.train_run` does."""
    run, engine, config, data = experiment.run, experiment.engine, experiment.config, experiment.data
    recipe, built, before = experiment.recipe, experiment.built, ResultPage.before(experiment.run.folder)
    # Compare each file with its checksum: data damaged on disk since preparation would train another model.
    if data.reused:  # else this process has just written the files with their checksums
        recipe.open(data.path, verified=True)
    devices = _set_up_process(experiment)
    make_folder(run.checkpoints)
    trained = built.trained or build_trained(experiment)  # a rank has not built it yet
    done, built.trained = built.checkpoint, None
    # Otherwise dropout masks would depend on how many initial values were drawn.
    torch.manual_seed(config.train.seed)
    saver = engine.writer(run.checkpoints, trained, *experiment.encoder)
    # One process reads the checkpoint, and the engine passes the states on to the others.
    fills = engine.leads and (done or config.train.warm_start)
    states = engine.read(trained, partial(_fill, trained, experiment, saver, done) if fills else None) or {}
    engine.obey(stop, f"after step {trained.progress.step}; --resume continues it")
    # Only one process of a run records; the others get the base Tracker, which discards everything.
    record = attached(run) if engine.leads else Tracker()
    each = config.train.print_splits == "each"
    named = (before.checkpoint, before.best_checkpoint) if before else ()
    with closing(record) as tracker, Display() as display:
        session = Session(
            config=config,
            trained=trained,
            train_data=recipe.training_rows(data.dataset("train"), data.info, config.model),
            valid_data=data.dataset("valid"),
            task=experiment.task,
            tracker=tracker,
            clock=StageClock.of(devices.home),
            splits=SplitLog(trained.model, each, engine.split, short=not recipe.prints_shapes),
            stop=stop,
            checkpoints=run.checkpoints,
            facts={
                "data_digest": data.digest,
                "prepared": os.path.relpath(data.path, experiment.settings.data_dir),
                "devices": devices.text,
                "recipe": config.recipe,
                "info": data.info,
            },
            saver=saver,
            engine=engine,
            take=recipe.step,
            callbacks=[*callbacks, *find_callbacks(config.train.callbacks)],
            # Checkpoints that the results of an earlier process name stay.
            named={step_of(Path(path)) for path in named if path},
        )
        # Before `restore`, because the observer's window of metrics is one of the restored states.
        session.stateful["meter"] = seen = Observer(session, display, devices.gpu_uuids)
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
        try:
            with saver, _threads(experiment, devices):
                train(session, seen)
        finally:
            # Also after an interruption: the page then names the checkpoint to resume from.
            result = _result_of(session, seen)
            if engine.leads:
                _keep_outcome(run, tracker, result)
                log_kept(session)
    built.model = trained.model
    if result.best_checkpoint and step_of(Path(result.best_checkpoint)) == trained.progress.best_step:
        built.outputs = session.best_outputs
    stop.obey("after its last step; --resume continues it")
    return result


def _fill(
    trained: Trained, experiment: Experiment, saver: CheckpointWriter, done: Path | None
) -> Mapping[str, Any]:
    """Fill `trained` from the checkpoint `done`, or else from train.warm_start; return the saved states, by
    name, with which training continues."""
    if done is None:
        checkpoint = experiment.config.train.warm_start
        warm_start(given_path(str(checkpoint), "train.warm_start"), trained.model, experiment.data)
        print(f"Starting from the weights of {checkpoint}", flush=True)
        return {}
    page = load_checkpoint(done, trained)
    saver.resumed(done, page)
    progress = trained.progress
    print(f"Resuming from {done}: step {progress.step}, epoch {progress.epoch + 1}", flush=True)
    return page.record


def warm_start(checkpoint: Path, model: nn.Module, data: Prepared) -> None:
    """Fill `model` with a checkpoint's weights: on every row of `data` it then predicts what the checkpoint's
    own model predicts.

    If the data has a data.base, the checkpoint must have been trained on that base. Values known there keep
    their rows. A new value gets a copy of the row that the checkpoint used for it: the unknown row or a hash
    bucket. Optimizers start from scratch. Raises UserError when model and checkpoint do not fit.
    """
    trained_on, base = verify_checkpoint(checkpoint).data_digest, data.manifest.base
    if base is None:
        load_weights(checkpoint, model)
        return
    earlier, encoder = open_base(Path(base))
    if trained_on != earlier.digest:
        raise UserError(
            f"train.warm_start={checkpoint}: was trained on data {trained_on[:12]}, but data.base is "
            f"{earlier.path.name}; give the checkpoint's data as data.base"
        )
    fill_from(checkpoint, encoder, model, Encoder.load(data.path / "encoder"))


def fill_from(checkpoint: Path, trained_on: Encoder, model: nn.Module, now: Encoder) -> None:
    """Fill `model`, which reads rows that `now` encodes, with the weights of a checkpoint that was trained on
    rows that `trained_on` encoded. Raises UserError when they do not fit."""
    sources_V = torch.from_numpy(old_rows(trained_on, now))
    tables = find_tables(model)
    load_weights(checkpoint, model, skip=tables)
    for name, table in tables.items():
        shape, rows_VD = tensor_shapes(table_file(checkpoint, name))["weight"], all_rows(table.weight)
        fits = len(rows_VD) == len(sources_V) and shape[0] > int(sources_V.max())
        if not fits or shape[1] != rows_VD.shape[1]:
            raise UserError(
                f"{checkpoint}: table {name} is {shape} in the checkpoint and "
                f"{tuple(rows_VD.shape)} in this model, and the columns have {len(sources_V)} ids; only a "
                "table over all columns can grow, with the same width"
            )
        before = torch.empty(shape, dtype=rows_VD.dtype)
        read_table(checkpoint, name, "weight", before)
        # out: without it, memory would hold three copies of the table at once
        torch.index_select(before, 0, sources_V, out=rows_VD)


@contextmanager
def _threads(experiment: Experiment, devices: Devices) -> Iterator[None]:
    """While the block runs, blocks on the CPU compute with the recipe's number of threads, unless the
    settings give one."""
    before, wanted = torch.get_num_threads(), experiment.recipe.threads(experiment.config)
    if wanted and not experiment.settings.threads and devices.home.type == "cpu":
        torch.set_num_threads(min(before, wanted))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _result_of(session: Session, seen: Observer) -> ResultPage:
    """Return the results of a training; after an interruption, those so far."""
    progress, done = session.trained.progress, complete_checkpoints(session.checkpoints)
    best = best_checkpoint(done, progress, session.task)
    stages = sorted(session.clock.totals.items(), key=lambda item: -item[1])
    return ResultPage(
        checkpoint=str(done[-1]) if done else "",
        best_checkpoint=str(best or ""),
        steps=progress.step,
        devices=session.facts["devices"],
        history=progress.history,
        step_ms=seen.times.summary(),
        stages={name: round(seconds, 6) for name, seconds in stages},
        splits=session.splits.rows(),
        split_lines=session.splits.lines,
    )


def _keep_outcome(run: Run, tracker: Tracker, result: ResultPage) -> None:
    """Write the results; record which rows each replica received, as printed."""
    write_text(run.folder / "splits.txt", "\n".join(result.split_lines) + "\n")
    result.write(run.folder / "result.json")
    tracker.log_file("splits.txt")
