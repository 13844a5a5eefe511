"""A sweep: trainings of all combinations of a grid's values, or of values that Optuna chooses by the results
so far. Each training is a process that leases its own GPUs.

Optuna is the engine, and its study, `study.journal` in the sweep's folder, is the record: a continued sweep
goes on from it. The folder also holds a log of each training. Only this module imports optuna.
"""

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from dphybrid.config import ExperimentConfig
from dphybrid.config.settings import Settings
from dphybrid.gpus.devices import expected_devices
from dphybrid.gpus.inventory import Inventory, visible
from dphybrid.recipes.configs import apply_overrides
from dphybrid.recipes.registry import find_recipe
from dphybrid.run.folder import check_run_name
from dphybrid.run.pages import Report
from dphybrid.tracking.tracker import SWEEP_TAG
from dphybrid.training.checkpoint import VALIDATION, complete_checkpoints, read_state
from dphybrid.training.metrics import Task
from dphybrid.util.alive import holding
from dphybrid.util.errors import UserError, counted
from dphybrid.util.files import make_folder, write_text
from dphybrid.util.stop import StopRequest
from dphybrid.util.text import flag_text

_RUN, _WHY, _FACTS = "run", "why", "facts"
"""Attributes of a trial: the name of its run, why it has no result, and its metrics and MLflow address."""
_END_S = 25.0
"""How long a run's process may take to write its checkpoint when the sweep has to stop. Less than the 30
seconds after which Prefect kills a cancelled flow run."""


class RunFailed(Exception):
    """A run's process ended without a result."""


Result = dict[str, Any]
"""What became of a run: its name, its values, and its metrics, or why it has none (`failed` or `pruned`)."""


@dataclass(frozen=True)
class Sweep:
    """What to train.

    Attributes:
        grid: Field -> a list of values; in a search also a range {"low": 0.001, "high": 0.1, "log": true}. If
            both ends are integers, so are the values; "step" spaces them evenly.
        trials: Number of trainings of a search, including those before the sweep was continued; 0: all
            combinations of the grid. A search ends a training after an epoch in which it does worse than the
            median of the others at that epoch.
    """

    name: str
    config: ExperimentConfig
    grid: Mapping[str, Any]
    trials: int = 0

    def folder(self, settings: Settings) -> Path:
        """Return the folder of the sweep's study and logs."""
        return settings.data_dir / "sweeps" / self.name

    def space(self) -> dict[str, BaseDistribution]:
        """Return the values of each field as Optuna takes them; choices are texts. Raises UserError for what
        is neither a list nor a range."""
        if not self.grid:
            raise UserError(
                'grid: give at least one field with values, such as {"train.batch_size": [256, 512]}'
            )
        space = dict[str, BaseDistribution]()
        for name, given in self.grid.items():
            shown = f"grid: {name} = {given!r}"
            values: BaseDistribution
            if isinstance(given, dict) and self.trials:
                whole = isinstance(given.get("low"), int) and isinstance(given.get("high"), int)
                try:
                    values = IntDistribution(**given) if whole else FloatDistribution(**given)
                except (ValueError, TypeError) as error:
                    remedy = "give low and high, and optionally log or step"
                    raise UserError(f"{shown}: {error}; {remedy}") from error
            elif isinstance(given, list) and given:
                values = CategoricalDistribution(list(dict.fromkeys(map(flag_text, given))))
            else:
                raise UserError(f"{shown}; give a list of values, or with --trials a range with low and high")
            # The names of the config, as of MLflow's params: a field may be given as `train.batch-size`.
            space[name.replace("-", "_")] = values
        return space

    def cells(self) -> list[dict[str, str]]:
        """Return the values of each run of the grid, the last field changing fastest; of a search, one for
        each choice and end of a range."""
        choices = {field: _choices(values) for field, values in self.space().items()}
        if self.trials:
            return [{field: text} for field, texts in choices.items() for text in texts]
        return [dict(zip(choices, texts, strict=True)) for texts in itertools.product(*choices.values())]

    def run_name(self, number: int) -> str:
        return f"{self.name}-{number:03d}"

    def config_of(self, values: Mapping[str, object], settings: Settings) -> ExperimentConfig:
        """Return the config of a run with these values. Raises UserError for unknown fields, values that are
        not allowed, and devices that do not exist."""
        shown = [f"{field}={flag_text(value)}" for field, value in values.items()]
        try:
            config = apply_overrides(self.config, shown)
            expected_devices(config, settings)
        except UserError as error:
            raise UserError(f"grid: ({', '.join(shown)}): {error}") from error
        return config


