"""User callbacks that run after each epoch: to log numbers, notify somebody, or stop the training."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from dphybrid.util.errors import UserError, type_text
from dphybrid.util.importing import import_callable

_FIELD = "train.callbacks"


@dataclass
class EpochEnd:
    """The state at the end of an epoch, after its evaluation and after its checkpoint was started.

    Attributes:
        run: The run's name.
        epoch: Its number, from 1.
        epochs: `train.epochs`.
        step: Optimizer steps so far.
        train_loss: Mean over the epoch.
        metrics: Of the validation split, by name (`auc`, `loss`, ...).
        best: Whether this is the best epoch so far.
        model: The module in training, to read; with train.average, it has the averaged weights. A change to
            it is not in this epoch's checkpoint, so a resume from that loses it.
    """

    run: str
    epoch: int
    epochs: int
    step: int
    train_loss: float
    metrics: Mapping[str, float]
    best: bool
    model: nn.Module = field(repr=False)
    stopped: str = ""

    def stop(self, reason: str) -> None:
        """End the training after this epoch, as early stopping does: the run counts as finished and prints
        `reason`."""
        self.stopped = reason or "a callback asked for it"


Callback = Callable[[EpochEnd], Mapping[str, float] | None]
"""Called after each epoch. The numbers it returns are logged as metrics `own/NAME` at that step."""


def find_callbacks(paths: Sequence[str]) -> list[Callback]:
    """Import the functions named by train.callbacks. Raises UserError that says which part is missing."""
    return [import_callable(path, _FIELD) for path in paths]


def run_callbacks(callbacks: Sequence[Callback], seen: EpochEnd) -> dict[str, float]:
    """Call each callback; return their numbers as metrics `own/NAME`. Raises UserError for other values."""
    logged: dict[str, float] = {}
    for callback in callbacks:
        numbers: object = callback(seen)
        where = f"callback {getattr(callback, '__qualname__', callback)}"
        if numbers is None:
            continue
        if not isinstance(numbers, Mapping):
            raise UserError(
                f"{where}: returned {type_text(numbers)}; return a dict of numbers by name, or nothing"
            )
        for name, value in numbers.items():
            try:
                # The prefix keeps a callback from overwriting a metric of the training, such as train/loss.
                logged[f"own/{name}"] = float(value)
            except (TypeError, ValueError):
                raise UserError(f"{where}: {name!r} is {type_text(value)}; return numbers") from None
    return logged
