"""Gradients of tables' lookups since the last update, wherever they are, arranged by row.

Letters: N ids of a lookup, U unique ids, D width of a row, X rows of gradients (ids, or bags).
"""

import itertools
import threading
import time
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dphybrid.embedding import native
from dphybrid.embedding.counters import Counters
from dphybrid.embedding.native import Arranged, Segment
from dphybrid.embedding.plans import Planned, UpdatePlan, arrange_planned
from dphybrid.embedding.replicas import Channel
from dphybrid.util.errors import UserError


@dataclass(eq=False)
class Pending:
    """Where the gradients of one lookup are: in `grads`, or in those of `leaf_UD`, on the device that
    `channel` leads to.

    number: of the lookup among those of its table, in whose order gradients are summed. sources_N: which
    gradient an id has, where several ids share one. grads: with their versions; they are read at the latest
    by the next update and must stay as they are until then (version None: may be changed).
    """

    ids_N: Tensor
    sources_N: Tensor | None = None
    channel: Channel | None = None
    number: int = field(default_factory=itertools.count().__next__)
    leaf_UD: Tensor | None = None
    grads: list[tuple[Tensor, int | None]] = field(default_factory=list)

    def add(self, grads_XD: Tensor, *, fixed: bool = True) -> None:
        """Note the gradients that have come back."""
        self.grads.append((grads_XD, grads_XD._version if fixed else None))

    def forget(self) -> None:
        """Let go of the gradients. Those of another backward through the same lookup may still come."""
        if self.leaf_UD is not None:
            self.leaf_UD.grad = None
        self.leaf_UD, self.grads = None, []

    def on_the_way(self) -> "list[tuple[Tensor, torch.cuda.Event | None]]":
        """Return the gradients on the host and, where they are still being copied, the event that ends
        that."""
        if self.leaf_UD is not None and self.leaf_UD.grad is not None and self.channel is not None:
            return [self.channel.start_receiving(self.leaf_UD.grad)]
        if any(version is not None and grads_XD._version != version for grads_XD, version in self.grads):
            raise RuntimeError(
                "the gradient of looked-up rows was changed in place between backward() and the update"
            )
        return [(grads_XD, None) for grads_XD, _ in self.grads]


class Columns:
    """The lookups of several tables at once, `shared`, whose ids take turns: one of each of `members`.

    A step that treats all members alike costs almost no work by table. Whatever else is done to one of them
    first hands out to each its own share of the lookups.
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

    def come(self, pending: Pending, grads_XD: Tensor) -> None:
        """Count in a lookup whose gradients a backward pass brings."""
        for member in self.members:
            member.arrive()
        if self._cleared:
            self.hand_out()
        pending.add(grads_XD)
        if pending not in self.shared:
            self.shared.append(pending)
        if any(not member.shares_all(self) for member in self.members):
            self.hand_out()

    def has(self, member: "RowGradients") -> bool:
        """Has a member a share in lookups?"""
        return bool(self.shared) and member not in self._cleared

    def clear(self, member: "RowGradients") -> None:
        """Forget a member's share."""
        self._cleared.add(member)
        if len(self._cleared) == len(self.members):
            for pending in self.shared:
                pending.forget()
            self.shared, self._cleared = [], set()

    def hand_out(self) -> None:
        """Give each member its own share of the lookups."""
        shared, cleared, self.shared, self._cleared = self.shared, self._cleared, [], set()
        for first, member in enumerate(self.members):
            if member in cleared or not member.trains:
                continue
            part = slice(first, None, len(self.members))
            for pending in shared:
                grads = [(grads_XD[part], version) for grads_XD, version in pending.grads]
                member.add(Pending(pending.ids_N[part], number=pending.number, grads=grads))
        for pending in shared:
            pending.forget()

    def segments(self, tables: "Sequence[RowGradients]", dtype: torch.dtype) -> list[Segment]:
        """Return all lookups with ids as keys that start at 0, if no other than the members are `tables`;
        else hand them out."""
        if not self.shared or self._cleared or tables != self.members:
            self.hand_out()
            return []
        self.shared.sort(key=lambda pending: pending.number)
        return [
            Segment((pending.ids_N.view(-1, len(tables)) + self.starts_F).view(-1), _dense(grads_XD, dtype))
            for pending in self.shared
            for grads_XD, _ in pending.on_the_way()
        ]