def _choices(values: BaseDistribution) -> list[str]:
    """Return the values of a field as texts; of a range, its ends."""
    if isinstance(values, CategoricalDistribution):
        return [str(choice) for choice in values.choices]
    assert isinstance(values, IntDistribution | FloatDistribution)
    return [flag_text(values.low), flag_text(values.high)]


def run_sweep(
    sweep: Sweep, settings: Settings, stop: StopRequest, at_once: int = 0, tags: Mapping[str, str] = {}
) -> list[Result]:
    """Train a sweep's runs, each in its own process; return what became of each, by name. A sweep of this
    name is continued; interrupted and failed runs go on from their checkpoints.

    Raises UserError for values that are not allowed, for data that cannot be used, for a sweep that runs in
    another process, and for one that was begun with other values.

    Args:
        at_once: How many runs train at once; 0: one for each GPU, at least one.
        tags: More tags of each run.
    """
    check_run_name(sweep.name, "--sweep")
    cells = sweep.cells()
    configs = [sweep.config_of(values, settings) for values in cells]
    count, folder = sweep.trials or len(cells), sweep.folder(settings)
    workers = at_once or max(1, len(visible(Inventory(settings.nvml).read())))
    make_folder(folder)
    with holding(folder, "--sweep {}: runs in another process; wait for its end, or stop it first"):
        task, digest = _prepared(configs, settings)
        study = _opened(sweep, folder / "study.journal", task, digest)
        print(f"Sweep {sweep.name}: {counted(count, 'run')}, {workers} at once; logs in {folder}", flush=True)
        left = count - _queued(study, sweep, [] if sweep.trials else cells)

        def train() -> None:
            if not stop.pending:
                _train(study.ask(sweep.space()), sweep, settings, stop, task, {**tags, SWEEP_TAG: sweep.name})

        # In threads, while this one waits: a signal then interrupts no training.
        with ThreadPoolExecutor(workers) as pool:
            try:
                for future in [pool.submit(train) for _ in range(left)]:
                    future.result()
            except BaseException:
                stop.ask("the end of the sweep", signal.SIGTERM)  # the other runs end, too
                raise
        return _results(study, f"not run, {stop.reason}" if stop.pending else "not run")


def _prepared(configs: Sequence[ExperimentConfig], settings: Settings) -> tuple[Task, str]:
    """Prepare the data of all runs; return the task that measures them, and the digest of the first one's
    data. Raises UserError if several metrics measure them."""
    found = list[tuple[Task, str]]()
    distinct = {(each.recipe, each.data.model_dump_json(), each.train.seed): each for each in configs}
    for config in distinct.values():
        recipe = find_recipe(config.recipe)
        data = recipe.prepare(config.data, settings.prepared_dir, config.train.seed)
        found.append((recipe.task_of(config, data.info), data.digest))
    if len(metrics := {task.metric for task, _ in found}) > 1:
        several = " and ".join(sorted(metrics))
        raise UserError(f"grid: its runs are measured by {several}; give values with one deciding metric")
    return found[0]


def _opened(sweep: Sweep, journal: Path, task: Task, data_digest: str) -> optuna.Study:
    """Return the sweep's study. Raises UserError if it was begun with other values."""
    if journal.is_file() and not (content := journal.read_bytes()).endswith(b"\n"):
        # A killed process was writing the last line: the next one would be added to it.
        os.truncate(journal, content.rfind(b"\n") + 1)
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # the results show which trials failed
    try:
        study = optuna.create_study(
            study_name=sweep.name,
            storage=JournalStorage(JournalFileBackend(str(journal))),
            # A median of fewer than three runs means nothing, and a first epoch says little about a run.
            pruner=optuna.pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=1)
            if sweep.trials
            else optuna.pruners.NopPruner(),
            direction="maximize" if task.higher_is_better else "minimize",
            load_if_exists=True,
        )
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{journal}: is damaged, so the sweep cannot go on; give --sweep another name"
        ) from error
    # A new sampler starts its random numbers from the seed; with the same one, a continued search would draw
    # the values of its first trials again.
    study.sampler = optuna.samplers.TPESampler(seed=sweep.config.train.seed + len(study.trials))
    now = [sweep.config.model_dump(mode="json"), dict(sweep.grid), bool(sweep.trials), data_digest]
    if study.user_attrs.setdefault("begun", now) != now:
        raise UserError(
            f"--sweep {sweep.name}: was begun with another grid, other values or other data; give the same "
            "ones, or choose another name for this sweep"
        )
    study.set_user_attr("begun", now)
    return study


def _last_trials(study: optuna.Study) -> dict[str, FrozenTrial]:
    """Return the last trial of each run, by the run's name."""
    return {trial.user_attrs[_RUN]: trial for trial in study.trials if _RUN in trial.user_attrs}


