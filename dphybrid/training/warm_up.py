"""Compiling the row kernels while data is prepared, so that the first step need not."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from dphybrid.config import ExperimentConfig
from dphybrid.embedding import kernels, machine_code


@contextmanager
def compiling_kernels(config: ExperimentConfig, folder: Path) -> Iterator[None]:
    """Compile in the background what tables of the config's width will need, while the block runs. folder: of
    compiled code.

    Says so the first time, when that takes seconds; later the code comes from the folder. A recipe without
    `model.dim` has no table to expect.
    """
    dim = config.model.model_dump().get("dim")
    if not isinstance(dim, int):
        yield
        return
    machine_code.keep_compiled_in(folder)
    place = kernels.kept_in()
    if not place.exists():
        print(
            f"Compiling the kernels of table rows, which happens once; they are kept in {place}", flush=True
        )
    dtype = torch.bfloat16 if config.table.dtype == "bfloat16" else getattr(torch, config.model.dtype)
    work = threading.Thread(
        target=kernels.warm_up, args=(config.table.optimizer, dim, dtype), name="dphybrid-compile"
    )
    work.start()
    try:
        yield
    finally:
        work.join()
