"""`check_split`: whether a training step gives the same when its batch is split over devices.

Two copies of the model train on the batch, one with every region on one device, one with every region split.
Both take two steps: the second starts from other weights and from what the first one wrote. Compared are
the regions' buffers and outputs, and the gradients.
"""

import copy
import inspect
import math
import random
from collections.abc import Iterable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dphybrid.parallel.applying import running_replica
from dphybrid.parallel.data_parallel import find_data_parallel
from dphybrid.parallel.devices import Devices
from dphybrid.parallel.nests import leaves
from dphybrid.parallel.scattering import RowSource, SharedTable, connect, shared_tables
from dphybrid.util.errors import UserError, type_text
from dphybrid.util.memory import is_out_of_memory

_Values = dict[tuple[str, str], list[Tensor]]
"""(module, quantity) -> its tensors."""


class _NotCompared(Exception):
    """The split cannot be compared, for the reason in the text."""


class _Differs(Exception):
    """A quantity of a module differs. The text names both, and the size of the difference."""


def check_split(model: nn.Module, *args: object, **kwargs: object) -> str:
    """Train copies of `model` on one batch, split and on one device; return what the comparison says.

    model: a `DataParallel` or a module that contains some, in the mode to compare. It is not changed, and the
    generators of torch and Python are set back. Dropout is off, torch's random numbers are constants, and
    BatchNorm uses its running statistics. The first device needs memory for two copies and a whole batch;
    tables in host memory share their rows with the copies. A region on one device is compared in two shares.
    Raises UserError for a model without regions, and for a difference, with its module and quantity.
    """
    if not (regions := find_data_parallel(model)):
        raise UserError(
            f"check_split: {type_text(model)} contains no DataParallel, so nothing would be split. Wrap the "
            "blocks: DataParallel(blocks, devices)"
        )
    notes = [
        f"in {name or 'the model'}, {note}"
        for name, region in regions.items()
        for note in notes_on(region.module)
    ]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    state = random.getstate()
    try:
        gpus = range(torch.cuda.device_count())
        with torch.random.fork_rng(gpus), torch.inference_mode(False), torch.enable_grad():
            _compare(model, (args, kwargs))
    except _NotCompared as error:
        return f"not compared: {error}"
    except _Differs as error:
        problem = (
            f"check_split: {error} between a split batch and the same batch on one device. Compute it "
            "outside of the DataParallel, or wrap what all samples share in Whole(...)"
        )
        raise UserError("\n".join([problem, *notes])) from None
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return "not compared: the first device has no memory for two copies of the model"
    finally:
        random.setstate(state)
        for parameter, gradient in gradients:
            parameter.grad = gradient
    return "; ".join(["the same results split and on one device", *notes])


def notes_on(module: nn.Module) -> list[str]:
    """Return one line for each layer that computes something else on several devices, or fails there: its
    name and class, why, and the remedy."""
    lines = []
    for name, part in module.named_modules():
        if isinstance(part, _BatchNorm):
            why = "normalises each device's rows by themselves and keeps the first device's statistics; use "
            why += "GroupNorm or LayerNorm, or batches large enough for each device"
        elif isinstance(part, nn.RNNBase | nn.MultiheadAttention) and not part.batch_first:
            why = "expects the batch on dim 1, but the split is on dim 0; set batch_first=True"
        else:
            continue
        lines.append(f"{name or 'the module'} ({type(part).__name__}) {why}")
    return lines


def _compare(model: nn.Module, batch: Any) -> None:
    """Raise _Differs for the first difference."""
    whole, split = (_Trial(model, batch, split=is_split) for is_split in (False, True))
    tables = {id(weight) for weight in model.parameters()}  # the copies share these weights
    for _ in range(2):
        whole.forward()
        try:
            split.forward()
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise UserError(f"check_split: works on one device and fails when split: {error}") from error
        if all(len(replicas) < 2 for replicas in split.replicas.values()):
            raise _NotCompared("no DataParallel was called with two rows or more")
        for name, replicas in split.replicas.items():
            # All replicas but the first lose what forward writes to them, unless all write the same.
            if replicas:
                buffers = [_buffers(name, replica) for replica in replicas]
                _must_agree(_buffers(name, whole.regions[name].module), buffers, split.eps)
        try:
            _must_agree(whole.values[0], split.values.values(), split.eps)
        except _Differs:
            _find_inside(model, batch, split.eps)
            raise
        one, two = whole.gradients(), split.gradients()
        largest = max((_largest(gradient) for values in one.values() for gradient in values), default=0.0)
        _must_agree(one, [two], split.eps, floor=8 * split.eps * largest)
        for weight in (*whole.model.parameters(), *split.model.parameters()):
            if weight.requires_grad and id(weight) not in tables:
                weight.data *= 1.1


