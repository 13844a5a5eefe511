"""Opens the tracker: an MLflow server or database by URI, or the embedded store in a folder."""

import fcntl
import logging
import os
import urllib.error
import urllib.request
from pathlib import Path

from dphybrid.errors import UserError
from dphybrid.tracking.base import Tracker

REACH_SECONDS = 10
"""How long to wait for a server's first answer before saying that it is not there."""


def open_tracker(tracking_uri: str | None, experiment: str, store: Path) -> Tracker:
    """Return a tracker for `experiment`. tracking_uri: server or database; None: SQLite and a folder of artifacts in `store`.

    Raises UserError when a server does not answer, and for the file stores that MLflow gave up.
    """
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    if tracking_uri is None:
        store.mkdir(parents=True, exist_ok=True)
        uri = f"sqlite:///{store / 'mlflow.db'}"
    else:
        uri = tracking_uri
        _check(uri)
    from dphybrid.tracking.mlflow_tracker import MlflowTracker

    logging.getLogger("alembic").setLevel(logging.WARNING)  # forty lines of schema news at the first start
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    if uri.startswith("sqlite"):
        lock = store / "mlflow.lock"
        store.mkdir(parents=True, exist_ok=True)
        with lock.open("w") as stream:  # processes that create the same new database at once break it
            fcntl.flock(stream, fcntl.LOCK_EX)
            return MlflowTracker(uri, experiment, store)
    return MlflowTracker(uri, experiment, store)


def _check(uri: str) -> None:
    if uri.startswith(("http://", "https://")):
        try:
            with urllib.request.urlopen(f"{uri.rstrip('/')}/health", timeout=REACH_SECONDS):
                return
        except urllib.error.HTTPError:
            return  # a server that answers with an error is there; MLflow's client tells what it wants
        except (OSError, ValueError) as error:
            raise UserError(
                f"MLflow server {uri}: does not answer ({error}); start it, correct MLFLOW_TRACKING_URI, or unset it for the embedded store"
            ) from error
    if uri.startswith("file:") or "://" not in uri:
        raise UserError(
            f"MLFLOW_TRACKING_URI={uri!r}: MLflow no longer writes file stores; use sqlite:////absolute/path/mlflow.db or a server's http address"
        )
