"""Compares a batch split over devices with the same batch unsplit, to find modules that compute something
else when they run as replicas.

Each data-parallel block is computed with its own input of the batch, in the mode that it is in. Compared are
the outputs of each part of the module, the gradients of its parameters, and what the forward writes.
Neither way draws random numbers: torch's draws are replaced by their expected values, so dropout keeps
everything.
"""

import copy
import inspect
import random
import sys
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode

from dphybrid.parallel.applying import as_replica
from dphybrid.parallel.check import OF_TORCH, Finding
from dphybrid.parallel.data_parallel import DataParallel, find_data_parallel
from dphybrid.parallel.gathering import gather
from dphybrid.parallel.nests import PLAIN, batch_rows, joined, leaves, map_leaves, map_tensors
from dphybrid.parallel.replication import replicate_modules
from dphybrid.parallel.scattering import split
from dphybrid.parallel.splits import split_sizes
from dphybrid.util.errors import UserError, type_text
from dphybrid.util.memory import is_out_of_memory


def compare_split(
    model: nn.Module, *args: object, rtol: float = 1e-3, atol: float = 1e-4, **kwargs: object
) -> list[Finding]:
    """Call `model` on one batch and compare each data-parallel block in it, unsplit against split. Return,
    for each block that differs, the first place where it does.

    model: a `DataParallel` or a module that contains some, in the mode to compare. Parameters, gradients,
    buffers, attributes, modes and all random generators stay as they are; hooks run. A block is computed once
    for the whole batch and once per share, forward and backward, on its first device, which takes the memory
    of a whole batch there; one with a single device is compared in two shares. BatchNorm, which normalises
    each share by itself, is compared with its running statistics. rtol, atol: tolerances for float32 as in
    `torch.testing.assert_close`; float64 is held to 1e-9. The list is empty if nothing differs or is split.
    """
    calls: dict[str, tuple[tuple[object, ...], dict[str, object]]] = {}
    blocks = find_data_parallel(model)
    homes = [block.devices.home for block in blocks.values()]
    with own_random_state(*homes), _unchanged(model), torch.no_grad(), ExitStack() as hooks:
        for name, block in blocks.items():

            def keep(_: nn.Module, given: Any, named: Any, name: str = name) -> None:
                calls.setdefault(name, (given, named))

            # A block's inputs come from the model around it, so one call of the whole model collects them.
            hooks.callback(block.register_forward_pre_hook(keep, with_kwargs=True).remove)
            hooks.enter_context(block.off_the_record())
        model(*args, **kwargs)
    found = [_Comparison(name, blocks[name], rtol, atol).of(*call) for name, call in calls.items()]
    return [finding for finding in found if finding is not None]


def check_split(model: nn.Module, *args: object, **kwargs: Any) -> None:
    """Raise UserError with the findings of `compare_split` on this batch, if there are any, and for a model
    that splits nothing. For one line in your own loop: `check_split(model, batch)` before the first step."""
    if not find_data_parallel(model):
        raise UserError(
            f"check_split: {type_text(model)} contains no DataParallel, so nothing would be split or "
            "compared; give the model whose blocks are wrapped: DataParallel(blocks, devices)"
        )
    if found := [finding for finding in compare_split(model, *args, **kwargs) if finding.breaks]:
        findings = "\n".join(finding.text() for finding in found)
        raise UserError(f"the model computes something else when the first batch is split:\n{findings}")


_Event = tuple[str, str, list[Tensor]]
"""(module to blame if the tensors differ, what they are, the tensors)."""


@dataclass
class _Run:
    """What a module computed from one input: events in the order of the calls, output, and the replica that
    computed it."""

    replica: nn.Module
    events: list[_Event] = field(default_factory=list)
    output: Any = None


