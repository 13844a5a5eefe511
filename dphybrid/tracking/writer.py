"""Writes the records of an outbox into MLflow, and the saved views of its page of runs. After a crash or an
outage a record may be written twice; the result is the same as once."""

import base64
import json
import os
import tempfile
import zlib
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from dphybrid.tracking.base import Record, safe_name
from dphybrid.tracking.models import CheckpointModels
from dphybrid.tracking.sender import Refused

HEARTBEAT_TAG, PID_TAG = "dphybrid.heartbeat", "dphybrid.pid"
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
_VIEW_TAG = "mlflow.sharedViewState."
"""Prefix of the tags in which MLflow keeps an experiment's saved views. This is not a public interface; a
test in a browser notices when it changes. An MLflow that ignores the tags still shows the plain list of
runs."""
_NOTE_TAG = "mlflow.note.content"
_FINALS_TAG = "dphybrid.final_metrics"
RESULT, SPEED = "Result", "Speed"
_OWN_NOTE = "dphybrid, all runs:"
_LEAST_IS_BEST = ("loss", "mse", "mae", "perplexity", "rank", "error", "deviance")
_IDENTITY = ("params.`recipe`", "params.`devices`", "params.`train.batch_size`")
_TIMES = ("summary/samples_per_s_median", "perf/step_ms", "summary/step_ms_p95", "summary/train_s")
"""Not `summary/step_ms_p50`: MLflow cuts off column headers, and it would look like `_p95`."""


class MlflowWriter:
    """Writes records of one run. upload_limit: a checkpoint's file of more bytes is logged by path instead of
    being uploaded.

    Connects at the first record, and so in the sender's thread, where the training does not wait for it.
    """

    def __init__(self, tracking_uri: str, run_id: str, upload_limit: int) -> None:
        self._uri, self._run_id, self._upload_limit = tracking_uri, run_id, upload_limit

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
            "checkpoints": models.reconcile,
            "register": models.register,
            "status": self._status,
            "losses": self._losses,
            "views": self._views,
        }

    def write(self, records: list[Record]) -> None:
        """Write records of one kind. Raises Refused if the server refuses them; after other errors it is
        worth trying again."""
        try:
            verbs = self._verbs
            if records[0]["op"] == "metrics":
                self._metrics(records)
                return
            for record in records:
                verbs[record["op"]](record)
        except MlflowException as error:
            if error.error_code in _REFUSALS:
                # Of a deleted run the server refuses everything, which is not the records' fault.
                self._check_run()
                # MLflow also answers BAD_REQUEST if another run wrote the same database row at the same
                # moment, so that one is tried again.
                raise Refused(str(error), again=error.error_code == "BAD_REQUEST") from error
            raise

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
        """Tag the run with the time and this process's id."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        self.write([{"op": "tags", "values": {HEARTBEAT_TAG: now, PID_TAG: str(os.getpid())}}])

    def _log(self, kind: str, entities: Sequence[object], at_once: int) -> None:
        log_batch: Any = self._client.log_batch
        for start in range(0, len(entities), at_once):
            log_batch(self._run_id, **{kind: entities[start : start + at_once]})

    def _metrics(self, records: list[Record]) -> None:
        points = [
            Metric(safe_name(name), float(value), record["t"], record["step"])
            for record in records
            for name, value in record["values"].items()
        ]
        self._log("metrics", points, _MAX_METRICS)

    def _params(self, record: Record) -> None:
        params = [Param(safe_name(name), str(value)[:_MAX_PARAM]) for name, value in record["values"].items()]
        self._log("params", params, _MAX_PAIRS)

    def _tags(self, record: Record) -> None:
        tags = [RunTag(safe_name(name), str(value)[:_MAX_TAG]) for name, value in record["values"].items()]
        self._log("tags", tags, _MAX_PAIRS)

    def _file(self, record: Record) -> None:
        folder = record["folder"] or None
        if record["content"] is not None:
            with tempfile.TemporaryDirectory() as scratch:
                path = Path(scratch) / record["name"]
                path.write_bytes(record["content"])
                self._client.log_artifact(self._run_id, str(path), folder)
        elif Path(record["path"]).exists():
            self._client.log_artifact(self._run_id, record["path"], folder)
        else:
            raise Refused(f"{record['path']}: no longer exists")

    def _table(self, record: Record) -> None:
        self._file(record)
        # Because of this tag, MLflow's UI offers the file as a table that can be compared between runs.
        entry = {"path": "/".join(filter(None, (record["folder"], record["name"]))), "type": "table"}
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

    def _views(self, record: Record) -> None:
        """Make the experiment's saved views show the runs' final metrics."""
        write_views(self._client, self._client.get_run(self._run_id).info.experiment_id, record["finals"])


def write_views(client: MlflowClient, experiment_id: str, finals: Sequence[str]) -> None:
    """Write the saved views of an experiment with `finals` among their columns, unless they exist already.

    finals: names of final metrics of a run; those of earlier runs are kept.
    """
    tags = client.get_experiment(experiment_id).tags
    known = tags.get(_FINALS_TAG, "").split("\n")
    names = list(dict.fromkeys(name for name in (*known, *finals) if name))
    if names == known and _VIEW_TAG + SPEED in tags:
        return
    # MLflow takes at most 5,000 characters as an experiment's tag.
    client.set_experiment_tag(experiment_id, _FINALS_TAG, "\n".join(names)[:5000])
    metrics = [f"metrics.`{name}`" for name in names[:3]]  # more would push recipe and devices out of sight
    order = ("attributes.start_time", False)
    if metrics:
        order = (metrics[0], least_is_best(names[0]))
    speeds = [f"metrics.`{name}`" for name in _TIMES]
    for view, columns, (key, ascending) in (
        (
            RESULT,
            [
                *metrics,
                *speeds[:1],
                *_IDENTITY,
                "params.`train.lr`",
                "params.`table.lr`",
                "params.`train.seed`",
            ],
            order,
        ),
        (SPEED, [*speeds, *_IDENTITY, *metrics[:1]], (speeds[0], False)),
    ):
        state: dict[str, object] = {"selectedColumns": columns, "orderByKey": key, "orderByAsc": ascending}
        packed = base64.b64encode(zlib.compress(json.dumps(state).encode())).decode()
        tag = {"name": view, "createdAt": 0, "updatedAt": 0, "state": f"deflate;{packed}"}
        client.set_experiment_tag(experiment_id, _VIEW_TAG + view, json.dumps(tag))
    # Any other note was written by a user.
    if not tags.get(_NOTE_TAG, "") or tags[_NOTE_TAG].startswith(_OWN_NOTE):
        client.set_experiment_tag(experiment_id, _NOTE_TAG, note(experiment_id))


def least_is_best(name: str) -> bool:
    """Return whether smaller values of a metric are better, judged by its name."""
    return any(word in name for word in _LEAST_IS_BEST)


def note(experiment_id: str) -> str:
    """Return the experiment's description: one line with a link to each saved view."""
    links = " · ".join(f"[{view}](#{view_path(experiment_id, view)})" for view in (RESULT, SPEED))
    return f"{_OWN_NOTE} {links}"


def run_path(experiment_id: str, run_id: str) -> str:
    """Return the part after `#` in the address of a run."""
    return f"/experiments/{experiment_id}/runs/{run_id}?workflowType=machine_learning"


def view_path(experiment_id: str, view: str) -> str:
    """Return the part after `#` in the address of a saved view."""
    return f"/experiments/{experiment_id}/runs?viewStateShareKey={view}&workflowType=machine_learning"
