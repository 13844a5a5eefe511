"""The record of a run: in order, whole after a kill; a damaged line costs itself alone."""

import errno
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dphybrid.tracking import open_tracker
from dphybrid.tracking.copier import Copier
from dphybrid.tracking.record import (
    RecordFile,
    Sent,
    destination,
    last_status,
    metrics_of,
    of_metrics,
    read,
    waits,
)
from tests.disks import files_of_at_most


def written(folder: Path, steps: int = 6) -> RecordFile:
    record = RecordFile(folder)
    for step in range(steps):
        record.append(of_metrics({"train/loss": 1 / (step + 1)}, step))
    record.close()
    return record


def steps_of(folder: Path, offset: int = 0) -> list[Any]:
    return [line and line.get("step", line["op"]) for line, _ in read(folder, offset)]


def copied(folder: Path) -> list[Any]:
    """Return the steps that a copier sends, and what it tells."""
    got = list[dict[str, Any]]()
    told = Copier(folder, got.extend).finish(20)
    return [*(line.get("step", line["op"]) for line in got), told]


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
    assert not waits(path.parent)


def test_lines_are_read_from_any_offset_on_and_metrics_keep_their_names(tmp_path: Path) -> None:
    record = written(tmp_path)
    lines = list(read(tmp_path))
    assert steps_of(tmp_path, lines[2][1]) == [3, 4, 5]
    assert metrics_of(lines[2][0]) == {"train/loss": 1 / 3}
    begin = lines[-1][1]
    end = record.append({"op": "tags", "values": {"\udc80": "x"}})  # no valid Unicode
    assert [(line["values"], at) for line, at in read(tmp_path, begin)] == [({"?": "x"}, end)]
    record.append({"op": "status", "status": "FAILED"})
    record.append({"op": "tags", "values": {}})
    assert last_status(tmp_path) == "FAILED"


def test_a_record_waits_until_it_is_copied(tmp_path: Path) -> None:
    record = written(tmp_path, 0)
    record.append({"op": "run", "run_id": "7", "experiment_id": "1", "tracking_uri": "sqlite://"})
    assert waits(tmp_path)
    assert not waits(tmp_path / "removed")
    assert destination(tmp_path)["run_id"] == "7"
    assert {path.name for path in tmp_path.iterdir()} == {"record.jsonl"}  # no lock is left
    assert copied(tmp_path) == ["run", ""]
    assert not waits(tmp_path)


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
        there = steps_of(folder) if (folder / "record.jsonl").exists() else []
        assert there == list(range(len(there)))
        assert len(there) > told


@pytest.mark.parametrize(
    "line",
    [b'{"op":"metrics","t":1\n', b"\xff\x00\n", b"\n", b"7\n", b"[" * 100_000 + b"\n", b'{"op":1,"t":1}\n'],
)
@pytest.mark.parametrize("place", [0, 1, 5])
def test_a_damaged_line_costs_itself(tmp_path: Path, line: bytes, place: int) -> None:
    record = written(tmp_path)
    lines = record.path.read_bytes().splitlines(keepends=True)
    lines[place] = line
    record.path.write_bytes(b"".join(lines))
    assert steps_of(tmp_path) == [None if n == place else n for n in range(6)]
    assert copied(tmp_path) == [
        *(n for n in range(6) if n != place),
        "MLflow lacks 1 line of the record (damaged)",
    ]


def test_a_line_that_a_crash_cut_off_is_removed(tmp_path: Path) -> None:
    record = written(tmp_path)
    record.path.write_bytes(record.path.read_bytes()[:-9])
    record.append(of_metrics({"train/loss": 0.0}, 6))
    assert steps_of(tmp_path) == [0, 1, 2, 3, 4, 6]


@pytest.mark.parametrize(
    "page", [b"", b"{", b"null", b'{"offset": -1}', b"\xff", b'{"offset": "x"}', b'{"offset": 9999}']
)
def test_a_damaged_page_of_what_was_sent_sends_all_again(tmp_path: Path, page: bytes) -> None:
    record = written(tmp_path)
    assert copied(tmp_path) == [*range(6), ""]
    assert Sent.read(tmp_path) == Sent(record.path.stat().st_size)
    (tmp_path / "record.sent").write_bytes(page)
    assert copied(tmp_path) == [*range(6), ""]
    assert copied(tmp_path) == [""]


def test_a_full_disk_costs_lines_of_metrics_and_no_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = open_tracker("files", "x", tmp_path)
    tracker.start("run", {}, {}, "")
    record = RecordFile(tmp_path / "runs" / "run")
    with files_of_at_most(record.path.stat().st_size + 50):
        for step in (1, 2):
            tracker.log_metrics({f"name {i}": 1.0 for i in range(500)}, step)
        with pytest.raises(OSError, match=r"record\.jsonl") as error:
            tracker.set_tags({"long": "x" * 500})
        assert error.value.errno in (errno.EFBIG, errno.ENOSPC)
    tracker.log_metrics({"a": 2.0}, 3)
    tracker.finish("FINISHED")
    assert steps_of(record.folder) == ["run", "params", "tags", 3, "status"]
    assert [message.partition(":")[0] for message in caplog.messages] == ["metrics cannot be recorded"]


def test_what_must_outlive_a_loss_of_power_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = list[int]()
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.fstat(handle).st_size))
    record = written(tmp_path)
    assert synced == []
    record.sync()
    end = record.append({"op": "tags", "values": {}}, sync=True)
    assert synced[0] < synced[1] == end
