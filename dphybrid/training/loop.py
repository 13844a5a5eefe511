"""The training loop: `train` runs the epochs, `validation_outputs` the validation rows."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn

from dphybrid.config import TrainConfig
from dphybrid.data import Dataset, batches, num_batches
from dphybrid.embedding import RowPipeline
from dphybrid.parallel import check_split, find_data_parallel
from dphybrid.training.callbacks import EpochEnd, run_callbacks
from dphybrid.training.checkpoint import VALIDATION, Progress
from dphybrid.training.engine import Session
from dphybrid.training.metrics import Task
from dphybrid.training.observing import Observer
from dphybrid.training.optimizers import averaged, learning_rate_factor
from dphybrid.training.parts import ids_of_parts
from dphybrid.training.results import SavingCost
from dphybrid.training.saving import best_steps, checkpoint_cards, prune_checkpoints
from dphybrid.training.step import Step
from dphybrid.util.errors import UserError, counted
from dphybrid.util.stages import stage, timed
from dphybrid.util.text import metric_text


def train(session: Session, observer: Observer) -> None:
    """Train from `session.trained.progress` to the last epoch, or until early stopping.

    observer: called for each epoch and step; its speeds and sums can be read after an interruption, too.

    Raises Interrupted when asked to stop, after finishing the current step and writing a checkpoint.
    """
    config, progress, model = session.config.train, session.trained.progress, session.trained.model
    engine, every = session.engine, session.config.checkpoint.every_steps
    steps_per_epoch = _steps_of_epoch(session)
    ids_of = ids_of_parts(model, config.accumulate)
    step, take = Step(session), engine.take(session.take)
    if config.check_split and progress.step == 0:  # a resumed run was checked when it started
        _check_split(session, observer)
    with (
        torch.inference_mode(False),
        torch.enable_grad(),  # whatever the caller has set
        numerics(config),
        observer.running(),
        RowPipeline(model, mode=config.pipeline, on_cpu=engine.prefetches_on_cpu) as pipeline,
    ):
        observer.pipeline = pipeline
        while progress.epoch < config.epochs and not _stale(session):
            model.train()  # the evaluation of the last epoch left it in eval mode
            observer.epoch_begins(steps_per_epoch)
            for batch in observer.batches(pipeline.prefetch(_batches_of_epoch(session), ids_of)):
                _set_learning_rates(session, progress.step / max(1, config.epochs * steps_per_epoch))
                with stage("forward"):  # `Step.update` times what is not, as inner stages
                    loss, weight = take(step, batch)
                progress.step, progress.batch = progress.step + 1, progress.batch + 1
                observer.step_ended(loss, weight, engine.num_rows(batch, model))
                # The writing thread may have failed: stop now, not after hours without a checkpoint.
                session.saver.check()
                if engine.asked(session.stop):
                    path = checkpoint(session, observer)
                    session.saver.wait()
                    raise session.stop.interruption(
                        f"after step {progress.step}; --resume continues from {path}"
                    )
                # After the epoch's last batch the checkpoint is written below, with the evaluation's metrics.
                if every and progress.step % every == 0 and progress.batch < steps_per_epoch:
                    checkpoint(session, observer)
            observer.line(end_of_epoch(session, observer))
            checkpoint(session, observer)
            if session.callbacks:  # which may change the model
                session.saver.wait()
            if reason := _run_callbacks(session):
                observer.line(f"stopped early: {reason}")
                break
        with stage("checkpoint"):
            session.saver.wait()
    if _stale(session) and progress.epoch < config.epochs:
        metric = session.task.chosen_by or session.task.metric
        observer.line(f"stopped early: no better {metric} for {counted(progress.stale_epochs, 'epoch')}")


def _check_split(session: Session, observer: Observer) -> None:
    """Compare the first batch unsplit and split over several devices; print the result. Raises UserError for
    a module that computes something else when it is split."""
    model, float32 = session.trained.model, session.config.train.model_copy(update={"precision": "float32"})
    blocks = find_data_parallel(model).values()
    if all(len(block.devices) == 1 for block in blocks):
        return
    try:
        with numerics(float32):
            comparison = check_split(model, next(_batches_of_epoch(session)))
    except UserError as error:
        raise UserError(f"{error}\ntrain.check_split=false trains it nevertheless") from error
    observer.line(f"train.check_split: {comparison}")


@torch.no_grad()
def validation_outputs(
    model: nn.Module, data: Dataset, batch_size: int, task: Task, part: tuple[int, int] = (0, 1)
) -> dict[str, Tensor]:
    """Return losses, weights and what else the task reads (logits, labels, ...), on the CPU: one row for each
    row of `data`, or of this process's part of each batch. Raises UserError for an output that is missing,
    and for a loss that is not a number."""
    model.eval()
    wanted = ("loss", "weight", *task.reads)
    collected: dict[str, list[Tensor]] = {}
    for batch in batches(data, batch_size, seed=0, epoch=0, shuffle=False, part=part):
        outputs = model(batch)
        kept = {name: value for name, value in {**batch, **outputs}.items() if name in wanted}
        for name, value in kept.items():
            collected.setdefault(name, []).append(value.detach().cpu())
    outputs = {name: torch.cat(parts) for name, parts in collected.items()}
    if missing := [name for name in wanted if name not in outputs]:
        raise UserError(
            f"the task reads {missing[0]!r}, which neither batches nor outputs have; return it from forward, "
            "or correct the task"
        )
    if bool((wrong := outputs["loss"].isnan()).any()):
        raise UserError(
            f"evaluation: the loss of sample {int(wrong.nonzero()[0][0])} is nan; look at that sample, or "
            "lower train.lr or table.lr and continue from an earlier checkpoint with --resume"
        )
    return outputs


def end_of_epoch(session: Session, observer: Observer) -> str:
    """Evaluate, log, and move the progress to the next epoch; return the epoch's line of output."""
    progress, task = session.trained.progress, session.task
    observer.settle()
    with stage("evaluate"), timed(None), averaged(session.trained.dense):
        batch_size, model, rows = session.config.train.batch_size, session.trained.model, session.valid_data
        outputs = validation_outputs(model, rows, batch_size, task, session.engine.part)
        metrics = session.engine.metrics(outputs, len(rows), batch_size, task)
    train_loss = progress.epoch_loss / max(progress.epoch_weight, 1e-12)
    progress.metrics = metrics
    validation = {f"{VALIDATION}{name}": value for name, value in metrics.items()}
    progress.history.append({"step": progress.step, "train loss": train_loss, **validation})
    # With equal values the earlier epoch stays the best one.
    better = best_steps(progress, task, 1) == [progress.step]
    if better:
        progress.best_value = metrics[task.metric]
        progress.best_step = progress.step
        session.best_outputs.clear()
        session.best_outputs.update(outputs)
    progress.stale_epochs = 0 if better else progress.stale_epochs + 1
    progress.epoch, progress.batch = progress.epoch + 1, 0
    progress.epoch_loss = progress.epoch_weight = 0.0
    with stage("log"):
        logged = {f"valid/{name}": value for name, value in metrics.items()}
        session.tracker.log_metrics(logged | {"train/epoch_loss": train_loss}, progress.step)
    shown = ", ".join(f"{name} {metric_text(value)}" for name, value in metrics.items())
    return (
        f"epoch {progress.epoch}/{session.config.train.epochs}: train loss {metric_text(train_loss)}, "
        f"validation {shown}{' (best)' if better else ''}"
    )


