"""One step of a training: the object that a recipe's `step` works with. `Step.update` changes the weights."""

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
"""A function from a batch to `loss` (B,) and `weight` (B,), like a model's forward."""


@dataclass(frozen=True)
class Step:
    """One step: the model, the step's number, and `update`, which a recipe calls at least once."""

    session: Session

    @property
    def model(self) -> nn.Module:
        """The model that is trained."""
        return self.session.trained.model

    @property
    def number(self) -> int:
        """Number of steps taken before this one, including those before a resume."""
        return self.session.trained.progress.step

    def generator(self) -> torch.Generator:
        """Return a CPU generator seeded by the run's seed and this step's number, so that a resumed run draws
        the same numbers."""
        seed = self.session.config.train.seed
        # Seed in the upper bits, step in the lower 32, within the range of manual_seed.
        return torch.Generator().manual_seed((seed << 32 | self.number) % 2**63)

    def update(
        self, batch: Batch, losses: Losses | None = None, of: str | Sequence[str] = ()
    ) -> tuple[Tensor, Tensor]:
        """Minimize the mean loss by one update; return the summed loss and its number of terms, on their
        device.

        losses: computes the losses of the batch or of a part of it (default: the model). of: the optimizers
        to use, by the names in the recipe's `optimizers()`, and "rows" for the tables (default: all). Only
        their parameters are clipped, by one common norm, and changed.

        A batch that does not fit into GPU memory is computed again in parts, as are all later batches. Raises
        UserError if it still does not fit, for unknown optimizers, and if loss or gradients are not finite.
        With train.on_nonfinite=skip, an update that is not finite changes nothing and returns zeros.
        """
        chosen = self._optimizers(of)
        losses = losses or self.model
        # A step is skipped after its forward, which has already changed running means: restored below.
        buffers = buffer_copies(self.model) if self.session.config.train.on_nonfinite == "skip" else []
        try:
            loss, weight = self._gradients(batch, losses)
            report = ""
        except RuntimeError as error:
            report = self._report(error, batch)
        if report:  # outside the handler, because the error's traceback keeps the activations alive
            self._use_parts(report)
            return self.update(batch, losses, of)
        try:
            found = self._update_weights(batch, loss, weight, chosen)
        except RuntimeError as error:
            # Not tried again in parts: some parameters may have changed already.
            raise UserError(
                f"{self._report(error, batch)}\nThe update itself ran out of memory; a smaller batch does "
                "not help. Lower the model's sizes or use train.optimizer=sgd, and "
                f"{self.session.how_to_continue()}"
            ) from error
        if found:
            self.session.skip_or_stop(found)
            for buffer, before in buffers:
                buffer.copy_(before)
            return torch.zeros_like(loss), torch.zeros_like(weight)
        return loss, weight

    def _optimizers(self, names: str | Sequence[str]) -> dict[str, torch.optim.Optimizer]:
        known = self.session.trained.named
        wanted = [names] if isinstance(names, str) else list(names)
        if unknown := [name for name in wanted if name not in known]:
            raise UserError(
                f"step: there is no optimizer {unknown[0]!r}; the recipe's optimizers() and the tables have "
                f"{', '.join(known) or 'none'}"
            )
        return {name: known[name] for name in wanted} if wanted else dict(known)

    def _gradients(self, batch: Batch, losses: Losses) -> tuple[Tensor, Tensor]:
        """Compute the gradients of the mean loss, in `progress.micro_batches` parts; return the summed loss
        and the number of terms."""
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
                # A part does not know the terms of the whole batch: its gradients are divided below.
                objective = loss / weight if count == 1 else loss
            with clock.stage("backward"):
                objective.backward()
            sums.append((loss.detach(), weight.detach()))
        if count == 1:
            return sums[0]
        loss, weight = (torch.stack(values).sum() for values in zip(*sums, strict=True))
        with clock.stage("backward"):
            scale_gradients(trained.model, 1 / weight)
        return loss, weight

    def _update_weights(
        self, batch: Batch, loss: Tensor, weight: Tensor, chosen: Mapping[str, torch.optim.Optimizer]
    ) -> NotFinite | None:
        """Clip gradients, then update blocks and rows. If something is not finite, update nothing and return
        it."""
        trained, clock, norm = self.session.trained, self.session.clock, self.session.config.train.clip_norm
        with clock.stage("clip"):
            parameters = [p for one in chosen.values() for group in one.param_groups for p in group["params"]]
            # One number for all gradients, so that the host waits once for each device. Which gradient is bad
            # is looked up only if one is.
            clips = norm > 0
            size = clip_grad_norm_(parameters, norm) if clips else gradient_sum(parameters)
            finite = math.isfinite(size) and math.isfinite(loss)
        if not finite and float(weight) == 0:
            return NotFinite("loss: the batch's weights add up to 0, so that it has no mean", weight=False)
        if not finite and (found := not_finite(trained.model, batch, loss, clipped=clips)):
            return found
        for optimizer in chosen.values():
            with clock.stage("row_update" if optimizer is trained.rows else "dense_update"):
                optimizer.step()
        return None

    def _report(self, error: RuntimeError, batch: Batch) -> str:
        """Return the report of an out-of-memory error. Raises any other error."""
        if not is_out_of_memory(error):
            raise error
        trained = self.session.trained
        return out_of_memory_report(error, self.number + 1, num_rows(batch), trained.model, trained.dense)

    def _use_parts(self, report: str) -> None:
        """Compute each batch in parts from now on. Raises UserError if that is already the case."""
        session, progress = self.session, self.session.trained.progress
        if progress.micro_batches > 1:
            raise UserError(
                f"{report}\nThe batch was computed in {progress.micro_batches} parts already; lower "
                "train.batch_size or the model's sizes"
            )
        progress.micro_batches = PARTS
        text = f"{report}\ncontinuing with each batch in {PARTS} parts; their gradients add up to the batch's"
        session.splits.note([text])
        print(text, flush=True)
        session.tracker.set_tags({"dphybrid.out_of_memory": report, "dphybrid.micro_batches": str(PARTS)})
        for table in find_tables(self.model).values():
            table.ahead.expect([])  # drop prefetched rows of the whole batch: no part looks them up
        # Collected first: tensors in reference cycles still hold memory, which empty_cache could not release.
        gc.collect()
        torch.cuda.empty_cache()


def lower_precision(precision: str, model: nn.Module) -> AbstractContextManager[object]:
    """Return the context of a forward: autocast if `precision` is bfloat16, for every replica of the blocks;
    otherwise an empty one."""
    if precision != "bfloat16":
        return nullcontext()
    # autocast is for one device type: that of the blocks. A model without dense parameters is on the CPU.
    kind = next((parameter.device.type for parameter in dense_parameters(model)), "cpu")
    return torch.autocast(kind, dtype=torch.bfloat16)


def summed(values_B: Tensor) -> Tensor:
    """Return the sum, in float32 for half-precision values: bfloat16 has too few digits to add thousands of
    losses."""
    return values_B.sum(dtype=torch.float32 if values_B.dtype in (torch.bfloat16, torch.float16) else None)
