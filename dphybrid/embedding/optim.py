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
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn

from dphybrid.embedding import native
from dphybrid.embedding.changed import ChangedRows
from dphybrid.embedding.gradients import segment_of
from dphybrid.embedding.native import Rule
from dphybrid.embedding.snapshot import Snapshot
from dphybrid.embedding.table import HostEmbedding, find_tables
from dphybrid.embedding.weights import info_of_table
from dphybrid.kernels import RULE_NUMBERS
from dphybrid.util.compiling import EagerOptimizer
from dphybrid.util.errors import UserError, suggestion
from dphybrid.util.row_rules import RULES, RowRule

_UPDATES = "updates"
"""Name of the state that counts a table's updates."""


class RowOptimizer(EagerOptimizer):
    """A torch.optim.Optimizer of tables' weights, whose C kernel updates the touched rows; `row_optimizer`
    makes it, with a parameter group for each table.

    options: lr, weight_decay (times the row, added to the gradient of touched rows), and those of the rule
    (`row_rules.RULES`). A dense gradient, of a weight that was used as a whole, updates all rows. Raises
    UserError for other numbers, TypeError for options that the rule does not have.
    """

    changes: ChangedRows | None = None
    snapshot: Snapshot | None = None

    def __init__(self, row_rule: RowRule, weights: Mapping[str, Tensor], **options: object) -> None:
        self.row_rule = row_rule
        known = {"weight_decay": 0.0, **row_rule.numbers}
        for name in options:
            if name not in known:
                hint = suggestion(name, list(known))
                raise TypeError(f"row optimizer {row_rule.name} has no option {name!r}{hint}")
        super().__init__([{"params": [pair]} for pair in weights.items()], known | options)

    def __getstate__(self) -> dict[str, Any]:  # of a copy or pickle
        return {**super().__getstate__(), "row_rule": self.row_rule}

    def rule(self, group: Mapping[str, Any]) -> Rule:
        """Return the kernel's rule with the present learning rate and options of a parameter group. Raises
        UserError for options that are no numbers, or that no update can use."""
        rule = None
        with suppress(TypeError, ValueError):
            lr, decay, eps = (float(group.get(name, 0.0)) for name in ("lr", "weight_decay", "eps"))
            beta1, beta2 = map(float, group.get("betas", (0.0, group.get("beta2", 0.0))))
            rule = Rule(RULE_NUMBERS[self.row_rule.name], lr, decay, eps, beta1, beta2)
        if rule is None or not all(0 <= number < math.inf for number in (rule.lr, rule.decay, rule.eps)):
            names = ("betas", "beta2", "lr", "weight_decay", "eps")
            options = ", ".join(f"{name}={group[name]}" for name in names if name in group)
            raise UserError(f"row optimizer: {options}; give finite numbers of at least 0, and two betas")
        return rule

    @property
    def tables(self) -> dict[str, nn.Parameter]:
        """The tables' weights by name."""
        return {
            name: weight
            for group in self.param_groups
            for name, weight in zip(group["param_names"], group["params"], strict=True)
        }

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add weights to train, as (name, weight), with zero states; a weight without `requires_grad` gets
        none."""
        rule = self.rule(self.defaults | param_group)
        native.corrections(rule.beta1, rule.beta2)
        super().add_param_group(param_group)
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

    @torch.no_grad()
    def step(self, closure: Callable[[], object] | None = None) -> Any:
        """Apply the gradients. closure: recomputes the gradients and returns the loss. Returns its loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            rule = self.rule(group)
            for name, weight in zip(group["param_names"], group["params"], strict=True):
                if weight.grad is not None:
                    self._update(rule, name, weight)
        return loss

    def _update(self, rule: Rule, name: str, weight: Tensor) -> None:
        """Apply the gradient of one weight. Raises UserError if the weight became longer or shorter than its
        states."""
        info, states, segment = info_of_table(weight), self._states(weight), segment_of(weight)
        fields = {}
        changed, updates, noise = [weight], 0, 0
        for key, (shape, dtype) in self._layout(weight).items():
            changed.append(state := states[key])
            if len(state) != len(weight):
                raise UserError(
                    f"row optimizer: a weight of {len(weight):,} rows has the state {key!r} of shape "
                    f"{tuple(state.shape)}; make a new optimizer after replacing a weight's rows"
                )
            fields[self.row_rule.states[key][0]] = state, shape, dtype
        if _UPDATES in states:
            updates = int(states[_UPDATES]) + 1
            # Noise for bfloat16's rounding, from a counter in the state: a resumed run rounds exactly as an
            # uninterrupted one.
            noise = (updates * 1_000_003 + list(self.tables).index(name)) * 0x9E3779B97F4A7C15 % 2**64
        version, snapshot = weight._version, self.snapshot
        with nullcontext() if snapshot is None else snapshot.changing({name: segment.ids_N}):
            ids_U = native.update(rule, weight, fields, segment, updates, noise)
            torch.autograd.graph.increment_version(changed)  # torch does not see the kernel's writes
        if _UPDATES in states:  # counted only now: the kernel may refuse an update
            states[_UPDATES] += 1
        if self.changes is not None:
            self.changes.add(name, ids_U.numpy())
        if info.changes is not None:
            info.changes.append((version, weight._version, ids_U))

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
        names = dict(enumerate(self.tables))
        saved = {
            f"{names.get(number, number)}.{key}": value
            for number, states in state_dict["state"].items()
            for key, value in states.items()
        }
        self.check_shapes({key: tuple(value.shape) for key, value in saved.items()})
        # torch's own method would cast states to the weight's type: moments to bfloat16, steps to floats.
        present_states = dict(self.state)
        # Without `param_names` in the saved groups, torch keeps the present names.
        groups = [{k: v for k, v in g.items() if k != "param_names"} for g in state_dict["param_groups"]]
        super().load_state_dict({**state_dict, "param_groups": groups, "state": {}})
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


def misfits(shapes: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return what differs between the shapes of saved tensors and the expected ones, by name, sorted."""
    problems = [f"missing {name}" for name in expected.keys() - shapes.keys()]
    problems += [f"unexpected {name}" for name in shapes.keys() - expected.keys()]
    both = expected.keys() & shapes.keys()
    unequal = [name for name in both if shapes[name] != expected[name]]
    return sorted([*problems, *(f"{name} is {shapes[name]}, expected {expected[name]}" for name in unequal)])


def row_optimizer(name: str, tables: object, **options: Any) -> RowOptimizer:
    """Return the row optimizer `name` for a table, all tables of a model, or tables by name. Raises UserError
    for an unknown name, for anything that is not a table, and if there are none."""
    if name not in RULES:
        raise UserError(f"row optimizer {name!r}: use one of {', '.join(RULES)}")
    if isinstance(tables, HostEmbedding):
        tables = {tables.name: tables}
    elif isinstance(tables, nn.Module):
        tables = find_tables(tables)
    if not isinstance(tables, Mapping) or not all(isinstance(t, HostEmbedding) for t in tables.values()):
        raise UserError(
            "row optimizer: give it a table, a model, or {name: table}, and other parameters to an optimizer "
            "of torch.optim"
        )
    if not tables:
        raise UserError("row optimizer: no table to train; give it the tables of a model that has some")
    named: dict[int, tuple[str, Tensor]] = {}  # by identity: a weight of two tables is updated once
    for key, table in tables.items():
        named.setdefault(id(table.weight), (key, table.weight))
    return RowOptimizer(RULES[name], dict(named.values()), **options)
