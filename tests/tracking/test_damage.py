"""Damage to the files of a journal: whatever is lost by it is counted and told, nothing that arrives was
changed, and nothing fails."""

import errno
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dphybrid.tracking.delivery import deliver
from dphybrid.tracking.journal import Journal, Losses
from dphybrid.tracking.lines import read_page, write_page
from dphybrid.tracking.sender import Refused, Sender
from dphybrid.tracking.spool import journals

SPOOL_FILES = ("r.jsonl", "r.count", "r.sent", "r.json", "r.steps.json", "r.lock")
_WANTED = os.environ.get("DPHYBRID_DAMAGES", "300")
NUM_DAMAGES = 3000 if _WANTED == "all" else int(_WANTED)
Point = tuple[str, int, float]


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


def recorded(folder: Path, sent: int) -> tuple[Store, set[Point]]:
    """Write a journal of which `sent` records arrived before its process was killed; return the server and
    all points."""
    journal, store = Journal(folder, "r"), Store()
    journal.set_destination(tracking_uri="sqlite://", experiment_id="1")
    points: set[Point] = set()
    for step in range(20):
        journal.append_metrics({"train/loss": 1 / (step + 1), "valid/auc": step / 20}, step)
        points |= {("train/loss", step, 1 / (step + 1)), ("valid/auc", step, step / 20)}
    for mark, record in journal.pending(sent):
        store.write([record])
        journal.acknowledge(mark)
    journal.release()
    return store, points


def flip(content: bytes, chance: random.Random) -> bytes:
    place = chance.randrange(len(content))
    return content[:place] + bytes([content[place] ^ (1 << chance.randrange(8))]) + content[place + 1 :]


def truncate(content: bytes, chance: random.Random) -> bytes:
    return content[: chance.randrange(len(content))]


def truncate_lines(content: bytes, chance: random.Random) -> bytes:
    lines = content.splitlines(keepends=True)
    return b"".join(lines[: chance.randrange(len(lines))])


def remove_a_line(content: bytes, chance: random.Random) -> bytes:
    lines = content.splitlines(keepends=True)
    del lines[chance.randrange(len(lines))]
    return b"".join(lines)


def repeat_a_line(content: bytes, chance: random.Random) -> bytes:
    lines = content.splitlines(keepends=True)
    lines.insert(chance.randrange(len(lines) + 1), chance.choice(lines))
    return b"".join(lines)


def mix_lines(content: bytes, chance: random.Random) -> bytes:
    lines = content.splitlines(keepends=True)
    chance.shuffle(lines)
    return b"".join(lines)


def zero_a_part(content: bytes, chance: random.Random) -> bytes:
    first = chance.randrange(len(content))
    last = min(len(content), first + chance.randrange(1, 200))
    return content[:first] + bytes(last - first) + content[last:]


def empty(content: bytes, chance: random.Random) -> bytes:
    return b""


DAMAGES: list[Callable[[bytes, random.Random], bytes]] = [
    flip,
    truncate,
    truncate_lines,
    remove_a_line,
    repeat_a_line,
    mix_lines,
    zero_a_part,
    empty,
]


def delivered(folder: Path, store: Store) -> Losses:
    (journal,) = journals(folder) or (Journal(folder, "r"),)
    arrived, losses = deliver(journal, Sender(journal, store.write, beat=lambda: None), 20)
    assert arrived
    return losses


def test_no_damage_is_silent(tmp_path: Path) -> None:
    silent = []
    for seed in range(NUM_DAMAGES):
        chance, folder = random.Random(seed), tmp_path / str(seed)
        store, points = recorded(folder, sent=chance.choice([0, 0, 7, 20]))
        there = [name for name in SPOOL_FILES if (folder / name).exists() and (folder / name).stat().st_size]
        name = "r.jsonl" if chance.random() < 0.6 else chance.choice(there)
        damage = chance.choice([*DAMAGES, None])
        if damage is None:
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(damage((folder / name).read_bytes(), chance))
        losses = delivered(folder, store)
        assert store.points <= points, f"seed {seed}: a point was changed by {damage} of {name}"
        if store.points < points and not losses:
            silent.append((seed, name, damage))
        if losses:
            assert store.texts == [losses.text()]  # on the run's page, too
    assert silent == []


def test_without_damage_nothing_is_told(tmp_path: Path) -> None:
    store, points = recorded(tmp_path, sent=7)
    assert not delivered(tmp_path, store)
    assert store.points == points
    assert store.texts == []
    assert {path.name for path in tmp_path.iterdir()} <= {"r.json", "r.steps.json", "r.lock"}


def test_one_damaged_record_is_set_aside_and_the_rest_arrives(tmp_path: Path) -> None:
    store, points = recorded(tmp_path, sent=0)
    lines = (tmp_path / "r.jsonl").read_bytes().splitlines(keepends=True)
    lines[4] = lines[4].replace(b"loss", b"lass")
    (tmp_path / "r.jsonl").write_bytes(b"".join(lines))
    losses = delivered(tmp_path, store)
    assert points - store.points == {("train/loss", 4, 0.2), ("valid/auc", 4, 0.2)}
    assert losses.lost == 1
    assert losses.text().startswith("1 record damaged or missing on the way; what there is of them: ")
    (kept,) = (tmp_path / "r.refused.jsonl").read_text().splitlines()
    assert "train/lass" in json.loads(kept)["line"]


