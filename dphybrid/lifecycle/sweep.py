"""A sweep: trainings of all combinations of a grid's values, or of values that Optuna chooses by the results
so far. Each training is a process that leases its own GPUs.

Optuna is the engine, and its study, `study.journal` in the sweep's folder, is the record: a continued sweep
goes on from it. The folder also holds a log of each training. Only this module imports optuna.
"""

import contextlib
import contextvars
import itertools
import json
import math
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import BaseJournalBackend
from optuna.trial import FrozenTrial, TrialState

from dphybrid.config import ExperimentConfig, flatten
from dphybrid.config.settings import Settings
from dphybrid.gpus.devices import expected_devices, num_at_once
from dphybrid.lifecycle.cells import Cell, CellFailed, Result, Train, run_cell
from dphybrid.recipes.configs import apply_overrides
from dphybrid.recipes.registry import find_recipe
from dphybrid.run.folder import check_run_name
from dphybrid.run.train import Report
from dphybrid.tracking.record import as_line, of_line
from dphybrid.tracking.tracker import SWEEP_TAG
from dphybrid.training.checkpoint import VALIDATION, complete_checkpoints, read_state
from dphybrid.training.metrics import Task
from dphybrid.util.alive import holding
from dphybrid.util.errors import UserError, counted
from dphybrid.util.files import make_folder
from dphybrid.util.stop import StopRequest
from dphybrid.util.text import flag_text

_MAX_CELLS = 256
_CELL, _WHY = "cell", "why"
"""Attributes of a trial: the name of its run, and why it has no result."""
_RANGE = {"low", "high", "log", "step"}


@dataclass(frozen=True)
class Sweep:
    """What to train.

    Attributes:
        grid: Field -> a list of values; in a search also a range {"low": 0.001, "high": 0.1, "log": true}. If
            both ends are integers, so are the values; "step" spaces them evenly.
        trials: Number of trainings of a search, including those before the sweep was continued; 0: all
            combinations of the grid.
        prune: In a search, end a training after an epoch in which it does worse than the median of the others
            at that epoch.
    """

    name: str
    config: ExperimentConfig
    grid: Mapping[str, Any]
    trials: int = 0
    prune: bool = True

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
        # The names of the config, as of MLflow's params: a field may be given as `train.batch-size`.
        return {name.replace("-", "_"): self._values(name, given) for name, given in self.grid.items()}

    def _values(self, name: str, given: object) -> BaseDistribution:
        shown = f"grid: {name} = {dict(given) if isinstance(given, Mapping) else repr(given)}"
        if isinstance(given, Mapping):
            if not self.trials:
                raise UserError(f"{shown}; give a list of values; a range needs --trials")
            if not {"low", "high"} <= given.keys() <= _RANGE:
                raise UserError(f"{shown}; give low and high, and optionally log or step")
            whole = isinstance(given["low"], int) and isinstance(given["high"], int)
            try:
                return IntDistribution(**given) if whole else FloatDistribution(**given)
            except (ValueError, TypeError) as error:
                raise UserError(f"{shown}: {error}") from error
        if isinstance(given, str) or not isinstance(given, Sequence) or not given:
            ranges = ", or low and high" if self.trials else ""
            raise UserError(f"{shown}; give a list of values{ranges}")
        return CategoricalDistribution(list(dict.fromkeys(map(flag_text, given))))

    def cells(self, settings: Settings) -> list[Cell]:
        """Return the cell of each combination, the last field changing fastest; of a search, one for each
        choice and end of a range.

        Raises UserError, naming the cell, for unknown fields, values that are not allowed, devices that do
        not exist, and too many combinations.
        """
        space = self.space()
        if self.trials:
            return [
                self.cell(f"{self.name}-000", {name: value}, settings)
                for name, values in space.items()
                for value in _choices(values) or [values.low, values.high]  # type: ignore[attr-defined]
            ]
        choices = [_choices(values) for values in space.values()]
        if (count := math.prod(map(len, choices))) > _MAX_CELLS:
            raise UserError(
                f"grid: {count:,} combinations, at most {_MAX_CELLS} are allowed; give fewer values"
            )
        cells = []
        for number, combination in enumerate(itertools.product(*choices), start=1):
            values = dict(zip(space, combination, strict=True))
            several = {field: value for field, value in values.items() if len(_choices(space[field])) > 1}
            # Zero-padded numbers, so that names sort in the grid's order.
            name = f"{self.name}-{number:0{len(str(count))}d}{_name_suffix(several)}"
            try:
                cells.append(self.cell(name, values, settings))
            except UserError as error:
                raise UserError(f"grid: cell {number} {error}") from error
        return cells

    def cell(self, name: str, values: Mapping[str, object], settings: Settings) -> Cell:
        """Return the cell of these values. Raises UserError for values that are not allowed."""
        chosen = {field: flag_text(value) for field, value in values.items()}
        shown = [f"{field}={value}" for field, value in chosen.items()]
        check_run_name(name, "--sweep: its run")  # longer than the sweep's name
        try:
            made = apply_overrides(self.config, shown)
            expected_devices(made, settings)
        except UserError as error:
            raise UserError(f"({', '.join(shown)}): {error}") from error
        return Cell(name=name, values=chosen, config=made)