class TableRows(torch.autograd.Function):
    """rows_ND -> the same; their gradient goes to `pending` of `gradients`. link: makes autograd come back
    here, gets none."""

    @staticmethod
    def forward(
        ctx: Any, link: Tensor, rows: Tensor, gradients: "RowGradients | Columns", pending: Pending
    ) -> Tensor:
        ctx.gradients, ctx.pending = gradients, pending
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grads: Tensor) -> tuple[None, ...]:
        ctx.gradients.come(ctx.pending, grads.reshape(-1, grads.shape[-1]))
        return None, None, None, None


class RowGradients:
    """Collects the gradients of one table's lookups, as backward passes bring them, and hands them out.

    anchor: the parameter of one zero that stands for the table among its model's: it says whether the table
    trains, and has a gradient (of zero) while rows have some, so that whoever clears the gradients of the
    model's parameters clears those of the rows. frozen: rows, ascending, that get none. owned: an optimizer
    takes them.
    """

    def __init__(self, name: str, num_rows: int, counters: Counters, anchor: nn.Parameter) -> None:
        self.name, self.num_rows, self.counters = name, num_rows, counters
        self.owned, self._told = False, set[str]()
        self.frozen: list[int] = []
        self.factor = 1.0
        self.plan: UpdatePlan | None = None
        self.columns: Columns | None = None
        self._link = torch.zeros(0, requires_grad=True)
        self._lookups: list[Pending] = []
        self._coming: list[tuple[Pending, Tensor, torch.cuda.Event | None]] = []
        self._lock = threading.Lock()
        self._applied = self._stale = self._lost = self._exposed = False
        self._mark: tuple[Tensor, int] | None = None
        self._zero: Tensor | None = None
        self.anchor = anchor
        watch = weakref.WeakMethod(self._notice)

        def notice(_: Tensor) -> None:
            if (call := watch()) is not None:
                call()

        anchor.register_post_accumulate_grad_hook(notice)

    def move_to(self, anchor: nn.Parameter) -> None:
        """Take the anchor as it is after it was moved or cast."""
        self.anchor, self._zero = anchor, None

    @property
    def trains(self) -> bool:
        """Is the table not frozen?"""
        return self.anchor.requires_grad

    def shares_all(self, columns: Columns) -> bool:
        """Are there no gradients but of lookups in these tables at once?"""
        return not self._lookups and self.columns is columns and self.owned and self.trains

    def __bool__(self) -> bool:
        self._settle()
        return self._has_some()

    def _has_some(self) -> bool:
        return bool(self._lookups) or (self.columns is not None and self.columns.has(self))

    def tensors(self) -> list[Tensor]:
        """Return what backwards have brought so far, on whatever devices, as it is."""
        self._settle()
        self.hand_out()
        leaves = [lookup.leaf_UD.grad for lookup in self._lookups if lookup.leaf_UD is not None]
        came = [grads_XD for lookup in self._lookups for grads_XD, _ in lookup.grads]
        return came + [grad for grad in leaves if grad is not None]

    def hand_out(self) -> None:
        """Take the own share of lookups in several tables, and have the other tables take theirs."""
        if self.columns is not None and self.columns.shared:
            self.columns.hand_out()

    def add(self, pending: Pending) -> None:
        """Count in a lookup whose gradients are there."""
        if pending not in self._lookups:
            self._lookups.append(pending)

    def clear(self) -> None:
        """Forget all gradients, and with them that there were some."""
        self._drop()
        self._lost = False
        self.anchor.grad = None

    def expect(self) -> bool:
        """Will gradients of a lookup that is made now be wanted? Those of steps before are let go, with a
        warning, where no optimizer takes them."""
        if not (torch.is_grad_enabled() and self.trains):
            return False
        if not self.owned and self._has_some():
            self._tell(
                "its rows get gradients and nothing trains them: a table is no parameter of the model. Give "
                "it a row optimizer before the first step, rows = "
                "dphybrid.embedding.make_row_optimizer('adagrad', find_tables(model), lr=0.1), and "
                "call rows.zero_grad() and rows.step() beside the dense optimizer's; or freeze it, "
                "table.requires_grad_(False); or look up under torch.no_grad()"
            )
            self.clear()
        return True

    def remember(self, rows: Tensor, pending: Pending, columns: Columns | None = None) -> Tensor:
        """Return looked-up rows whose gradients will be collected. columns: by these tables' lookups at
        once."""
        linked: Tensor = TableRows.apply(self._link, rows, columns or self, pending)
        return linked

    def watch(self, leaf_UD: Tensor, pending: Pending) -> Tensor:
        """Return rows on a device, a leaf whose gradients will be collected."""

        def come(leaf_UD: Tensor) -> None:
            self.come(pending, None)
            pending.leaf_UD = leaf_UD

        leaf_UD.requires_grad_().register_post_accumulate_grad_hook(come)
        return leaf_UD

    def come(self, pending: Pending, grads_XD: Tensor | None) -> None:
        """Count in a lookup whose gradients a backward pass brings (None: to its leaf); replicas' passes do
        so side by side."""
        with self._lock:
            self.hand_out()
            self.arrive()
            if grads_XD is not None:
                pending.add(grads_XD)
            self.add(pending)

    def arrive(self) -> None:
        """Let go of what was cleared, and have the anchor say that there are gradients."""
        if self._mark is not None:  # else nothing has come since all was cleared
            self._settle()
            self._stale |= self._applied
        if self._lost:
            if self.owned:
                self._tell(
                    "gradients of its rows were cleared by zero_grad() of the model or of a dense optimizer "
                    "made of all its parameters before the row optimizer had applied them; call rows.step() "
                    "first, or give the dense optimizer the parameters of "
                    "dphybrid.embedding.dense_parameters(model) alone"
                )
            self._lost = False
        if self._mark is None or self.anchor.grad is None:
            self._say_so()

    def _say_so(self) -> None:
        """Have the anchor say that there are gradients, by a zero that is used again until somebody changes
        it."""
        if self.anchor.grad is None:
            if self._zero is None or self._zero._version:
                self._zero = torch.zeros_like(self.anchor)
            self.anchor.grad = self._zero
        self._notice()

    def replace(self, ids_U: Tensor, grads_UD: Tensor) -> None:
        """Put other gradients in the place of all collected ones."""
        self._drop()
        self.merged(ids_U, grads_UD)
        self._say_so()

    def merged(self, ids_U: Tensor, grads_UD: Tensor, *, fixed: bool = True) -> None:
        """Put their own sum in the place of all collected ones. fixed: nobody changes it from now on."""
        self.hand_out()
        for lookup in self._lookups:
            lookup.forget()
        pending = Pending(ids_U)
        pending.add(grads_UD, fixed=fixed)
        self._lookups = [pending]

    def exposed(self, like: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return (ids_U, grads_UD), for all to see and change in place, or None where there are none. like:
        the table's rows."""
        if not self:
            return None
        self.hand_out()
        if not self._exposed or len(self._lookups) > 1 or self.factor != 1.0:
            dtype = torch.float32 if like.dtype == torch.bfloat16 else like.dtype
            arranged, _ = arrange_gradients([self], dtype)
            grads_UD = native.sum_rows(arranged, like.shape[1], dtype)[0].mul_(self.factor)
            self.merged(arranged.keys_U, grads_UD, fixed=False)
            self.factor, self._exposed, self.owned = 1.0, True, True
        (pending,) = self._lookups
        return pending.ids_N, pending.grads[0][0]

    def start_update(self) -> None:
        """Refuse to apply gradients that an update has applied already, or that were cleared unseen. Raises
        UserError."""
        if not self._applied and self._as_marked():
            return
        has_some = bool(self)
        if self._lost and not has_some:
            self._lost = False
            raise UserError(
                f"table {self.name!r}: the gradients of its rows were cleared by zero_grad() of the model or "
                "of a dense optimizer before the row optimizer applied them; call rows.step() first, or give "
                "the dense optimizer the parameters of dphybrid.embedding.dense_parameters(model) alone"
            )
        if self._applied:
            raise UserError(
                f"table {self.name!r}: gradients from before the last update are still there"
                f"{', and new ones were added' if self._stale else ''}; call zero_grad() of the row "
                "optimizer (or of the model) in every step, after the update or before backward()"
            )
        if has_some and not self._exposed and not self._as_marked():
            self._tell(
                "the gradients of the model's parameters were changed in place and those of the rows "
                "were not: clip both with dphybrid.embedding.clip_grad_norm_(model.parameters(), "
                "find_tables(model), max_norm) instead of torch's; of a GradScaler, call unscale_ and "
                "step for the row optimizer, too"
            )
        self._notice()

    def updated(self) -> None:
        """Note that what is there has been applied."""
        self._applied = self._has_some()

    def scale(self, factor: float) -> None:
        """Multiply all gradients, as has been done with those of the model's parameters."""
        self.factor *= factor
        self._notice()

    def _drop(self) -> None:
        for lookup in self._lookups:
            lookup.forget()
        self._lookups, self.factor, self._mark = [], 1.0, None
        if self.columns is not None and self.columns.shared:
            self.columns.clear(self)
        self._applied = self._stale = self._exposed = False

    def _notice(self) -> None:
        """Take the anchor's gradient, as it is now, for one that nobody has changed."""
        self._mark = None if (grad := self.anchor.grad) is None else (grad, grad._version)

    def _as_marked(self) -> bool:
        grad = self.anchor.grad
        return (
            grad is not None
            and self._mark is not None
            and grad is self._mark[0]
            and grad._version == self._mark[1]
        )

    def _settle(self) -> None:
        """Let go of gradients that were cleared by clearing those of the model's parameters."""
        grad = self.anchor.grad
        if grad is None:
            if not self._has_some():
                return
            lost = not self._applied and not self._exposed
            self._drop()
            self._lost = lost
        elif self._applied and not self._as_marked() and self._has_some():
            self._drop()  # set to zero in place

    def _tell(self, what: str) -> None:
        if what not in self._told:
            self._told.add(what)
            warnings.warn(f"table {self.name!r}: {what}", stacklevel=3)

    def arrived(self, segments: Sequence[Segment]) -> None:
        """Put gradients on the host in the place of the same ones on devices: they come once."""
        came = [Pending(segment.ids_N) for segment in segments]
        for lookup, segment in zip(came, segments, strict=True):
            lookup.add(segment.rows_XD)
        for old in self._lookups:
            old.forget()
        self._lookups = [*came]

    def start(self) -> None:
        """Start copying what is on devices."""
        self._settle()
        self.hand_out()
        self._lookups.sort(key=lambda lookup: lookup.number)
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
        by_table = [table.segments(dtype) for table in tables]
        if planned := arrange_planned([table.plan for table in tables], by_table, first_keys[:-1]):
            return planned, first_keys[:-1]
        for own, first_key in zip(by_table, first_keys, strict=False):
            segments += [(segment, first_key) for segment in own]
    frozen = [key + row for key, table in zip(first_keys, tables, strict=False) for row in table.frozen]
    return native.arrange(segments, first_keys[-1], frozen), first_keys[:-1]


def merge_gradients(tables: Sequence[RowGradients], dim: int, dtype: torch.dtype) -> Tensor:
    """Sum the gradients of each row of several tables, in the place of those of single lookups; return the
    squares (float64) of the rows' norms.
    """
    arranged, first_keys = arrange_gradients(tables, dtype)
    parts = parts_of_tables(arranged, first_keys)
    if isinstance(arranged, Planned):  # the update sums them again, as they lie: they are read once
        for table, own in zip(tables, arranged.segments, strict=True):
            table.arrived(own)
        squares_U = native.square_rows(arranged, dim, dtype)
    else:
        sums_UD, squares_U = native.sum_rows(arranged, dim, dtype)
        for table, first_key, part in zip(tables, first_keys, parts, strict=True):
            table.merged(arranged.keys_U[part] - first_key, sums_UD[part])
    for table, part in zip(tables, parts, strict=True):
        if table.factor != 1.0:
            squares_U[part] *= table.factor * table.factor
    return squares_U


def parts_of_tables(arranged: Arranged, first_keys: Sequence[int]) -> list[slice]:
    """Return which of the keys belong to each table."""
    if len(first_keys) == 1:
        return [slice(None)]
    cuts = torch.searchsorted(arranged.keys_U, torch.tensor([*first_keys, 2**62])).tolist()
    return [slice(start, stop) for start, stop in itertools.pairwise(cuts)]
