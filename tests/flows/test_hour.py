"""An hour of a team in fast motion: 40 scheduled retrainings of three models on three workstations. One of
them dies, `dphybrid deploy` runs a minute later, cron removes runs and
completes records without the team's variables, and somebody copies a champion's folder.
"""

import json
import os
import re
import shutil
import subprocess
import time
from collections import Counter, defaultdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import yaml
from mlflow.tracking import MlflowClient

from tests.commands import python
from tests.fake_nvml import gpu
from tests.flows.servers import REPOSITORY, Team, kill_tree
from tests.flows.test_taken import busy_machine
from tests.stores import put_database
from tests.waiting import patience

pytestmark = pytest.mark.nightly

PLANNED = {"shops": 14, "visits": 13, "orders": 13}
"""Model -> its scheduled retrainings."""
OVER = {"COMPLETED", "FAILED", "CANCELLED"}
EVERY_S, ROWS_EVERY_S, CRON_EVERY_S = 24, 10, 60


def write_rows(folder: Path, hour: int) -> None:
    """Write an hour's rows, with shops that no earlier hour has."""
    random = np.random.default_rng(hour)
    shop = random.integers(0, 20 + 10 * hour, 300)
    buys = random.random(300) < np.where(shop % 2, 0.85, 0.15)
    table = pl.DataFrame(
        {"shop": [f"s{n}" for n in shop], "age": random.normal(size=300), "buys": buys.astype(int)}
    )
    partial = folder / f".{hour}"
    table.write_csv(partial)
    partial.rename(folder / f"{hour:03d}.csv")


