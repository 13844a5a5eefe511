"""An exported model predicts the same bits in a process that has no dphybrid, Prefect or MLflow."""

import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from fastapi.testclient import TestClient

import dphybrid
from dphybrid.cli.main import main
from dphybrid.data.foreign import writing
from dphybrid.serving import export as export_module
from dphybrid.serving.export import export
from tests.commands import command, python
from tests.conftest import LONG, REPOSITORY, own_settings
from tests.disks import files_of_at_most
from tests.refusing import refused

NUM_ROWS = 600
WITHOUT = """
import sys
for name in ("dphybrid", "prefect", "mlflow"):
    sys.modules[name] = None  # an import of it fails
import numpy as np, polars as pl
from pathlib import Path
from runpy import run_path
*folders, commands = sys.argv[1:]
for folder in map(Path, folders):
    model = run_path(str(folder / "out" / "predict.py"))["Model"]()
    del sys.path[0]
    rows = pl.read_parquet(folder / "new.parquet")
    columns = rows[:3].to_dict(as_series=False)
    records = [dict.fromkeys(rows.columns)] * 101 + rows.to_dicts()
    found = [model.predict(each) for each in (rows, rows[:1], rows[:0], columns, records[:104])]
    np.savez(folder / "found.npz", *found)
import contextlib, io, json
told = []
for argv in json.loads(commands):  # as `python predict.py FILE`
    sys.argv, out, said = argv, io.StringIO(), ""
    with contextlib.redirect_stdout(out):
        try:
            run_path(argv[0], run_name="__main__")
        except SystemExit as end:
            said = end.code
    told.append([out.getvalue(), said])
print(json.dumps(told))
"""


def table() -> pl.DataFrame:
    random = np.random.default_rng(0)
    number = random.normal(size=NUM_ROWS)
    letters = [list(random.choice(list("uvwxyz"), random.integers(0, 4))) for _ in range(NUM_ROWS)]
    return pl.DataFrame(
        {
            "size": number,
            "price": [f"{1000 + 900 * abs(n):,.2f}" if n > -1 else None for n in number],
            "shop": [f"0{n}" for n in random.integers(0, 60, NUM_ROWS)],
            "flag": random.choice(["TRUE", "true", "False", "?"], NUM_ROWS),
            "when": [f"{d}/3/2024 {h}:30" for d, h in random.integers(1, 24, (NUM_ROWS, 2))],
            "tags": ["|".join(each) for each in letters],
            "lists": letters,
            "said": [" ".join(f"{word}'s" for word in each).upper() for each in letters],
            "clicked": np.where(number + random.normal(size=NUM_ROWS) > 0, "yes", "no"),
            "group": random.choice(["a", "b", "c"], NUM_ROWS),
            "amount": 100 * number.round(3),
            "count": random.poisson(np.exp(number)),
        }
    )


COLUMNS = {"bags": ["tags"], "text": ["said"], "dayfirst": True, "buckets": 4}
LABELS = {"binary": "clicked", "multiclass": "group", "regression": "amount", "counts": "count"}


def trained(task: str, whole: bool = False, **values: Any) -> Any:
    """Train on columns of all kinds, or on a few, as each takes the export a second to trace."""
    label = LABELS[task]
    rows = table().drop([name for name in LABELS.values() if name != label])
    if not whole:
        rows = rows.select("size", "shop", "tags", label)
    columns = COLUMNS if whole else {"bags": ["tags"], "buckets": 4}
    given = {"devices": "cpu", "epochs": 1, "dim": 4, "hidden": 8, "quiet": True, **columns, **values}
    return dphybrid.train(rows, label=label, task=task, run_name=task, **given), rows.drop(label)


KINDS: dict[str, dict[str, str]] = {
    "binary": {"kind": "dlrm"},
    "multiclass": {"kind": "deepfm"},
    "regression": {"kind": "wide-deep", "table__dtype": "bfloat16"},
    **({"counts": {"kind": "mlp"}} if LONG else {}),
}