def _run_callbacks(session: Session) -> str:
    """Call the user's callbacks and log their numbers; return the reason if one asked to stop, else ""."""
    if not session.callbacks:
        return ""
    progress = session.trained.progress
    ended = EpochEnd(
        run=session.checkpoints.parent.name,
        epoch=progress.epoch,
        epochs=session.config.train.epochs,
        step=progress.step,
        train_loss=progress.history[-1]["train loss"],
        metrics=dict(progress.metrics),
        best=progress.best_step == progress.step,
        model=session.trained.model,
    )
    # With the averaged weights: callbacks see the model that was evaluated.
    with stage("callbacks"), timed(None), averaged(session.trained.dense):
        numbers = run_callbacks(session.callbacks, ended)
    if numbers:
        session.tracker.log_metrics(numbers, progress.step)
    return ended.stopped


def checkpoint(session: Session, observer: Observer) -> Path:
    """Start writing a checkpoint of the current state; once it is complete, old checkpoints are removed."""
    observer.settle()
    # A copy: `then` runs in the writing thread, when training has already continued.
    progress = copy.deepcopy(session.trained.progress)

    def then(cost: SavingCost) -> None:
        costs = {
            "system/checkpoint_stall_s": cost.stall_s,
            "system/checkpoint_write_s": cost.write_s,
            "system/checkpoint_mib": cost.written_bytes / 2**20,
        }
        session.tracker.log_metrics(costs, progress.step)
        keep_checkpoints(session, progress)

    with stage("checkpoint"):
        values = session.config.model_dump(mode="json")
        return session.saver.save(values, session.facts, session.stateful, then, session.tracker.keep)


