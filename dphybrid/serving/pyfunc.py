"""Checkpoints as MLflow models, for `mlflow.pyfunc.load_model` and `mlflow models serve`."""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dphybrid.serving.load import model_from_checkpoint
from dphybrid.serving.predict import open_predictor
from dphybrid.tracking.loader import refusing
from dphybrid.training.checkpoint import verify_checkpoint
from dphybrid.util.threads import use_num_threads


class LoadedCheckpoint:
    """The object that MLflow's pyfunc wraps. folder: the checkpoint. The module and the predictor are built
    at their first use."""

    def __init__(self, folder: Path) -> None:
        verify_checkpoint(folder)
        self.folder = folder

    @cached_property
    def _module(self) -> nn.Module:
        return model_from_checkpoint(self.folder)

    @cached_property
    def _predictor(self) -> Any:
        return open_predictor(self.folder)

    def predict(self, data: object, params: dict[str, object] | None = None) -> object:
        """Return the predictions for rows as `Predictor.predict` does, or the model's output for a batch of
        tensors.

        data: a DataFrame (pandas, polars) or columns by name, for recipes that read tables; or the model's
        own batch, a dict of tensors with samples on dim 0. params: {"classes": True} returns the classes
        instead. Raises MlflowException when columns are missing, or when the model cannot predict from rows
        of a table.
        """
        if isinstance(data, Mapping) and data and all(isinstance(value, Tensor) for value in data.values()):
            use_num_threads()
            with torch.no_grad():
                return self._module(data)
        with refusing():
            predictor = self._predictor
            return (
                predictor.predict_classes(data) if (params or {}).get("classes") else predictor.predict(data)
            )


def _load_pyfunc(path: str) -> LoadedCheckpoint:
    """Load a checkpoint for MLflow, which looks for a function of this name."""
    return LoadedCheckpoint(Path(path))
