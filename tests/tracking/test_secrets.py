"""A password planted in every address is shown nowhere."""

from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from dphybrid.cli.main import main
from dphybrid.tracking import open_tracker

SECRET = "pl4nted-s3cret"


@pytest.mark.slow
def test_a_planted_password_is_found_nowhere(
    postgres_uri: str,
    data_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    def dphybrid(*arguments: str) -> str:
        main(arguments)
        return "".join(capfd.readouterr())

    uri = postgres_uri.replace("://dphybrid@", f"://dphybrid:{SECRET}@")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("PREFECT_API_URL", f"http://bob:{SECRET}@127.0.0.1:9/api")
    registered = ("--checkpoint.register-as", "clicks", "--tag", f"from={uri}")
    said = dphybrid("train", "--recipe", "toy", *registered)
    assert "Registered:  models:/clicks@challenger" in said, said
    said += dphybrid("doctor")
    assert "MLflow: postgresql://***@127.0.0.1" in said
    assert "***@127.0.0.1:9/api" in said
    said += dphybrid("sync")
    for address in ("http://bob:{}@127.0.0.1:9", "nonsense://bob:{}@h/p", "file://{}@h/p"):
        said += dphybrid("train", "--recipe", "toy", "--tracking", address.format(SECRET))
    assert "nonsense://***@h/p: MLflow refuses to record a run" in said
    said += caplog.text
    assert SECRET not in said, [line for line in said.splitlines() if SECRET in line]
    monkeypatch.delenv("DPHYBRID_TRACKING_URI")  # --tracking left it
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("dphybrid/toy")
    (run,) = client.search_runs([experiment.experiment_id])
    assert "***" in run.data.tags["from"]
    assert SECRET not in str(run.to_dictionary())
    models = client.search_logged_models([experiment.experiment_id])
    assert SECRET not in str([model.to_dictionary() for model in models])
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert "report.json" in {path.name for path in files}
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []


def test_a_record_in_plain_files_has_no_password(tmp_path: Path) -> None:
    uri = f"postgresql://bob:{SECRET}@127.0.0.1/db"
    tracker = open_tracker("files", "", tmp_path)
    tracker.start("run", {"data.path": uri}, {"from": uri}, "")
    tracker.set_tags({"again": uri})
    tracker.finish("FINISHED")
    (record,) = (file for file in tmp_path.rglob("*") if file.is_file())
    text = record.read_text(encoding="utf-8")
    assert "postgresql://***@" in text
    assert SECRET not in text
    assert record.stat().st_mode & 0o777 == 0o600
