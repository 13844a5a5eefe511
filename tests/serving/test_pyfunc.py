"""`mlflow.pyfunc.load_model(uri).predict(frame)` gives what `dphybrid.load` gives."""

from pathlib import Path

import mlflow
import numpy as np
import pytest
from fastapi.testclient import TestClient
from mlflow.exceptions import MlflowException
from mlflow.pyfunc.scoring_server import init
from mlflow.tracking import MlflowClient

import dphybrid
from tests.commands import run_with


def test_a_frame_is_scored_and_the_model_kept(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pandas as pd

    rows = [(f"s{i * 7 % 31}", i % 50, int(i % 3 == 0)) for i in range(300)]
    (tmp_path / "clicks.csv").write_text("site,age,clicked\n" + "".join(f"{s},{a},{c}\n" for s, a, c in rows))
    values = ["recipe=ctr", f"data.path={tmp_path / 'clicks.csv'}", "data.label=clicked", "devices=cpu"]
    report = run_with(*values, "train.epochs=1", run_name="clicks")
    run = MlflowClient(report.tracking_uri).get_run(report.run_id)
    model_id = run.outputs.model_outputs[-1].model_id
    assert dphybrid.tracking_uri() == report.tracking_uri
    monkeypatch.setenv("MLFLOW_TRACKING_URI", report.tracking_uri)
    model = mlflow.pyfunc.load_model(f"models:/{model_id}")
    assert model.metadata.signature.inputs is None  # with them, MLflow checks each cell in Python
    assert model.metadata.signature.outputs.input_names() == ["probability"]
    assert run.data.params["label.task"] == "binary"
    frame = pd.DataFrame({"site": ["s7", "new", None], "age": [3, 49, 12]})
    found = model.predict(frame)
    expected = dphybrid.load("clicks").predict({"site": ["s7", "new", None], "age": [3, 49, 12]})
    assert np.array_equal(found, expected)
    assert np.array_equal(model.predict(frame), found)
    classes = model.predict(frame, params={"classes": True})
    assert classes.tolist() == dphybrid.load("clicks").predict_classes(frame).tolist()
    for lacking in (frame[["site"]], {"site": ["s7"]}):
        with pytest.raises(MlflowException, match="'?age'?"):
            model.predict(lacking)
    served = TestClient(init(model))
    for rows, status, words in (
        ([{"site": "s7", "age": 3}], 200, "predictions"),
        ([{"site": "s7"}], 400, "age"),
        ([{"age": 3}], 400, "site"),
    ):
        answer = served.post("/invocations", json={"dataframe_records": rows})
        assert (answer.status_code, words in answer.text) == (status, True), answer.text
        assert "Traceback" not in answer.text
