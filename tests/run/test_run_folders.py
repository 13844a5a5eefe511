"""Damaged neighbours are left out, a running run is not run twice, pages of MLflow open at a run."""

import json
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from dphybrid.cli.main import main
from dphybrid.cli.ui import page_path
from dphybrid.config.settings import load_settings
from dphybrid.recipes.recipe import Recipe
from dphybrid.run.folder import find_tagged_run, named_run
from dphybrid.run.pages import MetricsPage
from dphybrid.serving.load import find_checkpoint
from dphybrid.tracking.record import RecordFile, last_status
from dphybrid.util.alive import alive, holding
from dphybrid.util.text import metric_text
from tests.commands import command, run_with
from tests.refusing import refused

pytestmark = pytest.mark.usefixtures("unrecorded")

TOY = ["recipe=toy", "devices=cpu", "train.print_splits=new"]


def test_damaged_neighbours_are_named_and_left_out(
    data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_with(*TOY, run_name="good", tags={"who": "me"})
    pages = [data_dir / f"runs/bad-{number}/run.json" for number in range(5)]
    for page, text in zip(pages, ["", '{"run_id": "x", "con', "[]", "{}", "\x00" * 900], strict=True):
        page.parent.mkdir()
        page.write_text(text)
    assert find_tagged_run(load_settings(), "who", "me") == "good"
    capsys.readouterr()
    train = ["train", "--recipe", "toy", "--devices", "cpu", "--tracking", "none"]
    assert main([*train, "--train.epochs", "2", "--resume"]) == 0
    told = capsys.readouterr().err
    for page in pages:
        assert f"{page}" in told
    assert told.count("left out a run") == len(pages), "each is named once"
    assert main([*train, "--train.epochs", "3", "--resume", "good"]) == 0
    assert "left out a run" not in capsys.readouterr().err
    assert find_checkpoint("good", load_settings()).parents[1] == data_dir / "runs/good"
    for page in pages:
        with refused(rf"{page.parent.name}/run\.json"):
            run_with(*TOY, resume=page.parent.name)


def test_a_run_is_not_run_twice_and_wrong_names_are_told(data_dir: Path) -> None:
    with refused("run name 'latest': use a plain name"):
        run_with(*TOY, run_name="latest")
    for name in ("../x", "a/b", " ", ".x", "-x"):
        with refused("use a plain name of at most 180 bytes, without slashes"):
            run_with(*TOY, run_name=name)
    assert not (data_dir / "prepared").exists()
    run_with(*TOY, run_name="mine")
    before = (data_dir / "runs/mine/run.json").read_bytes()
    with (
        holding(data_dir / "runs/mine"),
        refused("run mine is running in another process; wait for its end"),
    ):
        run_with(*TOY, "train.epochs=2", resume="mine")
    assert (data_dir / "runs/mine/run.json").read_bytes() == before
    assert run_with(*TOY, "train.epochs=2", resume="mine").run_name == "mine"


def test_a_run_whose_checkpoints_are_damaged_fails_and_is_not_held(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DPHYBRID_TRACKING_URI", "files")
    run_with(*TOY, run_name="mine")
    for file in data_dir.glob("runs/mine/checkpoints/*/blocks.safetensors"):
        file.write_bytes(b"")
    with refused("no checkpoint is whole"):
        run_with(*TOY, "train.epochs=3", resume="mine")
    assert last_status(data_dir / "runs/mine") == "FAILED"
    assert not alive(data_dir / "runs/mine")


def test_a_run_builds_its_model_once(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Recipe] = []
    new_model = Recipe.new_model

    def counted(self: Recipe, context: Any) -> Any:
        built.append(self)
        return new_model(self, context)

    monkeypatch.setattr(Recipe, "new_model", counted)
    run_with(*TOY, run_name="mine")
    assert len(built) == 1
    run_with(*TOY, "train.epochs=3", resume="mine")
    assert len(built) == 2


def test_a_name_that_no_run_has_is_answered_with_the_nearest_one(data_dir: Path) -> None:
    run_with(*TOY, run_name="second")
    with refused("secnd: no run, checkpoint folder or models:/ address of that name; did you mean 'second'?"):
        find_checkpoint("secnd", load_settings())
    with refused("--resume secnd: there is no such run in .*; did you mean 'second'?"):
        named_run(load_settings(), "secnd", "")
    said = command("train", "--recipe", "toy", "--tracking", "none", "--resume", "", ends=2)
    assert "--resume : there is no such run" in said
    with refused("is empty"):
        find_checkpoint("", load_settings())


def test_a_run_goes_on_with_the_data_that_was_prepared_for_it(data_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "days").mkdir()
    rows = "".join(f"{n % 7},{n % 2}\n" for n in range(200))
    (tmp_path / "days/1.csv").write_text("shop,sold\n" + rows)
    values = [f"data.path={tmp_path}/days", "data.label=sold", "recipe=ctr", "devices=cpu"]
    first = run_with(*values, "train.epochs=1", run_name="mine")
    (tmp_path / "days/2.csv").write_text("shop,sold\n" + rows)
    report = run_with(*values, "train.epochs=2", resume="mine")
    assert report.digests["data"] == first.digests["data"]
    assert len(list((data_dir / "prepared").glob("[!.]*"))) == 1


def test_values_that_order_the_rows_of_an_epoch_stay_the_same(data_dir: Path) -> None:
    run_with(*TOY, run_name="mine")
    for value in ("train.shuffle_rows=64", "train.seed=7"):
        with refused(f"run mine was started with other values .{value.partition('=')[0]}: "):
            run_with(*TOY, value, "train.epochs=3", resume="mine")


def test_runs_are_compared_and_pages_of_mlflow_open_at_them(data_dir: Path) -> None:
    settings = load_settings()
    for name, devices in (("one", "cpu"), ("two", "cpu*2")):
        run_with(*TOY, f"devices={devices}", run_name=name)
    assert page_path(settings, None).startswith("/experiments?")
    with refused("one: is not recorded in MLflow"):
        page_path(settings, "one")
    assert "Curves" not in command("compare", "one", "two")
    for number, name in enumerate(("one", "two"), start=1):
        record = RecordFile(data_dir / "runs" / name)
        where = {"run_id": f"{number}" * 32, "experiment_id": "7", "tracking_uri": "http://server:5000"}
        record.append({"op": "run", "name": name, **where})
        record.close()
    assert page_path(settings, "two").startswith(f"/experiments/7/runs/{'2' * 32}?")
    rows = {line.split("  ")[0].strip(): line for line in command("compare", "one", "two").splitlines()}
    assert rows["devices"].split() == ["devices", "cpu", "cpu*2"]
    best = MetricsPage.read(data_dir / "runs/one/metrics.json").metrics["mse"]
    assert rows["mse"].split()[1] == metric_text(best)
    assert "train.lr" not in rows
    address = unquote([*rows.values()][-1])
    ids = json.dumps(["1" * 32, "2" * 32])
    assert address == f'Curves: http://server:5000/#/compare-runs?runs={ids}&experiments=["7"]'
    assert "one2: there is no such run; did you mean 'one'?" in command("compare", "one2", "two", ends=2)
    assert "at least 2" in command("compare", "one", ends=2)
