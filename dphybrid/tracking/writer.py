"""Writes the lines of a run's record into MLflow. After a crash or an outage a line may be written twice; the
result is the same as once.

All calls use the client with an explicit run id, never the fluent functions: their active run is local to a
thread."""

import os
import re
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from dphybrid.tracking.copier import Refused
from dphybrid.tracking.models import CheckpointModels
from dphybrid.tracking.opening import explained
from dphybrid.tracking.record import METRICS, Line, metrics_of
from dphybrid.tracking.tracker import Server, safe_name
from dphybrid.util.digests import inside
from dphybrid.util.errors import UserError

# Limits of MLflow's server: entries of a call, characters of a value.
_MAX_METRICS, _MAX_PAIRS, _MAX_PARAM, _MAX_TAG = 1000, 100, 6000, 8000
_REFUSALS = {
    "BAD_REQUEST",
    "INVALID_PARAMETER_VALUE",
    "INVALID_STATE",
    "NOT_FOUND",
    "RESOURCE_ALREADY_EXISTS",
    "RESOURCE_DOES_NOT_EXIST",
}
"""MLflow's error codes that mean a refusal. After any other error the lines are sent again."""
_MALFORMED = (KeyError, ValueError, TypeError, AttributeError)
"""Errors that a malformed line causes; sending it again would not help."""
_NOTE_TAG = "mlflow.note.content"
_DETAILS = re.compile(
    r"(?!system/(?:process_rss_mb|gpu\d+_(?:utilization_pct|memory_mb))$)"
    r"(?:timing|embedding|system)/|train/lr"
)
"""Metrics that stay in the record: MLflow's pages take about twenty."""


def create_run(server: Server, run_name: str, description: str, experiment_id: str = "") -> tuple[str, str]:
    """Create a run in MLflow; return the experiment's id and the run's. experiment_id: instead of the
    server's experiment. Raises UserError if MLflow refuses it, and for a deleted experiment."""
    tags = {
        "mlflow.source.name": "dphybrid",
        "mlflow.source.type": "JOB",
        "mlflow.user": os.environ.get("USER", ""),
        _NOTE_TAG: description,
    }
    remedy = "correct the address or the credentials, or record nothing with --tracking none"
    with explained(server.uri, "MLflow refuses to record a run", remedy):
        client = MlflowClient(tracking_uri=server.uri, registry_uri=server.uri)
        experiment_id = experiment_id or _experiment(client, server)
        made = client.create_run(experiment_id, run_name=run_name, tags=tags)
    return experiment_id, str(made.info.run_id)


def _experiment(client: MlflowClient, server: Server) -> str:
    name, tags = server.experiment, {"mlflow.experimentKind": "custom_model_development"}
    found = client.get_experiment_by_name(name)
    if found is None:
        # An absolute folder: a database stores an experiment's artifact folder once and for all, so it must
        # not depend on the folder that the first run was started in.
        location = None if server.uri.startswith("http") else (server.store / "artifacts").as_uri()
        try:
            return str(client.create_experiment(name, artifact_location=location, tags=tags))
        except MlflowException:
            found = client.get_experiment_by_name(name)  # another process may have made it in between
            if found is None:
                raise
    if found.lifecycle_stage != "active":
        raise UserError(
            f"MLflow experiment {name!r} was deleted; restore it, or set DPHYBRID_EXPERIMENT to another name"
        )
    return str(found.experiment_id)


class MlflowWriter:
    """Writes lines of the record in `folder`, which begin in the MLflow run `run_id`; a line with another
    address begins another run.

    Connects at the first line, and so in the copier's thread, where the training does not wait for it.
    """

    def __init__(self, tracking_uri: str, run_id: str, folder: Path) -> None:
        self._uri, self._run_id = tracking_uri, run_id
        self._folder, self._checked = folder.absolute(), ""

    def write(self, lines: list[Line]) -> None:
        """Write one line, or several with points. Raises Refused if MLflow refuses them; after other errors
        it is worth trying again."""
        line = lines[0]
        try:
            if line["op"] == "run":
                self._run_id = line["run_id"] if line["experiment_id"] else self._run_id
                return
            if self._checked != self._run_id:
                self._check_run()
            if line["op"] in METRICS:
                self._points(lines)
            else:
                self._verbs[line["op"]](line)
        except MlflowException as error:
            if error.error_code not in _REFUSALS:
                raise
            self._check_run()  # of a deleted run MLflow refuses everything, which is no line's fault
            raise Refused(str(error)) from error
        except _MALFORMED as error:  # also the UserError of a line that names a file outside of the folder
            # A library's subclass means trouble with the connection: `requests` raises a ValueError of its
            # own when an answer is not JSON.
            if type(error).__module__ != "builtins" and not isinstance(error, UserError):
                raise
            raise Refused(f"{type(error).__name__}: {error}") from error

    @cached_property
    def _client(self) -> MlflowClient:
        return MlflowClient(tracking_uri=self._uri, registry_uri=self._uri)

    @property
    def _models(self) -> CheckpointModels:
        return CheckpointModels(self._client, self._uri, self._run_id)

    @cached_property
    def _verbs(self) -> dict[str, Callable[[Line], None]]:
        """Kind of line -> the method that writes it."""
        return {
            "params": lambda line: self._pairs("params", Param, _MAX_PARAM, line),
            "tags": lambda line: self._pairs("tags", RunTag, _MAX_TAG, line),
            "file": self._file,
            "checkpoints": lambda line: self._models.reconcile(line, self._folder),
            "register": lambda line: self._models.register(line),
            "status": self._status,
        }

    def _check_run(self) -> None:
        """Raise RuntimeError if the run does not exist or was deleted: the lines then wait, as the run may be
        restored."""
        try:
            stage = self._client.get_run(self._run_id).info.lifecycle_stage
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                raise RuntimeError(f"run {self._run_id} does not exist at the tracking server") from error
            raise
        if stage != "active":
            raise RuntimeError(
                f"run {self._run_id} was deleted at the tracking server; `mlflow runs restore` brings it back"
            )
        self._checked = self._run_id

    def _log(self, kind: str, entities: Sequence[object], at_once: int) -> None:
        log_batch: Any = self._client.log_batch
        for start in range(0, len(entities), at_once):
            log_batch(self._run_id, **{kind: entities[start : start + at_once]})

    def _points(self, lines: list[Line]) -> None:
        points = [
            Metric(safe_name(name), float(value), line["t"], line["step"])
            for line in lines
            for name, value in metrics_of(line).items()
            if not _DETAILS.match(name)
        ]
        self._log("metrics", points, _MAX_METRICS)

    def _pairs(self, kind: str, entity: Callable[[str, str], Any], width: int, line: Line) -> None:
        pairs = [entity(safe_name(name), str(value)[:width]) for name, value in line["values"].items()]
        self._log(kind, pairs, _MAX_PAIRS)

    def _file(self, line: Line) -> None:
        path = inside(self._folder, line["path"])
        if not path.exists():
            raise Refused(f"{path}: no longer exists")
        self._client.log_artifact(self._run_id, str(path))

    def _status(self, line: Line) -> None:
        if line["status"] == "RUNNING":
            self._client.update_run(self._run_id, status="RUNNING")
        else:
            self._client.set_terminated(self._run_id, line["status"], end_time=line["t"])
