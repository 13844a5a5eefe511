"""`check_recipe`: the test of a recipe, for its author's pytest."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from dphybrid.config import ExperimentConfig
from dphybrid.config.settings import Settings, load_settings
from dphybrid.config.tables import TableDataConfig
from dphybrid.data import Dataset, Prepared
from dphybrid.data.batches import Array
from dphybrid.data.table.files import find_files
from dphybrid.data.table.frames import new_rows
from dphybrid.parallel import resolve_devices
from dphybrid.recipes.configs import build_config
from dphybrid.recipes.recipe import Recipe
from dphybrid.run.experiment import Built, Experiment
from dphybrid.run.folder import read_run
from dphybrid.run.job import build_run, prepare_data, train_run
from dphybrid.run.pages import ResultPage
from dphybrid.serving.predict import open_predictor
from dphybrid.training.checkpoint import read_state
from dphybrid.training.engine import Engine
from dphybrid.training.loop import validation_outputs
from dphybrid.util.errors import UserError
from dphybrid.util.files import make_folder
from dphybrid.util.stop import Interrupted, StopRequest

_BATCH = 32
_STOPPED_AFTER = 4
"""Steps after which a training is stopped: an epoch has three, so it is within the second of two epochs."""


def check_recipe(recipe: str | ExperimentConfig) -> None:
    """Prepare the data of a recipe and train a sample of it on two virtual devices, in a temporary folder.

    recipe: its name or import path `package.module:NAME`, or a config. Raises UserError with the remedy if

    - preparing or training twice gives other data or other weights;
    - a training that was stopped and resumed, or that prefetches no rows, gives other weights;
    - two devices compute something else than one;
    - a metric of the untrained model is not finite, or the task's deciding metric is missing;
    - two predictions of the same rows differ (of `Recipe.example`, or of the table's first rows).
    """
    config = build_config({"recipe": recipe}) if isinstance(recipe, str) else recipe
    with _settings_apart() as settings:
        sample = _sampled(prepare_data(config, settings))
        again = sample.recipe.prepare(config.data, settings.prepared_dir, config.train.seed)
        if again.digest != sample.data.digest:
            raise UserError(
                "preparing the data again gives other data; draw all random numbers from the seed: "
                "np.random.default_rng(seed)"
            )
        _check_metrics(sample)
        first = _trained(sample, "first")
        _compare(first, _trained(sample, "second"), "training again", "draw random numbers from torch")
        try:
            _trained(sample, "stopped", _STOPPED_AFTER)
        except Interrupted:
            resumed = _trained(sample, "stopped")
            _compare(first, resumed, "resuming", "keep state in parameters, buffers and optimizers")
        off = _trained(_changed(sample, pipeline="off"), "off")
        _compare(first, off, "prefetching", "return the ids of forward from table_ids")
        _trained(_changed(sample, check_split=True), "split")
        if sample.recipe.tabular or type(sample.recipe).predict is not Recipe.predict:
            _check_predictions(sample, Path(first.best_checkpoint))


class _CountingEngine(Engine):
    """Prefetches rows on the CPU, too, and stops the training after `stop_after` steps (0: never)."""

    prefetches_on_cpu = True

    def __init__(self, config: ExperimentConfig, stop_after: int) -> None:
        super().__init__(config)
        self._steps_left = stop_after

    def asked(self, stop: StopRequest) -> bool:
        # The loop calls this once after each step. 0 at the start counts below zero and never stops.
        self._steps_left -= 1
        if self._steps_left == 0:
            stop.ask("the check")
        return super().asked(stop)


class _FirstRows(Dataset):
    """The first `num` samples of a data set."""

    def __init__(self, rows: Dataset, num: int) -> None:
        self.rows, self.num = rows, num

    def __len__(self) -> int:
        return min(self.num, len(self.rows))

    def __getattr__(self, name: str) -> Any:
        # What a recipe's own data set has beside its samples, such as its arrays.
        return getattr(vars(self).get("rows"), name)

    def at_epoch(self, seed: int, epoch: int) -> "_FirstRows":
        return _FirstRows(self.rows.at_epoch(seed, epoch), self.num)

    def fetch(self, index_B: Array) -> dict[str, Tensor]:
        return self.rows.fetch(index_B)


@contextmanager
def _settings_apart() -> Iterator[Settings]:
    settings = load_settings()
    # Below runs_dir, because only pages there may name code of any package.
    make_folder(settings.runs_dir)
    with TemporaryDirectory(prefix=".check-", dir=settings.runs_dir) as folder:
        apart = {"data_dir": folder, "tracking_uri": "none", "table_storage": "memory"}
        yield load_settings(**{**settings.model_dump(), **apart})


def _sampled(whole: Experiment) -> Experiment:
    """Return the experiment on a sample: three steps an epoch, whatever the data, the last one short."""
    sizes = {part: len(whole.data.dataset(part)) for part in whole.data.parts}
    if not sizes.get("train") or not sizes.get("valid"):
        raise UserError(f"the splits have {sizes} samples; train and valid need one or more each")
    batch = max(1, min(_BATCH, whole.config.train.batch_size, sizes["train"] // 3))
    train = {"epochs": 2, "batch_size": batch, "patience": 0, "warm_start": None, "check_split": False}
    view, rows = whole.data.dataset, 2 * batch + max(1, batch // 2)

    def sample(_: Prepared, part: str) -> Dataset:
        return _FirstRows(view(part), rows)

    return replace(_changed(whole, **train), data=replace(whole.data, view=sample), devices="cpu*2")


def _changed(experiment: Experiment, **values: object) -> Experiment:
    """Return the experiment with other values of its `train` section."""
    config = experiment.config
    train = config.train.model_copy(update=values)
    return replace(experiment, config=config.model_copy(update={"train": train}))


def _trained(sample: Experiment, name: str, stop_after: int = 0) -> ResultPage:
    """Train the sample as run `name`, or continue that run. Raises Interrupted after `stop_after` steps."""
    experiment = replace(sample, engine=_CountingEngine(sample.config, stop_after), built=Built())
    if (sample.settings.runs_dir / name).is_dir():
        run = read_run(sample.settings.runs_dir / name, sample.settings)
        experiment = replace(experiment, found=run)
    with build_run(experiment, run_name=name) as built:
        return train_run(built, StopRequest())


def _compare(first: ResultPage, second: ResultPage, what: str, remedy: str) -> None:
    digests = [read_state(Path(result.checkpoint)).digests for result in (first, second)]
    for file in digests[0].keys() & digests[1].keys():
        if digests[0][file] != digests[1][file]:
            raise UserError(f"{what} gives other weights in {file}; {remedy}")


def _check_metrics(sample: Experiment) -> None:
    task, valid = sample.task, sample.data.dataset("valid")
    model = sample.build(resolve_devices("cpu"))
    outputs = validation_outputs(model, valid, sample.config.train.batch_size, task)
    for name, value in outputs.items():
        if len(value) != len(valid):
            raise UserError(f"{name} has {len(value)} rows for {len(valid)} samples; return one per sample")
    metrics = task.compute(outputs)
    if task.metric not in metrics:
        raise UserError(f"compute returns {sorted(metrics)}; add the deciding metric {task.metric!r}")
    if odd := [name for name, value in metrics.items() if not math.isfinite(value)]:
        # The model is untrained here: a metric must be finite for bad predictions, too.
        raise UserError(f"{odd[0]} is {metrics[odd[0]]}; make it finite for any predictions")


def _check_predictions(sample: Experiment, checkpoint: Path) -> None:
    rows, data = dict(sample.recipe.example), sample.config.data
    if not rows and isinstance(data, TableDataConfig) and data.path is not None:
        with new_rows(find_files(data.path, "data.path"), data, whole=True) as found:
            rows = found.frame.head(8).collect().to_dict(as_series=False)
    if not rows:
        return
    predictor = open_predictor(checkpoint, settings=sample.settings)
    if repr(predictor.predict(rows)) != repr(predictor.predict(rows)):
        raise UserError("two predictions of the same rows differ; draw no random numbers in evaluation mode")
