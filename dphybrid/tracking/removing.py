"""Removes runs from MLflow, and says which are still in use."""

from contextlib import suppress

from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from mlflow.utils import get_results_from_paginated_fn

from dphybrid.tracking.models import CheckpointModels
from dphybrid.tracking.opening import explained

_PAGE = 100
_REMEDY = "try again when it does"


def runs_in_use(uri: str) -> dict[str, str]:
    """Return the ids of the runs whose models have an alias, such as champion -> what
    they are. Raises UserError when the server does not answer."""
    client = MlflowClient(tracking_uri=uri, registry_uri=uri)
    found: dict[str, str] = {}
    with explained(uri, "MLflow does not say which models are in use", _REMEDY):
        for model in get_results_from_paginated_fn(
            lambda count, token: client.search_registered_models(max_results=count, page_token=token), _PAGE
        ):
            # The names of the search's answer; its versions are not all of them.
            uses = {str(number): f"{model.name}@{alias}" for alias, number in model.aliases.items()}
            for number, what in uses.items():
                with suppress(MlflowException):  # deleted in MLflow
                    version = client.get_model_version(model.name, number)
                    found[str(version.run_id)] = f"version {number} of its model is {what}"
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
        CheckpointModels(client, uri, run_id, upload_limit=0).remove_all()
        if run.info.lifecycle_stage == "active":
            client.delete_run(run_id)
