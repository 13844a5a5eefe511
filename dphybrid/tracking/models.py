"""A run's checkpoints as LoggedModels, tagged best or latest; and registered models, with the alias
`champion` that versions gain and lose."""

import hashlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote, urlparse

from mlflow.entities import LoggedModel, LoggedModelOutput, Metric
from mlflow.entities.model_registry import ModelVersion, RegisteredModel
from mlflow.exceptions import MlflowException
from mlflow.models import Model, ModelSignature
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
from mlflow.tracking import MlflowClient
from mlflow.types.schema import AnyType, ColSpec, DataType, ParamSchema, ParamSpec, Schema
from mlflow.utils import get_results_from_paginated_fn

from dphybrid.tracking.record import Record
from dphybrid.tracking.tracker import CHAMPION_TAG, LEFT_OUT, safe_name
from dphybrid.util.alive import lives, process_name
from dphybrid.util.digests import SUMS, inside
from dphybrid.util.errors import UserError
from dphybrid.util.files import make_folder, scratch_folder

_CHAMPION = "champion"
_DECISION_TAG = "dphybrid.decision"
"""Tag of a version: `promoted: REASON` or `kept: REASON`, then later moves; see `Version`."""
_DECIDING = re.compile(r"deciding against (\d+|none): ((?:promoted|kept): .*)", re.DOTALL)
"""What the tag holds from the decision until the alias has moved."""
_FORMER_TAG = "dphybrid.former_champions"
"""Tag of a registered model: the numbers of the last earlier champions, oldest first."""
_MOST_FORMER = 10
_PAGE = 100
_CHECKPOINT_TYPE = "dphybrid-checkpoint"
_UID_TAG, _ROLE_TAG, _STEP_TAG = "dphybrid.uid", "dphybrid.role", "dphybrid.step"
_T = TypeVar("_T")


class CheckpointModels:
    """The LoggedModels of one run. upload_limit: a file of more bytes is logged by path and digest alone."""

    def __init__(self, client: MlflowClient, tracking_uri: str, run_id: str, upload_limit: int) -> None:
        self._client, self._uri, self._run_id, self._limit = client, tracking_uri, run_id, upload_limit

    def reconcile(self, record: Record) -> None:
        """Make MLflow hold exactly the checkpoints of `record["kept"]`, except that registered ones are never
        removed.

        kept: {uid, name, step, folder, role, metrics (name -> value)} for each checkpoint. One whose folder
        no longer exists is skipped.
        """
        logged = self._logged()
        wanted = {card["uid"]: card for card in record["kept"]}
        # Add before removing: a kill in between leaves one model too many, never none.
        for uid, card in wanted.items():
            model = logged.get(uid)
            if model is None and (Path(card["folder"]) / "state.json").is_file():
                self._create(card, record["dataset"])
            elif model is not None and model.tags.get(_ROLE_TAG) != card["role"]:
                self._client.set_logged_model_tags(model.model_id, {_ROLE_TAG: card["role"]})
        for uid, model in logged.items():
            if uid not in wanted and not {"dphybrid.registered", "mlflow.modelVersions"} & model.tags.keys():
                self._remove(model)

    def remove_all(self) -> None:
        """Remove all models of the run, registered ones, too."""
        for model in self._logged().values():
            self._remove(model)

    def register(self, record: Record) -> None:
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
                description=_description(run.info.run_name, model),
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

    def _create(self, card: Record, dataset: list[str] | None) -> None:
        run = self._client.get_run(self._run_id)
        model = self._client.create_logged_model(
            run.info.experiment_id,
            # MLflow allows none of these characters; a recipe's import path (`module:NAME`) has `:` and `.`.
            name=re.sub(r"[/:.%\"']+", "-", card["name"]),
            source_run_id=self._run_id,
            params={"step": str(card["step"]), "folder": card["folder"]},
            tags={_UID_TAG: card["uid"], _ROLE_TAG: card["role"], _STEP_TAG: str(card["step"])},
            model_type=_CHECKPOINT_TYPE,
        )
        try:
            self._put_files(model, Path(card["folder"]))
        except FileNotFoundError:  # the run itself removed the checkpoint while it was being copied
            self._remove(model)
            return
        self._client.log_outputs(self._run_id, [LoggedModelOutput(model.model_id, step=card["step"])])
        named = {"model_id": model.model_id, "run_id": self._run_id}
        named |= {"dataset_name": dataset[0], "dataset_digest": dataset[1][:36]} if dataset else {}
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
        with scratch_folder(folder.parent, ".upload-") as scratch:
            page.save(str(scratch / "MLmodel"))
            self._copy(folder, scratch, uploads=True)
            self._client.log_model_artifacts(model.model_id, str(scratch))

    def _copy(self, folder: Path, target: Path, uploads: bool) -> None:
        """Link or copy the files that the checkpoint's page lists into `target`. A file above the upload
        limit that would have to be copied or uploaded is listed in `LEFT_OUT` instead."""
        page = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        sums = {kind: page.get(kind, {}) for kind in SUMS}
        left_out: list[dict[str, object]] = []
        for name in ["state.json", *(name for found in sums.values() for name in found)]:
            source, wanted = inside(folder, name), target / "checkpoint" / name
            wanted.parent.mkdir(parents=True, exist_ok=True)
            size = source.stat().st_size
            if (size <= self._limit or not uploads) and _linked(source, wanted):
                continue
            if size <= self._limit:
                shutil.copy2(source, wanted)
                continue
            known = {kind: found[name] for kind, found in sums.items() if name in found}
            left_out.append({"name": name, "path": str(source), "bytes": size, **known})
        if left_out:
            (target / LEFT_OUT).write_text(json.dumps(left_out, indent=1), encoding="utf-8")

    def _remove(self, model: LoggedModel) -> None:
        # The files first: after a kill in between, the model still records where its files are.
        with suppress(OSError):  # the folder may never have been made
            get_artifact_repository(model.artifact_location, tracking_uri=self._uri).delete_artifacts()
        self._client.delete_logged_model(model.model_id)


