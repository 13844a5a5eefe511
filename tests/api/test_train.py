"""`dphybrid.train` on frames gives the bits that a file gives; runs and predictions in Python."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import polars as pl
import pytest
import torch

import dphybrid
from dphybrid.api.run import TrainedRun
from dphybrid.api.training import experiment
from dphybrid.data.table import frames
from dphybrid.data.table.frames import as_frame, save_frame
from dphybrid.run.folder import RunPage
from tests.commands import run_with
from tests.conftest import own_settings
from tests.refusing import refused

SMALL = {"epochs": 3, "batch_size": 32, "table": {"lr": 0.1}, "train": {"lr": 0.02}}
SMALL["model"] = {"dim": 4, "hidden": 16}


def visits(num_rows: int = 300) -> pl.DataFrame:
    """Clicked when the shop is the bookseller and the price is low."""
    random = np.random.default_rng(0)
    shop, price = random.choice(["books", "music", "tea"], num_rows), random.uniform(1, 20, num_rows).round(2)
    clicked = (shop == "books") & (price < 12)
    tags = [["new", "red"] if i % 3 else ["old"] for i in range(num_rows)]
    return pl.DataFrame({"shop": shop, "*": price, "tags": tags, "clicked": clicked.astype(int)})


def forms(frame: pl.DataFrame) -> dict[str, Any]:
    """A table in the forms that people have it in."""
    return {
        "eager": frame,
        "chunks": pl.concat([frame[:7], frame[7:100], frame[100:]], rechunk=False),
        "lazy": frame.lazy(),
        "arrow": frame.to_arrow(),
        "pandas": frame.to_pandas(),
        "columns": {name: frame[name].to_list() for name in frame.columns},
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainedRun]:
    given = {"label": "clicked", "devices": "cpu*2", "run_name": "first", "quiet": True, **SMALL}
    with pytest.MonkeyPatch.context() as patch:
        own_settings(patch, tmp_path_factory.mktemp("python") / "data", TRACKING_URI="none")
        yield dphybrid.train(visits(), **given)


def test_a_frame_gives_the_bits_of_its_file(run: TrainedRun, tmp_path: Path) -> None:
    visits().write_parquet(tmp_path / "visits.parquet")
    flags = [f"data.path={tmp_path / 'visits.parquet'}", "data.label=clicked", "devices=cpu*2"]
    flags += ["train.epochs=3", "train.batch_size=32", "table.lr=0.1", "train.lr=0.02"]
    report = run_with(*flags, "model.dim=4", "model.hidden=16")
    assert report.digests == run.report().values.digests | {"data": report.digests["data"]}
    assert report.metrics == run.metrics


@pytest.mark.parametrize("form", forms(visits(20)))
def test_every_form_gives_the_same_files(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "PART_ROWS", 64)
    given = as_frame(forms(visits())[form], "data")
    (first,) = {save_frame(frame, tmp_path, "data") for frame in (given, visits())}
    assert [file.name for file in sorted(first.iterdir())] == [f"part-{i:05d}.parquet" for i in range(5)]
    assert pl.read_parquet(first).equals(visits())
    assert list(tmp_path.iterdir()) == [first]


def test_what_a_run_shows(run: TrainedRun) -> None:
    assert run.status == "finished"
    assert run.metrics["auc"] > 0.8
    assert repr(run) == f"<run first: auc {run.metrics['auc']:.4f}, log_loss {run.metrics['log_loss']:.4f}>"
    assert run.splits["rows"][:2].to_list() == [16, 16]
    assert run.history.columns == ["epoch", "step", "train loss", "validation auc", "validation log_loss"]
    assert isinstance(run.model, torch.nn.Module)
    report = run.report()
    assert report.text.startswith("Validation:  auc ")
    assert 'srcdoc="&lt;!doctype html&gt;' in report._repr_html_()
    assert "What it predicts" in report.page()


def test_runs_are_listed_newest_first(run: TrainedRun) -> None:
    given = {"devices": "cpu", "run_name": "<b>", "quiet": True, "config": run.config, "epochs": 1}
    newer = dphybrid.train(visits(), label="clicked", **given)
    found = dphybrid.runs("ctr")
    assert [found[0].name, found["first"].name] == [newer.name, "first"]
    assert newer.config.train.batch_size == 32  # from the config that it started from
    assert newer.config.data == run.config.data  # the same frame, the same files
    table = found.frame()
    assert table["run"].to_list()[0] == "<b>"
    assert table["auc"].to_list()[0] == newer.metrics["auc"]
    assert "&lt;b&gt;" in found._repr_html_()
    assert len(dphybrid.runs("kge")) == 0
    with refused("there is no run of that name; did you mean 'first'"):
        found["frist"]
    page = RunPage.read(newer.folder / "run.json")
    page.model_copy(update={"config": {**page.config, "recipe": "gone:Gone"}}).write(
        newer.folder / "run.json"
    )
    assert dphybrid.runs("gone:Gone").frame()["recipe"].to_list() == [
        "gone:Gone"
    ]  # no code is needed to list


def test_a_run_that_has_not_ended_says_so(run: TrainedRun, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    begun.mkdir()
    (begun / "run.json").write_bytes((run.folder / "run.json").read_bytes())
    other = TrainedRun(begun)
    assert (other.status, other.metrics) == ("stopped", {})
    with refused(r"is stopped and has no result\.json yet; .*resume='begun'"):
        _ = other.splits


def test_predictions_for_every_form(run: TrainedRun, tmp_path: Path) -> None:
    new = visits(50).drop("clicked")
    expected = run.predict(new)
    assert expected.dtype == np.float32
    for form, rows in forms(new).items():
        assert np.array_equal(run.predict(rows), expected), form
    new.write_parquet(tmp_path / "new.parquet")
    assert np.array_equal(run.predict(tmp_path / "new.parquet"), expected)
    run.predictor.predict_file(tmp_path / "new.parquet", tmp_path / "out.parquet")
    assert np.array_equal(pl.read_parquet(tmp_path / "out.parquet")["probability"].to_numpy(), expected)
    assert repr(run.predictor) == (
        f"<Predictor of clicked=1 by recipe ctr, first/{run.checkpoint.name}; columns: *, shop, tags>"
    )
    (tmp_path / "odd.csv").write_text("shop,*,tags\nbooks,1,new\nbooks,2\n")
    with refused(r"odd\.csv: line 3 cannot be read .* use predict_file"):
        run.predict(str(tmp_path / "odd.csv"))
    with refused(r"the rows: column '\*', .* is missing"):
        run.predict({"shop": ["books"]})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"label": "clickd"}, "label='clickd': data has no such column; did you mean 'clicked'?"),
        ({"label": "clicked", "numeric": ["price"]}, "numeric='price': data has no such column"),
        ({"epoch": 3}, "epoch: there is no such field; did you mean 'train.epochs'?"),
        (
            {"lr": 0.1},
            "lr: there is no such field; did you mean 'table.lr' or 'train.lr'? Write it in full as",
        ),
        ({"epochs": -1}, "train.epochs = -1 (from epochs=): must be greater than or equal to 0"),
        ({"train": 3}, "train=3: is a section; give train={'name': value}"),
        ({"train__lrr": 3}, "train.lrr (from train__lrr=): there is no such field; did you mean 'train.lr'?"),
        ({"recipe": "kge"}, "recipe kge reads no tables. Give data as a path"),
        ({"valid": "valid.csv"}, "data, valid, test: some are paths and others frames"),
        ({"devices": "gpu"}, "gpu"),
    ],
)
def test_mistakes_are_told_before_any_writing(given: dict[str, Any], message: str, data_dir: Path) -> None:
    with refused(re.escape(message)):
        dphybrid.train(visits(10), **given)
    assert not data_dir.exists()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (5, "data: is an int; give a polars DataFrame or LazyFrame, a pandas DataFrame"),
        ([1, 2], "data: is a list; give a polars DataFrame"),
        ({"a": 3}, "data: column 'a' is 3; give it a list or an array"),
        ({}, "label='clicked': data has no such column"),
        (pandas.DataFrame([[1, 2]], columns=["a", "a"]), "data: Duplicate column names found: ['a', 'a']"),
        ({"a": [1, 2], "b": [1, 2, 3]}, "data: "),
        ({"a": [1], "clicked": [1]}, "data: has 1 row; at least 2 are needed"),
        (visits(10).lazy().with_columns(pl.col("shop").cast(int)), "data: cannot be written to"),
    ],
)
def test_what_is_no_table_is_refused(data: Any, message: str, data_dir: Path) -> None:
    with refused(re.escape(message)):
        dphybrid.train(data, label="clicked")
    assert not list(data_dir.glob("frames/*"))


def test_pandas_columns_may_have_numbers_for_names() -> None:
    given = pandas.DataFrame({0: ["a", "b", None], "when": pandas.to_datetime(["2026-01-02"] * 3)})
    frame = as_frame(given, "data")
    assert frame.columns == ["0", "when"]
    assert frame["0"].to_list() == ["a", "b", None]
    assert frame["when"].dtype.is_temporal()
    with refused("data: .*Conversion failed for column 0"):
        as_frame(pandas.DataFrame({0: ["a", 1, None]}), "data")


def test_values_come_by_name_section_or_in_full(tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text('recipe = "ctr"\n[train]\nepochs = 7\nlr = 0.5\n')
    ways = [{"epochs": 3, "train__lr": 0.1}, {"train": {"epochs": 3, "lr": 0.1}}]
    ways += [{"train.epochs": 3, "train.lr": 0.1}]
    (config,) = {experiment(tmp_path / "e.toml", {"devices": "cpu"}, way).model_dump_json() for way in ways}
    assert experiment(None, {"data.path": "x.csv", "data.label": "y"}, {}).recipe == "ctr"
    assert '"epochs":3' in config
    assert '"lr":0.1' in config


def test_paths_infer_their_recipe(data_dir: Path, unrecorded: None) -> None:
    texts = data_dir.parent / "texts"
    texts.mkdir()
    for name in ("one", "two"):
        (texts / f"{name}.txt").write_text(f"a text called {name} goes on . " * 50)
    run = dphybrid.train(texts, devices="cpu", epochs=1, quiet=True)
    assert run.config.recipe == "text"
    with refused("makes no predictions from rows"):
        run.predict({})
