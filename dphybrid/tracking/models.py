"""A run's checkpoints as LoggedModels, tagged best or latest; and registered models, with the alias
`champion` that versions gain and lose. What is still in use, and what goes with a removed run."""

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlparse

from mlflow.entities import LoggedModel, LoggedModelOutput, Metric
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.models import Model, ModelSignature
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
from mlflow.tracking import MlflowClient
from mlflow.types.schema import ColSpec, DataType, ParamSchema, ParamSpec, Schema, TensorSpec
from mlflow.utils import get_results_from_paginated_fn

from dphybrid.tracking.opening import explained
from dphybrid.tracking.record import Line
from dphybrid.tracking.tracker import CHAMPION_TAG, ELSEWHERE, safe_name
from dphybrid.util.digests import SUMS, inside
from dphybrid.util.files import writing

UPLOAD_LIMIT = 900 * 2**20
"""A checkpoint of more bytes is not uploaded to an MLflow server: its path is recorded."""
_CHAMPION = "champion"
_DECISION_TAG = "dphybrid.decision"
"""Tag of a version: `promoted: REASON` or `kept: REASON`."""
_LONGEST_TAG = 4900
_PAGE = 100
_REMEDY = "try again when it does"
_CHECKPOINT_TYPE = "dphybrid-checkpoint"
_UID_TAG, _ROLE_TAG, _STEP_TAG = "dphybrid.uid", "dphybrid.role", "dphybrid.step"
_T = TypeVar("_T")


