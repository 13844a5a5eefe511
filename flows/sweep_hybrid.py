"""The flow `sweep-hybrid`: train a grid of values, or search among them.

The work is in `dphybrid.lifecycle.sweep`; `dphybrid sweep` does it without Prefect.
"""

from typing import Annotated, Any

from prefect import flow, runtime
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed
from pydantic import Field

from dphybrid.config.settings import load_settings
from dphybrid.lifecycle.sweep import Sweep, run_sweep
from dphybrid.orchestration.forms import experiment
from dphybrid.orchestration.shown import show_run
from dphybrid.orchestration.supervised import supervised
from dphybrid.run.folder import FLOW_RUN_TAG
from dphybrid.tracking.tracker import SWEEP_TAG


@flow(name="sweep-hybrid", log_prints=True)
def sweep_hybrid(
    grid: dict[str, Any],
    data_path: str | None = None,
    label: str | None = None,
    recipe: str | None = None,
    devices: str | None = None,
    overrides: list[str] = [],  # noqa: B006 - never changed, and the form shows it
    sweep: str | None = None,
    at_once: Annotated[int, Field(ge=0)] = 0,
    trials: int = 0,
    config: dict[str, Any] = {},  # noqa: B006 - never changed, and the form shows it
) -> State:
    """Train every combination of the grid's values, or search among them.

    Args:
        grid: Fields and their values, such as `{"train.batch_size": [256, 512], "devices": ["auto*1",
            "auto*2"]}`; in a search also ranges, `{"train.lr": {"low": 0.0001, "high": 0.1, "log": true}}`.
        data_path: File, folder or pattern of the data.
        label: Column to predict.
        recipe: Kind of model; empty: ctr with a label, else text.
        devices: Where the blocks run: auto, auto*2 (two free GPUs), cpu, cpu*8 (eight virtual devices),
            cuda:0.
        overrides: Single values that override all others, such as `model.hidden=64`.
        sweep: Name of the sweep; the name of an earlier one continues it. Empty: named by the flow run.
        at_once: Trainings at the same time; 0: one for each GPU, at least one.
        trials: Trainings in a search, whose values Optuna chooses; 0: every combination of the grid.
        config: Values by section, such as `{"train": {"epochs": 3}}`; the others are the recipe's.
    """
    given = locals()  # first line, so these are just the parameters: the form's values by name
    with supervised() as stop:
        settings = load_settings()
        # A flow run that was queued again continues its sweep.
        name = sweep or f"sweep-{str(runtime.flow_run.id)[:8]}"
        chosen = Sweep(name, experiment(given), grid, trials)
        show_run(str(runtime.flow_run.id), chosen.name, [chosen.config.recipe], "")
        tags = {FLOW_RUN_TAG: str(runtime.flow_run.id), "mlflow.source.name": "sweep-hybrid"}
        results = run_sweep(chosen, settings, stop, at_once, tags)
        stop.obey("with runs left; they continue when the sweep does")
        if failed := [result["failed"] for result in results if "failed" in result]:
            texts = "\n".join(failed)
            return Failed(message=f"{len(failed)} of {len(results)} runs failed: {texts}")
        return Completed(message=f"{len(results)} runs trained, with the tag {SWEEP_TAG}={chosen.name}")
