"""The engine of a rank: together, the ranks train, evaluate and write checkpoints as one process does."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dphybrid.cluster.engine import ClusterEngine
from dphybrid.cluster.launch import reason_outside
from dphybrid.cluster.ranks import Ranks
from dphybrid.cluster.spread import Spread
from dphybrid.cluster.table import spread_table
from dphybrid.config import ExperimentConfig
from dphybrid.data.batches import part_of
from dphybrid.embedding import dense_parameters
from dphybrid.parallel import Devices, Split, resolve_devices
from dphybrid.training.checkpoint import Trained, dense_state
from dphybrid.training.engine import TakeStep
from dphybrid.training.metrics import Task
from dphybrid.training.parts import num_rows
from dphybrid.training.saving import CheckpointWriter
from dphybrid.training.step import Step
from dphybrid.util.errors import UserError
from dphybrid.util.stages import stage
from dphybrid.util.stop import StopRequest


class _SpreadWriter(CheckpointWriter):
    """Writes full checkpoints on rank 0, which fetches the rows of the other ranks. All ranks wait."""

    def __init__(
        self,
        ranks: Ranks,
        spread: Spread,
        folder: Path,
        trained: Trained,
        encoder: Path | None,
        encoder_sums: Mapping[str, str],
    ) -> None:
        super().__init__(folder, trained, 1, encoder, encoder_sums, in_place=True)
        self._ranks, self._spread = ranks, spread

    def save(self, *given: Any, **more: Any) -> Path:
        """Write a checkpoint; see `CheckpointWriter.save`. Raises UserError on all ranks when rank 0 does."""
        path, problem = "", ""
        if not self._ranks.leads:
            self._spread.serve()
        else:
            with self._spread.served():
                try:
                    path = str(super().save(*given, **more))
                except (UserError, OSError) as error:  # a full disk, say
                    problem = str(error)
        # Every rank raises the error: if only rank 0 did, the others would wait for its next message.
        path, problem = self._ranks.broadcast((path, problem))
        if problem:
            raise UserError(problem)
        return Path(path)


def _shares(rows: int, size: int) -> list[int]:
    """Return how many of `rows` rows each of `size` ranks gets."""
    return [len(range(rows)[part_of(rows, (rank, size))]) for rank in range(size)]


class RankEngine(ClusterEngine):
    """Training as one of `cluster.ranks` processes. ranks: this process's connection to the others."""

    def __init__(self, config: ExperimentConfig, ranks: Ranks) -> None:
        super().__init__(config)
        self.ranks, self.part = ranks, (ranks.rank, ranks.size)
        self._asked = False
        self._batch_rows = self._steps = 0
        self._bytes = 0.0

    def devices(self, text: str) -> Devices:
        return resolve_devices(str(self.ranks.device))

    def place(self, model: nn.Module) -> None:
        """Spread the model's only table, which was built without rows, over all ranks. Raises UserError if it
        does not fit."""
        config = self.config
        self.table = spread_table(model, self.ranks, config.table, config.train.batch_size)
        self._parameters = [parameter for parameter in dense_parameters(model) if parameter.requires_grad]

    def obey(self, stop: StopRequest, when: str) -> None:
        """Do nothing: the ranks agree to stop in their first step."""

    def take(self, own: TakeStep) -> TakeStep:
        return self._step  # recipes with a step of their own train in one process

    def _step(self, step: Step, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Take one step with this rank's part of the batch; return the loss and number of terms summed over
        all ranks."""
        session = step.session
        trained, config = session.trained, session.config.train
        assert trained.rows is not None
        # Seeded from step and rank: a restart draws the same, and checkpoints need no generator of each rank.
        number = config.seed * 1_000_003 + trained.progress.step
        torch.manual_seed((number * 65_537 + self.ranks.rank) % 2**63)
        with stage("zero_grad"):
            if trained.dense is not None:
                trained.dense.zero_grad(set_to_none=True)
            trained.rows.zero_grad()
            self.table.lr = trained.rows.param_groups[0]["lr"]
        outputs = trained.model(batch)
        with stage("loss"):
            loss, weight = outputs["loss"].sum(), outputs["weight"].sum()
            own = [float(loss.detach()), float(weight.detach()), num_rows(batch, trained.model)]
            sent, self.table.bytes_sent = self.table.bytes_sent, 0.0
            sums = self.ranks.sum(torch.tensor([*own, session.stop.pending, sent]).double())
            # Stop requests travel with the loss: all ranks must stop after the same step, or some would wait
            # for the others. One message for all five numbers.
            self._asked, self._batch_rows = bool(sums[3] > 0), int(sums[2])
            self._bytes, self._steps = self._bytes + float(sums[4]), self._steps + 1
        with stage("backward"):
            (loss / float(sums[1])).backward()
        with stage("all_reduce"):
            grads, sound = self._dense_gradients()
        if not (sound and math.isfinite(float(sums[0]))):
            raise session.stop_at(self._not_finite(trained, float(sums[0])))
        factors: list[float] = []

        def clipped(squares: float) -> float:
            total = self.ranks.sum(torch.tensor([squares]).double())
            norm = math.sqrt(float(total) + sum(float(g.double().square().sum()) for g in grads))
            factors.append(min(1.0, config.clip_norm / (norm + 1e-6)))
            return factors[-1]

        # Before the dense update: only the backward of the rows gives the norm by which both are clipped.
        with stage("row_update"):
            self.table.update(clipped if config.clip_norm > 0 else None)
        assert len(factors) == (config.clip_norm > 0)
        with stage("dense_update"):
            if factors and factors[0] < 1:
                for grad in grads:
                    grad.mul_(factors[0])
            if trained.dense is not None:
                trained.dense.step()
        return sums[0], sums[1]

    def num_rows(self, batch: dict[str, Tensor], model: nn.Module) -> int:
        return self._batch_rows

    def asked(self, stop: StopRequest) -> bool:
        if self._asked and not stop.pending:
            # Another rank may have seen the file with the request first: say the same reason as it does.
            stop.ask(reason_outside(self.ranks.folder) or "another rank's request to end")
        return self._asked

    def metrics(self, outputs: dict[str, Tensor], rows: int, batch_size: int, task: Task) -> dict[str, float]:
        """Compute the task's metrics over the outputs of all ranks, in the order of rows."""
        # Sorted: all ranks must send and receive in the same order.
        whole = {name: self._gathered(values, rows, batch_size) for name, values in sorted(outputs.items())}
        return self.ranks.broadcast(task.compute(whole) if self.ranks.leads else None)

    def writer(self, folder: Path, trained: Trained, *encoder: Any) -> CheckpointWriter:
        return _SpreadWriter(self.ranks, self.table.spread, folder, trained, *encoder)

    def read(self, trained: Trained, load: Callable[[], object] | None) -> object:
        """Let rank 0 read a checkpoint into all ranks: to each its rows, to all the blocks and the progress.

        load: on rank 0, or None for a new run; ignored on the other ranks. Returns its result on all ranks.
        """
        loads, problem, result = self.ranks.broadcast(load is not None), "", None
        if loads and not self.ranks.leads:
            self.table.spread.serve()
        elif load is not None and self.ranks.leads:
            with self.table.spread.served():
                try:
                    result = load()
                except UserError as error:
                    problem = str(error)
        # Every rank raises the error: if only rank 0 did, the others would wait for its next message.
        if problem := self.ranks.broadcast(problem):
            raise UserError(problem)
        # A new run: each rank draws its own rows, so none have to be sent.
        if not loads:
            self.table.fill()
        blocks = dense_state(trained.model)
        dense = trained.dense.state_dict() if trained.dense is not None and loads else None
        given = (blocks, dense, trained.progress, result) if self.ranks.leads else None
        blocks, dense, progress, result = self.ranks.broadcast(given)
        with torch.no_grad():
            for name, value in dense_state(trained.model).items():
                value.copy_(blocks[name])
        if dense is not None and trained.dense is not None:
            trained.dense.load_state_dict(dense)
        trained.progress.copy_from(progress)
        return result

    def measured(self) -> Mapping[str, float]:
        """Return averages for each step since the last call: MiB that all ranks sent to each other for rows,
        and ms that rank 0 took to look up rows, including waiting. Also return the largest and the smallest
        number of rows on a rank."""
        steps, self._steps = max(1, self._steps), 0
        sent, self._bytes = self._bytes, 0.0
        waited, self.table.look_up_ms = self.table.look_up_ms, 0.0
        rows = [stop - first for first, stop in self.table.spread.bounds]
        return {
            "cluster/all_to_all_mib": sent / steps / 2**20,
            "cluster/look_up_ms": waited / steps,
            "cluster/rows_of_rank_max": max(rows),
            "cluster/rows_of_rank_min": min(rows),
        }

    def split(self, split: Split) -> Split:
        number, size = self.part
        sizes = _shares(self._batch_rows, size)
        if len(split.input_sizes) != 1 or split.input_sizes[0][:1] != (sizes[number],):
            return split  # the block's input is not the rows of the batch

        def spread(shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
            return tuple((rows, *shape[1:]) if shape else () for rows in sizes)

        return Split(
            spread(split.input_sizes[0]),
            spread(split.output_sizes[0]),
            tuple(f"rank {rank}" for rank in range(size)),
            split.count,
        )

    def _dense_gradients(self) -> tuple[list[Tensor], bool]:
        """Sum the gradients of the blocks over all ranks; return them, and whether they and the gradients of
        the rows are finite.

        A parameter without a gradient on all ranks keeps none, as in one process.
        """
        parameters = self._parameters
        held = [p.grad is not None for p in parameters]
        # One message for each step: all gradients, which parameters have one (as floats, to be of one type),
        # and the sum of the rows' gradients, which is NaN or inf if one of them is.
        flat = torch.cat(
            [(p.grad if p.grad is not None else torch.zeros_like(p)).reshape(-1) for p in parameters]
            + [torch.tensor(held, device=self.ranks.device, dtype=torch.float32)]
            + [self.table.gradient_sum().reshape(1)]
        )
        self.ranks.sum(flat)
        sound = math.isfinite(float(flat.sum()))
        sizes = [p.numel() for p in parameters]
        *grads, counts, _ = flat.split([*sizes, len(sizes), 1])
        for parameter, part, count in zip(parameters, grads, counts.tolist(), strict=True):
            parameter.grad = part.view_as(parameter) if count else None
        return [p.grad for p in parameters if p.grad is not None], sound

    def _not_finite(self, trained: Trained, loss: float) -> str:
        """Return what is NaN or infinite in a step, with the same text on all ranks."""
        bad = [
            f"the gradient of parameter {name}"
            for name, value in trained.model.named_parameters()
            if value.grad is not None and not bool(torch.isfinite(value.grad).all())
        ]
        weights = [
            f"parameter {name}"
            for name, value in trained.model.named_parameters()
            if not bool(torch.isfinite(value).all())
        ]
        rows = sorted({row for row in self.ranks.all_gather(self.table.bad_gradient()) if row is not None})
        found = [f"the loss is {loss}", *weights[:1], *bad[:2]]
        found += [f"the gradient of row {row}" for row in rows[:2]]
        return "; ".join(found) + ": not finite"

    def _gathered(self, values: Tensor, rows: int, batch_size: int) -> Tensor:
        """On rank 0, return the values of all ranks in the order of rows; elsewhere, return this rank's own.
        Each rank has a part of every batch, so the parts are put together batch by batch."""
        size, sizes = self.ranks.size, []
        for start in range(0, rows, batch_size):
            sizes.append(_shares(min(batch_size, rows - start), size))
        if not self.ranks.leads:
            dist.send(values.contiguous(), 0)
            return values
        parts = [values.split([row[0] for row in sizes])]
        for rank in range(1, size):
            there = values.new_empty((sum(row[rank] for row in sizes), *values.shape[1:]))
            dist.recv(there, rank)
            parts.append(there.split([row[rank] for row in sizes]))
        return torch.cat([piece for of_batch in zip(*parts, strict=True) for piece in of_batch])
