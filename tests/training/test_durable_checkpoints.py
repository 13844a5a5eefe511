"""What checkpoints promise: numbers only, never hidden, and a record that goes on as if nothing had been."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dphybrid.embedding import HostEmbedding, row_optimizer
from dphybrid.run.pages import ResultPage
from dphybrid.tracking import Tracker
from dphybrid.training.checkpoint import (
    Progress,
    Trained,
    complete_checkpoints,
    read_state,
    verify_checkpoint,
)
from dphybrid.training.saving import CheckpointWriter
from dphybrid.util.stop import Interrupted
from tests.commands import run_with
from tests.refusing import refused
from tests.training.saving import save_checkpoint
from tests.training.stopping import stopping_after


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = HostEmbedding(50, 4, name="words", seed=0)
        self.linear = nn.Linear(4, 1)
        self.register_buffer("mask", torch.full((2, 2), float("-inf")))


@pytest.fixture
def trained() -> Trained:
    model = Small()
    dense = torch.optim.Adam(model.linear.parameters())
    rows = row_optimizer("adam", {"words": model.words}, lr=0.1, weight_decay=0.0)
    model.linear(model.words(torch.arange(8)).sum(0)).sum().backward()
    dense.step()
    rows.step()
    return Trained(model, dense, rows, Progress(step=3))


def test_what_is_no_number_is_never_saved(trained: Trained, tmp_path: Path) -> None:
    good, model = save_checkpoint(tmp_path, trained, {}, {}), trained.model
    trained.progress.step = 4
    moments = trained.dense.state[model.linear.bias]["exp_avg"]
    for where, values, place in (
        ("table words row 7", model.words.weight.detach(), (7, 2)),
        ("parameter linear.weight row 0", model.linear.weight.detach(), (0, 3)),
        ("optimizer's exp_avg of linear.bias row 0", moments, 0),
    ):
        before = values[place].clone()
        for value in (float("nan"), float("inf"), float("-inf")):
            values[place] = value
            with refused(rf"^{where} is not a finite number at step 4, .* {good}, with --resume"):
                save_checkpoint(tmp_path, trained, {}, {})
            assert [path.name for path in tmp_path.iterdir()] == ["step-000003"]
        values[place] = before


def test_the_same_step_again_replaces_its_folder(trained: Trained, tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path, trained, full_every=5) as writer:
        for auc in (0.5, 0.6):
            trained.progress.metrics["auc"] = auc
            path = writer.save({}, {})
    verify_checkpoint(path)
    assert read_state(path).progress.metrics == {"auc": 0.6}
    assert complete_checkpoints(tmp_path) == [path]


class Recorded(Tracker):
    """Keeps the training losses by step."""

    def __init__(self) -> None:
        super().__init__(None, None)
        self.losses: dict[int, float] = {}

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        if "train/loss" in metrics:
            assert step not in self.losses
            self.losses[step] = metrics["train/loss"]


def test_a_resumed_run_records_the_same_as_an_undisturbed_one(
    data_dir: Path, unrecorded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["recipe=hybrid", "devices=cpu*2", "train.batch_size=3000", "train.epochs=3"]
    options += ["train.log_every=5"]
    records = {"whole": Recorded(), "broken": Recorded()}

    def run(name: str, **how: Any) -> ResultPage:
        monkeypatch.setattr("dphybrid.run.trainer.attached", lambda *_: records[name])
        run_with(*options, **how)
        return ResultPage.read(data_dir / "runs" / name / "result.json")

    whole = run("whole", run_name="whole")
    with stopping_after(7) as stop, pytest.raises(Interrupted):
        run("broken", run_name="broken", stop=stop)
    result = run("broken", resume="broken")
    assert records["broken"].losses == records["whole"].losses
    assert list(records["whole"].losses) == [5, 10]
    for name in ("splits", "split_lines", "history"):
        assert getattr(result, name) == getattr(whole, name)
