"""An exported model is a folder from which `dphybrid.load` predicts the same bits without the run."""

from collections.abc import Iterator
from pathlib import Path
from runpy import run_path

import polars as pl
import pytest
from fastapi.testclient import TestClient

import dphybrid
from dphybrid.api.run import TrainedRun
from dphybrid.config.settings import load_settings
from dphybrid.data.foreign import writing
from tests.commands import command
from tests.conftest import REPOSITORY, own_settings
from tests.disks import files_of_at_most

ROWS = {"size": [1.5, 2.5, None, 4.0] * 40, "shop": ["a", "b", "c", None] * 40}


def service(model: Path, monkeypatch: pytest.MonkeyPatch) -> TestClient:
    """A client of the example's service."""
    monkeypatch.setenv("MODEL", str(model))
    return TestClient(run_path(str(REPOSITORY / "examples" / "serve.py"))["app"])


@pytest.fixture(scope="module")
def sales(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainedRun]:
    with pytest.MonkeyPatch.context() as patch:
        own_settings(patch, tmp_path_factory.mktemp("export") / "data", TRACKING_URI="none")
        given = {"devices": "cpu", "epochs": 1, "quiet": True, "run_name": "sales"}
        yield dphybrid.train({**ROWS, "sold": [1, 0, 1, 0] * 40}, label="sold", **given)


def test_a_model_is_loaded_and_served_from_its_folder_alone(
    sales: TrainedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = pl.DataFrame(ROWS)[:4]
    records, wanted = rows.to_dicts(), sales.predict(rows)
    out = tmp_path / "out"
    assert f"{out}: dphybrid.load" in command("export", "sales", str(out))
    assert f"{out}: exists already" in command("export", "sales", str(out), ends=2)
    assert "nowhere/out: cannot be written" in command("export", "sales", "nowhere/out", ends=2)
    data = load_settings().data_dir
    data.rename(tmp_path / "gone")
    client = service(out, monkeypatch)
    assert client.post("/predict", json=records).json() == pytest.approx(wanted.tolist())
    assert dphybrid.load(out).predict(rows).tolist() == wanted.tolist()
    (tmp_path / "gone").rename(data)
    lacking = client.post("/predict", json=[{"size": 1.5}])
    assert lacking.status_code == 400
    assert "'shop'" in lacking.json()["detail"]


def test_a_damaged_checkpoint_is_not_exported(sales: TrainedRun, tmp_path: Path) -> None:
    file = sales.checkpoint / "blocks.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert "blocks.safetensors" in command("export", "sales", str(tmp_path / "out"), ends=2)
    assert not (tmp_path / "out").exists()
    file.write_bytes(whole)


def test_recommendations_are_served(
    unrecorded: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = dphybrid.train(recipe="retrieval", devices="cpu", epochs=1, run_name="towers", quiet=True)
    command("export", "towers", "out")
    user, client = run.recommend()["user"][0], service(Path("out"), monkeypatch)
    for asked, expected in (
        (f"user={user}&k=3", run.recommend(user, 3)),
        ("k=4&met=i95&met=i321", run.recommend(k=4, history=["i95", "i321"])),
    ):
        answer = client.get(f"/recommend?{asked}").json()
        assert [row["item"] for row in answer] == expected["item"].to_list()


def test_a_full_disk_is_told_with_the_file(sales: TrainedRun, tmp_path: Path) -> None:
    with files_of_at_most(10), pytest.raises(OSError, match=r"encoder\.json"):
        sales.predictor.encoder.save(tmp_path)
    words = tmp_path / "words.parquet"
    with files_of_at_most(10), pytest.raises(OSError, match=r"words\.parquet"), writing(words):
        pl.DataFrame({"words": ["long"] * 99}).write_parquet(words)
