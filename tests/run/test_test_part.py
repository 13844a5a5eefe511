"""Test parts: rows that decide nothing, on which the best checkpoint is measured once, at the end."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from sklearn.metrics import roc_auc_score
from torch import Tensor

import dphybrid
from dphybrid.config import DataConfig
from dphybrid.recipes.kge import KgeDataConfig
from dphybrid.recipes.retrieval import RetrievalDataConfig
from dphybrid.recipes.text import TextDataConfig
from dphybrid.run.pages import MetricsPage
from dphybrid.training import loop
from tests.preparing import from_file, names_of, prepare
from tests.refusing import refused


def table(num_rows: int, seed: int) -> pl.DataFrame:
    random = np.random.default_rng(seed)
    price_B = random.normal(size=num_rows)
    label_B = price_B + random.normal(size=num_rows) > 0
    return pl.DataFrame(
        {"price": price_B.round(3), "shop": random.integers(0, 3, num_rows), "y": label_B * 1}
    )


def test_the_test_rows_are_measured_once_and_shown_beside_validation(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DPHYBRID_TRACKING_URI", "files")
    counted = list[int]()
    outputs: Callable[..., dict[str, Tensor]] = loop.validation_outputs

    def counting(model: object, data: list[object], *more: object) -> dict[str, Tensor]:
        counted.append(len(data))
        return outputs(model, data, *more)

    monkeypatch.setattr("dphybrid.run.job.validation_outputs", counting)
    monkeypatch.setattr("dphybrid.training.loop.validation_outputs", counting)
    rows, held = table(500, 0), table(150, 1)
    run = dphybrid.train(rows, test=held, label="y", epochs=2, devices="cpu", quiet=True)
    assert counted == [100, 100, 150]  # the results are those of the best epoch, not of a third evaluation
    expected = roc_auc_score(held["y"], run.predict(held))
    assert run.test_metrics["auc"] == pytest.approx(expected)
    assert "test_auc" not in run.metrics
    first, second = run.report().text.splitlines()[:2]
    assert first.startswith(f"Test:        auc {expected:.4f}, log_loss ")
    assert second == f"Validation:  auc {run.metrics['auc']:.4f}, log_loss {run.metrics['log_loss']:.4f}"
    page = run.report().page()
    assert first in page
    assert "What it predicts: test rows" in page
    charts = MetricsPage.read(run.folder / "metrics.json").charts
    (roc,) = charts
    x, y = zip(*roc.points, strict=True)
    assert np.trapezoid(y, x) == pytest.approx(expected, abs=0.01)  # of the test rows
    record = (run.folder / "record.jsonl").read_text()
    assert '"test/auc"' in record
    assert '"train/grad_norm"' in record

    without = dphybrid.train(rows, label="y", epochs=1, devices="cpu", quiet=True)
    assert without.test_metrics == {}
    assert "(which chose the epoch)" in without.report().text.replace("\n" + " " * 13, " ")


def test_statistics_and_vocabularies_do_not_see_the_test_files(tmp_path: Path) -> None:
    lines = [f"{i},{'ab'[i % 2]},{i % 3 % 2}" for i in range(60)]
    (tmp_path / "x.csv").write_text("\n".join(["n,c,y", *lines]))
    (tmp_path / "test.csv").write_text("n,c,y\n900,only here,0\n901,only here,1\n900,only here,1\n")
    alone = from_file(tmp_path / "x.csv", min_count=1)
    both = from_file(tmp_path / "x.csv", min_count=1, test_path=str(tmp_path / "test.csv"))
    assert (alone.path / "encoder/encoder.json").read_text() == (
        both.path / "encoder/encoder.json"
    ).read_text()
    assert np.array_equal(alone.arrays["valid_rows"], both.arrays["valid_rows"])
    assert both.arrays["test_rows"].tolist() == [60, 61, 62]
    assert both.held_out == alone.held_out
    (tmp_path / "test.csv").write_text("n,c\n900,a\n")
    with refused("test.csv: no row has a label; dphybrid predict needs none"):
        from_file(tmp_path / "x.csv", test_path=str(tmp_path / "test.csv"))
    (tmp_path / "test.csv").write_text("n,c,y\n900,a,1\n901,b,1\n")
    with refused("all 2 rows to test are '1'"):
        from_file(tmp_path / "x.csv", test_path=str(tmp_path / "test.csv"))
    with refused("is a file of two of data.path"):
        from_file(tmp_path / "x.csv", test_path=str(tmp_path / "x.csv"))


@pytest.mark.parametrize("recipe", ["kge", "retrieval", "text"])
def test_a_test_file_is_a_part_of_other_recipes(recipe: str, tmp_path: Path) -> None:
    own, test = tmp_path / "own.txt", tmp_path / "later.txt"
    if recipe == "kge":
        own.write_text("".join(f"e{i % 9}\tr\te{i % 7}\n" for i in range(60)))
        test.write_text("e1\tr\te5\ne2\tr\te3\n")
        data: DataConfig = KgeDataConfig(path=str(own), test_path=str(test))
    elif recipe == "retrieval":
        own.write_text("user,item\n" + "".join(f"u{i % 10},i{i * 7 % 11}\n" for i in range(80)))
        test.write_text("user,item\nu1,i7\nu2,i9\nstranger,i1\n")
        data = RetrievalDataConfig(path=str(own), test_path=str(test), exclude_seen=False)
    else:
        own.write_text("".join(f"some words about number {i % 5} and more.\n\n" for i in range(90)))
        test.write_text("some words about number 3 and more.\n\n" * 9)
        data = TextDataConfig(path=str(own), test_path=str(test), window=8)
    prepared = prepare(recipe, data, tmp_path / "prepared", 0)
    assert prepared.parts == ["train", "valid", "test"]
    without = prepare(recipe, data.model_copy(update={"test_path": None}), tmp_path / "prepared", 0)
    assert without.parts == ["train", "valid"]
    assert without.held_out == prepared.held_out
    for name, array in without.arrays.items():
        if name.startswith(("train", "valid")):
            assert np.array_equal(array, prepared.arrays[name])
    batch = prepared.dataset("test").fetch(np.arange(2))
    if recipe == "kge":
        entities = names_of(prepared, "entities")
        assert [entities[number] for number in batch["heads_B"]] == ["e1", "e2"]
    elif recipe == "retrieval":
        items = pl.read_parquet(prepared.path / "encoder/items.parquet")["name"]
        assert sorted(items[row[0].item()] for row in batch["held_BH"]) == ["i7", "i9"]
    missing = data.model_copy(update={"test_path": str(tmp_path / "none.txt")})
    with refused("data.test_path="):
        prepare(recipe, missing, tmp_path / "prepared", 0)
