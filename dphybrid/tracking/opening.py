"""Opens the tracker: an MLflow server or database by its URI, or the embedded store in a folder."""

import importlib.util
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

from dphybrid.tracking.record import destination
from dphybrid.tracking.tracker import EMBEDDED, FILES, Server, Tracker, embedded_uri
from dphybrid.util.asking import ask
from dphybrid.util.errors import UserError
from dphybrid.util.files import make_folder
from dphybrid.util.importing import kept_from_gc
from dphybrid.util.locks import locked
from dphybrid.util.text import shown_address, without_secrets_of

_QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    # The copier itself retries for ever, so each of the client's calls should fail soon.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
}
"""Environment variables for MLflow's client; a value that the user has set wins."""
_REACH_SECONDS = 10
"""How long to wait for the first answer of a server."""


def open_tracker(
    tracking_uri: str | None,
    experiment: str,
    store: Path,
    *,
    runs: Path | None = None,
) -> Tracker:
    """Return a tracker for `experiment`, which records runs in their folders below `runs` (default: `runs` in
    `store`) and copies the records to MLflow.

    Raises UserError when a server does not answer.

    Args:
        tracking_uri: Server or database; None: SQLite and a folder of artifacts in `store`; "files", or None
            if MLflow is not installed: no copies; "none": a tracker that records nothing.
    """
    if tracking_uri == "none":
        return Tracker()
    runs = runs or store / "runs"
    if _in_files(tracking_uri):
        return Tracker(runs)
    if tracking_uri is not None and not tracking_uri.startswith("sqlite"):
        _check(tracking_uri)  # before MLflow is imported, which takes seconds
    return Tracker(runs, Server(store_to_write(tracking_uri, store), experiment, store))


def tracker_of(run_folder: Path, tracking_uri: str | None, store: Path) -> Tracker:
    """Return the tracker that continues the record of a run, at the address that the record notes; the server
    need not answer now. tracking_uri: the user's, see `noted_uri`; with "none" and "files" this process sends
    nothing. Raises UserError if the address cannot be used."""
    if tracking_uri == "none":
        return Tracker()
    there, server = destination(run_folder), None
    if there and tracking_uri != FILES and not _in_files(None):
        uri = noted_uri(there["tracking_uri"], tracking_uri, store)
        server = Server(store_to_write(uri, store), "", store)
    tracker = Tracker(run_folder.parent, server)
    tracker.attach(run_folder.name)
    return tracker


def noted_uri(noted: str, tracking_uri: str | None, store: Path) -> str:
    """Return the URI of the server or database that an own run's record notes. tracking_uri: the user's own,
    which may be the same one with its password. Raises UserError for an address whose password is not known,
    and for a database that does not exist."""
    if noted == EMBEDDED:
        return embedded_uri(store)
    file = noted.partition("sqlite:///")[2]
    if file and "?" not in file and not Path(file).is_file():  # MLflow's client would make an empty one
        raise UserError(f"{noted}: there is no such database, although the run's record names it")
    if tracking_uri and shown_address(tracking_uri) == noted:
        return tracking_uri
    if "***" in noted:
        raise UserError(f"set MLFLOW_TRACKING_URI to {noted} with its password")
    return noted


def noted_store(run_folder: Path, tracking_uri: str | None, store: Path) -> str | None:
    """Return the URI to ask about an own run: the one that its record notes; None if it is not recorded in
    MLflow. Raises UserError when that cannot be asked: the server does not answer, its password is not known,
    or another version of MLflow made the database."""
    there = destination(run_folder)
    if not there:
        return None
    uri = noted_uri(there["tracking_uri"], tracking_uri, store)
    if uri == embedded_uri(store) and recorded_in(None, store) is None:
        return None
    _check(uri)
    return uri


def import_mlflow(tracking_uri: str | None) -> None:
    """Import the part of MLflow that recording to `tracking_uri` needs (see `open_tracker`); this takes a
    second or two."""
    if tracking_uri == "none" or _in_files(tracking_uri):
        return
    os.environ.update(_QUIET | os.environ)
    # Only once: `kept_from_gc` would exempt the leftovers of a training from garbage collection, too.
    if "dphybrid.tracking.writer" not in sys.modules:
        with kept_from_gc():
            import dphybrid.tracking.writer  # noqa: F401

            if tracking_uri is None or tracking_uri.startswith("sqlite"):
                import mlflow.store.tracking.sqlalchemy_store  # noqa: F401
    # Otherwise alembic logs some forty lines when it makes the tables of a new database.
    for name in ("alembic", "mlflow"):
        logging.getLogger(name).setLevel(logging.WARNING)


def _in_files(tracking_uri: str | None) -> bool:
    """Return whether runs are recorded in plain files: on request, or because MLflow is not installed."""
    return tracking_uri == FILES or (tracking_uri is None and importlib.util.find_spec("mlflow") is None)


def store_to_read(tracking_uri: str | None, store: Path) -> str:
    """Return the URI to read runs from. Raises UserError when a server does not answer, and when no run is
    recorded yet."""
    uri = recorded_in(tracking_uri, store)
    if uri is None:
        raise UserError(
            f"{store}: no run is recorded there yet; train one first, or set DPHYBRID_TRACKING_URI or "
            "DPHYBRID_DATA_DIR"
        )
    _check(uri)
    return uri


