"""A run's record says where MLflow has the run: commands without the variables of that time ask there."""

from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from tests.commands import command, run_with
from tests.stores import put_database

TOY = ["recipe=toy", "devices=cpu", "train.print_splits=new"]


@pytest.fixture
def uri(data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of a team's database, in the variable that MLflow's own programs read, too."""
    put_database("mlflow", tmp_path / "team.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/team.db")
    return f"sqlite:///{tmp_path}/team.db"


def test_without_variables_the_champion_stays_and_an_old_run_goes(
    uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = (
        run_with(*TOY, f"train.seed={n}", "checkpoint.register_as=m", run_name=f"r{n}") for n in (1, 2)
    )
    plain = run_with(*TOY, run_name="plain")
    for own in ("", "none", "files"):
        monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
        monkeypatch.setenv("DPHYBRID_TRACKING_URI", own)
        told = command("runs", "remove", "r1", "r2", "--yes", ends=1)
        assert "r1: stays, version 1 of its model is m@champion" in told
        assert "r2: stays, version 2 of its model is m@challenger" in told
    assert command("runs", "remove", "plain", "--yes") == "plain: removed\n"
    stages = [MlflowClient(uri).get_run(each.run_id).info.lifecycle_stage for each in (one, two, plain)]
    assert stages == ["active", "active", "deleted"]


def test_without_variables_a_resumed_run_is_recorded_where_it_began(
    uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run_with(*TOY, run_name="run")
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    again = run_with(*TOY, resume="run")
    assert (again.run_id, again.tracking_uri) == (first.run_id, first.tracking_uri)
    other = run_with(*TOY, "train.epochs=4", resume="run")
    assert other.tracking_uri == first.tracking_uri
    client = MlflowClient(uri)
    assert client.get_run(other.run_id).data.tags["dphybrid.continues"] == first.run_id
    last = [client.get_metric_history(each, "train/loss")[-1].step for each in (first.run_id, other.run_id)]
    assert last == [4, 16], "an epoch of four steps, and three more"
    command("runs", "remove", "run", "--yes")
    stages = [client.get_run(each.run_id).info.lifecycle_stage for each in (first, other)]
    assert stages == ["deleted", "deleted"]