def test_a_run_goes_on_behind_its_damage_and_counts_it_once(tmp_path: Path) -> None:
    store, points = recorded(tmp_path, sent=0)
    lines = (tmp_path / "r.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "r.jsonl").write_bytes(b"".join(lines[:15]))
    for step in (20, 21):
        later = Journal(tmp_path, "r")
        assert later.hold()
        later.append_metrics({"train/loss": 0.5, "valid/auc": 0.5}, step)
        points |= {("train/loss", step, 0.5), ("valid/auc", step, 0.5)}
        later.release()
    losses = delivered(tmp_path, store)
    assert losses.lost == 5
    assert {step for _, step, _ in points - store.points} == {15, 16, 17, 18, 19}


def test_a_damaged_file_that_waits_is_refused_and_told(tmp_path: Path) -> None:
    from dphybrid.tracking import open_tracker

    tracker = open_tracker(None, "damage", tmp_path)
    run_id = tracker.start("run", {}, {}, "note")
    tracker.close()
    journal = Journal(tmp_path / "spool", run_id)
    path, crc = journal.keep_content("page.txt", b"words")
    path.write_bytes(b"worms")
    gone, _ = journal.keep_content("gone.txt", b"words")
    for file in (path, gone):
        journal.append({"op": "file", "path": str(file), "folder": "", "crc": crc})
    gone.unlink()
    journal.release()
    tracker = open_tracker(None, "damage", tmp_path)
    tracker.attach(run_id)
    tracker.finish("FINISHED")
    from mlflow.tracking import MlflowClient

    run = MlflowClient(tracker.tracking_uri).get_run(run_id)
    assert run.info.status == "FINISHED"
    assert run.data.tags["dphybrid.lost_records"].startswith("2 records refused by the server")
    assert run.data.tags["mlflow.note.content"].startswith("> **Not everything was recorded:** 2 records")
    assert run.data.tags["mlflow.note.content"].endswith("note")


def test_a_full_disk_costs_lines_of_metrics_that_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, left = os.write, [3.5]

    def until_full(handle: int, content: bytes) -> int:
        if not content.split(b" ")[-1].startswith(b'{"t"'):
            return write(handle, content)
        left[0] -= 1
        if left[0] <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(handle, content[: len(content) // 2] if left[0] < 1 else content)

    journal, store = Journal(tmp_path, "r"), Store()
    monkeypatch.setattr(os, "write", until_full)
    for step in range(6):
        try:
            journal.append_metrics({"a": float(step)}, step)
        except OSError:
            journal.count_unkept()
    monkeypatch.setattr(os, "write", write)
    journal.append_metrics({"a": 6.0}, 6)  # behind half a line
    arrived, losses = deliver(journal, Sender(journal, store.write, beat=lambda: None), 20)
    assert arrived
    assert {step for _, step, _ in store.points} == {0, 1, 2, 6}
    assert losses.unkept == 3
    assert "3 records not written down" in losses.text()


def test_a_refusal_that_passes_is_tried_again_at_once(tmp_path: Path) -> None:
    journal, store, refusals = Journal(tmp_path, "r"), Store(), iter([True, True])

    def write(records: list[dict[str, Any]]) -> None:
        if next(refusals, False):
            raise Refused("UNIQUE constraint failed", again=True)
        store.write(records)

    journal.append({"op": "dataset", "values": {"a": 1.0}})
    assert deliver(journal, Sender(journal, write, beat=lambda: None), 20) == (
        True,
        Losses(0, 0, 0, (), journal.aside),
    )
    assert store.points == {("a", 0, 1.0)}


@pytest.mark.parametrize("error", [KeyError("uid"), FileNotFoundError("gone"), TypeError("no number")])
def test_a_record_that_cannot_be_written_holds_up_none_behind_it(tmp_path: Path, error: Exception) -> None:
    journal, store = Journal(tmp_path, "r"), Store()

    def write(records: list[dict[str, Any]]) -> None:
        if any("bad" in record.get("values", {}) for record in records):
            raise error
        store.write(records)

    for name in ("a", "bad", "b"):
        journal.append_metrics({name: 1.0}, 1)
    arrived, losses = deliver(journal, Sender(journal, write, beat=lambda: None), 20)
    assert arrived
    assert losses.refused == 1
    assert {name for name, _, _ in store.points} == {"a", "b"}


def test_the_files_of_a_journal_are_its_owners_alone(tmp_path: Path) -> None:
    folder = tmp_path / "spool"
    recorded(folder, sent=3)
    journal = Journal(folder, "r")
    journal.keep_content("note.txt", b"words")
    journal.refuse({"op": "tags", "n": 1}, "no")
    assert folder.stat().st_mode & 0o077 == 0
    assert [path.name for path in folder.iterdir() if path.is_file() and path.stat().st_mode & 0o077] == []


def test_a_page_for_which_the_disk_has_no_room_leaves_the_one_before_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write_page(tmp_path / "r.json", [1])
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*r\.json'"):
        write_page(tmp_path / "r.json", [2], sync=True)
    assert read_page(tmp_path / "r.json") == ([1], True)
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]
