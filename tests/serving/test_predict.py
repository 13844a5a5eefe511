"""Predictions for new files of any form are the evaluation's; unknown values, odd rows, wrong calls."""

import json
import re
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from sklearn.metrics import roc_auc_score

import dphybrid
from dphybrid.parallel import resolve_devices
from dphybrid.recipes import ModelContext, find_recipe
from dphybrid.recipes.configs import build_config
from dphybrid.run.pages import Report, ResultPage
from dphybrid.serving.load import model_from_checkpoint
from dphybrid.serving.predict import Predictor, print_predictions
from dphybrid.training.checkpoint import Progress, Trained
from tests.commands import command, run_with
from tests.conftest import own_settings
from tests.refusing import refused
from tests.training.saving import save_checkpoint

HEADER = "age,city,user_id,clicked"
SMALL = ["recipe=ctr", "data.label=clicked", "devices=cpu", "model.dim=4"]


def rows(num_rows: int, seed: int) -> list[str]:
    random = np.random.default_rng(seed)
    age, city = random.integers(18, 80, num_rows), random.integers(0, 6, num_rows)
    clicked = random.random(num_rows) < 1 / (1 + np.exp(-(age - 50) / 10 - (city - 3)))
    return [
        f"{a},{'abcdef'[c]},u{random.integers(40)},{'yes' if y else 'no'}"
        for a, c, y in zip(age, city, clicked, strict=True)
    ]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Report, Path]]:
    """A click model that is registered as champion, and the folder with its files."""
    folder = tmp_path_factory.mktemp("predict")
    with pytest.MonkeyPatch.context() as patch:
        own_settings(patch, folder / "data")
        (folder / "clicks.csv").write_text("\n".join([HEADER, *rows(2000, 0)]))
        (folder / "held.csv").write_text("\n".join([HEADER, *rows(500, 1)]))
        data = [f"data.path={folder / 'clicks.csv'}", f"data.valid_path={folder / 'held.csv'}"]
        values = [*data, *SMALL, "train.epochs=2", "model.hidden=16", "checkpoint.register_as=clicks"]
        yield run_with(*values), folder


@pytest.fixture
def predictor(trained: tuple[Report, Path]) -> Predictor:
    return Predictor(trained[0].best_checkpoint)


def test_the_command_gives_the_evaluations_numbers(trained: tuple[Report, Path], tmp_path: Path) -> None:
    report, folder = trained
    out = tmp_path / "predictions.parquet"
    predict = ("predict", report.run_name, "--data.path", str(folder / "held.csv"))
    assert "500 predictions of clicked=yes" in command(*predict, "--out", str(out))
    found = pl.read_parquet(out)
    assert found.columns == ["file", "line", "probability"]
    assert found["line"].to_list() == list(range(2, 502))
    labels = [line.endswith("yes") for line in rows(500, 1)]
    # float32 probabilities may tie where logits differ: each such pair counts half
    assert roc_auc_score(labels, found["probability"]) == pytest.approx(report.metrics["auc"], abs=1e-4)
    for name in (report.best_checkpoint, "models:/clicks@champion"):
        printed = command("predict", name, *predict[2:]).encode()
        assert pl.read_csv(printed, schema_overrides=dict(found.schema)).equals(found)


def test_a_file_without_labels_and_several_files_give_the_same(
    trained: tuple[Report, Path], predictor: Predictor, tmp_path: Path
) -> None:
    _, folder = trained
    expected = predict(predictor, folder / "held.csv", tmp_path)
    frame = pl.read_csv(folder / "held.csv")
    frame.select("user_id", "age", "city").write_csv(tmp_path / "no_label.tsv", separator="\t")
    assert predict(predictor, tmp_path / "no_label.tsv", tmp_path).tolist() == expected.tolist()
    for number in range(3):
        frame[number * 200 : number * 200 + 200].write_csv(tmp_path / f"part-{number}.csv")
    # Batches of other sizes may round differently.
    np.testing.assert_allclose(predict(predictor, tmp_path / "part-*.csv", tmp_path), expected, rtol=1e-6)


def test_a_file_and_a_frame_of_many_rows_give_the_same_bits(predictor: Predictor, tmp_path: Path) -> None:
    (tmp_path / "many.csv").write_text(text := "\n".join([HEADER, *rows(9000, 2)]))
    frame = pl.read_csv(text.encode())
    whole = predictor.predict(frame)
    # Pieces of whole batches, as the size of a matrix product may change its rounding.
    pieces = [predictor.predict(frame[start : start + 3072]) for start in (0, 3072, 6144)]
    assert np.concatenate(pieces).tolist() == whole.tolist()
    assert predict(predictor, tmp_path / "many.csv", tmp_path).tolist() == whole.tolist()


