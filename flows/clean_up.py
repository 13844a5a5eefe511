"""The flow `clean-up`: remove runs that are older than some days, with everything that only they need.

The work is in `dphybrid.lifecycle.cleanup`; `dphybrid runs remove` does it without Prefect, and says before
what it would remove.
"""

from typing import Annotated

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed
from pydantic import Field

from dphybrid.config.settings import load_settings
from dphybrid.lifecycle.cleanup import plan_removal, remove
from dphybrid.orchestration.supervised import supervised


@flow(name="clean-up", log_prints=True)
def clean_up(keep_days: Annotated[float, Field(ge=0, le=36500)] = 30) -> State:
    """Remove old runs of this data folder, their prepared data and their models in MLflow.

    Args:
        keep_days: Remove runs that began more than this many days ago.
    """
    with supervised():
        settings = load_settings()
        removal = plan_removal(settings, older_than_days=keep_days)
        for name, why in removal.kept.items():
            print(f"{name}: stays, {why}", flush=True)
        for line in remove(removal, settings):
            print(line, flush=True)
        return Completed(message=f"removed {len(removal.runs)} runs")
