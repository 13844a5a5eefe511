"""Writes the records of a run into MLflow. After a crash or an outage a record may be written twice; the
result is the same as once.

All calls use the client with an explicit run id, never the fluent functions: their active run is local to a
thread."""

import json
import os
import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from mlflow.entities import Dataset, DatasetInput, Experiment, InputTag, Metric, Param, RunTag, ViewType
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from dphybrid.tracking.models import CheckpointModels
from dphybrid.tracking.record import RECORD, Record, metrics_of
from dphybrid.tracking.sender import METRICS, Refused
from dphybrid.tracking.tracker import Server, safe_name
from dphybrid.util.alive import process_name
from dphybrid.util.digests import inside
from dphybrid.util.errors import UserError
from dphybrid.util.text import shown_address, without_secrets_of

HEARTBEAT_TAG, PROCESS_TAG = "dphybrid.heartbeat", "dphybrid.process"
# Limits of MLflow's server: entries of a call, characters of a value.
_MAX_METRICS, _MAX_PAIRS, _MAX_PARAM, _MAX_TAG = 1000, 100, 6000, 8000
_LOSSES_TAG = "dphybrid.lost_records"
_LOSSES_LINE = "> **Not everything was recorded:**"
_REFUSALS = {
    "BAD_REQUEST",
    "INVALID_PARAMETER_VALUE",
    "INVALID_STATE",
    "NOT_FOUND",
    "RESOURCE_ALREADY_EXISTS",
    "RESOURCE_DOES_NOT_EXIST",
}
"""MLflow's error codes that mean a refusal. After any other error the records are sent again."""
_NOTE_TAG = "mlflow.note.content"
_DETAILS = re.compile(
    r"(?!system/(?:process_rss_mb|gpu\d+_(?:utilization_pct|memory_mb))$)"
    r"(?:timing|timing_mean|timing_share|embedding|split|system)/|perf/step_ms_|train/lr"
)
"""Metrics that stay in the record, which MLflow gets as a file: MLflow's pages take about twenty."""


def create_run(server: Server, run_name: str, description: str) -> tuple[str, str]:
    """Create a run in MLflow; return the experiment's id and the run's. Raises UserError if MLflow refuses
    it."""
    client = MlflowClient(tracking_uri=server.uri, registry_uri=server.uri)
    tags = {
        "mlflow.source.name": "dphybrid",
        "mlflow.source.type": "JOB",
        "mlflow.user": os.environ.get("USER", ""),
        _NOTE_TAG: description,
    }
    try:
        experiment_id = find_experiment(client, server.uri, server.experiment, server.store)
        made = client.create_run(experiment_id, run_name=run_name, tags=tags)
    except MlflowException as error:
        said = without_secrets_of(server.uri, " ".join(str(error).split())[:200])
        raise UserError(
            f"{shown_address(server.uri)}: MLflow refuses to record a run ({said}); correct the address or "
            "the credentials, or record nothing with --tracking none"
        ) from error
    return experiment_id, str(made.info.run_id)


def experiments_named(client: MlflowClient, name: str) -> list[Experiment]:
    """Return the active experiments of a name, and those below it: `dphybrid/ctr` of `dphybrid`."""
    every = client.search_experiments(view_type=ViewType.ACTIVE_ONLY)
    return [found for found in every if found.name == name or found.name.startswith(f"{name}/")]


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


