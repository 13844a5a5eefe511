"""The training loop: `train` over epochs, `train_step` over one batch, `evaluate` over held-out rows."""

import gc
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dphybrid.config import ExperimentConfig, TrainConfig
from dphybrid.data import Dataset, batches, num_batches
from dphybrid.embedding import DeclaresIds, RowPipeline, clip_grad_norm_, find_tables
from dphybrid.parallel import refuse_split_differences
from dphybrid.tracking import Tracker
from dphybrid.training.checkpoint import Trained, save_checkpoint
from dphybrid.training.clock import NOT_A_STEP, StageClock, StepTimes, timed_parts
from dphybrid.training.display import Display
from dphybrid.training.memory import PARTS, micro_batches, out_of_memory_report, scale_gradients
from dphybrid.training.metrics import Task
from dphybrid.training.profiling import profiled_steps
from dphybrid.training.retention import best_steps, checkpoint_cards, prune_checkpoints
from dphybrid.training.split_log import SplitLog
from dphybrid.util.errors import UserError
from dphybrid.util.memory import page_faults
from dphybrid.util.stop import StopRequest


@dataclass(frozen=True)
class Session:
    """Everything one training run works with.

    facts: what else goes into each checkpoint's page. dataset: name and digest of the data. profile_steps: steps to record in detail.
    encoder: folder that goes into each checkpoint, so that it can predict; encoder_sums: sha256 of its files, by `encoder/NAME`.
    """

    config: ExperimentConfig
    trained: Trained
    train_data: Dataset
    valid_data: Dataset
    task: Task
    tracker: Tracker
    clock: StageClock
    splits: SplitLog
    stop: StopRequest
    checkpoints: Path
    facts: Mapping[str, Any]
    dataset: tuple[str, str]
    profile_steps: range = range(0)
    encoder: Path | None = None
    encoder_sums: Mapping[str, str] = field(default_factory=dict)


def train(session: Session, display: Display, meter: "Meter") -> None:
    """Train from where `session.trained.progress` stands to the last epoch, or until no epoch gets better.

    meter: gets the speeds and sums, also of a training that is interrupted.

    Raises Interrupted when asked to stop: the step in hand is finished and a checkpoint written first.
    """
    config, progress, clock = session.config.train, session.trained.progress, session.clock
    steps_per_epoch = num_batches(session.train_data, config.batch_size)
    model, tables = session.trained.model, find_tables(session.trained.model)
    ids_of = model.table_ids if isinstance(model, DeclaresIds) else None
    if config.check_split and progress.step == 0:
        refuse_split_differences(model, next(batches_of_epoch(session)))
    with (
        timed_parts(clock, model),
        profiled_steps(session.profile_steps, session.checkpoints.parent, session.tracker) as profiler,
        RowPipeline(tables, mode=config.pipeline) as pipeline,
        clock.stage("other"),
    ):
        meter.rows = pipeline if tables else None
        while progress.epoch < config.epochs and not _stale(session):
            session.trained.model.train()  # the last epoch's evaluation left it in the other mode
            display.epoch(progress.epoch, config.epochs, steps_per_epoch, progress.batch)
            meter.times.begin()
            for batch in _timed(clock, pipeline.prefetch(batches_of_epoch(session), ids_of)):
                if session.profile_steps:
                    with clock.stage("profile"):
                        profiler.before(progress.step + 1)
                _set_learning_rates(session, progress.step / max(1, config.epochs * steps_per_epoch))
                loss, weight = train_step(session, batch)
                with clock.stage("log"):
                    meter.add(loss, weight)
                meter.times.end(full=_rows(batch) == config.batch_size)
                progress.step += 1
                if session.profile_steps:
                    with clock.stage("profile"):
                        profiler.after(progress.step)
                progress.batch += 1
                with clock.stage("log"):
                    for line in session.splits.after_step(progress.step):
                        display.line(line)
                    display.advance(meter.note)
                if progress.step % config.log_every == 0:
                    display.line(meter.log())
                every = session.config.checkpoint.every_steps
                if every and progress.step % every == 0 and progress.batch < steps_per_epoch:
                    meter.settle()
                    checkpoint(session, meter)
                if session.stop.pending:
                    meter.settle()
                    path = checkpoint(session, meter)
                    raise session.stop.interruption(f"after step {progress.step}; {path} goes on with --resume")
                meter.times.begin()
            display.line(end_of_epoch(session, meter))
            checkpoint(session, meter)
    if _stale(session) and progress.epoch < config.epochs:
        display.line(f"stopped early: no better {session.task.metric} for {progress.stale_epochs} epochs")