class _Comparison:
    """Compares one block, unsplit and split."""

    def __init__(self, name: str, block: DataParallel, rtol: float, atol: float) -> None:
        self.name, self.block, self.home = name, block, block.devices.home
        self.rtol, self.atol = rtol, atol

    @torch.enable_grad()
    def of(self, args: tuple[object, ...], kwargs: dict[str, object]) -> Finding | None:
        """Return the first difference for a call of the block with these arguments, or None."""
        block, home = self.block, self.home
        args, kwargs = joined(block.with_wholes(args, kwargs), home, block.dim)
        rows = batch_rows(args, kwargs, block.dim) or 0
        if rows < 2:
            return None
        sizes = block.sizes(rows) if len(block.devices) > 1 else split_sizes(rows, 2)
        given = map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, (args, kwargs))
        whole = self._run(self._here(given))
        shares = []
        for index, share in enumerate(split(given, [home] * len(sizes), sizes, block.dim)):
            try:
                shares.append(self._run(share, index, sizes))
            except (RuntimeError, ValueError, IndexError, AssertionError) as error:
                if is_out_of_memory(error):
                    raise
                problem = f"works for all {rows} rows, and fails for a share of {sizes[index]}: {error}"
                remedy = "wrap what all samples share, such as a mask or class weights, in Whole(...)"
                return Finding(True, _dotted(self.name, ""), "its inputs", problem, remedy)
        return (
            self._events(whole, shares, given, sizes)
            or self._outputs(whole, shares, given, sizes)
            or self._writes(whole, shares[0], given)
        )

    def _run(
        self, given: Any, index: int = 0, sizes: tuple[int, ...] | list[int] = (), seed: int = 0
    ) -> _Run:
        replica = _throwaway(self.block.module, self.home)
        names = {id(part): name for name, part in replica.named_modules()}
        run, stack = _Run(replica), [""]

        def copies(value: object) -> list[Tensor]:
            return [tensor.detach().clone() for tensor in _tensors(value)]

        def enter(part: nn.Module, inputs: object, named: object) -> None:
            name = names.get(id(part), "")
            if part is not replica:  # a part's inputs were computed by the part around it, which is to blame
                run.events.append((stack[-1], f"its input to {name}", copies((inputs, named))))
            stack.append(name)

        def leave(*call: object) -> None:
            run.events.append((stack.pop(), "its output", copies(call[-1])))

        with ExitStack() as stack_of_contexts:
            for part in replica.modules():
                # The replica shares these dicts with the original, which would keep the hooks.
                part._forward_pre_hooks_with_kwargs = part._forward_pre_hooks_with_kwargs.copy()
                part._forward_pre_hooks = part._forward_pre_hooks.copy()
                part._forward_hooks = part._forward_hooks.copy()
                part.register_forward_pre_hook(enter, with_kwargs=True)
                part.register_forward_hook(leave)
            stack_of_contexts.enter_context(own_random_state(self.home))
            stack_of_contexts.enter_context(as_replica(index, max(1, len(sizes)), sizes))
            stack_of_contexts.enter_context(_ExpectedValues())
            if seed:
                torch.manual_seed(seed)
                random.seed(seed)
                if numpy := sys.modules.get("numpy"):
                    numpy.random.seed(seed)
            run.output = replica(*given[0], **given[1])
        return run

    def _events(self, whole: _Run, shares: list[_Run], given: Any, sizes: list[int]) -> Finding | None:
        for index, (module, what, tensors) in enumerate(whole.events):
            parts = [run.events[index] if index < len(run.events) else ("", "", []) for run in shares]
            largest = float("inf")
            if all(part[:2] == (module, what) and len(part[2]) == len(tensors) for part in parts):
                shared = zip(*(part[2] for part in parts), strict=True)
                apart = [self._apart(t, list(of)) for t, of in zip(tensors, shared, strict=True)]
                largest = max(apart, default=0.0)
            if largest > 0:
                return self._differs(
                    module, what, largest, sizes, self._by_chance(whole, index, given, sizes)
                )
        return None

    def _outputs(self, whole: _Run, shares: list[_Run], given: Any, sizes: list[int]) -> Finding | None:
        """Compare the joined outputs, and the gradients that go back from them."""
        try:
            output = gather([run.output for run in shares], self.home, self.block.dim, sizes)
        except UserError as error:
            return Finding(True, _dotted(self.name, ""), "its output", str(error), "return rows of samples")
        one, two = _tensors(whole.output), _tensors(output)
        if largest := self._distances(one, two):
            return self._differs("", "its output", largest, sizes, self._by_chance(whole, -1, given, sizes))
        named = dict(self.block.module.named_parameters(remove_duplicate=True))
        wanted = {f"the gradient of {name}": p for name, p in named.items() if p.requires_grad}
        first, second = (_gradients(outputs, list(wanted.values())) for outputs in (one, two))
        for what, a, b in zip(wanted, first, second, strict=True):
            if a is None and b is None:
                continue
            largest = float("inf")
            if a is not None and b is not None:
                a, b = (grad.to_dense() if grad.is_sparse else grad for grad in (a, b))
                # Sums over the batch, in another order: as exact as the largest of them.
                largest = _distance(a, b, self.rtol, self.rtol * _largest(a))
            if largest > 0:
                return self._differs("", what, largest, sizes, False)
        return None

    def _writes(self, whole: _Run, first: _Run, given: Any) -> Finding | None:
        """Find state that the forward writes and replicas lose. A value that depends only on the module, such
        as a cache, is none: it is the same in a share, and a second call does not change it."""
        before = _state(_throwaway(self.block.module, self.home))
        after, of_share = _state(whole.replica), _state(first.replica)
        changed = [key for key, value in after.items() if not _same(value, before.get(key))]
        if not changed:
            return None
        again: dict[tuple[str, str], object] = {}
        stored = {
            (name, f"self.{key}") for name, part in whole.replica.named_modules() for key in part._buffers
        }
        attributes = [key for key in changed if key not in stored]
        if attributes:
            kept = {key: copy.copy(after[key]) for key in attributes}
            with own_random_state(self.home), _ExpectedValues(), torch.no_grad():
                args, kwargs = map_tensors(lambda t: t.detach().to(self.home, copy=True), given)
                whole.replica(*args, **kwargs)
            now = _state(whole.replica)
            again = {key: now.get(key) for key in attributes if not _same(now.get(key), kept[key])}
        for module, what in changed:
            if (module, what) in again or not _same(after[module, what], of_share.get((module, what))):
                problem = "forward writes it, and all replicas but the first lose what they write"
                remedy = "return the value, or keep it outside of the data-parallel block"
                return Finding(True, _dotted(self.name, module), what, problem, remedy)
        return None

    def _by_chance(self, whole: _Run, index: int, given: Any, sizes: list[int]) -> bool:
        """Return whether random numbers may explain a difference: the unsplit module gives something else
        with another seed, and the first share's rows do not depend on the other rows."""
        other = self._run(self._here(given), seed=1)
        same = index < len(other.events) and other.events[index][:2] == whole.events[index][:2]
        if same and not self._distances(whole.events[index][2], other.events[index][2]):
            return False
        dim, rows, first = self.block.dim, sum(sizes), sizes[0]

        def repeated(leaf: Any) -> Any:  # the first share's rows again instead of the others
            if not isinstance(leaf, Tensor) or not leaf.dim():
                return leaf
            return leaf.index_select(dim, torch.arange(rows, device=leaf.device) % first)

        changed = self._run(self._here(map_leaves(repeated, given)))
        one, two = (
            [
                t.narrow(dim, 0, t.shape[dim] * first // rows)
                for t in _tensors(run.output)
                if t.dim() and not t.is_sparse
            ]
            for run in (whole, changed)
        )
        return not self._distances(one, two)

    def _here(self, given: Any) -> Any:
        return map_tensors(lambda t: t.to(self.home, copy=True), given)

    def _distances(self, one: list[Tensor], two: list[Tensor]) -> float:
        if len(one) != len(two):
            return float("inf")
        return max(
            (_distance(a, b, self.rtol, self.atol) for a, b in zip(one, two, strict=True)), default=0.0
        )

    def _differs(self, module: str, what: str, by: float, sizes: list[int], chance: bool) -> Finding:
        where = _dotted(self.name, module)
        if chance:
            return Finding(
                False, where, what,
                "draws random numbers that are not torch's, so split and unsplit could not be compared",
                "draw them with torch, or pass them in as an input",
            )  # fmt: skip
        return Finding(
            True,
            where,
            what,
            f"differs by {by:.3g} between the batch as a whole and in shares of "
            f"{','.join(map(str, sizes))} rows: it computes across the batch",
            "compute that outside of the data-parallel block, and wrap what all samples share in Whole(...)",
        )

    def _apart(self, whole: Tensor, parts: list[Tensor]) -> float:
        """Return the largest absolute difference beyond the tolerances, 0 if there is none.

        Inside of a block the batch may be on any dim, or flattened, so the shares are joined on each dim that
        allows it. A tensor that is the same in all shares, such as a mask, is compared as it is. The smallest
        difference of all these readings counts.
        """
        if whole.is_nested or whole.layout is not torch.strided:
            return 0.0
        found = [max(_distance(whole, part, self.rtol, self.atol) for part in parts)]
        for axis in range(whole.dim()):
            rests = {(*part.shape[:axis], ..., *part.shape[axis + 1 :]) for part in (whole, *parts)}
            if len(rests) == 1:
                found.append(_distance(whole, torch.cat(parts, axis), self.rtol, self.atol))
        return min(found)


def _tensors(value: object) -> list[Tensor]:
    return [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)]


