"""Finds the folder of a checkpoint: in MLflow by model or by registered name and alias, or on the disk."""

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from urllib.parse import urlparse

from pydantic import BaseModel, TypeAdapter

from dphybrid.tracking.tracker import LEFT_OUT
from dphybrid.util.digests import SUMS, allow_links, inside, own_files
from dphybrid.util.errors import UserError
from dphybrid.util.files import given_path, scratch_folder


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
    `models:/NAME@ALIAS`.

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
    return _with_left_out(root) / "checkpoint"


@cache
def _scratch() -> Path:
    """Return this process's folder for copies of models. It is removed at the end of the process; if that was
    killed, by the next one that needs such a folder."""
    held = ExitStack()
    atexit.register(held.close)
    return held.enter_context(scratch_folder(Path(tempfile.gettempdir()), "dphybrid-models-"))


# Cached: a logged model never changes, so that a process which loads it again needs no second copy.
@cache
def _fetched(location: str, tracking_uri: str | None) -> Path:
    """Return a folder with the artifacts at an address: where they are, or a copy in `_scratch`."""
    from mlflow.artifacts import download_artifacts

    is_local = urlparse(location).scheme in ("", "file")
    target = None if is_local else tempfile.mkdtemp(dir=_scratch())
    return Path(download_artifacts(artifact_uri=location, tracking_uri=tracking_uri, dst_path=target))


def _location(uri: str, tracking_uri: str | None) -> str:
    """Return where the files of `models:/...` are stored. Asks only `tracking_uri`; MLflow's own look-up
    would ask the store that is set for the whole process."""
    if not uri.startswith("models:/"):
        return uri
    from mlflow import MlflowClient

    # Only now: without a tracking URI, the client makes a database in the current folder.
    client = MlflowClient(tracking_uri, registry_uri=tracking_uri)
    location: str | None
    match uri.removeprefix("models:/").replace("@", "/@").split("/"):
        case [str(model_id)] if model_id.startswith("m-"):
            location = client.get_logged_model(model_id).artifact_location
        case [str(name), str(version)]:
            alias = version.startswith("@")
            found = (
                client.get_model_version_by_alias(name, version[1:])
                if alias
                else client.get_model_version(name, version)
            )
            location = (
                client.get_logged_model(found.model_id).artifact_location if found.model_id else found.source
            )
        case _:  # refused here: MLflow would make a store in the current folder and look there
            raise UserError(f"{uri}: write models:/NAME@champion, models:/NAME/VERSION or models:/m-ID")
    return str(location)


class _LeftOut(BaseModel):
    """A file that was too large to upload, as listed in `LEFT_OUT`."""

    name: str
    path: Path
    bytes: int
    sha256: str = ""
    crc32: str = ""

    def check(self) -> None:
        """Raise UserError when the file no longer exists or has changed since."""
        if not self.path.is_file():
            raise UserError(
                f"{self.path} is missing, and with {self.bytes / 2**20:.0f} MiB it was too large to "
                "upload; load the model on a machine that sees this path, or copy the file there"
            )
        sums = {kind: getattr(self, kind) for kind in SUMS if getattr(self, kind)}
        if not sums or any(SUMS[kind](self.path) != known for kind, known in sums.items()):
            raise UserError(
                f"{self.path}: its checksum differs from the one recorded with the model; it belongs to "
                "another checkpoint now"
            )


def _with_left_out(root: Path) -> Path:
    """Return the model's folder, completed by links to the files that were too large to upload."""
    page = root / LEFT_OUT
    if not page.is_file():
        return root
    try:
        entries = TypeAdapter(list[_LeftOut]).validate_json(page.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(
            f"{page}: is damaged, or no list of a model's left-out files; this model is not loaded"
        ) from error
    # A new folder: `root` may be the store's own, which must not change. It holds only links, and stays until
    # the process ends, because callers load from it later.
    whole = Path(tempfile.mkdtemp(dir=_scratch()))
    shutil.copytree(root, whole, copy_function=os.symlink, dirs_exist_ok=True)
    checkpoint = (whole / "checkpoint").resolve()
    for entry in entries:
        inside(checkpoint, entry.name, "; this model is not loaded")
    allow_links(checkpoint)
    for entry in entries:
        target = checkpoint / entry.name
        entry.check()
        target.parent.mkdir(parents=True, exist_ok=True)  # uploads leave out empty folders
        target.unlink(missing_ok=True)
        os.symlink(entry.path, target)
    return whole
