"""MLflow as a tracker: a client and an explicit run id, never the fluent functions, whose active run belongs to a thread."""

import json
import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlparse

import mlflow
from mlflow.entities import (
    Dataset,
    DatasetInput,
    InputTag,
    LoggedModelOutput,
    LoggedModelParameter,
    LoggedModelTag,
    Metric,
    Param,
    RunTag,
    ViewType,
)
from mlflow.exceptions import MlflowException
from mlflow.models import Model
from mlflow.tracking import MlflowClient

from dphybrid.errors import UserError
from dphybrid.tracking.base import Status, Tracker
from dphybrid.tracking.sender import MetricSender

CHECKPOINT_TYPE = "dphybrid-checkpoint"
_MAX_PARAM, _MAX_TAG, _MAX_BATCH = 6000, 8000, 100


class MlflowTracker(Tracker):
    """Records one run at `tracking_uri` in `experiment`. store: folder for artifacts of a database and for what could not be sent."""

    def __init__(self, tracking_uri: str, experiment: str, store: Path) -> None:
        self.tracking_uri = tracking_uri
        self.run_id = ""
        self._client = MlflowClient(tracking_uri=tracking_uri, registry_uri=tracking_uri)
        self._experiment_id = self._find_experiment(experiment, store)
        self._sender: MetricSender | None = None
        self._store = store

    def _find_experiment(self, name: str, store: Path) -> str:
        found = self._client.get_experiment_by_name(name)
        if found is not None and found.lifecycle_stage != "active":
            raise UserError(f"MLflow experiment {name!r} was deleted; restore it, or set DPHYBRID_EXPERIMENT to another name")
        if found is not None:
            return str(found.experiment_id)
        # A database keeps the artifact folder of an experiment for ever, so it must not depend on where the first run started.
        location = None if self.tracking_uri.startswith("http") else (store / "artifacts").as_uri()
        note = "dphybrid: hybrid models, their splits, timings and checkpoints. Group runs by the parameter devices.resolved."
        tags = {"mlflow.note.content": note, "mlflow.experimentKind": "custom_model_development"}
        try:
            return str(self._client.create_experiment(name, artifact_location=location, tags=tags))
        except MlflowException:
            found = self._client.get_experiment_by_name(name)  # somebody was faster
            if found is None:
                raise
            return str(found.experiment_id)

    @property
    def run_url(self) -> str:
        base = self.tracking_uri if self.tracking_uri.startswith("http") else "http://127.0.0.1:5000"
        return f"{base.rstrip('/')}/#/experiments/{self._experiment_id}/runs/{self.run_id}?workflowType=machine_learning"

    @property
    def ui_command(self) -> str:
        if self.tracking_uri.startswith("http"):
            return self.run_url
        return f"mlflow server --backend-store-uri {self.tracking_uri} --port 5000"

    def start(
        self,
        run_name: str,
        params: Mapping[str, str],
        tags: Mapping[str, str],
        description: str,
        resume_run_id: str | None = None,
    ) -> str:
        cut = {name: value[:_MAX_TAG] for name, value in tags.items()}
        if resume_run_id is not None:
            self.attach(resume_run_id)
            self._client.update_run(self.run_id, status="RUNNING")
        else:
            own = {"mlflow.source.name": "dphybrid", "mlflow.source.type": "JOB", "mlflow.note.content": description}
            own["mlflow.user"] = os.environ.get("USER", "")
            run = self._client.create_run(self._experiment_id, run_name=run_name, tags=own | cut)
            self.attach(run.info.run_id)
            pairs = [Param(name, value[:_MAX_PARAM]) for name, value in params.items()]
            for start in range(0, len(pairs), _MAX_BATCH):
                self._client.log_batch(self.run_id, params=pairs[start : start + _MAX_BATCH])
        self.set_tags(cut)
        return self.run_id

    def attach(self, run_id: str) -> None:
        self.run_id = run_id
        self._experiment_id = self._client.get_run(run_id).info.experiment_id
        self._sender = MetricSender(self._client, run_id, self._store / "unsent")

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        now_ms = int(time.time() * 1000)
        self._open_sender().put([Metric(name, float(value), now_ms, step) for name, value in metrics.items()])

    def _open_sender(self) -> MetricSender:
        if self._sender is None:
            raise RuntimeError("no run: call start() or attach() first")
        return self._sender

    def flush(self) -> None:
        self._open_sender().flush()

    def log_text(self, name: str, text: str) -> None:
        self._client.log_text(self.run_id, text, name)

    def log_table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        if not rows:
            return
        columns = list(rows[0])
        self._client.log_text(
            self.run_id, json.dumps({"columns": columns, "data": [[row[c] for c in columns] for row in rows]}), name
        )
        # This tag is what makes the UI offer the file as a table that can be compared between runs.
        logged = self._client.get_run(self.run_id).data.tags.get("mlflow.loggedArtifacts", "[]")
        entry = {"path": name, "type": "table"}
        entries = json.loads(logged)
        if entry not in entries:
            self.set_tags({"mlflow.loggedArtifacts": json.dumps([*entries, entry])})

    def log_figure(self, name: str, png: bytes) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / Path(name).name
            file.write_bytes(png)
            self.log_file(file, str(Path(name).parent))

    def log_file(self, path: Path, folder: str) -> None:
        self._client.log_artifact(self.run_id, str(path), folder if folder not in ("", ".") else None)

    def log_dataset(self, name: str, digest: str, source: str, num_rows: int, schema: Mapping[str, Any], context: str) -> None:
        columns = [{"name": str(key), "type": "string"} for key in schema]
        dataset = Dataset(
            name=name,
            digest=digest[:36],
            source_type="local",
            source=json.dumps({"uri": source}),
            schema=json.dumps({"mlflow_colspec": columns}),
            profile=json.dumps({"num_rows": num_rows, "digest": digest}),
        )
        self._client.log_inputs(self.run_id, [DatasetInput(dataset, [InputTag("mlflow.data.context", context)])])

    def log_checkpoint(
        self,
        folder: Path,
        *,
        name: str,
        step: int,
        metrics: Mapping[str, float],
        dataset: tuple[str, str] | None,
        params: Mapping[str, str],
    ) -> str:
        """Make a LoggedModel of the folder. Its files are hard links where the artifact folder is on the same disk."""
        model = self._client.create_logged_model(
            self._experiment_id,
            name=name,
            source_run_id=self.run_id,
            params={p.key: p.value for p in (LoggedModelParameter(k, str(v)) for k, v in params.items())},
            tags={t.key: t.value for t in (LoggedModelTag("dphybrid.step", str(step)),)},
            model_type=CHECKPOINT_TYPE,
        )
        status: Literal["READY", "FAILED"] = "FAILED"
        try:
            self._put_model_files(model, folder)
            status = "READY"
        finally:
            self._client.finalize_logged_model(model.model_id, status)
        self._client.log_outputs(self.run_id, [LoggedModelOutput(model.model_id, step=step)])
        now_ms = int(time.time() * 1000)
        named = {"dataset_name": dataset[0], "dataset_digest": dataset[1][:36]} if dataset else {}
        linked = [
            Metric(key, value, now_ms, step, model_id=model.model_id, run_id=self.run_id, **named)
            for key, value in metrics.items()
        ]
        if linked:
            self._client.log_batch(self.run_id, metrics=linked)
        return str(model.model_id)

    def _put_model_files(self, model: Any, folder: Path) -> None:
        card = Model(model_id=model.model_id)
        card.add_flavor("python_function", loader_module="dphybrid.tracking.loader", data="checkpoint")
        card.add_flavor("dphybrid", data="checkpoint")
        location = urlparse(model.artifact_location)
        if location.scheme in ("", "file"):
            target = Path(unquote(location.path))
            target.mkdir(parents=True, exist_ok=True)
            card.save(str(target / "MLmodel"))
            shutil.copytree(folder, target / "checkpoint", copy_function=_link_or_copy)
            return
        with tempfile.TemporaryDirectory() as scratch:
            card.save(str(Path(scratch) / "MLmodel"))
            shutil.copytree(folder, Path(scratch) / "checkpoint", copy_function=_link_or_copy)
            self._client.log_model_artifacts(model.model_id, scratch)

    def set_tags(self, tags: Mapping[str, str]) -> None:
        pairs = [RunTag(name, value[:_MAX_TAG]) for name, value in tags.items()]
        for start in range(0, len(pairs), _MAX_BATCH):
            self._client.log_batch(self.run_id, tags=pairs[start : start + _MAX_BATCH])

    def set_description(self, markdown: str) -> None:
        self.set_tags({"mlflow.note.content": markdown})

    def finish(self, status: Status) -> None:
        unsent = self._open_sender().close()
        if unsent:
            print(f"{unsent} metric points could not be sent; they are kept in {self._store / 'unsent'}", flush=True)
        self._client.set_terminated(self.run_id, status)


def _link_or_copy(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:  # another disk, or a file system without links
        shutil.copy2(source, target)
    return target


def search_runs(tracking_uri: str, experiment: str) -> list[Any]:
    """Return the active runs of an experiment, newest first."""
    client = MlflowClient(tracking_uri=tracking_uri)
    found = client.get_experiment_by_name(experiment)
    return list(client.search_runs([found.experiment_id], run_view_type=ViewType.ACTIVE_ONLY)) if found else []


__all__ = ["CHECKPOINT_TYPE", "MlflowTracker", "mlflow", "search_runs"]
