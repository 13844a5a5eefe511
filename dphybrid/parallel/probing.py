"""Is it chance that an output has as many rows as its share has samples? Asked once, at the first forward that leaves it open.

Shares of two sizes settle it: what then has its rows in step with the samples has the batch there. Where all shares are alike, an RNN's
state (layers, B, H) of as many layers, a transposed or stacked result, a parameter or a constant may look like rows by chance. It cannot be chance
when the number of samples is found nowhere else: in no other dim of outputs, inputs and parameters, in no length of a list, and
the replicas' outputs differ. Otherwise a throwaway copy of the module computes one sample more, once: the cost of one replica's forward without
gradients.
"""

import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dphybrid.parallel.applying import as_replica
from dphybrid.parallel.gathering import Leaf
from dphybrid.parallel.nests import Parts, Whole, is_nest, items_of, map_tensors, rebuild, tensors_of
from dphybrid.parallel.replication import throwaway
from dphybrid.util.errors import UserError


def refuse_chance_rows(
    module: nn.Module, inputs: Any, outputs: list[Any], leaves: list[Leaf], sizes: list[int], dim: int, home: torch.device
) -> None:
    """Raise UserError where an output of equal shares has its rows by chance.

    inputs: (args, kwargs) of the whole batch. outputs: of the replicas. leaves: what was joined of them.
    """
    share = sizes[0]
    if not _may_be_chance(module, inputs, outputs, leaves, share, dim):
        return
    try:
        found = dict(tensors_of(_with_one_more(module, inputs, share + 1, len(sizes), dim, home)))
    except Exception as error:  # noqa: BLE001 # a module may refuse any other size, and is right so far
        warnings.warn(
            f"DataParallel: outputs have {share} rows for shares of {share} samples, and it could not be seen whether by chance: with "
            f"{share + 1} samples the module raised {type(error).__name__}: {error}; probe=False does not ask",
            RuntimeWarning,
            stacklevel=4,
        )
        return
    for leaf in leaves:
        tensor = found.pop(leaf.path, None)
        if tensor is None or tensor.dim() != leaf.rank or tensor.shape[dim] != leaf.rows * (share + 1):
            size = "is missing" if tensor is None else f"has size {tuple(tensor.shape)}"
            raise UserError(
                f"{leaf.path}: {leaf.rows * share} rows for a share of {share} samples by chance: with {share + 1} samples it {size}; return "
                f"the batch on dim {dim}, with the same number of rows for each sample (transpose an RNN's state, expand what belongs to no sample)"
            )
    if found:
        raise UserError(
            f"{next(iter(found))}: there with {share + 1} samples, not with {share}; return tensors, not a list of samples"
        )


def _may_be_chance(module: nn.Module, inputs: Any, outputs: list[Any], leaves: list[Leaf], share: int, dim: int) -> bool:
    if share == 1 or any(leaf.rows != 1 for leaf in leaves):
        return True
    joined = {leaf.path for leaf in leaves}
    columns: dict[str, list[Tensor]] = {}
    for output in outputs:
        for path, tensor in tensors_of(output):
            columns.setdefault(path, []).append(tensor)
    for path, tensors in columns.items():
        if path in joined and (_is_elsewhere(tensors[0].shape, share, dim) or _all_equal(tensors)):
            return True
    shapes = [*(tensor.shape for _, tensor in tensors_of(inputs)), *(p.shape for p in (*module.parameters(), *module.buffers()))]
    own = len(list(tensors_of(inputs)))
    if any(_is_elsewhere(shape, share, dim) for shape in shapes[:own]) or any(share in shape for shape in shapes[own:]):
        return True
    return share in _lengths(outputs[0])


def _is_elsewhere(shape: torch.Size, share: int, dim: int) -> bool:
    others = list(shape)
    if others:
        del others[dim]
    return share in others


def _all_equal(tensors: list[Tensor]) -> bool:
    first = tensors[0]
    if first.layout is not torch.strided:
        return True
    return all(other.shape == first.shape and torch.equal(first, other.to(first.device)) for other in tensors[1:])


def _lengths(value: Any) -> Iterator[int]:
    if is_nest(value):
        items = items_of(value)
        yield len(items)
        for item in items:
            yield from _lengths(item)


@torch.no_grad()
def _with_one_more(module: nn.Module, inputs: Any, rows: int, count: int, dim: int, home: torch.device) -> Any:
    args, kwargs = _first_rows(inputs, rows, dim, home)
    with own_random_state(home), as_replica(0, count):
        return throwaway(module, home)(*args, **kwargs)


def _first_rows(value: Any, rows: int, dim: int, home: torch.device) -> Any:
    if isinstance(value, Tensor):
        part = torch.narrow_copy(value, dim, 0, rows) if value.layout is torch.sparse_coo else value.narrow(dim, 0, rows)
        return part.detach().to(home, copy=True)
    if isinstance(value, Whole):
        return map_tensors(lambda t: t.detach().to(home, copy=True), value.value)
    if isinstance(value, Parts):
        return torch.cat([part.detach().to(home) for part in value.tensors], dim).narrow(dim, 0, rows).clone()
    if is_nest(value):
        return rebuild(value, [_first_rows(item, rows, dim, home) for item in items_of(value)])
    return value


@contextmanager
def own_random_state(home: torch.device) -> Iterator[None]:
    """What the block draws is as if it had not been drawn: torch's generators, Python's, and numpy's where it is loaded."""
    numpy = sys.modules.get("numpy")
    python_state, numpy_state = random.getstate(), numpy.random.get_state() if numpy else None
    with torch.random.fork_rng([home] if home.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(python_state)
            if numpy is not None:
                numpy.random.set_state(numpy_state)
