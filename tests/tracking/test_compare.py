"""Runs side by side: speed-ups, differences, width, errors."""

import dataclasses
import math
import re
from datetime import datetime
from pathlib import Path
from urllib.parse import unquote

import pytest
from mlflow.tracking import MlflowClient

from dphybrid.config.settings import Settings, load_settings
from dphybrid.recipes.configs import load_config
from dphybrid.run.train import Report, run_job
from dphybrid.tracking.compare import RunFacts, find_runs, page_path, read_runs, table_of
from tests.commands import command, run_with
from tests.conftest import own_settings
from tests.refusing import refused
from tests.stores import put_database

DEVICES = ("cpu", "cpu*2", "cpu*8")
SPEED = ("samples/s", "speed-up", "efficiency")


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Report], Settings, Path]:
    """The same experiment on 1, 2 and 8 virtual devices."""
    folder = tmp_path_factory.mktemp("sweep")
    with pytest.MonkeyPatch.context() as patch:
        own_settings(patch, folder)
        patch.chdir(folder)
        settings = load_settings()
        overrides = ["recipe=hybrid", "train.epochs=2", "train.batch_size=600"]
        reports = [
            run_job(load_config(None, [*overrides, f"devices={devices}"]), settings) for devices in DEVICES
        ]
    return reports, settings, folder


def facts(name: str, on: str, speed: float | None, **params: str) -> RunFacts:
    replicas = on.rpartition("*")[2] if "*" in on else "1"
    return RunFacts(
        run_id=name,
        experiment_id="1",
        name=name,
        status="FINISHED",
        started=datetime(2026, 1, 1),
        params={"devices": on, **params},
        replicas=int(replicas),
        metrics={} if speed is None else {"summary_samples_per_s_median": speed},
    )


def rows_of(runs: list[RunFacts], param: str) -> dict[str, list[str]]:
    """Title (its last word) -> a text for each run, of a table whose texts have no blanks."""
    lines = table_of(runs, param).partition("\n\n")[0].splitlines()
    words = [line.split() for line in lines]
    return {line[-len(runs) - 1]: line[-len(runs) :] for line in words}


def columns_of(runs: list[RunFacts], param: str) -> list[str]:
    """The texts of each run: its name, values that differ (devices first), speed, and what follows of it."""
    rows = rows_of(runs, param)
    order = ["run", *(name for name in rows if name not in ("run", *SPEED)), *SPEED]
    shown = [rows[name] for name in order if name in rows]
    return [" ".join(texts) for texts in zip(*shown, strict=True)]


def many(*runs: str) -> list[RunFacts]:
    """Runs by their name, devices, speed ("-": not measured) and params."""
    given = [run.split() for run in runs]
    return [
        facts(name, on, None if speed == "-" else float(speed), **dict(param.split("=") for param in params))
        for name, on, speed, *params in given
    ]


@pytest.mark.parametrize(
    ("runs", "param", "shown"),
    [
        (
            many("a cpu*4 300", "b cpu 100", "c cpu*2 150", "d cpu*4 -"),
            "devices",
            ["b cpu 100 1.00 100%", "c cpu*2 150 1.50 75%", "a cpu*4 300 3.00 75%", "d cpu*4 - - -"],
        ),
        # a baseline that was not measured, beside one that was
        (
            many("a cpu - lr=1", "b cpu 3 lr=2", "c cpu*2 5 lr=1", "d cpu*2 6 lr=2"),
            "devices",
            ["a cpu 1 - - -", "b cpu 2 3 1.00 100%", "c cpu*2 1 5 - -", "d cpu*2 2 6 2.00 100%"],
        ),
        # no partner that differs in devices alone
        (many("a cpu 5 lr=1", "b cpu*2 9 lr=2"), "devices", ["a cpu 1 5", "b cpu*2 2 9"]),
        # each batch size has its own baseline, the median of its seeds
        (
            many(
                *("a cpu 72 batch=64 train.seed=0", "b cpu 74 batch=64 train.seed=2"),
                *("c cpu*2 36 batch=64 train.seed=0", "d cpu*2 260 batch=512 train.seed=0"),
                *("e cpu 130 batch=512 train.seed=0",),
            ),
            "devices",
            [
                *("a cpu 64 0 72 0.99 99%", "b cpu 64 2 74 1.01 101%", "e cpu 512 0 130 1.00 100%"),
                *("c cpu*2 64 0 36 0.49 25%", "d cpu*2 512 0 260 2.00 100%"),
            ],
        ),
        # by another value, in the order of numbers, without an efficiency
        (
            many("a cpu 100 batch=100", "b cpu 20 batch=20", "c cpu 4 batch=3"),
            "batch",
            ["c 3 4 1.00", "b 20 20 5.00", "a 100 100 25.00"],
        ),
    ],
)
def test_speed_up_and_efficiency_are_against_the_fewest_devices_of_runs_equal_in_all_else(
    runs: list[RunFacts], param: str, shown: list[str]
) -> None:
    assert columns_of(runs, param) == shown


