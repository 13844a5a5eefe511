"""A sweep that searches: Optuna chooses each run's values from earlier results, and ends runs early that do
worse than the median. The study is `study.db` in the sweep's folder. Only this module imports optuna."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import TrialState

from dphybrid.config import ExperimentConfig
from dphybrid.config.settings import Settings
from dphybrid.lifecycle.sweep import PRUNED, Cell, CellFailed, Reports, begin_sweep, make_cell, run_cell
from dphybrid.recipes.registry import find_recipe
from dphybrid.run.train import Report
from dphybrid.training.checkpoint import VALIDATION, complete_checkpoints, read_state
from dphybrid.training.metrics import Task
from dphybrid.util.errors import UserError
from dphybrid.util.stop import StopRequest

_CELL = "cell"
_RANGE = {"low", "high", "log", "step"}


@dataclass(frozen=True)
class Search:
    """What to search, and how.

    space: field -> a list of choices, or {"low": 0.001, "high": 0.1, "log": true}. If both ends are integers,
    so are the values; "step" spaces them evenly. trials: number of runs in total, including those before the
    sweep was continued. prune: end a run after an epoch in which it does worse than the median of the others
    at that epoch.
    """

    space: Mapping[str, Any]
    trials: int
    prune: bool = True

    def check(self, config: ExperimentConfig, settings: Settings) -> None:
        """Raise UserError for an unknown field, or for choices or range ends that the field does not
        allow."""
        if not self.space:
            raise UserError('grid: give at least one field, such as {"train.lr": {"low": 1e-4, "high": 0.1}}')
        for name, values in self.space.items():
            if isinstance(values, Mapping) and not {"low", "high"} <= values.keys() <= _RANGE:
                raise UserError(
                    f"grid: {name} = {dict(values)}; give low and high, and optionally log or step"
                )
            ends = [values["low"], values["high"]] if isinstance(values, Mapping) else values
            if isinstance(ends, str) or not isinstance(ends, list) or not ends:
                raise UserError(f"grid: {name} = {values!r}; give a list of values, or low and high")
            for value in ends:
                make_cell(config, {name: value}, "check", settings)
            if isinstance(values, Mapping):
                try:
                    _distribution(values)
                except (ValueError, TypeError) as error:
                    raise UserError(f"grid: {name} = {dict(values)}: {error}") from error

    def suggest(self, trial: optuna.Trial) -> dict[str, object]:
        """Return Optuna's choice of values for a trial, by field."""
        chosen: dict[str, object] = {}
        for name, values in self.space.items():
            if not isinstance(values, Mapping):
                chosen[name] = trial.suggest_categorical(name, values)
                continue
            found = _distribution(values)
            whole = isinstance(found, optuna.distributions.IntDistribution)
            suggest: Any = trial.suggest_int if whole else trial.suggest_float
            chosen[name] = suggest(name, **values)
        return chosen


def _distribution(values: Mapping[str, object]) -> optuna.distributions.BaseDistribution:
    """Return a field's range as Optuna's distribution. Raises ValueError or TypeError if low, high, log and
    step do not fit together."""
    whole = isinstance(values["low"], int) and isinstance(values["high"], int)
    kind: Any = optuna.distributions.IntDistribution if whole else optuna.distributions.FloatDistribution
    made: optuna.distributions.BaseDistribution = kind(**values)
    return made


@dataclass
class _Watch:
    """Callable that reports a run's validation metric of each epoch to its trial; returns whether to prune
    the run. Reads the run's checkpoints, because the run is another process."""

    trial: optuna.Trial
    checkpoints: Path
    task: Task
    pruned: bool = False
    seen: int = 0

    def __call__(self) -> bool:
        there = complete_checkpoints(self.checkpoints)
        if not there or self.pruned:
            return self.pruned
        # suppress: the run may have just removed this checkpoint; the next call reads a newer one
        with contextlib.suppress(UserError, FileNotFoundError):
            history = read_state(there[-1]).progress.history
            for epoch, row in enumerate(history[self.seen :], start=self.seen + 1):
                self.trial.report(row[VALIDATION + self.task.metric], epoch)
            if len(history) > self.seen:
                self.seen, self.pruned = len(history), self.trial.should_prune()
        return self.pruned


