"""The tracker for MLflow. Every record goes into the run's outbox, and a background thread sends it.

All calls use the client with an explicit run id, never the fluent functions: their active run is local to a
thread.
"""

import logging
import os
import re
import threading
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from dphybrid.tracking.base import Detail, Record, Status, Tracker, as_floats, as_shown, safe_name
from dphybrid.tracking.outbox import Outbox
from dphybrid.tracking.sender import Sender
from dphybrid.tracking.writer import RESULT, SPEED, MlflowWriter, run_path, view_path
from dphybrid.util.errors import UserError
from dphybrid.util.text import masked, shown_address

_log = logging.getLogger(__name__)

_FINISH_WAIT_S, _CLOSE_WAIT_S = 30.0, 5.0
"""How long the end of a run, and the end of one of its parts, wait for an unreachable server."""

_DETAILS = (
    "timing/",
    "timing_mean/",
    "timing_share/",
    "embedding/",
    "split/",
    "system/",
    "perf/step_ms_",
    "train/lr",
)
_STILL_SENT = re.compile(r"system/(?:process_rss_mb|gpu\d+_(?:utilization_pct|memory_mb))")
"""Exceptions from `_DETAILS`: metrics that are sent even if the detail is brief."""


class MlflowTracker(Tracker):
    """Records one run at `tracking_uri` in `experiment`.

    store: folder for the outboxes and, with a database, for the artifacts. upload_limit: a checkpoint's file
    of more bytes is recorded by path and digest instead of being uploaded. detail: brief puts the finer
    metrics into a table, full sends all as metrics.
    """

    def __init__(
        self, tracking_uri: str, experiment: str, store: Path, upload_limit: int, detail: Detail = "brief"
    ) -> None:
        self._uri = tracking_uri
        self.tracking_uri = shown_address(tracking_uri)
        self.run_id = ""
        self._brief = detail == "brief"
        self._experiment, self._store, self._upload_limit = experiment, store, upload_limit
        self._experiment_id = ""
        self._outbox: Outbox | None = None
        self._sender: Sender | None = None
        self._opening = threading.Lock()

    @property
    def run_url(self) -> str:
        return run_address(self._uri, self._experiment_id, self.run_id)

    @property
    def views(self) -> dict[str, str]:
        return {
            name: f"{_ui_address(self._uri)}/#{view_path(self._experiment_id, name)}"
            for name in (RESULT, SPEED)
        }

    @property
    def ui_command(self) -> str:
        if self._uri.startswith("http"):
            return self.run_url
        return f"mlflow server --backend-store-uri {self.tracking_uri} --port 5000"

    def start(
        self, run_name: str, params: Mapping[str, str], tags: Mapping[str, str], description: str
    ) -> str:
        client = MlflowClient(tracking_uri=self._uri, registry_uri=self._uri)
        self._experiment_id = find_experiment(client, self._uri, self._experiment, self._store)
        own = {
            "mlflow.source.name": "dphybrid",
            "mlflow.source.type": "JOB",
            "mlflow.user": os.environ.get("USER", ""),
            "mlflow.note.content": description,
        }
        run = client.create_run(self._experiment_id, run_name=run_name, tags=own)
        self.run_id = str(run.info.run_id)
        self._outbox = Outbox(self._spool, self.run_id)
        self._outbox.set_destination(tracking_uri=self._uri, experiment_id=self._experiment_id)
        self.record({"op": "params", "values": as_shown(params)})
        self.set_tags(tags)
        return self.run_id

    def resume(self, run_id: str, tags: Mapping[str, str]) -> None:
        self.attach(run_id)
        self.record({"op": "status", "status": "RUNNING"})
        self.set_tags(tags)

    def attach(self, run_id: str) -> None:
        self.run_id = run_id
        self._outbox = Outbox(self._spool, run_id)
        self._experiment_id = self._outbox.destination().get("experiment_id", "")

    @property
    def _spool(self) -> Path:
        return self._store / "spool"

    def _open(self) -> tuple[Outbox, Sender]:
        # The sender starts at the first record, not in `attach`: a caller that only wants the run's address
        # must not hold the outbox.
        if self._outbox is None:
            raise RuntimeError("no run: call start(), resume() or attach() first")
        with self._opening:  # the thread that writes checkpoints may record at the same time
            if self._sender is None:
                writer = MlflowWriter(self._uri, self.run_id, self._upload_limit)
                self._sender = Sender(self._outbox, writer.write, writer.beat)
            return self._outbox, self._sender

    def record(self, record: Record, *, content: bytes | None = None, sync: bool = False) -> None:
        self._open()[0].append(record, content=content, sync=sync)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        outbox, _ = self._open()
        values = as_floats(metrics)
        try:
            outbox.append_metrics(values, step, self._details(values))
        except OSError as error:  # a full disk must not end the training; the curves lack some points
            outbox.count_unkept()
            _log.warning("metrics of step %d could not be kept: %s", step, error)

    def log_summary(self, metrics: Mapping[str, float]) -> None:
        # At step 0, MLflow's charts draw one bar for each run; at any other step they draw a dot in a plot
        # over steps.
        values = as_floats(metrics)
        self._open()[0].append_metrics(values, 0, self._details(values), anew=True)
        if finals := [safe_name(name) for name in metrics if name.startswith("final/")]:
            self.record({"op": "views", "finals": finals})

    def _details(self, metrics: Mapping[str, float]) -> list[str]:
        return [name for name in metrics if self._brief and _is_detail(name)]

    def keep(self) -> None:
        self._open()[0].sync()

    def register(self, name: str, uid: str, alias: str) -> str:
        outbox, sender = self._open()
        record = {"op": "register", "name": name, "uid": uid, "alias": alias}
        # Not through `record`, which returns no number; `sender.refused` needs it.
        number = outbox.append(record, sync=True)
        arrived = sender.drain(_FINISH_WAIT_S)
        if number in sender.refused:
            return sender.refused[number]
        if arrived:
            return ""
        return f"{self.tracking_uri} does not take records now; `dphybrid sync` registers it when it is back"

    def flush(self, timeout_s: float = _FINISH_WAIT_S) -> bool:
        return self._open()[1].drain(timeout_s)

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close(_CLOSE_WAIT_S)
            self._sender = None

    def finish(self, status: Status) -> None:
        self.record({"op": "status", "status": status}, sync=True)
        outbox, sender = self._open()
        arrived, losses = sender.deliver(_FINISH_WAIT_S)
        if not arrived:
            print(
                f"MLflow at {self.tracking_uri} does not take records now"
                f"{f' ({sender.trouble})' if sender.trouble else ''}; {outbox.counts()[0]:,} are kept. "
                "`dphybrid sync` sends them when it is back.",
                flush=True,
            )
        if losses:
            print(f"Not everything was recorded: {masked(losses.text())}", flush=True)
        self._sender = None