class CheckpointModels:
    """The LoggedModels of one run."""

    def __init__(self, client: MlflowClient, tracking_uri: str, run_id: str) -> None:
        self._client, self._uri, self._run_id = client, tracking_uri, run_id

    def reconcile(self, record: Line, run_folder: Path) -> None:
        """Make MLflow hold exactly the checkpoints of `record["kept"]`, except that registered ones are never
        removed.

        kept: {uid, name, step, folder, role, metrics (name -> value)} for each checkpoint. One whose folder
        no longer exists is skipped. Raises UserError for a folder outside of the run's.
        """
        kept = [{**card, "folder": inside(run_folder, card["folder"])} for card in record["kept"]]
        logged, wanted = self._logged(), {card["uid"]: card for card in kept}
        # Add before removing: a kill in between leaves one model too many, never none.
        for uid, card in wanted.items():
            model = logged.get(uid)
            if model is None and (card["folder"] / "state.json").is_file():
                self._create(card)
            elif model is not None and model.tags.get(_ROLE_TAG) != card["role"]:
                self._client.set_logged_model_tags(model.model_id, {_ROLE_TAG: card["role"]})
        for uid, model in logged.items():
            if uid not in wanted and not {"dphybrid.registered", "mlflow.modelVersions"} & model.tags.keys():
                self._remove(model)

    def remove_all(self) -> None:
        """Remove all models of the run, registered ones, too."""
        for model in self._logged().values():
            self._remove(model)

    def register(self, record: Line) -> None:
        """Make the checkpoint `uid` a new version of the registered model `name`, and point `alias` to it."""
        model = self._logged().get(record["uid"])
        if model is None:
            raise KeyError(f"checkpoint {record['uid']} is not recorded in MLflow")
        name, run = record["name"], self._client.get_run(self._run_id)
        try:
            recipe = run.data.tags.get("dphybrid.recipe", "")
            self._client.create_registered_model(name, tags={"dphybrid.recipe": recipe})
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        # The record may come twice, after a crash: then the version exists already.
        versions = _versions_of(self._client, name)
        version = next((v for v in versions if v.source == model.artifact_location), None)
        if version is None:
            version = self._client.create_model_version(
                name,
                model.artifact_location,
                run_id=self._run_id,
                model_id=model.model_id,
                # With its creation, so that a version which waits for a decision is never without it.
                tags={k: v for k, v in run.data.tags.items() if k == CHAMPION_TAG},
                # Otherwise the client polls for up to five minutes until the version is ready.
                await_creation_for=0,
            )
            versions.append(version)
            self._client.set_logged_model_tags(
                model.model_id, {"dphybrid.registered": f"{name}/{version.version}"}
            )
        # A record that comes late, or once more, must not take the alias from a later version.
        newest = max(int(each.version) for each in versions) == int(version.version)
        aliases = [record["alias"]] if newest else []
        # A first version has no champion to be compared with. An earlier attempt may have made it and failed
        # before the aliases; after a decision about it, the alias is not given again.
        if all(v.version == version.version and _DECISION_TAG not in v.tags for v in versions):
            aliases.append(_CHAMPION)
        for alias in filter(None, aliases):
            self._client.set_registered_model_alias(name, alias, version.version)

    def _logged(self) -> dict[str, LoggedModel]:
        """Return the run's finished models by uid; remove those that a crash left unfinished."""
        experiment = self._client.get_run(self._run_id).info.experiment_id
        of_run = f"source_run_id = '{self._run_id}'"
        found: dict[str, LoggedModel] = {}
        for model in get_results_from_paginated_fn(
            lambda count, token: self._client.search_logged_models(
                [experiment], of_run, max_results=count, page_token=token
            ),
            _PAGE,
        ):
            if model.model_type != _CHECKPOINT_TYPE or _UID_TAG not in model.tags:
                continue
            if str(model.status).endswith("READY"):
                found[model.tags[_UID_TAG]] = model
            else:
                self._remove(model)
        return found

    def _create(self, card: Line) -> None:
        run = self._client.get_run(self._run_id)
        model = self._client.create_logged_model(
            run.info.experiment_id,
            # MLflow allows none of these characters; a recipe's import path (`module:NAME`) has `:` and `.`.
            name=re.sub(r"[/:.%\"']+", "-", card["name"]),
            source_run_id=self._run_id,
            params={"step": str(card["step"]), "folder": str(card["folder"])},
            tags={_UID_TAG: card["uid"], _ROLE_TAG: card["role"], _STEP_TAG: str(card["step"])},
            model_type=_CHECKPOINT_TYPE,
        )
        try:
            self._put_files(model, card["folder"])
        except FileNotFoundError:  # the run itself removed the checkpoint while it was being copied
            self._remove(model)
            return
        self._client.log_outputs(self._run_id, [LoggedModelOutput(model.model_id, step=card["step"])])
        named = {"model_id": model.model_id, "run_id": self._run_id}
        points = [
            Metric(**dict(point) | named)
            for name, value in card["metrics"].items()
            if (point := self._point(safe_name(name), value, card["step"])) is not None
        ]
        if points:
            self._client.log_batch(self._run_id, metrics=points)
        # Last: after a crash, `_logged` removes a model that is not READY, and it is made again.
        self._client.finalize_logged_model(model.model_id, "READY")

    def _point(self, name: str, value: float, step: int) -> Metric | None:
        """Return the newest point of the run's curve with this value, at or before `step`. If the same point
        is logged again with the model's id, MLflow shows it on the model, too, but not twice on the run."""
        # The point has arrived before this record: records are sent in order.
        curve = self._client.get_metric_history(self._run_id, name)
        same = [point for point in curve if point.step <= step and repr(point.value) == repr(value)]
        return max(same, key=lambda point: (point.step, point.timestamp), default=None)

    def _put_files(self, model: LoggedModel, folder: Path) -> None:
        page = Model(model_id=model.model_id, signature=_signature(folder))
        page.add_flavor("python_function", loader_module="dphybrid.serving.pyfunc", data="checkpoint")
        page.add_flavor("dphybrid", data="checkpoint")
        location = urlparse(model.artifact_location)
        if location.scheme in ("", "file"):
            target = Path(unquote(location.path))
            target.mkdir(parents=True, exist_ok=True)
            page.save(str(target / "MLmodel"))
            self._copy(folder, target, uploads=False)
            return
        # Beside the checkpoint, on the same disk, so that the files can be linked instead of copied.
        with writing(folder.parent / "upload") as scratch:
            scratch.mkdir()
            page.save(str(scratch / "MLmodel"))
            self._copy(folder, scratch, uploads=True)
            self._client.log_model_artifacts(model.model_id, str(scratch))

    def _copy(self, folder: Path, target: Path, uploads: bool) -> None:
        """Link or copy the files that the checkpoint's page lists into `target`; of a large checkpoint that
        would have to be uploaded, or copied to another disk, the page alone, and its path in `ELSEWHERE`."""
        page = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        names = ["state.json", *(name for kind in SUMS for name in page.get(kind, {}))]
        files = [inside(folder, name) for name in names]
        is_large = sum(file.stat().st_size for file in files) > UPLOAD_LIMIT
        if is_large and (uploads or folder.stat().st_dev != target.stat().st_dev):
            (target / ELSEWHERE).write_text(str(folder), encoding="utf-8")
            del files[1:]
        for file in files:
            wanted = target / "checkpoint" / file.relative_to(folder)
            wanted.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(file, wanted)
            except OSError:  # another disk, or a file system without links
                shutil.copy2(file, wanted)

    def _remove(self, model: LoggedModel) -> None:
        # The files first: after a kill in between, the model still records where its files are.
        with suppress(OSError):  # the folder may never have been made
            get_artifact_repository(model.artifact_location, tracking_uri=self._uri).delete_artifacts()
        self._client.delete_logged_model(model.model_id)


def _versions_of(client: MlflowClient, name: str) -> list[ModelVersion]:
    """Return the versions of a registered model."""
    named = f"name = '{name}'"
    return get_results_from_paginated_fn(
        lambda count, token: client.search_model_versions(named, count, page_token=token), _PAGE
    )


def _signature(folder: Path) -> ModelSignature | None:
    """Return the model's outputs for each row; None if it does not read a table. Without its inputs: MLflow
    would check each cell in Python, and refuse numbers or texts where `Predictor` takes both."""
    info = json.loads((folder / "state.json").read_text(encoding="utf-8")).get("info", {})
    if "inputs" not in info:
        return None
    kinds = {"float32": DataType.float, "float64": DataType.double}
    outputs: list[ColSpec | TensorSpec]
    outputs = [ColSpec(kinds[kind], name) for name, kind in info.get("outputs", {}).items() if kind in kinds]
    # `predict(rows, params={"classes": True})` of a label with classes.
    classes = info.get("label", {}).get("classes")
    params: Any = ParamSchema([ParamSpec("classes", DataType.boolean, False)]) if classes else None
    return ModelSignature(None, Schema(outputs), params)


