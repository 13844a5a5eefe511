"""Gradients of tables' lookups since the last update, wherever they are, arranged by row.

Letters: N ids of a lookup, U unique ids, D width of a row, X rows of gradients (ids, or bags).
"""

import itertools
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dphybrid.embedding import kernels
from dphybrid.embedding.counters import Counters
from dphybrid.embedding.kernels import Arranged, Segment
from dphybrid.embedding.plans import UpdatePlan
from dphybrid.embedding.replicas import Channel


@dataclass
class Pending:
    """Where the gradients of one lookup are: in `grads`, or in those of `leaf_UD`, on the device that
    `channel` leads to.

    sources_N: which gradient an id has, where several ids share one. grads: with their versions; they are
    read at the latest by the next update and must stay as they are until then.
    """

    ids_N: Tensor
    sources_N: Tensor | None = None
    leaf_UD: Tensor | None = None
    channel: Channel | None = None
    grads: list[tuple[Tensor, int]] = field(default_factory=list)

    def add(self, grads_XD: Tensor) -> None:
        """Note the gradients that have come back."""
        self.grads.append((grads_XD, grads_XD._version))

    @property
    def filled(self) -> bool:
        """Has a backward brought gradients?"""
        return bool(self.grads) or (self.leaf_UD is not None and self.leaf_UD.grad is not None)

    def on_the_way(self) -> "list[tuple[Tensor, torch.cuda.Event | None]]":
        """Return the gradients on the host and, where they are still being copied, the event that ends
        that."""
        if self.leaf_UD is not None and self.leaf_UD.grad is not None and self.channel is not None:
            return [self.channel.start_receiving(self.leaf_UD.grad)]
        if any(grads_XD._version != version for grads_XD, version in self.grads):
            raise RuntimeError(
                "the gradient of looked-up rows was changed in place between backward() and the update"
            )
        return [(grads_XD, None) for grads_XD, _ in self.grads]


class Column:
    """One table's share of a lookup in several at once, in the place of a `Pending` of its own: every
    `count`-th id and gradient from `first` on."""

    sources_N, leaf_UD = None, None

    def __init__(self, shared: Pending, first: int, count: int) -> None:
        self._shared, self._part = shared, slice(first, None, count)

    @property
    def ids_N(self) -> Tensor:
        return self._shared.ids_N[self._part]

    @property
    def grads(self) -> list[tuple[Tensor, int]]:
        return [(grads_XD[self._part], version) for grads_XD, version in self._shared.grads]

    @property
    def filled(self) -> bool:
        return self._shared.filled

    def on_the_way(self) -> "list[tuple[Tensor, torch.cuda.Event | None]]":
        return [(grads_XD[self._part], event) for grads_XD, event in self._shared.on_the_way()]


class Columns:
    """The lookups of several tables at once, `shared`, whose ids take turns: one of each of `members`.

    A step that treats all members alike costs no work by table. Whatever else is done to one of them first
    hands out to each its own share of the lookups.
    """

    def __init__(self, members: "list[RowGradients]") -> None:
        self.members = members
        starts = itertools.accumulate([member.num_rows for member in members[:-1]], initial=0)
        self.starts_F = torch.tensor(list(starts))
        self.shared: list[Pending] = []
        self._cleared: set[RowGradients] = set()
        for member in members:
            member.hand_out()
            member.columns = self

    def expect(self, pending: Pending) -> None:
        """Count in a lookup."""
        if self._cleared:
            self.hand_out()
        self.shared.append(pending)
        if any(member._lookups or not member.owned for member in self.members):
            self.hand_out()

    def clear(self, member: "RowGradients") -> None:
        """Forget a member's share."""
        self._cleared.add(member)
        if len(self._cleared) == len(self.members):
            self.shared, self._cleared = [], set()

    def hand_out(self) -> None:
        """Give each member its own share of the lookups."""
        shared, cleared, self.shared, self._cleared = self.shared, self._cleared, [], set()
        for number, member in enumerate(self.members):
            if member not in cleared:
                for pending in shared:
                    member.expect(Column(pending, number, len(self.members)))

    def segments(self, tables: "Sequence[RowGradients]", dtype: torch.dtype) -> list[Segment]:
        """Return all lookups with ids as keys that start at 0, if no other than the members are `tables`;
        else hand them out."""
        if not self.shared or self._cleared or tables != self.members:
            self.hand_out()
            return []
        return [
            Segment((pending.ids_N.view(-1, len(tables)) + self.starts_F).view(-1), _dense(grads_XD, dtype))
            for pending in self.shared
            for grads_XD, _ in pending.on_the_way()
        ]


