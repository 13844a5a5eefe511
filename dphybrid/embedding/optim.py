"""Optimizers of table rows: they read and write only the rows that the batch touched.

"Lazy" throughout: momentum, decay and weight decay of a row stand still while no batch touches it. On rows
that every step touches, RowSGD and LazyAdam equal torch's SGD and Adam; RowAdagrad and RowAdam keep one
second moment a row (the mean of the squared gradient), as FBGEMM's EXACT_ROWWISE_ADAGRAD and
PARTIAL_ROWWISE_ADAM do.
"""

import copy
import math
import sys
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import optimizer as of_torch

from dphybrid.embedding import native
from dphybrid.embedding.ahead import update_in_halves
from dphybrid.embedding.changed import ChangedRows
from dphybrid.embedding.gradients import RowGradients, arrange_gradients, merge_gradients, parts_of_tables
from dphybrid.embedding.native import Rule
from dphybrid.embedding.plans import Planned, Rows
from dphybrid.embedding.table import HostEmbedding
from dphybrid.embedding.weight import TableWeight
from dphybrid.util.errors import UserError
from dphybrid.util.labels import profiler_looks_on

Tables = (
    Mapping[str, HostEmbedding]
    | HostEmbedding
    | Iterable[HostEmbedding | tuple[str, HostEmbedding] | Tensor | dict[str, Any]]
)
"""What a row optimizer takes: tables by name, tables, their weights, or groups of these ("params")."""


