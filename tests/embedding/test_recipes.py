"""The recipes on the engine: prefetching and storage change no bit, and what the engine did is on record."""

import json
from pathlib import Path

import pytest
import torch

from dphybrid.embedding import RowPipeline
from dphybrid.embedding.storage import StartValues
from dphybrid.serving.load import load_model
from dphybrid.util.errors import UserError
from tests.commands import run_with
from tests.preparing import clicks

pytestmark = pytest.mark.usefixtures("unrecorded")


@pytest.fixture
def small_clicks(tmp_path: Path) -> list[str]:
    return [*clicks(tmp_path), "model.dim=4", "model.hidden=8", "train.epochs=1", "train.batch_size=24"]


@pytest.fixture(autouse=True)
def worker_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Virtual devices get no worker but when it is asked for."""
    monkeypatch.setattr("dphybrid.training.engine.Engine.prefetches_on_cpu", True)


def test_clicks_train_to_the_same_bits_and_counts_are_on_record(
    small_clicks: list[str], data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    three = [*small_clicks, "devices=cpu*3", "train.log_every=4"]
    off = run_with(*three, "train.pipeline=off")
    monkeypatch.setenv("DPHYBRID_TRACKING_URI", "files")
    monkeypatch.setenv("DPHYBRID_TABLE_STORAGE", "mmap")
    exact = run_with(*three, "train.pipeline=exact")
    assert (exact.digests, exact.metrics) == (off.digests, off.metrics)
    assert not list((data_dir / "tables").iterdir())
    lines = (data_dir / "runs" / exact.run_name / "record.jsonl").read_text().splitlines()
    last = [row for row in map(json.loads, lines) if "embedding/prepared_ratio" in row][-1]
    assert last["embedding/prepared_ratio"] == 1
    assert 0 < last["embedding/conflict_ratio"] <= 1
    for stage in ("d2h", "prepare", "wait"):
        assert last[f"embedding/{stage}_ms"] >= 0


def test_rows_of_half_the_size_learn_too(small_clicks: list[str], data_dir: Path) -> None:
    half, whole = run_with(*small_clicks, "table.dtype=bfloat16"), run_with(*small_clicks)
    assert half.metrics["log_loss"] == pytest.approx(whole.metrics["log_loss"], rel=0.05)
    assert half.metrics != whole.metrics
    with pytest.raises(UserError, match="use model.dtype=float32, not float64"):
        run_with(*small_clicks, "table.dtype=bfloat16", "model.dtype=float64")


def test_start_values_are_drawn_where_they_are_used_only(
    small_clicks: list[str], data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled: list[int] = []
    write = StartValues.write

    def note(self: StartValues, rows_VD: torch.Tensor, first: int) -> None:
        filled.append(len(rows_VD))
        write(self, rows_VD, first)

    monkeypatch.setattr(StartValues, "write", note)
    report = run_with(*small_clicks, "devices=cpu")
    # for training; neither for a look at the sizes nor for the evaluation of a checkpoint
    assert len(filled) == 1
    run_with(*small_clicks, "devices=cpu", f"train.warm_start={report.best_checkpoint}")
    assert len(filled) == 1
    whole = load_model(report.run_name)
    assert len(filled) == 1
    assert whole.table.weight.abs().sum() > 0


@pytest.fixture
def small_runs(tmp_path: Path) -> dict[str, list[str]]:
    (tmp_path / "ring").mkdir()
    ring = "\n".join(f"e{i}\tr{i % 3}\te{(i * 7 + 1) % 60}" for i in range(60))
    for part in ("train", "valid"):
        (tmp_path / "ring" / f"{part}.txt").write_text(ring)
    kge = [f"data.path={tmp_path / 'ring'}", "data.negatives=8", "model.dim=4", "train.batch_size=7"]
    lines = [" ".join(f"w{(i * j + j) % 17}" for j in range(40)) for i in range(1, 40)]
    (tmp_path / "small.txt").write_text("\n".join(lines))
    text = [f"data.path={tmp_path / 'small.txt'}", "data.window=16", "model.dim=8", "model.hidden=8"]
    return {
        "text": ["recipe=text", *text, "model.dropout=0.2", "table.optimizer=lazy-adam", "train.epochs=1"],
        "kge": ["recipe=kge", *kge, "train.epochs=1"],
    }


@pytest.mark.parametrize("recipe", ["kge", "text"])
def test_rows_of_all_lookups_are_prepared_and_train_to_the_same_bits(
    recipe: str, small_runs: dict[str, list[str]], data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ratios: list[float] = []

    class Watched(RowPipeline):
        def close(self) -> None:
            super().close()
            ratios.append(self.counters()["prepared_ratio"])

    monkeypatch.setattr("dphybrid.training.loop.RowPipeline", Watched)
    off, exact = (
        run_with(*small_runs[recipe], "devices=cpu*3", f"train.pipeline={mode}") for mode in ("off", "exact")
    )
    assert (exact.digests, exact.metrics) == (off.digests, off.metrics)
    assert ratios[0] == 0
    assert ratios[1] > 0.8  # all but those of the first batch, whose forward places the tables