@dataclass(frozen=True)
class Version:
    """A version of a registered model.

    Attributes:
        run_tags: The tags of the run that trained it.
        decision: `promoted:` or `kept:` and why; "" before that.
    """

    name: str
    number: str
    run_id: str
    run_tags: Mapping[str, str]
    decision: str

    @property
    def uri(self) -> str:
        return f"models:/{self.name}/{self.number}"


class Registry:
    """MLflow's model registry at `uri`. Calls raise UserError when the server does not answer."""

    def __init__(self, uri: str) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        self.uri = uri
        self._client = MlflowClient(tracking_uri=uri, registry_uri=uri)

    def champion(self, name: str) -> Version | None:
        """Return the version in use, or None."""
        return self._with_run(self._asked(lambda: self._client.get_model_version_by_alias(name, _CHAMPION)))

    def newest(self, name: str, run_id: str | None = None) -> Version | None:
        """Return the version with the highest number, or None. run_id: only among those of this run."""
        found = [version for version in self._versions(name) if run_id in (None, version.run_id)]
        return self._with_run(max(found, key=lambda version: int(version.version), default=None))

    def undecided(self, name: str) -> set[str]:
        """Return the ids of the runs whose challengers still have to be compared with the champion."""
        return {
            str(version.run_id)
            for version in self._versions(name)
            if CHAMPION_TAG in version.tags and _DECISION_TAG not in version.tags
        }

    def decide(self, version: Version, decision: str) -> None:
        """Carry out a decision, `promoted: REASON` or `kept: REASON`, under the model's retraining lock: make
        the version the champion, or leave another one. A first version, which is the champion from its
        registration, loses the alias if it is not promoted."""
        name, number, now = version.name, version.number, self.champion(version.name)
        is_champion = now is not None and now.number == number
        # The alias first: a version without a decision is compared again, with the same result.
        if decision.startswith("promoted: ") and not is_champion:
            self._client.set_registered_model_alias(name, _CHAMPION, number)
        elif decision.startswith("kept: ") and is_champion:
            self._client.delete_registered_model_alias(name, _CHAMPION)
        self._client.set_model_version_tag(name, number, _DECISION_TAG, decision[:_LONGEST_TAG])

    def _with_run(self, found: ModelVersion | None) -> Version | None:
        if found is None:
            return None
        tags = dict[str, str]()
        with suppress(MlflowException):  # the run was deleted; the version can be used all the same
            tags = dict(self._client.get_run(str(found.run_id)).data.tags)
        decision = found.tags.get(_DECISION_TAG, "")
        return Version(found.name, str(found.version), str(found.run_id), tags, decision)

    def _versions(self, name: str) -> list[ModelVersion]:
        return self._asked(lambda: _versions_of(self._client, name)) or []

    def _asked(self, ask: Callable[[], _T]) -> _T | None:
        """Return the result of `ask`; None if MLflow has no such model or version. Raises UserError when the
        server does not answer."""
        with explained(self.uri, "MLflow's model registry does not answer", _REMEDY):
            try:
                return ask()
            except MlflowException as error:
                if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                    raise
        return None


def runs_in_use(uri: str) -> dict[str, str]:
    """Return the ids of the runs whose models have an alias, such as champion -> what they are. Raises
    UserError when the server does not answer."""
    client, found = MlflowClient(tracking_uri=uri, registry_uri=uri), dict[str, str]()
    with explained(uri, "MLflow does not say which models are in use", _REMEDY):
        for model in get_results_from_paginated_fn(
            lambda count, token: client.search_registered_models(max_results=count, page_token=token), _PAGE
        ):
            # The aliases of the search's answer; its versions are not all of them.
            for alias, number in model.aliases.items():
                with suppress(MlflowException):  # deleted in MLflow
                    run_id = str(client.get_model_version(model.name, str(number)).run_id)
                    found[run_id] = f"version {number} of its model is {model.name}@{alias}"
    return found


def forget_run(uri: str, run_id: str) -> None:
    """Delete a run, its models with their files, and their versions in the registry. The run itself stays in
    MLflow's trash until `mlflow gc`. Does nothing if MLflow has no such run. Raises UserError when the server
    refuses it."""
    client = MlflowClient(tracking_uri=uri, registry_uri=uri)
    with explained(uri, f"MLflow does not delete run {run_id}", _REMEDY):
        try:
            run = client.get_run(run_id)
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return
            raise
        for version in client.search_model_versions(f"run_id = '{run_id}'", max_results=1000):
            client.delete_model_version(version.name, str(version.version))
        CheckpointModels(client, uri, run_id).remove_all()
        if run.info.lifecycle_stage == "active":
            client.delete_run(run_id)
