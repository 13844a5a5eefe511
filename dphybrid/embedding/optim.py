"""Optimizers of table rows: they read and write only the rows that the batch touched.

"Lazy" throughout: momentum, decay and weight decay of a row stand still while no batch touches it. On rows that every step touches, RowSGD and
LazyAdam equal torch's SGD and Adam; RowAdagrad and RowAdam keep one second moment a row (the mean of the squared gradient), as FBGEMM's
EXACT_ROWWISE_ADAGRAD and PARTIAL_ROWWISE_ADAM do.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from dphybrid.embedding.lookup import gather_rows, write_rows
from dphybrid.embedding.table import HostEmbedding
from dphybrid.util.errors import UserError


class RowOptimizer(ABC):
    """Base: holds the tables and their states, hands each table's touched rows to `update`.

    lr: learning rate, may be set between steps. weight_decay: added to the gradient of touched rows (lazy).
    """

    def __init__(self, tables: Mapping[str, HostEmbedding], lr: float, weight_decay: float = 0.0) -> None:
        if lr <= 0 or weight_decay < 0:
            raise UserError(f"row optimizer: lr={lr} must be above 0 and weight_decay={weight_decay} not below")
        self.tables = dict(tables)
        self.lr = lr
        self.weight_decay = weight_decay
        self.state: dict[str, dict[str, Tensor]] = {name: self.make_state(table) for name, table in self.tables.items()}
        for name, table in self.tables.items():
            if table.weight.dtype == torch.bfloat16:
                self.state[name]["roundings"] = torch.zeros(1, dtype=torch.int64)

    @abstractmethod
    def make_state(self, table: HostEmbedding) -> dict[str, Tensor]:
        """Return the zero state of a table, one row of state a row of table."""

    @abstractmethod
    def update(self, rows_UD: Tensor, grads_UD: Tensor, ids_U: Tensor, state: dict[str, Tensor]) -> None:
        """Change `rows_UD` in place and the rows `ids_U` of `state`."""

    @torch.no_grad()
    def step(self) -> None:
        """Apply the gradients of all lookups since `zero_grad`."""
        for name, table in self.tables.items():
            table.update_rows(partial(self._change, self.state[name]), self._rounding(name))

    def _change(self, state: dict[str, Tensor], rows_CD: Tensor, grads_CD: Tensor, ids_C: Tensor) -> None:
        if self.weight_decay:
            grads_CD = grads_CD.add(rows_CD, alpha=self.weight_decay)
        self.update(rows_CD, grads_CD, ids_C, state)

    def _rounding(self, name: str) -> torch.Generator | None:
        """A generator a step, seeded by a counter in the state: a resumed run rounds as the unbroken one would."""
        if "roundings" not in self.state[name]:
            return None
        self.state[name]["roundings"] += 1
        return torch.Generator().manual_seed(int(self.state[name]["roundings"]) * 1_000_003 + list(self.tables).index(name))

    def zero_grad(self) -> None:
        """Forget lookups and gradients of all tables."""
        for table in self.tables.values():
            table.clear_row_gradients()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the states flat, `TABLE.STATE` -> tensor, as references."""
        return {f"{name}.{key}": value for name, state in self.state.items() for key, value in state.items()}

    def load_state_dict(self, flat: Mapping[str, Tensor]) -> None:
        """Fill the states in place. Raises UserError like `check_shapes`."""
        self.check_shapes({key: tuple(value.shape) for key, value in flat.items()})
        for key, value in self.state_dict().items():
            value.copy_(flat[key])

    def check_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise UserError that names missing, unexpected and differently shaped entries of a state that is to be loaded."""
        own = {key: tuple(value.shape) for key, value in self.state_dict().items()}
        problems = [f"missing {key}" for key in own.keys() - shapes.keys()]
        problems += [f"unexpected {key}" for key in shapes.keys() - own.keys()]
        common = own.keys() & shapes.keys()
        problems += [f"{key} is {shapes[key]}, expected {own[key]}" for key in common if shapes[key] != own[key]]
        if problems:
            raise UserError(f"row optimizer state does not fit: {'; '.join(sorted(problems))}; was table.optimizer another one?")


class RowSGD(RowOptimizer):
    """w -= lr * g. No state."""

    def make_state(self, table: HostEmbedding) -> dict[str, Tensor]:
        return {}

    def update(self, rows_UD: Tensor, grads_UD: Tensor, ids_U: Tensor, state: dict[str, Tensor]) -> None:
        rows_UD.add_(grads_UD, alpha=-self.lr)


class RowAdagrad(RowOptimizer):
    """Adagrad with one accumulator a row: s += mean(g^2); w -= lr * g / (sqrt(s) + eps)."""

    def __init__(self, tables: Mapping[str, HostEmbedding], lr: float, weight_decay: float = 0.0, eps: float = 1e-10) -> None:
        self.eps = eps
        super().__init__(tables, lr, weight_decay)

    def make_state(self, table: HostEmbedding) -> dict[str, Tensor]:
        return table.zero_states({"sum": ((table.num_rows,), table.row_dtype)})

    def update(self, rows_UD: Tensor, grads_UD: Tensor, ids_U: Tensor, state: dict[str, Tensor]) -> None:
        sum_U = state["sum"].index_select(0, ids_U)  # with index_copy_ several times as fast as index_add_
        _add_mean_square(sum_U, grads_UD)
        state["sum"].index_copy_(0, ids_U, sum_U)
        rows_UD.addcdiv_(grads_UD, sum_U.sqrt_().add_(self.eps).unsqueeze(1), value=-self.lr)


class _Adam(RowOptimizer):
    """What both Adams share. The step count is the row's own, so that a rare row's bias correction is right."""

    row_wise: bool

    def __init__(
        self,
        tables: Mapping[str, HostEmbedding],
        lr: float,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        if not all(0 <= beta <= _LARGEST_BETA for beta in betas):
            raise UserError(f"row optimizer: betas={betas}; give values from 0 to {_LARGEST_BETA}")
        self.betas, self.eps = betas, eps
        self._corrections = (_unbiased(betas[0]).reciprocal_(), _unbiased(betas[1]).rsqrt_())
        super().__init__(tables, lr, weight_decay)

    def make_state(self, table: HostEmbedding) -> dict[str, Tensor]:
        second: tuple[int, ...] = (table.num_rows,) if self.row_wise else (table.num_rows, table.dim)
        return table.zero_states(
            {
                "mean": ((table.num_rows, table.dim), table.row_dtype),
                "square": (second, table.row_dtype),
                "steps": ((table.num_rows,), torch.int32),
            }
        )

    def update(self, rows_UD: Tensor, grads_UD: Tensor, ids_U: Tensor, state: dict[str, Tensor]) -> None:
        beta1, beta2 = self.betas
        steps_U = state["steps"].index_select(0, ids_U).add_(1)
        state["steps"].index_copy_(0, ids_U, steps_U)
        mean_UD = gather_rows(state["mean"], ids_U).lerp_(grads_UD, 1 - beta1)
        write_rows(state["mean"], ids_U, mean_UD)
        rate_U, scale_U = (
            factors.index_select(0, steps_U.clamp(max=len(factors) - 1)).to(rows_UD.dtype) for factors in self._corrections
        )
        if self.row_wise:
            square_U = state["square"].index_select(0, ids_U).mul_(beta2)
            _add_mean_square(square_U, grads_UD, 1 - beta2)
            state["square"].index_copy_(0, ids_U, square_U)
            step_U = rate_U.div_(square_U.sqrt_().mul_(scale_U).add_(self.eps))
            rows_UD.addcmul_(mean_UD, step_U.unsqueeze(1), value=-self.lr)
        else:
            square_UD = gather_rows(state["square"], ids_U).lerp_(grads_UD.square(), 1 - beta2)
            write_rows(state["square"], ids_U, square_UD)
            square_UD.sqrt_().mul_(scale_U.unsqueeze(1)).add_(self.eps)
            rows_UD.addcdiv_(mean_UD.mul_(rate_U.unsqueeze(1)), square_UD, value=-self.lr)


class RowAdam(_Adam):
    """Adam with one second moment a row (partial row-wise Adam)."""

    row_wise = True


class LazyAdam(_Adam):
    """Adam with full moments, kept and changed for touched rows only."""

    row_wise = False


_LARGEST_BETA = 0.99999

_WIDE = 32


def _unbiased(beta: float) -> Tensor:
    """Return 1 - beta ** k for k = 0, 1, ... up to where it is 1 in float64: looked up, as computing it for every row takes longer."""
    last = 1 if beta == 0 else math.ceil(-60 * math.log(2) / math.log(beta)) + 1
    return -torch.expm1(torch.arange(last + 1, dtype=torch.float64) * (math.log(beta) if beta else -math.inf))


def _add_mean_square(state_U: Tensor, grads_UD: Tensor, factor: float = 1.0) -> None:
    """state_U += factor * mean(grads_UD ** 2), by row."""
    # The fastest ways on one thread: 16,384 x 16 by product 0.07 ms, by norm 0.11; 19,128 x 64 0.28 and 0.18.
    dim = grads_UD.shape[1]
    if dim >= _WIDE:
        norm_U = torch.linalg.vector_norm(grads_UD, dim=1)
        state_U.addcmul_(norm_U, norm_U, value=factor / dim)
    else:
        state_U.addmv_(grads_UD * grads_UD, _shares(dim, grads_UD.dtype), alpha=factor)


@cache
def _shares(dim: int, dtype: torch.dtype) -> Tensor:
    return torch.full((dim,), 1 / dim, dtype=dtype)


ROW_OPTIMIZERS: dict[str, type[RowOptimizer]] = {"sgd": RowSGD, "adagrad": RowAdagrad, "adam": RowAdam, "lazy-adam": LazyAdam}


def make_row_optimizer(name: str, tables: Mapping[str, HostEmbedding], **options: Any) -> RowOptimizer:
    """Return the row optimizer of that name. Raises UserError that lists the names."""
    if name not in ROW_OPTIMIZERS:
        raise UserError(f"table.optimizer={name!r}: use one of {', '.join(ROW_OPTIMIZERS)}")
    return ROW_OPTIMIZERS[name](tables, **options)


@torch.no_grad()
def clip_grad_norm_(parameters: Iterable[Tensor], tables: Mapping[str, HostEmbedding], max_norm: float) -> float:
    """Scale the gradients of dense parameters and of touched rows so that their common 2-norm is at most `max_norm`.

    Returns the norm before scaling. torch's function of the same name cannot do this: it knows no rows.
    """
    dense = [p.grad for p in parameters if p.grad is not None]
    rows = {name: found for name, table in tables.items() if (found := table.row_gradients()) is not None}
    norms = [torch.linalg.vector_norm(g).double().cpu() for g in dense] + [
        torch.linalg.vector_norm(g).double() for _, g in rows.values()
    ]
    if not norms:
        return 0.0
    total = float(torch.linalg.vector_norm(torch.stack(norms)))
    factor = min(1.0, max_norm / (total + 1e-6))
    for name, (ids_U, grads_UD) in rows.items():
        tables[name].set_row_gradients(ids_U, grads_UD.mul(factor) if factor < 1 else grads_UD)
    if factor < 1:
        for grad in dense:
            grad.mul_(factor)
    return total
