"""The outbox of a run: in order, exactly once; a damaged file is set aside and said."""

import errno
import os
import shutil
import signal
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dphybrid.tracking.base import as_floats
from dphybrid.tracking.outbox import Losses, Outbox, outboxes, waiting
from dphybrid.tracking.sender import Sender
from tests.commands import python

Record = dict[str, Any]


def test_records_come_back_in_order_until_they_have_arrived(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path, "r")
    for number in range(5):
        outbox.append({"op": "tags", "values": {"n": number}}, content=b"%d" % number)
    first = outbox.pending(3)
    assert [record["values"]["n"] for record in first] == [0, 1, 2]
    outbox.remove(first)
    outbox.release()
    again = Outbox(tmp_path, "r")  # another process, later
    assert [(record["values"]["n"], record["content"]) for record in again.pending(10)] == [
        (3, b"3"),
        (4, b"4"),
    ]
    assert again.append({"op": "tags"}) == first[0]["n"] + 5  # no number comes twice


def test_a_name_that_is_not_unicode_costs_no_records(tmp_path: Path) -> None:
    outbox, metrics = Outbox(tmp_path, "r"), {"valid/\udc80": 1}
    outbox.append({"op": "tags"})
    with pytest.raises(UnicodeEncodeError):
        outbox.append_metrics(metrics, 1)
    assert not outbox.losses()  # the file is whole
    outbox.append_metrics(as_floats(metrics), 1)
    assert [record.get("values") for record in outbox.pending(9)] == [None, {"valid/?": 1.0}]


@pytest.mark.parametrize("sent", [False, True])
def test_a_later_attempt_records_no_step_twice(tmp_path: Path, sent: bool) -> None:
    earlier = Outbox(tmp_path, "r")
    for step in (20, 40, 60):
        earlier.append_metrics({"loss": 1.0, "fine": 2.0} if step > 20 else {"loss": 1.0}, step, ["fine"])
    if sent:
        earlier.remove(earlier.pending(100))
    earlier.release()
    later = Outbox(tmp_path, "r")
    for step in (40, 60, 80):
        later.append_metrics({"loss": 1.0, "fine": 2.0, "new": 3.0}, step, ["fine"])
        later.append_metrics({"new": 4.0}, step)  # one attempt may do so
    points = [(name, r["step"]) for r in later.pending(100) for name in r["values"]]
    assert [step for name, step in points if name == "loss"] == [80] if sent else [20, 40, 60, 80]
    assert [step for name, step in points if name == "new"] == [40, 40, 60, 60, 80, 80]
    later.append_metrics({"loss": 1.0}, 0, anew=True)
    later.pack_details()
    *_, summary, details = later.pending(100)
    assert (summary["step"], details["folder"]) == (0, "details/from-step-000040")
    rows = details["content"].decode().splitlines()
    assert [row.split(",")[1:] for row in rows[1:]] == [[str(s), "fine", "2.0"] for s in (40, 60, 80)]


def test_what_was_refused_is_offered_again(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path, "r")
    for number, op in enumerate(("tags", "file", "params")):
        outbox.append({"op": op, "values": {"n": number}}, content=b"x")
    for record in outbox.pending(2):
        outbox.refuse(record, "no")
    assert outbox.counts() == (1, 2)
    outbox.remove(outbox.pending(9))
    outbox.offer_again(["file", "params"])
    again, losses = outbox.pending(9)
    assert (again["op"], again["values"], again["content"]) == ("file", {"n": 1}, b"x")
    assert losses["text"] == ""  # what the run's page says of it
    assert outbox.losses() == Losses(refused=1)


def test_only_one_at_a_time_sends_from_files_that_are_the_owners_alone(tmp_path: Path) -> None:
    folder = tmp_path / "spool"
    one, two = Outbox(folder, "r"), Outbox(folder, "r")
    one.set_destination(tracking_uri="sqlite://", experiment_id="1")
    one.append({"op": "tags", "values": {}})
    assert one.hold()
    assert not two.hold()
    assert folder.stat().st_mode & 0o077 == 0
    assert {path.suffix for path in folder.iterdir()} == {".db", ".db-wal", ".db-shm", ".lock"}
    assert [path.name for path in folder.iterdir() if path.stat().st_mode & 0o077] == []
    assert waiting(folder) == 0  # somebody is at it
    one.release()
    assert two.hold()
    two.release()
    assert waiting(folder) == 1
    assert [outbox.run_id for outbox in outboxes(folder)] == ["r"]
    assert two.destination() == {"tracking_uri": "sqlite://", "experiment_id": "1"}


def test_what_a_killed_process_appended_is_there(tmp_path: Path) -> None:
    for trial in range(5):
        folder = tmp_path / str(trial)
        if (child := os.fork()) == 0:
            outbox = Outbox(folder, "r")
            for step in range(1_000_000):
                outbox.append_metrics({"loss": 1.0}, step)
                (folder / "told").write_text(str(step))
        time.sleep(0.1 + trial / 50)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        told = int((folder / "told").read_text() or 0) if (folder / "told").exists() else -1
        outbox = Outbox(folder, "r")
        there = [record["step"] for record in outbox.pending(1_000_000)]
        assert there == list(range(len(there)))
        assert len(there) > told
        assert not outbox.losses()


