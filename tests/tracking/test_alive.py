"""Whether a run is alive is decided by its folder, wherever `dphybrid sync` runs."""

import os
from pathlib import Path

from mlflow.tracking import MlflowClient

from dphybrid.config.settings import load_settings
from dphybrid.run.folder import LOCK, running
from tests.commands import command, run_with


def test_a_run_of_another_machine_is_alive_while_its_folder_shows_it(data_dir: Path) -> None:
    """Its heartbeats did not arrive, as in an outage, or the machine has another name by now."""
    report = run_with("recipe=toy", "devices=cpu", "train.epochs=1")
    client, folder = MlflowClient(report.tracking_uri), load_settings().runs_dir / report.run_name
    client.update_run(report.run_id, status="RUNNING")
    client.set_tag(report.run_id, "host.name", "elsewhere")
    client.set_tag(report.run_id, "dphybrid.heartbeat", "2001-01-01T00:00:00+00:00")
    held = folder / LOCK
    assert "Nothing to do" in command("sync"), "it was touched a moment ago"
    with running(folder):
        os.utime(held, (0, 0))
        assert "Nothing to do" in command("sync"), "it is held"
    assert f"{report.run_id}: its process no longer exists; ended as KILLED" in command("sync")