def search(
    what: Search,
    config: ExperimentConfig,
    sweep: str,
    settings: Settings,
    stop: StopRequest,
    at_once: int = 0,
    tags: Mapping[str, str] = {},
) -> tuple[list[Cell], Reports]:
    """Run trials, each in its own process, until there are `what.trials`; return their cells and reports.

    A sweep of the same name is continued: interrupted trials are finished first. Raises UserError for a
    search space that is not allowed, for data that cannot be used, and as `begin_sweep` does.
    """
    what.check(config, settings)
    # The trials' values are not known yet, but their number and devices are: enough for `begin_sweep`.
    cells_of_all = [make_cell(config, {}, f"{sweep}-000", settings)] * what.trials
    folder, workers = begin_sweep(sweep, cells_of_all, settings, at_once)
    recipe = find_recipe(config.recipe)
    task = recipe.task(recipe.prepare(config.data, settings.prepared_dir, config.train.seed).info)
    study = _study(folder, sweep, config.train.seed, task)
    cells: dict[str, Cell] = {}
    reports: dict[str, Report | str] = {}

    def train(trial: optuna.Trial) -> float:
        values = what.suggest(trial)
        name = trial.user_attrs.get(_CELL, f"{sweep}-{trial.number + 1:03d}")
        trial.set_user_attr(_CELL, name)
        cell = cells[name] = make_cell(config, values, name, settings)
        watch = _Watch(trial, settings.runs_dir / name / "checkpoints", task)
        enough = watch if what.prune else lambda: False
        try:
            report = run_cell(cell, folder, settings, sweep, tags, stop, enough)
        except CellFailed as failure:
            reports[name] = f"{PRUNED} after epoch {watch.seen}" if watch.pruned else str(failure)
            if watch.pruned:
                raise optuna.TrialPruned from failure
            if stop.pending:
                study.stop()  # start no further trials
            raise
        reports[name] = report
        return float(report.metrics[task.metric])

    ended = (TrialState.COMPLETE, TrialState.PRUNED)
    left = what.trials - len(study.get_trials(states=ended))
    if left > 0:
        # catch: a failed run is a failed trial, not the end of the search
        study.optimize(train, n_trials=left, n_jobs=workers, catch=(CellFailed,))
    for trial in study.trials:  # add those that ran before the sweep was continued
        name = trial.user_attrs.get(_CELL, "")
        if name and name not in cells and trial.state.is_finished():
            cells[name] = make_cell(config, trial.params, name, settings)
            done = folder / f"{name}.json"
            reports[name] = Report.read(done) if done.is_file() else trial.state.name.lower()
    return [cells[name] for name in sorted(cells)], reports


def _study(folder: Path, sweep: str, seed: int, task: Task) -> optuna.Study:
    """Open the sweep's study and queue interrupted and failed trials again, each for the run that it had."""
    # No warnings about failed trials: the sweep's results show them.
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(
        study_name=sweep,
        storage=f"sqlite:///{folder / 'study.db'}",
        # A median of fewer than three runs means nothing, and a first epoch says little about a run.
        pruner=optuna.pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=1),
        direction="maximize" if task.higher_is_better else "minimize",
        load_if_exists=True,
    )
    # A new sampler starts its random numbers from the seed. With the same seed, a continued sweep would draw
    # the values of its first trials again.
    study.sampler = optuna.samplers.TPESampler(seed=seed + len(study.trials))
    again = {trial.user_attrs.get(_CELL) for trial in study.get_trials(states=(TrialState.WAITING,))}
    # RUNNING, too: Optuna never ends the trials of a killed process.
    for trial in study.get_trials(states=(TrialState.RUNNING, TrialState.FAIL)):
        name = trial.user_attrs.get(_CELL)
        if trial.state == TrialState.RUNNING:
            study.tell(trial.number, state=TrialState.FAIL)
        later = (t.user_attrs.get(_CELL) for t in study.trials if t.number > trial.number)
        if name and name not in again and name not in later:
            study.enqueue_trial(trial.params, user_attrs={_CELL: name})
    return study