def _find_inside(model: nn.Module, batch: Any, eps: float) -> None:
    """Raise _Differs for the first module in a region whose input or output differs."""
    one, two = (_Trial(model, batch, split=is_split, watch_all=True) for is_split in (False, True))
    for _ in range(2):  # the second call sees what the first one left behind
        one.forward()
        two.forward()
    _must_agree(one.values[0], two.values.values(), eps, join=True)


class _Trial(TorchDispatchMode):
    """A copy of a model that trains on a batch.

    Attributes:
        regions, replicas: The copy's regions by name, and the replicas of each one's latest call.
        values: Replica number -> outputs of regions; with `watch_all`, inputs and outputs of all modules in
            regions, as each replica has seen them.
        eps: Rounding error of the coarsest floating-point type that an operation has returned.
    """

    allows_kernels = True
    """For `kernels.may_read`: tables look up as they do in training. torch's operator for lookups in graphs
    would import the compiler, 1.5 CPU seconds of each process."""

    def __init__(self, model: nn.Module, batch: Any, split: bool, watch_all: bool = False) -> None:
        super().__init__()
        self.model, self.batch, self.eps = _copied(model), batch, 0.0
        self.values: dict[int, _Values] = {}
        self.regions, self.replicas = find_data_parallel(self.model), dict[str, list[nn.Module]]()
        for name, region in self.regions.items():
            home, count = region.devices.home, max(2, len(region.devices)) if split else 1
            region.use_devices(Devices(f"{home}*{count}", (home,) * count, count > 1))
            for table in shared_tables(region.module).values() if region.dim == 0 else ():
                connect(table, region)  # type: ignore[arg-type]
            self.replicas[name] = []
            region.replicate = partial(self._replicate, name, region.replicate)  # type: ignore[method-assign]
            region.module.register_forward_pre_hook(lambda *_: _seed())  # the same in each replica
            region.register_forward_hook(partial(self._note, name, "its output"))
            for path, part in region.module.named_modules(prefix=name) if watch_all else ():
                part.register_forward_pre_hook(partial(self._note, path, "its input"), with_kwargs=True)
                part.register_forward_hook(partial(self._note, path, "its output"))

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.native_dropout.default:
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.eps = max(self.eps, _eps(result))
            if torch.Tag.nondeterministic_seeded in function.tags:
                result.fill_(0.5 if _eps(result) else 0)
        return result

    def _replicate(self, name: str, replicate: Any, *arguments: Any) -> list[nn.Module]:
        self.replicas[name] = replicate(*arguments)
        return self.replicas[name]

    def _note(self, name: str, quantity: str, _: nn.Module, *nests: Any) -> None:
        """Keep what a hook of a module is given: its inputs, or its inputs and output."""
        values, what, call = self.values.setdefault(running_replica(), {}), quantity, 2
        while (name, what) in values:
            what, call = f"{quantity} in call {call}", call + 1
        nest = nests if quantity == "its input" else nests[-1]
        values[name, what] = [leaf.detach().clone() for leaf in _tensors(nest)]

    def forward(self) -> None:
        """Call the model with a copy of the batch."""
        self.values = {0: {}}
        args, kwargs = self.inputs = copy.deepcopy(self.batch)
        _seed()
        with self:
            self.outputs = _tensors(self.model(*args, **kwargs))

    def gradients(self) -> _Values:
        """Return the gradients of a sum of the outputs in which each value has its own factor."""
        draws, factors = torch.Generator().manual_seed(0), list[Tensor]()
        outputs = [output.to_dense() for output in self.outputs if output.requires_grad]
        for output in outputs:
            kind = torch.complex64 if output.is_complex() else torch.float32
            factors.append((torch.rand(output.shape, generator=draws, dtype=kind) + 0.5).to(output))
        with self:  # activation checkpointing computes forwards again
            torch.autograd.backward(outputs, factors)
        inputs = [tensor for tensor in _tensors(self.inputs) if tensor.requires_grad]
        wanted = {("the model", f"its input tensor {n}'s gradient"): leaf for n, leaf in enumerate(inputs)}
        wanted |= {(name, "its gradient"): weight for name, weight in self.model.named_parameters()}
        gradients = {place: [] if tensor.grad is None else [tensor.grad] for place, tensor in wanted.items()}
        for tensor in wanted.values():
            tensor.grad = None
        return gradients


# Subclasses get a wrapper there that imports the compiler at the first call.
_Trial.__torch_dispatch__ = inspect.unwrap(_Trial.__torch_dispatch__)  # type: ignore[method-assign]


