"""Opens the tracker: an MLflow server or database by its URI, or the embedded store in a folder."""

import importlib.util
import logging
import os
import sqlite3
from contextlib import closing
from functools import cache
from importlib.metadata import entry_points, version
from pathlib import Path

from dphybrid.tracking.record import RecordFile
from dphybrid.tracking.tracker import EMBEDDED, FILES, Server, Tracker, embedded_uri
from dphybrid.util.asking import ask
from dphybrid.util.errors import UserError
from dphybrid.util.files import make_folder, scratch_folder
from dphybrid.util.importing import kept_from_gc
from dphybrid.util.locks import locked
from dphybrid.util.text import shown_address, without_secrets_of

_SCHEMES = ("http", "https", "sqlite", "postgresql", "mysql", "mssql", "databricks", "file")
_DATABASES = ("postgresql", "mysql", "mssql")
_QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    # The sender itself retries for ever, so each of the client's calls should fail soon.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
}
"""Environment variables for MLflow's client; a value that the user has set wins."""
_ADDRESSES = [
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
    ("model_versions", "source"),
    ("model_versions", "storage_location"),
]
"""Table and column of each address of artifacts in MLflow's database."""
_REACH_SECONDS = 10
"""How long to wait for the first answer of a server or database."""


def open_tracker(
    tracking_uri: str | None,
    experiment: str,
    store: Path,
    *,
    runs: Path | None = None,
    upload_limit: int = 900 * 2**20,
    must_answer: bool = True,
) -> Tracker:
    """Return a tracker for `experiment`, which records runs in their folders below `runs` (default: `runs` in
    `store`) and copies the records to MLflow.

    Raises UserError when a server does not answer, and for file stores, which MLflow no longer writes.

    Args:
        tracking_uri: Server or database; None: SQLite and a folder of artifacts in `store`; "files", or None
            if MLflow is not installed: no copies; "none": a tracker that records nothing.
        upload_limit: A checkpoint's file of more bytes is recorded by path and digest instead of being
            uploaded.
        must_answer: Check first that the server answers.
    """
    if tracking_uri == "none":
        return Tracker()
    runs = runs or store / "runs"
    if _in_files(tracking_uri):
        return Tracker(runs)
    os.environ.update(_QUIET | os.environ)
    if must_answer and tracking_uri is not None:
        _check(tracking_uri)
    import_mlflow(tracking_uri)
    return Tracker(runs, Server(store_to_write(tracking_uri, store), experiment, store, upload_limit))


def tracker_of(run_folder: Path, tracking_uri: str | None, store: Path, upload_limit: int) -> Tracker:
    """Return the tracker that continues the record of a run, at the address that the record notes; the server
    need not answer now. tracking_uri: the user's, see `noted_uri`; with "none" and "files" this process sends
    nothing. Raises UserError if the address cannot be used."""
    if tracking_uri == "none":
        return Tracker()
    there, uri = RecordFile(run_folder).destination(), FILES
    if there and tracking_uri != FILES and importlib.util.find_spec("mlflow") is not None:
        uri = noted_uri(there["tracking_uri"], tracking_uri, store)
    tracker = open_tracker(
        None if uri == embedded_uri(store) else uri,
        "",
        store,
        runs=run_folder.parent,
        upload_limit=upload_limit,
        must_answer=False,
    )
    tracker.attach(run_folder.name)
    return tracker


def noted_uri(noted: str, tracking_uri: str | None, store: Path) -> str:
    """Return the URI of the server or database that a run's record notes. tracking_uri: the user's own, which
    may be the same one with its password. Raises UserError for an address whose password is not known, and
    for a database that does not exist."""
    if noted == EMBEDDED:
        return embedded_uri(store)
    file = noted.partition("sqlite:///")[2]
    if file and "?" not in file and not Path(file).is_file():  # MLflow's client would make an empty one
        raise UserError(f"{noted}: there is no such database, although the run's record names it")
    if "***" not in noted:
        return noted
    if tracking_uri and shown_address(tracking_uri) == noted:
        return tracking_uri
    raise UserError(f"set MLFLOW_TRACKING_URI to {noted} with its password")