def test_a_servers_thread_predicts_the_same_bits(predictor: Predictor) -> None:
    frame = pl.read_csv("\n".join([HEADER, *rows(7, 2)]).encode())
    before = torch.get_num_threads()
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            expected = predictor.predict(frame).tolist()
            with ThreadPoolExecutor(1) as pool:
                assert pool.submit(predictor.predict, frame).result().tolist() == expected
    finally:
        torch.set_num_threads(before)


def predict(predictor: Predictor, path: Path, folder: Path) -> np.ndarray:
    predictor.predict_file(str(path), folder / "out.csv")
    found = pl.read_csv(folder / "out.csv", schema_overrides={"probability": pl.Float32})
    return found["probability"].to_numpy()


def test_values_never_met_are_unknown_ones_and_odd_numbers_are_missing(predictor: Predictor) -> None:
    known = {"age": ["30", None, None], "city": ["a", "a", None], "user_id": ["u1", "u1", "u1"]}
    odd = {"age": ["30", "?", "old"], "city": ["a", "a", " "], "user_id": ["u1", "u1", "u1"]}
    with pytest.warns(UserWarning, match="Column 'age': 1 of 2 values cannot be read as numbers"):
        found = predictor.predict(odd)
    assert predictor.predict(known).tolist() == found.tolist()
    new = predictor.predict({"age": [30.0, 30.0], "city": ["zz", "yy"], "user_id": ["new", "u-1"]})
    assert new[0] == new[1]
    assert np.isfinite(new).all()


def test_the_rows_to_predict_are_not_overwritten(predictor: Predictor, tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text(text := "\n".join([HEADER, *rows(5, 2)]))
    (tmp_path / "y.csv").symlink_to("x.csv")
    for path, out in (("x.csv", "x.csv"), ("*.csv", "x.csv"), ("x.csv", "y.csv")):
        with refused(f"--out .*{out}: is one of the files to predict"):
            predictor.predict_file(tmp_path / path, tmp_path / out)
    assert (tmp_path / "x.csv").read_text() == text


def test_rows_that_cannot_be_read_are_told_and_left_out(trained: tuple[Report, Path], tmp_path: Path) -> None:
    report, _ = trained
    file, out = tmp_path / "x.csv", tmp_path / "out.parquet"
    file.write_text("\n".join([HEADER, "30,a,u1,no", "30,a", "old,b,u2,no", "40,b,u2,"]))
    predict = ("predict", report.run_name, "--data.path", str(file), "--out", str(out))
    assert "1 of 4 rows cannot be read" in command(*predict, ends=2)
    assert [path.name for path in tmp_path.iterdir()] == ["x.csv"]
    said = command(*predict, "--data.max-rejected", "0.5")
    assert pl.read_parquet(out)["line"].to_list() == [2, 4, 5]
    rejected = json.loads((tmp_path / "out.parquet.rejected.jsonl").read_text())
    assert (rejected["line"], rejected["reason"]) == (3, "Expected Number of Columns: 4 Found: 2")
    assert "1 row cannot be read and is left out" in said
    assert "Column 'age': 1 of 3 values cannot be read as numbers and became missing" in said
    assert "as numbers" not in command(*predict, "--data.max-rejected", "0.5", "--data.missing", "old,worn")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": "nobody"}, ["nobody: no run, checkpoint folder or models:/ address", "known: ctr-cpu-"]),
        ({"model": "models:/clicks@nobody"}, ["cannot be fetched", "models:/clicks@nobody"]),
        ({"out": "x.txt"}, ["--out", ".parquet or .csv"]),
        ({"out": "none/x.csv"}, ["--out", "folder that exists"]),
        ({"text": "age,city\n30,a\n"}, ["column 'user_id'", "is missing", "age, city"]),
        ({"text": ""}, ["is empty"]),
        ({"flags": ["--top", "3"]}, ["--top 3", "recommend", "scores rows"]),
        ({"flags": ["--data.header", "perhaps"]}, ["--data.header 'perhaps': ", "'yes' or 'no'"]),
    ],
)
def test_wrong_calls_end_with_a_message(
    trained: tuple[Report, Path], tmp_path: Path, change: dict[str, Any], words: list[str]
) -> None:
    file, out = tmp_path / "x.csv", tmp_path / change.get("out", "out.csv")
    file.write_text(change.get("text", "\n".join([HEADER, *rows(5, 2)])))
    predict = ("predict", change.get("model", trained[0].run_name), *change.get("flags", []))
    said = command(*predict, "--data.path", str(file), "--out", str(out), ends=2)
    for word in words:
        assert word in said
    assert [path.name for path in tmp_path.iterdir()] == ["x.csv"]


