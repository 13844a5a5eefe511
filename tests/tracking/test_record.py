"""The record of a run: in order, exactly once; a damaged line costs itself alone."""

import errno
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dphybrid.tracking import open_tracker, waiting
from dphybrid.tracking.record import DAMAGED, Losses, RecordFile, Sent, metrics_of, of_metrics, records
from dphybrid.tracking.sender import Sender
from dphybrid.util.locks import FileLock
from tests.disks import files_of_at_most


def written(folder: Path, steps: int = 6) -> RecordFile:
    record = RecordFile(folder)
    for step in range(steps):
        record.append(of_metrics({"train/loss": 1 / (step + 1)}, step))
    record.release()
    return record


def steps_of(found: list[dict[str, Any]]) -> list[Any]:
    return [record.get("step", record["op"]) for record in found]


def test_pandas_reads_a_record_and_numbers_are_exact(tmp_path: Path) -> None:
    import pandas

    tracker = open_tracker("files", "x", tmp_path)
    assert tracker.start("run", {"train.lr": "0.1"}, {}, "") == "run"
    tracker.log_metrics({"a": np.float32(0.5), "b": torch.tensor(1 / 3, dtype=torch.float64), "step": 7.0}, 1)
    tracker.log_metrics({"a": float("nan"), "b": float("inf"), "größe": -0.0}, 2)
    tracker.log_summary({"final_a": np.float32(0.25)})
    tracker.finish("FINISHED")
    path = tmp_path / "runs" / "run" / "record.jsonl"
    table = pandas.read_json(path, lines=True, precise_float=True)
    assert table["op"].tolist() == ["run", "params", "tags", "metrics", "metrics", "summary", "status"]
    metrics = table[table["op"] == "metrics"].set_index("step")
    assert metrics.loc[1, ["a", "b", "metric/step"]].tolist() == [0.5, 1 / 3, 7.0]
    assert np.isnan(metrics.loc[2, "a"])
    assert metrics.loc[2, "b"] == np.inf
    assert table["final_a"].dropna().tolist() == [0.25]
    assert {file.name for file in path.parent.iterdir()} == {"record.jsonl"}
    assert path.stat().st_mode & 0o077 == 0
    assert waiting(tmp_path / "runs") == 0


def test_records_are_read_from_any_line_on_and_metrics_keep_their_names(tmp_path: Path) -> None:
    record = written(tmp_path)
    first = record.read(0, 3)
    assert steps_of(first) == [0, 1, 2]
    assert steps_of(record.read(first[-1]["end"], 10)) == [3, 4, 5]
    assert metrics_of(first[2]) == {"train/loss": 1 / 3}
    record.append({"op": "tags", "values": {"\udc80": "x"}})  # no valid Unicode
    assert record.read(record.read(0, 9)[-1]["n"], 1)[0]["values"] == {"?": "x"}


@pytest.mark.parametrize("sent", [False, True])
def test_a_later_attempt_records_no_step_twice(tmp_path: Path, sent: bool) -> None:
    tracker = open_tracker("files", "x", tmp_path)
    tracker.start("run", {}, {}, "")
    for step in (20, 40, 60):
        tracker.log_metrics({"loss": 1.0, "fine": 2.0} if step > 20 else {"loss": 1.0}, step)
    tracker.close()
    record = RecordFile(tmp_path / "runs" / "run")
    if sent:
        assert Sender(record, lambda _: None).close(20)
    tracker = open_tracker("files", "x", tmp_path)
    tracker.resume("run", {})
    for step in (40, 60, 80):
        tracker.log_metrics({"loss": 1.5, "fine": 2.0, "new": 3.0}, step)
        tracker.log_metrics({"new": 4.0}, step)  # one attempt may do so
    tracker.log_summary({"loss": 1.0})
    tracker.finish("FINISHED")
    points = [(name, r["step"]) for r in record.all() if r["op"] == "metrics" for name in metrics_of(r)]
    for name, steps in (
        ("loss", [20, 40, 60, 80]),
        ("fine", [40, 60, 80]),
        ("new", [40, 40, 60, 60, 80, 80]),
    ):
        assert [step for found, step in points if found == name] == steps
    assert [r["loss"] for r in record.all() if r["op"] == "summary"] == [1.0]


