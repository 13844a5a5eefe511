"""A snapshot has the values of the moment it was made at, however reading and updates take turns."""

import random
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from dphybrid.embedding import HostEmbedding, row_optimizer
from dphybrid.embedding.snapshot import Snapshot
from dphybrid.training.checkpoint import Progress, Trained, complete_checkpoints
from dphybrid.training.saving import CheckpointWriter
from dphybrid.training.tensor_file import read_table
from tests.refusing import refused

ROWS, DIM = 400, 5


def held(rows: torch.optim.Optimizer, name: str, table: HostEmbedding) -> dict[str, torch.Tensor]:
    return {"weight": table.weight.detach(), **rows.row_states(name)}  # type: ignore[attr-defined]


def step(rows: torch.optim.Optimizer, table: HostEmbedding, seed: int) -> None:
    ids = torch.randint(0, ROWS, (30,), generator=torch.Generator().manual_seed(seed))
    rows.zero_grad()
    table(ids).square().sum().backward()
    rows.step()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["sgd", "adam", "adamw"])
def test_slices_and_updates_may_take_turns_in_any_way(kind: str, seed: int) -> None:
    draw, table = random.Random(seed), HostEmbedding(ROWS, DIM, seed=1)
    rows = row_optimizer(kind, {"t": table, "other": HostEmbedding(9, DIM, seed=2)}, lr=0.1)
    step(rows, table, 99)
    expected = {key: tensor.clone() for key, tensor in held(rows, "t", table).items()}
    rows.snapshot = snapshot = Snapshot({"t": held(rows, "t", table)}, 10**9)
    for key, stand_in in sorted(snapshot.tensors("t").items()):
        found, size = [], draw.randint(1, 140)
        for start in range(0, ROWS, size):
            if draw.random() < 0.5:
                step(rows, table, draw.randrange(10**6))
            found.append(stand_in[start : min(start + size, ROWS)])
        assert torch.equal(torch.cat(found), expected[key]), key
    assert not torch.equal(table.weight, expected["weight"])
    snapshot.check()
    with torch.no_grad():
        table.weight.add_(1.0)
    with refused("table 't': was changed by something other than its optimizer"):
        snapshot.check()


def trained() -> Trained:
    model = nn.ModuleDict({"words": HostEmbedding(ROWS, DIM, seed=1)})
    return Trained(model, None, row_optimizer("adam", model, lr=0.1), Progress(step=1))


def test_a_checkpoint_holds_what_was_there_when_it_was_asked_for(tmp_path: Path) -> None:
    one, may_write = trained(), threading.Event()
    table = one.model["words"]
    assert one.rows is not None
    step(one.rows, table, 1)
    expected = {key: tensor.clone() for key, tensor in held(one.rows, "words", table).items()}
    with CheckpointWriter(tmp_path, one) as writer:
        path = writer.save({}, {}, first=may_write.wait)
        for seed in range(20):
            step(one.rows, table, seed)
        may_write.set()
        writer.wait()
        assert one.rows.snapshot is None
        for key, tensor in expected.items():
            read = torch.zeros_like(tensor)
            read_table(path, "words", key, read)
            assert torch.equal(read, tensor), key


def test_an_update_that_would_take_too_much_memory_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dphybrid.training.saving.available_memory_bytes", lambda: 100)
    one, may_write, done = trained(), threading.Event(), threading.Event()
    table = one.model["words"]
    assert one.rows is not None
    before = table.weight.detach().clone()
    with CheckpointWriter(tmp_path, one) as writer:
        path = writer.save({}, {}, first=may_write.wait)
        thread = threading.Thread(target=lambda: (step(one.rows, table, 1), done.set()))  # type: ignore[arg-type]
        thread.start()
        assert not done.wait(0.2)
        may_write.set()
        writer.wait()
        assert done.wait(30)
    read = torch.zeros_like(before)
    read_table(path, "words", "weight", read)
    assert torch.equal(read, before)


def test_a_table_that_is_also_changed_by_hand_is_copied_first(tmp_path: Path) -> None:
    one, may_write = trained(), threading.Event()
    table = one.model["words"]
    with CheckpointWriter(tmp_path, one) as writer, torch.no_grad():
        table.weight.mul_(0.5)
        before = table.weight.detach().clone()
        path = writer.save({}, {}, first=may_write.wait)
        table.weight.zero_()
        may_write.set()
        writer.wait()
    assert complete_checkpoints(tmp_path) == [path]
    read = torch.zeros_like(before)
    read_table(path, "words", "weight", read)
    assert torch.equal(read, before)
