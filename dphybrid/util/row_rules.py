"""The optimizers of table rows, as data. Config, flags, optimizers and the kernel read their choices from
`RULES`; the arithmetic of each optimizer is the function of its name in `dphybrid/kernels/rules.h`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

_StateKind = Literal["row", "weight", "steps"]
"""Size of a state: one number for each row, one for each weight (both in the dtype of the gradients), or the
number of steps of each row (int32)."""


@dataclass(frozen=True)
class RowRule:
    """One optimizer of table rows.

    Attributes:
        states: By the names used in checkpoints, the field of `struct table` in rows.c, and the kind.
        numbers: Options and their defaults.
        says: Which state the optimizer keeps, for help texts.
        counts_updates: Whether the arithmetic needs the number of updates of the table.
    """

    name: str
    states: Mapping[str, tuple[str, _StateKind]]
    numbers: Mapping[str, float | tuple[float, float]]
    says: str
    counts_updates: bool = False


_ADAM: Mapping[str, float | tuple[float, float]] = {"betas": (0.9, 0.999), "eps": 1e-8}
_STEPS: tuple[str, _StateKind] = ("steps", "steps")

RULES: Mapping[str, RowRule] = {
    rule.name: rule
    for rule in (
        RowRule("sgd", {}, {"lr": 1e-3}, "no state"),
        RowRule("adagrad", {"sum": ("square", "row")}, {"lr": 1e-2, "eps": 1e-10}, "one number per row"),
        RowRule("lazy-adagrad", {"sum": ("square", "weight")}, {"lr": 1e-2, "eps": 1e-10}, "one per weight"),
        RowRule(
            "adam",
            {"mean": ("mean", "weight"), "square": ("square", "row"), "steps": _STEPS},
            {"lr": 1e-3, **_ADAM},
            "one number per weight and two per row",
        ),
        RowRule(
            "lazy-adam",
            {"mean": ("mean", "weight"), "square": ("square", "weight"), "steps": _STEPS},
            {"lr": 1e-3, **_ADAM},
            "two numbers per weight and one per row",
        ),
        RowRule(
            "adamw",
            {"square": ("square", "weight"), "steps": _STEPS},
            {"lr": 1e-3, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01},
            "one number per weight and one per row",
            counts_updates=True,
        ),
    )
}
