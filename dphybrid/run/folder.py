"""Run folders: each run has one, with a page that describes the run, and its record. Imports no torch."""

import re
import shlex
import sys
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, count
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from dphybrid.config import ExperimentConfig, flatten
from dphybrid.config.own_runs import check_own, enter, is_own
from dphybrid.config.settings import EXPERIMENT, Settings
from dphybrid.recipes.configs import stored_config
from dphybrid.tracking import Tracker, open_tracker
from dphybrid.tracking.opening import tracker_of
from dphybrid.tracking.tracker import CHAMPION_TAG, FOLDER_TAG
from dphybrid.util.alive import alive, holding
from dphybrid.util.errors import UserError, suggestion
from dphybrid.util.files import make_folder, sync
from dphybrid.util.pages import Page

FLOW_RUN_TAG = "prefect.flow_run_id"
"""Tag of a run: the flow run that trains it."""


class RunPage(Page):
    """`run.json` describes a run.

    Attributes:
        uid: Names the run in the data folder's list of its own runs.
        config: The experiment's values.
        created: ISO time.
    """

    DEPTH: ClassVar[int] = 2

    run_id: str = ""
    attempt: int = 0
    config: dict[str, Any] = Field(default_factory=dict)
    devices: str = "auto"
    prepared: str = ""
    data_digest: str = ""
    tags: dict[str, str] = Field(default_factory=dict)
    created: str
    uid: str = ""

    @property
    def recipe(self) -> str:
        return str(self.config.get("recipe", ""))

    @property
    def register_as(self) -> str:
        """The name of the registered model that the run makes a version of, or ""."""
        return str(self.section("checkpoint").get("register_as") or "")

    def section(self, name: str) -> dict[str, Any]:
        """Return the values of a section; none of a page that has no such section."""
        found = self.config.get(name)
        return found if isinstance(found, dict) else {}


@dataclass(frozen=True)
class Run:
    """A run folder and its page. settings: of the user. Their folder of runs holds the user's own runs; pages
    from elsewhere may name only allowed code."""

    folder: Path
    page: RunPage
    settings: Settings

    @cached_property
    def config(self) -> ExperimentConfig:
        return stored_config(self.page.config, self.folder / "run.json", self.settings)

    @property
    def ui_command(self) -> str:
        return f"dphybrid ui {shlex.quote(self.folder.name)}"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def status(self) -> str:
        """finished, running or stopped."""
        # No page shows that a run is alive: a killed process cannot write that it stopped.
        if alive(self.folder):
            return "running"
        return "finished" if (self.folder / "report.json").is_file() else "stopped"


def named_run(settings: Settings, which: str, recipe: str) -> Run:
    """Return the data folder's own run to continue: the newest of a recipe ("latest"), or the one with a
    name. Raises UserError if there is none."""
    if which != "latest":
        found = find_run(settings, which)
    else:
        found = next((run for run in reversed(own_runs(settings)) if run.page.recipe == recipe), None)
    if found is None:
        known = suggestion(which, [run.folder.name for run in all_runs(settings)] or ["none yet"])
        what = f"recipe {recipe} has no run" if which == "latest" else "there is no such run"
        raise UserError(f"--resume {which}: {what} in {settings.runs_dir}{known}")
    check_own(found.folder, settings, "train on from its checkpoint by --train.warm-start")
    return found


def find_run(settings: Settings, which: str) -> Run | None:
    """Return the run of the data folder with a name, or None. An empty name names no run."""
    folder = settings.runs_dir / which
    there = folder.name == which and (folder / "run.json").is_file()
    return read_run(folder, settings) if there else None


def changed_values(before: dict[str, Any], config: ExperimentConfig) -> dict[str, str]:
    """Return, by name, the values that differ from those of an earlier page, as `0.1 -> 0.2`."""
    old, new = flatten(before), flatten(config.model_dump(mode="json"))
    return {name: f"{old.get(name)} -> {new[name]}" for name in new if old.get(name) != new[name]}


def read_run(run_folder: str | Path, settings: Settings) -> Run:
    """Return the run of a folder. Raises UserError when it is not a run folder."""
    folder = Path(run_folder)
    if not (folder / "run.json").is_file():
        raise UserError(f"{folder}: is not a run folder (it has no run.json)")
    return Run(folder, RunPage.read(folder / "run.json"), settings)


