"""Options of an epoch's loop: accumulated gradients, fewer batches."""

from pathlib import Path

import torch

from dphybrid.run.pages import ResultPage
from dphybrid.training.tensor_file import read_tensors
from tests.commands import run_with
from tests.refusing import refused

HYBRID = ["recipe=hybrid", "devices=cpu*2", "train.epochs=1", "train.patience=0", "model.dtype=float64"]


def weights(checkpoint: str) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(Path(checkpoint).rglob("*.safetensors")):
        found |= {f"{file.name}/{name}": value for name, value in read_tensors(file).items()}
    return found


def test_accumulated_gradients_are_those_of_the_large_batch(data_dir: Path, unrecorded: None) -> None:
    values = [*HYBRID, "train.batch_size=3000", "train.clip_norm=0.1"]
    whole = weights(run_with(*values).latest_checkpoint)
    added = weights(run_with(*values, "train.accumulate=7").latest_checkpoint)
    assert whole.keys() == added.keys()
    for name, value in whole.items():
        assert torch.allclose(value, added[name], rtol=1e-9, atol=1e-12), name
    with refused("train.accumulate=2: ranks compute their part"):
        run_with(*HYBRID, "train.accumulate=2", "cluster.ranks=2")


def test_an_epoch_has_as_many_batches_as_the_limit(data_dir: Path, unrecorded: None) -> None:
    values = [*HYBRID, "train.batch_size=640", "train.limit_batches=2", "checkpoint.every_steps=1"]
    report = run_with(*values, "train.epochs=3", run_name="whole")
    page = ResultPage.read(data_dir / "runs/whole/result.json")
    assert (page.steps, len(page.history)) == (6, 3)
    run_with(*values, run_name="parts")
    on = run_with(*values, "train.epochs=3", resume="parts")
    whole, parts = weights(report.latest_checkpoint), weights(on.latest_checkpoint)
    assert all(torch.equal(value, parts[name]) for name, value in whole.items())
