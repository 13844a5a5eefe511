"""The tracker: its verbs append records to the run's file, and a background thread copies them to MLflow."""

import hashlib
import json
import logging
import os
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote

from dphybrid.tracking.record import (
    RECORD,
    Line,
    RecordFile,
    Sent,
    addresses,
    destination,
    give_address,
    of_metrics,
)
from dphybrid.util.files import make_folder
from dphybrid.util.text import masked, shown_address

if TYPE_CHECKING:
    from dphybrid.tracking.copier import Copier

Status = Literal["FINISHED", "FAILED", "KILLED"]

ELSEWHERE = "checkpoint_folder.txt"
"""File of a model whose checkpoint was too large to upload: the path of the checkpoint."""
CONTINUES_TAG = "dphybrid.continues"
"""Tag of MLflow's run of a resumed run with other values: MLflow's run of the earlier ones, as MLflow can
delete none of their points."""
CHAMPION_TAG = "dphybrid.champion"
"""Tag of a retraining's run and of its version: the version that it continued from, "none" for a first
model."""
SWEEP_TAG, FOLDER_TAG = "dphybrid.sweep", "dphybrid.run_folder"
FILES = "files"
"""The tracking URI that records runs in their folders only."""
EMBEDDED = "embedded"
"""The address that a record notes of the database in its own data folder, which may be moved."""
_FINISH_WAIT_S, _CLOSE_WAIT_S = 30.0, 5.0
"""How long the end of a run, and the end of one of its parts, wait for an unreachable server."""
_MAX = 250
_STRANGE = re.compile(r"[^\w\-./: ]")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Server:
    """An MLflow that gets copies of records. store: folder for the artifacts, with a database."""

    uri: str
    experiment: str
    store: Path

    @property
    def noted(self) -> str:
        """The address that a run's record notes, without secrets."""
        return EMBEDDED if self.uri == embedded_uri(self.store) else shown_address(self.uri)


def embedded_uri(store: Path) -> str:
    """Return the URI of the database that is used when no server is named."""
    file = f"{store / 'mlflow.db'}"
    # SQLAlchemy ends the file's name at a question mark, unless it is written as SQLite's own URI. With the
    # driver's name, as MLflow would make a folder of what follows sqlite:///.
    return f"sqlite+pysqlite:///file:{quote(file)}?uri=true" if "?" in file else f"sqlite:///{file}"


