"""Optimizers of table rows: they read and write only the rows that the batch touched.

"Lazy" throughout: momentum, decay and weight decay of a row stand still while no batch touches it. On rows
that every step touches, RowSGD and LazyAdam equal torch's SGD and Adam; RowAdagrad and RowAdam keep one
second moment a row (the mean of the squared gradient), as FBGEMM's EXACT_ROWWISE_ADAGRAD and
PARTIAL_ROWWISE_ADAM do.
"""

import itertools
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dphybrid.embedding import kernels
from dphybrid.embedding.changed import ChangedRows
from dphybrid.embedding.gradients import RowGradients, arrange_gradients, merge_gradients, parts_of_tables
from dphybrid.embedding.kernels import Rule
from dphybrid.embedding.plans import Rows
from dphybrid.embedding.table import HostEmbedding
from dphybrid.util.errors import UserError


class RowOptimizer(ABC):
    """Base: holds the tables and their states, has the kernel of its rule change the touched rows.

    lr: learning rate, may be set between steps. weight_decay: added to the gradient of touched rows (lazy).
    """

    def __init__(self, tables: Mapping[str, HostEmbedding], lr: float, weight_decay: float = 0.0) -> None:
        if lr <= 0 or weight_decay < 0:
            raise UserError(
                f"row optimizer: lr={lr} must be above 0 and weight_decay={weight_decay} not below"
            )
        self.tables = dict(tables)
        for table in self.tables.values():
            table.gradients.owned = True
        self.lr = lr
        self.weight_decay = weight_decay
        self.state: dict[str, dict[str, Tensor]] = {
            name: self.make_state(table) for name, table in self.tables.items()
        }
        for name, table in self.tables.items():
            if table.weight.dtype == torch.bfloat16:
                self.state[name][_ROUNDINGS] = torch.zeros(1, dtype=torch.int64)
        self._numbers = {name: number for number, name in enumerate(self.tables)}
        self._lines: dict[str, kernels.Tables] = {}
        self._together: dict[tuple[int, torch.dtype], list[str]] = {}
        for name, table in self.tables.items():
            self._together.setdefault((table.dim, table.weight.dtype), []).append(name)
        self.changes: ChangedRows | None = None

    def track_changes(self) -> ChangedRows:
        """Keep, from now on, which rows are changed; return what knows them."""
        self.changes = ChangedRows(
            {
                kind: [(name, [self.tables[name].weight, *self.row_states(name).values()]) for name in names]
                for kind, names in self._together.items()
            },
            [table.ahead for table in self.tables.values()],
        )
        return self.changes

    def row_states(self, name: str) -> dict[str, Tensor]:
        """Return those states of a table that have a row for each of its rows, as references."""
        self.tables[name].ahead.finish()
        return {key: value for key, value in self.state[name].items() if key != _ROUNDINGS}

    @abstractmethod
    def make_state(self, table: HostEmbedding) -> dict[str, Tensor]:
        """Return the zero state of a table, one row of state a row of table, in the order in which the rule's
        kernel has them."""

    @abstractmethod
    def rule(self) -> Rule:
        """Return the rule with its present numbers."""

    def step(self) -> None:
        """Apply the gradients of all lookups since `zero_grad`: tables of one width and type are sorted and
        updated in one go.

        What that takes is counted on the first of them.
        """
        for kind, names in self._together.items():
            tables = [self.tables[name] for name in names]
            if any(table.gradients for table in tables):
                self._update(kind, names, tables)

    def _update(self, kind: tuple[int, torch.dtype], names: list[str], tables: list[HostEmbedding]) -> None:
        start, waited_ms = time.perf_counter(), sum([table.counters.d2h_ms for table in tables])
        arranged, first_keys = arrange_gradients([table.gradients for table in tables], tables[0].row_dtype)
        rounded = tables[0].weight.dtype == torch.bfloat16
        weights = [table.weight for table in tables]
        states = [[*self.state[name].values()][: -1 if rounded else None] for name in names]
        changed = [*weights, *itertools.chain.from_iterable(states)]
        lines = self._lines.get(names[0])
        if lines is None or not lines.are(changed):
            lines = self._lines[names[0]] = kernels.Tables(first_keys, weights, states)
        lines.set_factors([table.gradients.factor for table in tables])
        if rounded:
            lines.set_noises([self._noise(name) for name in names])
        recording = any(table.ahead.is_recording for table in tables)
        versions = [weight._version for weight in weights] if recording else []
        plan, rule = tables[0].gradients.plan, self.rule()

        def update(rows: Rows) -> None:
            kernels.update(rule, replace(arranged, keys_U=rows.ids_U, bounds_U2=rows.bounds_U2), lines)
            torch.autograd.graph.increment_version(changed)  # the kernel writes behind torch's back
            if self.changes is not None:
                self.changes.add(kind, rows.ids_U)

        if plan is not None and plan.made(arranged) and plan.halves and tables[0].ahead.later:
            tables[0].ahead.update(tables[0], plan.halves, update)
            recording = False
        else:
            update(Rows(arranged.keys_U, arranged.bounds_U2))
        if recording:
            for table, first_key, part, version in zip(
                tables, first_keys, parts_of_tables(arranged, first_keys), versions, strict=True
            ):
                table.ahead.changed(version, table.weight._version, arranged.keys_U[part] - first_key)
        counters, waited = tables[0].counters, sum([table.counters.d2h_ms for table in tables]) - waited_ms
        if not tables[0].ahead.is_placed:  # those of replicas were counted when they were looked up
            counters.unique += len(arranged.keys_U)
        counters.update_ms += 1e3 * (time.perf_counter() - start) - waited

    def _noise(self, name: str) -> int:
        """Where the noise of a bfloat16 table starts, from a counter in the state: a resumed run rounds as
        the unbroken one would."""
        self.state[name][_ROUNDINGS] += 1
        mixed = (
            (int(self.state[name][_ROUNDINGS]) * 1_000_003 + self._numbers[name]) * 0x9E3779B97F4A7C15 % 2**64
        )
        return mixed - 2**64 if mixed >= 2**63 else mixed

    def zero_grad(self) -> None:
        """Forget lookups and gradients of all tables."""
        for table in self.tables.values():
            table.clear_row_gradients()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the states flat, `TABLE.STATE` -> tensor, as references."""
        for table in self.tables.values():
            table.ahead.finish()
        return {f"{name}.{key}": value for name, state in self.state.items() for key, value in state.items()}

    def load_state_dict(self, flat: Mapping[str, Tensor]) -> None:
        """Fill the states in place. Raises UserError like `check_shapes`."""
        self.check_shapes({key: tuple(value.shape) for key, value in flat.items()})
        for key, value in self.state_dict().items():
            value.copy_(flat[key])

    def check_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise UserError that names missing, unexpected and differently shaped entries of a state that is to
        be loaded."""
        own = {key: tuple(value.shape) for key, value in self.state_dict().items()}
        problems = [f"missing {key}" for key in own.keys() - shapes.keys()]
        problems += [f"unexpected {key}" for key in shapes.keys() - own.keys()]
        common = own.keys() & shapes.keys()
        problems += [
            f"{key} is {shapes[key]}, expected {own[key]}" for key in common if shapes[key] != own[key]
        ]
        if problems:
            raise UserError(
                f"row optimizer state does not fit: {'; '.join(sorted(problems))}; was table.optimizer "
                "another one?"
            )


