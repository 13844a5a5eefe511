"""Models back from checkpoints, on any devices."""

from pathlib import Path

from torch import nn

from dphybrid.config import ExperimentConfig
from dphybrid.models import ModelContext, build_model
from dphybrid.parallel import resolve_devices
from dphybrid.training.checkpoint import load_weights, read_state


def model_from_checkpoint(folder: str | Path, devices: str = "cpu") -> nn.Module:
    """Build the model of a checkpoint folder on `devices` and fill it, whatever devices it was trained on.

    Raises UserError when the folder is no checkpoint or does not fit.
    """
    state = read_state(Path(folder))
    config = ExperimentConfig.model_validate(state["config"])
    context = ModelContext(resolve_devices(devices), state["info"], config.model, config.train.seed)
    model = build_model(config.recipe, context)
    load_weights(Path(folder), model)
    return model
