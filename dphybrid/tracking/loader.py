"""Loads checkpoints back from MLflow: by model, by registered name and alias, or as a plain folder."""

from pathlib import Path
from typing import Any

from dphybrid.errors import UserError


class LoadedCheckpoint:
    """A checkpoint as MLflow's pyfunc hands it out. folder: its files; state: its page; tensors: the blocks by name."""

    def __init__(self, folder: Path) -> None:
        from dphybrid.training.checkpoint import read_state

        self.folder = folder
        self.state = read_state(folder)

    @property
    def config(self) -> dict[str, Any]:
        """The experiment's values."""
        config: dict[str, Any] = self.state["config"]
        return config

    def tensors(self) -> dict[str, Any]:
        """Read the dense blocks' tensors by name."""
        from dphybrid.training.tensor_file import read_tensors

        return read_tensors(self.folder / "blocks.safetensors")

    def model(self, devices: str = "cpu") -> Any:
        """Build the model on `devices` and fill it: `mlflow.pyfunc.load_model(uri).unwrap_python_model()` is not needed for that."""
        from dphybrid.loading import model_from_checkpoint

        return model_from_checkpoint(self.folder, devices)

    def predict(self, batch: Any) -> Any:
        """Run the model on a batch (dict of tensors with samples on dim 0)."""
        import torch

        with torch.no_grad():
            return self.model().eval()(batch)


def _load_pyfunc(path: str) -> LoadedCheckpoint:
    return LoadedCheckpoint(Path(path))


def checkpoint_folder(uri: str, tracking_uri: str | None = None) -> Path:
    """Return the folder of a checkpoint: a local folder, `models:/m-...`, `models:/NAME/VERSION` or `models:/NAME@ALIAS`.

    Raises UserError when there is none.
    """
    if "://" not in uri and not uri.startswith("models:/"):
        folder = Path(uri).expanduser()
        if not (folder / "state.json").is_file():
            raise UserError(f"{uri}: is no checkpoint folder (it has no state.json)")
        return folder
    import mlflow
    from mlflow.exceptions import MlflowException

    try:
        root = Path(mlflow.artifacts.download_artifacts(artifact_uri=uri, tracking_uri=tracking_uri))
    except (MlflowException, OSError) as error:
        raise UserError(f"{uri}: cannot be fetched from MLflow: {error}") from error
    return root / "checkpoint"