def recorded_in(tracking_uri: str | None, store: Path) -> str | None:
    """Return the URI of the server or database that holds the runs; None if the embedded database does not
    exist yet. Raises UserError if runs are not recorded in MLflow."""
    os.environ.update(_QUIET | os.environ)
    if tracking_uri == "none" or _in_files(tracking_uri):
        raise UserError(
            f"the tracking URI is {tracking_uri or FILES}, so no run is recorded in MLflow; set "
            "DPHYBRID_TRACKING_URI to a server or database, or pip install 'dphybrid[mlflow]'"
        )
    made = tracking_uri is not None or (store / "mlflow.db").is_file()
    return tracking_uri or embedded_uri(store) if made else None


def store_to_write(tracking_uri: str | None, store: Path) -> str:
    """Return the URI to write MLflow's records to, after making the tables of an SQLite database."""
    uri = tracking_uri or embedded_uri(store)
    import_mlflow(uri)
    if uri.startswith("sqlite"):
        make_database(uri, store)
    return uri


def make_database(uri: str, store: Path) -> None:
    """Make MLflow's tables in a new SQLite database, under a lock: processes that make them at the same time
    would break the file. Raises UserError when they cannot be made."""
    from mlflow.tracking import MlflowClient
    from sqlalchemy.engine import make_url

    make_folder(store)
    file = store / "mlflow.db" if uri == embedded_uri(store) else Path(make_url(uri).database or "")
    with locked(store / "mlflow.lock"):
        if file.name and not file.exists():
            # In a scratch folder, renamed when complete: MLflow makes its tables one by one, and cannot
            # finish a file that has only some of them, as a crash would leave it. A new folder each time:
            # MLflow keeps its connections by path, even to files that no longer exist.
            make_folder(file.absolute().parent)
            with TemporaryDirectory(prefix=".mlflow-", dir=file.absolute().parent) as folder:
                with explained(str(file), "MLflow's tables cannot be made", "make room on its disk"):
                    MlflowClient(tracking_uri=embedded_uri(Path(folder))).get_experiment_by_name("Default")
                Path(folder, "mlflow.db").replace(file)
        # For an existing file, too: if it is empty, this call makes the tables, which needs the lock.
        _check(uri)


@contextmanager
def explained(address: str, what: str, remedy: str) -> Iterator[None]:
    """Raise UserError for an error of MLflow's or of its database. what: what failed there."""
    from alembic.util import CommandError
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (MlflowException, SQLAlchemyError, CommandError, ImportError) as error:
        said = " ".join(str(getattr(error, "orig", None) or error).split()).partition(". ")[0]
        why = without_secrets_of(address, said)[:200]
        raise UserError(f"{shown_address(address)}: {what} ({why}); {remedy}") from error


def _check(uri: str) -> None:
    """Raise UserError when no server answers at an address of http, and for an SQLite store of another
    version of MLflow."""
    if uri.startswith(("http://", "https://")):
        answer = ask(f"{uri.rstrip('/')}/health", timeout_s=_REACH_SECONDS)
        # With a status the server is up, although it may refuse this request; MLflow's client reports why.
        if not answer.status:
            raise UserError(
                f"MLflow server {shown_address(uri)}: {without_secrets_of(uri, answer.wrong)}; start it, "
                "correct the address, unset it for the embedded store, or record nothing with --tracking none"
            )
    elif uri.startswith("sqlite"):
        from mlflow.tracking import MlflowClient

        remedy = f"if another version made it, install that one, or run `mlflow db upgrade {uri}`"
        with explained(uri, f"MLflow {version('mlflow')} cannot use this store", remedy):
            MlflowClient(tracking_uri=uri).get_experiment_by_name("Default")


def checked(tracking_uri: str | None, store: Path) -> tuple[bool, str]:
    """Return whether a server answers as MLflow's client asks it, and the finding with its remedy. A database
    is not opened: MLflow's client takes seconds to import."""
    if not tracking_uri or not tracking_uri.startswith("http"):
        where = shown_address(tracking_uri) if tracking_uri else f"embedded, in {store}"
        return True, f"MLflow: {where}; `dphybrid ui` shows the runs"
    user, password, token = (
        os.environ.get(f"MLFLOW_TRACKING_{name}") for name in ("USERNAME", "PASSWORD", "TOKEN")
    )
    page = f"{tracking_uri.rstrip('/')}/api/2.0/mlflow/experiments/search?max_results=1"
    # As MLflow's client does: user and password before the token.
    answer = ask(page, f"{user}:{password}" if user else None, None if user else token)
    wrong = without_secrets_of(tracking_uri, answer.wrong)
    server = f"MLflow server {shown_address(tracking_uri)}"
    remedy = "correct MLFLOW_TRACKING_URI, _USERNAME, _PASSWORD or _TOKEN, set SSL_CERT_FILE, or start it"
    return not wrong, f"{server}: {wrong}; remedy: {remedy}" if wrong else f"{server}: answers"
