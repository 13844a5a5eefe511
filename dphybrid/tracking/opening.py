"""Opens the tracker: an MLflow server or database by URI, or the embedded store in a folder."""

import importlib.util
import logging
import os
import urllib.error
import urllib.request
from functools import cache
from http.client import HTTPException
from importlib.metadata import entry_points
from pathlib import Path

from dphybrid.tracking.base import Detail, Tracker
from dphybrid.tracking.files import FILES, FileTracker
from dphybrid.util.errors import UserError
from dphybrid.util.files import scratch_folder
from dphybrid.util.importing import kept_from_gc
from dphybrid.util.locks import locked
from dphybrid.util.text import without_credentials

_SCHEMES = ("http", "https", "sqlite", "postgresql", "mysql", "mssql", "databricks", "file")
_DATABASES = ("postgresql", "mysql", "mssql")
_QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    # The outbox is sent again for ever, so the client itself should give up soon.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
}
"""What MLflow reads from the environment where it says nothing else."""
_REACH_SECONDS = 10
"""How long to wait for a server's first answer before saying that it is not there."""


def open_tracker(
    tracking_uri: str | None,
    experiment: str,
    store: Path,
    *,
    runs: Path = Path("runs"),
    upload_limit: int = 900 * 2**20,
    must_answer: bool = True,
    detail: Detail = "brief",
) -> Tracker:
    """Return a tracker for `experiment`.

    tracking_uri: server or database; None: SQLite and a folder of artifacts in `store`, or files where MLflow
    is not installed; "none": a tracker that records nothing; "files": plain files in the runs' folders below
    `runs`.
    upload_limit: bytes above which a file of a checkpoint is recorded by path and digest. must_answer: look
    whether the server is there.
    detail: brief sends about 20 metrics and puts the finer ones into a table among the artifacts; full sends
    all as metrics. Raises UserError when a server does not answer, and for the file stores that MLflow gave
    up.
    """
    if tracking_uri == "none":
        return Tracker()
    if _in_files(tracking_uri):
        return FileTracker(runs)
    os.environ.update(_QUIET | os.environ)
    if must_answer and tracking_uri is not None:
        _check(tracking_uri)
    import_mlflow(tracking_uri)
    from dphybrid.tracking.tracker import MlflowTracker

    uri = store_to_write(tracking_uri, store)
    return MlflowTracker(uri, experiment, store, upload_limit, detail)


@cache  # once: what a training has left behind is garbage, and must not be taken for imports
def import_mlflow(tracking_uri: str | None) -> None:
    """Import what recording at a place needs (as in `open_tracker`), which takes a second or two."""
    if tracking_uri == "none" or _in_files(tracking_uri):
        return
    with kept_from_gc():
        import dphybrid.tracking.tracker  # noqa: F401

        logging.getLogger("alembic").setLevel(logging.WARNING)  # forty lines of schema news
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        if tracking_uri is None or tracking_uri.startswith("sqlite"):
            import mlflow.store.tracking.sqlalchemy_store  # noqa: F401


def _in_files(tracking_uri: str | None) -> bool:
    """Are runs recorded in plain files: because that was asked for, or as MLflow is not installed?"""
    return tracking_uri == FILES or (tracking_uri is None and importlib.util.find_spec("mlflow") is None)


def store_to_read(tracking_uri: str | None, store: Path) -> str:
    """Return where runs are read from. Raises UserError when a server does not answer, and when nothing is
    recorded there yet."""
    uri = recorded_in(tracking_uri, store)
    if uri is None:
        raise UserError(
            f"{store}: no run is recorded there yet; train one first, or set DPHYBRID_TRACKING_URI or "
            "DPHYBRID_DATA_DIR"
        )
    if tracking_uri is not None:
        _check(tracking_uri)
    return uri


def recorded_in(tracking_uri: str | None, store: Path) -> str | None:
    """Return the server or database with the runs' records, None where the embedded one is not made yet.
    Raises UserError where runs are not recorded in MLflow."""
    os.environ.update(_QUIET | os.environ)
    if tracking_uri == "none":
        raise UserError(
            "tracking is none: no run is recorded there; set DPHYBRID_TRACKING_URI to a server or database"
        )
    if _in_files(tracking_uri):
        raise UserError(
            "runs are recorded in files (runs/NAME/record in the data folder), and this reads MLflow; pip "
            "install 'dphybrid[mlflow]' and unset DPHYBRID_TRACKING_URI=files to record there"
        )
    made = tracking_uri is not None or (store / "mlflow.db").is_file()
    return tracking_uri or embedded_uri(store) if made else None