def _versions_of(client: MlflowClient, name: str) -> list[ModelVersion]:
    """Return the versions of a registered model, whose name may contain quotes."""
    # MLflow's filters have no escapes. With both kinds of quotes in a name, `_` matches any character, and
    # the last line drops other models that match.
    quote = '"' if "'" in name else "'"
    sign = "=" if quote not in name else "LIKE"
    named = f"name {sign} {quote}{name.replace(quote, '_')}{quote}"
    found = get_results_from_paginated_fn(
        lambda count, token: client.search_model_versions(named, count, page_token=token), _PAGE
    )
    return [version for version in found if version.name == name]


def _is_undecided(version: ModelVersion) -> bool:
    decision = version.tags.get(_DECISION_TAG, "")
    return CHAMPION_TAG in version.tags and (not decision or _DECIDING.fullmatch(decision) is not None)


def _description(run_name: str, model: LoggedModel) -> str:
    """Return the description of a version on the registry's page: its validation metrics, first because the
    column is narrow, and the run and step that it comes from."""
    values = {metric.key: metric.value for metric in model.metrics or []}
    shown = ", ".join(f"{name.removeprefix('valid/')} {value:.5g}" for name, value in sorted(values.items()))
    return f"{shown or 'not evaluated'} ({run_name}, step {model.tags[_STEP_TAG]})"


def _linked(source: Path, target: Path) -> bool:
    try:
        os.link(source, target)
    except OSError:  # another disk, or a file system without links
        return False
    return True


def _signature(folder: Path) -> ModelSignature | None:
    """Return the model's input columns and its outputs for each row; None if it does not read a table. The
    inputs are of any type, as `Predictor` takes both numbers and texts."""
    info = json.loads((folder / "state.json").read_text(encoding="utf-8")).get("info", {})
    if "inputs" not in info:
        return None
    columns = Schema([ColSpec(AnyType(), name, required=False) for name in info["inputs"]])
    kinds = {"float32": DataType.float, "float64": DataType.double}
    given = info.get("outputs", {}).items()
    outputs = Schema([ColSpec(kinds[kind], n) for n, kind in given if kind in kinds])
    # `predict(rows, params={"classes": True})` of a label with classes.
    if info.get("label", {}).get("classes"):
        params = ParamSchema([ParamSpec("classes", DataType.boolean, False)])
        return ModelSignature(columns, outputs, params)
    return ModelSignature(columns, outputs)


@dataclass(frozen=True)
class Version:
    """A version of a registered model.

    Attributes:
        run_tags: The tags of the run that trained it.
        decision: `promoted:` or `kept:` and why, and all later decisions; "" before the first.
        undecided: It was trained as a challenger, and is not compared with the champion yet, or the alias was
            not moved then.
    """

    name: str
    number: str
    run_id: str
    run_tags: Mapping[str, str]
    decision: str
    undecided: bool = False

    @property
    def uri(self) -> str:
        return f"models:/{self.name}/{self.number}"


def former_champions(model: RegisteredModel) -> list[str]:
    """Return the numbers of the last versions that were the champion before the present one, oldest first."""
    # Without the present one, which a process that died may have noted just before it moved the alias.
    now = str(model.aliases.get(_CHAMPION))
    return [number for number in model.tags.get(_FORMER_TAG, "").split(",") if number not in ("", now)]


