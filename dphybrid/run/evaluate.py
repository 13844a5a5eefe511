"""Evaluation of a run's best checkpoint on the validation rows, and on test rows where the data has some."""

import gc
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path

from dphybrid.run.experiment import Experiment
from dphybrid.run.folder import Run
from dphybrid.run.pages import MetricsPage, ResultPage
from dphybrid.run.report import attached
from dphybrid.training.checkpoint import complete_checkpoints, load_weights, verify_checkpoint
from dphybrid.training.loop import evaluate, validation_outputs
from dphybrid.training.metrics import Task, constant_prediction
from dphybrid.util.errors import UserError


def evaluate_run(run: Run, experiment: Experiment) -> dict[str, float]:
    """Evaluate the best checkpoint on the validation rows, and on test rows where the data has some
    (`test_...`); log it all as `final/...`."""
    data, task, mapped = experiment.data, experiment.task, experiment.engine.mapped
    best = Path(ResultPage.read(run.folder / "result.json").best_checkpoint)
    gc.collect()  # frames of torch's lazy imports may hold the trained table: two would not fit
    model = experiment.unfilled(run.page.devices, mapped)
    _check_best(best, run)
    load_weights(best, model, mapped)
    batch_size = experiment.config.train.batch_size
    outputs = validation_outputs(model, data.dataset("valid"), batch_size, task)
    metrics, charts = task.compute(outputs), task.charts(outputs) if task.charts else []
    if "test" in data.parts:
        tested = evaluate(model, data.dataset("test"), batch_size, task)
        metrics |= {f"test_{name}": value for name, value in tested.items()}
    own = task.baselines(outputs) if task.baselines else constant_prediction(outputs, task)
    baselines = experiment.recipe.baselines(data) or own
    page = MetricsPage(metrics=metrics, charts=list(charts), beside=_beside(metrics, baselines, task))
    page.write(run.folder / "metrics.json")
    with closing(attached(run, experiment.settings)) as tracker:
        tracker.log_summary({f"final/{name}": value for name, value in metrics.items()})
        for which, values in baselines.items():
            where = f"baseline/{which.replace(' ', '_')}"
            tracker.log_summary({f"{where}/{name}": value for name, value in values.items()})
    return metrics


def _beside(metrics: Mapping[str, float], baselines: Mapping[str, Mapping[str, float]], task: Task) -> str:
    """Say what the run adds to its baselines, in the deciding metric: positive where it is better."""
    sign = 1 if task.higher_is_better else -1
    return ", ".join(
        f"{which} {task.metric} {values[task.metric]:.4f} "
        f"(this run is {abs(gain):.4f} {'better' if gain >= 0 else 'WORSE'})"
        for which, values in baselines.items()
        for gain in [sign * (metrics[task.metric] - values[task.metric])]
    )


def _check_best(best: Path, run: Run) -> None:
    """Raise UserError with what can take its place when the best checkpoint is damaged. Nothing takes it by
    itself: it would be another model."""
    try:
        verify_checkpoint(best)
    except UserError as damage:
        remedy = "no other checkpoint of this run is whole: start a new run"
        for other in complete_checkpoints(run.checkpoints):
            with suppress(UserError):
                verify_checkpoint(other)
                again = f"remove {best} and give --resume {run.folder.name}"
                remedy = f"{again}: the best of the others takes its place"
                break
        raise UserError(f"the run's best checkpoint is damaged: {damage}; {remedy}") from damage
