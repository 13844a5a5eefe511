"""Optimizers of table rows: they read and write only the rows that the batch touched.

All but adamw are lazy: a row's moments and weight decay do not change while no batch touches the row. On rows
that every step touches, sgd, lazy-adagrad and lazy-adam equal torch's SGD, Adagrad and Adam. adagrad and adam
keep one second moment per row (of the mean squared gradient), as FBGEMM's EXACT_ROWWISE_ADAGRAD and
PARTIAL_ROWWISE_ADAM do. With adam and lazy-adam, each row counts its own steps, so that the bias correction
of rare rows is right.

adamw is torch's AdamW with betas=(0, beta2), over all rows: the decoupled weight decay and the decay of the
second moment follow the table's steps, not the row's. When a row is next touched, it first catches up on the
steps it missed, at the present learning rate; until then, lookups return it unchanged. Rare rows take larger
steps and shrink between them, which suits retrieval.
"""

import math
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import optimizer as of_torch

from dphybrid.embedding import native
from dphybrid.embedding.changed import ChangedRows
from dphybrid.embedding.gradients import segment_of
from dphybrid.embedding.native import Rule
from dphybrid.embedding.snapshot import Snapshot
from dphybrid.embedding.table import HostEmbedding, find_tables
from dphybrid.embedding.weights import info_of_table
from dphybrid.kernels import RULE_NUMBERS
from dphybrid.util.compiling import EagerOptimizer, profiler_looks_on
from dphybrid.util.errors import UserError, suggestion
from dphybrid.util.row_rules import RULES, RowRule

_UPDATES = "updates"
"""Name of the state that counts a table's updates."""