def _choices(values: BaseDistribution) -> list[str]:
    return [str(choice) for choice in values.choices] if isinstance(values, CategoricalDistribution) else []


def _name_suffix(chosen: Mapping[str, str]) -> str:
    """Return the end of a cell's name, made of its values: `-cpux8-b512-lr0.01`."""
    short = {"devices": "", "train.batch_size": "b"}
    words = (short.get(name, name.rpartition(".")[2]) + value for name, value in chosen.items())
    return "".join(f"-{re.sub(r'[^A-Za-z0-9._+-]', '', word.replace('*', 'x'))}" for word in words)[:80]


def run_sweep(
    sweep: Sweep,
    settings: Settings,
    stop: StopRequest,
    at_once: int = 0,
    tags: Mapping[str, str] = {},
    wrap: Callable[[Train], Train] = lambda train: train,
) -> list[Result]:
    """Train a sweep's runs, each in its own process; return what became of each, by name. A sweep of this
    name is continued; interrupted and failed runs go on from their checkpoints.

    Raises UserError for values that are not allowed, for data that cannot be used, for a sweep that runs in
    another process, and for one that was begun with other values.

    Args:
        at_once: How many runs train at once; 0: as many as GPUs allow.
        tags: More tags of each run.
        wrap: Put around the training of each cell, such as a task of Prefect.
    """
    check_run_name(sweep.name, "--sweep")
    if at_once < 0:
        raise UserError(f"at_once={at_once}: give the number of runs, or 0 for as many as GPUs allow")
    cells = sweep.cells(settings)
    count = sweep.trials or len(cells)
    workers = at_once or min(count, num_at_once([cell.config for cell in cells], settings))
    with _opened(sweep, cells[0].config, settings) as (study, task):
        folder = sweep.folder(settings)
        print(f"Sweep {sweep.name}: {counted(count, 'run')}, {workers} at once; logs in {folder}", flush=True)
        trials = _Trials(sweep, settings, stop, task, wrap, {**tags, SWEEP_TAG: sweep.name}, study)
        trials.run(trials.queue(cells), workers)
        return trials.results()


@contextmanager
def _opened(sweep: Sweep, first: ExperimentConfig, settings: Settings) -> Iterator[tuple[optuna.Study, Task]]:
    """Hold the sweep's lock during the block; yield its study, and the task that its runs are measured by.
    first: the config of its first run."""
    folder, journal = sweep.folder(settings), sweep.folder(settings) / "study.journal"
    make_folder(folder)
    with holding(folder, "--sweep {}: runs in another process; wait for its end, or stop it first"):
        recipe = find_recipe(first.recipe)
        data = recipe.prepare(first.data, settings.prepared_dir, first.train.seed)
        task = recipe.task_of(first, data.info)
        begun = _begun(sweep, data.digest)
        optuna.logging.set_verbosity(optuna.logging.ERROR)  # the results show which trials failed
        study = optuna.create_study(
            study_name=sweep.name,
            storage=JournalStorage(_Journal(journal)),
            # A median of fewer than three runs means nothing, and a first epoch says little about a run.
            pruner=optuna.pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=1),
            direction="maximize" if task.higher_is_better else "minimize",
            load_if_exists=True,
        )
        changed = [
            f"{name}: {was} -> {begun.get(name, 'not the same for all runs')}"
            for name, was in study.user_attrs.items()
            if begun.get(name) != was
        ]
        if changed:
            raise UserError(
                f"--sweep {sweep.name}: was begun with other values ({'; '.join(changed)}); give the same "
                "ones, or choose another name for this sweep"
            )
        for name, value in begun.items():
            study.set_user_attr(name, value)
        yield study, task


def _begun(sweep: Sweep, data_digest: str) -> dict[str, str]:
    """Return what must stay the same in a sweep, as text by name."""
    space = sweep.space()
    fixed = flatten(sweep.config.model_dump(mode="json"))
    found = {name: flag_text(value) for name, value in sorted(fixed.items()) if name not in space}
    found |= {
        f"grid {name}": json.dumps(given) for name, given in zip(space, sweep.grid.values(), strict=True)
    }
    return {**found, "kind": "search" if sweep.trials else "grid", "data digest": data_digest}


