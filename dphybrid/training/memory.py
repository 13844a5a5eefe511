"""Out of GPU memory: a report of its use, and the same step again in smaller parts.

Gradients of the parts are summed and divided once by the whole batch's terms, so the step is the one that did
not fit, up to rounding (and, with dropout, other masks). The batch itself never changes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from dphybrid.embedding import DeclaresIds, dense_parameters
from dphybrid.embedding.lookup import each_lookup
from dphybrid.parallel import find_data_parallel
from dphybrid.training.checkpoint import Progress
from dphybrid.util.errors import UserError
from dphybrid.util.memory import is_out_of_memory

PARTS = 4
"""Parts that a batch is computed in after it did not fit. Activations shrink with them, weights and optimizer
state do not."""


def num_rows(batch: Mapping[str, Tensor]) -> int:
    """Return the samples of a batch."""
    return len(next(iter(batch.values())))


def micro_batches(batch: dict[str, Tensor], count: int) -> Iterator[dict[str, Tensor]]:
    """Yield a batch in `count` parts of its samples; fewer when it has fewer. Tensors whose name has no B
    (`negatives_K`) are shared by all parts."""
    rows = len(next(value for name, value in batch.items() if _has_samples(name)))
    size = -(-rows // min(count, rows))
    for start in range(0, rows, size):
        yield {
            name: value[start : start + size] if _has_samples(name) else value
            for name, value in batch.items()
        }


def ids_by_part(
    model: DeclaresIds, progress: Progress
) -> Callable[[dict[str, Tensor]], Mapping[str, Tensor | Sequence[Tensor]]]:
    """Return what says which ids a batch looks up: those of each part, once batches are computed in parts."""

    def ids_of(batch: dict[str, Tensor]) -> Mapping[str, Tensor | Sequence[Tensor]]:
        if progress.micro_batches == 1:
            return model.table_ids(batch)
        each = [model.table_ids(part) for part in micro_batches(batch, progress.micro_batches)]
        return {name: [ids for by_name in each for ids in each_lookup(by_name[name])] for name in each[0]}

    return ids_of


def _has_samples(name: str) -> bool:
    """Is dim 0 of a batch's tensor of this name the samples? Names end in their shape: ids_BF, labels_B."""
    _, underscore, shape = name.rpartition("_")
    return not underscore or shape.startswith("B")


def scale_gradients(model: nn.Module, factor: Tensor) -> None:
    """Multiply all gradients, of blocks and of touched rows, by a number."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            values = parameter.grad._values() if parameter.grad.is_sparse else parameter.grad
            values.mul_(factor.to(values.device, values.dtype))


def out_of_memory_report(
    error: BaseException, step: int, rows: int, model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> str:
    """Return what used the memory when step `step` with a batch of `rows` rows did not fit, in lines for
    people."""
    weights = sum(parameter.nbytes for parameter in dense_parameters(model))
    entries = [value for state in (optimizer.state if optimizer else {}).values() for value in state.values()]
    state = sum(value.nbytes for value in entries if isinstance(value, Tensor))
    why = str(error).partition("\n")[0] or "no details"
    lines = [
        f"out of memory in step {step} with a batch of {rows} rows: {why}",
        f"  blocks {_gib(weights)}, their gradients as much, optimizer state {_gib(state)}; the rest is "
        "activations and copies of blocks",
    ]
    if torch.cuda.is_initialized():
        for number in own_gpus(model):  # asking another one would open a context there, half a GiB
            free, total = torch.cuda.mem_get_info(number)
            own = torch.cuda.memory_reserved(number)
            lines.append(
                f"  cuda:{number}: {_gib(total)} in all, {_gib(own)} taken by this process (at most "
                f"{_gib(torch.cuda.max_memory_allocated(number))} "
                f"in use), {_gib(max(0, total - free - own))} by CUDA itself and by others, {_gib(free)} free"
            )
    return "\n".join(lines)


def make_states(optimizer: torch.optim.Optimizer, batch_size: int, model: nn.Module) -> None:
    """Give a new optimizer the states that its first step would make. Raises UserError with the report when
    they do not fit: in the middle of an update nothing could be mended."""
    try:
        _take_empty_step(optimizer)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        report = out_of_memory_report(error, 1, batch_size, model, optimizer)
        raise UserError(
            f"{report}\nand that before the first step: weights, gradients and optimizer state alone are too "
            "much; lower the model's sizes or take train.optimizer=sgd"
        ) from error


@torch.no_grad()
def _take_empty_step(optimizer: torch.optim.Optimizer) -> None:
    """One step with a learning rate, decay and gradients of zero, which changes no parameter and is not
    counted."""
    groups, stilled = optimizer.param_groups, ["lr", "weight_decay"]
    before = [{key: group[key] for key in stilled if key in group} for group in groups]
    # Gradients of zero alone would not do: AdamW's decay shrinks weights without any.
    parameters = [parameter for group in groups for parameter in group["params"]]
    for group, values in zip(groups, before, strict=True):
        group.update(dict.fromkeys(values, 0.0))
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for group, values in zip(groups, before, strict=True):
        group.update(values)
    for parameter in parameters:
        parameter.grad = None
        # Adam's bias correction counts from here.
        if isinstance(step := optimizer.state[parameter].get("step"), torch.Tensor):
            step.zero_()


def own_gpus(model: nn.Module) -> list[int]:
    """Return the indices of the GPUs that a model uses: those of its parameters, and of its data-parallel
    blocks' replicas."""
    devices = {parameter.device for parameter in model.parameters()}
    devices |= {place for block in find_data_parallel(model).values() for place in block.devices.replicas}
    return sorted(device.index for device in devices if device.type == "cuda")


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"