def deployments(hours: Path) -> dict[str, Any]:
    """Return a prefect.yaml: a deployment for each model, with its planned times."""
    page = yaml.safe_load((REPOSITORY / "prefect.yaml").read_text())
    (retrain,) = [entry for entry in page["deployments"] if entry["name"] == "retrain-hybrid"]
    retrain.pop("triggers")
    entries = []
    for number, (model, count) in enumerate(PLANNED.items()):
        first = datetime.now(UTC) + timedelta(seconds=90 + number * EVERY_S // len(PLANNED))
        rule = f"DTSTART:{first:%Y%m%dT%H%M%SZ}\nRRULE:FREQ=SECONDLY;INTERVAL={EVERY_S};COUNT={count}"
        given: dict[str, Any] = {"data_path": str(hours), "label": "buys", "register_as": model}
        given["overrides"] = ["devices=auto*1", "train.epochs=3", "model.dim=4", "train.batch_size=64"]
        schedule = {"rrule": rule, "timezone": "Etc/UTC", "slug": "hourly", "active": True}
        entries.append(retrain | {"name": f"retrain-{model}", "parameters": given, "schedules": [schedule]})
    return page | {"deployments": entries}


class Hour:
    """A team's server, data and commands, and what happens, printed with the seconds since the beginning."""

    def __init__(self, team: Team) -> None:
        self.team, self.folder, self.began = team, team.folder / "hour", time.monotonic()
        self.data, self.rows = self.folder / "data", self.folder / "rows"
        self.rows.mkdir(parents=True)
        database = self.folder / "tracking.db"
        put_database("mlflow", database)
        self.tracking = f"sqlite:///{database}"
        self.mlflow = MlflowClient(self.tracking, self.tracking)
        self.decisions = defaultdict[str, dict[int, str]](dict)
        self.num_written, self.cron_at = 0, 0.0

    @property
    def now(self) -> float:
        return time.monotonic() - self.began

    def say(self, text: str) -> None:
        for line in text.strip().splitlines():
            print(f"{self.now:5.0f} s  {line}", flush=True)

    def types(self, *words: str, **variables: str) -> str:
        """Run `dphybrid` as cron does: without the team's variables, but with the data folder's and these."""
        env = {name: os.environ[name] for name in ("PATH", "PYTHONPATH")} | {"HOME": str(self.folder)}
        env |= {"DPHYBRID_DATA_DIR": str(self.data), "OMP_NUM_THREADS": "1"} | variables
        done = python("-m", "dphybrid", *words, env=env, cwd=self.folder)
        assert "Traceback" not in done.stdout + done.stderr
        return done.stdout + done.stderr

    def deploy(self) -> str:
        hosts = ("--host", "red", "--host", "green", "--host", "blue")
        return self.types("deploy", *hosts, "--file", "prefect.yaml", PREFECT_API_URL=self.team.api)

    def start_machine(self, name: str, **more: str) -> "subprocess.Popen[bytes]":
        own = busy_machine(self.team, name, [gpu(0)]) | {"MLFLOW_TRACKING_URI": self.tracking}
        return self.team.start_machine(name, 1, "night", DPHYBRID_DATA_DIR=str(self.data), **own, **more)

    def runs(self) -> list[dict[str, Any]]:
        """The scheduled flow runs, in the order of their planned times."""
        found = [run for run in self.team.runs_of("retrain-hybrid") if run["auto_scheduled"]]
        return sorted(found, key=lambda run: run["expected_start_time"])

    def goes_on(self) -> None:
        """Write the rows of the hours that have begun, run cron's commands when it is time, and note the
        decisions, as cron removes models."""
        for _ in range(self.num_written, 1 + int(self.now / ROWS_EVERY_S)):
            write_rows(self.rows, self.num_written)
            self.num_written += 1
        for model in PLANNED:
            for version in self.mlflow.search_model_versions(f"name='{model}'"):
                decision = version.tags.get("dphybrid.decision", "")
                if decision.startswith(("promoted: ", "kept: ")):
                    self.decisions[model][int(version.version)] = decision
        if self.now > self.cron_at:
            self.cron_at = self.now + CRON_EVERY_S
            told = self.types("runs", "remove", "--older-than", "0", "--yes") + self.types("sync")
            states = Counter(run["state"]["name"] for run in self.runs())
            self.say(", ".join(f"{count} {name}" for name, count in states.items()))
            self.say(f"cron: {told.count(': removed')} removed, {told.count(': stays')} stay")
            shown = ("copy-of", "KILLED", "not known")
            self.say("\n".join(line for line in told.splitlines() if any(word in line for word in shown)))

    def predict(self, model: str, **variables: str) -> str:
        """Return a model's predictions for the first hour's rows."""
        file = self.folder / "out.csv"
        self.types("predict", model, "--data.path", f"{self.rows}/000.csv", "--out", str(file), **variables)
        return file.read_text()

    def copy_champion(self) -> Path:
        """Copy the folder of a champion's run, and predict with both. Not of a run that is dated an hour
        ahead: cron takes that for young."""
        files = {
            page.parent: json.loads(page.read_text()) for page in (self.data / "runs").glob("*/run.json")
        }
        now = datetime.now(UTC).isoformat()
        names = {page["run_id"]: folder.name for folder, page in files.items() if page["created"] < now}
        champions = [self.mlflow.get_model_version_by_alias(model, "champion") for model in self.decisions]
        model, name = next((c.name, names[c.run_id]) for c in champions if c.run_id in names)
        source, copy = (self.data / "runs" / each for each in (name, f"copy-of-{name}"))
        shutil.copytree(source, copy)
        assert self.predict(copy.name) == self.predict(source.name)
        self.say(f"{copy.name}: copied from the champion of {model}; predicts the same")
        return copy


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_forty_retrainings_while_a_machine_dies_and_cron_knows_nothing(team: Team) -> None:
    hour, lost, killed_at, deployed = Hour(team), "", 0.0, ""
    say, limit_s = hour.say, patience(1200)
    (hour.folder / "prefect.yaml").write_text(yaml.safe_dump(deployments(hour.rows)))
    try:
        hour.goes_on()
        say(hour.deploy())
        red, green, blue = (hour.start_machine(name) for name in ("red", "green", "blue"))
        mine = f"{red.pid}-"
        while len(runs := hour.runs()) < 40 or any(run["state"]["type"] not in OVER for run in runs):
            assert hour.now < limit_s, team.logs()
            hour.goes_on()
            for run in hour.runs() if hour.decisions and not lost else ():  # cron has taken its time
                if run["state"]["name"] == "Running" and run["labels"]["dphybrid.home"].startswith(mine):
                    kill_tree(red)
                    lost, killed_at = run["id"], hour.now
                    say(f"red dies, at work on {run['name']}")
            if lost and not deployed and hour.now > killed_at + 60:
                deployed = hour.deploy()
                say(deployed)
                copy = hour.copy_champion()
            time.sleep(3)
        for run in runs:
            state = run["state"]
            say(f"{run['name']}: started {run['run_count']} times, {state['name']}: {state['message']}")
        for worker in (green, blue):
            worker.terminate()
            assert worker.wait(patience(60)) == 0, team.logs()
    finally:
        team.end_workers()
    assert len(runs) == sum(PLANNED.values()) == 40, "each planned time once"
    assert {run["state"]["type"] for run in runs} == {"COMPLETED"}
    assert [run["run_count"] > 1 for run in runs if run["id"] == lost] == [True]
    assert "unchanged" in deployed
    hour.cron_at = 0.0
    hour.goes_on()
    assert "Nothing to do" in hour.types("sync")
    assert copy.exists(), "cron removes no copy, and so not the original's models"
    assert hour.decisions.keys() == PLANNED.keys()
    for model, decisions in hour.decisions.items():
        champion = ""
        for number, decision in sorted(decisions.items()):
            say(f"{model} {number}: {decision}")
            against = re.search(r"against champion version (\d+)'s", decision)
            assert (against[1] if against else "") == champion
            champion = f"{number}" if decision.startswith("promoted: ") else champion
        assert f"{hour.mlflow.get_registered_model(model).aliases['champion']}" == champion
        hour.predict(f"models:/{model}@champion", MLFLOW_TRACKING_URI=hour.tracking)
    experiments = [one.experiment_id for one in hour.mlflow.search_experiments()]
    assert {run.info.status for run in hour.mlflow.search_runs(experiments)} == {"FINISHED"}
    hidden = [path.name for path in hour.data.rglob(".*")]
    assert [name for name in hidden if re.search(r"\.(partial|removed|replaced)-", name)] == []
    assert not [name for folder in team.folder.glob("leases-*") for name in folder.glob("*.ticket")]
