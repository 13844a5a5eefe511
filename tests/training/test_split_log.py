"""The record of splits, and the check of train.check_split."""

from pathlib import Path

import pytest
import torch
from torch import nn

from dphybrid.parallel import DataParallel, Split, resolve_devices
from dphybrid.training.split_log import SplitLog
from tests.commands import run_with
from tests.refusing import refused


class Summed(nn.Module):
    def forward(self, x_BL: torch.Tensor) -> torch.Tensor:
        return x_BL.sum(1)


def test_four_hundred_lengths_are_one_split_with_its_first_and_latest_shape() -> None:
    block = DataParallel(Summed(), resolve_devices("cpu*2"))
    log = SplitLog(block, each=False)
    printed = []
    for step in range(1, 401):
        block(torch.ones(8, step))
        printed += log.after_step(step, 8)
    block(torch.ones(5, 7))
    short = log.after_step(401, 5)
    assert len(printed) == 3
    assert short[-1] == "Outside: input size torch.Size([5, 7]) output_size torch.Size([5])"
    assert len(log.rows()) == 4
    first = log.rows()[0]
    assert (first.first_shape, first.latest_shape) == ("[4, 1] -> [4]", "[4, 400] -> [4]")
    assert (first.first_step, first.last_step, first.steps, first.batch_rows) == (1, 400, 400, 8)
    assert [row.rows for row in log.rows()] == [4, 4, 3, 2]
    assert [row.number for row in log.rows()] == [1, 1, 2, 2]
    assert first.table_row()["where"] == "split 1 / replica 0 / model"


def test_equal_parts_of_other_batches_are_other_splits() -> None:
    block, whole = DataParallel(Summed(), resolve_devices("cpu")), [9]

    def spread(split: Split) -> Split:
        return Split(((4,), (whole[0] - 4,)), ((4,), (whole[0] - 4,)), ("rank 0", "rank 1"))

    log = SplitLog(block, each=False, whole=spread)
    for step, rows in enumerate([9, 9, 8, 9], start=1):
        whole[0] = rows
        block(torch.ones(4, 2))  # of nine rows and of eight, the first of two processes has four
        log.after_step(step, rows)
    assert [(row.rows, row.batch_rows, row.steps, row.last_step) for row in log.rows()] == [
        *((4, 9, 3, 4), (5, 9, 3, 4)),
        *((4, 8, 1, 3), (4, 8, 1, 3)),
    ]


def test_a_restored_log_goes_on_as_if_nothing_had_been() -> None:
    block = DataParallel(Summed(), resolve_devices("cpu*2"))
    whole, before, after = (SplitLog(block, each=False) for _ in range(3))
    for step, rows in enumerate([8, 8, 5, 8, 3], start=1):
        block(torch.ones(rows, 2))
        whole.after_step(step, rows)
        (before if step <= 3 else after).after_step(step, rows)
        if step == 3:
            after.load_state_dict(before.state_dict())
    assert after.rows() == whole.rows()
    assert after.lines == whole.lines


def test_the_short_form_is_one_line_for_each_split() -> None:
    for devices, expected in (("cpu*2", ["A batch of 5 rows is split 3, 2 over 2 devices"]), ("cpu", [])):
        block = DataParallel(Summed(), resolve_devices(devices))
        log, whole = SplitLog(block, each=False, short=True), SplitLog(block, each=False)
        block(torch.ones(5, 2))
        assert log.after_step(1, 5) == expected
        assert log.lines == whole.after_step(1, 5)


QUIET = ["recipe=toy", "train.epochs=1", "train.print_splits=new"]
UNCHECKED = [*QUIET, "train.check_split=false"]
MODELS = """
import torch
from dphybrid.parallel import DataParallel


class Supervised(torch.nn.Module):
    def __init__(self, context, dim):
        super().__init__()
        layer = torch.nn.Linear(5, 2)
        self.region = DataParallel(torch.nn.Sequential(layer, torch.nn.Softmax(dim)), context.devices)

    def forward(self, batch):
        loss = (self.region(batch["x_BI"]) - batch["y_BO"]).square().mean(1)
        return {"loss": loss, "weight": torch.ones_like(loss)}


def across(context):
    return Supervised(context, 0)


def alone(context):
    return Supervised(context, 1)
"""


def test_a_model_that_computes_across_the_batch_does_not_train(
    unrecorded: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "split_models.py").write_text(MODELS)
    monkeypatch.syspath_prepend(str(tmp_path))
    with refused(r"(?s)region.1: its output differs.*train.check_split=false trains it"):
        run_with(*QUIET, "model.factory=split_models:across", "devices=cpu*3")
    run_with(*QUIET, "model.factory=split_models:across", "devices=cpu")
    run_with(*UNCHECKED, "model.factory=split_models:across", "devices=cpu*3")
    capsys.readouterr()
    checked = run_with(*QUIET, "model.factory=split_models:alone", "devices=cpu*3")
    assert "train.check_split: the same results split and on one device\n" in capsys.readouterr().out
    plain = run_with(*UNCHECKED, "model.factory=split_models:alone", "devices=cpu*3")
    assert "the same results split" not in capsys.readouterr().out
    assert checked.metrics == plain.metrics, "the check changes no number"
    assert checked.splits == plain.splits
    assert checked.splits[0].device == "cpu[0]"