def test_a_table_has_the_metrics_the_values_that_differ_and_what_is_the_same() -> None:
    second = facts("second\x1b[31m", "cpu*2", 150.0, recipe="toy", **{"size.table_rows": "4"})
    runs = [second, facts("first", "cpu", 100.0, recipe="toy", only="x", **{"size.table_rows": "3"})]
    assert table_of(runs, "devices").splitlines() == [
        "run        first  second\\x1b[31m",
        "samples/s    100             150",
        "devices      cpu           cpu*2",
        "only           x               -",
        "",
        "the same in all: recipe toy",
    ]


def test_a_table_fits_a_terminal_however_many_runs_and_however_long_their_names() -> None:
    runs = [
        facts(f"run-{number:02}-" + "x" * (number * 5), "cpu", 1.0, lr=str(number)) for number in range(24)
    ]
    table = table_of(runs, "lr")
    assert max(map(len, table.splitlines())) <= 80
    blocks = table.split("\n\n")[:-1]
    assert len(blocks) > 2
    assert sum(block.splitlines()[0].count("run-") for block in blocks) == len(runs)


def test_metrics_on_other_validation_rows_are_marked() -> None:
    def run(name: str, auc: float, rows: str, **params: str) -> RunFacts:
        made = facts(name, "cpu", None, **params)
        return dataclasses.replace(made, metrics={"final_auc": auc}, measured=rows)

    runs = [
        run("a", 0.826, "2,425", lr="1"),
        run("b", 0.587, "4,042", lr="2"),
        run("c", 0.597, "4,042", lr="3"),
    ]
    rows = rows_of(runs, "devices")
    assert rows["auc"] == ["0.826*", "0.587", "0.597"]
    assert rows["on"] == ["2,425", "4,042", "4,042"]
    assert "* measured on other validation rows" in table_of(runs, "devices")
    assert "measured on" not in table_of(runs[1:], "devices")
    tested = dataclasses.replace(runs[1], metrics={"final_auc": 0.587, "test/auc": 0.581})
    assert "test auc  0.581      -" in table_of([tested, runs[2]], "devices")


def test_validation_rows_are_equal_however_columns_are_read(data_dir: Path, tmp_path: Path) -> None:
    lines = ["y,a,b", *(f"{n % 2},{n % 7},{n}" for n in range(400))]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    (tmp_path / "more.csv").write_text("\n".join([*lines, "1,1,1"]))
    ids = []
    for name, *flags in (
        ("t.csv",),
        ("t.csv", "data.categorical=a,b"),
        ("more.csv",),
        ("t.csv", "train.seed=5"),
    ):
        words = ["recipe=ctr", f"data.path={tmp_path / name}", "data.label=y", "train.epochs=1", *flags]
        ids.append(run_with(*words).run_id)
    uri = f"sqlite:///{data_dir / 'mlflow' / 'mlflow.db'}"
    one, alike, *others = [run.measured for run in read_runs(uri, ids)]
    assert one == alike
    assert re.fullmatch(r"\d+ rows [0-9a-f]{8}", one)
    assert len({one, *others}) == 3


