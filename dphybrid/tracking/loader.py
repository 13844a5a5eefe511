"""Finds the folder of a checkpoint: in MLflow by model or by registered name and alias, or on the disk."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from urllib.parse import urlparse

from dphybrid.tracking.tracker import ELSEWHERE
from dphybrid.util.digests import file_digest, own_files
from dphybrid.util.errors import UserError
from dphybrid.util.files import given_path

_LONGEST_PATH = 4096
"""Characters of the path that are read: a file from elsewhere may hold a text of any length."""


@contextmanager
def refusing() -> Iterator[None]:
    """Raise a UserError of the block as an MlflowException, which MLflow's scoring server answers with a 400
    and the message alone. For other errors it sends a stack trace."""
    from mlflow.exceptions import MlflowException
    from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE

    try:
        yield
    except UserError as error:
        raise MlflowException(str(error), error_code=INVALID_PARAMETER_VALUE) from error


def checkpoint_folder(uri: str, tracking_uri: str | None = None) -> Path:
    """Return the folder of a checkpoint: a local folder, `models:/m-...`, `models:/NAME/VERSION` or
    `models:/NAME@ALIAS`. Whoever loads it checks its files against its page.

    Raises UserError if there is no such checkpoint.
    """
    if "://" not in uri and not uri.startswith("models:/"):
        folder = given_path(uri, "model")
        if not (folder / "state.json").is_file():
            raise UserError(f"{uri}: is not a checkpoint folder (it has no state.json)")
        return folder
    from mlflow.exceptions import MlflowException

    try:
        root = _fetched(_location(uri, tracking_uri), tracking_uri)
    except (MlflowException, OSError) as error:
        raise UserError(f"{uri}: cannot be fetched from MLflow: {error}") from error
    # A link, or a folder that is one, may lead to somebody's file.
    own_files(root, "this model is not loaded")
    return _original(root) if (root / ELSEWHERE).is_file() else root / "checkpoint"


@cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    """Return this process's folder for copies of models, which is removed at its end."""
    return tempfile.TemporaryDirectory(prefix="dphybrid-models-")


# Cached: a logged model never changes, so that a process which loads it again needs no second copy.
@cache
def _fetched(location: str, tracking_uri: str | None) -> Path:
    """Return a folder with the artifacts at an address: where they are, or a copy in `_scratch`."""
    from mlflow.artifacts import download_artifacts

    is_local = urlparse(location).scheme in ("", "file")
    target = None if is_local else tempfile.mkdtemp(dir=_scratch().name)
    return Path(download_artifacts(artifact_uri=location, tracking_uri=tracking_uri, dst_path=target))


def _location(uri: str, tracking_uri: str | None) -> str:
    """Return where the files of `models:/...` are stored. Asks only `tracking_uri`; MLflow's own look-up
    would ask the store that is set for the whole process."""
    if not uri.startswith("models:/"):
        return uri
    from mlflow import MlflowClient

    # Only now: without a tracking URI, the client makes a database in the current folder.
    client = MlflowClient(tracking_uri, registry_uri=tracking_uri)
    match uri.removeprefix("models:/").replace("@", "/@").split("/"):
        case [str(model_id)] if model_id.startswith("m-"):
            return str(client.get_logged_model(model_id).artifact_location)
        case [str(name), str(version)]:
            by_alias = client.get_model_version_by_alias
            found = (
                by_alias(name, version[1:]) if version[:1] == "@" else client.get_model_version(name, version)
            )
            logged = client.get_logged_model(found.model_id) if found.model_id else None
            return str(logged.artifact_location if logged else found.source)
        case _:  # refused here: MLflow would make a store in the current folder and look there
            raise UserError(f"{uri}: write models:/NAME@champion, models:/NAME/VERSION or models:/m-ID")


def _original(root: Path) -> Path:
    """Return the checkpoint of a model's folder `root` without its files: where it was trained."""
    with (root / ELSEWHERE).open(encoding="utf-8", errors="replace") as file:
        folder = Path(file.read(_LONGEST_PATH))
    if not os.path.isfile(folder / "state.json"):
        raise UserError(
            f"{folder} is missing, and this checkpoint was too large to upload; load the model on a machine "
            "that sees this path, or copy the folder there"
        )
    # The same page: it has the checksums of all files.
    if file_digest(folder / "state.json") != file_digest(root / "checkpoint" / "state.json"):
        raise UserError(
            f"{folder}: is not the checkpoint that was recorded as this model; it belongs to another run now"
        )
    return folder