def _gradients(outputs: list[Tensor], wanted: list[Tensor]) -> list[Tensor | None]:
    """Return the gradients of a sum of the outputs with fixed factors, so that no two rows count alike."""
    generator = torch.Generator().manual_seed(0)
    total = torch.zeros((), dtype=torch.float64, device="cpu")
    for output in outputs:
        if output.requires_grad and output.is_floating_point():
            dense = output.to_dense() if output.is_sparse else output
            factors = torch.rand(dense.shape, generator=generator, dtype=torch.float32, device="cpu") + 0.5
            total = total.to(dense.device) + (dense * factors.to(dense.device, dense.dtype)).sum().double()
    if not wanted or not total.requires_grad:
        return [None] * len(wanted)
    with _ExpectedValues():  # activation checkpointing computes forwards again
        return list(torch.autograd.grad(total, wanted, allow_unused=True, retain_graph=True))


def _dotted(block: str, module: str) -> str:
    return ".".join(part for part in (block, module) if part) or "the model"


def _largest(tensor: Tensor) -> float:
    finite = tensor.detach().abs().nan_to_num(0.0, 0.0, 0.0)
    return float(finite.max()) if finite.numel() else 0.0


def _distance(one: Tensor, two: Tensor, rtol: float, atol: float) -> float:
    one, two = one.detach(), two.detach()
    if one.shape != two.shape:
        return float("inf")
    if one.layout is not torch.strided:
        one, two = one.to_dense(), two.to_dense()
    if one.dtype == torch.float64:  # rounding errors of float64 are far below these
        rtol, atol = min(rtol, 1e-9), min(atol, 1e-9)
    elif one.dtype in (torch.bfloat16, torch.float16):
        rounding = 4 * torch.finfo(one.dtype).eps
        rtol, atol = max(rtol, rounding), max(atol, rounding)
    if not one.numel() or torch.allclose(one.to(two.dtype), two, rtol=rtol, atol=atol, equal_nan=True):
        return 0.0
    apart = (one.to(torch.complex128 if one.is_complex() else torch.float64) - two).abs()
    largest = float(apart[apart.isfinite()].max()) if bool(apart.isfinite().any()) else 0.0
    return largest or float("inf")