def test_the_module_of_any_run_comes_back_by_name_folder_or_alias(data_dir: Path) -> None:
    report = run_with(
        "recipe=hybrid", "train.epochs=1", "train.batch_size=1000", "checkpoint.register_as=any"
    )
    whole = model_from_checkpoint(report.best_checkpoint).state_dict()
    folder = str(Path(report.best_checkpoint).parent.parent)
    for which in (report.run_name, folder, report.best_checkpoint, "models:/any@challenger"):
        state = dphybrid.load_model(which, "cpu*2").state_dict()
        assert state.keys() == whole.keys()
        assert all(torch.equal(value, whole[name]) for name, value in state.items())
    assert not dphybrid.load_model(report.run_name).training
    assert dphybrid.load_model(report.run_name, train=True).training
    with refused(f"nobody: no run, checkpoint folder .*known: {report.run_name}"):
        dphybrid.load_model("nobody")
    page = Path(folder) / "result.json"
    ResultPage.read(page).model_copy(update={"best_checkpoint": ""}).write(page)
    with refused(f"run {report.run_name} ended before its first checkpoint; continue it with --resume"):
        dphybrid.load_model(report.run_name)
    # As a run that is training, or was killed: it has checkpoints, but no result.
    page.unlink()
    with refused(f"the training of run {report.run_name} has not ended.*name one of its checkpoint folders"):
        dphybrid.load_model(report.run_name)
    assert dphybrid.load_model(report.best_checkpoint) is not None


def test_files_of_another_form_are_said_to_be_so(trained: tuple[Report, Path], tmp_path: Path) -> None:
    report, folder = trained
    predictor, out = Predictor(report.best_checkpoint), tmp_path / "out.csv"
    with refused("data.max_rejected = 2"):
        predictor.predict_file(folder / "held.csv", out, max_rejected=2)
    with refused("data.delimitr: there is no such field; did you mean 'data.delimiter'"):
        predictor.predict_file(folder / "held.csv", out, delimitr=";")
    (tmp_path / "semicolons.csv").write_text((folder / "held.csv").read_text().replace(",", ";"))
    assert predictor.predict_file(tmp_path / "semicolons.csv", out, delimiter=";").num_rows == 500


def resident_kib(file: Path) -> int:
    """How much of a file's mappings into this process is in memory."""
    found, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            counts = line.endswith(str(file))
        elif counts and line.startswith("Rss:"):
            found += int(line.split()[1])
    return found


def test_a_mapped_table_takes_memory_for_the_rows_looked_up_only(tmp_path: Path) -> None:
    config, info = build_config({"recipe": "ctr"}), {"num_ids": [200_000], "num_dense": 0}
    model = find_recipe("ctr").new_model(ModelContext(resolve_devices("cpu"), info, config.model, 0))
    trained = Trained(model, None, None, Progress())
    save_checkpoint(tmp_path, trained, config.model_dump(mode="json"), {"info": info})
    model = model_from_checkpoint(tmp_path / "step-000000", mapped=True).eval()
    batch = {"ids_BF": torch.tensor([[199_999]]), "dense_BN": torch.zeros(1, 0), "labels_B": torch.zeros(1)}
    with torch.inference_mode():
        assert torch.isfinite(model(batch)["logits"]).all()
    (file,) = tmp_path.rglob("tables/*.safetensors")
    assert file.stat().st_size > 12_000_000
    assert 0 < resident_kib(file) < 2000


def test_columns_of_the_input_are_kept(trained: tuple[Report, Path], predictor: Predictor) -> None:
    folder = trained[1]
    out = folder / "kept.csv"
    predictor.predict_file(folder / "held.csv", out, keep=["user_id", "city"])
    found = pl.read_csv(out, schema_overrides={"user_id": pl.String})
    held = pl.read_csv(folder / "held.csv", schema_overrides={"user_id": pl.String})
    assert found.columns == ["file", "line", "probability", "user_id", "city"]
    assert found.select("user_id", "city").equals(held.select("user_id", "city"))
    with refused("--keep town: .*no such column; columns: age, city"):
        predictor.predict_file(folder / "held.csv", folder / "no.csv", keep=["town"])
    with refused("decimal: new files have numbers and dates as in training"):
        predictor.predict_file(folder / "held.csv", folder / "no.csv", decimal=",")
    assert not (folder / "no.csv").exists()


def test_printed_predictions_pass_through_a_private_folder_that_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def predict_file(_: str, out: Path) -> SimpleNamespace:
        assert out.parent.stat().st_mode & 0o077 == 0
        out.write_text("probability\n")
        return SimpleNamespace(num_rejected=0)

    print_predictions(SimpleNamespace(predict_file=predict_file), "")
    assert capsys.readouterr().out == "probability\n"
    assert not list(tmp_path.iterdir())


def test_a_record_that_lacks_a_column_is_refused_beside_whole_ones(predictor: Predictor) -> None:
    rows = [{"age": 3, "city": "a", "user_id": None}, {"age": 3, "city": "a"}]
    assert len(predictor.predict(rows[:1])) == 1
    with refused("row 2, in which None means no value: column 'user_id', .* is missing"):
        predictor.predict(rows)
