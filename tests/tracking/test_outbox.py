"""The outbox of a run: in order, exactly once; damage is counted and said."""

import errno
import json
import os
import random
import signal
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dphybrid.tracking import outbox_file
from dphybrid.tracking.outbox import Losses, Outbox, outboxes, waiting
from dphybrid.tracking.outbox_file import connect
from dphybrid.tracking.sender import Sender

_WANTED = os.environ.get("DPHYBRID_DAMAGES", "300")
NUM_DAMAGES = 3000 if _WANTED == "all" else int(_WANTED)
Point = tuple[str, int, float]


def steps(outbox: Outbox) -> list[int]:
    return [record["step"] for record in outbox.pending(1000)]


def test_records_come_back_in_order_until_they_are_acknowledged(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path, "r", new=True)
    for number in range(5):
        outbox.append({"op": "tags", "values": {"n": number}}, content=b"%d" % number)
    first = outbox.pending(3)
    assert [record["values"]["n"] for record in first] == [0, 1, 2]
    outbox.acknowledge(first[-1]["n"])
    outbox.release()
    again = Outbox(tmp_path, "r")  # another process, later
    assert [(record["values"]["n"], record["content"]) for record in again.pending(10)] == [
        (3, b"3"),
        (4, b"4"),
    ]


def test_a_later_attempt_records_no_step_twice(tmp_path: Path) -> None:
    earlier = Outbox(tmp_path, "r", new=True)
    for step in (20, 40, 60):
        earlier.append_metrics({"loss": 1.0, "only/late": 2.0} if step > 20 else {"loss": 1.0}, step)
    later = Outbox(tmp_path, "r")
    for step in (40, 60, 80):
        later.append_metrics({"loss": 1.0, "new": 3.0}, step)
        later.append_metrics({"new": 4.0}, step)  # one attempt may do so
    points = [(name, r["step"]) for r in later.pending(100) for name in r["values"]]
    assert sorted(step for name, step in points if name == "loss") == [20, 40, 60, 80]
    assert sorted(step for name, step in points if name == "new") == [40, 40, 60, 60, 80, 80]
    later.acknowledge(later.pending(100)[-1]["n"])
    later.clear()
    later.release()
    third = Outbox(tmp_path, "r")
    third.append_metrics({"loss": 1.0}, 80)
    assert third.pending(10) == []


def test_what_was_refused_is_offered_again_behind_the_others(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path, "r", new=True)
    for number, op in enumerate(("tags", "file", "params")):
        outbox.append({"op": op, "t": 7, "values": {"n": number}}, content=b"x")
    for record in outbox.pending(2):
        outbox.refuse(record, "no")
    outbox.acknowledge(2)
    outbox.offer_again(["file", "params"])
    found = [(r["op"], r["n"], r["t"], r.get("values"), r["content"]) for r in outbox.pending(9)[:2]]
    assert found == [("params", 3, 7, {"n": 2}, b"x"), ("file", 4, 7, {"n": 1}, b"x")]
    assert outbox.pending(9)[2]["text"] == ""  # what the run's page says of it
    assert [record["op"] for record in outbox.refused()] == ["tags"]


def test_only_one_at_a_time_sends(tmp_path: Path) -> None:
    one, two = Outbox(tmp_path, "r", new=True), Outbox(tmp_path, "r")
    one.append({"op": "tags", "values": {}})
    assert one.hold()
    assert not two.hold()
    assert waiting(tmp_path) == 0  # somebody is at it
    one.release()
    assert two.hold()
    two.release()
    assert waiting(tmp_path) == 1
    assert [outbox.run_id for outbox in outboxes(tmp_path)] == ["r"]


def test_what_a_killed_process_appended_is_there(tmp_path: Path) -> None:
    for trial in range(5):
        folder = tmp_path / str(trial)
        if (child := os.fork()) == 0:
            outbox = Outbox(folder, "r", new=True)
            for step in range(1_000_000):
                outbox.append_metrics({"loss": 1.0}, step)
                (folder / "told").write_text(str(step))
        time.sleep(0.1 + trial / 50)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        told = int((folder / "told").read_text() or 0) if (folder / "told").exists() else -1
        outbox = Outbox(folder, "r", new=True)
        there = steps(outbox)
        assert there == list(range(len(there)))
        assert len(there) > told
        assert not outbox.losses()


class Store:
    """What a server holds: each point once, however often it comes."""

    def __init__(self) -> None:
        self.points: set[Point] = set()
        self.texts: list[str] = []

    def write(self, records: list[dict[str, Any]]) -> None:
        for record in records:
            for name, value in record.get("values", {}).items():
                self.points.add((name, record.get("step", 0), value))
            if record["op"] == "losses":
                self.texts.append(record["text"])