class RowOptimizer(torch.optim.Optimizer, ABC):
    """Base: holds the tables and their states, has the kernel of its rule change the touched rows.

    A torch.optim.Optimizer whose parameters are tables' weights: `param_groups` (one a table, unless groups
    are given), `state`, hooks, learning rate schedulers and `GradScaler` work as they do for torch's own.

    tables: name -> table, or what else `Tables` says. lr: learning rate. weight_decay: added to the gradient
    of touched rows (lazy). Both, and what a rule has besides, may be a group's own and be set between steps.
    """

    def __init__(self, tables: Tables, lr: float, weight_decay: float = 0.0, **numbers: Any) -> None:
        self.tables: dict[str, HostEmbedding] = {}
        self.changes: ChangedRows | None = None
        self._set_up()
        defaults = {"lr": lr, "weight_decay": weight_decay, **numbers}
        _check_numbers(defaults)
        groups = _groups(tables)
        if not groups:
            raise UserError(
                "row optimizer: there is no table; give find_tables(model) of a model that has one"
            )
        super().__init__(groups, defaults)

    def track_changes(self) -> ChangedRows:
        """Keep, from now on, which rows are changed; return what knows them."""
        self.changes = ChangedRows(
            {
                tuple(names): [
                    (name, [self.tables[name].settled(), *self.row_states(name).values()]) for name in names
                ]
                for _, names, _ in self._alike()
            },
            [table.ahead for table in self.tables.values()],
        )
        return self.changes

    def states_of(self, name: str) -> dict[str, Tensor]:
        """Return the states of a table, as references."""
        self.tables[name].ahead.finish()
        return self._states[name]

    def row_states(self, name: str) -> dict[str, Tensor]:
        """Return those states of a table that have a row for each of its rows, as references."""
        return {key: value for key, value in self.states_of(name).items() if key != _ROUNDINGS}

    @abstractmethod
    def make_state(self, table: HostEmbedding) -> dict[str, Tensor]:
        """Return the zero state of a table, one row of state a row of table, in the order in which the rule's
        kernel has them."""

    @abstractmethod
    def rule(self, group: Mapping[str, Any]) -> Rule:
        """Return the rule with the present numbers of a parameter group."""

    @property
    def lr(self) -> float:
        """The learning rate of the first group; set, that of all groups."""
        return float(self.param_groups[0]["lr"])

    @lr.setter
    def lr(self, value: float) -> None:
        for group in self.param_groups:
            group["lr"] = value

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Take over more tables, with zero states. "params": a table, its weight, or several, by name or
        not."""
        group = dict(param_group)
        named = _named(group["params"], self.tables)
        _check_numbers(group)
        if foreign := sorted(_OPTIONS_OF_OTHERS & group.keys() - self.defaults.keys()):
            raise UserError(f"row optimizer: {type(self).__name__} has no {', '.join(foreign)}")
        group["params"] = [(name, table.weight) for name, table in named.items()]
        group.pop("param_names", None)
        super().add_param_group(group)
        for name, table in named.items():
            self.tables[name] = table
            table.gradients.owned = True
            state = self.make_state(table)
            if table.rows_VD.dtype == torch.bfloat16:
                state[_ROUNDINGS] = torch.zeros(1, dtype=torch.int64)
            self.state[table.weight] = _HostStates(state)
        self._set_up()

    def _set_up(self) -> None:
        """Forget what was made ready for the tables of before."""
        self._places = {name: place for place, name in enumerate(self.tables)}
        self._states = {name: self.state[table.weight] for name, table in self.tables.items()}
        self._numbers: list[Any] = []
        self._together: list[tuple[Rule, list[str], list[HostEmbedding]]] = []

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Apply the gradients of all lookups since `zero_grad`: tables of one width, type and rule are sorted
        and updated in one go.

        What that takes is counted on the first of them. closure: computes the gradients anew and returns the
        loss, which is returned. Raises UserError where gradients have been applied before, or were cleared
        unseen.
        """
        if (
            profiler_looks_on()
            or self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or of_torch._global_optimizer_pre_hooks
            or of_torch._global_optimizer_post_hooks
        ):
            return self._step_with_hooks(closure)
        return self._step(closure)

    step.hooked = True  # type: ignore[attr-defined] # torch would label every step for a profile: 15 us

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._refuse_copies()
        _refuse_between_steps()
        for table in self.tables.values():
            table.gradients.start_update()
        for rule, names, tables in self._alike():
            if any(table.gradients for table in tables):
                self._update(rule, names, tables)
                for table in tables:
                    table.gradients.updated()
        return loss

    _step_with_hooks = torch.optim.Optimizer.profile_hook_step(_step)

    def _refuse_copies(self) -> None:
        if not (dist.is_available() and dist.is_initialized()) or (count := dist.get_world_size()) == 1:
            return
        for name, table in self.tables.items():
            if not table.over_ranks:
                raise UserError(
                    f"table {name!r}: each of {count} processes would train a copy of its own, as "
                    "DistributedDataParallel, FSDP and the like know no rows' gradients; train in one "
                    "process, with dphybrid.parallel.DataParallel over the GPUs, or with cluster.ranks; "
                    "where your own loop makes all copies' gradients equal, say table.over_ranks = True"
                )

    def _alike(self) -> list[tuple[Rule, list[str], list[HostEmbedding]]]:
        """Tables of one width, type and rule, with their rule and names; found anew when a number changes."""
        keys = [key for key in self.defaults if key in _NUMBERS]
        numbers = [group[key] for group in self.param_groups for key in keys]
        if not self._together or numbers != self._numbers:
            self._numbers = [*map(_number, numbers)]
            found: dict[tuple[Any, ...], tuple[Rule, list[str], list[HostEmbedding]]] = {}
            for group in self.param_groups:
                rule, own = self.rule(group), [_number(group[key]) for key in keys]
                for name in group["param_names"]:
                    table = self.tables[name]
                    _, names, tables = found.setdefault(
                        (table.dim, table.rows_VD.dtype, *own), (rule, [], [])
                    )
                    names.append(name)
                    tables.append(table)
            self._together = [*found.values()]
        return self._together

    def _update(self, rule: Rule, names: list[str], tables: list[HostEmbedding]) -> None:
        start, waited_ms = time.perf_counter(), sum([table.counters.d2h_ms for table in tables])
        arranged, first_keys = arrange_gradients([table.gradients for table in tables], tables[0].row_dtype)
        weights, states = [table.settled() for table in tables], [self._states[name] for name in names]
        members = [
            (weight, {key: state for key, state in own.items() if key != _ROUNDINGS})
            for weight, own in zip(weights, states, strict=True)
        ]
        lines = native.Tables(members)
        changed = lines.tensors
        lines.set_factors([table.gradients.factor for table in tables])
        if weights[0].dtype == torch.bfloat16:
            lines.set_noises([self._noise(name) for name in names])
        recording = any(table.ahead.is_recording for table in tables)
        versions = [weight._version for weight in weights] if recording else []

        def update(rows: Rows) -> None:
            native.update(rule, arranged, lines, rows.ids_U, rows.bounds_U2)
            torch.autograd.graph.increment_version(changed)  # the kernel writes behind torch's back
            if self.changes is not None:
                self.changes.add(tuple(names), rows.ids_U)

        if isinstance(arranged, Planned) and tables[0].ahead.later and (halves := arranged.halves()):
            update_in_halves(tables, halves, lambda rows_T: update(arranged.together(rows_T)))
        else:
            update(Rows(arranged.keys_U, arranged.bounds_U2))
            if recording:
                parts = parts_of_tables(arranged, first_keys)
                for table, first_key, part, version in zip(tables, first_keys, parts, versions, strict=True):
                    table.ahead.changed(version, table.rows_VD._version, arranged.keys_U[part] - first_key)
        counters, waited = tables[0].counters, sum([table.counters.d2h_ms for table in tables]) - waited_ms
        if not tables[0].ahead.is_placed:  # those of replicas were counted when they were looked up
            counters.unique += len(arranged.keys_U)
        counters.update_ms += 1e3 * (time.perf_counter() - start) - waited

    def _noise(self, name: str) -> int:
        """Where the noise of a bfloat16 table starts, from a counter in the state: a resumed run rounds as
        the unbroken one would."""
        rounds = self._states[name][_ROUNDINGS]
        rounds += 1
        return (int(rounds) * 1_000_003 + self._places[name]) * 0x9E3779B97F4A7C15 % 2**64

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of all tables. set_to_none: makes no difference."""
        for table in self.tables.values():
            table.gradients.clear()

    def states(self) -> dict[str, Tensor]:
        """Return the states flat, `TABLE.STATE` -> tensor, as references."""
        return {f"{name}.{key}": value for name in self.tables for key, value in self.states_of(name).items()}

    def state_dict(self) -> dict[str, Any]:
        """Return torch's form of the states, as references, and of the groups."""
        for table in self.tables.values():
            table.ahead.finish()
        found = super().state_dict()
        found["state"] = {number: dict(states) for number, states in found["state"].items()}
        return found

    @torch._disable_dynamo
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Fill states in place, and set the groups' numbers, from what `state_dict` or `states` returned.
        Raises UserError like `check_shapes`."""
        if "param_groups" not in state_dict:
            self._fill(state_dict)
            return
        loaded = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            loaded = before(self, loaded) or loaded
        sizes, own = (
            [len(group["params"]) for group in groups]
            for groups in (loaded["param_groups"], self.param_groups)
        )
        if sizes != own:
            raise UserError(f"row optimizer state does not fit: groups of {sizes} tables, expected {own}")
        states: dict[str, Tensor] = {}
        for group, saved in zip(self.param_groups, loaded["param_groups"], strict=True):
            for name, number in zip(group["param_names"], saved["params"], strict=True):
                states |= {f"{name}.{key}": value for key, value in loaded["state"].get(number, {}).items()}
        self._fill(states)
        for group, saved in zip(self.param_groups, loaded["param_groups"], strict=True):
            group.update(
                {
                    key: copy.copy(value)
                    for key, value in saved.items()
                    if key not in ("params", "param_names")
                }
            )
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _fill(self, flat: Mapping[str, Tensor]) -> None:
        self.check_shapes({key: tuple(value.shape) for key, value in flat.items()})
        for key, value in self.states().items():
            value.copy_(flat[key])

    def check_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise UserError that names missing, unexpected and differently shaped entries of a state that is to
        be loaded."""
        own = {key: tuple(value.shape) for key, value in self.states().items()}
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

    def __getstate__(self) -> dict[str, Any]:
        groups = [
            {key: value for key, value in group.items() if key != "params"} for group in self.param_groups
        ]
        states = {name: dict(self.states_of(name)) for name in self.tables}
        return {"defaults": self.defaults, "tables": self.tables, "groups": groups, "states": states}

    def __setstate__(self, state: dict[str, Any]) -> None:
        tables, states = state["tables"], state["states"]
        groups = [
            {"params": [tables[name].weight for name in group["param_names"]], **group}
            for group in state["groups"]
        ]
        self.tables, self.changes = tables, None
        for table in tables.values():
            table.gradients.owned = True
        kept = defaultdict(
            dict, {tables[name].weight: _HostStates(values) for name, values in states.items()}
        )
        super().__setstate__({"defaults": state["defaults"], "state": kept, "param_groups": groups})
        self._set_up()


