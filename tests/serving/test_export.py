"""An exported model is a folder from which `dphybrid.load` predicts the same bits without the run, Prefect or
MLflow."""

import json
import shutil
from pathlib import Path
from runpy import run_path

import numpy as np
import polars as pl
import pytest
from fastapi.testclient import TestClient

import dphybrid
from dphybrid.data.foreign import writing
from tests.commands import command, python
from tests.conftest import REPOSITORY
from tests.disks import files_of_at_most

ROWS = {"size": [1.5, 2.5, None, 4.0] * 40, "shop": ["a", "b", "c", None] * 40}
LOADED = """
import sys
for name in ("prefect", "mlflow"):
    sys.modules[name] = None  # an import of it fails
import dphybrid, json
print(json.dumps(dphybrid.load(sys.argv[1]).predict(json.loads(sys.argv[2])).tolist()))
"""


def service(model: Path, monkeypatch: pytest.MonkeyPatch) -> TestClient:
    """A client of the example's service."""
    monkeypatch.setenv("MODEL", str(model))
    return TestClient(run_path(str(REPOSITORY / "examples" / "serve.py"))["app"])


def test_a_model_is_loaded_and_served_from_its_folder_alone(
    unrecorded: None, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = dphybrid.train(
        {**ROWS, "sold": [1, 0, 1, 0] * 40},
        label="sold",
        run_name="sales",
        devices="cpu",
        epochs=1,
        quiet=True,
    )
    rows = pl.DataFrame(ROWS)[:4]
    records, wanted = rows.to_dicts(), run.predict(rows)
    out = tmp_path / "out"
    assert f"{out}: dphybrid.load" in command("export", "sales", str(out))
    assert f"{out}: exists already" in command("export", "sales", str(out), ends=2)
    assert "nowhere/out: cannot be written" in command("export", "sales", "nowhere/out", ends=2)
    shutil.rmtree(data_dir)
    done = python("-c", LOADED, str(out), json.dumps(rows.to_dict(as_series=False)), cwd=tmp_path)
    assert np.array_equal(np.array(json.loads(done.stdout.splitlines()[-1]), np.float32), wanted)
    client = service(out, monkeypatch)
    assert client.post("/predict", json=records).json() == pytest.approx(wanted.tolist())
    lacking = client.post("/predict", json=[{"size": 1.5}])
    assert lacking.status_code == 400
    assert "'shop'" in lacking.json()["detail"]


def test_a_damaged_checkpoint_is_not_exported(unrecorded: None, tmp_path: Path) -> None:
    run = dphybrid.train(recipe="hybrid", devices="cpu", epochs=1, run_name="one", quiet=True)
    file = run.checkpoint / "blocks.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert "blocks.safetensors" in command("export", "one", "out", ends=2)
    assert not (tmp_path / "out").exists()


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


def test_a_full_disk_is_told_with_the_file(unrecorded: None, tmp_path: Path) -> None:
    run = dphybrid.train({**ROWS, "sold": [1, 0] * 80}, label="sold", devices="cpu", epochs=1, quiet=True)
    encoder = run.predictor.encoder
    with files_of_at_most(10), pytest.raises(OSError, match=r"encoder\.json"):
        encoder.save(tmp_path)
    words = tmp_path / "words.parquet"
    with files_of_at_most(10), pytest.raises(OSError, match=r"words\.parquet"), writing(words):
        pl.DataFrame({"words": ["long"] * 99}).write_parquet(words)
