"""What must be said before CUDA starts, and which device work without a place of its own goes to."""

import os

import torch

from dphybrid.parallel.devices import Devices


def before_cuda_starts() -> None:
    """Have cuBLAS, and cuDNN's RNNs with it, use workspaces of their own for each stream: the same bits every
    time. Read once, as CUDA starts; what the user has set stays."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:2")


def start_on(devices: Devices) -> None:
    """Make the devices' home the current one: events and streams that are made without a device belong to
    it."""
    before_cuda_starts()
    if devices.home.type == "cuda":
        torch.cuda.set_device(devices.home)
