"""A batch in parts, which take less memory; and, when GPU memory runs out, a report of its use with
the remedy."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache

import torch
from torch import Tensor, nn

from dphybrid.embedding import CombinedOptimizer, DeclaresIds, dense_parameters
from dphybrid.embedding.lookup import each_lookup
from dphybrid.parallel import find_data_parallel
from dphybrid.util.errors import UserError
from dphybrid.util.memory import is_out_of_memory

_SHAPE = re.compile(r"[A-Z][A-Z0-9]*")
"""The end of a tensor's name that says its shape: a letter or digit for each dimension."""


def num_rows(batch: Mapping[str, Tensor]) -> int:
    """Return the number of samples of a batch."""
    # If no name has a shape with B (x_NCHW, y_N), dim 0 of all tensors is the samples.
    first = next(iter(batch.values()))
    return len(next((value for name, value in batch.items() if _has_samples(name, value)), first))


def parts_of(batch: dict[str, Tensor], count: int) -> Iterator[dict[str, Tensor]]:
    """Yield a batch in `count` parts, or fewer if it has fewer samples. Tensors without a sample dimension
    (`negatives_K`) are in every part."""
    if count == 1:
        yield batch
        return
    rows = num_rows(batch)
    size = -(-rows // min(count, rows))  # rounded up
    divided = {name for name, value in batch.items() if _has_samples(name, value)} or batch.keys()
    for start in range(0, rows, size):
        yield {
            name: value[start : start + size] if name in divided else value for name, value in batch.items()
        }


def ids_of_parts(
    model: DeclaresIds, count: int
) -> Callable[[dict[str, Tensor]], Mapping[str, Tensor | Sequence[Tensor]]]:
    """Return a function from a batch that is computed in `count` parts to the ids that it looks up: those of
    each part, because the pipeline fetches rows for each lookup."""
    if count == 1:
        return model.table_ids

    def ids_of(batch: dict[str, Tensor]) -> Mapping[str, Tensor | Sequence[Tensor]]:
        parts = [model.table_ids(part) for part in parts_of(batch, count)]
        return {name: [ids for by_name in parts for ids in each_lookup(by_name[name])] for name in parts[0]}

    return ids_of


def scale_gradients(model: nn.Module, factor: Tensor) -> None:
    """Multiply all gradients, of blocks and of looked-up rows, by `factor`."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            # _values(), because values() refuses a sparse gradient that is not coalesced.
            values = parameter.grad._values() if parameter.grad.is_sparse else parameter.grad
            values.mul_(factor.to(values.device, values.dtype))


def _has_samples(name: str, value: Tensor) -> bool:
    """Return whether dim 0 of a tensor is the samples: unless its name ends in a shape without B, such as
    `negatives_K`."""
    shape = _shape_in(name)
    # A user's columns are called `user_id` or `price_USD`, which are no shapes of one dimension.
    return len(shape) != value.dim() or not shape or shape.startswith("B")


@cache
def _shape_in(name: str) -> str:
    """Return the end of a tensor's name that may say its shape, such as "BF" of `ids_BF`; "" if none."""
    _, underscore, shape = name.rpartition("_")
    return shape if underscore and _SHAPE.fullmatch(shape) else ""


def out_of_memory_report(
    error: BaseException, step: int, rows: int, model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> str:
    """Return lines about what used the memory when `step` with a batch of `rows` rows did not fit."""
    weights = sum(parameter.nbytes for parameter in dense_parameters(model))
    entries = [value for state in (optimizer.state if optimizer else {}).values() for value in state.values()]
    state = sum(value.nbytes for value in entries if isinstance(value, Tensor))
    why = str(error).partition("\n")[0] or "no details"
    lines = [
        f"out of memory in step {step} with a batch of {rows} rows: {why}",
        f"  blocks {_gib(weights)}, their gradients the same, optimizer state {_gib(state)}; the rest is "
        "activations and replicas of blocks",
    ]
    if torch.cuda.is_initialized():
        for number in own_gpus(model):  # a query to another GPU would create a context there: half a GiB
            free, total = torch.cuda.mem_get_info(number)
            own = torch.cuda.memory_reserved(number)
            lines.append(
                f"  cuda:{number}: {_gib(total)} in all, {_gib(own)} reserved by this process (at most "
                f"{_gib(torch.cuda.max_memory_allocated(number))} in use), "
                f"{_gib(max(0, total - free - own))} by CUDA itself and other processes, {_gib(free)} free"
            )
    return "\n".join(lines)


def make_states(optimizer: torch.optim.Optimizer, batch_size: int, model: nn.Module) -> None:
    """Reserve the memory of the states that a new optimizer will allocate in its first step. Raises UserError
    with the report when they do not fit: running out of memory in the middle of an update leaves it half
    done."""
    try:
        for one in optimizer.optimizers if isinstance(optimizer, CombinedOptimizer) else (optimizer,):
            _reserve_states(one)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        report = out_of_memory_report(error, 1, batch_size, model, optimizer)
        raise UserError(
            f"{report}\nThis was before the first step: weights, gradients and optimizer state alone do not "
            "fit. Lower the model's sizes or use train.optimizer=sgd"
        ) from error


@torch.no_grad()
def _reserve_states(optimizer: torch.optim.Optimizer) -> None:
    """Take a step that changes no parameter, and hold its states until the first real step or until states
    are loaded."""
    # The states of this step only reserve memory. Training must not start from them: after a first step with
    # zero gradients, NAdam, ASGD and other optimizers are not what they are when new.
    groups, state = optimizer.param_groups, optimizer.state
    parameters = [parameter for group in groups for parameter in group["params"]]
    # Zero gradients alone are not enough: AdamW's decay shrinks weights without a gradient.
    zeros = dict.fromkeys(("lr", "weight_decay"), 0.0)
    optimizer.param_groups = [group | {key: zeros[key] for key in zeros.keys() & group} for group in groups]
    optimizer.state = defaultdict(dict)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for parameter in parameters:
        parameter.grad = None
    reserved = [optimizer.state]
    optimizer.param_groups, optimizer.state = groups, state
    optimizer.register_step_pre_hook(lambda *_: reserved.clear())
    optimizer.register_load_state_dict_pre_hook(lambda *_: reserved.clear())


def own_gpus(model: nn.Module) -> list[int]:
    """Return the indices of the GPUs that hold a model's parameters or replicas of its data-parallel
    blocks."""
    devices = {parameter.device for parameter in model.parameters()}
    devices |= {device for block in find_data_parallel(model).values() for device in block.devices.replicas}
    return sorted(device.index for device in devices if device.type == "cuda")


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"