class RowOptimizer(EagerOptimizer):
    """A torch.optim.Optimizer of tables' weights, whose C kernel updates the touched rows; `row_optimizer`
    makes it.

    params: as for torch: weights (`model.table.parameters()`), named or not, or groups of them. Tables, or
    tables by name (`find_tables(model)`), stand for their weights. options: lr, weight_decay (times the row,
    added to the gradient of touched rows), and those of the rule (`row_rules.RULES`). A dense gradient, of a
    weight that was used as a whole, updates all rows. Raises UserError for other parameters and numbers,
    TypeError for options that the rule does not have.
    """

    changes: ChangedRows | None = None
    snapshot: Snapshot | None = None

    def __init__(self, row_rule: RowRule, params: object, **options: object) -> None:
        self.row_rule = row_rule
        known = {"weight_decay": 0.0, **row_rule.numbers}
        for name in options:
            if name not in known:
                hint = suggestion(name, list(known))
                raise TypeError(f"row optimizer {row_rule.name} has no option {name!r}{hint}")
        groups: Any = [params] if isinstance(params, HostEmbedding | Tensor) else params
        if isinstance(params, Mapping):  # one group per table
            groups = [{"params": [pair]} for pair in _named_weights(params)]
        if not (groups := list(groups)):
            raise UserError("row optimizer: no table to train; give it the tables of a model that has some")
        super().__init__(groups, known | options)

    def __getstate__(self) -> dict[str, Any]:  # of a copy or pickle
        return {**super().__getstate__(), "row_rule": self.row_rule}

    def rule(self, group: Mapping[str, Any]) -> Rule:
        """Return the kernel's rule with the present learning rate and options of a parameter group."""
        lr, decay, eps = (float(group.get(name, 0.0)) for name in ("lr", "weight_decay", "eps"))
        beta1, beta2 = map(float, group.get("betas", (0.0, group.get("beta2", 0.0))))
        return Rule(RULE_NUMBERS[self.row_rule.name], lr, decay, eps, (beta1, beta2))

    def _check_numbers(self, group: Mapping[str, Any]) -> None:
        """Raise UserError for options that are no numbers, or that no update can use."""
        try:
            rule = self.rule(group)
            valid = all(0 <= number < math.inf for number in (rule.lr, rule.decay, rule.eps))
        except (TypeError, ValueError):
            valid = False
        if not valid:
            names = ("betas", "beta2", "lr", "weight_decay", "eps")
            options = ", ".join(f"{name}={group[name]}" for name in names if name in group)
            raise UserError(f"row optimizer: {options}; give finite numbers of at least 0, and two betas")
        native.corrections(*rule.betas)

    @property
    def tables(self) -> dict[str, nn.Parameter]:
        """The tables' weights by name."""
        return {
            name: weight
            for group in self.param_groups
            for name, weight in zip(group["param_names"], group["params"], strict=True)
        }

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add weights to train, with zero states; a weight without `requires_grad` gets none."""
        group = {**param_group, "params": _named_weights(param_group["params"])}
        group.pop("param_names", None)
        self._check_numbers(self.defaults | group)
        names = [*self.tables, *(name for name, _ in group["params"])]
        if twice := [name for name in names if names.count(name) > 1]:
            raise UserError(
                f"row optimizer: two tables are called {twice[0]!r}; give them as {{name: table}}"
            )
        super().add_param_group(group)
        # Unlike torch's optimizers, not in the first step: states that do not fit into memory fail early.
        for weight in self.param_groups[-1]["params"]:
            self._states(weight)

    def _layout(self, weight: Tensor) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return the shape and type of each state of a weight that has an entry for each row."""
        real, (num_rows, dim) = native.real_dtype(weight.dtype), weight.shape
        of_kind: Mapping[str, tuple[tuple[int, ...], torch.dtype]] = {
            "row": ((num_rows,), real),
            "weight": ((num_rows, dim), real),
            "steps": ((num_rows,), torch.int32),
        }
        return {name: of_kind[kind] for name, (_, kind) in self.row_rule.states.items()}

    def _states(self, weight: Tensor) -> dict[str, Tensor]:
        """Return the states of a weight. Makes zero states if there are none and the weight is trained."""
        states: dict[str, Tensor] = self.state[weight]
        if not states and (weight.requires_grad or weight.grad is not None):
            wanted = self._layout(weight)
            if self.row_rule.counts_updates or weight.dtype == torch.bfloat16:
                wanted[_UPDATES] = (1,), torch.int64
            if wanted:
                states.update(info_of_table(weight).make_states(wanted))
        # In each step, as a trainer may replace states at any time; some move them to the model's device.
        for key, state in states.items():
            if isinstance(state, Tensor) and state.device.type == "cuda":
                states[key] = state.cpu()
        return states

    def step(self, closure: Callable[[], object] | None = None) -> Any:
        """Apply the gradients. Tables of one width, type and rule are sorted and updated together.

        The counters of the first of them get the time. closure: recomputes the gradients and returns the
        loss. Returns its loss.
        """
        hooks = self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks
        hooks = hooks or of_torch._global_optimizer_pre_hooks or of_torch._global_optimizer_post_hooks
        # torch's wrapper labels each step and calls hooks. It costs time, so it is used only if a profiler
        # runs or a hook is registered.
        return self._step_with_hooks(closure) if hooks or profiler_looks_on() else self._step(closure)

    step.hooked = True  # type: ignore[attr-defined] # or torch wraps it to label every step: 15 us

    @torch.no_grad()
    def _step(self, closure: Callable[[], object] | None) -> object:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # By width, type and rule in one kernel call: 200 calls for 200 tables took five times as long as one
        # for a table with all their rows.
        alike: dict[tuple[Rule, int, torch.dtype], dict[str, Tensor]] = {}
        for group in self.param_groups:
            rule = self.rule(group)
            for name, weight in zip(group["param_names"], group["params"], strict=True):
                if weight.grad is not None:
                    alike.setdefault((rule, weight.shape[1], weight.dtype), {})[name] = weight
        for (rule, *_), tables in alike.items():
            self._update(rule, tables)
        return loss

    _step_with_hooks = torch.optim.Optimizer.profile_hook_step(_step)

    def _update(self, rule: Rule, by_name: Mapping[str, Tensor]) -> None:
        start, names, weights = time.perf_counter(), list(by_name), list(by_name.values())
        infos = list(map(info_of_table, weights))
        tables, changed = self._tables(weights)
        segments = list(map(segment_of, weights, tables.first_keys))
        ids = {name: segment.ids_N for name, segment in zip(names, segments, strict=True)}
        versions, snapshot = [weight._version for weight in weights], self.snapshot
        with nullcontext() if snapshot is None else snapshot.changing(ids):
            keys_U = native.update(rule, tables, segments)
            torch.autograd.graph.increment_version(changed)  # torch does not see the kernel's writes
        if _UPDATES in self.state[weights[0]]:  # counted only now: the kernel may refuse an update
            for weight in weights:
                self.state[weight][_UPDATES] += 1
        if self.changes is not None or any(info.changes is not None for info in infos):
            # numpy, not torch: on a few hundred rows its calls cost less.
            keys = keys_U.numpy()
            bounds = np.searchsorted(keys, tables.first_keys).tolist()
            for n, (info, weight) in enumerate(zip(infos, weights, strict=True)):
                rows_U = keys[bounds[n] : bounds[n + 1]] - tables.first_keys[n]
                if self.changes is not None:
                    self.changes.add(names[n], rows_U)
                if info.changes is not None:
                    info.changes.append((versions[n], weight._version, torch.from_numpy(rows_U)))
        counters = infos[0].counters
        if not counters.by_replica:
            counters.unique += len(keys_U)
        counters.update_ms += 1e3 * (time.perf_counter() - start)

    def _tables(self, weights: list[Tensor]) -> tuple[native.Tables, list[Tensor]]:
        """Return the kernel's description of the weights and states, and the tensors that an update changes.

        Raises UserError for a weight that became longer or shorter than its states.
        """
        all_states, members, changed = [self._states(weight) for weight in weights], [], list(weights)
        for weight, states in zip(weights, all_states, strict=True):
            fields = {}
            for name, (shape, dtype) in self._layout(weight).items():
                changed.append(state := states[name])
                if len(state) != len(weight):
                    raise UserError(
                        f"row optimizer: a weight of {len(weight):,} rows has the state {name!r} of shape "
                        f"{tuple(state.shape)}; make a new optimizer after replacing a weight's rows"
                    )
                fields[self.row_rule.states[name][0]] = state, shape, dtype
            members.append((weight, fields))
        tables = native.Tables(members)
        if _UPDATES in all_states[0]:
            numbers = {id(weight): number for number, weight in enumerate(self.tables.values())}
            for line, weight, states in zip(tables.lines, weights, all_states, strict=True):
                line.updates = int(states[_UPDATES]) + 1
                # Noise for bfloat16's rounding, from a counter in the state: a resumed run rounds exactly as
                # an uninterrupted one.
                line.noise = (line.updates * 1_000_003 + numbers[id(weight)]) * 0x9E3779B97F4A7C15 % 2**64
        return tables, changed

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients. Unlike torch's, it does not label the call for a profiler, which takes 60
        us."""
        for group in self.param_groups:
            for weight in group["params"]:
                weight.grad = None

    def track_changes(self) -> ChangedRows:
        """Start recording which rows updates change; return the record."""
        self.changes = ChangedRows(
            lambda: {n: [weight, *self.row_states(n).values()] for n, weight in self.tables.items()}
        )
        return self.changes

    def states_of(self, name: str) -> dict[str, Tensor]:
        """Return the states of a table, not copied."""
        return self._states(self.tables[name])

    def row_states(self, name: str) -> dict[str, Tensor]:
        """Return the states of a table that have an entry for each of its rows, not copied."""
        return {key: value for key, value in self.states_of(name).items() if key != _UPDATES}

    def states(self) -> dict[str, Tensor]:
        """Return all states as one dict, `TABLE.STATE` -> tensor, not copied."""
        return {f"{name}.{key}": value for name in self.tables for key, value in self.states_of(name).items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copy saved states into the present ones, keeping their types, and set the groups' options.

        Tables are matched by their positions, as in torch. Raises UserError for states of another rule or of
        other tables."""
        groups = state_dict["param_groups"]
        saved_sizes, sizes = ([len(g["params"]) for g in some] for some in (groups, self.param_groups))
        if saved_sizes != sizes:
            raise UserError(
                f"row optimizer state does not fit: it has groups of {saved_sizes} tables, expected {sizes}; "
                "load it into an optimizer with the same groups"
            )
        saved = {
            f"{name}.{key}": value
            for present, group in zip(self.param_groups, groups, strict=True)
            for name, number in zip(present["param_names"], group["params"], strict=True)
            for key, value in state_dict["state"].get(number, {}).items()
        }
        self.check_shapes({key: tuple(value.shape) for key, value in saved.items()})
        # torch's own method would cast states to the weight's type: moments to bfloat16, steps to floats.
        present_states = dict(self.state)
        # Without `param_names` in the saved groups, torch keeps the present names.
        unnamed = [{key: group[key] for key in group if key != "param_names"} for group in groups]
        super().load_state_dict({**state_dict, "param_groups": unnamed, "state": {}})
        self.state.update(present_states)
        with torch.no_grad():
            for key, value in self.states().items():
                value.copy_(saved[key])

    def check_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise UserError if a state to load does not fit; names missing, unexpected and differently shaped
        entries."""
        if problems := misfits(shapes, {key: tuple(value.shape) for key, value in self.states().items()}):
            raise UserError(
                f"row optimizer state does not fit: {'; '.join(problems)}; load the state of the same "
                "optimizer and tables"
            )


def _named_weights(params: Any) -> list[tuple[str, Tensor]]:
    """Return the (name, weight) of what an optimizer gets, each weight once: weights, tables, and pairs with
    a name before them. Raises UserError for anything that is not a table's weight."""
    if isinstance(params, Mapping):
        params = params.items()
    named: dict[int, tuple[str, Tensor]] = {}  # by identity: a weight of two tables is updated once
    for entry in [params] if isinstance(params, HostEmbedding | Tensor) else params:
        name, weight = entry if isinstance(entry, tuple) else ("", entry)
        weight = weight.weight if isinstance(weight, HostEmbedding) else weight
        named.setdefault(id(weight), (name or info_of_table(weight).name, weight))
    return list(named.values())


def misfits(shapes: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return what differs between the shapes of saved tensors and the expected ones, by name, sorted."""
    problems = [f"missing {name}" for name in expected.keys() - shapes.keys()]
    problems += [f"unexpected {name}" for name in shapes.keys() - expected.keys()]
    both = expected.keys() & shapes.keys()
    unequal = [name for name in both if shapes[name] != expected[name]]
    return sorted([*problems, *(f"{name} is {shapes[name]}, expected {expected[name]}" for name in unequal)])


def row_optimizer(name: str, tables: object, **options: Any) -> RowOptimizer:
    """Return the row optimizer `name` for all tables of a model, or for any `params` of a `RowOptimizer`.
    Raises UserError for an unknown name, and for a model without tables."""
    if name not in RULES:
        raise UserError(f"row optimizer {name!r}: use one of {', '.join(RULES)}")
    if isinstance(tables, nn.Module) and not isinstance(tables, HostEmbedding):
        tables = find_tables(tables)
    return RowOptimizer(RULES[name], tables, **options)
