"""Compares a batch split over devices with the same batch unsplit, to find modules that compute something
else when they run as replicas.

Each data-parallel block trains for two steps with its own input of the batch, in the mode that it is in: one
copy of it unsplit, another one split. Compared is what leaves the block, the outputs and gradients of all its
calls, and what it keeps for the next call. The module to blame is looked for only after a difference.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dphybrid.parallel.applying import as_replica
from dphybrid.parallel.chance import ExpectedValues, own_random_state
from dphybrid.parallel.check import Finding
from dphybrid.parallel.copies import Key, copied, copied_module, itself, same, state_of, unchanged
from dphybrid.parallel.data_parallel import DataParallel, find_data_parallel
from dphybrid.parallel.gathering import gather
from dphybrid.parallel.nests import Whole, batch_rows, joined, leaves, map_leaves, map_tensors, named_inputs
from dphybrid.parallel.replication import copied_and_shared, replicate_modules
from dphybrid.parallel.scattering import is_table, split
from dphybrid.parallel.splits import split_sizes
from dphybrid.util.errors import UserError, counted, type_text
from dphybrid.util.memory import is_out_of_memory

NOT_COMPARED = "not compared"
"""`Finding.where` of a block that the batch does not split."""

_ERRORS = ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError

_Event = tuple[str, str, list[Tensor]]
"""(module to blame if the tensors differ, what they are, the tensors)."""


def compare_split(
    model: nn.Module, *args: object, rtol: float = 1e-3, atol: float = 1e-4, **kwargs: object
) -> list[Finding]:
    """Call `model` on one batch and compare each data-parallel block in it, unsplit against split. Return,
    for each block that differs, the first place where it does, and each block that was not compared.

    model: a `DataParallel` or a module that contains some, in the mode to compare. Parameters, gradients,
    buffers, attributes, modes and all random generators stay as they are; hooks run. Two copies of a
    block take two steps on its first device, with the memory of a whole batch; one with a single device is
    compared in two shares. BatchNorm, which normalises each share by itself, is compared with its running
    statistics. rtol, atol: tolerances for float32, relative to a value and to the largest one of its tensor;
    float64 is held to 1e-9. Raises UserError for a model with parameters that have no size yet.
    """
    if lazy := [name for name, parameter in model.named_parameters() if is_lazy(parameter)]:
        raise UserError(f"compare_split: {lazy[0]} has no size yet; call the model with a sample first")
    blocks = find_data_parallel(model)
    calls: dict[str, list[Any]] = {name: [] for name in blocks}
    with torch.inference_mode(False), torch.enable_grad():
        # Inputs of blocks come from the model around them, so one call of the whole model collects them.
        with unchanged(model), ExitStack() as hooks:
            for name, block in blocks.items():

                def keep(block: Any, args: Any, kwargs: Any, name: str = name) -> None:
                    given = joined(block.with_wholes(args, kwargs), block.devices.home, block.dim)
                    calls[name].append(_leaves_of_graph(given))

                hooks.callback(block.register_forward_pre_hook(keep, with_kwargs=True).remove)
                hooks.enter_context(own_random_state(block.devices.home))
            model(*args, **kwargs)
        with unchanged(model):
            found = [
                _Comparison(name, block, calls[name], itself(model)).finding(rtol, atol)
                for name, block in blocks.items()
            ]
    return [finding for finding in found if finding is not None]


def check_split(model: nn.Module, *args: object, **kwargs: Any) -> None:
    """Raise UserError with what breaks by `compare_split` on this batch, and for a model or a batch of which
    nothing is split. For one line in your own loop: `check_split(model, batch)` before the first step."""
    if not (blocks := find_data_parallel(model)):
        raise UserError(
            f"check_split: {type_text(model)} contains no DataParallel, so nothing would be split or "
            "compared; give the model whose blocks are wrapped: DataParallel(blocks, devices)"
        )
    found = compare_split(model, *args, **kwargs)
    refuse_differences(found)
    if len(missed := [finding for finding in found if finding.where == NOT_COMPARED]) == len(blocks):
        raise UserError("\n".join(["check_split compared nothing:", *(each.text() for each in missed)]))


def refuse_differences(found: Sequence[Finding], *more: str) -> None:
    """Raise UserError with the findings that break, if there are any. more: further lines of the message."""
    if wrong := [finding.text() for finding in found if finding.breaks]:
        lines = ["the model computes something else when the first batch is split:", *wrong, *more]
        raise UserError("\n".join(lines))


class _Comparison:
    """Compares one block, unsplit and split. calls: (args, kwargs) of each of its calls. around: a memo with
    what copies of the block share with it, see `itself`."""

    def __init__(self, name: str, block: DataParallel, calls: list[Any], around: dict[int, Any]) -> None:
        self.name, self.module, self.calls, self.around = name, block.module, calls, around
        self.home, self.dim, self.count = block.devices.home, block.dim, max(2, len(block.devices))
        self.rows = [batch_rows(args, kwargs, block.dim) or 0 for args, kwargs in calls]
        self.sizes = [split_sizes(rows, self.count) if rows else [] for rows in self.rows]
        self.mode = ExpectedValues()

    def finding(self, rtol: float, atol: float) -> Finding | None:
        """Return the first difference, or None."""
        self.rtol, self.atol = rtol, atol
        if (most := max(self.rows, default=0)) > 1:
            return self._difference()
        problem = f"its batch has {counted(most, 'row')}, which several devices cannot share"
        if not self.calls:
            problem = "the model does not call it with this batch"
        remedy = f"give a batch of at least {self.count} rows that reaches it"
        return self._found(NOT_COMPARED, problem, remedy, breaks=False)

    def _difference(self) -> Finding | None:
        whole, parted = (copied_module(self.module, self.around) for _ in range(2))
        for step in (1, 2):
            outputs: tuple[list[Tensor], list[Tensor]] = [], []
            for call, sizes in zip(self.calls, self.sizes, strict=True):
                memo = self.around | itself(whole)
                before = {key: copied(value, memo) for key, value in state_of(whole).items()}
                one = _tensors(self._call(whole, self._here(call)))
                try:
                    output, replicas = self._split_call(parted, call, sizes)
                except _ERRORS as error:
                    if is_out_of_memory(error):
                        raise
                    return self._fails(error, sizes)
                two, states = _tensors(output), map(state_of, (whole, parted, *replicas))
                written = self._written(before, *states)
                if by := self._distances(one, two):
                    return self._blamed(call, sizes) or written or self._differs("its output", by, sizes)
                if written:
                    return written
                outputs[0].extend(one)
                outputs[1].extend(two)
            if step == 1 and (found := self._gradients((whole, parted), outputs)):
                return found
        return None

    # A call, unsplit and split

    def _call(self, module: nn.Module, given: Any, index: int = 0, sizes: Sequence[int] = (0,)) -> Any:
        """Call a module with (args, kwargs), as replica `index` of a batch that is split into `sizes`."""
        with own_random_state(self.home), as_replica(index, len(sizes), sizes), self.mode:
            return module(*given[0], **given[1])

    def _split_call(self, module: nn.Module, call: Any, sizes: list[int]) -> tuple[Any, list[nn.Module]]:
        """Return the joined output and the replicas, like a forward of `DataParallel`."""
        if not sizes:  # no tensor, or an empty batch
            return self._call(module, self._here(call)), [module]
        devices = (self.home,) * len(sizes)
        parts, tables = copied_and_shared(module)
        replicas = replicate_modules(parts, devices, detach=False, tables=tables)
        shares = enumerate(split(call, devices, sizes, self.dim))
        outputs = [self._call(replicas[index], share, index, sizes) for index, share in shares]
        return gather(outputs, self.home, self.dim, sizes), replicas

    def _here(self, call: Any) -> Any:
        return map_tensors(lambda tensor: tensor.to(self.home, copy=True), call)

    # What is compared

    def _gradients(
        self, modules: tuple[nn.Module, nn.Module], outputs: tuple[list[Tensor], list[Tensor]]
    ) -> Finding | None:
        """Compare the gradients of parameters and inputs; take a step with them in both copies, so that the
        second one starts from other weights."""
        tables = {
            f"{name}.{key}": weight
            for name, part in self.module.named_modules()
            if is_table(part)
            for key, weight in part.named_parameters(recurse=False)
            if weight.requires_grad
        }
        trained = (name for name, parameter in self.module.named_parameters() if parameter.requires_grad)
        names = [name for name in trained if name not in tables]
        named = [
            (f"its {path}" if path.startswith("input ") else f"its input {path}", tensor)
            for call in self.calls
            for path, leaf in named_inputs(*call)
            for tensor in _tensors(leaf.value if isinstance(leaf, Whole) else leaf)
            if tensor.requires_grad
        ]
        paths = [*(path for path, _ in named), *tables]
        inputs = [*(tensor for _, tensor in named), *tables.values()]
        parameters = [[module.get_parameter(name) for name in names] for module in modules]
        one, two = (self._backward(o, [*p, *inputs]) for o, p in zip(outputs, parameters, strict=True))
        largest = max([1.0, *(_largest(grad) for grad in (*one, *two) if grad is not None)])
        for what, a, b in zip((*names, *paths), one, two, strict=True):
            by = 0.0 if a is b else float("inf") if a is None or b is None else self._distance(a, b, largest)
            if by:
                return self._differs(f"the gradient of {what}", by, max(self.sizes, key=len))
        with torch.no_grad():
            for grad, a, b in zip(one, *parameters, strict=False):
                if grad is not None and (steepest := _largest(grad)) > 0:
                    change = grad.nan_to_num(0.0, 0.0, 0.0) * (0.01 * (_largest(a) or 1.0) / steepest)
                    a -= change
                    b -= change
        return None

    def _backward(self, outputs: list[Tensor], wanted: list[Tensor]) -> list[Tensor | None]:
        """Return the gradients of a sum of the outputs with fixed factors, no two rows' alike."""
        draws = torch.Generator().manual_seed(0)
        total = torch.zeros((), dtype=torch.float64, device=self.home)
        for output in outputs:
            if output.requires_grad:
                dense = output.to_dense() if output.is_sparse else output
                dense = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
                factors = torch.rand(dense.shape, generator=draws, dtype=torch.float32, device="cpu") + 0.5
                total = total + (dense * factors.to(dense)).sum().to(total)
        for tensor in wanted:
            tensor.grad = None
        if total.requires_grad:
            with self.mode:  # activation checkpointing computes forwards again; it refuses autograd.grad
                total.backward()
        return [None if tensor.grad is None else _whole(tensor.grad) for tensor in wanted]

    def _written(
        self, before: dict[Key, Any], after: dict[Key, Any], parted: dict[Key, Any], *held: dict[Key, Any]
    ) -> Finding | None:
        """Find state that a forward writes and replicas lose. before, after: of the unsplit copy. parted: of
        the split one. held: of its replicas. What all replicas write alike is no such state, unless it is a
        parameter: a cache depends only on the module."""
        for key, value in after.items():
            if trained := isinstance(value, nn.Parameter):
                if value is not before.get(key):
                    problem = "forward makes this parameter, and replicas lose it: it would not be trained"
                    remedy = "make it in __init__, or call the module with a sample before it is wrapped"
                    return self._found(key[1], problem, remedy, key[0])
            elif same(value, before.get(key)):
                continue
            if not all(same(value, of.get(key), 1e-6) for of in ((parted, *held) if trained else held)):
                problem = "forward writes it, and all replicas but the first lose what they write"
                remedy = "return the value, or keep it outside of the data-parallel block"
                return self._found(key[1], problem, remedy, key[0])
        return None

    def _distances(self, one: list[Tensor], two: list[Tensor]) -> float:
        if len(one) != len(two):
            return float("inf")
        return max((self._distance(a, b) for a, b in zip(one, two, strict=True)), default=0.0)

    def _distance(self, one: Tensor, two: Tensor, largest: float = 1.0) -> float:
        """Return the largest absolute difference beyond the tolerances, or 0. What is a rounding
        error beside `largest` is no difference."""
        if one.shape != two.shape:
            return float("inf")
        if one.layout is not torch.strided or two.layout is not torch.strided:
            one, two = one.to_dense(), two.to_dense()
        rtol = atol = eps = 0.0  # of whole numbers
        if one.is_floating_point() or one.is_complex():
            eps = max(self.mode.eps, torch.finfo(one.dtype).eps)
            # Rounding errors of float64 are far below these.
            rtol, atol = (max(t, 4 * eps) if eps > 1e-9 else min(t, 1e-9) for t in (self.rtol, self.atol))
        one, two = (each.detach().to(torch.promote_types(each.dtype, torch.float64)) for each in (one, two))
        alike = (one == two) | (one.isnan() & two.isnan())
        apart = torch.where(alike, 0.0, (one - two).abs()).nan_to_num(float("inf"))
        own = max(_largest(one), _largest(two))
        allowed = rtol * two.abs().nan_to_num(0.0, 0.0, 0.0) + max(atol * own, 4 * eps * largest)
        return float(torch.where(apart > allowed, apart, 0.0).max()) if one.numel() else 0.0

    # What a difference is blamed on

    def _blamed(self, call: Any, sizes: list[int]) -> Finding | None:
        """Return the first place inside of the block whose values differ, in copies without what earlier
        calls have left; None if nothing differs there."""
        if self._by_chance(call, sizes):
            problem = "draws random numbers that are not torch's, so split and unsplit could not be compared"
            remedy = "draw them with torch, or pass them in as an input"
            return self._found("its output", problem, remedy, breaks=False)
        whole = self._events(self._here(call))
        shares = enumerate(split(call, [self.home] * len(sizes), sizes, self.dim))
        parts = [self._events(share, index, sizes) for index, share in shares]
        for index, (module, what, tensors) in enumerate(whole):
            of_shares = [events[index] if index < len(events) else ("", "", []) for events in parts]
            by = float("inf")
            if all(of[:2] == (module, what) and len(of[2]) == len(tensors) for of in of_shares):
                columns = zip(tensors, *(of[2] for of in of_shares), strict=True)
                by = max((self._apart(tensor, pieces) for tensor, *pieces in columns), default=0.0)
            if by:
                return self._differs(what, by, sizes, module)
        return None

    def _events(self, given: Any, index: int = 0, sizes: Sequence[int] = (0,)) -> list[_Event]:
        """Return what goes into and comes out of each part of a new copy, in the order of the calls."""
        module = copied_module(self.module, self.around)
        names = {id(part): name for name, part in module.named_modules()}
        events, stack = list[_Event](), [""]

        def values(nest: object) -> list[Tensor]:
            return [tensor.detach().clone() for tensor in _tensors(nest)]

        def enter(part: nn.Module, args: object, kwargs: object) -> None:
            name = names.get(id(part), "")
            if part is not module:  # a part's inputs were computed by the part around it, which is to blame
                events.append((stack[-1], f"its input to {name}", values((args, kwargs))))
            stack.append(name)

        def leave(*of_call: object) -> None:
            events.append((stack.pop(), "its output", values(of_call[-1])))

        for part in module.modules():
            part.register_forward_pre_hook(enter, with_kwargs=True)
            part.register_forward_hook(leave)
        self._call(module, given, index, sizes)
        return events

    def _apart(self, whole: Tensor, parts: list[Tensor]) -> float:
        """Return the smallest difference between a tensor and its shares, joined in one way or another.

        Inside of a block the batch may be on any dim, or flattened, so shares are joined on each dim that
        allows it. A tensor that is the same in all shares, such as a mask, is compared as it is.
        """
        if whole.is_nested or whole.layout is not torch.strided:
            return 0.0
        found = [max(self._distance(whole, part) for part in parts)]
        for axis in range(whole.dim()):
            rests = {(*part.shape[:axis], ..., *part.shape[axis + 1 :]) for part in (whole, *parts)}
            if len(rests) == 1:
                found.append(self._distance(whole, torch.cat(parts, axis)))
        return min(found)

    def _by_chance(self, call: Any, sizes: list[int]) -> bool:
        """Return whether random numbers may explain a difference: the unsplit module gives something else
        with another seed, and the first share's rows do not depend on the other rows."""

        def repeated(leaf: Any) -> Any:  # the first share's rows again instead of the others
            if not isinstance(leaf, Tensor) or not leaf.dim():
                return leaf
            rows = torch.arange(leaf.shape[self.dim], device=leaf.device)
            return leaf.index_select(self.dim, rows % sizes[0])

        def output(given: Any, seed: int = 0) -> list[Tensor]:
            with own_random_state(self.home, seed):
                return _tensors(self._call(copied_module(self.module, self.around), self._here(given)))

        def of_first(outputs: list[Tensor]) -> list[Tensor]:
            dense = [each for each in outputs if each.dim() and not each.is_sparse]
            return [t.narrow(self.dim, 0, t.shape[self.dim] * sizes[0] // sum(sizes)) for t in dense]

        one = output(call)
        if not sizes or not self._distances(one, output(call, seed=1)):
            return False
        return not self._distances(of_first(one), of_first(output(map_leaves(repeated, call))))

    def _fails(self, error: Exception, sizes: list[int]) -> Finding:
        problem = f"works for all {sum(sizes)} rows, and fails in shares of {_text(sizes)}: {error}"
        if isinstance(error, UserError):
            return self._found("its output", problem, "return rows of samples")
        remedy = "wrap what all samples share, such as a mask or class weights, in Whole(...)"
        return self._found("its inputs", problem, remedy)

    def _differs(self, what: str, by: float, sizes: list[int], module: str = "") -> Finding:
        shares = f"the batch as a whole and in shares of {_text(sizes)} rows"
        problem = f"differs by {by:.3g} between {shares}: it computes across the batch"
        remedy = "compute that outside of the data-parallel block"
        return self._found(what, problem, f"{remedy}, and wrap what all samples share in Whole(...)", module)

    def _found(self, where: str, problem: str, remedy: str, module: str = "", breaks: bool = True) -> Finding:
        name = ".".join(part for part in (self.name, module) if part) or "the model"
        return Finding(breaks, name, where, problem, remedy)


def _text(sizes: Sequence[int]) -> str:
    return ",".join(map(str, sizes))


def _leaves_of_graph(value: Any) -> Any:
    """Return a nest with copies of its tensors that require a gradient where the tensors do."""

    def copy_of(leaf: Any) -> Any:
        if isinstance(leaf, Whole):
            return Whole(_leaves_of_graph(leaf.value))
        return leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf

    return map_leaves(copy_of, value)


def _tensors(value: object) -> list[Tensor]:
    return [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)]


def _whole(grad: Tensor) -> Tensor:
    """Return a gradient without a layout of its own: of a large table, its batch's rows alone."""
    if not grad.is_sparse:
        return grad
    rows = grad.coalesce()
    return rows.to_dense() if rows.numel() <= 2**20 else rows.values()


def _largest(tensor: Tensor) -> float:
    finite = tensor.detach().abs().nan_to_num(0.0, 0.0, 0.0)
    return float(finite.max()) if finite.numel() else 0.0