class RowSGD(RowOptimizer):
    """w -= lr * g. No state."""

    def make_state(self, table: HostEmbedding) -> dict[str, Tensor]:
        return {}

    def rule(self) -> Rule:
        return Rule("sgd", self.lr, self.weight_decay)


class RowAdagrad(RowOptimizer):
    """Adagrad with one accumulator a row: s += mean(g^2); w -= lr * g / (sqrt(s) + eps)."""

    def __init__(
        self, tables: Mapping[str, HostEmbedding], lr: float, weight_decay: float = 0.0, eps: float = 1e-10
    ) -> None:
        self.eps = eps
        super().__init__(tables, lr, weight_decay)

    def make_state(self, table: HostEmbedding) -> dict[str, Tensor]:
        return table.zero_states({"sum": ((table.num_rows,), table.row_dtype)})

    def rule(self) -> Rule:
        return Rule("adagrad", self.lr, self.weight_decay, self.eps)


class _Adam(RowOptimizer):
    """What both Adams share. The step count is the row's own, so that a rare row's bias correction is
    right."""

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

    def rule(self) -> Rule:
        name = "adam" if self.row_wise else "lazy-adam"
        return Rule(name, self.lr, self.weight_decay, self.eps, self.betas, self._corrections)


class RowAdam(_Adam):
    """Adam with one second moment a row (partial row-wise Adam)."""

    row_wise = True


