"""One step of a training: the object that a recipe's `step` uses. `Step.update` is one change of weights."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dphybrid.embedding import clip_grad_norm_, dense_parameters
from dphybrid.parallel import find_data_parallel
from dphybrid.training.engine import Batch, Session, num_rows
from dphybrid.training.finite import NotFinite, gradient_sum, kept_buffers, not_finite
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

        losses: computes them from the batch (default: the model). of: the optimizers to use, by the names
        that the recipe's `optimizers` gives them, and "rows" for that of all tables (default: all). Only
        their parameters are clipped, by one norm, and changed.

        Raises UserError when a GPU's memory does not hold the batch, when loss or gradients are not finite
        numbers, and for names that are not there; with train.on_nonfinite=skip an update that is not finite
        changes nothing, and returns zeros.
        """
        chosen = self._optimizers(of)
        losses = losses or self.model
        # The forward of a step that is skipped afterwards has changed running means already.
        buffers = kept_buffers(self.model) if self.session.config.train.on_nonfinite == "skip" else []
        try:
            loss, weight = self._gradients(batch, losses)
            found = self._change(batch, loss.detach(), chosen)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise UserError(
                f"{self._out_of_memory(error, num_rows(batch))}\nStart a new run with a lower "
                "train.batch_size or a smaller model; where another process took the memory, "
                f"{self.session.way_on()}"
            ) from error
        if found:
            self.session.skip_or_stop(found)
            for buffer, before in buffers:
                buffer.copy_(before)
            return torch.zeros_like(loss), torch.zeros_like(weight)
        return loss.detach(), weight.detach()

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
        """Compute the gradients of the mean loss; return the summed loss and the number of terms."""
        trained, clock = self.session.trained, self.session.clock
        with clock.stage("zero_grad"):
            for optimizer in trained.named.values():
                optimizer.zero_grad()
        with clock.stage("forward"), lower_precision(self.session.config.train.precision, trained.model):
            outputs = losses(batch)
        with clock.stage("loss"):
            loss, weight = (summed(outputs[name]) for name in ("loss", "weight"))
            goal = loss / weight
        with clock.stage("backward"):
            goal.backward()
        return loss.detach(), weight.detach()

    def _change(
        self, batch: Batch, loss: Tensor, chosen: Mapping[str, torch.optim.Optimizer]
    ) -> NotFinite | None:
        """Clip, then update blocks and rows. Returns what is not finite; then nothing was updated."""
        trained, clock, config = self.session.trained, self.session.clock, self.session.config.train
        with clock.stage("clip"):
            parameters = [p for one in chosen.values() for group in one.param_groups for p in group["params"]]
            # One number for all gradients: one wait a device. Which one is bad is looked up later.
            clips = config.clip_norm > 0
            size = clip_grad_norm_(parameters, config.clip_norm) if clips else gradient_sum(parameters)
            sound = math.isfinite(size) and math.isfinite(loss)
        if not sound and (found := not_finite(trained.model, batch, loss, clipped=clips)):
            return found
        for optimizer in chosen.values():
            with clock.stage("row_update" if optimizer is trained.rows else "dense_update"):
                optimizer.step()
        return None

    def _out_of_memory(self, error: RuntimeError, rows: int) -> str:
        """Return what used the GPUs' memory when a batch of so many rows did not fit."""
        dense, first = self.session.trained.dense, str(error).partition("\n")[0]
        weights = sum(parameter.nbytes for parameter in dense_parameters(self.model))
        states = [value for state in dense.state.values() for value in state.values()] if dense else []
        held = sum(value.nbytes for value in states if isinstance(value, Tensor))
        lines = [
            f"out of memory in step {self.number + 1} with a batch of {rows} rows: {first}",
            f"  blocks {_gib(weights)}, their gradients as much, optimizer state {_gib(held)}; the rest is "
            "activations and copies of blocks",
        ]
        for number in own_gpus(self.model) if torch.cuda.is_initialized() else ():
            free, total = torch.cuda.mem_get_info(number)
            own = torch.cuda.memory_reserved(number)
            lines.append(
                f"  cuda:{number}: {_gib(total)} in all, {_gib(own)} taken by this process, "
                f"{_gib(max(0, total - free - own))} by CUDA itself and by others, {_gib(free)} free"
            )
        return "\n".join(lines)


def own_gpus(model: nn.Module) -> list[int]:
    """Return the indices of the GPUs that a model uses; asking another one opens a context of half a GiB."""
    devices = {parameter.device for parameter in model.parameters()}
    devices |= {place for block in find_data_parallel(model).values() for place in block.devices.replicas}
    return sorted(device.index for device in devices if device.type == "cuda")


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"


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
