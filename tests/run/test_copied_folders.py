"""A run's folder is whole by itself: a copied or renamed one uses its own files, and a copy leaves the run of
the original in MLflow alone."""

import shutil
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from dphybrid.config.settings import load_settings
from dphybrid.run.folder import read_run
from dphybrid.serving.load import find_checkpoint
from tests.commands import command, run_with

TOY = ["recipe=toy", "devices=cpu", "train.print_splits=new"]


@pytest.mark.usefixtures("embedded_store")
def test_a_copied_run_is_another_folder_of_the_same_run(data_dir: Path) -> None:
    report = run_with(*TOY, run_name="first")
    settings, client = load_settings(), MlflowClient(report.tracking_uri)
    runs = settings.runs_dir
    for copy in ("copy", "outside"):
        shutil.copytree(runs / "first", {"copy": runs, "outside": Path.cwd()}[copy] / copy)
    run_with(*TOY, "train.epochs=3", resume="first")
    for which, folder in (("copy", runs / "copy"), (str(Path("outside").absolute()), Path("outside"))):
        assert find_checkpoint(which, settings).is_relative_to(folder.absolute())
    said = command("runs", "remove", "copy", "--yes", ends=2)
    assert "copy: it was not made in this data folder" in said
    assert client.get_run(report.run_id).info.lifecycle_stage == "active"

    (runs / "first").rename(runs / "renamed")
    run_with(*TOY, run_name="first")  # another run of the old name
    assert find_checkpoint("renamed", settings).is_relative_to(runs / "renamed")
    renamed = read_run(runs / "renamed", settings)
    assert Path(renamed.page.prepared).is_dir()
    command("train", "--recipe", "toy", "--train.epochs", "4", "--devices", "cpu", "--resume", "renamed")
    for page in (runs / "renamed").glob("r*.json"):
        assert page.name == "report.json" or f"{data_dir}" not in page.read_text()
    assert command("runs", "remove", "renamed", "--yes") == "renamed: removed\n"
    assert client.get_run(report.run_id).info.lifecycle_stage == "deleted"


@pytest.mark.usefixtures("embedded_store")
def test_a_run_seen_through_a_link_is_no_copy(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_with(*TOY, "checkpoint.register_as=m", run_name="first")
    Path("linked").symlink_to(data_dir)
    monkeypatch.setenv("DPHYBRID_DATA_DIR", str(Path("linked").absolute()))
    told = command("runs", "remove", "first", "--yes", ends=1)
    assert "first: stays, version 1 of its model is m@champion" in told