class Tracker:
    """The record of one run, in its folder below `runs`.

    Without `runs` it records nothing. Without a server, nothing leaves the folder. After `start` or `attach`,
    no verb raises because a server is unreachable. Only `register`, `close` and `finish` wait for the
    server, each for a limited time."""

    def __init__(self, runs: Path | None = None, server: Server | None = None) -> None:
        self._runs, self._server = runs, server
        self._file: RecordFile | None = None
        self._there: Line = {}  # the address: the line of the record with op run
        self._full = False
        self._copier: Copier | None = None
        self._opening = threading.Lock()

    @property
    def run_id(self) -> str:
        """MLflow's id of the run, or else its name; "" if it is not recorded."""
        return str(self._there.get("run_id", ""))

    @property
    def tracking_uri(self) -> str:
        """The address of the server, without secrets; `files` if runs are recorded in their folders only; ""
        if they are not recorded."""
        if self._server is not None:
            return shown_address(self._server.uri)
        return FILES if self._runs is not None else ""

    @property
    def run_url(self) -> str:
        """The address of the run's page in MLflow; "" if it has none."""
        if self._server is not None and self._there.get("experiment_id"):
            return page_address(self._server.uri, run_path(self._there["experiment_id"], self.run_id))
        return ""

    def start(
        self, run_name: str, params: Mapping[str, str], tags: Mapping[str, str], description: str
    ) -> str:
        """Create the run; return its id: MLflow's, or else its name. Raises UserError if MLflow refuses
        it, and leaves no file then."""
        if self._runs is None:
            return ""
        self._create(run_name, description)
        make_folder(self._runs / run_name)
        self._file = RecordFile(self._runs / run_name)
        self.record(self._there)
        self._log_values("params", params, sync=True)
        self.set_tags(tags)
        return self.run_id

    def adopt(self, run_name: str, tags: Mapping[str, str]) -> str:
        """Give the record of a run from elsewhere a run of its own in this MLflow instead of the one that it
        names; return the id. Raises UserError if MLflow refuses it."""
        if self._runs is None or not (self._runs / run_name / RECORD).is_file():
            return ""
        self._create(run_name, "")
        give_address(self._runs / run_name, self._there)
        self._file = RecordFile(self._runs / run_name)
        self.set_tags(tags)
        return self.run_id

    def resume(
        self,
        run_name: str,
        params: Mapping[str, str],
        tags: Mapping[str, str],
        description: str,
        changed: bool = False,
    ) -> str:
        """Continue a run that ended; return its id. changed: with other values, for which MLflow gets another
        run. Raises UserError if MLflow refuses that."""
        self.attach(run_name)
        if changed and self._is_copied:
            tags = {**tags, CONTINUES_TAG: self.run_id}
            self._create(run_name, description)
            self.record(self._there)
            self._log_values("params", params, sync=True)
        self.record({"op": "status", "status": "RUNNING"})
        self.set_tags(tags)
        return self.run_id

    def attach(self, run_name: str) -> None:
        """Continue to record a run that is still open. A run whose first attempt recorded nothing stays
        without a record."""
        if self._runs is None:
            return
        file = RecordFile(self._runs / run_name)
        if file.path.is_file():
            self._file, self._there = file, {**_address(run_name), **destination(file.folder)}

    def _create(self, run_name: str, description: str) -> None:
        experiment_id = str(self._there.get("experiment_id", ""))
        self._there = _address(run_name)
        if self._server is not None:
            from dphybrid.tracking.writer import create_run

            made = create_run(self._server, run_name, description, experiment_id)
            self._there = _address(run_name, self._server.noted, *made)

    @property
    def _is_copied(self) -> bool:
        """Whether this process copies the record to MLflow."""
        return self._file is not None and self._server is not None and bool(self._there.get("experiment_id"))

    def record(self, line: Line, *, sync: bool = False) -> int:
        """Append a line that one of the verbs below made; return the offset of its end. sync: it must survive
        a power loss."""
        if self._file is None:
            return 0
        end = self._file.append(line, sync=sync)
        self._copying()
        return end

    def _copying(self) -> "Copier | None":
        # The copier starts at the first line, not in `attach`: a caller that only wants the run's address
        # must not hold the record.
        if self._file is None or self._server is None or not self._is_copied:
            return None
        with self._opening:  # the thread that writes checkpoints may record at the same time
            if self._copier is None:
                self._copier = copier_of(self._file.folder, self._server.uri)
            return self._copier

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Record metrics at a step."""
        self._log_points(metrics, step, "metrics")

    def log_summary(self, metrics: Mapping[str, float]) -> None:
        """Record metrics of the run as a whole; a later attempt replaces them."""
        # At step 0, MLflow's charts draw one bar for each run; at any other step they draw a dot in a plot
        # over steps.
        self._log_points(metrics, 0, "summary")

    def _log_points(self, metrics: Mapping[str, float], step: int, op: str) -> None:
        try:
            self.record(of_metrics(metrics, step, op))
        except OSError as error:  # a full disk must not end the training; the curves lack some points
            if not self._full:
                _log.warning("metrics cannot be recorded: %s", error)
            self._full = True

    def log_file(self, name: str) -> None:
        """Record a file of the run's folder, which is read when it is sent."""
        self.record({"op": "file", "path": name})

    def keep(self) -> None:
        """Make all lines so far survive a power loss. Called before a checkpoint is saved, as a run resumed
        from it does not record the earlier steps again."""
        if self._file is not None:
            self._file.sync()

    def log_checkpoints(self, kept: Sequence[Mapping[str, Any]]) -> None:
        """Record which checkpoints the run keeps now, each as a model that can be loaded back; remove the
        others from the record.

        kept: for each checkpoint its uid (differs when its content does), name, step, folder, role (best,
        latest, best+latest or kept) and metrics (of the evaluation before it, as they were logged)."""
        if self._file is None:
            return
        root, cards = self._file.folder.absolute(), []
        for card in kept:
            # Relative to the run's folder, which may be moved before they are sent.
            folder = os.path.relpath(card["folder"].absolute(), root)
            metrics = {name: float(value) for name, value in card["metrics"].items()}
            cards.append({**card, "folder": folder, "metrics": metrics})
        self.record({"op": "checkpoints", "kept": cards}, sync=True)

    def register(self, name: str, uid: str, alias: str) -> str:
        """Make the recorded checkpoint `uid` a new version of the registered model `name`, with an alias that
        points to it.

        Wait for the server's answer, half a minute at most. Return why it is not registered (yet), or "".
        """
        if self._file is None:
            return "nothing is recorded"
        if self._server is None:
            return (
                "runs are recorded in their folders; registering needs MLflow: pip install 'dphybrid[mlflow]'"
            )
        end = self.record({"op": "register", "name": name, "uid": uid, "alias": alias}, sync=True)
        copier = self._copying()
        if copier is None:
            return "the run is not recorded in MLflow"
        if copier.wait(end, _FINISH_WAIT_S):
            return copier.sent.skipped.get(end, "")
        return f"{self.tracking_uri} does not answer now; `dphybrid sync` registers it when it is back"

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set short facts to filter and group runs by."""
        self._log_values("tags", tags)

    def _log_values(self, op: str, values: Mapping[str, str], sync: bool = False) -> None:
        self.record(
            {"op": op, "values": {name: masked(str(value)) for name, value in values.items()}}, sync=sync
        )

    def close(self) -> None:
        """Stop recording in this process; the run stays open."""
        self._end(_CLOSE_WAIT_S)

    def finish(self, status: Status) -> None:
        """End the run, and stop recording. Prints what MLflow lacks."""
        self.record({"op": "status", "status": status}, sync=True)
        if lacks := self._end(_FINISH_WAIT_S):
            print(f"{self.tracking_uri}: {lacks}", flush=True)

    def _end(self, timeout_s: float) -> str:
        lacks = self._copier.finish(timeout_s) if self._copier is not None else ""
        self._copier = None
        if self._file is not None:
            self._file.close()
        return lacks


def _address(run_name: str, uri: str = FILES, experiment_id: str = "", run_id: str = "") -> Line:
    """Return the line of a record that says where MLflow has the run; without a URI: nowhere."""
    where = {"run_id": run_id or run_name, "experiment_id": experiment_id, "tracking_uri": uri}
    return {"op": "run", "name": run_name, **where}


def copier_of(folder: Path, uri: str) -> "Copier":
    """Return a copier of the record in a folder to the MLflow at `uri`."""
    from dphybrid.tracking.copier import Copier
    from dphybrid.tracking.writer import MlflowWriter

    # The run that the next line belongs to; a line with an address comes before those of another one.
    there = [*addresses(folder)[:1], *addresses(folder, before=Sent.read(folder).offset)][-1]
    return Copier(folder, MlflowWriter(uri, there["run_id"], folder).write)


@lru_cache(maxsize=4096)
def safe_name(name: str) -> str:
    """Return `name`, or, if MLflow would refuse it, a readable substitute that no other name gets. MLflow
    accepts at most 250 letters, digits and `_-./: `, and no empty part between slashes."""
    parts = [part for part in _STRANGE.sub("_", name).split("/") if part not in ("", ".", "..")]
    safe = "/".join(parts).strip() or "_"
    if safe == name and len(name) <= _MAX:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:6]
    # The digest separates names that are equal by now: both `loss(a)` and `loss[a]` became `loss_a_`.
    return f"{safe[: _MAX - 7]}-{digest}"


def page_address(tracking_uri: str, page: str) -> str:
    """Return the address of a page of MLflow; "" for a database, which has none. page: what follows `#`."""
    return f"{shown_address(tracking_uri).rstrip('/')}/#{page}" if tracking_uri.startswith("http") else ""


def run_path(experiment_id: str, run_id: str) -> str:
    """Return the part after `#` in the address of a run."""
    return f"/experiments/{experiment_id}/runs/{run_id}?workflowType=machine_learning"


def comparison(recorded: Sequence[Mapping[str, Any]]) -> str:
    """Return where MLflow compares the curves of runs; "" unless one server or database has all of them.
    recorded: `destination` of each."""
    if not all(recorded) or len({noted["tracking_uri"] for noted in recorded}) > 1:
        return ""
    ids, experiments = ([str(noted[name]) for noted in recorded] for name in ("run_id", "experiment_id"))
    runs, of = quote(json.dumps(ids)), quote(json.dumps(sorted({*experiments})))
    page = f"/compare-runs?runs={runs}&experiments={of}"
    served = page_address(recorded[0]["tracking_uri"], page)
    return served or f"`dphybrid ui --port 5000`, then http://127.0.0.1:5000/#{page}"