class TableRows(torch.autograd.Function):
    """rows_ND -> the same; their gradient goes to `pending`. anchor: makes autograd come back here, gets
    none."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, rows: Tensor, pending: Pending) -> Tensor:
        ctx.pending = pending
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grads: Tensor) -> tuple[None, ...]:
        ctx.pending.add(grads.reshape(-1, grads.shape[-1]))
        return None, None, None


class RowGradients:
    """Collects one table's lookups and hands out their gradients. frozen: rows, ascending, that get none.
    owned: an optimizer takes them."""

    def __init__(self, name: str, num_rows: int, counters: Counters) -> None:
        self.name, self.num_rows, self.counters = name, num_rows, counters
        self.owned, self._told = False, False
        self.frozen: list[int] = []
        self.factor = 1.0
        self.plan: UpdatePlan | None = None
        self.columns: Columns | None = None
        self._lookups: list[Pending | Column] = []
        self._coming: list[tuple[Pending | Column, Tensor, torch.cuda.Event | None]] = []

    def __bool__(self) -> bool:
        return bool(self._lookups) or (self.columns is not None and bool(self.columns.shared))

    def tensors(self) -> list[Tensor]:
        """Return what backwards have brought so far, on whatever devices, as it is."""
        self.hand_out()
        leaves = [lookup.leaf_UD.grad for lookup in self._lookups if lookup.leaf_UD is not None]
        came = [grads_XD for lookup in self._lookups for grads_XD, _ in lookup.grads]
        return came + [grad for grad in leaves if grad is not None]

    def clear(self) -> None:
        """Forget all lookups."""
        self._lookups, self.factor = [], 1.0
        if self.columns is not None and self.columns.shared:
            self.columns.clear(self)

    def hand_out(self) -> None:
        """Take the own share of lookups in several tables, and have the other tables take theirs."""
        if self.columns is not None and self.columns.shared:
            self.columns.hand_out()

    def expect(self, pending: Pending | Column) -> None:
        """Count in the gradients of a lookup. Those of steps before are let go, with a warning, where no
        optimizer takes them."""
        self.hand_out()
        if not self.owned and any(lookup.filled for lookup in self._lookups):
            self.clear()
            if not self._told:
                self._told = True
                warnings.warn(
                    f"table {self.name!r}: its rows get gradients and nothing trains them: a table is no "
                    "parameter of the model. Give it a row "
                    "optimizer before the first step, rows = "
                    "dphybrid.embedding.make_row_optimizer('adagrad', find_tables(model), lr=0.1), and "
                    "call rows.zero_grad() and rows.step() beside the dense optimizer's; or look up under "
                    "torch.no_grad()",
                    stacklevel=2,
                )
        self._lookups.append(pending)

    def replace(self, ids_U: Tensor, grads_UD: Tensor) -> None:
        """Put merged (and perhaps clipped) gradients in the place of all collected ones."""
        self.clear()
        pending = Pending(ids_U)
        pending.add(grads_UD)
        self.expect(pending)

    def arrived(self, segments: Sequence[Segment]) -> None:
        """Put gradients on the host in the place of the same ones on devices: they come once."""
        came = [Pending(segment.ids_N) for segment in segments]
        for lookup, segment in zip(came, segments, strict=True):
            lookup.add(segment.rows_XD)
        self._lookups = [*came]

    def start(self) -> None:
        """Start copying what is on devices."""
        self.hand_out()
        self._coming = [(lookup, *found) for lookup in self._lookups for found in lookup.on_the_way()]

    def segments(self, dtype: torch.dtype) -> list[Segment]:
        """Return what `start` found, once it has come, as rows of `dtype`."""
        start = time.perf_counter()
        events = [event for _, _, event in self._coming if event is not None]
        for event in events:
            event.synchronize()
        if events:
            self.counters.d2h_ms += 1e3 * (time.perf_counter() - start)
        coming, self._coming = self._coming, []
        return [
            Segment(lookup.ids_N, _dense(grads_XD, dtype), lookup.sources_N) for lookup, grads_XD, _ in coming
        ]


def _dense(grads_XD: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows of `dtype` without gaps in a row."""
    rows_XD = grads_XD.to(dtype)
    return rows_XD if rows_XD.stride(-1) == 1 or rows_XD.shape[-1] == 1 else rows_XD.contiguous()


def arrange_gradients(tables: Sequence[RowGradients], dtype: torch.dtype) -> tuple[Arranged, list[int]]:
    """Return the gradients (of `dtype`) of several tables by key, and each table's first key: those of all
    tables before come first."""
    first_keys = [0, *itertools.accumulate([table.num_rows for table in tables])]
    columns = tables[0].columns
    segments = [(segment, 0) for segment in columns.segments(tables, dtype)] if columns is not None else []
    if not segments:
        for table in tables:
            table.start()
        for table, first_key in zip(tables, first_keys, strict=False):
            segments += [(segment, first_key) for segment in table.segments(dtype)]
    plan = tables[0].plan if len(tables) == 1 else None
    planned = plan.arranged([segment for segment, _ in segments]) if plan is not None else None
    if planned is not None:
        return planned, first_keys[:-1]
    frozen = [key + row for key, table in zip(first_keys, tables, strict=False) for row in table.frozen]
    return kernels.arrange(segments, first_keys[-1], frozen), first_keys[:-1]


def merge_gradients(tables: Sequence[RowGradients], dim: int, dtype: torch.dtype) -> Tensor:
    """Sum the gradients of each row of several tables, in the place of those of single lookups; return the
    squares (float64) of the rows' norms.
    """
    arranged, first_keys = arrange_gradients(tables, dtype)
    plan, factor = tables[0].plan, tables[0].factor
    if plan is not None and plan.made(
        arranged
    ):  # the update sums them again, as they lie: they are read once
        tables[0].arrived(arranged.held)
        squares_U = kernels.square_rows(arranged, dim, dtype)
        return squares_U if factor == 1.0 else squares_U.mul_(factor * factor)
    sums_UD, squares_U = kernels.sum_rows(arranged, dim, dtype)
    for table, first_key, part in zip(tables, first_keys, parts_of_tables(arranged, first_keys), strict=True):
        ids_U, factor = arranged.keys_U[part] - first_key, table.factor
        if not len(ids_U):
            table.clear()
            continue
        table.replace(ids_U, sums_UD[part])
        table.factor = factor
        if factor != 1.0:
            squares_U[part] *= factor * factor
    return squares_U


def parts_of_tables(arranged: Arranged, first_keys: Sequence[int]) -> list[slice]:
    """Return which of the keys belong to each table."""
    cuts = torch.searchsorted(arranged.keys_U, torch.tensor([*first_keys, 2**62])).tolist()
    return [slice(start, stop) for start, stop in itertools.pairwise(cuts)]
