"""`dphybrid check recipe`: train a recipe on a sample of its data and report which guarantees hold."""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from dphybrid.config import ExperimentConfig
from dphybrid.config.settings import Settings
from dphybrid.config.tables import TableDataConfig
from dphybrid.data import Dataset, Prepared
from dphybrid.data.batches import Array
from dphybrid.data.table.files import find_files, read_files
from dphybrid.parallel import resolve_devices
from dphybrid.run.build import build_run, prepare_data
from dphybrid.run.check import check_target
from dphybrid.run.train import closing_run, train_run
from dphybrid.serving.load import model_from_checkpoint
from dphybrid.serving.predict import open_predictor
from dphybrid.training.checkpoint import read_state
from dphybrid.training.engine import Engine
from dphybrid.training.loop import validation_outputs
from dphybrid.util.errors import UserError, failure_text
from dphybrid.util.files import make_folder, scratch_folder
from dphybrid.util.stop import Interrupted, StopRequest

_BATCH = 32
"""Largest batch size, in samples."""
_EPOCHS, _STOPPED_AFTER = 2, 4
"""Number of epochs, and the step after which a run is stopped. An epoch has three steps, the last with a
short batch, so the stop is inside the second epoch."""

_NEEDED = ("prepare", "evaluate", "train", "train twice")
"""Checks that the later ones build on: when one breaks, the rest is left out."""


@dataclass(frozen=True)
class CheckResult:
    """The result of one check. holds: None when it was not tried. words: figures, or the problem and the
    remedy."""

    check: str
    holds: bool | None
    words: str

    def line(self) -> str:
        """Return the line that the command prints."""
        return f"{ {True: 'ok', False: 'BREAKS', None: '-'}[self.holds]:<7}{self.check:<14}{self.words}"


class _FirstRows(Dataset):
    """The first `num` samples of a split."""

    def __init__(self, rows: Dataset, num: int) -> None:
        self.rows, self.num = rows, num

    def __len__(self) -> int:
        return min(self.num, len(self.rows))

    def at_epoch(self, seed: int, epoch: int) -> "_FirstRows":
        return _FirstRows(self.rows.at_epoch(seed, epoch), self.num)

    def fetch(self, index_B: Array) -> dict[str, Tensor]:
        return self.rows.fetch(index_B)


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


@dataclass(frozen=True)
class _Trained:
    """A run on the sample. weights: file of its last checkpoint -> digest. best: its best checkpoint.
    not_prefetched: why no rows were prefetched, or ""."""

    weights: Mapping[str, str]
    best: Path
    not_prefetched: str


def check_recipe(config: ExperimentConfig, settings: Settings) -> Iterator[CheckResult]:
    """Run all checks of a recipe in a temporary folder, and yield the result of each.

    When a check breaks that the later ones build on, those are left out. An error of the recipe becomes a
    result, not an exception.
    """
    # The temporary folder is below runs_dir, because only pages there may name code of any package.
    make_folder(settings.runs_dir)
    with scratch_folder(settings.runs_dir, ".check-") as folder:
        apart = {"data_dir": folder, "tracking_uri": "none", "table_storage": "memory"}
        trial = _Trial(config, settings.model_copy(update=apart))
        for name, check in trial.checks.items():
            yield (result := _run_check(name, check))
            if result.holds is False and name in _NEEDED:
                return


def _run_check(name: str, check: Callable[[], str]) -> CheckResult:
    """Run one check. It returns words, which begin with "not tried" if it does not apply, or it raises."""
    try:
        with redirect_stdout(StringIO()):  # hides the progress of the trainings
            words = check()
    except UserError as error:
        return CheckResult(name, False, " ".join(str(error).split()))
    except Exception as error:  # noqa: BLE001 - a user's recipe may raise anything
        return CheckResult(name, False, failure_text(error))
    return CheckResult(name, None if words.startswith("not tried") else True, words)


