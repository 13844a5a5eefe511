"""Saved views of an experiment's runs in MLflow: the columns people ask for, in one sorted table, one click
from the experiment's page.

MLflow keeps them in tags `mlflow.sharedViewState.NAME` as its own pages write them; that is no public
interface, and a test in a browser holds it. Where a later version shows nothing, the plain list is still
there.
"""

import base64
import json
import zlib
from collections.abc import Sequence

from mlflow.tracking import MlflowClient

_TAG = "mlflow.sharedViewState."
_NOTE_TAG = "mlflow.note.content"
_FINALS_TAG = "dphybrid.final_metrics"
RESULT, SPEED = "Result", "Speed"
_OWN_NOTE = "dphybrid, all runs:"
_LEAST_IS_BEST = ("loss", "mse", "mae", "perplexity", "rank", "error", "deviance")
_WHAT = ("params.`recipe`", "params.`devices`", "params.`train.batch_size`")
_TIMES = ("summary/samples_per_s_median", "perf/step_ms", "summary/step_ms_p95", "summary/train_s")
"""MLflow cuts a column's header: `summary/step_ms_p50` and `_p95` would look the same."""


def write_views(client: MlflowClient, experiment_id: str, finals: Sequence[str]) -> None:
    """Write the views of an experiment, whose runs end with the metrics `finals` (among others), unless they
    are there."""
    tags = client.get_experiment(experiment_id).tags
    known = tags.get(_FINALS_TAG, "").split("\n")
    names = list(dict.fromkeys(name for name in (*known, *finals) if name))
    if names == known and _TAG + SPEED in tags:
        return
    client.set_experiment_tag(experiment_id, _FINALS_TAG, "\n".join(names)[:5000])
    metrics = [f"metrics.`{name}`" for name in names[:3]]  # so that recipe and devices stay in view
    order = ("attributes.start_time", False)
    if metrics:
        order = (metrics[0], least_is_best(names[0]))
    speeds = [f"metrics.`{name}`" for name in _TIMES]
    for view, columns, (key, ascending) in (
        (
            RESULT,
            [*metrics, *speeds[:1], *_WHAT, "params.`train.lr`", "params.`table.lr`", "params.`train.seed`"],
            order,
        ),
        (SPEED, [*speeds, *_WHAT, *metrics[:1]], (speeds[0], False)),
    ):
        state: dict[str, object] = {"selectedColumns": columns, "orderByKey": key, "orderByAsc": ascending}
        packed = base64.b64encode(zlib.compress(json.dumps(state).encode())).decode()
        tag = {"name": view, "createdAt": 0, "updatedAt": 0, "state": f"deflate;{packed}"}
        client.set_experiment_tag(experiment_id, _TAG + view, json.dumps(tag))
    # any other note is somebody's own
    if not tags.get(_NOTE_TAG, "") or tags[_NOTE_TAG].startswith(_OWN_NOTE):
        client.set_experiment_tag(experiment_id, _NOTE_TAG, note(experiment_id))


def least_is_best(name: str) -> bool:
    """Tell from a metric's name whether smaller values are better."""
    return any(word in name for word in _LEAST_IS_BEST)


def note(experiment_id: str) -> str:
    """Return the experiment's description: one line, with a link to each view."""
    links = " · ".join(f"[{view}](#{view_path(experiment_id, view)})" for view in (RESULT, SPEED))
    return f"{_OWN_NOTE} {links}"


def run_path(experiment_id: str, run_id: str) -> str:
    """Return what follows `#` in the address of a run."""
    return f"/experiments/{experiment_id}/runs/{run_id}?workflowType=machine_learning"


def view_path(experiment_id: str, view: str) -> str:
    """Return what follows `#` in the address of a view."""
    return f"/experiments/{experiment_id}/runs?viewStateShareKey={view}&workflowType=machine_learning"