class _Journal(BaseJournalBackend):
    """Optuna's journal in a file whose lines have checksums, as those of a run's record. Only one process
    uses it: the sweep's lock keeps others out. Raises UserError for a damaged line."""

    def __init__(self, file: Path) -> None:
        self._file, self._lock = file, threading.Lock()
        content = file.read_bytes() if file.is_file() else b""
        *lines, torn = content.splitlines(keepends=True) or [b""]
        if torn.endswith(b"\n"):
            lines.append(torn)
        elif torn:  # a killed process was writing it: the next line would be added to it
            os.truncate(file, len(content) - len(torn))
        self._logs = list[dict[str, Any]]()
        for number, line in enumerate(lines, start=1):
            if (found := of_line(line)) is None:
                raise UserError(
                    f"{file}: line {number} is damaged, so the sweep cannot go on; give it another name, or "
                    "put an undamaged copy there"
                )
            self._logs.append(found)

    def read_logs(self, log_number_from: int) -> list[dict[str, Any]]:
        return self._logs[log_number_from:]

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        with self._lock, self._file.open("ab") as stream:
            stream.writelines(as_line(json.dumps(log, separators=(",", ":")).encode()) for log in logs)
            stream.flush()
            os.fsync(stream.fileno())
            self._logs += logs


@dataclass
class _Trials:
    """The trials of a sweep's study. tags: of all runs."""

    sweep: Sweep
    settings: Settings
    stop: StopRequest
    task: Task
    wrap: Callable[[Train], Train]
    tags: Mapping[str, str]
    study: optuna.Study

    def queue(self, cells: Sequence[Cell]) -> int:
        """Queue the runs of a grid, and again those that failed or whose process was killed; return how many
        runs have no result."""
        named = self._by_name()
        # Optuna never ends the trials of a killed process.
        for trial in self.study.get_trials(states=(TrialState.RUNNING,)):
            self.study.tell(trial.number, state=TrialState.FAIL)
        for name, trial in named.items():
            if trial.state in (TrialState.RUNNING, TrialState.FAIL):
                self.study.enqueue_trial(trial.params, {_CELL: name})
        for cell in cells if not self.sweep.trials else ():
            if cell.name not in named:
                self.study.enqueue_trial(cell.values, {_CELL: cell.name})
        ended = [trial for trial in named.values() if trial.state in (TrialState.COMPLETE, TrialState.PRUNED)]
        return (self.sweep.trials or len(cells)) - len(ended)

    def run(self, count: int, workers: int) -> None:
        """Train this many runs: those in the queue, then others of a search."""
        # A new sampler starts its random numbers from the seed; with the same one, a continued search would
        # draw the values of its first trials again.
        seed = self.sweep.config.train.seed + len(self.study.trials)
        self.study.sampler = optuna.samplers.TPESampler(seed=seed)
        # In threads, while this one waits: a signal or an exception of Prefect's then interrupts no training.
        with ThreadPoolExecutor(workers) as pool:
            # The context: Prefect finds the flow run in it.
            runs = [pool.submit(contextvars.copy_context().run, self._train) for _ in range(count)]
            try:
                for each in runs:
                    each.result()
            except BaseException:
                self.stop.ask("the end of the sweep", signal.SIGTERM)
                raise

    def _train(self) -> None:
        if self.stop.pending:
            return
        trial = self.study.ask(self.sweep.space())
        name = trial.user_attrs.get(_CELL) or f"{self.sweep.name}-{trial.number + 1:03d}"
        trial.set_user_attr(_CELL, name)
        watch = _Watch(trial, self.settings.runs_dir / name / "checkpoints", self.task)
        prunes = self.sweep.trials and self.sweep.prune
        folder = self.sweep.folder(self.settings)

        def train(cell: Cell, enough: Callable[[], bool]) -> Report:
            return run_cell(cell, folder, self.settings, self.tags, self.stop, enough)

        try:
            cell = self.sweep.cell(name, trial.params, self.settings)
            report = self.wrap(train)(cell, watch if prunes else lambda: False)
        except CellFailed as failure:
            trial.set_user_attr(_WHY, f"pruned after epoch {watch.seen}" if watch.pruned else str(failure))
            self.study.tell(trial, state=TrialState.PRUNED if watch.pruned else TrialState.FAIL)
        except BaseException:
            self.stop.ask("the end of the sweep", signal.SIGTERM)  # before the next run begins
            raise
        else:
            self.study.tell(trial, float(report.metrics[self.task.metric]))

    def _by_name(self) -> dict[str, FrozenTrial]:
        """Return the last trial of each run, by the run's name."""
        return {trial.user_attrs[_CELL]: trial for trial in self.study.trials if _CELL in trial.user_attrs}

    def results(self) -> list[Result]:
        """Return what became of each run, by name."""
        folder, found = self.sweep.folder(self.settings), []
        not_run = f"not run, {self.stop.reason}" if self.stop.pending else "not run"
        for name, trial in sorted(self._by_name().items()):
            given = {**trial.system_attrs.get("fixed_params", {}), **trial.params}  # of one in the queue
            report = Report.read(folder / f"{name}.json") if trial.state == TrialState.COMPLETE else None
            result = Result(
                name=name,
                values={key: flag_text(value) for key, value in given.items()},
                report=report,
                why="" if report else trial.user_attrs.get(_WHY, not_run),
                pruned=trial.state == TrialState.PRUNED,
            )
            found.append(result)
        return found


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