def recorded(folder: Path, sent: int, killed: bool = False) -> tuple[Store, set[Point]]:
    """Fill an outbox of which `sent` records arrived; return the server and all points."""
    outbox, store = Outbox(folder, "r", new=True), Store()
    outbox.set_destination(tracking_uri="sqlite://", experiment_id="1")
    points: set[Point] = set()
    for step in range(20):
        outbox.append_metrics({"train/loss": 1 / (step + 1), "valid/auc": step / 20}, step)
        points |= {("train/loss", step, 1 / (step + 1)), ("valid/auc", step, step / 20)}
    for record in outbox.pending(sent):
        store.write([record])
        outbox.acknowledge(record["n"])
    there = {path: path.read_bytes() for path in folder.iterdir() if path.suffix != ".db-shm"}
    outbox.release()
    for path, content in there.items() if killed else ():
        path.write_bytes(content)
    return store, points


def flip(content: bytes, chance: random.Random) -> bytes:
    place = chance.randrange(len(content))
    return content[:place] + bytes([content[place] ^ (1 << chance.randrange(8))]) + content[place + 1 :]


def truncate(content: bytes, chance: random.Random) -> bytes:
    return content[: chance.randrange(len(content))]


def zero_a_part(content: bytes, chance: random.Random) -> bytes:
    first = chance.randrange(len(content))
    last = min(len(content), first + chance.randrange(1, 5000))
    return content[:first] + bytes(last - first) + content[last:]


def move_a_part(content: bytes, chance: random.Random) -> bytes:
    first, second = chance.randrange(len(content)), chance.randrange(len(content))
    return content[:first] + content[second : second + 500] + content[first + 500 :]


DAMAGES: list[Callable[[bytes, random.Random], bytes]] = [flip, flip, zero_a_part, move_a_part, truncate]


def delivered(folder: Path, store: Store) -> Losses:
    arrived, losses = Sender(Outbox(folder, "r"), store.write).deliver(20)
    assert arrived
    return losses


def test_no_damage_is_silent(tmp_path: Path) -> None:
    silent = []
    for seed in range(NUM_DAMAGES):
        chance, folder = random.Random(seed), tmp_path / str(seed)
        killed = chance.random() < 0.5
        store, points = recorded(folder, chance.choice([0, 0, 7, 20]), killed)
        log = killed and chance.random() < 0.6
        file = folder / ("r.db-wal" if log else "r.db")
        # that the end of a log was cut off between two commits, nothing tells
        damage = chance.choice([*(DAMAGES[:4] if log else DAMAGES), None])
        if damage is not None:
            file.write_bytes(damage(file.read_bytes(), chance))
        elif not log:
            file.unlink()
        losses = delivered(folder, store)
        assert store.points <= points, f"seed {seed}: a point was changed by {damage} of {file.name}"
        if store.points < points and not losses:
            silent.append((seed, file.name, damage))
        if losses:
            assert store.texts == [losses.text()]  # on the run's page, too
    assert silent == []


@pytest.mark.parametrize("killed", [False, True])
def test_without_damage_nothing_is_said(tmp_path: Path, killed: bool) -> None:
    store, points = recorded(tmp_path, sent=7, killed=killed)
    assert not delivered(tmp_path, store)
    assert store.points == points
    assert store.texts == []
    assert {path.name for path in tmp_path.iterdir()} == {"r.db", "r.lock"}


def test_one_damaged_record_is_set_aside_and_the_rest_arrives(tmp_path: Path) -> None:
    store, points = recorded(tmp_path, sent=0)
    (tmp_path / "r.db").write_bytes((tmp_path / "r.db").read_bytes().replace(b'"step":4,', b'"step":5,'))
    losses = delivered(tmp_path, store)
    assert points - store.points == {("train/loss", 4, 0.2), ("valid/auc", 4, 0.2)}
    assert losses == Losses(lost=1, damaged=(tmp_path / "r.damaged-1.db",))
    assert losses.text().startswith("1 record damaged or missing on the way; ")
    assert b'"step":5,' in (tmp_path / "r.damaged-1.db").read_bytes()


