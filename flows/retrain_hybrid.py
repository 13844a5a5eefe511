"""The flow `retrain-hybrid`: new data -> prepare -> continue training from the champion -> compare on the
same validation rows -> promote the challenger or keep the champion.

`python -m flows.retrain_hybrid` runs it in this process. The work is in `dphybrid.lifecycle.retrain`.
"""

import sys
from collections.abc import Sequence
from typing import Any

from prefect import flow, runtime
from prefect.client.schemas.objects import State

from dphybrid.cli.flags import ExperimentCommand
from dphybrid.cli.parser import run_cli
from dphybrid.config import ExperimentConfig
from dphybrid.config.settings import load_settings
from dphybrid.lifecycle.champion import Decision, decide_waiting, judge
from dphybrid.lifecycle.retrain import (
    Plan,
    has_new_rows,
    plan_retraining,
    retrained_model,
    retraining,
    stopped_retraining,
)
from dphybrid.orchestration.embedded import in_this_process
from dphybrid.orchestration.forms import experiment
from dphybrid.orchestration.queueing import ended
from dphybrid.orchestration.steps import as_task, trained
from dphybrid.orchestration.supervised import supervised
from dphybrid.run.folder import FLOW_RUN_TAG, find_tagged_run, read_run
from dphybrid.run.job import prepare_data
from dphybrid.tracking.tracker import CHAMPION_TAG
from dphybrid.util.stop import StopRequest


@flow(name="retrain-hybrid", log_prints=True)
def retrain_hybrid(
    data_path: str | None = None,
    label: str | None = None,
    register_as: str | None = None,
    recipe: str | None = None,
    devices: str | None = None,
    overrides: list[str] = [],  # noqa: B006 - never changed, and the form shows it
    config: dict[str, Any] = {},  # noqa: B006 - never changed, and the form shows it
) -> State:
    """Continue to train a registered model when data has arrived, and promote the result if it is better.

    Args:
        data_path: File, folder or pattern of the data.
        label: Column to predict.
        register_as: Name of the model in MLflow's registry.
        recipe: Kind of model; empty: ctr with a label.
        devices: Where the blocks run: auto, auto*2 (two free GPUs), cpu, cpu*8 (eight virtual devices),
            cuda:0.
        overrides: Single values that override all others, such as `model.hidden=64`.
        config: Values by section, such as `{"train": {"epochs": 3}}`; the others are the recipe's.
    """
    given = locals()  # first line, so these are just the parameters: the form's values by name
    with supervised() as stop:
        chosen = experiment(given)
        with retraining(retrained_model(chosen), load_settings(), stop):
            return _retrained(chosen, stop)


def _retrained(config: ExperimentConfig, stop: StopRequest) -> State:
    settings, model, decided = load_settings(), retrained_model(config), None
    for run, decision in decide_waiting(settings, model):
        if isinstance(decision, Decision):
            decided = _decided(model, decision)
        else:
            print(f"Note: {run.folder.name} has no decision yet: {decision}", flush=True)
    # This flow run was started before and was queued again: continue its run, whatever is new by now.
    own, prepared = find_tagged_run(settings, FLOW_RUN_TAG, runtime.flow_run.id), None
    begun = read_run(settings.runs_dir / own, settings) if own else None
    if begun and begun.status == "finished":  # trained and reported: only the comparison was missing
        return _compared(model, begun.folder.name)
    if begun:
        planned = Plan(begun.config, begun.page.tags.get(CHAMPION_TAG, ""))
    else:
        # New data, and the champion to continue from.
        planned = as_task("plan", lambda: plan_retraining(config, settings))
        if planned.stop:
            return decided or ended("NothingNew", planned.stop)
        begun = stopped_retraining(planned.config, settings)
    if begun is None:
        prepared = as_task("prepare", lambda: str(prepare_data(planned.config, settings).data.path))
        if planned.champion and not has_new_rows(prepared):
            return decided or ended("NothingNew", "the data has changed, and no row is new")
    tags = {CHAMPION_TAG: planned.champion or "none"}
    resume = begun.folder.name if begun else None
    report = trained(planned.config, stop, resume=resume, tags=tags, prepared=prepared)
    return _compared(model, report.run_name)


def _compared(model: str, run_name: str) -> State:
    """Compare challenger and present champion; promote the challenger or keep the champion."""
    settings = load_settings()
    return _decided(model, as_task("compare", lambda: judge(str(settings.runs_dir / run_name), settings)))


def _decided(model: str, decision: Decision) -> State:
    champion = f" version {decision.against}" if decision.against else ""
    text = f"the challenger of {model}{champion} is {decision.why}"
    return ended("Promoted" if decision.promoted else "Kept", text)


def main(argv: Sequence[str]) -> int:
    """Run the flow in this process; return the exit code."""

    def run() -> int:
        args = ExperimentCommand.parse("python -m dphybrid.flows.retrain_hybrid", __doc__ or "", argv)
        config, _ = args.experiment()
        with in_this_process():
            retrain_hybrid.with_options(log_prints=False)(
                config=config.model_dump(exclude_unset=True), return_state=True
            ).result(raise_on_failure=True)
        return 0

    return run_cli(run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