def _queued(study: optuna.Study, sweep: Sweep, cells: Sequence[Mapping[str, str]]) -> int:
    """Queue the runs of a grid, and again those that failed or whose process was killed; return how many runs
    have ended."""
    # Optuna never ends the trials of a killed process.
    for trial in study.get_trials(states=(TrialState.RUNNING,)):
        study.tell(trial.number, state=TrialState.FAIL)
    known = _last_trials(study)
    wanted = {name: trial.params for name, trial in known.items() if trial.state == TrialState.FAIL}
    for number, values in enumerate(cells, start=1):
        if sweep.run_name(number) not in known:
            wanted[sweep.run_name(number)] = dict(values)
    for name, values in wanted.items():
        study.enqueue_trial(values, {_RUN: name})
    return sum(trial.state in (TrialState.COMPLETE, TrialState.PRUNED) for trial in known.values())


def _train(
    trial: optuna.Trial,
    sweep: Sweep,
    settings: Settings,
    stop: StopRequest,
    task: Task,
    tags: Mapping[str, str],
) -> None:
    name = trial.user_attrs.get(_RUN) or sweep.run_name(trial.number + 1)
    trial.set_user_attr(_RUN, name)
    checkpoints, seen, pruned = settings.runs_dir / name / "checkpoints", 0, False

    def is_worse() -> bool:
        """Report the validation metric of each new epoch; return whether to prune the run."""
        nonlocal seen, pruned
        # suppress: the run may have just removed this checkpoint; the next call reads a newer one
        with suppress(UserError, FileNotFoundError, IndexError):
            history = read_state(complete_checkpoints(checkpoints)[-1]).progress.history
            for epoch, row in enumerate(history[seen:], start=seen + 1):
                trial.report(row[VALIDATION + task.metric], epoch)
            if len(history) > seen:
                seen, pruned = len(history), trial.should_prune()
        return pruned

    try:
        config = sweep.config_of(trial.params, settings)
        report = train_apart(name, config, sweep.folder(settings), settings, tags, stop, is_worse)
    except RunFailed as failure:
        trial.set_user_attr(_WHY, f"pruned after epoch {seen}" if pruned else str(failure))
        trial.study.tell(trial, state=TrialState.PRUNED if pruned else TrialState.FAIL)
    else:
        trial.set_user_attr(_FACTS, {**report.metrics, "url": report.run_url})
        trial.study.tell(trial, float(report.metrics[task.metric]))


def train_apart(
    name: str,
    config: ExperimentConfig,
    folder: Path,
    settings: Settings,
    tags: Mapping[str, str],
    stop: StopRequest,
    enough: Callable[[], bool],
) -> Report:
    """Train a run in its own process, from its checkpoint if it has one; return its report. The process
    writes its output to `folder`/NAME.log.

    stop: passed on to the process, which then writes a checkpoint. enough: called repeatedly; when it returns
    True, the process is ended in the same way. Raises RunFailed with the last lines of the output.
    """
    run, page, log = settings.runs_dir / name, folder / f"{name}.config.json", folder / f"{name}.log"
    report = run / "report.json"
    if page.is_file() and report.is_file():  # of this sweep, which was killed before it noted the result
        return Report.read(report)
    write_text(page, config.model_dump_json(indent=1))
    # One process per run: CUDA frees all of its memory at the process's end, and a crash ends only this run.
    argv = [sys.executable, "-P", "-m", "dphybrid", "train", "--config", str(page)]
    argv += [f"--tag={tag}={value}" for tag, value in tags.items()]
    # An interrupted run continues from its checkpoint.
    argv += ["--resume" if (run / "run.json").is_file() else "--run-name", name]
    # Append: keep the output of earlier attempts.
    with log.open("ab") as stream:
        child = subprocess.Popen(argv, stdout=stream, stderr=stream)
        while child.poll() is None and not stop.pending and not enough():
            time.sleep(0.2)
        if child.poll() is None:
            child.terminate()
        try:
            child.wait(_END_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
    if child.returncode:
        # The last lines are the run's error message, or the end of its traceback.
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise RunFailed(f"{name} ended with {child.returncode}: {' | '.join(lines[-3:])} ({log})")
    return Report.read(report)


def _results(study: optuna.Study, not_run: str) -> list[Result]:
    """Return what became of each run, by name."""
    results = []
    for name, trial in sorted(_last_trials(study).items()):
        given = {**trial.system_attrs.get("fixed_params", {}), **trial.params}  # of one in the queue
        row = {"run": name, **{field: flag_text(value) for field, value in given.items()}}
        if trial.state == TrialState.COMPLETE:
            results.append(row | trial.user_attrs[_FACTS])
        else:
            why = trial.user_attrs.get(_WHY, not_run)
            results.append(row | {"pruned" if trial.state == TrialState.PRUNED else "failed": why})
    return results
