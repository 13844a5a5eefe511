"""A new data folder is its owner's alone, whoever makes it and whatever its name; no file of the working
folder chooses it."""

import os
import sqlite3
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from dphybrid.config.settings import load_settings
from dphybrid.lifecycle.champion import open_registry
from dphybrid.tracking.opening import store_to_read
from tests.commands import command, run_with


def test_an_unpacked_folder_chooses_no_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path(".env").write_text(
        "DPHYBRID_NVML=theirs\nDPHYBRID_DATA_DIR=data\nDPHYBRID_TRACKING_URI=http://theirs\n"
    )
    without = load_settings()
    Path(".env").unlink()
    assert load_settings() == without


@pytest.mark.parametrize("who", ["prepare", "the registry"])
def test_a_new_data_folder_is_its_owner_s_alone(
    who: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "made" / "data"
    monkeypatch.delenv("DPHYBRID_TRACKING_URI", raising=False)
    monkeypatch.setenv("DPHYBRID_DATA_DIR", str(folder))
    before = os.umask(0o022)
    try:
        if who == "prepare":
            command("prepare", "--recipe", "toy")
        else:
            open_registry(load_settings())
    finally:
        os.umask(before)
    assert oct(folder.stat().st_mode & 0o777) == "0o700"


def test_any_name_of_the_data_folder_names_its_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "50%25 of runs?x#y"
    monkeypatch.delenv("DPHYBRID_TRACKING_URI", raising=False)
    monkeypatch.setenv("DPHYBRID_DATA_DIR", str(tmp_path / name))
    monkeypatch.chdir(tmp_path)
    report = run_with("recipe=toy", "devices=cpu", "checkpoint.register_as=m", run_name="run")
    assert [path.name for path in tmp_path.iterdir()] == [name]
    with sqlite3.connect(tmp_path / name / "mlflow" / "mlflow.db") as database:
        assert database.execute("SELECT run_uuid FROM runs").fetchall() == [(report.run_id,)]
    settings = load_settings()
    uri = store_to_read(None, settings.mlflow_dir)
    assert MlflowClient(uri).get_run(report.run_id).info.status == "FINISHED"
    assert "Nothing to do" in command("sync")
    assert "run: stays, version 1 of its model is m@champion" in command(
        "runs", "remove", "run", "--yes", ends=1
    )