def noted_store(run_folder: Path, tracking_uri: str | None, store: Path) -> str | None:
    """Return the URI to ask about a run: the one that its record notes; None if it is not recorded in MLflow.
    Raises UserError when that cannot be asked: the server does not answer, its password is not known, or the
    address is damaged."""
    there = RecordFile(run_folder).destination()
    if not there:
        return None
    uri = noted_uri(there["tracking_uri"], tracking_uri, store)
    if uri == embedded_uri(store):
        return recorded_in(None, store)
    _check(uri)
    return uri


# Cached, because `kept_from_gc` exempts every object alive at its end from garbage collection. A second call
# after a training would exempt that training's leftovers, too.
@cache
def import_mlflow(tracking_uri: str | None) -> None:
    """Import the part of MLflow that recording to `tracking_uri` needs (see `open_tracker`); this takes a
    second or two."""
    if tracking_uri == "none" or _in_files(tracking_uri):
        return
    with kept_from_gc():
        import dphybrid.tracking.writer  # noqa: F401

        # Otherwise alembic logs some forty lines when it makes the tables of a new database.
        logging.getLogger("alembic").setLevel(logging.WARNING)
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        if tracking_uri is None or tracking_uri.startswith("sqlite"):
            import mlflow.store.tracking.sqlalchemy_store  # noqa: F401


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
    if tracking_uri is not None:
        _check(tracking_uri)
    if uri.startswith("sqlite"):
        _check_version(uri)
    return uri


def recorded_in(tracking_uri: str | None, store: Path) -> str | None:
    """Return the URI of the server or database that holds the runs; None if the embedded database does not
    exist yet. Raises UserError if runs are not recorded in MLflow."""
    os.environ.update(_QUIET | os.environ)
    if tracking_uri == "none":
        raise UserError(
            "the tracking URI is none, so no run is recorded; set DPHYBRID_TRACKING_URI to a server or "
            "database"
        )
    if _in_files(tracking_uri):
        raise UserError(
            "runs are recorded in files (runs/NAME/record.jsonl below the data folder), but this reads "
            "MLflow. To record in MLflow, pip install 'dphybrid[mlflow]' and unset "
            "DPHYBRID_TRACKING_URI=files"
        )
    if tracking_uri is None:
        follow_move(store)
    made = tracking_uri is not None or (store / "mlflow.db").is_file()
    return tracking_uri or embedded_uri(store) if made else None


def store_to_write(tracking_uri: str | None, store: Path) -> str:
    """Return the URI to write MLflow's records to, after making the tables of an SQLite database."""
    uri = tracking_uri or embedded_uri(store)
    if uri.startswith("sqlite"):
        make_database(uri, store)
    if tracking_uri is None:
        follow_move(store)
    return uri


def follow_move(store: Path) -> None:
    """Correct the addresses of the artifacts in the embedded database if the data folder was moved or copied
    since: MLflow records absolute ones."""
    file, here = store / "mlflow.db", (store / "artifacts").as_uri()
    if not file.is_file():
        return
    with closing(sqlite3.connect(file, timeout=20)) as database:
        try:
            found = database.execute("SELECT DISTINCT artifact_location FROM experiments").fetchall()
            # Only addresses that dphybrid gave to this store's experiments, wherever the store was then.
            moved = [old for (old,) in found if f"{old}".endswith(f"/{store.name}/artifacts") and old != here]
            if not moved:
                return
            with database:
                for table, column in _ADDRESSES:
                    for old in moved:
                        database.execute(
                            f"UPDATE {table} SET {column} = ? || substr({column}, ?)"  # noqa: S608 - constants
                            f" WHERE {column} = ? OR substr({column}, 1, ?) = ?",
                            (here, len(old) + 1, old, len(old) + 1, f"{old}/"),
                        )
        except sqlite3.OperationalError:  # no tables yet, or another MLflow's
            return