def keep_checkpoints(session: Session, progress: Progress) -> list[Path]:
    """Remove the checkpoints that are no longer kept at this progress; return the others, oldest first. Those
    that the run's results name stay until `log_kept` has other results."""
    config = session.config.checkpoint
    best = best_steps(progress, session.task, config.keep_best)
    return prune_checkpoints(session.checkpoints, config, best, session.named)


def log_kept(session: Session) -> None:
    """At the end of a training, whose results are written: remove the checkpoints that are no longer kept,
    and log the others as models. Before, each epoch would log a model and soon delete it again."""
    progress = session.trained.progress
    session.named.clear()
    cards = checkpoint_cards(keep_checkpoints(session, progress), session.config.recipe, progress.best_step)
    session.tracker.log_checkpoints(cards)


def _batches_of_epoch(session: Session) -> Iterator[dict[str, Tensor]]:
    """Return the remaining batches of the current epoch. Their order is a function of (seed, epoch), so a
    resumed run continues with the same ones."""
    progress, config = session.trained.progress, session.config.train
    remaining = batches(
        session.train_data,
        config.batch_size,
        seed=config.seed,
        epoch=progress.epoch,
        shuffle=True,
        start_batch=progress.batch,
        shuffle_rows=config.shuffle_rows,
        part=session.engine.part,
    )
    return islice(remaining, _steps_of_epoch(session) - progress.batch)


def _steps_of_epoch(session: Session) -> int:
    """Return the number of steps of an epoch."""
    config = session.config.train
    count = num_batches(session.train_data, config.batch_size)
    return min(count, config.limit_batches) if config.limit_batches else count


def _set_learning_rates(session: Session, done: float) -> None:
    """Set the scheduled learning rates of blocks and rows. done: share of all steps already taken, 0..1."""
    train = session.config.train
    factor = learning_rate_factor(train.schedule, done, train.warm_up_share)
    if session.trained.dense is not None:
        groups = session.trained.dense.param_groups
        for group, rate in zip(groups, session.trained.rates, strict=True):
            group["lr"] = rate * factor
    if session.trained.rows is not None:
        for group in session.trained.rows.param_groups:
            group["lr"] = session.config.table.lr * factor


def _stale(session: Session) -> bool:
    patience = session.config.train.patience
    return patience > 0 and session.trained.progress.stale_epochs >= patience


@contextmanager
def numerics(config: TrainConfig) -> Iterator[None]:
    """While the block runs, allow TF32 or not, as `train.precision` says, and with `train.deterministic` have
    torch refuse operations without a deterministic implementation."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    strict = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    # Both are set explicitly, because torch lets cuDNN use TF32 by default.
    matmul.allow_tf32 = cudnn.allow_tf32 = config.precision == "tf32"
    if config.deterministic:
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before
        if config.deterministic:  # else no call: it imports all of torch.compile, 2 CPU seconds
            torch.use_deterministic_algorithms(strict, warn_only=warns)
