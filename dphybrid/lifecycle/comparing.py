"""Champion against challenger: both answer the same validation rows, none of which either was trained on.

The difference gets an interval by the paired bootstrap (Efron 1979): both are scored on the same resampled
rows, many times over.
"""

from pathlib import Path

import numpy as np
import torch
from pydantic import Field

from dphybrid.config.settings import Settings
from dphybrid.embedding.storage import unfilled_rows
from dphybrid.parallel import resolve_devices
from dphybrid.run.folder import Run
from dphybrid.run.pages import ResultPage
from dphybrid.training.checkpoint import load_weights, verify_checkpoint
from dphybrid.training.loop import validation_outputs
from dphybrid.training.metrics import Task
from dphybrid.training.warm_start import warm_start
from dphybrid.util.errors import UserError
from dphybrid.util.pages import Page

NUM_RESAMPLES = 300


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


def compare_on_validation_rows(run: Run, settings: Settings, min_gain: float) -> Decision:
    """Return the comparison of a run's best checkpoint with the checkpoint it started from, on the run's
    validation rows."""
    experiment = run.experiment(settings)
    config, data, task = experiment.config, experiment.data, experiment.task
    devices, outputs = resolve_devices(run.page.devices), []
    for name in ("champion", "challenger"):
        with unfilled_rows():
            network = experiment.build(devices)
        if name == "champion":
            assert config.train.warm_start is not None
            warm_start(Path(config.train.warm_start), network, data)
        else:
            best = Path(ResultPage.read(run.folder / "result.json").best_checkpoint)
            verify_checkpoint(best)
            load_weights(best, network)
        outputs.append(validation_outputs(network, data.dataset("valid"), config.train.batch_size, task))
        del network  # before the next one needs its memory
    champion, challenger = (task.compute(output) for output in outputs)
    gains = bootstrap_gains(outputs[0], outputs[1], task, config.train.seed)
    low, high = (float(value) for value in np.quantile(gains, [0.025, 0.975]))
    sign = 1 if task.higher_is_better else -1
    gain = sign * (challenger[task.metric] - champion[task.metric])
    num_rows = len(next(iter(outputs[0].values())))
    promoted = low > min_gain
    verdict = "better" if promoted else "not surely better" if high > min_gain else "not better"
    why = (
        f"{verdict}: validation {task.metric} {challenger[task.metric]:.5f} against the champion's "
        f"{champion[task.metric]:.5f} on the same "
        f"{num_rows:,} rows; gain {gain:+.5f}, 95 % interval {low:+.5f} to {high:+.5f}"
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


def bootstrap_gains(
    champion: dict[str, torch.Tensor],
    challenger: dict[str, torch.Tensor],
    task: Task,
    seed: int,
    resamples: int = NUM_RESAMPLES,
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
