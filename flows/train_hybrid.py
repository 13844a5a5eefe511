"""The flow `train-hybrid`: prepare -> build -> train -> evaluate -> report.

`python -m flows.train_hybrid` runs it in this process and needs no server. Its steps are in
`dphybrid.orchestration.steps`.
"""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from prefect import flow

from dphybrid.cli.flags import RunCommand
from dphybrid.cli.parser import run_cli
from dphybrid.orchestration.embedded import in_this_process
from dphybrid.orchestration.forms import experiment
from dphybrid.orchestration.supervised import supervised
from dphybrid.util.importing import kept_from_gc

if TYPE_CHECKING:
    from dphybrid.run.report import Report


@flow(name="train-hybrid", log_prints=True)
def train_hybrid(
    data_path: str | None = None,
    label: str | None = None,
    recipe: str | None = None,
    devices: str | None = None,
    overrides: list[str] = [],  # noqa: B006 - never changed, and the form shows it
    run_name: str | None = None,
    resume: str | None = None,
    config: dict[str, Any] = {},  # noqa: B006 - never changed, and the form shows it
) -> "Report":
    """Train a hybrid model and record its splits, timings and checkpoints in MLflow.

    Args:
        data_path: File, folder or pattern of the data.
        label: Column to predict.
        recipe: Kind of model: ctr for a table with a label, kge for triples, retrieval for interactions, and
            more; empty: ctr with a label, else text.
        devices: Where the blocks run: auto, auto*2 (two free GPUs), cpu, cpu*8 (eight virtual devices),
            cuda:0.
        overrides: Single values that override all others, such as `model.hidden=64`.
        run_name: Name of the run; empty: the flow run's name.
        resume: `latest`, or a run's name: continue from its newest checkpoint.
        config: Values by section, such as `{"train": {"epochs": 3}}`; the others are the recipe's.
    """
    given = locals()  # first line, so these are just the parameters: the form's values by name
    with supervised() as stop:
        # Imported only here, in the running and supervised flow run: on a busy machine this takes long, and a
        # run that stays pending for two minutes is queued again.
        with kept_from_gc():
            from dphybrid.orchestration.steps import trained
        return trained(experiment(given), stop, run_name=run_name, resume=resume)


def main(argv: Sequence[str]) -> int:
    """Run the flow in this process; return the exit code."""

    def run() -> int:
        args = RunCommand.parse("python -m dphybrid.flows.train_hybrid", __doc__ or "", argv)
        config, _ = args.experiment()
        with in_this_process():
            train_hybrid.with_options(log_prints=False)(
                config=config.model_dump(exclude_unset=True), run_name=args.run_name, resume=args.resume
            )
        return 0

    return run_cli(run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
