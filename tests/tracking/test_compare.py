"""Runs side by side: groups, speed-ups, splits, differences, the page and its errors."""

import dataclasses
import html
import math
import re
from datetime import datetime
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from dphybrid.config.settings import Settings, load_settings
from dphybrid.lifecycle.sweep import MAX_CELLS
from dphybrid.recipes.configs import load_config
from dphybrid.run.train import Report, run_job
from dphybrid.tracking.compare import RunFacts, find_runs, read_runs
from dphybrid.tracking.compare_page import text_of, write_comparison
from tests.commands import command, run_with
from tests.conftest import own_settings
from tests.refusing import refused

DEVICES = ("cpu", "cpu*2", "cpu*8")


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Report], Settings, Path]:
    """The same experiment on 1, 2 and 8 virtual devices."""
    folder = tmp_path_factory.mktemp("sweep")
    with pytest.MonkeyPatch.context() as patch:
        own_settings(patch, folder)
        patch.chdir(folder)
        settings = load_settings()
        overrides = ["recipe=hybrid", "train.epochs=2"]
        reports = [
            run_job(load_config(None, [*overrides, f"devices={devices}"]), settings) for devices in DEVICES
        ]
    return reports, settings, folder


def facts(name: str, on: str, speed: float | None, **params: str) -> RunFacts:
    replicas = on.rpartition("*")[2] if "*" in on else "1"
    return RunFacts(
        run_id=name,
        name=name,
        status="FINISHED",
        started=datetime(2026, 1, 1),
        params={"devices": on, **params},
        replicas=int(replicas),
        metrics={} if speed is None else {"summary_samples_per_s_median": speed},
    )


def rows_of(runs: list[RunFacts], param: str) -> list[str]:
    """The lines of the table for a terminal, with a blank between words."""
    table = text_of(runs, param).partition("\n\n")[0]
    return [" ".join(line.split()) for line in table.splitlines()]


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
    assert rows_of(runs, param)[1:] == shown


def test_the_text_is_a_table_with_what_differs_and_a_line_of_stages_a_run() -> None:
    second = facts("second\x1b[31m", "cpu*2", 150.0, recipe="toy", **{"size.table_rows": "4"})
    runs = [
        dataclasses.replace(second, stages_ms={"forward": 3.0, "lookup": 1.0}),
        facts("first", "cpu", 100.0, recipe="toy", only="x", **{"size.table_rows": "3"}),
    ]
    lines = text_of(runs, "devices").splitlines()
    assert [line.split() for line in lines[:3]] == [
        ["run", "devices", "only", "samples/s"],
        ["first", "cpu", "x", "100"],
        ["second\\x1b[31m", "cpu*2", "-", "150"],
    ]
    assert "the same in all: recipe toy" in lines
    assert lines[-1] == "second\\x1b[31m: 4 ms a step: forward 75%, lookup 25%"
    # columns that end alike keep their sections
    names = ("train.lr", "table.lr", "model.dim")
    runs = [facts(value, "cpu", 1.0, **dict.fromkeys(names, value)) for value in ("1", "2")]
    assert rows_of(runs, "devices")[0].startswith("run dim table.lr train.lr ")


