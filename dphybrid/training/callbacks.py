"""Users' functions called after each epoch: to log numbers, to notify somebody, to stop."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real

from torch import nn

from dphybrid.util.errors import UserError, type_text
from dphybrid.util.importing import import_callable

_FIELD = "train.callbacks"


@dataclass
class EpochEnd:
    """An epoch that has ended: evaluated, and its checkpoint begun.

    run: the run's name. epoch: its number, from 1; epochs: how many were asked for. step: optimizer steps so
    far. train_loss: the epoch's mean. metrics: of the validation split, by name (`auc`, `loss`, ...). best:
    no epoch before was better. model: the module in training, to look at: what it changes is trained on, and
    `--resume` knows nothing of it.
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
        """End the training after this epoch, as early stopping does: the run is finished, and told why."""
        self.stopped = reason or "a callback asked for it"


Callback = Callable[[EpochEnd], Mapping[str, float] | None]
"""Is called after each epoch; numbers that it returns are logged as `own/NAME` at that step."""


def find_callbacks(paths: Sequence[str]) -> list[Callback]:
    """Import the functions that train.callbacks names. Raises UserError that says which part is missing."""
    return [import_callable(path, _FIELD) for path in paths]


def call_back(callbacks: Sequence[Callback], seen: EpochEnd) -> dict[str, float]:
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
            if not isinstance(value, Real):
                raise UserError(
                    f"{where}: {name!r} is {type_text(value)}; return numbers (of a tensor, .item())"
                )
            # A prefix of their own: no callback takes the name of a metric of the training.
            logged[f"own/{name}"] = float(value)
    return logged
