"""Observation of a training: printed lines of loss and speed, stage times and splits."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from dphybrid.embedding import RowPipeline
from dphybrid.tracking.system import SystemMetrics
from dphybrid.training.clock import NOT_A_STEP, StepTimes
from dphybrid.training.display import Display
from dphybrid.training.engine import Session
from dphybrid.util.memory import peak_gib
from dphybrid.util.stages import stage, timed
from dphybrid.util.text import metric_text


class Observer:
    """Keeps clock, losses, splits and display out of the training loop, which only reports what happens.
    Losses stay on their device until a line needs them."""

    def __init__(self, session: Session, display: Display, gpus: Sequence[str] = ()) -> None:
        """gpus: UUIDs of the GPUs whose load is logged."""
        self._session, self._display = session, display
        self._system = SystemMetrics(gpus)
        self._full = min(session.config.train.batch_size, len(session.train_data))
        self._added: list[tuple[Tensor, Tensor]] = []
        self._loss, self._weight = 0.0, 0.0
        self._steps = self._steps_before = 0  # since the last line; those of an earlier process
        self._note = ""
        self.pipeline: RowPipeline | None = None
        self.times = StepTimes()
        self.line = display.line

    @contextmanager
    def running(self) -> Iterator[None]:
        """Time the block and the model's parts in it."""
        with timed(self._session.clock), stage("other"):  # the outermost stage: what no inner one counts
            yield

    def epoch_begins(self, steps: int) -> None:
        progress = self._session.trained.progress
        self._display.epoch(progress.epoch, self._session.config.train.epochs, steps, progress.batch)

    def batches(self, source: Iterator[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
        """Yield the batches. The time to wait for a batch counts as part of its step."""
        while True:
            self.times.begin()
            with stage("data"):
                batch = next(source, None)
            if batch is None:
                return
            yield batch

    def step_ended(self, loss: Tensor, weight: Tensor, rows: int) -> None:
        """Count a step.

        Args:
            loss: Sum over the batch.
            weight: Number of its terms.
            rows: Rows of the batch.
        """
        session, step = self._session, self._session.trained.progress.step
        self.times.end(full=rows == self._full)
        with stage("log"):
            self._added.append((loss, weight))
            self._steps += 1
            # Reading a loss makes the host wait for the device, so losses are collected there first.
            if len(self._added) == 1024:
                self.settle()
            for line in session.splits.after_step(step, rows):
                self.line(line)
            self._display.advance(self._note)
        if step % session.config.train.log_every == 0:
            self._display.metrics_line(self.log())

    def settle(self) -> None:
        """Add the collected losses to the progress and to the sums of the current line."""
        if not self._added:
            return
        losses, weights = (torch.stack(values).tolist() for values in zip(*self._added, strict=True))
        self._added, loss, weight = [], sum(losses), sum(weights)
        self._loss, self._weight = self._loss + loss, self._weight + weight
        progress = self._session.trained.progress
        progress.epoch_loss += loss
        progress.epoch_weight += weight

    def state_dict(self) -> dict[str, float]:
        """Return the sums since the last line, fit for JSON. Call `settle` first."""
        return {"loss": self._loss, "weight": self._weight, "steps": self._steps}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue the window of metrics during which the checkpoint was written."""
        self._loss, self._weight = state["loss"], state["weight"]
        self._steps = self._steps_before = int(state["steps"])

    def log(self) -> str:
        """Log the metrics since the last call and return them as a line."""
        self.settle()
        session, step = self._session, self._session.trained.progress.step
        with stage("log"):
            window = session.clock.window()
            seconds = sum(total for stage, total in window.items() if stage not in NOT_A_STEP) / self._steps
            # Before the first full batch there is no median: use the mean over the short ones.
            step_ms = self.times.recent() or 1e3 * seconds
            metrics = {
                "train/lr": session.trained.dense.param_groups[0]["lr"] if session.trained.dense else 0.0,
                "perf/step_ms": step_ms,
                "perf/samples_per_s": 1e3 * self._full / step_ms,
            }
            metrics |= {f"perf/{name}_peak_gib": gib for name, gib in peak_gib().items()}
            if session.norms:
                metrics["train/grad_norm"] = sum(session.norms) / len(session.norms)
                session.norms.clear()
            loss = self._loss / self._weight if self._weight else None
            if loss is not None:
                metrics["train/loss"] = loss
            metrics |= {f"timing/{stage}_ms": 1e3 * total / self._steps for stage, total in window.items()}
            if self.pipeline is not None and self.pipeline.tables:
                # Unlike losses and stages, these counts start at 0 in each process.
                counters = self.pipeline.counters(self._steps - self._steps_before)
                metrics |= {f"embedding/{name}": value for name, value in counters.items()}
            metrics |= session.engine.measured()
            metrics |= self._system.sample()
            session.tracker.log_metrics(metrics, step)
        self._note = "no loss" if loss is None else f"loss {metric_text(loss)}"
        self._loss, self._weight, self._steps, self._steps_before = 0.0, 0.0, 0, 0
        epoch = session.trained.progress.epoch + 1
        speed = f"{metrics['perf/step_ms']:.1f} ms a step, {metrics['perf/samples_per_s']:.0f} samples/s"
        shown = "all steps skipped" if loss is None else f"train loss {metric_text(loss)}"
        return f"epoch {epoch} step {step}: {shown}, {speed}"
