"""Whether a run is alive: the lock of its folder says it, else its process; no clock, and no number alone."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

from mlflow.tracking import MlflowClient

from dphybrid.config.settings import load_settings
from dphybrid.lifecycle.cleanup import plan_removal
from dphybrid.run.folder import Run
from dphybrid.run.job import Around
from dphybrid.tracking.record import RecordFile, of_metrics
from dphybrid.util.alive import holding, lives, process_name
from tests.commands import command, run_with


def test_a_name_of_a_process_is_its_own_for_good() -> None:
    own = process_name()
    assert lives(own)
    assert not lives(own.replace("-", "-1")), "another process has the number"
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as ended:
        other = process_name(ended.pid)
        assert lives(other)
        assert ended.stdin is not None
        ended.stdin.close()
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        assert not lives(other), "it has ended, though its parent has not asked"


def test_sync_ends_runs_whose_process_is_gone_and_no_others(data_dir: Path) -> None:
    report = run_with("recipe=toy", "devices=cpu", "train.epochs=1")
    client, run = MlflowClient(report.tracking_uri), load_settings().runs_dir / report.run_name
    record = RecordFile(run)
    record.append({"op": "status", "status": "RUNNING"})
    record.append(of_metrics({"train/loss": 1.0}, 99))
    record.close()
    with holding(run):
        assert f"{run.name}: still running" in command("sync")
    assert f"{run.name}: its process no longer exists; ended as KILLED" in command("sync")
    assert client.get_run(report.run_id).info.status == "KILLED"
    assert "Nothing to do" in command("sync")
    lines = record.path.read_bytes().splitlines(keepends=True)
    record.path.write_bytes(b"".join(line for line in lines if b"tracking_uri" not in line))
    assert "its record no longer says where its MLflow run is" in command("sync", ends=1)


def test_a_run_is_running_from_its_folder_to_its_report(data_dir: Path, unrecorded: None) -> None:
    settings, said = load_settings(), list[tuple[str, str, str]]()

    class Looking(Around):
        run: Run

        def built(self, run: Run) -> None:
            self.run = run
            self.look("built")

        def step(self, name: str, work: Callable[[], object]) -> object:
            done = work()
            if name in ("train", "evaluate", "report"):
                self.look(name)
            return done

        def look(self, when: str) -> None:
            kept = plan_removal(settings, [self.run.folder.name]).kept
            said.append((when, self.run.status, kept[self.run.folder.name]))

    run_with("recipe=toy", "devices=cpu", "train.epochs=1", run_name="run", around=Looking())
    assert said == [(when, "running", "it is running") for when in ("built", "train", "evaluate", "report")]
    assert "run: removed" in command("runs", "remove", "run", "--yes")
