"""`.env` says where runs are; it chooses no code, no address for credentials, and no data folder whose runs
act. A new data folder is its owner's alone, whoever makes it and whatever its name."""

import json
import os
import sqlite3
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from dphybrid.config.settings import ENV_FILE, load_settings
from dphybrid.lifecycle.champion import open_registry
from dphybrid.run.folder import find_run
from dphybrid.tracking.opening import store_to_read
from dphybrid.util.digests import value_digest
from tests.commands import command, run_with
from tests.refusing import refused

PAGE = {
    "version": 1,
    "run_id": "",
    "attempt": 1,
    "config": {"recipe": "evil:R"},
    "prepared": "",
    "data_digest": "",
    "created": "2026-01-01T00:00:00+00:00",
    "uid": "0123",
}


def test_an_unpacked_folder_runs_none_of_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DPHYBRID_DATA_DIR", raising=False)
    Path(".env").write_text("DPHYBRID_DATA_DIR=data\n")
    Path("evil.py").write_text("raise RuntimeError('code of the unpacked folder runs')\n")
    Path("data/runs/x").mkdir(parents=True)
    Path("data/runs/x/run.json").write_text(json.dumps({**PAGE, "page_sha256": value_digest(PAGE)}))
    assert command("runs").splitlines()[1].split()[:3] == ["x", "evil:R", "stopped"]
    run = find_run(load_settings(), "x")
    assert run is not None
    with refused("recipe = 'evil:R' is code of no installed package"):
        _ = run.config
    Path("data/.own-runs").write_text("0123 x\n")  # a list that was unpacked, too
    for argv in (["train", "--recipe", "toy", "--resume", "x"], ["runs", "remove", "x"]):
        assert "chosen by a .env; set DPHYBRID_DATA_DIR in the environment" in command(*argv, ends=2)
    monkeypatch.setenv("DPHYBRID_DATA_DIR", str(tmp_path / "data"))  # the user's own choice
    with pytest.raises(RuntimeError, match="code of the unpacked folder runs"):
        command("train", "--recipe", "toy", "--resume", "x")


def test_an_env_file_gives_no_address_to_the_credentials_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    Path(".env").write_text("DPHYBRID_TRACKING_URI=http://theirs:5000\n")
    assert load_settings().mlflow_uri == "http://theirs:5000"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://own:5000")
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "secret")
    assert load_settings().mlflow_uri == "http://own:5000"
    assert "DPHYBRID_TRACKING_URI is ignored: the environment's credentials" in capsys.readouterr().err
    Path(".env").write_text("DPHYBRID_TRACKING_URI=none\n")
    assert load_settings().mlflow_uri == "none"
    monkeypatch.delenv("MLFLOW_TRACKING_TOKEN")
    (tmp_path / ".mlflow").mkdir()
    (tmp_path / ".mlflow" / "credentials").touch()  # which MLflow's client sends anywhere
    Path(".env").write_text("DPHYBRID_TRACKING_URI=https://theirs\n")
    assert load_settings().mlflow_uri == "http://own:5000"


def test_a_run_reads_the_env_file_of_its_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DPHYBRID_DATA_DIR", raising=False)
    for folder in ("worker", "run"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / ".env").write_text(
            f"DPHYBRID_DATA_DIR={folder}s\nDPHYBRID_THREADS={len(folder)}\n"
        )
    monkeypatch.chdir(tmp_path / "worker")
    of_worker = load_settings()
    assert of_worker.data_dir == tmp_path / "worker" / "workers"
    monkeypatch.setenv(ENV_FILE, str(Path(".env").absolute()))  # as the worker does
    monkeypatch.chdir(tmp_path / "run")
    assert load_settings() == of_worker
    assert not load_settings(threads=3).trusts_data_dir
    monkeypatch.setenv("DPHYBRID_DATA_DIR", "")  # an empty variable counts as unset
    assert not load_settings().trusts_data_dir


TOY = ["--recipe", "toy", "--devices", "cpu", "--train.epochs", "1", "--tracking", "none"]
MAKING = {
    "train": lambda: command("train", *TOY),
    "prepare": lambda: command("prepare", "--recipe", "toy"),
    "sweep": lambda: command("sweep", *TOY, "--sweep", "s", "--grid", '{"train.lr": [0.01]}'),
    "the registry": lambda: open_registry(load_settings()),
}


@pytest.mark.slow
@pytest.mark.parametrize("who", MAKING)
def test_a_new_data_folder_is_its_owner_s_alone(
    who: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "made" / "data"
    monkeypatch.delenv("DPHYBRID_TRACKING_URI", raising=False)
    monkeypatch.setenv("DPHYBRID_DATA_DIR", str(folder))
    before = os.umask(0o022)
    try:
        MAKING[who]()
    finally:
        os.umask(before)
    assert oct(folder.stat().st_mode & 0o777) == "0o700"


@pytest.mark.parametrize("name", ["runs of 2026?", "50%25?x#y"])
def test_any_name_of_the_data_folder_names_its_database(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