class LazyAdam(_Adam):
    """Adam with full moments, kept and changed for touched rows only."""

    row_wise = False


_LARGEST_BETA = 0.99999
_ROUNDINGS = "roundings"


def _unbiased(beta: float) -> Tensor:
    """Return 1 - beta ** k for k = 0, 1, ... up to where it is 1 in float64: looked up, as computing it for
    every row takes longer."""
    last = 1 if beta == 0 else math.ceil(-60 * math.log(2) / math.log(beta)) + 1
    return -torch.expm1(torch.arange(last + 1, dtype=torch.float64) * (math.log(beta) if beta else -math.inf))


ROW_OPTIMIZERS: dict[str, type[RowOptimizer]] = {
    "sgd": RowSGD,
    "adagrad": RowAdagrad,
    "adam": RowAdam,
    "lazy-adam": LazyAdam,
}


def make_row_optimizer(name: str, tables: Mapping[str, HostEmbedding], **options: Any) -> RowOptimizer:
    """Return the row optimizer of that name. Raises UserError that lists the names."""
    if name not in ROW_OPTIMIZERS:
        raise UserError(f"table.optimizer={name!r}: use one of {', '.join(ROW_OPTIMIZERS)}")
    return ROW_OPTIMIZERS[name](tables, **options)


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[Tensor], tables: Mapping[str, HostEmbedding], max_norm: float
) -> float:
    """Scale the gradients of dense parameters and of touched rows so that their common 2-norm is at most
    `max_norm`.

    Returns the norm before scaling. torch's function of the same name cannot do this: it knows no rows.
    """
    dense = [p.grad for p in parameters if p.grad is not None]
    together: dict[tuple[int, torch.dtype], list[RowGradients]] = {}
    for table in tables.values():
        if table.gradients:
            together.setdefault((table.dim, table.row_dtype), []).append(table.gradients)
    by_device: dict[torch.device, list[int]] = {}
    for number, grad in enumerate(dense):
        by_device.setdefault(grad.device, []).append(number)
    norms = {
        device: torch.stack([norm.double() for norm in torch._foreach_norm([dense[n] for n in numbers])])
        for device, numbers in by_device.items()
    }
    of_rows = [merge_gradients(group, *kind).sum() for kind, group in together.items()]
    squares = [torch.zeros(())] * len(dense) + of_rows
    for device, numbers in by_device.items():  # one wait for each device, after all is on its way
        for number, norm in zip(numbers, norms[device].cpu(), strict=True):
            squares[number] = norm.square()
    if not squares:
        return 0.0
    total = math.sqrt(float(torch.stack(squares).sum()))
    factor = min(1.0, max_norm / (total + 1e-6))
    if factor < 1:
        if dense:
            torch._foreach_mul_(dense, factor)
        for group in together.values():
            for gradients in group:
                gradients.factor *= factor
    return total