_CLAIM_TAG = "dphybrid.deciding."
_CLAIM_S = 60.0
"""How long a claim of another machine's process may stay unchanged: much longer than the few requests that
move an alias. By the clock of the process that waits, from when it first saw the claim."""
_NO_CHAMPION = (
    "registered model {!r} has no champion; `dphybrid rollback` needs a name from MLflow's model registry"
)


class Registry:
    """MLflow's model registry at `uri`. locks: a folder for the locks of its models. Calls raise UserError
    when the server does not answer.

    The champion changes in one step with the decision about it: a tag of the model (`_alone`) keeps out other
    processes, of whatever machine, while `decide` and `roll_back` move the alias, and only if it still points
    to the version that the caller has compared: MLflow cannot compare and move at once.
    """

    def __init__(self, uri: str, locks: Path) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        self.uri, self._locks = uri, locks
        self._client = MlflowClient(tracking_uri=uri, registry_uri=uri)

    def lock_file(self, name: str) -> Path:
        """Return the file whose lock keeps retrainings of a model apart."""
        make_folder(self._locks)
        # With a digest of the registry: another one may have a model of the same name.
        digest = hashlib.sha256(f"{self.uri} {name}".encode()).hexdigest()[:8]
        return self._locks / f".{re.sub(r'[^A-Za-z0-9_-]', '_', name)[:80]}-{digest}.retraining"

    @contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        """Keep other processes from moving the champion's alias during the block, by a tag of the model.

        Each sets its tag, with the name of its process, before it looks for others, so of two at once at
        least one sees the other, and waits.
        """
        own, seen = f"{_CLAIM_TAG}{secrets.token_hex(8)}", dict[str, float]()
        try:
            while True:
                self._client.set_registered_model_tag(name, own, process_name())
                model, now = self._model(name), time.monotonic()
                claims = {t: v for t, v in (model.tags if model else {}).items() if t.startswith(_CLAIM_TAG)}
                alive = {tag: lives(process) for tag, process in claims.items()}
                # None: only its own machine can say.
                dead = {
                    tag
                    for tag in claims.keys() - {own}
                    if alive[tag] is False
                    or (alive[tag] is None and now - seen.setdefault(tag, now) > _CLAIM_S)
                }
                for tag in dead:
                    self._client.delete_registered_model_tag(name, tag)
                if not claims.keys() - dead - {own}:
                    break
                self._client.delete_registered_model_tag(name, own)
                time.sleep(
                    0.05 + secrets.randbelow(400) / 1000
                )  # two that saw each other must not wait alike
            yield
        finally:
            with suppress(MlflowException):
                self._client.delete_registered_model_tag(name, own)

    def champion(self, name: str) -> Version | None:
        """Return the version in use, or None."""
        model = self._model(name)
        number = model.aliases.get(_CHAMPION) if model is not None else None
        return self.version(name, str(number)) if number is not None else None

    def _numbers(self, name: str) -> str:
        versions = _versions_of(self._client, name)
        return ", ".join(map(str, sorted(int(version.version) for version in versions))) or "none"

    def newest(self, name: str, run_id: str | None = None) -> Version | None:
        """Return the version with the highest number, or None. run_id: only among those of this run."""
        versions = self._asked(lambda: _versions_of(self._client, name)) or []
        numbers = [int(v.version) for v in versions if run_id in (None, v.run_id)]
        return self.version(name, str(max(numbers))) if numbers else None

    def version(self, name: str, number: str) -> Version:
        """Return a version by its number. Raises UserError if it does not exist."""
        found = self._asked(lambda: self._client.get_model_version(name, number))
        if found is None:
            raise UserError(
                f"registered model {name!r} has no version {number}; it has {self._numbers(name)}"
            )
        try:
            tags: dict[str, str] = dict(self._client.get_run(str(found.run_id)).data.tags)
        except MlflowException:  # the run was deleted; the version can be used all the same
            tags = {}
        return Version(
            name,
            str(found.version),
            str(found.run_id),
            tags,
            found.tags.get(_DECISION_TAG, ""),
            _is_undecided(found),
        )

    def undecided(self, name: str) -> list[Version]:
        """Return the challengers that still have to be compared with the champion, oldest first."""
        versions = self._asked(lambda: _versions_of(self._client, name)) or []
        numbers = sorted(int(each.version) for each in versions if _is_undecided(each))
        return [self.version(name, str(number)) for number in numbers]

    def begun(self, version: Version) -> tuple[str, str] | None:
        """Return the decision that a process which died had begun to carry out: the champion's number that
        the version was compared with, "" for none, and the decision; None if there is none."""
        found = _DECIDING.fullmatch(version.decision)
        return (found[1].removeprefix("none"), found[2]) if found else None

    def decide(self, version: Version, against: str, decision: str) -> bool:
        """Carry out a decision, `promoted: REASON` or `kept: REASON`: make the version the champion, or leave
        the one that it was compared with. Return False, without a change, if the champion is another one by
        now, or the version's decision is.

        against: number of the champion that the version was compared with; "" for none. A version that is
        the champion already, as the first one is from its registration, loses the alias if it is not
        promoted. After a crash at any point `begun` returns the decision, and this method completes it.
        """
        with self._alone(version.name):
            return self._decided(version, against, decision)

    def _decided(self, version: Version, against: str, decision: str) -> bool:
        name, number, promote = version.name, version.number, decision.startswith("promoted: ")
        now = self._champion_number(name)
        if now not in (against, number) or self.version(name, number).decision != version.decision:
            return False
        # The decision first: from here on it is known, whichever of these requests is the last one.
        self._tag(name, number, f"deciding against {against or 'none'}: {decision}")
        if promote and against not in ("", number):
            self._set_former(name, [*(n for n in self._former(name) if n != against), against])
        if promote and now != number:
            self._client.set_registered_model_alias(name, _CHAMPION, number)
        elif not promote and now == number != against:
            self._client.delete_registered_model_alias(name, _CHAMPION)
        self._tag(name, number, decision)
        return True

    def _champion_number(self, name: str) -> str:
        model = self._model(name)
        return str(model.aliases.get(_CHAMPION) or "") if model is not None else ""

    def roll_back(self, name: str, to: str | None = None) -> tuple[Version, Version]:
        """Make the previous champion, or version `to`, the champion again; return (the replaced version, the
        new champion). A rollback after one to a named version returns to what that replaced.

        Raises UserError if there is no champion, or no previous one, or if `to` is the champion.
        """
        if self._model(name) is None:
            raise UserError(_NO_CHAMPION.format(name))
        with self._alone(name):
            return self._rolled_back(name, to)

    def _rolled_back(self, name: str, to: str | None) -> tuple[Version, Version]:
        now, former = self.champion(name), self._former(name)
        if now is None:
            raise UserError(_NO_CHAMPION.format(name))
        if to is None and not former:
            raise UserError(
                f"registered model {name!r}: no version was the champion before version {now.number}; "
                f"name one with --to ({self._numbers(name)})"
            )
        target = self.version(name, to or former[-1])
        if target.number == now.number:
            raise UserError(f"registered model {name!r}: version {now.number} is the champion already")
        # In this order a crash in between loses no number; `former_champions` leaves out the present one.
        before = [number for number in former if number != target.number]
        if to is not None:
            self._set_former(name, [*before, now.number])
        self._client.set_registered_model_alias(name, _CHAMPION, target.number)
        if to is None:
            self._set_former(name, before)
        today = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        self._add(now, f"rolled back to version {target.number}, {today}")
        self._add(target, f"champion again after version {now.number}, {today}")
        return now, target

    def _add(self, version: Version, move: str) -> None:
        """Append a move of the alias to the decisions about a version."""
        self._tag(version.name, version.number, "; ".join(filter(None, (version.decision, move))))

    def _tag(self, name: str, number: str, decision: str) -> None:
        # MLflow limits a tag's length: the beginning, which says whether it was promoted, stays.
        head, tail = decision[:2000], decision[2000:][-2900:]
        self._client.set_model_version_tag(name, number, _DECISION_TAG, head + tail)

    def _model(self, name: str) -> RegisteredModel | None:
        return self._asked(lambda: self._client.get_registered_model(name))

    def _former(self, name: str) -> list[str]:
        model = self._model(name)
        return former_champions(model) if model is not None else []

    def _set_former(self, name: str, numbers: list[str]) -> None:
        # The last ones: MLflow limits a tag's length, and nobody goes back further.
        self._client.set_registered_model_tag(name, _FORMER_TAG, ",".join(numbers[-_MOST_FORMER:]))

    def _asked(self, ask: Callable[[], _T]) -> _T | None:
        """Return the result of `ask`; None if MLflow has no such model or version. Raises UserError when the
        server does not answer."""
        try:
            return ask()
        except MlflowException as error:
            if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                return None
            reason = str(error).splitlines()[0][:200]
            raise UserError(f"MLflow's model registry at {self.uri} does not answer: {reason}") from error