def all_runs(settings: Settings) -> list[Run]:
    """Return the runs of the data folder, oldest first. Prints a note about a run whose page cannot be read
    and leaves it out, so that it does not stop work on the others."""
    runs = []
    for path in settings.runs_dir.glob("*/run.json"):
        try:
            runs.append(read_run(path.parent, settings))
        except (UserError, OSError) as error:
            print(f"Note: left out a run: {error}", file=sys.stderr, flush=True)
    return sorted(runs, key=lambda run: (run.page.created, run.folder.name))


def own_runs(settings: Settings) -> list[Run]:
    """Return the runs that the data folder has made or adopted, oldest first."""
    return [run for run in all_runs(settings) if is_own(run.folder, settings)]


def adopt(settings: Settings, name: str) -> Run:
    """Make a run folder from elsewhere, which lies in the data folder, the data folder's own: give it a run
    in the MLflow that is configured here, and forget the addresses that it names. Return the run. Raises
    UserError for a run that is running or cannot be adopted."""
    check_run_name(name)
    folder = settings.runs_dir / name
    run = read_run(folder, settings)
    if is_own(folder, settings):
        raise UserError(f"{name}: is this data folder's own run already")
    if folder.is_symlink():
        raise UserError(f"{name}: is a link; copy the folder that it leads to")
    with holding(folder), closing(open_run_tracker(settings, run.page.recipe)) as tracker:
        run_id = tracker.adopt(name, {FOLDER_TAG: str(folder.absolute())})
        page = run.page.model_copy(update={"run_id": run_id, "tags": {}, "uid": enter(folder)})
        page.write(folder / "run.json")
    return Run(folder, page, settings)


def retrainings(settings: Settings, model: str | None = None) -> list[Run]:
    """Return the runs that retrained a registered model, which may have been the first of its name. model:
    only those of this one."""
    found = [run for run in own_runs(settings) if CHAMPION_TAG in run.page.tags and run.page.register_as]
    return [run for run in found if model in (None, run.page.register_as)]


def find_tagged_run(settings: Settings, tag: str, value: str | None) -> str | None:
    """Return the name of the own run with this value of a tag, or None."""
    if value is None:
        return None
    return next((run.folder.name for run in own_runs(settings) if run.page.tags.get(tag) == value), None)


def check_run_name(name: str | None, where: str = "run name") -> None:
    """Raise UserError for a run name that cannot name a folder. None is allowed: a name will be generated."""
    if name is None:
        return
    # A command would take a name that begins with a dash for a flag, and "latest" names the newest run.
    plain = name.strip() and name.isprintable() and Path(name).name == name and name[0] not in ".-"
    # File systems allow 255 bytes. The rest is for the longer, hidden names of files while they are written.
    if not plain or len(name.encode()) > 180 or name == "latest":
        raise UserError(
            f"{where} {name!r}: use a plain name of at most 180 bytes, without slashes, control characters, "
            "a dot or dash in front, and not 'latest'; it also names a folder"
        )


def new_run_folder(settings: Settings, name: str) -> Path:
    """Create the folder of a new run. A number is appended to a name that is taken."""
    make_folder(settings.runs_dir)
    for ending in chain([""], (f"-{number}" for number in count(2))):
        folder = settings.runs_dir / f"{name}{ending}"
        # mkdir, not a check first: two runs may start in the same second, and only one gets the name.
        with suppress(FileExistsError):
            folder.mkdir()
            sync(settings.runs_dir)  # so that the new folder survives a power loss
            break
    return folder


def open_run_tracker(settings: Settings, recipe: str) -> Tracker:
    """Return the tracker for a new run that the settings name. Raises UserError if its server does not answer
    now."""
    # An experiment for each recipe, as other recipes have other metrics; unless the user chose one.
    # By the value, not by whether it was given: a settings object that was copied has every field.
    experiment = settings.experiment
    if experiment == EXPERIMENT:
        experiment += "/" + re.sub(r"\W+", "-", recipe)
    return open_tracker(settings.mlflow_uri, experiment, settings.mlflow_dir, runs=settings.runs_dir)


def attached(run: Run) -> Tracker:
    """Return a tracker that continues the record of a run where it is recorded; its server need not answer
    now."""
    settings = run.settings
    return tracker_of(run.folder, settings.mlflow_uri, settings.mlflow_dir)
