"""Checks of a recipe, each a function of a `Trial`: `dphybrid check recipe` calls them, and so can the
recipe's own tests.

    with trial_of("films.recipe:Films") as trial:
        for check in CHECKS:
            print(check(trial))

A check returns figures, or words that begin with "not tried"; it raises UserError with the problem and its
remedy. The first four build on each other.
"""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from dphybrid.config import ExperimentConfig
from dphybrid.config.settings import Settings, load_settings
from dphybrid.config.tables import TableDataConfig
from dphybrid.data import Dataset, Prepared
from dphybrid.data.batches import FirstRows
from dphybrid.data.table.frames import rows_of
from dphybrid.lifecycle.check import check_target
from dphybrid.parallel import resolve_devices
from dphybrid.recipes.configs import build_config
from dphybrid.run.build import build_run, prepare_data
from dphybrid.run.experiment import Built, Experiment
from dphybrid.run.train import train_run
from dphybrid.serving.predict import open_predictor
from dphybrid.training.checkpoint import read_state
from dphybrid.training.engine import Engine
from dphybrid.training.loop import validation_outputs
from dphybrid.util.errors import UserError
from dphybrid.util.files import make_folder, scratch_folder
from dphybrid.util.stop import Interrupted, StopRequest

_BATCH = 32
"""Largest batch size, in samples."""
_EPOCHS, _STOPPED_AFTER = 2, 4
"""Number of epochs, and the step after which a run is stopped. An epoch has three steps, the last with a
short batch, so the stop is inside the second epoch."""


@dataclass
class Trial:
    """A recipe on a sample of its data.

    Attributes:
        settings: Of a temporary folder.
        experiment: The sample, made by `prepare`.
        weights: File of the first training's last checkpoint -> digest.
        best: Its best checkpoint.
        not_prefetched: Why it prefetched no rows, or "".
    """

    config: ExperimentConfig
    settings: Settings
    experiment: Experiment = field(init=False)
    weights: dict[str, str] = field(default_factory=dict)
    best: Path = Path()
    not_prefetched: str = ""

    def train(self, name: str, problem: str = "", stop_after: int = 0, **values: object) -> str:
        """Train the sample on two virtual devices as run `name`, or continue that run. stop_after: steps
        after which it is stopped; 0: never. Raises UserError(problem) if the last checkpoint's weights differ
        from the first training's."""
        config = self.experiment.config
        config = config.model_copy(update={"train": config.train.model_copy(update=values)})
        engine = _TrialEngine(config, stop_after)
        experiment = replace(self.experiment, config=config, engine=engine, devices="cpu*2", built=Built())
        if (self.settings.runs_dir / name).is_dir():
            experiment = experiment.resuming(name)
        # RowPipeline gives the reason why it prefetches nothing in a warning.
        with build_run(experiment, run_name=name) as built, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = train_run(built, StopRequest())
        weights = dict(read_state(Path(result.checkpoint)).digests)
        if not self.weights:
            reasons = [str(one.message) for one in caught if str(one.message).startswith("RowPipeline: ")]
            self.not_prefetched = reasons[0].removeprefix("RowPipeline: ") if reasons else ""
            self.best, self.weights = Path(result.best_checkpoint), weights
        # A file that one of the two lacks is no difference.
        for file in self.weights.keys() & weights.keys():
            if weights[file] != self.weights[file]:
                raise UserError(f"{problem} ({file} differs)")
        return "the same bits"


class _TrialEngine(Engine):
    """Prefetches rows on the CPU, too, and asks to stop after `stop_after` steps (0: never)."""

    prefetches_on_cpu = True

    def __init__(self, config: ExperimentConfig, stop_after: int = 0) -> None:
        super().__init__(config)
        self._steps_left = stop_after

    def asked(self, stop: StopRequest) -> bool:
        # The loop calls this once after each step. 0 at the start counts below zero and never stops.
        self._steps_left -= 1
        if self._steps_left == 0:
            stop.ask("the check")
        return super().asked(stop)


@contextmanager
def trial_of(recipe: str | ExperimentConfig) -> Iterator[Trial]:
    """Yield the trial of a recipe, by its name or import path, or of a config, in a temporary folder."""
    config = build_config({"recipe": recipe}) if isinstance(recipe, str) else recipe
    settings = load_settings()
    # The temporary folder is below runs_dir, because only pages there may name code of any package.
    make_folder(settings.runs_dir)
    with scratch_folder(settings.runs_dir, ".check-") as folder:
        apart = {"data_dir": folder, "tracking_uri": "none", "table_storage": "memory"}
        yield Trial(config, load_settings(**{**settings.model_dump(), **apart}))


