"""For the inside and the whole of a model: losses inside of regions, finding the regions, compiling them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dphybrid.parallel.data_parallel import DataParallel
from dphybrid.util.errors import UserError


class LossInside(nn.Module):
    """A block with its loss, for the inside of a `DataParallel`: only per-sample losses leave the devices,
    not the logits.

    loss: (output, targets) -> (B,), such as a torch loss with reduction="none". The mean is taken outside,
    over all samples: a mean of the devices' means weighs the samples of a short last chunk too much.
    """

    def __init__(self, block: nn.Module, loss: Callable[[object, object], Tensor]) -> None:
        super().__init__()
        self.block = block
        self.loss = loss

    def forward(self, inputs: object, targets: object) -> Tensor:
        """Return the loss of each sample, (B,). inputs: a tensor, or a tuple of arguments. Raises UserError
        for a loss that is a mean."""
        arguments = inputs if isinstance(inputs, tuple) else (inputs,)
        loss_B = self.loss(self.block(*arguments), targets)
        if loss_B.dim() == 0:
            raise UserError(
                'LossInside: the loss is one number for the whole chunk; give it reduction="none", one '
                "value a sample"
            )
        return loss_B


def find_data_parallel(model: nn.Module) -> dict[str, DataParallel]:
    """Return the data-parallel blocks of a model by dotted name ("" for the model itself)."""
    return {name: module for name, module in model.named_modules() if isinstance(module, DataParallel)}


def compile_regions(model: nn.Module, **options: Any) -> list[str]:
    """Compile the modules of a model's data-parallel blocks in place, parameters and state-dict keys as
    before; return the blocks' names.

    options: those of torch.compile. Raises UserError for a block on several devices: replicas are made anew
    for each batch, and a graph would run with the weights of the ones that it was made for.
    """
    blocks = find_data_parallel(model)
    for name, block in blocks.items():
        if len(block.devices) > 1:
            raise UserError(
                f"compile: {name or 'the model'} runs on {len(block.devices)} devices "
                f"({block.devices.text}), and replicas cannot be compiled; use one device, or do not compile"
            )
    for block in blocks.values():
        block.module._compiled_call_impl = torch.compile(_caller(block.module), **options)
    return list(blocks)


def _caller(module: nn.Module) -> Callable[..., object]:
    """A function of ours around the call: `module.compile()` leaves modules of torch's own classes, such as
    nn.Sequential, as they are."""

    def call(*args: object, **kwargs: object) -> object:
        return module._call_impl(*args, **kwargs)

    return call
