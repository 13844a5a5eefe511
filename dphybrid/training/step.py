"""One step of a training: the object that a recipe's `step` works with. `Step.update` changes the weights."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dphybrid.embedding import clip_grad_norm_, dense_parameters
from dphybrid.training.engine import Batch, Session
from dphybrid.training.finite import gradient_sum, not_finite
from dphybrid.training.parts import num_rows, parts_of, scale_gradients
from dphybrid.util.errors import UserError
from dphybrid.util.memory import is_out_of_memory
from dphybrid.util.stages import stage

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

        losses: computes the losses of the batch (default: the model). of: the optimizers to use, by the
        names in the recipe's `optimizers()`, and "rows" for the tables (default: all). Only their parameters
        are clipped, by one common norm, and changed.

        Raises UserError for unknown optimizers, when memory runs out, and, before it changes anything, if
        loss or gradients are not finite.
        """
        trained, config = self.session.trained, self.session.config.train
        chosen = self._optimizers(of)
        try:
            with stage("zero_grad"):
                for optimizer in trained.named.values():
                    optimizer.zero_grad()
            sums: list[tuple[Tensor, Tensor]] = []
            for part in parts_of(batch, config.accumulate, trained.model):
                with lower_precision(config.precision, trained.model):
                    outputs = (losses or trained.model)(part)
                with stage("loss"):
                    loss, weight = (summed(outputs[name]) for name in ("loss", "weight"))
                    # A part does not know the terms of the whole batch: its gradients are divided below.
                    objective = loss / weight if config.accumulate == 1 else loss
                with stage("backward"):
                    objective.backward()
                sums.append((loss.detach(), weight.detach()))
            loss, weight = sums[0]
            if config.accumulate > 1:
                loss, weight = (torch.stack(values).sum() for values in zip(*sums, strict=True))
                with stage("backward"):
                    scale_gradients(trained.model, 1 / weight)
            with stage("clip"):
                groups = [group for optimizer in chosen.values() for group in optimizer.param_groups]
                parameters = [parameter for group in groups for parameter in group["params"]]
                # One number for all gradients, so that the host waits once for each device. Which gradient
                # is bad is looked up only if one is.
                clips = config.clip_norm > 0
                size = clip_grad_norm_(parameters, config.clip_norm) if clips else gradient_sum(parameters)
                finite = math.isfinite(size) and math.isfinite(loss)
                if clips and finite:
                    self.session.norms.append(float(size))
            if not finite:
                problem = "the batch's weights add up to 0, so that it has no mean"
                if float(weight) != 0:
                    problem = not_finite(self.model, batch, loss, clips)
                if problem:
                    raise self.session.stop_at(problem)
            for optimizer in chosen.values():
                with stage("row_update" if optimizer is trained.rows else "dense_update"):
                    optimizer.step()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            where = f"step {self.number + 1} with a batch of {num_rows(batch, self.model)} rows"
            raise UserError(
                f"out of memory in {where}: {str(error).splitlines()[0]}\nLower train.batch_size or the "
                f"model's sizes, or use more devices, and {self.session.how_to_continue()}"
            ) from error
        return loss, weight

    def _optimizers(self, names: str | Sequence[str]) -> dict[str, torch.optim.Optimizer]:
        optimizers = self.session.trained.named
        wanted = [names] if isinstance(names, str) else list(names)
        if unknown := [name for name in wanted if name not in optimizers]:
            raise UserError(
                f"step: there is no optimizer {unknown[0]!r}; the recipe's optimizers() and the tables have "
                f"{', '.join(optimizers) or 'none'}"
            )
        return {name: optimizers[name] for name in wanted} if wanted else dict(optimizers)


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
