"""Registered models: which version is the champion, which was the newest try, and how the champion's place is
given and taken back."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from dphybrid.tracking.checkpoint_models import versions_of
from dphybrid.util.errors import UserError

CHAMPION, CHALLENGER = "champion", "challenger"
DECISION_TAG = "dphybrid.decision"
_FORMER_TAG = "dphybrid.former_champions"
"""Tag of a registered model: the versions that were champion before, oldest first."""


@dataclass(frozen=True)
class Version:
    """A version of a registered model. run_tags: of the run that made it; decision: why it was promoted or
    not, and what was decided later, "" before that."""

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
        aliases = self._aliases(name)
        return self.version(name, aliases[CHAMPION]) if CHAMPION in aliases else None

    def newest(self, name: str) -> Version | None:
        """Return the version made last, or None."""
        try:
            versions = versions_of(self._client, name)
        except MlflowException as error:
            raise self._away(error) from error
        return self.version(name, str(max(int(v.version) for v in versions))) if versions else None

    def version(self, name: str, number: str) -> Version:
        """Return a version. Raises UserError when there is none of that number."""
        try:
            found = self._client.get_model_version(name, number)
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                raise UserError(f"registered model {name!r} has no version {number}") from error
            raise self._away(error) from error
        try:
            tags: dict[str, str] = dict(self._client.get_run(str(found.run_id)).data.tags)
        except MlflowException:  # the run was deleted; the model is still good
            tags = {}
        return Version(name, str(found.version), str(found.run_id), tags, found.tags.get(DECISION_TAG, ""))

    def decide(self, version: Version, promote: bool, why: str) -> None:
        """Write down why a version was promoted or not; if so, it is the champion from now on. A first
        version, which is registered as the champion, is none any more when it was not promoted."""
        if promote:
            self._change(version, why)
        elif (now := self.champion(version.name)) is not None and now.number == version.number:
            self._client.delete_registered_model_alias(version.name, CHAMPION)
        self._add_decision(version, why)

    def roll_back(self, name: str, to: str | None = None) -> tuple[Version, Version]:
        """Make the former champion, or version `to`, the champion again; return (the version it replaces, the
        new champion).

        Raises UserError when nothing is there to go back to.
        """
        now, former = self.champion(name), self._former(name)
        if now is None:
            raise UserError(
                f"registered model {name!r} has no champion; `dphybrid rollback` needs a name from MLflow's "
                "model registry"
            )
        if to is None and not former:
            raise UserError(
                f"registered model {name!r}: version {now.number} has been the only champion; name another "
                "with --to"
            )
        target = self.version(name, to or former[-1])
        self._set_former(name, former[: former.index(target.number)] if target.number in former else former)
        self._client.set_registered_model_alias(name, CHAMPION, target.number)
        today = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        self._add_decision(now, f"rolled back to version {target.number}, {today}")
        self._add_decision(target, f"champion again after version {now.number}, {today}")
        return now, target

    def _add_decision(self, version: Version, why: str) -> None:
        """Write a decision behind those made about a version before; of very many the newest stay."""
        decisions = f"{version.decision}; {why}" if version.decision else why
        self._client.set_model_version_tag(version.name, version.number, DECISION_TAG, decisions[-5000:])

    def _change(self, version: Version, why: str) -> None:
        now = self.champion(version.name)
        if now is not None and now.number != version.number:
            self._set_former(version.name, [*self._former(version.name), now.number])
        self._client.set_registered_model_alias(version.name, CHAMPION, version.number)

    def _model(self, name: str) -> Any:
        try:
            return self._client.get_registered_model(name)
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise self._away(error) from error

    def _aliases(self, name: str) -> dict[str, str]:
        model = self._model(name)
        return {alias: str(number) for alias, number in model.aliases.items()} if model is not None else {}

    def _former(self, name: str) -> list[str]:
        model = self._model(name)
        text = model.tags.get(_FORMER_TAG, "") if model is not None else ""
        return [number for number in text.split(",") if number]

    def _set_former(self, name: str, numbers: list[str]) -> None:
        self._client.set_registered_model_tag(name, _FORMER_TAG, ",".join(numbers))

    def _away(self, error: MlflowException) -> UserError:
        return UserError(
            f"MLflow's model registry at {self.uri} does not answer: {str(error).splitlines()[0][:200]}"
        )
