"""Models back from checkpoints, on any devices."""

from contextlib import nullcontext
from pathlib import Path

from torch import nn

from dphybrid.config import ExperimentConfig
from dphybrid.embedding import find_tables
from dphybrid.embedding.storage import deferred_rows
from dphybrid.models import ModelContext, build_model
from dphybrid.parallel import resolve_devices
from dphybrid.training.checkpoint import load_weights, read_state
from dphybrid.training.tensor_file import mapped_tensor


def model_from_checkpoint(folder: str | Path, devices: str = "cpu", *, mapped: bool = False) -> nn.Module:
    """Build the model of a checkpoint folder on `devices` and fill it, whatever devices it was trained on.

    mapped: its tables stay in the checkpoint's files, and memory holds only rows that were looked up.
    Raises UserError when the folder is no checkpoint or does not fit.
    """
    state = read_state(Path(folder))
    config = ExperimentConfig.model_validate(state["config"])
    context = ModelContext(resolve_devices(devices), state["info"], config.model, config.train.seed)
    with deferred_rows() if mapped else nullcontext():
        model = build_model(config.recipe, context)
    tables = find_tables(model) if mapped else {}
    load_weights(Path(folder), model, skip=tables)
    for name, table in tables.items():
        table.weight = mapped_tensor(Path(folder) / "tables" / f"{name}.safetensors", "weight", table.weight)
    return model