def prepare(trial: Trial) -> str:
    """Prepare the recipe's data, and make the sample that the other checks train on."""
    whole = prepare_data(trial.config, trial.settings)
    sizes = {part: len(whole.data.dataset(part)) for part in whole.data.parts}
    if not sizes.get("train") or not sizes.get("valid"):
        raise UserError(f"the splits have {sizes} samples; train and valid need one or more each")
    # Three steps an epoch, whatever the data: two full batches and a short one.
    batch = max(1, min(_BATCH, whole.config.train.batch_size, sizes["train"] // 3))
    # check_split: `devices` below says what differs, and the checks before it are tried all the same.
    train = {"epochs": _EPOCHS, "batch_size": batch, "patience": 0, "warm_start": None, "check_split": False}
    config = whole.config.model_copy(update={"train": whole.config.train.model_copy(update=train)})
    view, rows = whole.data.dataset, 2 * batch + max(1, batch // 2)

    def sample(_: Prepared, part: str) -> Dataset:
        return FirstRows(view(part), rows)

    trial.experiment = replace(whole, config=config, data=replace(whole.data, view=sample))
    return ", ".join(f"{size:,} samples in {part}" for part, size in sizes.items())


def prepare_twice(trial: Trial) -> str:
    """Preparing the data again gives the same bytes."""
    recipe, config = trial.experiment.recipe, trial.config
    again = recipe.prepare(config.data, trial.settings.prepared_dir, config.train.seed)
    if again.digest != trial.experiment.data.digest:
        raise UserError(
            "preparing the data again gives other data, so no run could be resumed; draw all random "
            "numbers from the seed: np.random.default_rng(seed)"
        )
    return "the same bytes"


def evaluate(trial: Trial) -> str:
    """Compute the task's metrics for an untrained model on the sample."""
    experiment = trial.experiment
    task, valid = experiment.task, experiment.data.dataset("valid")
    model, batch_size = experiment.build(resolve_devices("cpu")), experiment.config.train.batch_size
    outputs = validation_outputs(model, valid, batch_size, task)
    if odd := [name for name, value in outputs.items() if len(value) != len(valid)]:
        num_rows = len(outputs[odd[0]])
        raise UserError(f"{odd[0]} has {num_rows} rows for {len(valid)} samples; return one per sample")
    metrics = task.compute(outputs)
    if task.metric not in metrics:
        raise UserError(f"compute returns {sorted(metrics)}; add the deciding metric {task.metric!r}")
    if odd := [name for name, value in metrics.items() if not math.isfinite(value)]:
        # The model is untrained here: a metric must be finite for bad predictions, too.
        raise UserError(f"{odd[0]} is {metrics[odd[0]]}; make it finite for any predictions")
    return ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())


def train(trial: Trial) -> str:
    """Train the sample."""
    trial.train("whole")
    return f"{_EPOCHS} epochs of a sample, batches of {trial.experiment.config.train.batch_size}"


def train_twice(trial: Trial) -> str:
    """A second training gives the same weights."""
    return trial.train(
        "again",
        "a second training gives other weights; draw random numbers from torch's generator in the model, "
        "with dphybrid.data.DrawnDataset in the data, with step.generator() in a step",
    )


def resume(trial: Trial) -> str:
    """A stopped and resumed training gives the same weights."""
    try:
        trial.train("stopped", stop_after=_STOPPED_AFTER)
    except Interrupted:
        return trial.train(
            "stopped",
            "a stopped and resumed training gives other weights; keep all state that training changes in "
            "parameters, buffers or optimizers, and draw random numbers from (seed, epoch, sample)",
        )
    return f"not tried: the training ended before step {_STOPPED_AFTER}"


def pipeline(trial: Trial) -> str:
    """Training without prefetching gives the same weights."""
    if trial.not_prefetched:
        return f"not tried: {trial.not_prefetched}"
    return trial.train(
        "off",
        "prefetching changes the weights; table_ids must return the ids that forward looks up, draw no "
        "random numbers and change no state",
        pipeline="off",
    )


def devices(trial: Trial) -> str:
    """One and two devices compute the same, in training and in evaluation mode."""
    for where, findings in check_target(None, trial.experiment.config, trial.settings)[1]:
        for one in findings:
            if one.breaks:
                raise UserError(f"{one.module or where}: {one.problem}; {one.remedy}")
    return "one and two virtual devices agree"


def predict(trial: Trial) -> str:
    """Predicting the same rows twice gives the same predictions."""
    recipe = trial.experiment.recipe
    if not recipe.predicts:
        return "not tried: the recipe makes no predictions; define predict(model, rows, vocabularies)"
    rows, data = dict(recipe.example), trial.config.data
    if not rows and isinstance(data, TableDataConfig) and data.path is not None:
        with rows_of(data.path, data) as found:
            rows = found.frame.head(8).collect().to_dict(as_series=False)
    if not rows:
        return "not tried: the recipe has no `example`; give it the columns of some rows to predict"
    predictor = open_predictor(trial.best, settings=trial.settings)
    first, second = predictor.predict(rows), predictor.predict(rows)
    if repr(first) != repr(second):
        raise UserError(
            "predicting the same rows twice gives different results; draw no random numbers in "
            "evaluation mode"
        )
    return f"{len(first)} predictions of {len(next(iter(rows.values())))} rows"


CHECKS: tuple[Callable[[Trial], str], ...] = (
    *(prepare, prepare_twice, evaluate, train, train_twice, resume, pipeline, devices, predict),
)
"""All checks, in the order in which they build on each other."""
