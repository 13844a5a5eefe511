"""Number formats that blocks compute in. Parameters, rows, their gradients and updates are always float32."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from dphybrid.config import TrainConfig
from dphybrid.embedding import dense_parameters


@contextmanager
def precisely(config: TrainConfig) -> Iterator[None]:
    """While the block runs, GPUs multiply as `train.precision` says, and with `train.deterministic` torch
    refuses what has no deterministic form."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    strict = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    # torch lets cuDNN round to tf32 unless it is told not to.
    matmul.allow_tf32 = cudnn.allow_tf32 = config.precision == "tf32"
    if config.deterministic:
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before
        if config.deterministic:  # the call imports all of torch.compile, 2 CPU seconds
            torch.use_deterministic_algorithms(strict, warn_only=warns)


def lower_precision(precision: str, model: nn.Module) -> AbstractContextManager[object]:
    """Return autocast to bfloat16 for a model's blocks, every replica's included, or nothing."""
    if precision != "bfloat16":
        return nullcontext()
    kind = next((parameter.device.type for parameter in dense_parameters(model)), "cpu")
    return torch.autocast(kind, dtype=torch.bfloat16)


def summed(values_B: Tensor) -> Tensor:
    """Return the sum, in float32 where the values have fewer digits: thousands of losses do not add up in
    bfloat16."""
    return values_B.sum(dtype=torch.float32 if values_B.dtype in (torch.bfloat16, torch.float16) else None)