def test_metrics_on_other_validation_rows_are_marked_and_never_the_best(tmp_path: Path) -> None:
    def run(name: str, auc: float, rows: str, **params: str) -> RunFacts:
        made = facts(name, "cpu", None, **params)
        return dataclasses.replace(made, metrics={"final_auc": auc}, measured=rows)

    runs = [
        run("a", 0.826, "2,425 rows 1a2b", lr="1"),
        run("b", 0.587, "4,042 rows 3c4d", lr="2"),
        run("c", 0.597, "4,042 rows 3c4d", lr="3"),
    ]
    assert rows_of(runs, "devices") == [
        "run lr auc measured on",
        "a 1 0.826* 2,425 rows 1a2b",
        "b 2 0.587 4,042 rows 3c4d",
        "c 3 0.597 4,042 rows 3c4d",
    ]
    assert "* measured on other validation rows" in text_of(runs, "devices")
    page = write_comparison(runs, tmp_path, "devices").read_text()
    assert re.findall(r'class="number best">([^<]*)<', page) == ["0.597"]
    assert "measured on" not in text_of(runs[1:], "devices")
    tested = dataclasses.replace(runs[1], metrics={"final_auc": 0.587, "test/auc": 0.581})
    assert rows_of([tested, runs[2]], "devices") == [
        "run lr auc test auc",
        "b 2 0.587 0.581",
        "c 3 0.597 -",
    ]
    # seeds that hold out rows of their own: equal sets of rows can be compared
    seeds = [
        run(f"{lr}{seed}", 0.5 + lr / 10, f"9 rows {seed}", lr=str(lr), **{"train.seed": str(seed)})
        for lr in (1, 2)
        for seed in (0, 1)
    ]
    page = write_comparison(seeds, tmp_path, "devices").read_text()
    assert re.findall(r'class="number best">([^<]*)<', page)[0] == "0.7 ±0"


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


def test_runs_that_differ_in_their_seed_alone_are_one_row_of_means(tmp_path: Path) -> None:
    runs = [
        dataclasses.replace(
            facts(f"{lr}-{seed}", "cpu", None, lr=lr, **{"train.seed": str(seed)}),
            metrics={"final_auc": 0.8 + seed / 1000, "summary_samples_per_s_median": 1000.0 + 10**seed},
        )
        for lr in ("0.1", "0.2")
        for seed in (0, 1, 2)
    ]
    page = write_comparison([*runs, facts("alone", "cpu", 5.0, lr="0.3")], tmp_path, "lr").read_text()
    means, each = re.findall(r"<tbody>(.*?)</tbody>", page, flags=re.DOTALL)
    cells = [re.sub(r"<[^>]*>|\s+", " ", row).split() for row in means.split("</tr>")][:-1]
    assert [row[:4] for row in cells[:2]] == [[lr, "·", "3", "seeds"] for lr in ("0.1", "0.2")]
    assert cells[0][-5:-2] == ["0.801", "±0.001", "1,010"]  # of speeds the median
    assert (len(cells), cells[2][0], each.count("<tr>")) == (3, "alone", 7)
    same = [*(facts(f"again-{k}", "cpu", 5.0, lr="0.1") for k in (1, 2)), runs[-1]]
    assert "0.1 · 2 runs" in write_comparison(same, tmp_path, "lr").read_text()
    # of rows that differ in many values the first run gives the name
    many = {f"train.p{number}": "0" for number in range(9)}
    other = [facts("b", "cpu", 5.0, **dict.fromkeys(many, "1"))]
    alike = [facts(f"a-{k}", "cpu", 5.0, **many) for k in (1, 2)]
    # a long number is short in the name, too
    long = [
        facts(f"{len(lr)}-{k}", "cpu", 5.0, lr=lr) for lr in ("3.585225018805626e-05", "None") for k in (1, 2)
    ]
    page = write_comparison(long, tmp_path, "lr").read_text()
    assert ">3.585e-05 · 2 runs<" in page
    assert ">- · 2 runs<" in page
    assert "3.585225018805626e-05" not in page.partition("Each run")[0]
    assert ">a-1 · 2 runs<" in write_comparison([*alike, *other], tmp_path, "devices").read_text()


