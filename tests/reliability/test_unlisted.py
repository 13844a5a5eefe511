"""Nothing is used that no page lists: files put into a checkpoint, into prepared data, into a saved frame or
into a registered model, and damaged lines of a sweep's journal."""

import os
import shutil
import signal
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from mlflow.tracking import MlflowClient

import dphybrid
from dphybrid.api.run import TrainedRun
from dphybrid.config.settings import load_settings
from dphybrid.serving.load import find_checkpoint
from dphybrid.training.checkpoint import verify_checkpoint
from dphybrid.training.tensor_file import read_tensors, write_tensors
from dphybrid.util.files import making, replacing
from tests.commands import command, run_with
from tests.refusing import refused


def frame(rows: int = 300) -> pl.DataFrame:
    random = np.random.default_rng(4)
    shop, number = random.integers(0, 9, rows), random.normal(10, 4, rows)
    return pl.DataFrame({"number": number, "shop": [f"s{n}" for n in shop], "y": (shop % 3 == 0).astype(int)})


def trained(name: str, **values: object) -> TrainedRun:
    more = {"epochs": 1, "devices": "cpu", "tracking": "none", "quiet": True, **values}
    return dphybrid.train(frame(), label="y", run_name=name, **more)


def test_rows_of_another_checkpoint_are_refused(data_dir: Path) -> None:
    checkpoint = trained("run").checkpoint
    weight = read_tensors(checkpoint / "tables/table.safetensors")["weight"]
    (checkpoint / "changed").mkdir()
    rows = {"row_numbers": torch.arange(len(weight)), "rows.weight": torch.zeros_like(weight)}
    write_tensors(checkpoint / "changed/table.safetensors", rows)
    told = "changed/table.safetensors: is not listed in state.json, so it is not checked; remove it"
    for which in ("run", str(checkpoint)):
        with refused(told):
            dphybrid.load(which)
    shutil.rmtree(checkpoint / "changed")
    (checkpoint / ".nfs01").touch()  # an open file that was removed, on a shared disk
    verify_checkpoint(checkpoint)


def test_a_file_beside_the_encoder_of_prepared_data_is_refused(data_dir: Path) -> None:
    trained("run")
    (encoder,) = data_dir.glob("prepared/*/encoder")
    (encoder / "column-99.parquet").write_bytes(b"")
    with refused("encoder/column-99.parquet: is not listed in manifest.json"):
        trained("again")


def test_a_damaged_frame_is_told_and_written_again_without_its_folder(data_dir: Path) -> None:
    first = trained("first")
    (file,) = data_dir.glob("frames/*/*.parquet")
    whole, stamp = file.read_bytes(), file.stat()
    for place in range(4, len(whole), len(whole) // 7):
        changed = bytearray(whole)
        changed[place] ^= 1
        file.write_bytes(bytes(changed))
        os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
        values = ["recipe=ctr", f"data.path={file.parent}", "data.label=y", "devices=cpu"]
        with refused("this saved frame is damaged, or has other files now"):
            run_with(*values)
        with refused("this saved frame is damaged"):
            dphybrid.load("first").predict(file.parent)
    shutil.rmtree(file.parent)
    again = trained("second")
    assert file.read_bytes() == whole
    assert again.metrics == first.metrics
    shutil.copy(file, file.with_name("part-00001.parquet"))
    with refused("has other files now"):
        run_with(*values)


@pytest.mark.usefixtures("embedded_store")
def test_a_registered_model_with_links_is_not_loaded(data_dir: Path) -> None:
    report = run_with("recipe=toy", "devices=cpu", "checkpoint.register_as=m", run_name="run")
    checkpoint = find_checkpoint("models:/m@champion", load_settings())
    dphybrid.load_model("models:/m@champion")
    moved = data_dir / "elsewhere"
    checkpoint.rename(moved)
    checkpoint.symlink_to(moved)
    with refused("checkpoint: is a link, which this folder must not have"):
        dphybrid.load_model("models:/m@champion")
    assert MlflowClient(report.tracking_uri).get_run(report.run_id).info.status == "FINISHED"


@pytest.mark.slow
def test_a_damaged_journal_of_a_sweep_is_told(data_dir: Path) -> None:
    values = ["--recipe", "toy", "--devices", "cpu", "--train.epochs", "1", "--tracking", "none"]
    sweep = ["sweep", *values, "--sweep", "s", "--grid", '{"train.lr": [0.01]}']
    command(*sweep)
    journal = data_dir / "sweeps" / "s" / "study.journal"
    whole = journal.read_bytes()
    with journal.open("ab") as stream:
        stream.write(b'{"op_code": 4')  # a process was killed while it wrote
    command(*sweep)
    assert journal.read_bytes().startswith(whole)
    lines = whole.splitlines(keepends=True)
    for number in (0, len(lines) // 2, len(lines) - 1):
        damaged = lines[number].replace(b":", b";", 1)
        journal.write_bytes(b"".join([*lines[:number], damaged, *lines[number + 1 :]]))
        assert "study.journal: is damaged, so the sweep" in command(*sweep, ends=2)


def test_what_killed_programs_left_goes_with_the_next_one(tmp_path: Path) -> None:
    file, folder = tmp_path / "out.csv", tmp_path / "exported"
    if (killed := os.fork()) == 0:
        with making(folder) as partial, replacing(file) as half:
            (partial / "file").touch()
            half.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(killed, 0)
    assert len(list(tmp_path.iterdir())) == 4  # each with its lock
    with making(folder) as partial, replacing(file) as half:
        assert list(partial.iterdir()) == []
        half.touch()
    assert {path.name for path in tmp_path.iterdir()} == {"out.csv", "exported"}