def train_step(session: Session, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Take one optimizer step; return the batch's summed loss and its number of terms, still on their device.

    A batch that does not fit into a GPU's memory is computed once more in parts, and so are all after it. Raises UserError when that
    does not fit either.
    """
    trained, clock, config = session.trained, session.clock, session.config.train
    did_not_fit = ""
    try:
        loss, weight = _gradients(session, batch)
    except torch.OutOfMemoryError as error:
        did_not_fit = out_of_memory_report(error, trained.progress.step + 1, _rows(batch), trained.model, trained.dense)
    if did_not_fit:  # outside the handler: its traceback keeps the activations alive
        if trained.progress.micro_batches > 1:
            raise UserError(
                f"{did_not_fit}\nand that in {trained.progress.micro_batches} parts already; lower train.batch_size or the model's sizes"
            )
        trained.progress.micro_batches = PARTS
        told = f"{did_not_fit}\ngoing on with each batch in {PARTS} parts, their gradients summed: the same steps"
        session.splits.note([told])
        print(told, flush=True)
        session.tracker.set_tags({"dphybrid.out_of_memory": did_not_fit, "dphybrid.micro_batches": str(PARTS)})
        gc.collect()
        torch.cuda.empty_cache()
        return train_step(session, batch)
    if config.clip_norm > 0:
        with clock.stage("clip"):
            clip_grad_norm_(trained.model.parameters(), find_tables(trained.model), config.clip_norm)
    with clock.stage("dense_update"):
        if trained.dense is not None:
            trained.dense.step()
    with clock.stage("row_update"):
        if trained.rows is not None:
            trained.rows.step()
    return loss.detach(), weight.detach()


def _gradients(session: Session, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Compute the gradients of the mean loss, in parts where `micro_batches` says so; return the summed loss and the number of terms."""
    trained, clock = session.trained, session.clock
    with clock.stage("zero_grad"):
        if trained.dense is not None:
            trained.dense.zero_grad(set_to_none=True)
        if trained.rows is not None:
            trained.rows.zero_grad()
    count = trained.progress.micro_batches
    sums: list[tuple[Tensor, Tensor]] = []
    for part in micro_batches(batch, count) if count > 1 else [batch]:
        with clock.stage("forward"):
            outputs = trained.model(part)
        with clock.stage("loss"):
            loss, weight = outputs["loss"].sum(), outputs["weight"].sum()
            goal = loss / weight if count == 1 else loss
        with clock.stage("backward"):
            goal.backward()
        sums.append((loss.detach(), weight.detach()))
    if count == 1:
        return sums[0]
    loss, weight = (torch.stack(values).sum() for values in zip(*sums, strict=True))
    with clock.stage("backward"):
        scale_gradients(trained.model, find_tables(trained.model), 1 / weight)
    return loss, weight


def evaluate(model: nn.Module, data: Dataset, batch_size: int, task: Task) -> dict[str, float]:
    """Return the task's metrics over all rows of `data`."""
    return task.compute(held_out_outputs(model, data, batch_size, task))


@torch.no_grad()
def held_out_outputs(model: nn.Module, data: Dataset, batch_size: int, task: Task) -> dict[str, Tensor]:
    """Return what metrics are computed from, on the CPU: a row each of losses, weights, logits, labels, ... for a row of `data`."""
    model.eval()
    wanted = ("loss", "weight", *task.reads)
    collected: dict[str, list[Tensor]] = {}
    for batch in batches(data, batch_size, seed=0, epoch=0, shuffle=False):
        outputs = model(batch)
        kept = {name: value for name, value in {**batch, **outputs}.items() if name in wanted}
        for name, value in kept.items():
            collected.setdefault(name, []).append(value.detach().cpu())
    return {name: torch.cat(parts) for name, parts in collected.items()}


def end_of_epoch(session: Session, meter: "Meter") -> str:
    """Evaluate, log, and move the progress to the next epoch; return the line that tells it."""
    progress, task = session.trained.progress, session.task
    meter.settle()
    with session.clock.stage("evaluate"):
        metrics = evaluate(session.trained.model, session.valid_data, session.config.train.batch_size, task)
    train_loss = progress.epoch_loss / max(progress.epoch_weight, 1e-12)
    progress.metrics = metrics
    better = task.better(metrics[task.metric], progress.best_value)
    if better:
        progress.best_value, progress.best_step, progress.stale_epochs = metrics[task.metric], progress.step, 0
    else:
        progress.stale_epochs += 1
    progress.history.append(
        {"step": progress.step, "train loss": train_loss, **{f"held-out {name}": value for name, value in metrics.items()}}
    )
    progress.epoch, progress.batch, progress.epoch_loss, progress.epoch_weight = progress.epoch + 1, 0, 0.0, 0.0
    with session.clock.stage("log"):
        logged = {f"valid/{name}": value for name, value in metrics.items()}
        session.tracker.log_metrics(logged | {"train/epoch_loss": train_loss}, progress.step)
    shown = ", ".join(f"{name} {value:.5g}" for name, value in metrics.items())
    mark = " (best so far)" if better else ""
    return f"epoch {progress.epoch}/{session.config.train.epochs}: train loss {train_loss:.5g}, held out: {shown}{mark}"


def checkpoint(session: Session, meter: "Meter") -> Path:
    """Write a checkpoint of this moment and remove the ones no longer kept."""
    with session.clock.stage("checkpoint"):
        trained = session.trained
        record = {"splits": session.splits.state(), "clock": session.clock.state(), "meter": meter.state()}
        path = save_checkpoint(
            session.checkpoints,
            trained,
            session.config.model_dump(mode="json"),
            session.facts,
            session.encoder,
            session.encoder_sums,
            record,
        )
    keep_checkpoints(session)
    return path


def keep_checkpoints(session: Session) -> None:
    """Remove the checkpoints that are no longer kept, and tell the record which ones are."""
    with session.clock.stage("checkpoint"):
        config, progress = session.config.checkpoint, session.trained.progress
        kept = prune_checkpoints(session.checkpoints, config, best_steps(progress, session.task, config.keep_best))
    with session.clock.stage("log"):
        cards = checkpoint_cards(kept, session.config.recipe, progress.best_step)
        session.tracker.log_checkpoints(cards, session.dataset)


class Meter:
    """Loss and speed since the last line of metrics. Sums stay on their device until a line needs them."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._sums: tuple[Tensor, Tensor] | None = None
        self._loss, self._weight = 0.0, 0.0
        self._steps = 0
        self.rows: RowPipeline | None = None
        self.times = StepTimes()
        self.note = ""
        self._faults = page_faults()

    def add(self, loss: Tensor, weight: Tensor) -> None:
        self._sums = (loss.double(), weight.double()) if self._sums is None else (self._sums[0] + loss, self._sums[1] + weight)
        self._steps += 1

    def settle(self) -> None:
        """Move what is summed up into the progress. Raises UserError when the loss is no number any more."""
        if self._sums is None:
            return
        loss, weight = (float(value) for value in self._sums)
        self._sums = None
        if not math.isfinite(loss):
            raise UserError(
                f"the training loss became {loss} by step {self._session.trained.progress.step}; "
                "lower train.lr or table.lr, or set train.clip_norm; the last checkpoint is kept"
            )
        self._loss += loss
        self._weight += weight
        progress = self._session.trained.progress
        progress.epoch_loss += loss
        progress.epoch_weight += weight

    def state(self) -> dict[str, float]:
        """Return what `restore` takes, fit for JSON; after `settle`."""
        return {"loss": self._loss, "weight": self._weight, "steps": self._steps, "timed": self.times.count}

    def restore(self, state: Mapping[str, float]) -> None:
        """Go on within the window of metrics in which a checkpoint was made."""
        self._loss, self._weight = state["loss"], state["weight"]
        self._steps, self.times.count = int(state["steps"]), int(state["timed"])

    def log(self) -> str:
        """Log the metrics since the last call and return them as a line."""
        self.settle()
        session, step = self._session, self._session.trained.progress.step
        with session.clock.stage("log"):
            window = session.clock.window()
            seconds = sum(total for stage, total in window.items() if stage not in NOT_A_STEP) / self._steps
            loss = self._loss / max(self._weight, 1e-12)
            metrics = {
                "train/loss": loss,
                "train/lr": session.trained.dense.param_groups[0]["lr"] if session.trained.dense else 0.0,
                "perf/step_ms": 1e3 * seconds,
                "perf/samples_per_s": session.config.train.batch_size / seconds,
                "system/page_faults_per_step": (page_faults() - self._faults) / self._steps,
            }
            self._faults = page_faults()
            metrics |= {f"perf/step_ms_{name}": value for name, value in self.times.window().items()}
            metrics |= {f"timing/{stage}_ms": 1e3 * total / self._steps for stage, total in window.items()}
            if self.rows is not None:
                metrics |= {f"embedding/{name}": value for name, value in self.rows.counters(self._steps).items()}
            session.tracker.log_metrics(metrics, step)
        self.note = f"loss {loss:.4g}"
        self._loss, self._weight, self._steps = 0.0, 0.0, 0
        epoch = session.trained.progress.epoch + 1
        speed = f"{metrics['perf/step_ms']:.1f} ms a step, {metrics['perf/samples_per_s']:.0f} samples/s"
        return f"epoch {epoch} step {step}: train loss {loss:.5g}, {speed}"


def batches_of_epoch(session: Session) -> Iterator[dict[str, Tensor]]:
    """The batches of the current epoch from the progress's next batch on; their order is a function of (seed, epoch)."""
    progress, config = session.trained.progress, session.config.train
    return batches(
        session.train_data,
        config.batch_size,
        seed=config.seed,
        epoch=progress.epoch,
        shuffle=True,
        start_batch=progress.batch,
        shuffle_rows=config.shuffle_rows,
    )


def learning_rate_factor(schedule: str, done: float) -> float:
    """Return the factor on the learning rates when the share `done` (0..1) of all steps is behind us."""
    floor = 0.01
    if schedule == "cosine":
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
    if schedule == "linear":
        return 1 - (1 - floor) * min(done, 1.0)
    return 1.0


def make_dense_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer | None:
    """Return the optimizer of the dense blocks, or None for a model without dense parameters. One group a device type."""
    by_type: dict[str, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            by_type.setdefault(parameter.device.type, []).append(parameter)
    if not by_type:
        return None
    # A group that mixes devices loses torch's multi-tensor path for all of them. On the CPU one pass over memory saves a sixth of a small step.
    fused = {"cpu": {"fused": True}} if config.optimizer in ("adam", "adamw") else {}
    groups = [{"params": parameters, **fused.get(kind, {})} for kind, parameters in by_type.items()]
    kinds: dict[str, Any] = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    optimizer: torch.optim.Optimizer = kinds[config.optimizer](groups, lr=config.lr, weight_decay=config.weight_decay)
    return optimizer


def _set_learning_rates(session: Session, done: float) -> None:
    factor = learning_rate_factor(session.config.train.schedule, done)
    if session.trained.dense is not None:
        for group in session.trained.dense.param_groups:
            group["lr"] = session.config.train.lr * factor
    if session.trained.rows is not None:
        session.trained.rows.lr = session.config.table.lr * factor


def _rows(batch: Mapping[str, Tensor]) -> int:
    return len(next(iter(batch.values())))


def _stale(session: Session) -> bool:
    patience = session.config.train.patience
    return patience > 0 and session.trained.progress.stale_epochs >= patience


def _timed(clock: StageClock, iterator: Iterator[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    while True:
        with clock.stage("data"):
            batch = next(iterator, None)
        if batch is None:
            return
        yield batch
