"""Champion against challenger on the same validation rows, which neither was trained on.

The difference gets an interval by the paired bootstrap (Efron 1979): both are scored on the same resampled
rows, many times over.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from pydantic import Field
from torch import nn

from dphybrid.run.experiment import Experiment
from dphybrid.run.folder import Run
from dphybrid.run.pages import ResultPage
from dphybrid.run.start import warm_start
from dphybrid.training.checkpoint import load_weights, verify_checkpoint
from dphybrid.training.loop import validation_outputs
from dphybrid.training.metrics import Task
from dphybrid.util.errors import UserError, counted
from dphybrid.util.pages import Page

_NUM_RESAMPLES = 300


class Decision(Page):
    """Champion against challenger on the same validation rows; gain > 0: the challenger is better. low, high:
    of the 95 % interval."""

    promoted: bool
    why: str
    metric: str = ""
    num_rows: int = 0
    champion: dict[str, float] = Field(default_factory=dict)
    challenger: dict[str, float] = Field(default_factory=dict)
    gain: float = 0.0
    low: float = 0.0
    high: float = 0.0


def compare_on_validation_rows(run: Run, min_gain: float) -> Decision:
    """Return the comparison of a run's best checkpoint, on the run's validation rows, with the checkpoint it
    started from; of a first model with the recipe's floor, which the whole interval must beat."""
    experiment = run.experiment()
    config, task = experiment.config, experiment.task
    best = Path(ResultPage.read(run.folder / "result.json").best_checkpoint)
    if config.train.warm_start is None:
        name, min_gain, before = "a constant prediction's", 0.0, experiment.recipe.floor(experiment.data)
        if before is None:
            return Decision(promoted=True, why="new: there is no champion to compare it with")
    else:
        warm = Path(config.train.warm_start)
        name = "the champion's"
        before = _outputs_of(run, experiment, lambda network: warm_start(warm, network, experiment.data))
    verify_checkpoint(best)
    after = _outputs_of(run, experiment, lambda network: load_weights(best, network))
    champion, challenger = task.compute(before), task.compute(after)
    gains = bootstrap_gains(before, after, task, config.train.seed, _NUM_RESAMPLES)
    low, high = (float(value) for value in np.quantile(gains, [0.025, 0.975]))
    sign = 1 if task.higher_is_better else -1
    gain = sign * (challenger[task.metric] - champion[task.metric])
    num_rows = len(next(iter(after.values())))
    promoted = low > min_gain
    verdict = "better" if promoted else "not surely better" if high > min_gain else "not better"
    why = (
        f"{verdict}: validation {task.metric} {challenger[task.metric]:.5f} against {name} "
        f"{champion[task.metric]:.5f} on the same "
        f"{counted(num_rows, 'row')}; gain {gain:+.5f}, 95 % interval {low:+.5f} to {high:+.5f}"
        + (f", wanted {min_gain:+g}" if min_gain else "")
    )
    return Decision(
        promoted=promoted,
        why=why,
        metric=task.metric,
        num_rows=num_rows,
        champion=champion,
        challenger=challenger,
        gain=gain,
        low=low,
        high=high,
    )


def _outputs_of(
    run: Run, experiment: Experiment, fill: Callable[[nn.Module], None]
) -> dict[str, torch.Tensor]:
    """Return the validation outputs of the model that `fill` gives its weights; its memory is free then."""
    network = experiment.unfilled(run.page.devices)
    fill(network)
    batch_size = experiment.config.train.batch_size
    return validation_outputs(network, experiment.data.dataset("valid"), batch_size, experiment.task)


def bootstrap_gains(
    champion: dict[str, torch.Tensor],
    challenger: dict[str, torch.Tensor],
    task: Task,
    seed: int,
    resamples: int,
) -> np.ndarray:
    """Return the challenger's gain in the task's metric on `resamples` resampled sets of the same rows
    (resamples,)."""
    num_rows = len(next(iter(champion.values())))
    random = np.random.default_rng(seed)
    gains: list[float] = []
    while len(gains) < resamples:
        rows = torch.from_numpy(random.integers(0, num_rows, num_rows))
        try:
            values = [
                task.compute({n: v[rows] for n, v in out.items()})[task.metric]
                for out in (champion, challenger)
            ]
        except UserError:  # a few rows, drawn all of one label
            if len(set(champion["labels_B"].tolist())) < 2:
                raise
            continue
        gains.append(values[1] - values[0])
    return np.array(gains) * (1 if task.higher_is_better else -1)
