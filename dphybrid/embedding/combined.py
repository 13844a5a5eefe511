"""Several optimizers as one, for trainers that take one: the dense parameters' and the rows'."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from dphybrid.util.compiling import EagerOptimizer
from dphybrid.util.errors import UserError


class CombinedOptimizer(EagerOptimizer):
    """A torch.optim.Optimizer whose steps are those of several: `CombinedOptimizer(dense, rows)`.

    `param_groups` are theirs, the same dicts, in their order; so a schedule changes each group's learning
    rate from its own. `defaults` are those that all of them have. Raises UserError for other objects.
    """

    optimizers: tuple[Optimizer, ...]

    def __init__(self, *optimizers: Optimizer) -> None:
        others = [type(other).__name__ for other in optimizers if not isinstance(other, Optimizer)]
        if others or not optimizers:
            raise UserError(
                f"CombinedOptimizer: {', '.join(others) or 'nothing'} is not a torch.optim.Optimizer; give "
                "it the dense and the row optimizer"
            )
        self.__setstate__({"optimizers": optimizers})

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override] # a plain attribute of torch's
        """The groups of all, in their order: loading states makes new ones."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:  # type: ignore[override]
        """The states of all, to be read."""
        return defaultdict(dict, {k: v for optimizer in self.optimizers for k, v in optimizer.state.items()})

    def add_param_group(self, param_group: dict[str, object]) -> None:
        """Raise UserError: which of the optimizers is meant?"""
        raise UserError("CombinedOptimizer: add the group to the optimizer that is to train it")

    def step(self, closure: Callable[[], object] | None = None) -> Any:
        """Take a step of each, in their order. closure: computes the gradients anew, once, and returns the
        loss, which is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of each, under "optimizers"."""
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned. Raises UserError where it is of another number of optimizers."""
        states = state_dict.get("optimizers", ())
        if len(states) != len(self.optimizers):
            raise UserError(
                f"CombinedOptimizer: a state of {len(states)} optimizers for {len(self.optimizers)}; was it "
                "saved by another one?"
            )
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizers": self.optimizers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        first, *others = state["optimizers"]
        common = {k: v for k, v in first.defaults.items() if all(k in other.defaults for other in others)}
        super().__setstate__({**state, "defaults": common})