def _refuse_between_steps() -> None:
    """Raise UserError while accelerate accumulates gradients: it skips the steps of the optimizers that it
    knows, and this one it does not."""
    accelerate = sys.modules.get("accelerate")
    if accelerate is not None and not accelerate.state.GradientState().sync_gradients:
        raise UserError(
            "row optimizer: accelerate accumulates gradients, and would not take a step with this batch; "
            "give it the row optimizer, too, rows = accelerator.prepare(rows), or a CombinedOptimizer"
        )


class _HostStates(dict[str, Tensor]):
    """The states of a table by name, which stay where they are: trainers move those of every optimizer to the
    model's device."""

    def __setitem__(self, name: str, state: Tensor) -> None:
        if name not in self or state.device == self[name].device:
            super().__setitem__(name, state)


def _groups(tables: Any) -> list[dict[str, Any]]:
    """One group a table, where no groups are given."""
    if not isinstance(tables, (Mapping, HostEmbedding, Tensor)):
        tables = list(tables)
        if tables and isinstance(tables[0], dict):
            return tables
    return [{"params": {name: table}} for name, table in _named(tables, {}).items()]


def _named(params: Any, taken: Container[str]) -> dict[str, HostEmbedding]:
    """Return tables by name. Raises UserError for what is no table, and for names that are there already."""
    if isinstance(params, Mapping):
        params = params.items()
    elif isinstance(params, (HostEmbedding, Tensor)):
        params = [params]
    named: dict[str, HostEmbedding] = {}
    for entry in params:
        name, table = entry if isinstance(entry, tuple) else (None, entry)
        if isinstance(table, TableWeight):
            table = table.table
        if not isinstance(table, HostEmbedding):
            what = f"a tensor of shape {tuple(table.shape)}" if isinstance(table, Tensor) else repr(table)
            raise UserError(
                f"row optimizer: {what} is no table; give find_tables(model), and what else is to be trained "
                "to a torch.optim optimizer"
            )
        name = name or table.name
        if name in named or name in taken:
            raise UserError(f"row optimizer: two tables are called {name!r}; give them as {{name: table}}")
        named[name] = table
    return named