class MlflowWriter:
    """Writes records of the run in `folder`. upload_limit: a checkpoint's file of more bytes is logged by
    path instead of being uploaded.

    Connects at the first record, and so in the sender's thread, where the training does not wait for it.
    """

    def __init__(self, tracking_uri: str, run_id: str, folder: Path, upload_limit: int) -> None:
        self._uri, self._run_id, self._upload_limit = tracking_uri, run_id, upload_limit
        self._folder = folder.absolute()

    @cached_property
    def _verbs(self) -> dict[str, Callable[[Record], None]]:
        """Kind of record -> the method that writes it. Raises RuntimeError if the run does not exist or was
        deleted."""
        self._client = MlflowClient(tracking_uri=self._uri, registry_uri=self._uri)
        self._check_run()
        models = CheckpointModels(self._client, self._uri, self._run_id, self._upload_limit)
        return {
            "params": self._params,
            "tags": self._tags,
            "file": self._file,
            "table": self._table,
            "dataset": self._dataset,
            "checkpoints": lambda record: models.reconcile(self._placed(record)),
            "register": models.register,
            "status": self._status,
            "losses": self._losses,
            "whole": self._whole,
        }

    def write(self, records: list[Record]) -> None:
        """Write records of one kind. Raises Refused if the server refuses them; after other errors it is
        worth trying again."""
        try:
            verbs = self._verbs
            if records[0]["op"] in METRICS:
                self._metrics(records)
                return
            for record in records:
                if record["op"] != "run":  # about the record itself
                    verbs[record["op"]](record)
        except MlflowException as error:
            if error.error_code in _REFUSALS:
                # Of a deleted run the server refuses everything, which is not the records' fault.
                self._check_run()
                # MLflow also answers BAD_REQUEST if another run wrote the same database row at the same
                # moment, so that one is tried again.
                raise Refused(str(error), again=error.error_code == "BAD_REQUEST") from error
            raise
        except UserError as error:  # it names a file outside of the run's folder
            raise Refused(str(error)) from error

    def _check_run(self) -> None:
        """Raise RuntimeError if the run does not exist or was deleted."""
        # Not Refused, so the records are kept: the run may be at another store, or be restored.
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

    def beat(self) -> None:
        """Tag the run with the time and this process's name."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        self.write([{"op": "tags", "values": {HEARTBEAT_TAG: now, PROCESS_TAG: process_name()}}])

    def _log(self, kind: str, entities: Sequence[object], at_once: int) -> None:
        log_batch: Any = self._client.log_batch
        for start in range(0, len(entities), at_once):
            log_batch(self._run_id, **{kind: entities[start : start + at_once]})

    def _metrics(self, records: list[Record]) -> None:
        points = [
            Metric(safe_name(name), float(value), record["t"], record["step"])
            for record in records
            for name, value in metrics_of(record).items()
            if not _DETAILS.match(name)
        ]
        self._log("metrics", points, _MAX_METRICS)

    def _params(self, record: Record) -> None:
        params = [Param(safe_name(name), str(value)[:_MAX_PARAM]) for name, value in record["values"].items()]
        self._log("params", params, _MAX_PAIRS)

    def _tags(self, record: Record) -> None:
        tags = [RunTag(safe_name(name), str(value)[:_MAX_TAG]) for name, value in record["values"].items()]
        self._log("tags", tags, _MAX_PAIRS)

    def _file(self, record: Record) -> None:
        path = inside(self._folder, record["path"])
        if record["folder"]:
            inside(self._folder, record["folder"])
        if not path.exists():
            raise Refused(f"{path}: no longer exists")
        self._client.log_artifact(self._run_id, str(path), record["folder"] or None)

    def _placed(self, record: Record) -> Record:
        """Return a record of checkpoints with their folders where the run's folder is now."""
        return record | {
            "kept": [{**c, "folder": str(inside(self._folder, c["folder"]))} for c in record["kept"]]
        }

    def _table(self, record: Record) -> None:
        self._file(record)
        # Because of this tag, MLflow's UI offers the file as a table that can be compared between runs.
        entry = {
            "path": "/".join(filter(None, (record["folder"], Path(record["path"]).name))),
            "type": "table",
        }
        entries = json.loads(self._client.get_run(self._run_id).data.tags.get("mlflow.loggedArtifacts", "[]"))
        if entry not in entries:
            self._client.set_tag(self._run_id, "mlflow.loggedArtifacts", json.dumps([*entries, entry]))

    def _dataset(self, record: Record) -> None:
        columns = [{"name": str(key), "type": "string"} for key in record["columns"]]
        dataset = Dataset(
            name=record["name"],
            # MLflow's database column holds 36 characters; the profile has the whole digest.
            digest=record["digest"][:36],
            source_type="local",
            source=json.dumps({"uri": record["source"]}),
            schema=json.dumps({"mlflow_colspec": columns}),
            profile=json.dumps({"num_rows": record["num_rows"], "digest": record["digest"]}),
        )
        self._client.log_inputs(
            self._run_id, [DatasetInput(dataset, [InputTag("mlflow.data.context", str(record["context"]))])]
        )

    def _status(self, record: Record) -> None:
        if record["status"] == "RUNNING":
            self._client.update_run(self._run_id, status="RUNNING")
        else:
            started = self._client.get_run(self._run_id).info.start_time
            # The clock may have been set back during the run; an end before the start makes no sense.
            end_ms = max(record["t"], started)
            self._client.set_terminated(self._run_id, record["status"], end_time=end_ms)

    def _losses(self, record: Record) -> None:
        """Write on the run's page what its record lacks; an empty text removes the note."""
        self._client.set_tag(self._run_id, _LOSSES_TAG, record["text"][:_MAX_TAG])
        note = self._client.get_run(self._run_id).data.tags.get("mlflow.note.content", "")
        lines = [line for line in note.splitlines() if not line.startswith(_LOSSES_LINE)]
        text = (
            "\n".join([f"{_LOSSES_LINE} {record['text']}", "", *lines])
            if record["text"]
            else "\n".join(lines)
        )
        self._client.set_tag(self._run_id, "mlflow.note.content", text[:_MAX_TAG])

    def _whole(self, record: Record) -> None:
        """Log the run's whole record as a file, if it is not too large."""
        path = self._folder / RECORD
        if path.stat().st_size <= self._upload_limit:
            self._client.log_artifact(self._run_id, str(path))
