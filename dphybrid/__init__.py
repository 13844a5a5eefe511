"""Hybrid models: embedding tables in host memory, dense blocks data-parallel on GPUs, every split on
record."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from dphybrid.jobs.predict import Predictor

__version__ = "0.1.0"


def load(which: str, devices: str = "cpu", batch_size: int = 8192) -> "Predictor":
    """Return the predictor of a trained click model: a run's name, a checkpoint folder, or
    `models:/NAME@champion`.

    Raises UserError when there is none.
    """
    from dphybrid.jobs import predict  # torch and polars: not for everyone who imports dphybrid

    return predict.load(which, devices, batch_size)


def load_model(which: str, devices: str = "cpu") -> "nn.Module":
    """Return the trained module of any recipe: of a run (name or MLflow id), a checkpoint folder, or
    `models:/NAME@champion`.

    Raises UserError when there is none.
    """
    from dphybrid.jobs import load as loading

    return loading.load_model(which, devices)