def _number(value: Any) -> Any:
    return tuple(map(float, value)) if isinstance(value, tuple | list) else float(value)


def _check_numbers(numbers: Mapping[str, Any]) -> None:
    lr, decay, betas = numbers.get("lr", 1.0), numbers.get("weight_decay", 0.0), numbers.get("betas", ())
    if float(lr) <= 0 or decay < 0:
        raise UserError(f"row optimizer: lr={lr} must be above 0 and weight_decay={decay} not below")
    if not all(0 <= beta <= _LARGEST_BETA for beta in betas):
        raise UserError(f"row optimizer: betas={betas}; give values from 0 to {_LARGEST_BETA}")


class RowSGD(RowOptimizer):
    """w -= lr * g. No state."""

    def make_state(self, table: HostEmbedding) -> dict[str, Tensor]:
        return {}

    def rule(self, group: Mapping[str, Any]) -> Rule:
        return Rule("sgd", float(group["lr"]), group["weight_decay"])


class RowAdagrad(RowOptimizer):
    """Adagrad with one accumulator a row: s += mean(g^2); w -= lr * g / (sqrt(s) + eps)."""

    def __init__(self, tables: Tables, lr: float, weight_decay: float = 0.0, eps: float = 1e-10) -> None:
        super().__init__(tables, lr, weight_decay, eps=eps)

    def make_state(self, table: HostEmbedding) -> dict[str, Tensor]:
        return table.zero_states({"sum": ((table.num_rows,), table.row_dtype)})

    def rule(self, group: Mapping[str, Any]) -> Rule:
        return Rule("adagrad", float(group["lr"]), group["weight_decay"], group["eps"])