def test_the_command_finds_runs_by_name_or_id_and_leads_to_mlflows_comparison(
    sweep: tuple[list[Report], Settings, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports, _, folder = sweep
    monkeypatch.setenv("DPHYBRID_DATA_DIR", str(folder))
    monkeypatch.chdir(tmp_path)
    out = command("compare", reports[0].run_name, reports[2].run_id)
    assert re.search(rf"run +{reports[0].run_name} +{reports[2].run_name}\n", out)
    assert re.search(r"devices +cpu +cpu\*8\n", out)
    ids = unquote(out.splitlines()[-1]).partition("#/compare-runs?runs=")[2]
    assert ids.startswith(f'["{reports[0].run_id}", "{reports[2].run_id}"]&experiments=["')
    monkeypatch.setattr("dphybrid.tracking.compare._PAGE", 2)  # older runs are on a later page
    every = find_runs(reports[0].tracking_uri, "dphybrid")
    assert every == [report.run_id for report in reports]


def test_wrong_calls_say_what_is_there(
    sweep: tuple[list[Report], Settings, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    reports, _, folder = sweep
    uri, one = reports[0].tracking_uri, reports[0].run_id
    newest = f"run nobody: not in experiment 'dphybrid'; the newest there: .*{reports[2].run_name}"
    for call, words in [
        (lambda: find_runs(uri, "dphybrid", ["nobody"]), newest),
        (
            lambda: find_runs(uri, "elsewhere"),
            r"experiment 'elsewhere': does not exist at .*; it has: .*dphybrid",
        ),
        (
            lambda: find_runs(uri, "dphybrid", sweep="nosuch"),
            "--sweep nosuch: not in experiment 'dphybrid'; sweeps there: none",
        ),
        (lambda: read_runs(uri, [one, one]), "needs at least two runs, and there is one"),
        (lambda: read_runs(uri, ["0000", one]), "'0000': cannot be read"),
    ]:
        with refused(words):
            call()
    monkeypatch.setenv("DPHYBRID_DATA_DIR", str(folder))
    every = ["compare", "--experiment", "dphybrid"]
    said = command(*every, "--group-by", "train.batchsize", ends=2)
    assert "no run has this param; did you mean 'train.batch_size'?" in said
    for name, value, words in [
        ("MLFLOW_TRACKING_URI", "http://127.0.0.1:9", "http://127.0.0.1:9: does not answer"),
        ("MLFLOW_TRACKING_URI", "none", "the tracking URI is none, so no run is recorded"),
        ("DPHYBRID_DATA_DIR", str(folder / "nothing"), "no run is recorded there yet"),
    ]:
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert words in command(*every, ends=2)


def test_the_pages_open_at_the_recipe_that_was_trained_last(tmp_path: Path) -> None:
    put_database("mlflow", tmp_path / "mlflow.db")
    client = MlflowClient(tracking_uri=(uri := f"sqlite:///{tmp_path / 'mlflow.db'}"))
    assert page_path(uri, "dphybrid", None).startswith("/experiments?")  # the list: nothing was trained yet
    ids = {name: client.create_experiment(f"dphybrid/{name}") for name in ("ctr", "text")}
    for number, recipe in enumerate(("ctr", "text", "ctr")):
        client.create_run(ids[recipe], start_time=1000 + number)
        client.create_run("0", start_time=2000)  # somebody else's, in MLflow's own "Default"
        assert page_path(uri, "dphybrid", None).startswith(f"/experiments/{ids[recipe]}/runs?")


def test_metrics_that_are_not_finite(tmp_path: Path) -> None:
    put_database("mlflow", tmp_path / "mlflow.db")
    client = MlflowClient(tracking_uri=(uri := f"sqlite:///{tmp_path / 'mlflow.db'}"))
    experiment = client.create_experiment("odd", artifact_location=tmp_path.as_uri())
    for seed, loss in enumerate((math.inf, math.inf, math.nan, 0.5)):
        run_id = client.create_run(experiment).info.run_id
        client.log_param(run_id, "devices", "cpu")
        client.log_param(run_id, "train.seed", seed // 2)
        client.log_param(run_id, "model.dim", seed)
        client.log_metric(run_id, "final_loss", loss)
        client.set_terminated(run_id)
    runs = read_runs(uri, find_runs(uri, "odd"))
    assert [run.metrics["final_loss"] for run in runs[:2]] == [math.inf] * 2
    assert {"inf", "nan", "0.5"} <= set(table_of(runs, "devices").split())
