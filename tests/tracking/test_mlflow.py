"""The record in MLflow: what a person opens must be there, loadable and right."""

import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from mlflow.tracking import MlflowClient

from dphybrid.run.pages import Report
from dphybrid.serving.load import model_from_checkpoint
from dphybrid.tracking import open_tracker
from dphybrid.tracking.loader import checkpoint_folder
from dphybrid.tracking.opening import embedded_uri, make_database, store_to_read
from tests.commands import models_of, run_with
from tests.conftest import own_settings
from tests.disks import files_of_at_most
from tests.refusing import refused
from tests.stores import put_database


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, MlflowClient]:
    """A small run in an embedded store."""
    folder = tmp_path_factory.mktemp("tracked")
    with pytest.MonkeyPatch.context() as patch:
        own_settings(patch, folder)
        patch.chdir(folder)
        report = run_with("recipe=hybrid", "devices=cpu*3", "train.epochs=2")
    return report, MlflowClient(report.tracking_uri)


def test_the_run_holds_config_metrics_and_environment(finished: tuple[Report, MlflowClient]) -> None:
    report, client = finished
    run = client.get_run(report.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params["train.epochs"] == "2"
    assert run.data.tags["dphybrid.replicas"] == "3"
    assert [name for name in run.data.params if name.startswith("devices")] == ["devices"]
    assert run.data.params["size.table_rows"] == "1000"
    assert run.data.tags["version.torch"] == torch.__version__
    assert run.data.tags["dphybrid.devices"] == "cpu*3"
    metrics = run.data.metrics
    assert metrics["final_mse"] == pytest.approx(report.metrics["mse"])
    assert set(metrics) == {
        *("train/loss", "train/epoch_loss", "valid/mse", "final_mse", "perf/samples_per_s", "perf/step_ms"),
        *("system/process_rss_mb", "perf/host_peak_gib"),
    }
    assert len(client.get_metric_history(report.run_id, "valid/mse")) == 2
    assert run.data.tags["dphybrid.data_digest"] == report.digests["data"]


def test_the_finer_metrics_are_in_the_record(finished: tuple[Report, MlflowClient]) -> None:
    import pandas

    report, _ = finished
    file = Path(report.best_checkpoint).parents[1] / "record.jsonl"
    table = pandas.read_json(file, lines=True)
    curves = table[table["op"] == "metrics"].dropna(axis=1, how="all")
    stages = {f"timing/{stage}_ms" for stage in ("lookup", "scatter", "replicate", "forward", "gather")}
    assert {
        *stages,
        "perf/step_ms",
        "train/lr",
        "perf/host_peak_gib",
        "system/cpu_pct",
    } < set(curves.columns)
    steps = curves.dropna(subset=["timing/forward_ms"])["step"]
    assert steps.to_list() == list(range(20, 320, 20))


def test_the_report_is_text_whatever_columns_are_called(data_dir: Path, tmp_path: Path) -> None:
    odd = "<script>alert(1)</script> | `x` $y^"
    lines = ["y,size," + odd, *(f"{n % 2},{n},<b>{n % 5}</b>```" for n in range(150))]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    report = run_with("recipe=ctr", f"data.path={tmp_path / 't.csv'}", "data.label=y", "train.epochs=2")
    text = MlflowClient(report.tracking_uri).get_run(report.run_id).data.tags["mlflow.note.content"]
    facts = dict(line.removeprefix("- **").split("**: ") for line in text.replace("\\", "").splitlines())
    assert facts.keys() == {"What", "Validation", "Baseline", "Time", "More"}
    assert facts["What"].startswith("ctr on cpu, batch 32, seed 0; ")
    assert facts["Validation"].startswith(f"auc {report.metrics['auc']:.4f}")
    page = (data_dir / "runs" / report.run_name / "Report.html").read_text()
    assert "<script" not in page
    command = page.partition("<pre>dphybrid train ")[2].partition("\n")[0]
    assert "--train.epochs 2" in command
    assert f"auc: {report.metrics['auc']:.4f} at the epoch that is kept" in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt; | `x` $y^" in page


def test_splits_and_report_are_artifacts(finished: tuple[Report, MlflowClient], tmp_path: Path) -> None:
    report, client = finished
    assert {item.path for item in client.list_artifacts(report.run_id)} == {"Report.html", "splits.txt"}
    path = client.download_artifacts(report.run_id, "splits.txt", str(tmp_path))
    lines = Path(path).read_text().splitlines()
    assert lines == report.split_lines
    assert lines[0] == "Let's use 3 devices!"
    note = client.get_run(report.run_id).data.tags["mlflow.note.content"]
    assert "- **Split**: 64 rows on 3 devices: 22 \\+ 22 \\+ 20" in note


def test_checkpoints_are_models_that_load_back(
    finished: tuple[Report, MlflowClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow

    report, client = finished
    run = client.get_run(report.run_id)
    steps = {output.step for output in run.outputs.model_outputs}
    assert max(steps) == 314
    best = next(model for model in models_of(report) if "best" in model.tags["dphybrid.role"])
    assert str(best.status) == "READY"
    assert {metric.key for metric in best.metrics} == {"valid/mse"}
    monkeypatch.setenv("MLFLOW_TRACKING_URI", report.tracking_uri)
    loaded = mlflow.pyfunc.load_model(f"models:/{best.model_id}").unwrap_python_model
    assert loaded is not None
    folder = checkpoint_folder(f"models:/{best.model_id}", report.tracking_uri)
    one, two = model_from_checkpoint(folder, "cpu*8"), model_from_checkpoint(report.best_checkpoint)
    for key, value in one.state_dict().items():
        assert torch.equal(value, two.state_dict()[key])


@pytest.mark.nightly
def test_processes_that_make_the_store_at_once_all_succeed(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from dphybrid.tracking import open_tracker;"
        f"t = open_tracker(None, 'together', Path({str(tmp_path)!r}));"
        "import os; print(t.start(f'run-{os.getpid()}', {}, {}, ''))"
    )
    children = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    ids = {child.communicate(timeout=180)[0].strip() for child in children}
    assert len(ids - {""}) == 2


def test_a_tracker_of_nothing_has_every_verb(tmp_path: Path) -> None:
    tracker = open_tracker("none", "x", tmp_path)
    assert tracker.start("run", {}, {}, "") == ""
    tracker.resume("run", {}, {"a": "b"}, "")
    tracker.log_metrics({"a": 1.0}, 0)
    tracker.log_summary({"a": 1.0})
    tracker.log_file("a.txt")
    tracker.log_checkpoints([])
    tracker.keep()
    assert tracker.register("clicks", "uid", "challenger") == "nothing is recorded"
    tracker.finish("FINISHED")
    tracker.close()
    assert tracker.run_url == tracker.tracking_uri == ""
    assert list(tmp_path.iterdir()) == []


def test_a_database_that_did_not_fit_is_made_by_the_next_run(tmp_path: Path) -> None:
    uri = embedded_uri(tmp_path)
    with files_of_at_most(200 * 1024), refused(r"mlflow\.db: MLflow's tables cannot be made .*make room"):
        make_database(uri, tmp_path)
    make_database(uri, tmp_path)
    assert [one.name for one in MlflowClient(uri).search_experiments()] == ["Default"]


def test_a_store_that_another_mlflow_made_is_refused_in_a_sentence(tmp_path: Path) -> None:
    put_database("mlflow", tmp_path / "mlflow.db")
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        database.execute("UPDATE alembic_version SET version_num = '0123456789ab'")
    remedy = re.escape(f"run `mlflow db upgrade {embedded_uri(tmp_path)}`")
    with refused(rf"mlflow\.db: MLflow .*found version 0123456789ab.*{remedy}$"):
        store_to_read(None, tmp_path)
