"""A table's rows as others see them: a tensor like any other, but for what would train it behind the table's
back.

Autograd does not see a table, so a loss made of its weight by hand would lose that part of its gradient
without a word. A `TableWeight` says so in the backward pass, and gives the gradients of its rows to those
that ask for `weight.grad`.
"""

import weakref
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils import _pytree as nests

from dphybrid.embedding.gradients import RowGradients
from dphybrid.util.errors import UserError

_VIEWS = {
    *("__getitem__", "T", "mT", "H", "mH", "t", "view", "view_as", "reshape", "flatten", "unflatten"),
    *("narrow", "select", "diagonal", "unsqueeze", "squeeze", "split", "tensor_split", "chunk", "unbind"),
    *("as_strided", "transpose", "swapaxes", "permute", "movedim", "expand", "expand_as"),
}
_COPIES = {
    *("detach", "clone", "numpy", "tolist", "item", "copy_", "__array__", "__deepcopy__", "__reduce_ex__"),
    *("__repr__", "__format__", "__len__", "equal", "allclose", "isfinite", "isnan"),
}
"""What looks at values or copies them outright: no gradient is expected of it."""
_HOOKS = {"register_hook", "register_post_accumulate_grad_hook", "retain_grad"}


class TableWeight(Tensor):
    """The rows (num_rows, dim) of a table, or a view of some, without a copy.

    Writing to it changes the table; so does what is done under `torch.no_grad`. What is computed from it
    with gradients enabled raises UserError when a gradient comes back. `grad` is that of nn.Embedding with
    sparse=True; `requires_grad` freezes the table or lets it train.
    """

    _rows: Tensor
    _gradients: RowGradients
    _table: "weakref.ref[Any] | None"

    @classmethod
    def of(cls, rows: Tensor, gradients: RowGradients, table: nn.Module | None = None) -> Self:
        """Return `rows` as a weight. table: whose rows they all are; None for a view of some."""
        weight = rows.as_subclass(cls)
        weight._rows, weight._gradients = rows, gradients
        weight._table = None if table is None else weakref.ref(table)
        return weight

    def hold(self, rows: Tensor) -> None:
        """Stand for other rows from now on: an optimizer that knows this weight goes on with them."""
        self._rows = rows

    @property
    def rows(self) -> Tensor:
        """The rows as a plain tensor."""
        return self._rows

    @property
    def table(self) -> Any:
        """The table, where these are all of its rows."""
        return None if self._table is None else self._table()

    @property
    def requires_grad(self) -> bool:
        return self._gradients.trains

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self._gradients.anchor.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Let the table train, or freeze it."""
        self._gradients.anchor.requires_grad_(requires_grad)
        return self

    @property
    def grad(self) -> Tensor | None:
        """The gradients of the rows since the last clearing, as a coalesced sparse tensor whose values may be
        changed in place."""
        if self._table is None or (found := self._gradients.exposed(self._rows)) is None:
            return None
        ids_U, grads_UD = found
        sparse = torch.sparse_coo_tensor(
            ids_U[None], grads_UD, self._rows.shape, is_coalesced=True, check_invariants=False
        )
        return Tensor._make_subclass(_WeightGrad, sparse)  # as_subclass knows no sparse tensors

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is None:
            self._gradients.clear()
            return
        if not value.is_sparse:
            raise UserError(
                f"table {self._gradients.name!r}: weight.grad = a tensor over all its rows; give "
                "set_row_gradients(ids, grads) those of some rows"
            )
        value = value.coalesce()
        self._gradients.replace(value.indices()[0], value.values())

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = _name(func)
        found = [value for value in nests.tree_leaves((args, kwargs)) if isinstance(value, TableWeight)]
        weight = found[0]
        for each in found:
            if (table := each.table) is not None:
                table.ahead.finish()  # rows that are still being updated

        def call(of: Callable[[TableWeight], Tensor]) -> Any:
            plain = nests.tree_map_only(TableWeight, of, (list(args), kwargs))
            return func(*plain[0], **plain[1])

        if func is torch.autograd.grad:
            raise UserError(
                f"table {weight._gradients.name!r}: torch.autograd.grad of its weight; take that of the "
                "looked-up rows, rows = table(ids), or call backward() and table.row_gradients()"
            )
        if name in _HOOKS:
            raise UserError(
                f"table {weight._gradients.name!r}: {name} of its weight would never be called; put it on "
                "the looked-up rows"
            )
        written = args[0] if args and _writes(name) else kwargs.get("out")
        if isinstance(written, TableWeight):
            with torch.no_grad():
                return _as_weight(call(_rows), written)
        with torch._C.DisableTorchFunctionSubclass():
            if name in _VIEWS and isinstance(args[0], TableWeight):
                result = call(_rows)
                memory = weight._rows.untyped_storage().data_ptr()
                views = [value for value in nests.tree_leaves(result) if isinstance(value, Tensor)]
                if all(view.untyped_storage().data_ptr() == memory for view in views):
                    return nests.tree_map_only(Tensor, lambda view: _as_weight(view, weight), result)
            if not torch.is_grad_enabled() or name in _COPIES or name == "__get__":
                return call(_rows)
            result = call(_linked)
            # What did nothing, .float() of float32 say, returns the leaf itself.
            untouched = isinstance(result, Tensor) and result.is_leaf and result.requires_grad
            return weight if untouched else result


class _WeightGrad(Tensor):
    """The sparse gradient of a weight. torch's clip_grad_norm_ and clip_grad_value_, which refuse sparse
    gradients, take it: what they call goes by its values."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if getattr(func, "__name__", "") in _CLIPPING and isinstance(args[0], _WeightGrad):
                result = func(args[0]._values(), *args[1:], **(kwargs or {}))
                return args[0] if _writes(func.__name__) else result
            return func(*args, **(kwargs or {}))


_CLIPPING = {"linalg_vector_norm", "mul_", "clamp_"}
"""What torch's clipping calls on gradients."""


def _name(func: Callable[..., Any]) -> str:
    name = getattr(func, "__name__", "")
    if name == "__get__":  # of a property: .T is a view, .shape is none
        name = getattr(getattr(func, "__self__", None), "__name__", name)
        return name if name in _VIEWS else "detach" if name == "data" else "__get__"
    return name


def _writes(name: str) -> bool:
    """Does a function of this name change its first argument in place?"""
    return name in ("__setitem__", "__set__") or (
        name.endswith("_") and (not name.endswith("__") or name.startswith("__i"))
    )


def _rows(weight: TableWeight) -> Tensor:
    return weight._rows


def _linked(weight: TableWeight) -> Tensor:
    """The rows as a leaf that says what to do when a gradient comes back."""
    gradients = weight._gradients
    if not gradients.trains or not weight._rows.is_floating_point():
        return weight._rows

    def refuse(_: Tensor) -> None:
        raise UserError(
            f"table {gradients.name!r}: a gradient reached its weight, which was used by hand in the loss "
            "and is no parameter: it would be lost. Use the looked-up rows, rows = table(ids), in the loss "
            "(to penalise them, too, or set the row optimizer's weight_decay); give an output layer a weight "
            "of its own instead of a tied one; or say table.weight.detach() where no gradient is wanted"
        )

    leaf = weight._rows.detach().requires_grad_()
    leaf.register_hook(refuse)
    return leaf


def _as_weight(value: Any, weight: TableWeight) -> Any:
    """The weight itself where the value is its rows, else a weight of the same table for a view of them."""
    if value is weight._rows:
        return weight
    return TableWeight.of(value, weight._gradients) if isinstance(value, Tensor) else value
