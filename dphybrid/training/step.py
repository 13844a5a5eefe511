"""One step of a training: the object that a recipe's `step` uses. `Step.update` is one change of weights."""

import gc
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dphybrid.embedding import clip_grad_norm_, dense_parameters, find_tables
from dphybrid.training.engine import Batch, Session
from dphybrid.training.finite import NotFinite, buffer_copies, gradient_sum, not_finite
from dphybrid.training.memory import PARTS, micro_batches, num_rows, out_of_memory_report, scale_gradients
from dphybrid.util.errors import UserError
from dphybrid.util.memory import is_out_of_memory

Losses = Callable[[Batch], Mapping[str, Tensor]]
"""From a batch to `loss` (B,) and `weight` (B,), as a model's forward returns them."""


@dataclass(frozen=True)
class Step:
    """One step: the model, the step's number, and `update`, which a recipe calls once or more often."""

    session: Session

    @property
    def model(self) -> nn.Module:
        """The model that is trained."""
        return self.session.trained.model

    @property
    def number(self) -> int:
        """Steps taken before this one, also those before a resume."""
        return self.session.trained.progress.step

    def generator(self) -> torch.Generator:
        """Return a CPU generator seeded by the run's seed and this step's number: a resumed run draws the
        same."""
        seed = self.session.config.train.seed
        # Seed and step side by side, within what manual_seed takes.
        return torch.Generator().manual_seed((seed << 32 | self.number) % 2**63)

    def update(
        self, batch: Batch, losses: Losses | None = None, of: str | Sequence[str] = ()
    ) -> tuple[Tensor, Tensor]:
        """Minimize a mean loss by one update; return its sum and its number of terms, on their device.

        losses: computes them from the batch, or from a part of it (default: the model). of: the optimizers to
        use, by the names that the recipe's `optimizers` gives them, and "rows" for that of all tables
        (default: all). Only their parameters are clipped, by one norm, and changed.

        A batch that does not fit into a GPU's memory is computed once more in parts, and so are all after it.
        Raises UserError when that does not fit either, when loss or gradients are not finite numbers, and for
        names that are not there; with train.on_nonfinite=skip such an update changes nothing, and returns
        zeros.
        """
        chosen = self._optimizers(of)
        losses = losses or self.model
        # The forward of a step that is skipped afterwards has changed running means already.
        buffers = buffer_copies(self.model) if self.session.config.train.on_nonfinite == "skip" else []
        try:
            loss, weight = self._gradients(batch, losses)
            report = ""
        except RuntimeError as error:
            report = self._report(error, batch)
        if report:  # outside the handler: its traceback keeps the activations alive
            self._divide(report)
            return self.update(batch, losses, of)
        try:
            found = self._change(batch, loss, chosen)
        except RuntimeError as error:
            # Some parameters may have changed already: this step cannot be taken again.
            raise UserError(
                f"{self._report(error, batch)}\nThe update itself ran out of memory; a smaller batch does "
                f"not help. Lower the model's sizes or take train.optimizer=sgd, and {self.session.way_on()}"
            ) from error
        if found:
            self.session.skip_or_stop(found)
            for buffer, before in buffers:
                buffer.copy_(before)
            return torch.zeros_like(loss), torch.zeros_like(weight)
        return loss, weight

    def _optimizers(self, names: str | Sequence[str]) -> dict[str, torch.optim.Optimizer]:
        there = self.session.trained.named
        wanted = [names] if isinstance(names, str) else list(names)
        if unknown := [name for name in wanted if name not in there]:
            raise UserError(
                f"step: there is no optimizer {unknown[0]!r}; the recipe's optimizers() and the tables have "
                f"{', '.join(there) or 'none'}"
            )
        return {name: there[name] for name in wanted} if wanted else dict(there)

    def _gradients(self, batch: Batch, losses: Losses) -> tuple[Tensor, Tensor]:
        """Compute the gradients of the mean loss, in parts where `micro_batches` says so; return the summed
        loss and the number of terms."""
        trained, clock = self.session.trained, self.session.clock
        with clock.stage("zero_grad"):
            for optimizer in trained.named.values():
                optimizer.zero_grad()
        count = trained.progress.micro_batches
        sums: list[tuple[Tensor, Tensor]] = []
        for part in micro_batches(batch, count) if count > 1 else [batch]:
            with lower_precision(self.session.config.train.precision, trained.model):
                outputs = losses(part)
            with clock.stage("loss"):
                loss, weight = (summed(outputs[name]) for name in ("loss", "weight"))
                # A part does not know the whole batch's terms: gradients of parts are divided once, below.
                goal = loss / weight if count == 1 else loss
            with clock.stage("backward"):
                goal.backward()
            sums.append((loss.detach(), weight.detach()))
        if count == 1:
            return sums[0]
        loss, weight = (torch.stack(values).sum() for values in zip(*sums, strict=True))
        with clock.stage("backward"):
            scale_gradients(trained.model, 1 / weight)
        return loss, weight

    def _change(
        self, batch: Batch, loss: Tensor, chosen: Mapping[str, torch.optim.Optimizer]
    ) -> NotFinite | None:
        """Clip, then update blocks and rows. Returns what is not finite; then nothing was updated."""
        trained, clock, norm = self.session.trained, self.session.clock, self.session.config.train.clip_norm
        with clock.stage("clip"):
            parameters = [p for one in chosen.values() for group in one.param_groups for p in group["params"]]
            # One number for all gradients: one wait a device. Which one is bad is looked up later.
            clips = norm > 0
            size = clip_grad_norm_(parameters, norm) if clips else gradient_sum(parameters)
            sound = math.isfinite(size) and math.isfinite(loss)
        if not sound and (found := not_finite(trained.model, batch, loss, clipped=clips)):
            return found
        for optimizer in chosen.values():
            with clock.stage("row_update" if optimizer is trained.rows else "dense_update"):
                optimizer.step()
        return None

    def _report(self, error: RuntimeError, batch: Batch) -> str:
        """Return what used the memory. Raises the error where it is another one."""
        if not is_out_of_memory(error):
            raise error
        trained = self.session.trained
        return out_of_memory_report(error, self.number + 1, num_rows(batch), trained.model, trained.dense)

    def _divide(self, report: str) -> None:
        """Compute each batch in parts from now on. Raises UserError where that is so already."""
        session, progress = self.session, self.session.trained.progress
        if progress.micro_batches > 1:
            raise UserError(
                f"{report}\nand that in {progress.micro_batches} parts already; lower train.batch_size or "
                "the model's sizes"
            )
        progress.micro_batches = PARTS
        told = f"{report}\ngoing on with each batch in {PARTS} parts, their gradients summed: the same steps"
        session.splits.note([told])
        print(told, flush=True)
        session.tracker.set_tags({"dphybrid.out_of_memory": report, "dphybrid.micro_batches": str(PARTS)})
        for table in find_tables(self.model).values():
            table.ahead.expect([])  # of the whole batch: they fit no part, and hold memory
        gc.collect()
        torch.cuda.empty_cache()


def lower_precision(precision: str, model: nn.Module) -> AbstractContextManager[object]:
    """Return autocast to bfloat16 for a model's blocks, every replica's included, or nothing."""
    if precision != "bfloat16":
        return nullcontext()
    kind = next((parameter.device.type for parameter in dense_parameters(model)), "cpu")
    return torch.autocast(kind, dtype=torch.bfloat16)


def summed(values_B: Tensor) -> Tensor:
    """Return the sum, in float32 where the values have fewer digits: thousands of losses do not add up in
    bfloat16."""
    return values_B.sum(dtype=torch.float32 if values_B.dtype in (torch.bfloat16, torch.float16) else None)