# Copies, whose changes are lost


def _throwaway(module: nn.Module, home: torch.device) -> nn.Module:
    """Return a replica on `home` whose changes are lost, also those of lists and other attributes. Gradients
    go to the module's parameters. BatchNorm uses its running statistics."""
    replica = replicate_modules(list(module.modules()), (home, home), detach=False)[1]
    memo: dict[int, object] = {id(part): part for part in (*replica.modules(), *module.modules())}
    for part in replica.modules():
        held = vars(part)
        for name in [name for name in held if name not in OF_TORCH and name not in part._parameters]:
            held[name] = _copied(held[name], memo)
        if isinstance(part, _BatchNorm) and part.track_running_stats:
            part.training = False
    return replica


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """While the block runs, the model computes with copies of its buffers and attributes; afterwards it has
    those from before. Tables in host memory are left alone: their forward changes nothing."""
    parts = [part for part in model.modules() if not hasattr(part, "place_on")]
    before = [(part, dict(vars(part))) for part in parts]
    memo: dict[int, object] = {id(part): part for part in model.modules()}
    memo |= {id(parameter): parameter for parameter in model.parameters()}
    try:
        for part in parts:
            held = vars(part)
            for name in [name for name in held if name not in OF_TORCH]:
                held[name] = _copied(held[name], memo)
            held["_buffers"] = {name: _copied(buffer, memo) for name, buffer in part._buffers.items()}
        yield
    finally:
        for part, held in before:
            vars(part).clear()
            vars(part).update(held)