@pytest.fixture(scope="module")
def multiclass(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, pl.DataFrame, Path]:
    """A run, rows for it, and its export."""
    folder = tmp_path_factory.mktemp("multiclass")
    with pytest.MonkeyPatch.context() as patch:
        own_settings(patch, folder / "data", TRACKING_URI="none")
        patch.chdir(folder)
        run, rows = trained("multiclass", **KINDS["multiclass"])
        return run, rows, export(run.checkpoint, folder / "out")


def test_predictions_are_the_runs_bit_for_bit(
    unrecorded: None, multiclass: tuple[Any, pl.DataFrame, Path], tmp_path: Path
) -> None:
    wanted = {}
    for task, values in KINDS.items():
        (tmp_path / task).mkdir()
        if task == "multiclass":
            run, rows, exported = multiclass
            shutil.copytree(exported, tmp_path / task / "out")
        else:
            run, rows = trained(task, whole=task == "binary", **values)
            command("export", task, "--out", str(tmp_path / task / "out"))
        odd = {"shop": "new", "price": "old", "when": "?"}
        odd_rows = rows[:2].with_columns(**{name: pl.lit(odd[name]) for name in odd if name in rows.columns})
        new = pl.concat([rows, odd_rows])
        records = [dict.fromkeys(new.columns)] * 101 + new[:3].to_dicts()
        new.write_parquet(tmp_path / task / "new.parquet")
        with pytest.warns(UserWarning, match="Not numbers") if task == "binary" else nullcontext():
            wanted[task] = [run.predict(each) for each in (new, new[:1], new[:0], new[:3], records)]
    folders, out = [str(tmp_path / task) for task in KINDS], tmp_path / "multiclass" / "out"
    example = out / "example.json"
    new[:3].write_csv(tmp_path / "x[1].csv")  # of a file, too, 07 is not 7
    (tmp_path / "odd.json").write_text('{"rows"')
    files = [example, tmp_path / "x[1].csv", tmp_path / "nowhere.csv", tmp_path / "odd.json"]
    commands = [[str(out / "predict.py"), str(file)] for file in files] + [[str(out / "predict.py")]]
    done = python("-c", WITHOUT, *folders, json.dumps(commands), cwd=tmp_path)
    of_example, of_file, nowhere, odd, without = json.loads(done.stdout.splitlines()[-1])
    assert json.loads(of_example[0]) == json.loads(example.read_text())["predictions"]
    assert json.loads(of_file[0]) == wanted["multiclass"][3].tolist()
    for (_, told), name, words in ((nowhere, "nowhere.csv", "No such file"), (odd, "odd.json", "Expecting")):
        assert re.fullmatch(f"error: .*{name}: .*{words}.*", told)
    assert without[1].startswith("Predictions of the model in this folder.")
    for task, predictions in wanted.items():
        with np.load(tmp_path / task / "found.npz") as found:
            for name, expected in zip(sorted(found), predictions, strict=True):
                assert found[name].dtype == expected.dtype
                assert np.array_equal(found[name], expected), (task, name)
    # The ids need no network, so that its program must not compute it, too.
    lookups = torch.export.load(out / "lookups.pt2").graph
    assert not lookups.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    check = ["sha256sum", "--check", "--quiet", "SHA256SUMS"]
    assert subprocess.run(check, cwd=out).returncode == 0
    (rows_file,) = (out / "tables").iterdir()
    with rows_file.open("r+b") as file:
        file.seek(-3, os.SEEK_END)
        file.write(b"?")
    said = subprocess.run(check, cwd=out, capture_output=True, text=True)
    assert (said.returncode, f"tables/{rows_file.name}: FAILED" in said.stdout) == (1, True)