def test_the_page_holds_all_of_a_sweep(sweep: tuple[list[Report], Settings, Path], tmp_path: Path) -> None:
    reports, _, _ = sweep
    runs = read_runs(reports[0].tracking_uri, [report.run_id for report in reports])
    assert [run.replicas for run in runs] == [1, 2, 8]
    for run in runs:
        assert run.metrics["summary_samples_per_s_median"] > 0
        assert {"forward", "backward", "lookup"} <= set(run.stages_ms)
        assert len(run.curves["valid/mse"]) == 2
        assert all(seconds >= 0 for _, seconds, _ in run.curves["train/loss"])
    text = write_comparison(runs, tmp_path / "out", "devices").read_text()
    # two metrics over steps and over seconds, stages, speed
    assert text.count("<svg") == 2 * len(runs[0].curves) + 2
    for k in range(3):  # a button and, in each picture of curves, a line
        assert text.count(f'data-curve="run{k}"') == 1
        assert text.count(f'<g id="run{k}">') == 2 * len(runs[0].curves)
    assert re.findall(r'(?:src|href)="(http[^"]*)"', text) == [
        html.escape(report.run_url) for report in reports if report.run_url.startswith("http")
    ]
    assert len(text) < 1e6


def test_names_with_odd_characters_are_text_on_the_page(tmp_path: Path) -> None:
    names = ["</script><script>alert(1)</script>", "costs $5 & 6^", "b & c\u2028"]
    runs = [
        dataclasses.replace(
            facts(name, f"cpu*{place + 1}", 1.0, note=name),
            stages_ms={"x": 1.0},
            curves={"$a$": [(0.0, 0.0, 1.0)]},
        )
        for place, name in enumerate(names)
    ]
    for param in ("devices", "note"):
        page = write_comparison(runs, tmp_path, param).read_text()
        assert "<script>alert(1)" not in page
        assert page.count("&lt;/script&gt;&lt;script&gt;alert(1)&lt;/script&gt;") >= 1
        assert "costs $5 &amp; 6^" in page.partition("<svg")[2]


def test_the_command_finds_runs_by_name_and_logs_its_page_in_an_experiment_of_its_own(
    sweep: tuple[list[Report], Settings, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports, _, folder = sweep
    monkeypatch.setenv("DPHYBRID_DATA_DIR", str(folder))
    monkeypatch.chdir(tmp_path)
    out = command("compare", reports[0].run_name, reports[2].run_id, "--out", "two", "--log")
    assert f"2 runs: {(tmp_path / 'two' / 'index.html').as_uri()}" in out
    logged = out.strip().rpartition(" ")[2]
    client = MlflowClient(reports[0].tracking_uri)
    run = client.get_run(logged)
    assert run.info.status == "FINISHED"
    assert "mlflow.parentRunId" not in run.data.tags
    assert "compare/index.html" in {item.path for item in client.list_artifacts(logged, "compare")}
    assert client.get_experiment(run.info.experiment_id).name == "dphybrid comparisons"
    text = command("compare", reports[0].run_name, reports[2].run_id, "--text")
    assert re.search(rf"{reports[2].run_name} +cpu\*8 ", text)
    monkeypatch.setattr("dphybrid.tracking.compare._PAGE", 2)  # older runs are on a later page
    every = find_runs(reports[0].tracking_uri, "dphybrid")
    assert every == [report.run_id for report in reports]  # the page's own run is none of them


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
        (lambda: read_runs(uri, list(map(str, range(MAX_CELLS + 1)))), "257 runs do not fit on one page"),
    ]:
        with refused(words):
            call()
    monkeypatch.setenv("DPHYBRID_DATA_DIR", str(folder))
    (folder / "a_file").touch()
    every = ["compare", "--experiment", "dphybrid"]
    said = command(*every, "--out", str(folder / "a_file"), ends=2)
    assert "name a folder; the page is its index.html" in said
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


def test_metrics_that_are_not_finite(tmp_path: Path) -> None:
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
    assert "inf" in text_of(runs, "devices")
    text = write_comparison(runs, tmp_path / "all", "devices").read_text()
    assert re.findall(r'class="number best">([^<]*)<', text) == ["0.5"]
    alike = [dataclasses.replace(run, params={**run.params, "model.dim": "8"}) for run in runs]
    assert ">inf<" in write_comparison(alike, tmp_path / "seeds", "devices").read_text()
