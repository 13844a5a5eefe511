"""Runs side by side: groups, speed-ups, splits, differences, the page and its errors."""

import base64
import html
import re
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from dphybrid.cli.main import main
from dphybrid.config.settings import Settings, load_settings
from dphybrid.jobs.train import Report, run_job
from dphybrid.recipes.configs import load_config
from dphybrid.tracking.compare import (
    Group,
    RunFacts,
    differences,
    find_runs,
    group_runs,
    number,
    overview,
    read_runs,
    split_table,
    write_comparison,
)
from dphybrid.util.errors import UserError

DEVICES = ("cpu", "cpu*2", "cpu*8")


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Report], Settings, Path]:
    """The same experiment on 1, 2 and 8 virtual devices."""
    folder = tmp_path_factory.mktemp("sweep")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("MLFLOW_TRACKING_URI", "DPHYBRID_TRACKING_URI", "DPHYBRID_EXPERIMENT"):
            patch.delenv(name, raising=False)
        patch.setenv("DPHYBRID_DATA_DIR", str(folder))
        patch.chdir(folder)
        settings = load_settings()
        overrides = ["recipe=hybrid", "train.epochs=2"]
        reports = [run_job(load_config(None, [*overrides, f"devices={devices}"]), settings) for devices in DEVICES]
    return reports, settings, folder


def facts(name: str, devices: str, speed: float | None, **params: str) -> RunFacts:
    from datetime import datetime

    replicas = devices.rpartition("*")[2] if "*" in devices else "1"
    return RunFacts(
        run_id=name,
        name=name,
        status="FINISHED",
        started=datetime(2026, 1, 1),
        params={"devices.resolved": devices, "devices.replicas": replicas, **params},
        metrics={} if speed is None else {"summary/samples_per_s_median": speed},
        splits=[],
    )


def test_speed_up_and_efficiency_are_against_the_fewest_devices() -> None:
    runs = [facts("c", "cpu*4", 300.0), facts("a", "cpu", 100.0), facts("b", "cpu*2", 150.0), facts("d", "cpu*4", None)]
    groups = group_runs(runs, "devices")
    assert [group.value for group in groups] == ["cpu", "cpu*2", "cpu*4"]
    rows = overview(groups, "devices")
    assert [(row["run"], row["speed-up"], row["efficiency"]) for row in rows] == [
        ("a", "1", "100%"),
        ("b", "1.5", "75%"),
        ("c", "3", "75%"),
        ("d", "", ""),
    ]


def test_groups_of_numbers_are_in_their_order_and_have_a_median() -> None:
    runs = [facts(str(i), "cpu", float(i), **{"train.batch_size": size}) for i, size in enumerate(["100", "20", "20", "20"])]
    groups = group_runs(runs, "batch")
    assert [group.value for group in groups] == ["20", "100"]
    assert groups[0].samples_per_s == 2.0
    assert Group("x", [facts("a", "cpu", None)]).samples_per_s is None
    assert [group.value for group in group_runs(runs, "no.such.param")] == ["not set"]


def test_only_what_differs_is_a_difference() -> None:
    runs = [facts("a", "cpu", 1.0, same="1", lr="0.1"), facts("b", "cpu*2", 1.0, same="1", lr="0.2", only="x")]
    rows = {row["param"]: list(row.values())[1:] for row in differences(runs, "devices")}
    assert rows == {"devices.resolved": ["cpu", "cpu*2"], "lr": ["0.1", "0.2"], "only": ["not set", "x"]}


@pytest.mark.parametrize(("value", "text"), [(None, ""), (0.123456, "0.1235"), (12345.6, "12,346"), (100.0, "100")])
def test_numbers(value: float | None, text: str) -> None:
    assert number(value) == text


def test_the_page_holds_all_of_a_sweep(sweep: tuple[list[Report], Settings, Path], tmp_path: Path) -> None:
    reports, _, _ = sweep
    runs = read_runs(reports[0].tracking_uri, [report.run_id for report in reports])
    assert [run.replicas for run in runs] == [1, 2, 8]
    for run in runs:
        assert run.samples_per_s
        assert run.samples_per_s > 0
        assert {"forward", "backward", "lookup"} <= set(run.stages_ms)
        assert len(run.steps["valid/mse"]) == 2
        assert all(seconds >= 0 for seconds, _ in run.times["train/loss"])
    shapes = split_table(runs, "devices")
    assert [row["replica"] for row in shapes] == [f"replica {i} / network.region" for i in range(8)]
    eighth = {label: value for label, value in shapes[7].items() if label != "replica"}
    assert sorted(eighth.values()) == ["", "", "[8, 10] -> [8, 10]"]
    page = write_comparison(runs, tmp_path / "out", "devices")
    text = html.unescape(page.read_text())
    for title in ("Runs", "Speed", "Where a step's time goes", "Metrics against step", "Metrics against time", "differs"):
        assert title in text
    assert "Virtual devices share their hardware" in text
    pictures = re.findall(r'src="data:image/png;base64,([^"]+)"', text)
    files = sorted((tmp_path / "out").glob("*.png"))
    assert len(pictures) == len(files) == 4
    assert {base64.b64decode(picture) for picture in pictures} == {path.read_bytes() for path in files}
    assert "http://" not in text.replace("http://127.0.0.1", "")  # nothing is fetched from anywhere