def _ui_address(tracking_uri: str) -> str:
    """Return the address of MLflow's pages: the server's, or the default of `mlflow server` for a
    database."""
    return shown_address(tracking_uri if tracking_uri.startswith("http") else "http://127.0.0.1:5000").rstrip(
        "/"
    )


def run_address(tracking_uri: str, experiment_id: str, run_id: str) -> str:
    """Return the address of a run's page."""
    return f"{_ui_address(tracking_uri)}/#{run_path(experiment_id, run_id)}"


def find_experiment(client: MlflowClient, tracking_uri: str, name: str, store: Path) -> str:
    """Return the id of an experiment; make it if it does not exist. Raises UserError for a deleted one."""
    found = client.get_experiment_by_name(name)
    if found is not None and found.lifecycle_stage != "active":
        raise UserError(
            f"MLflow experiment {name!r} was deleted; restore it, or set DPHYBRID_EXPERIMENT to another name"
        )
    if found is not None:
        return str(found.experiment_id)
    # An absolute folder: a database stores an experiment's artifact folder once and for all, so it must not
    # depend on the folder that the first run was started in.
    location = None if tracking_uri.startswith("http") else (store / "artifacts").as_uri()
    tags = {"mlflow.experimentKind": "custom_model_development"}
    try:
        return str(client.create_experiment(name, artifact_location=location, tags=tags))
    except MlflowException:
        found = client.get_experiment_by_name(name)  # another process may have made it in between
        if found is None:
            raise
        return str(found.experiment_id)


@lru_cache(maxsize=4096)
def _is_detail(name: str) -> bool:
    """Return whether a metric goes into the table of details, if the detail is brief."""
    return name.startswith(_DETAILS) and _STILL_SENT.fullmatch(name) is None