def _copied(value: Any, memo: dict[int, object]) -> Any:
    """Return a copy of an attribute's value. Modules, parameters, functions and arrays that cannot be written
    are returned as they are, and so is what cannot be copied."""
    if isinstance(value, nn.Module | nn.Parameter | types.FunctionType | types.MethodType | type):
        return value
    if type(value) in PLAIN or getattr(getattr(value, "flags", None), "writeable", True) is False:
        return value
    if id(value) not in memo:
        try:
            memo[id(value)] = (
                value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value, memo)
            )
        except Exception:  # noqa: BLE001 # a lock, say
            memo[id(value)] = value
    return memo[id(value)]


def _state(module: nn.Module) -> dict[tuple[str, str], object]:
    """Return what a forward may write, by (part, attribute): buffers, parameters, and attributes that are
    numbers, texts, tensors or nests of these."""
    return {
        (name, f"self.{key}"): held
        for name, part in module.named_modules()
        # weight_norm and the like write attributes of their module in a hook
        if not any(type(hook).__module__.startswith("torch.") for hook in part._forward_pre_hooks.values())
        for key, held in (vars(part) | part._buffers | part._parameters).items()
        if key not in OF_TORCH and (isinstance(held, Tensor) or type(held) in PLAIN)
    }


def _same(one: object, two: object) -> bool:
    if isinstance(one, Tensor) and isinstance(two, Tensor):
        return not _distance(one.detach(), two.detach(), 1e-3, 1e-4)
    return one is two or (type(one) is type(two) and not isinstance(one, Tensor) and bool(one == two))


# Random numbers


@contextmanager
def own_random_state(*homes: torch.device) -> Iterator[None]:
    """Return a context that restores the random generators afterwards: torch's, Python's, and numpy's if it
    is loaded."""
    numpy = sys.modules.get("numpy")
    python_state, numpy_state = random.getstate(), numpy.random.get_state() if numpy else None
    with torch.random.fork_rng([home for home in homes if home.type == "cuda"]):
        try:
            yield
        finally:
            random.setstate(python_state)
            if numpy is not None:
                numpy.random.set_state(numpy_state)


class _ExpectedValues(TorchDispatchMode):
    """Replaces torch's random draws by values that do not depend on the number of rows: dropout keeps
    everything, uniform draws give the middle, a permutation rotates by one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        name, schema = func.overloadpacket.__name__, [argument.name for argument in func._schema.arguments]
        given = dict(zip(schema, args, strict=False)) | kwargs
        if name == "native_dropout":
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        for key, value in (("dropout_p", 0.0), ("dropout", 0.0), ("training", False)):
            if key in given:
                return func(**(given | {key: value}))
        if name == "randperm":
            return func(*args, **kwargs).copy_(torch.arange(given["n"], device="cpu").roll(-1))
        if name == "multinomial":
            return args[0].argmax(-1, keepdim=True).expand(*args[0].shape[:-1], args[1]).contiguous()
        value = _expected(name, given)
        if value is None:  # compared nevertheless: `_by_chance` finds whether it differs from call to call
            return func(*args, **kwargs)
        result = args[0] if name.endswith("_") else func(*args, **kwargs)
        return result.copy_(value) if isinstance(value, Tensor) else result.fill_(value)


# Subclasses get a wrapper there that imports the compiler at the first call, 1.5 CPU seconds of each process.
_ExpectedValues.__torch_dispatch__ = inspect.unwrap(  # type: ignore[method-assign]
    _ExpectedValues.__torch_dispatch__
)


def _expected(name: str, given: dict[str, Any]) -> Any:
    if name in ("bernoulli", "bernoulli_"):
        return given.get("p", given["self"] if name == "bernoulli" else 0.5)
    if name in ("rand", "rand_like"):
        return 0.5
    if name == "uniform_":
        return (given.get("from", 0.0) + given.get("to", 1.0)) / 2
    if name in ("randn", "randn_like"):
        return 0.5
    if name == "normal_":
        return given.get("mean", 0.0) + 0.5 * given.get("std", 1.0)
    if name in ("exponential_", "geometric_", "log_normal_"):
        return 1.0
    if name in ("randint", "randint_like", "random_"):
        return given.get("low", given.get("from")) or 0
    return None