def test_names_with_odd_characters_are_text_on_the_page(tmp_path: Path) -> None:
    runs = [facts("<script>alert(1)</script>", "cpu", 1.0), facts("b & c", "cpu*2", 2.0)]
    text = write_comparison(runs, tmp_path, "devices").read_text()
    assert "<script>alert" not in text
    assert "&lt;script&gt;" in text
    assert "b &amp; c" in text


def test_the_command_finds_runs_by_name_and_logs_its_page_beside_them(
    sweep: tuple[list[Report], Settings, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    reports, _, folder = sweep
    monkeypatch.setenv("DPHYBRID_DATA_DIR", str(folder))
    monkeypatch.chdir(tmp_path)
    assert main(["compare", reports[0].run_name, reports[2].run_id, "--out", "two", "--log"]) == 0
    out = capsys.readouterr().out
    assert f"2 runs: {(tmp_path / 'two' / 'index.html').as_uri()}" in out
    logged = out.strip().rpartition(" ")[2]
    client = MlflowClient(reports[0].tracking_uri)
    run = client.get_run(logged)
    assert run.info.status == "FINISHED"
    assert "mlflow.parentRunId" not in run.data.tags
    assert "compare/index.html" in {item.path for item in client.list_artifacts(logged, "compare")}
    every = find_runs(reports[0].tracking_uri, "dphybrid")
    assert every == [report.run_id for report in reports]  # the page's own run is none of them


def test_wrong_calls_say_what_is_there(
    sweep: tuple[list[Report], Settings, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reports, _, folder = sweep
    uri = reports[0].tracking_uri
    with pytest.raises(UserError, match=rf"run nobody: not in experiment 'dphybrid'; the newest there: .*{reports[2].run_name}"):
        find_runs(uri, "dphybrid", ["nobody"])
    with pytest.raises(UserError, match=r"experiment 'elsewhere': is not at .*; there: .*dphybrid"):
        find_runs(uri, "elsewhere")
    with pytest.raises(UserError, match="needs at least two runs, and there is one"):
        read_runs(uri, [reports[0].run_id, reports[0].run_id])
    with pytest.raises(UserError, match="'0000': cannot be read"):
        read_runs(uri, ["0000", reports[0].run_id])
    with pytest.raises(UserError, match="25 runs make no readable page"):
        read_runs(uri, [str(i) for i in range(25)])
    assert find_runs(uri, "dphybrid", sweep="no such sweep") == []
    monkeypatch.setenv("DPHYBRID_DATA_DIR", str(folder))
    (folder / "a_file").touch()
    every = ["compare", "--experiment", "dphybrid"]
    for arguments, words in [
        (["compare"], "name runs to compare"),
        (["compare", "--sweep", "nightly"], "there are none that have finished"),
        ([*every, "--out", str(folder / "a_file")], "is a file; name a folder"),
        ([*every, "--group-by", "train.batchsize"], "no run has such a param; near: train.batch_size"),
    ]:
        assert main(arguments) == 2
        assert words in capsys.readouterr().err
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    assert main(every) == 2
    assert "http://127.0.0.1:9: does not answer" in capsys.readouterr().err
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "none")
    assert main(every) == 2
    assert "no run is recorded there" in capsys.readouterr().err
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    monkeypatch.setenv("DPHYBRID_DATA_DIR", str(folder / "nothing"))
    assert main(every) == 2
    assert "no run is recorded there yet" in capsys.readouterr().err
    assert not (folder / "nothing").exists()


def test_the_benchmark_of_recording_reports_both_cases() -> None:
    from dphybrid.bench import tracking as bench

    result = bench.run(rounds=3, steps=5, step_ms=0.5)
    assert [case["log_every"] for case in result["cases"]] == [1, 20]
    for case in result["cases"]:
        assert case["step_ms_off"] > 0
        assert case["ratio_quartiles"][0] <= case["ratio_median"] <= case["ratio_quartiles"][1]
    assert result["call_us"]["p50"] <= result["call_us"]["p95"]
    assert "every 20 steps" in bench.text(result)


def test_sync_without_anything_waiting_says_so(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sync"]) == 0
    assert capsys.readouterr().out.strip()
