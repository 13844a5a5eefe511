"""A batch in parts, which take less memory (train.accumulate)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from dphybrid.embedding.lookup import each_lookup
from dphybrid.util.errors import UserError


@runtime_checkable
class DeclaresWhole(Protocol):
    """A model that names the tensors of a batch that belong to all its samples, such as drawn negatives."""

    whole: Sequence[str]


def num_rows(batch: Mapping[str, Tensor], model: nn.Module) -> int:
    """Return the number of samples of a batch: the length of the first tensor that is divided."""
    return len(_divided(batch, model)[0][1])


def _divided(batch: Mapping[str, Tensor], model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the names and tensors of a batch whose dim 0 is the samples."""
    whole = model.whole if isinstance(model, DeclaresWhole) else ()
    return [(name, value) for name, value in batch.items() if name not in whole and value.dim()]


def parts_of(batch: dict[str, Tensor], count: int, model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Yield a batch in `count` parts along dim 0, or fewer if it has fewer samples. Tensors that the model
    declares `whole`, and single numbers, are in every part. Raises UserError for tensors of other lengths."""
    if count == 1:
        yield batch
        return
    (first, of_first), *others = divided = _divided(batch, model)
    for name, value in others:
        if len(value) != len(of_first):
            raise UserError(
                f"train.accumulate={count}: the batch's {name} has {len(value)} rows, but {first} "
                f"has {len(of_first)}; if it belongs to all samples, declare it in the model: "
                f"whole = ({name!r},)"
            )
    size = -(-len(of_first) // count)  # rounded up
    for start in range(0, len(of_first), size):
        yield batch | {name: value[start : start + size] for name, value in divided}


def ids_of_parts(
    model: nn.Module, count: int
) -> Callable[[dict[str, Tensor]], Mapping[str, Tensor | Sequence[Tensor]]] | None:
    """Return a function from a batch that is computed in `count` parts to the ids that it looks up: those of
    each part, because the pipeline fetches rows for each lookup. None if the model declares none."""
    if not hasattr(model, "table_ids"):
        return None
    table_ids: Any = model.table_ids

    def ids_of(batch: dict[str, Tensor]) -> Mapping[str, Tensor | Sequence[Tensor]]:
        parts = [table_ids(part) for part in parts_of(batch, count, model)]
        return {name: [ids for by_name in parts for ids in each_lookup(by_name[name])] for name in parts[0]}

    return table_ids if count == 1 else ids_of


def scale_gradients(model: nn.Module, factor: Tensor) -> None:
    """Multiply all gradients, of blocks and of looked-up rows, by `factor`."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            # _values(), because values() refuses a sparse gradient that is not coalesced.
            values = parameter.grad._values() if parameter.grad.is_sparse else parameter.grad
            values.mul_(factor.to(values.device, values.dtype))