def make_database(uri: str, store: Path) -> None:
    """Make MLflow's tables in a new SQLite database, under a lock: processes that make them at the same time
    would break the file. Raises UserError when they cannot be made."""
    from mlflow.tracking import MlflowClient
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import DBAPIError

    make_folder(store)
    url = make_url(uri)
    own = uri == embedded_uri(store)
    file = store / "mlflow.db" if own else Path(url.database or "")
    with locked(store / "mlflow.lock"):
        if file.name and not file.exists():
            # In a scratch folder, renamed when complete: MLflow makes its tables one by one, and cannot
            # finish a file that has only some of them, as a crash would leave it. A new folder each time:
            # MLflow keeps its connections by path, even to files that no longer exist.
            with scratch_folder(file.absolute().parent, ".mlflow-") as folder:
                scratch = embedded_uri(folder) if own else str(url.set(database=str(folder / file.name)))
                try:
                    MlflowClient(tracking_uri=scratch).get_experiment_by_name("Default")
                except DBAPIError as error:
                    raise UserError(
                        f"{file}: MLflow's tables cannot be made ({error.orig}); make room on its disk"
                    ) from error
                (folder / file.name).replace(file)
        # For an existing file, too: if it is empty, this call makes the tables, which needs the lock.
        _check_version(uri)


def _check_version(uri: str) -> None:
    """Raise UserError for an SQLite store that another version of MLflow has made."""
    from alembic.util import CommandError
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient
    from sqlalchemy.exc import DBAPIError

    try:
        MlflowClient(tracking_uri=uri).get_experiment_by_name("Default")
    except (MlflowException, DBAPIError, CommandError) as error:
        why = " ".join(str(error).split()).partition(". ")[0][:200]
        raise UserError(
            f"{shown_address(uri)}: MLflow {version('mlflow')} cannot use this store ({why}); if another "
            f"version made it, install that one, or copy the file and run `mlflow db upgrade {uri}`"
        ) from error


def _check(uri: str) -> None:
    """Raise UserError for an address that MLflow does not take, and when nothing answers there."""
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
    """Return a tracking URI after the name of the setting that it comes from."""
    # --tracking sets DPHYBRID_TRACKING_URI, too.
    not_ours = os.environ.get("DPHYBRID_TRACKING_URI") != uri
    if not_ours and os.environ.get("MLFLOW_TRACKING_URI") == uri:
        return f"MLFLOW_TRACKING_URI={shown_address(uri)!r}"
    return f"tracking={shown_address(uri)!r}"


def _check_server(uri: str) -> None:
    answer = ask(f"{uri.rstrip('/')}/health", timeout_s=_REACH_SECONDS)
    # With a status the server is up, although it may refuse this request; MLflow's client will report why.
    if not answer.status:
        raise UserError(
            f"MLflow server {shown_address(uri)}: {without_secrets_of(uri, answer.wrong)}; start it, correct "
            "the address, unset it for the embedded store, or record nothing with --tracking none"
        )


def _check_database(uri: str) -> None:
    """Raise UserError when a database's driver is missing or no connection can be made. MLflow itself would
    try for two minutes, and wait for ever for a server that accepts connections without answering."""
    from sqlalchemy import create_engine
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import DBAPIError, SQLAlchemyError

    try:
        driver = make_url(uri).get_driver_name()
        # The drivers name this argument differently.
        timeout = "timeout" if driver in ("pg8000", "pyodbc") else "connect_timeout"
        create_engine(uri, connect_args={timeout: _REACH_SECONDS}).connect().close()
    except DBAPIError as error:
        reason = without_secrets_of(uri, " ".join(str(error.orig).split()))
        raise UserError(
            f"{_given(uri)}: no connection to the database ({reason}); start it, correct the "
            "address, or unset it for the embedded store"
        ) from error
    except (SQLAlchemyError, ImportError, ValueError) as error:
        raise UserError(f"{_given(uri)}: cannot be used ({without_secrets_of(uri, str(error))})") from error
