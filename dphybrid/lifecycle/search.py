"""A sweep that searches: Optuna chooses each run's values by the results of those before, and ends runs early
that do worse than the median. Its study is `study.db` in the sweep's folder. Alone imports optuna."""

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
    """What is searched and how.

    space: field -> a list of choices, or {"low": 0.001, "high": 0.1, "log": true}; whole numbers at both ends
    give whole numbers, "step" a raster. trials: runs in all, those of an earlier part of the sweep counted.
    prune: end a run after an epoch in which it does worse than the median of the others at that epoch.
    """

    space: Mapping[str, Any]
    trials: int
    prune: bool = True

    def check(self, config: ExperimentConfig, settings: Settings) -> None:
        """Raise UserError for an unknown field, or ends or choices that it does not allow."""
        if not self.space:
            raise UserError('grid: give at least one field, such as {"train.lr": {"low": 1e-4, "high": 0.1}}')
        for name, values in self.space.items():
            if isinstance(values, Mapping) and not {"low", "high"} <= values.keys() <= _RANGE:
                raise UserError(f"grid: {name} = {dict(values)}; give low and high, and log or step")
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
        """Return the values of a trial."""
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
    """Return a field's range. Raises ValueError or TypeError for ends, log and step that do not fit."""
    whole = isinstance(values["low"], int) and isinstance(values["high"], int)
    kind: Any = optuna.distributions.IntDistribution if whole else optuna.distributions.FloatDistribution
    made: optuna.distributions.BaseDistribution = kind(**values)
    return made


@dataclass
class _Watch:
    """Tells a trial its run's validation metric after each epoch, and whether to end it."""

    trial: optuna.Trial
    checkpoints: Path
    task: Task
    pruned: bool = False
    seen: int = 0

    def __call__(self) -> bool:
        there = complete_checkpoints(self.checkpoints)
        if not there or self.pruned:
            return self.pruned
        # a checkpoint may be removed meanwhile: the next look finds another one
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
    """Run trials until there are `what.trials`, each in a process of its own; return their cells and reports.

    A sweep of the same name goes on: a trial that was cut off is trained to its end first. Raises UserError
    for a space that is not allowed, data that cannot be used, and as `begin_sweep` does.
    """
    what.check(config, settings)
    # Which values come is not known yet; how many runs, and their devices, is.
    cells_of_all = [make_cell(config, {}, sweep, settings)] * what.trials
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
                study.stop()
            raise
        reports[name] = report
        return float(report.metrics[task.metric])

    ended = (TrialState.COMPLETE, TrialState.PRUNED)
    left = what.trials - len(study.get_trials(states=ended))
    if left > 0:
        study.optimize(train, n_trials=left, n_jobs=workers, catch=(CellFailed,))
    for trial in study.trials:  # those of an earlier part of the sweep
        name = trial.user_attrs.get(_CELL, "")
        if name and name not in cells and trial.state.is_finished():
            cells[name] = make_cell(config, trial.params, name, settings)
            done = folder / f"{name}.json"
            reports[name] = Report.read(done) if done.is_file() else trial.state.name.lower()
    return [cells[name] for name in sorted(cells)], reports


def _study(folder: Path, sweep: str, seed: int, task: Task) -> optuna.Study:
    """Open the sweep's study; trials that were cut off are in its queue again, by the names of their runs."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # the results name failed runs
    study = optuna.create_study(
        study_name=sweep,
        storage=f"sqlite:///{folder / 'study.db'}",
        # Of fewer than three runs a median says nothing, and of a first epoch little.
        pruner=optuna.pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=1),
        direction="maximize" if task.higher_is_better else "minimize",
        load_if_exists=True,
    )
    # a sampler draws anew after each start: of the same seed it would draw the first trials again
    study.sampler = optuna.samplers.TPESampler(seed=seed + len(study.trials))
    again = {trial.user_attrs.get(_CELL) for trial in study.get_trials(states=(TrialState.WAITING,))}
    # Optuna leaves the trials of a killed process RUNNING for ever.
    for trial in study.get_trials(states=(TrialState.RUNNING, TrialState.FAIL)):
        name = trial.user_attrs.get(_CELL)
        if trial.state == TrialState.RUNNING:
            study.tell(trial.number, state=TrialState.FAIL)
        later = (t.user_attrs.get(_CELL) for t in study.trials if t.number > trial.number)
        if name and name not in again and name not in later:
            study.enqueue_trial(trial.params, user_attrs={_CELL: name})
    return study
