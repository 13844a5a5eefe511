"""Several optimizers as one, such as a dense and a row optimizer, for trainers that accept only one."""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from dphybrid.util.compiling import EagerOptimizer
from dphybrid.util.errors import UserError


class CombinedOptimizer(EagerOptimizer):
    """A torch.optim.Optimizer that steps several optimizers: `CombinedOptimizer(dense, rows)`.

    `param_groups` are the optimizers' own dicts, in order, so a learning-rate schedule scales each group from
    that group's own rate. `state` is a new dict of their states. `defaults` are those that all of them have.
    Give each parameter, and each new group, to one of them.
    """

    optimizers: tuple[Optimizer, ...]

    def __init__(self, *optimizers: Optimizer) -> None:
        first, *others = optimizers
        common = {k: v for k, v in first.defaults.items() if all(k in other.defaults for other in others)}
        # Not torch's __init__, which would set `param_groups` and `state`, properties here.
        self.__setstate__({"optimizers": optimizers, "defaults": common})

    def __reduce__(self) -> Any:
        return type(self), self.optimizers

    @property
    def param_groups(self) -> tuple[dict[str, Any], ...]:  # type: ignore[override] # torch: a list
        """The parameter groups of all optimizers, in order."""
        # A property, not a list made once: load_state_dict replaces an optimizer's groups.
        return tuple(group for optimizer in self.optimizers for group in optimizer.param_groups)

    @property
    def state(self) -> dict[torch.Tensor, Any]:  # type: ignore[override]
        """The states of all optimizers, by parameter."""
        return {weight: state for one in self.optimizers for weight, state in one.state.items()}

    def step(self, closure: Callable[[], object] | None = None) -> Any:
        """Step each optimizer, in order. closure: recomputes the gradients and returns the loss; called once
        for all optimizers. Returns its loss."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all optimizers."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizers' state dicts as a list under "optimizers"."""
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a result of `state_dict`. Raises UserError if it has another number of optimizers."""
        if (count := len(states := state_dict.get("optimizers", ()))) != len(self.optimizers):
            raise UserError(
                f"CombinedOptimizer: the state holds {count} optimizers, expected {len(self.optimizers)}; "
                "load the state of an optimizer that was combined the same way"
            )
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)