def _seed() -> None:
    torch.manual_seed(0)
    random.seed(0)


def _copied(model: nn.Module) -> nn.Module:
    """Return a copy without gradients and dropout, whose tables share their weights with the model's."""
    memo: dict[int, Any] = {}
    for part in model.modules():
        if isinstance(table := cast(object, part), SharedTable):
            memo[id(part)] = table.shared_copy()
            memo |= {id(weight): weight for weight in part.parameters()}  # other layers may have it, too
        for value in tree_leaves(vars(part)):
            if isinstance(value, Tensor) and not value.is_leaf:  # deepcopy refuses tensors with a graph
                memo[id(value)] = value.detach().clone()
    try:
        copied = copy.deepcopy(model, memo)
    except Exception as error:
        raise _NotCompared(f"the model cannot be copied: {error}") from error
    for part in copied.modules():
        if isinstance(part, nn.RReLU) or (isinstance(part, _BatchNorm) and part.track_running_stats):
            part.training = False
        for name, value in vars(part).items():
            if isinstance(value, float) and ("drop" in name or isinstance(part, _DropoutNd)):
                vars(part)[name] = 0.0
    for parameter in copied.parameters():
        parameter.grad = None
    return copied


def _buffers(name: str, module: nn.Module) -> _Values:
    """Return the buffers of a region's module."""
    return {
        (path, f"self.{key}, which forward writes and replicas lose,"): [buffer]
        for path, part in module.named_modules(prefix=name)
        if not isinstance(part, RowSource)
        for key, buffer in part._buffers.items()
        if buffer is not None
    }


def _must_agree(
    whole: _Values, shares: Iterable[_Values], eps: float, join: bool = False, floor: float = 0.0
) -> None:
    """Raise _Differs for the first tensor that differs from those of the shares.

    join: or from the shares joined on any dim. Inside of a module the batch may be on any dim, and what all
    samples share, such as a mask, is in each share. floor: differences up to it are rounding errors.
    """
    parts = list(shares)
    for (module, quantity), tensors in whole.items():
        of_shares = [part[module, quantity] for part in parts if (module, quantity) in part]
        what = f"{module or 'the model'}: {quantity} differs"
        if {len(values) for values in of_shares} != {len(tensors)}:
            raise _Differs(what)
        for tensor, *pieces in zip(tensors, *of_shares, strict=True):
            sizes = [max(_difference(tensor, piece, eps, floor) for piece in pieces)]
            for dim in range(tensor.dim()) if join and tensor.layout is torch.strided else ():
                if len({(*one.shape[:dim], *one.shape[dim + 1 :]) for one in (tensor, *pieces)}) == 1:
                    sizes.append(_difference(tensor, torch.cat(pieces, dim), eps, floor))
            if size := min(sizes):
                raise _Differs(what if size == math.inf else f"{what} by {size:.2g} of its largest value")


def _difference(one: Tensor, two: Tensor, eps: float, floor: float) -> float:
    """Return the largest difference beyond rounding errors, relative to the largest value; 0 if none."""
    if one is two:
        return 0.0
    if one.is_sparse and two.is_sparse and one.shape == two.shape:
        one, two = one.coalesce(), two.coalesce()
        if torch.equal(one.indices(), two.indices()):  # of a large table, compare the batch's rows alone
            one, two = one.values(), two.values()
    if one.shape != two.shape:
        return math.inf
    one, two = one.detach().to_dense(), two.detach().to_dense()
    tolerance = 0.0 if not _eps(one) else 1e-9 if eps < 1e-9 else max(5e-4, 4 * eps)
    if not tolerance:
        one, two = one.double(), two.double()
    if not torch.equal(one.isnan(), two.isnan()):
        return math.inf
    apart = torch.where(one == two, 0.0, (one - two).abs()).nan_to_num(0.0, math.inf)
    worst, largest = float(apart.max()) if apart.numel() else 0.0, max(_largest(one), _largest(two))
    return worst / (largest or 1.0) if worst > tolerance * largest + floor else 0.0


def _largest(tensor: Tensor) -> float:
    """Return the largest absolute value that is finite."""
    values = tensor.detach().coalesce().values() if tensor.is_sparse else tensor.detach()
    return float(values.abs().nan_to_num(0.0, 0.0, 0.0).max()) if values.numel() else 0.0


def _eps(tensor: Tensor) -> float:
    return torch.finfo(tensor.dtype).eps if tensor.is_floating_point() or tensor.is_complex() else 0.0


def _tensors(nest: object) -> list[Tensor]:
    return [leaf for leaf in leaves(nest) if isinstance(leaf, Tensor)]