class _Trial:
    """The checks of one recipe, in the order in which they run, and what they share."""

    def __init__(self, config: ExperimentConfig, settings: Settings) -> None:
        self.config, self.settings = config, settings
        self.checks: dict[str, Callable[[], str]] = {
            "prepare": self._prepare,
            "prepare twice": self._prepare_again,
            "evaluate": self._evaluate,
            "train": self._train,
            "train twice": self._train_again,
            "resume": self._resume,
            "pipeline": self._pipeline,
            "devices": self._devices,
            "predict": self._predict,
        }

    def _prepare(self) -> str:
        """Prepare the recipe's data, and make the sample that the other checks train on."""
        whole = prepare_data(self.config, self.settings)
        data = whole.data
        sizes = {part: len(data.dataset(part)) for part in data.parts}
        if not sizes.get("train") or not sizes.get("valid"):
            raise UserError(f"the splits have {sizes} samples; train and valid need one or more each")
        # Three steps an epoch, whatever the data: two full batches and a short one.
        batch = max(1, min(_BATCH, whole.config.train.batch_size, sizes["train"] // 3))
        train = {"epochs": _EPOCHS, "batch_size": batch, "patience": 0, "warm_start": None}
        config = whole.config.model_copy(update={"train": whole.config.train.model_copy(update=train)})
        view = data.dataset
        rows = 2 * batch + max(1, batch // 2)

        def sample(_: Prepared, part: str) -> Dataset:
            return _FirstRows(view(part), rows)

        self.experiment = replace(whole, config=config, data=replace(data, view=sample))
        return ", ".join(f"{size:,} samples in {part}" for part, size in sizes.items())

    def _prepare_again(self) -> str:
        recipe, config = self.experiment.recipe, self.config
        again = recipe.prepare(config.data, self.settings.prepared_dir, config.train.seed)
        if again.digest != self.experiment.data.digest:
            raise UserError(
                "preparing the data again gives other data, so no run could be resumed; draw all random "
                "numbers from the seed: np.random.default_rng(seed)"
            )
        return "the same bytes"

    def _evaluate(self) -> str:
        """Compute the task's metrics for an untrained model on the sample."""
        experiment = self.experiment
        task, valid = experiment.task, experiment.data.dataset("valid")
        model, batch_size = experiment.build(resolve_devices("cpu")), experiment.config.train.batch_size
        outputs = validation_outputs(model, valid, batch_size, task)
        if missing := [name for name in task.reads if name not in outputs]:
            raise UserError(
                f"the task reads {missing[0]!r}, which neither batches nor outputs have; return it from "
                "forward, or correct the task"
            )
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

    def _trained(self, name: str, stop_after: int = 0, **train: object) -> _Trained:
        """Train the sample on two virtual devices as run `name`; continue that run if it exists."""
        config = self.experiment.config
        values = config.model_copy(update={"train": config.train.model_copy(update=train)})
        experiment = replace(self.experiment, config=values, engine=_TrialEngine(values, stop_after))
        resume = name if (self.settings.runs_dir / name).is_dir() else None
        run = build_run(experiment, "cpu*2", run_name=name, resume=resume)
        # RowPipeline gives the reason why it prefetches nothing in a warning.
        with closing_run(run), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = train_run(run, experiment, StopRequest())
        reasons = [str(one.message) for one in caught if str(one.message).startswith("RowPipeline: ")]
        weights = read_state(Path(result.checkpoint)).digests
        return _Trained(weights, Path(result.best_checkpoint), reasons[0] if reasons else "")

    def _train(self) -> str:
        self.whole = self._trained("whole")
        return f"{_EPOCHS} epochs of a sample, batches of {self.experiment.config.train.batch_size}"

    def _train_again(self) -> str:
        return self._same(
            self._trained("again"),
            "a second training gives other weights; draw random numbers from torch's generator in the model, "
            "with dphybrid.data.DrawnDataset in the data, with step.generator() in a step",
        )

    def _same(self, other: _Trained, problem: str) -> str:
        """Compare `other` with the first training. Raises UserError(problem) when their weights differ."""
        for name, digest in self.whole.weights.items():
            # A file that the other one lacks is no difference.
            if other.weights.get(name, digest) != digest:
                raise UserError(f"{problem} ({name} differs)")
        return "the same bits"

    def _resume(self) -> str:
        try:
            self._trained("stopped", stop_after=_STOPPED_AFTER)
        except Interrupted:
            return self._same(
                self._trained("stopped"),
                "a stopped and resumed training gives other weights; keep all state that training changes in "
                "parameters, buffers or optimizers, and draw random numbers from (seed, epoch, sample)",
            )
        return f"not tried: the training ended before step {_STOPPED_AFTER}"

    def _pipeline(self) -> str:
        if self.whole.not_prefetched:
            return f"not tried: {self.whole.not_prefetched.removeprefix('RowPipeline: ')}"
        return self._same(
            self._trained("off", pipeline="off"),
            "prefetching changes the weights; table_ids must return the ids that forward looks up, draw no "
            "random numbers and change no state",
        )

    def _devices(self) -> str:
        config = self.experiment.config
        for _, findings in check_target(None, config, self.settings)[1]:
            for one in findings:
                if one.breaks:
                    raise UserError(f"{one.module or 'the model'}: {one.problem}; {one.remedy}")
        task, valid = self.experiment.task, self.experiment.data.dataset("valid")
        losses = [
            validation_outputs(
                model_from_checkpoint(self.whole.best, devices), valid, config.train.batch_size, task
            )["loss"]
            for devices in ("cpu", "cpu*2")
        ]
        # The tolerance allows for another order of sums; layers that compute across the batch far exceed it.
        if not torch.allclose(losses[0], losses[1], rtol=1e-3, atol=1e-4):
            raise UserError(
                f"losses differ by {float((losses[0] - losses[1]).abs().max()):.3g} between one and two "
                "devices; move code that needs the whole batch out of the data-parallel block"
            )
        return "one and two virtual devices agree"

    def _predict(self) -> str:
        recipe = self.experiment.recipe
        if not recipe.predicts:
            return "not tried: the recipe makes no predictions; define predict(model, rows, vocabularies)"
        predictor = open_predictor(self.whole.best)
        rows, data = dict(recipe.example), self.config.data
        if not rows and isinstance(data, TableDataConfig) and data.path is not None:
            chunk = next(read_files(find_files(data.path, "data.path"), data, []))
            rows = {name: list(islice(cells, 8)) for name, cells in chunk.cells.items()}
        if not rows:
            return "not tried: the recipe has no `example`; give it the columns of some rows to predict"
        first, second = predictor.predict(rows), predictor.predict(rows)
        if repr(first) != repr(second):
            raise UserError(
                "predicting the same rows twice gives different results; draw no random numbers in "
                "evaluation mode"
            )
        return f"{len(first)} predictions of {len(next(iter(rows.values())))} rows"
