"""Checkpoints of changed rows have the bits of whole ones, whatever is removed, edited or fails meanwhile."""

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dphybrid
from dphybrid.config import CheckpointConfig
from dphybrid.config.settings import load_settings
from dphybrid.embedding import HostEmbedding, find_tables, row_optimizer
from dphybrid.run.experiment import Experiment
from dphybrid.run.folder import read_run
from dphybrid.run.job import evaluate_run
from dphybrid.serving.load import load_model, model_from_checkpoint
from dphybrid.tracking.loader import checkpoint_folder
from dphybrid.training.checkpoint import (
    Progress,
    Trained,
    complete_checkpoints,
    load_checkpoint,
    newest_whole_checkpoint,
    read_state,
    verify_checkpoint,
)
from dphybrid.training.engine import Session
from dphybrid.training.saving import CheckpointWriter, prune_checkpoints
from dphybrid.training.tensor_file import read_tensors, table_file, write_tensors
from dphybrid.util.errors import UserError
from dphybrid.util.stop import Interrupted
from tests.commands import models_of, run_with
from tests.refusing import refused
from tests.reliability.test_faults import CLICKS
from tests.training.saving import save_checkpoint
from tests.training.stopping import stopping_after


class Tables(nn.Module):
    """Three tables, two of which are updated together, of two types."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.words = HostEmbedding(300, 4, name="words", **options, seed=0)
        self.rounded = HostEmbedding(200, 8, dtype=torch.bfloat16, name="rounded", **options, seed=0)
        self.columns = HostEmbedding(140, 4, **options)
        self.linear = nn.Linear(16, 1)


def new(optimizer: str, **options: Any) -> Trained:
    torch.manual_seed(0)
    model = Tables(**options)
    dense = torch.optim.AdamW(model.linear.parameters())
    return Trained(model, dense, row_optimizer(optimizer, model, lr=0.1), Progress())


def step(trained: Trained, count: int = 6) -> None:
    """Take a step that is a function of its number alone."""
    model, random = trained.model, torch.Generator().manual_seed(trained.progress.step)
    trained.dense.zero_grad()
    trained.rows.zero_grad()
    rows = [
        model.words(torch.randint(300, (count,), generator=random)),
        model.rounded(torch.randint(200, (count,), generator=random)),
        model.columns(torch.randint(140, (count,), generator=random)),
    ]
    model.linear(torch.cat(rows, 1)).square().sum().backward()
    trained.dense.step()
    trained.rows.step()
    trained.progress.step += 1


def everything(trained: Trained) -> dict[str, Tensor]:
    moments = {f"{i}.{k}": v for i, s in trained.dense.state_dict()["state"].items() for k, v in s.items()}
    return trained.model.state_dict() | trained.rows.states() | moments


def loaded(path: Path, optimizer: str) -> Trained:
    fresh = new(optimizer)
    verify_checkpoint(path)
    load_checkpoint(path, fresh)
    return fresh


@pytest.mark.parametrize(("optimizer", "storage"), [("adam", "mmap"), ("adamw", "memory"), ("sgd", "memory")])
def test_each_checkpoint_has_the_bits_of_a_whole_one(optimizer: str, storage: str, tmp_path: Path) -> None:
    options = {} if storage == "memory" else {"path": tmp_path}
    trained, kinds = new(optimizer, **options), []
    with CheckpointWriter(tmp_path / "changed", trained, full_every=3) as writer:
        for _ in range(8):
            path = writer.save({}, {})
            expected = {key: value.clone() for key, value in everything(trained).items()}
            step(trained)  # while it is being written
            writer.wait()
            found = loaded(path, optimizer)
            torch.testing.assert_close(everything(found), expected, rtol=0, atol=0)
            page = read_state(path)
            kinds.append(page.since_full)
            assert (page.since_full == 0) == (not (path / "changed").exists())
            if not page.since_full:
                whole = read_state(save_checkpoint(tmp_path / "whole", found, {}, {}))
                assert whole.digests == page.digests
                assert len([name for name in page.digests if name.startswith("tables/")]) == 3
    assert kinds == [0, 1, 2, 0, 1, 2, 0, 1]


def test_a_resumed_training_writes_the_files_that_the_unbroken_one_writes(tmp_path: Path) -> None:
    def train(folder: Path, trained: Trained, steps: int, resume: bool = False) -> None:
        with CheckpointWriter(folder, trained, full_every=4) as writer:
            if resume:
                done = newest_whole_checkpoint(folder)
                writer.resumed(done, load_checkpoint(done, trained))
            while trained.progress.step < steps:
                step(trained)
                writer.save({}, {})
                writer.wait()

    train(tmp_path / "unbroken", new("adam"), 9)
    for steps in (2, 3, 5, 9):  # each time in new tensors
        train(tmp_path / "broken", new("adam"), steps, resume=steps > 2)
    unbroken, broken = (complete_checkpoints(tmp_path / name) for name in ("unbroken", "broken"))
    assert [read_state(path).digests for path in broken] == [read_state(path).digests for path in unbroken]
    assert [read_state(path).since_full for path in broken] == [0, 1, 2, 3, 0, 1, 2, 3, 0]


def test_a_checkpoint_needs_no_other_folder_and_another_full_one_stays(tmp_path: Path) -> None:
    trained = new("adam")
    config = CheckpointConfig(keep_last=2)
    kept = []
    with CheckpointWriter(tmp_path, trained, full_every=4) as writer:
        for _ in range(10):
            step(trained)
            path = writer.save({}, {}, then=lambda _: kept.append(prune_checkpoints(tmp_path, config, [])))
    assert [[int(path.name[-2:]) for path in paths] for paths in kept] == [
        [1], [1, 2], [2, 3], [3, 4], [4, 5], [4, 5, 6], [4, 6, 7], [4, 7, 8], [8, 9], [8, 9, 10],
    ]  # fmt: skip
    torch.testing.assert_close(everything(loaded(path, "adam")), everything(trained), rtol=0, atol=0)
    assert not (tmp_path / "step-000005").exists()
    with (path / "tables" / "words.safetensors").open("r+b") as file:  # the file that the last two share
        file.seek(500)
        file.write(b"?")
    for shared in kept[-1][1:]:
        with refused(r"words.safetensors: is damaged"):
            verify_checkpoint(shared)
    assert newest_whole_checkpoint(tmp_path) == tmp_path / "step-000008"


CHANGES: dict[str, Callable[[Trained], object]] = {
    "by hand": lambda trained: trained.model.words.weight.detach().index_fill_(0, torch.tensor([299]), 7.0),
    "loaded again": lambda trained: trained.model.load_state_dict(new("adam").model.state_dict()),
    "most rows": lambda trained: step(trained, 400),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_no_update_has_changed_or_is_too_much_is_written_whole(change: str, tmp_path: Path) -> None:
    trained = new("adam")
    with CheckpointWriter(tmp_path, trained, full_every=5) as writer:
        for number, since_full in enumerate((0, 1, 0, 1)):
            if number == 2:
                CHANGES[change](trained)
            step(trained)
            path = writer.save({}, {})
            writer.wait()
            assert read_state(path).since_full == since_full
            torch.testing.assert_close(everything(loaded(path, "adam")), everything(trained), rtol=0, atol=0)


def test_without_links_memory_or_the_folder_before_all_rows_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    trained = new("adam")
    with CheckpointWriter(tmp_path, trained, full_every=5) as writer:
        for number in range(5):
            step(trained)
            if number == 2:
                shutil.rmtree(tmp_path / "step-000002")
            elif number == 3:
                monkeypatch.setattr("dphybrid.training.saving.available_memory_bytes", lambda: 1)
            path = writer.save({}, {})
            writer.wait()
            assert (path / "changed").is_dir() == (number == 1)
            assert (path / "tables" / "words.safetensors").stat().st_nlink == 1
            torch.testing.assert_close(everything(loaded(path, "adam")), everything(trained), rtol=0, atol=0)


OPTIONS = ["recipe=ctr", f"data.path={CLICKS}", "data.label=clicked", "data.categorical=age"]
OPTIONS += ["data.min_count=1", "devices=cpu*2"]
OPTIONS += ["model.dim=2", "model.hidden=4", "model.layers=1", "train.batch_size=4", "train.epochs=2"]
OPTIONS += ["train.clip_norm=0", "table.optimizer=adagrad", "checkpoint.full_every=100"]
OPTIONS += ["checkpoint.keep_last=1000", "checkpoint.every_steps=3"]


def test_all_that_reads_checkpoints_reads_changed_rows(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dphybrid.training.saving._MOST_CHANGED", 1.0)  # the table is small
    report = run_with(*OPTIONS, run_name="run")
    folder = Path(report.best_checkpoint)
    assert read_state(folder).since_full
    whole = load_model("run")
    verify_checkpoint(folder)
    (table,) = find_tables(whole).values()
    base = read_tensors(table_file(folder, "table"))["weight"]
    assert not torch.equal(table.weight, base)
    mapped = next(iter(find_tables(model_from_checkpoint(folder, mapped=True)).values()))
    assert torch.equal(mapped.weight, table.weight)
    mapped.weight.detach()[:] = 0.0
    verify_checkpoint(folder)  # the mapped rows that were overwritten are a copy
    rows = {"age": [20, 45, 80], "city": ["a", "b", "elsewhere"]}
    predicted = dphybrid.load("run").predict(rows)
    (best,) = [model for model in models_of(report) if model.tags["dphybrid.role"].startswith("best")]
    shutil.rmtree(folder.parent)
    assert dphybrid.load(f"models:/{best.model_id}").predict(rows).tolist() == predicted.tolist()
    warm = checkpoint_folder(f"models:/{best.model_id}", report.tracking_uri)
    monkeypatch.setattr("dphybrid.run.trainer.train", lambda session, *_: started.append(session))
    started: list[Session] = []
    with pytest.raises(UserError):  # not trained: there is no checkpoint
        run_with(*OPTIONS, f"train.warm_start={warm}", run_name="warm")
    assert torch.equal(find_tables(started[0].trained.model)["table"].weight, table.weight)


def test_a_failed_writing_ends_the_training_and_a_stop_waits(
    data_dir: Path, unrecorded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_disk = OSError(errno.ENOSPC, "No space left on device")

    def write(path: Path, *given: Any) -> str:
        if threading.current_thread() is not threading.main_thread() and "000006" in str(path):
            raise full_disk
        return write_tensors(path, *given)

    monkeypatch.setattr("dphybrid.training.saving.write_tensors", write)
    with refused("No space left on device; make room on its disk.*--resume"):
        run_with(*OPTIONS, run_name="run")
    folder = data_dir / "runs" / "run" / "checkpoints"
    assert [path.name for path in complete_checkpoints(folder)] == ["step-000003"]

    def slowly(path: Path, *given: Any) -> str:
        time.sleep(0.2)
        return write_tensors(path, *given)

    # And a stop waits for the checkpoint that it names.
    monkeypatch.setattr("dphybrid.training.saving.write_tensors", slowly)
    with stopping_after(5) as stop, pytest.raises(Interrupted, match="--resume continues from .*step-000005"):
        run_with(*OPTIONS, resume="run", stop=stop)
    verify_checkpoint(folder / "step-000005")


def test_a_damaged_best_checkpoint_is_named_with_what_takes_its_place(
    data_dir: Path, unrecorded: None
) -> None:
    settings, tags = load_settings(), {"team": "a"}
    report = run_with(*OPTIONS, run_name="run", tags=tags)
    best, folder = Path(report.best_checkpoint), data_dir / "runs" / "run"
    (best / "blocks.safetensors").write_bytes(b"")
    run = read_run(folder, settings)
    remedy = rf"blocks.safetensors: is damaged .*; remove {best} and run again with --resume run"
    with refused(remedy):
        evaluate_run(Experiment.of(run))
    shutil.rmtree(best)
    again = run_with(*OPTIONS, resume="run", tags={"by": "hand"})
    verify_checkpoint(Path(again.best_checkpoint))
    assert read_run(folder, settings).page.tags == {"team": "a", "by": "hand"}


def test_a_frozen_table_is_written_once_and_linked_by_later_checkpoints(tmp_path: Path) -> None:
    def made() -> Trained:
        model = nn.ModuleDict({name: HostEmbedding(50, 4, name=name, seed=1) for name in ("big", "small")})
        model["big"].weight.requires_grad_(False)
        return Trained(model, None, row_optimizer("adam", model, lr=0.1), Progress())

    def step(trained: Trained) -> None:
        trained.model["small"](torch.tensor([1, 2])).sum().backward()  # type: ignore[index, operator]
        assert trained.rows is not None
        trained.rows.step()
        trained.progress.step += 1

    def inodes(name: str) -> list[int]:
        return [table_file(path, name).stat().st_ino for path in complete_checkpoints(tmp_path)]

    trained = made()
    with CheckpointWriter(tmp_path, trained) as writer:
        for _ in range(2):
            step(trained)
            latest = writer.save({}, {})
    again = made()
    with CheckpointWriter(tmp_path, again) as writer:
        writer.resumed(latest, load_checkpoint(latest, again))
        step(again)
        writer.save({}, {})
        writer.wait()
        assert len(set(inodes("big"))) == 1
        assert len(set(inodes("small"))) == 3
        with torch.no_grad():
            again.model["big"].weight[3] = 7.0  # type: ignore[index, union-attr]
        step(again)
        latest = writer.save({}, {})
    assert list(read_tensors(table_file(latest, "big"))) == ["weight"]
    assert len(set(inodes("big"))) == 2
    verify_checkpoint(latest)
    loaded = made()
    load_checkpoint(latest, loaded)
    for name in ("big", "small"):
        assert torch.equal(loaded.model[name].weight, again.model[name].weight)  # type: ignore[index, union-attr]


def test_a_table_that_is_thawed_between_full_checkpoints_is_written_whole(tmp_path: Path) -> None:
    def made(frozen: bool) -> Trained:
        model = nn.ModuleDict({"words": HostEmbedding(300, 4, seed=1, freeze=frozen)})
        return Trained(model, None, row_optimizer("adam", model, lr=0.1), Progress())

    trained = made(frozen=True)
    with CheckpointWriter(tmp_path, trained, full_every=9) as writer:
        writer.save({}, {})
        words, rows = trained.model.get_submodule("words"), trained.rows
        words.weight.requires_grad_(True)  # type: ignore[operator, union-attr]
        for _ in range(2):
            words(torch.tensor([1, 2])).sum().backward()
            assert rows is not None
            rows.step()
            trained.progress.step += 1
            latest = writer.save({}, {})
    loaded = made(frozen=False)
    load_checkpoint(latest, loaded)
    assert loaded.rows is not None
    assert rows is not None
    for name, state in rows.states().items():
        assert torch.equal(loaded.rows.states()[name], state), name