def test_one_at_a_time_sends(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    one = RecordFile(runs / "run")
    one.folder.mkdir(parents=True)
    one.append({"op": "run", "run_id": "7", "experiment_id": "1", "tracking_uri": "sqlite://"})
    two = RecordFile(runs / "run")
    assert one.hold()
    assert not two.hold()
    assert waiting(runs) == 0  # somebody is at it
    one.release()
    assert two.hold()
    two.release()
    assert waiting(runs) == 1
    assert [record.destination()["run_id"] for record in records(runs)] == ["7"]
    assert {path.name for path in (runs / "run").iterdir()} == {"record.jsonl"}  # no lock is left


def test_what_a_killed_process_appended_is_there(tmp_path: Path) -> None:
    for trial in range(5):
        folder = tmp_path / str(trial)
        folder.mkdir()
        if (child := os.fork()) == 0:
            record = RecordFile(folder)
            for step in range(1_000_000):
                record.append(of_metrics({"loss": 1.0}, step))
                (folder / "told").write_text(str(step))
        time.sleep(0.1 + trial / 50)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        told = int((folder / "told").read_text() or 0) if (folder / "told").exists() else -1
        there = steps_of(list(RecordFile(folder).all()) if (folder / "record.jsonl").exists() else [])
        assert there == list(range(len(there)))
        assert len(there) > told


def lines_of(record: RecordFile) -> list[bytes]:
    return record.path.read_bytes().splitlines(keepends=True)


@pytest.mark.parametrize(
    "damage",
    [
        lambda line: line.replace(b'"train/loss":0.5', b'"train/loss":0.6'),  # still JSON
        lambda line: line[:20] + b"\n",
        lambda line: b"\xff\x00" * 9 + b"\n",
        lambda line: b"\n",
        lambda line: b"7\n",
        lambda line: b"[" * 100_000 + b"\n",
    ],
)
@pytest.mark.parametrize("place", [0, 1, 5])
def test_a_damaged_line_costs_itself_and_is_counted(tmp_path: Path, damage: Any, place: int) -> None:
    record, got = written(tmp_path), list[dict[str, Any]]()
    lines = lines_of(record)
    lines[place] = damage(lines[1])
    record.path.write_bytes(b"".join(lines))
    assert steps_of(record.read(0, 9)) == [DAMAGED if n == place else n for n in range(6)]
    assert Sender(record, got.extend).deliver(20) == (True, Losses(damaged=1))
    assert steps_of(got) == [*(n for n in range(6) if n != place), "losses", "whole"]
    assert got[-2]["text"] == "1 record damaged on the disk"


def test_a_line_that_a_crash_cut_off_costs_none_of_those_after_it(tmp_path: Path) -> None:
    record, got = written(tmp_path), list[dict[str, Any]]()
    record.path.write_bytes(record.path.read_bytes()[:-9] + bytes(100))  # as after a power loss
    record.append(of_metrics({"train/loss": 0.0}, 6))
    assert Sender(record, got.extend).deliver(20) == (True, Losses(damaged=1))
    assert steps_of(got) == [0, 1, 2, 3, 4, 6, "losses", "whole"]


@pytest.mark.parametrize("page", [b"", b"{", b"null", b'{"offset": -1}', b"\xff", b'{"offset": "x"}'])
def test_a_damaged_page_of_what_was_sent_sends_all_again(tmp_path: Path, page: bytes) -> None:
    record, got = written(tmp_path), list[dict[str, Any]]()
    assert Sender(record, lambda _: None).close(20)
    assert record.sent() == Sent(offset=record.size)
    (tmp_path / "record.sent").write_bytes(page)
    assert Sender(record, got.extend).close(20)
    assert steps_of(got) == list(range(6))
    assert record.sent().offset == record.size


def test_a_full_disk_costs_lines_of_metrics_that_are_counted(tmp_path: Path) -> None:
    record, got = written(tmp_path, 1), list[dict[str, Any]]()
    with files_of_at_most(record.size + 50):
        for _ in range(2):
            with pytest.raises(OSError, match=r"record\.jsonl") as error:
                record.append(of_metrics({"long": 1.0, **{f"name {i}": 1.0 for i in range(500)}}, 1))
            assert error.value.errno in (errno.EFBIG, errno.ENOSPC)
            record.count_unkept()
    record.append(of_metrics({"a": 2.0}, 2))
    record.release()
    assert Sender(record, got.extend).deliver(20) == (True, Losses(unkept=2))
    assert steps_of(got) == [0, 2, "losses", "whole"]
    assert "2 records not written down" in got[-2]["text"]


def test_what_must_outlive_a_loss_of_power_is_synced_and_a_step_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = list[int]()
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.fstat(handle).st_size))
    record = written(tmp_path)
    assert synced == []
    record.sync()
    record.append({"op": "tags", "values": {}}, sync=True)
    assert synced[0] < synced[1] == record.size


def test_a_record_is_small_when_it_has_arrived_and_goes_on_when_its_run_does(tmp_path: Path) -> None:
    record, got = written(tmp_path), list[dict[str, Any]]()
    assert Sender(record, got.extend).deliver(20) == (True, Losses())
    assert record.sent() == Sent(offset=record.size, closed=True)
    held = FileLock(record.path)
    assert held.acquire()  # nobody else holds it
    held.release()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 1000
    record.append(of_metrics({"train/loss": 0.1}, 7))
    assert Sender(record, got.extend).close(20)
    assert not record.sent().closed
    assert steps_of(got) == [*range(6), "whole", 7]