def test_a_run_goes_on_behind_its_damage_and_counts_it_once(tmp_path: Path) -> None:
    store, points = recorded(tmp_path, sent=0)
    with sqlite3.connect(tmp_path / "r.db") as database:
        database.execute("DELETE FROM records WHERE n > 15")
    database.close()
    for step in (20, 21):
        later = Outbox(tmp_path, "r")
        assert later.hold()
        later.append_metrics({"train/loss": 0.5, "valid/auc": 0.5}, step)
        points |= {("train/loss", step, 0.5), ("valid/auc", step, 0.5)}
        later.release()
    assert delivered(tmp_path, store).lost == 5
    assert {step for _, step, _ in points - store.points} == {15, 16, 17, 18, 19}


def test_a_file_damaged_or_removed_under_a_run_is_replaced(tmp_path: Path) -> None:
    store = Store()
    outbox = Outbox(tmp_path, "r", new=True)
    other = Outbox(tmp_path, "r")
    for step in range(3):
        outbox.append_metrics({"a": 1.0}, step)
    (tmp_path / "r.db").write_bytes(b"no database" * 1000)
    other.append_metrics({"b": 1.0}, 0)  # finds it and sets it aside, as `dphybrid sync` may
    outbox.append_metrics({"a": 1.0}, 3)
    other.release()
    arrived, losses = Sender(outbox, store.write).deliver(20)
    assert arrived
    assert {("a", 3, 1.0), ("b", 0, 1.0)} <= store.points
    assert [path.name for path in losses.damaged] == ["r.damaged-1.db"]
    (tmp_path / "r.db").unlink()
    outbox.append_metrics({"a": 1.0}, 4)
    assert steps(outbox) == [4]
    assert outbox.losses().lost


def test_a_full_disk_costs_lines_of_metrics_that_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox, store = Outbox(tmp_path, "r", new=True), Store()
    outbox.append_metrics({"a": 0.0}, 0)
    outbox.release()

    def on_a_full_disk(path: Path) -> sqlite3.Connection:
        database = connect(path)
        ((pages,),) = database.execute("PRAGMA page_count")
        database.execute(f"PRAGMA max_page_count = {pages}")
        return database

    monkeypatch.setattr(outbox_file, "connect", on_a_full_disk)
    outbox = Outbox(tmp_path, "r")
    with pytest.raises(OSError, match=r"No space left on device .*: '.*r\.db'") as error:
        outbox.append_metrics({"long": 1.0, **{f"name {i}": 1.0 for i in range(500)}}, 1)
    assert error.value.errno == errno.ENOSPC
    outbox.count_unkept()
    outbox.append_metrics({"a": 2.0}, 2)
    outbox.release()
    outbox = Outbox(tmp_path, "r")  # the part of the run that reports
    arrived, losses = Sender(outbox, store.write).deliver(20)
    assert arrived
    assert losses == Losses(unkept=1)
    assert "1 record not written down" in losses.text()
    assert {step for _, step, _ in store.points} == {0, 2}


def test_a_new_file_for_which_the_disk_has_no_room_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match=r"No space left on device"):
            Outbox(tmp_path, "r", new=True).append({"op": "tags", "values": {}})
    assert list(tmp_path.iterdir()) == []
    (tmp_path / ".r.db.partial-1-2").touch()  # of a process that was killed there
    Outbox(tmp_path, "r", new=True).append({"op": "tags", "values": {}})
    assert not (tmp_path / ".r.db.partial-1-2").exists()


def test_a_commit_that_must_outlive_a_loss_of_power_is_synced_and_others_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[sqlite3.Connection] = []
    monkeypatch.setattr(outbox_file, "connect", lambda path: opened.append(connect(path)) or opened[-1])
    outbox = Outbox(tmp_path, "r", new=True)
    levels = []
    for sync in (False, True, False):
        outbox.append({"op": "tags", "values": {}}, sync=sync)
        levels += opened[-1].execute("PRAGMA synchronous").fetchall()
    assert levels == [(1,), (2,), (1,)]  # NORMAL, FULL
    assert opened[-1].execute("PRAGMA journal_mode").fetchall() == [("wal",)]


def test_the_files_are_their_owners_alone(tmp_path: Path) -> None:
    folder = tmp_path / "spool"
    recorded(folder, sent=3, killed=True)
    outbox = Outbox(folder, "r")
    outbox.refuse({"op": "tags", "n": 7}, "no")
    outbox.hold()
    assert folder.stat().st_mode & 0o077 == 0
    assert len(list(folder.iterdir())) >= 3
    assert [path.name for path in folder.iterdir() if path.stat().st_mode & 0o077] == ["r.db-wal"]
    # the test itself has written it
    assert json.loads(json.dumps(outbox.destination()))["tracking_uri"] == "sqlite://"