def store_to_write(tracking_uri: str | None, store: Path) -> str:
    """Return where MLflow's records go; the tables of an SQLite database are there then."""
    uri = tracking_uri or embedded_uri(store)
    if uri.startswith("sqlite"):
        make_database(uri, store)
    return uri


def embedded_uri(store: Path) -> str:
    """Return the address of the database that is used where no server is named."""
    return f"sqlite:///{store / 'mlflow.db'}"


def make_database(uri: str, store: Path) -> None:
    """Make the tables of a new SQLite database. Processes that do it at the same time would break it, so they
    queue. Raises UserError when they cannot be made."""
    from mlflow.tracking import MlflowClient
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import DBAPIError

    store.mkdir(parents=True, exist_ok=True)
    url = make_url(uri)
    file = Path(url.database or "")
    with locked(store / "mlflow.lock"):
        if file.name and not file.exists():
            # MLflow makes its tables one by one, and never finishes a file that has some of them. The folder
            # is new each time, for MLflow keeps connections to files that are gone.
            with scratch_folder(file.absolute().parent, ".mlflow-") as folder:
                there = url.set(database=str(folder / file.name))
                try:
                    MlflowClient(tracking_uri=str(there)).get_experiment_by_name("Default")
                except DBAPIError as error:
                    raise UserError(
                        f"{file}: MLflow's tables cannot be made ({error.orig}); make room on its disk"
                    ) from error
                (folder / file.name).replace(file)
        MlflowClient(tracking_uri=uri).get_experiment_by_name("Default")


def _check(uri: str) -> None:
    """Raise UserError for an address that MLflow does not take, or where nobody answers."""
    scheme = uri.partition("://")[0].partition("+")[0].lower()
    known = (*_SCHEMES, *(point.name for point in entry_points(group="mlflow.tracking_store")))
    if uri.startswith(("http://", "https://")):
        _check_server(uri)
    elif scheme == "file" or "://" not in uri:
        raise UserError(
            f"{_given(uri)}: MLflow no longer writes file stores; use sqlite:////absolute/path/mlflow.db or "
            "a server's http address"
        )
    elif scheme not in known:
        raise UserError(f"{_given(uri)}: MLflow knows no {scheme}://; it knows {', '.join(_SCHEMES)}")
    elif scheme in _DATABASES:
        _check_database(uri)


def _given(uri: str) -> str:
    """Return a tracking URI behind the name that somebody gave it by."""
    own = os.environ.get("DPHYBRID_TRACKING_URI") != uri  # which --tracking sets, too
    if own and os.environ.get("MLFLOW_TRACKING_URI") == uri:
        return f"MLFLOW_TRACKING_URI={uri!r}"
    return f"tracking={uri!r}"


def _check_server(uri: str) -> None:
    try:
        address, _ = without_credentials(uri)  # that it is there, it tells to everybody
        health = f"{address.rstrip('/')}/health"
        with urllib.request.urlopen(health, timeout=_REACH_SECONDS):  # noqa: S310 - http, as just checked
            return
    except urllib.error.HTTPError:
        return  # a server that answers with an error is there; MLflow's client tells what it wants
    except (OSError, ValueError, HTTPException) as error:
        raise UserError(
            f"MLflow server {uri}: does not answer ({error}); start it, correct the address, unset it for "
            "the embedded store, or record nothing with --tracking none"
        ) from error


def _check_database(uri: str) -> None:
    """Raise UserError when a database's driver is missing or no connection comes about: MLflow itself tries
    for two minutes, or waits for ever where somebody listens who does not answer."""
    from sqlalchemy import create_engine
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import DBAPIError, SQLAlchemyError

    try:
        driver = make_url(uri).get_driver_name()
        within = "timeout" if driver in ("pg8000", "pyodbc") else "connect_timeout"
        create_engine(uri, connect_args={within: _REACH_SECONDS}).connect().close()
    except DBAPIError as error:
        reason = " ".join(str(error.orig).split())
        raise UserError(
            f"{_given(uri)}: no connection to the database ({reason}); start it, correct the "
            "address, or unset it for the embedded store"
        ) from error
    except (SQLAlchemyError, ImportError, ValueError) as error:
        raise UserError(f"{_given(uri)}: cannot be used ({error})") from error