def test_the_example_serves_requests_at_once_and_names_a_missing_column(
    multiclass: tuple[Any, pl.DataFrame, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, rows, exported = multiclass
    client = served(exported, monkeypatch)
    pairs = [rows[n : n + 2].to_dicts() for n in range(0, 16, 2)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda each: client.post("/predict", json=each).json(), pairs))
    np.testing.assert_allclose(np.concatenate(found), run.predict(rows[:16]), rtol=1e-6)
    without = rows[:1].drop("shop").to_dicts()
    for asked, words in ((without, "row 1 has no"), (rows[:1].to_dicts() + without, "row 2 has no")):
        lacking = client.post("/predict", json=asked)
        assert (lacking.status_code, f"{words} column 'shop'" in lacking.json()["detail"]) == (400, True)


def served(exported: Path, monkeypatch: pytest.MonkeyPatch) -> TestClient:
    """A client of the example's service."""
    monkeypatch.setenv("EXPORT", str(exported))
    monkeypatch.syspath_prepend(exported)
    for name in ("predict", "recommend"):  # of another export
        monkeypatch.delitem(sys.modules, name, raising=False)
    return TestClient(run_path(str(REPOSITORY / "examples" / "serve.py"))["app"])


def test_nothing_half_is_left_and_nothing_is_overwritten(
    unrecorded: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained("binary")
    there = {path.name for path in tmp_path.iterdir()}
    # Tracing takes seconds and comes before what is looked at here.
    monkeypatch.setattr(export_module, "_programs", lambda *_: SimpleNamespace(write=Path.touch))

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("dphybrid.serving.export._write_pages", interrupted)
        assert main(["export", "binary", "--out", "out"]) == 130
    assert {path.name for path in tmp_path.iterdir()} == there

    def meanwhile(*_: object) -> None:
        (tmp_path / "new").mkdir()
        (tmp_path / "new" / "letter").write_text("mine")

    with monkeypatch.context() as patch:
        patch.setattr(export_module, "_write_pages", meanwhile)
        assert "--out new: exists already" in command("export", "binary", "--out", "new", ends=2)
    assert [file.read_text() for file in (tmp_path / "new").iterdir()] == ["mine"]
    shutil.rmtree(tmp_path / "new")
    for given, words in (
        (["nobody", "--out", "out"], "nobody: no run"),
        (["binary", "--out", "none/out"], "--out none/out: cannot be written there"),
        (["binary", "--out", "data"], "--out data: exists already"),
    ):
        assert words in command("export", *given, ends=2)
    assert {path.name for path in tmp_path.iterdir()} == there


def test_a_full_disk_is_told_with_the_file(
    multiclass: tuple[Any, pl.DataFrame, Path], tmp_path: Path
) -> None:
    program = torch.export.export(torch.nn.Linear(50, 50), (torch.ones(1, 50),))
    written = SimpleNamespace(tables={}, programs={"dense": program})
    with files_of_at_most(1000), pytest.raises(OSError, match=r"dense\.pt2"):
        export_module._Programs.write(written, tmp_path)  # type: ignore[arg-type]
    encoder = dphybrid.load(multiclass[0].checkpoint).encoder
    with files_of_at_most(10), pytest.raises(OSError, match=r"encoder\.json"):
        encoder.save(tmp_path)
    words = tmp_path / "words.parquet"
    with files_of_at_most(10), pytest.raises(OSError, match=r"words\.parquet"), writing(words):
        pl.DataFrame({"words": ["long"] * 99}).write_parquet(words)


def test_a_recipe_without_predictions_is_refused(unrecorded: None, tmp_path: Path) -> None:
    run = dphybrid.train(recipe="hybrid", devices="cpu", epochs=1, quiet=True)
    with refused("recipe hybrid: makes no predictions from rows"):
        export(run.checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_examples_serve_and_index_recommendations(
    unrecorded: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = dphybrid.train(recipe="retrieval", devices="cpu", epochs=1, run_name="towers", quiet=True)
    command("export", "towers", "--out", str(tmp_path / "out"))
    user, client = run.recommend()["user"][0], served(tmp_path / "out", monkeypatch)
    for asked, expected in (
        (f"user={user}&k=3", run.recommend(user, 3)),
        ("k=4&met=i95&met=i321", run.recommend(k=4, history=["i95", "i321"])),
    ):
        answer = client.get(f"/recommend?{asked}").json()
        assert answer["items"] == expected["item"].to_list()
    pytest.importorskip("faiss")
    monkeypatch.setattr(sys, "argv", ["ann_index.py", str(tmp_path / "out")])
    run_path(str(REPOSITORY / "examples" / "ann_index.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert float(lines[-1].split("recall@10 ")[1].split()[0]) > 0.95
    assert (tmp_path / "out" / "items.faiss").is_file()