def zero_pages(content: bytes) -> bytes:
    return content[:4096] + bytes(8192) + content[12288:]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "no database": lambda content: b"no database" * 1000,
    "cut off": lambda content: content[:6000],
    "zeros": zero_pages,
    "a flipped byte of a text": lambda content: content.replace(b'"values"', b'"val\xffes"'),
    "another version": lambda content: content[:63] + b"\x01" + content[64:],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_set_aside_and_the_run_goes_on(tmp_path: Path, damage: str) -> None:
    outbox, path, got = Outbox(tmp_path, "r"), tmp_path / "r.db", list[Record]()
    for step in range(200):
        outbox.append_metrics({"train/loss": 1.0}, step)
    on_their_way = outbox.pending(200)
    outbox.release()
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    outbox.append_metrics({"train/loss": 0.5}, 200)
    outbox.remove(on_their_way)  # of the earlier file
    arrived, losses = Sender(outbox, got.extend).deliver(20)
    assert arrived
    assert got
    if damage == "a flipped byte of a text":  # which SQLite does not see, and MLflow's writer refuses
        assert not losses
        return
    aside = tmp_path / "r.damaged-1.db"
    assert losses == Losses(damaged=(aside,))
    assert losses.text() == f"{aside} was damaged, and its records are missing"
    assert {record["text"] for record in got if record["op"] == "losses"} == {losses.text()}
    assert aside.stat().st_size > 4096
    assert 200 in [record.get("step") for record in got]


@pytest.mark.parametrize("body", ["{", "5", None, b"\xff"])
def test_a_damaged_record_costs_none_of_the_others(tmp_path: Path, body: object) -> None:
    outbox, got = Outbox(tmp_path, "r"), list[Record]()
    for step in range(6):
        outbox.append_metrics({"train/loss": 1.0}, step)
    outbox.release()
    with closing(sqlite3.connect(tmp_path / "r.db")) as database, database:
        # three in a row: more than are asked for at once
        database.execute("UPDATE records SET body = ? WHERE n <= (SELECT min(n) + 2 FROM records)", (body,))
    assert [record["step"] for record in outbox.pending(2)] == [3]
    assert outbox.counts() == (3, 3)
    arrived, losses = Sender(outbox, got.extend).deliver(20)
    assert arrived
    assert losses == Losses(unread=3)
    assert [record.get("step", record.get("text")) for record in got] == [3, 4, 5, losses.text()]
    assert losses.text() == "3 records damaged on the disk"


@pytest.mark.parametrize("how", ["removed", "removed with its folder", "set aside", "set aside and replaced"])
def test_a_file_that_another_process_takes_away_costs_none_of_the_later_records(
    tmp_path: Path, how: str
) -> None:
    folder = tmp_path / "spool"
    outbox, got = Outbox(folder, "r"), list[Record]()
    outbox.append_metrics({"a": 1.0}, 1)
    outbox.count_unkept()
    if how == "removed with its folder":
        shutil.rmtree(folder)
    for path in sorted(folder.glob("r.db*"), reverse=True):
        if how == "removed":
            path.unlink()
        else:
            path.rename(folder / path.name.replace("r.", "r.damaged-1."))
    if how == "set aside and replaced":
        code = "import sys; from pathlib import Path; from dphybrid.tracking.outbox import Outbox;"
        python("-c", f"{code} Outbox(Path(sys.argv[1]), 'r').append({{'op': 'losses', 'text': ''}})", folder)
    outbox.append_metrics({"a": 2.0}, 2)
    outbox.append_metrics({"a": 3.0}, 3)
    assert [record.get("step") for record in Outbox(folder, "r").pending(9)][-2:] == [2, 3]
    arrived, losses = Sender(outbox, got.extend).deliver(20)
    assert arrived
    assert [record["step"] for record in got if record["op"] == "metrics"] == [2, 3]
    aside = () if how.startswith("removed") else (folder / "r.damaged-1.db",)
    assert losses == Losses(unkept=1, removed=not aside, damaged=aside)
    told = "missing" if aside else "the outbox was removed during the run"
    assert told in got[0 if how != "set aside and replaced" else 1]["text"]


def test_a_full_disk_costs_lines_of_metrics_that_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox, got = Outbox(tmp_path, "r"), list[Record]()
    outbox.append_metrics({"a": 0.0}, 0)
    outbox.release()
    connect = sqlite3.connect

    def on_a_full_disk(*given: Any, **how: Any) -> sqlite3.Connection:
        database = connect(*given, **how)
        ((pages,),) = database.execute("PRAGMA page_count")
        database.execute(f"PRAGMA max_page_count = {pages}")
        return database

    monkeypatch.setattr(sqlite3, "connect", on_a_full_disk)
    outbox = Outbox(tmp_path, "r")
    with pytest.raises(OSError, match=r"No space left on device .*: '.*r\.db'") as error:
        outbox.append_metrics({"long": 1.0, **{f"name {i}": 1.0 for i in range(500)}}, 1)
    assert error.value.errno == errno.ENOSPC
    outbox.count_unkept()
    outbox.append_metrics({"a": 2.0}, 2)
    outbox.release()
    arrived, losses = Sender(Outbox(tmp_path, "r"), got.extend).deliver(20)  # the part that reports
    assert arrived
    assert losses == Losses(unkept=1)
    assert "1 record not written down" in losses.text()
    assert [record["step"] for record in got if record["op"] == "metrics"] == [0, 2]


def test_a_commit_that_must_outlive_a_loss_of_power_is_synced_and_others_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[sqlite3.Connection] = []
    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *a, **k: opened.append(connect(*a, **k)) or opened[-1])
    outbox = Outbox(tmp_path, "r")
    levels = []
    for sync in (False, True, False):
        outbox.append({"op": "tags", "values": {}}, sync=sync)
        levels += opened[-1].execute("PRAGMA synchronous").fetchall()
    assert levels == [(1,), (2,), (1,)]  # NORMAL, FULL
    assert opened[-1].execute("PRAGMA journal_mode").fetchall() == [("wal",)]