class _Adam(RowOptimizer):
    """What both Adams share. The step count is the row's own, so that a rare row's bias correction is
    right."""

    row_wise: bool

    def __init__(
        self,
        tables: Tables,
        lr: float,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(tables, lr, weight_decay, betas=tuple(betas), eps=eps)

    def make_state(self, table: HostEmbedding) -> dict[str, Tensor]:
        second: tuple[int, ...] = (table.num_rows,) if self.row_wise else (table.num_rows, table.dim)
        return table.zero_states(
            {
                "mean": ((table.num_rows, table.dim), table.row_dtype),
                "square": (second, table.row_dtype),
                "steps": ((table.num_rows,), torch.int32),
            }
        )

    def rule(self, group: Mapping[str, Any]) -> Rule:
        name = "adam" if self.row_wise else "lazy-adam"
        betas = group["betas"]
        corrections = _corrections(*betas)
        return Rule(name, float(group["lr"]), group["weight_decay"], group["eps"], betas, corrections)


class RowAdam(_Adam):
    """Adam with one second moment a row (partial row-wise Adam)."""

    row_wise = True


class LazyAdam(_Adam):
    """Adam with full moments, kept and changed for touched rows only."""

    row_wise = False


_LARGEST_BETA = 0.99999
_ROUNDINGS = "roundings"
_NUMBERS = ("lr", "weight_decay", "eps", "betas")
_OPTIONS_OF_OTHERS = {
    *("momentum", "dampening", "nesterov", "maximize", "amsgrad", "lr_decay", "initial_accumulator_value"),
    *("decoupled_weight_decay", "foreach", "fused", "capturable", "differentiable", "betas", "eps"),
}
"""What torch's optimizers take besides: not ignored in silence."""


@lru_cache(maxsize=8)
def _corrections(beta1: float, beta2: float) -> tuple[Tensor, Tensor]:
    """Return 1 / (1 - beta1 ** k) and 1 / sqrt(1 - beta2 ** k) for k = 0, 1, ... up to where both are 1 in
    float64: looked up, as computing them for every row takes longer."""
    largest = max(beta1, beta2)
    last = 1 if largest == 0 else math.ceil(-60 * math.log(2) / math.log(largest)) + 1
    steps = torch.arange(last + 1, dtype=torch.float64)
    first, second = (-torch.expm1(steps * (math.log(beta) if beta else -math.inf)) for beta in (beta1, beta2))
    return first.reciprocal_(), second.rsqrt_()


ROW_OPTIMIZERS: dict[str, type[RowOptimizer]] = {
    "sgd": RowSGD,
    "adagrad": RowAdagrad,
    "adam": RowAdam,
    "lazy-adam": LazyAdam,
}


def make_row_optimizer(name: str, tables: Tables, **options: Any) -> RowOptimizer:
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
    dense = [p.grad for p in parameters if p.grad is not None and not isinstance(p, TableWeight)]
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
                gradients.scale(factor)
    return total
