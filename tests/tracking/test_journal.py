"""The journal and its sender: in order, exactly once, whatever the server or the process does."""

import contextvars
import json
import logging
import math
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from dphybrid.tracking.journal import Journal
from dphybrid.tracking.names import safe_name
from dphybrid.tracking.sender import Refused, Sender
from dphybrid.tracking.spool import journals, waiting


def test_records_come_back_in_order_until_they_are_acknowledged(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "r")
    for number in range(5):
        journal.append({"op": "tags", "values": {"n": number}})
    first = journal.pending(3)
    assert [record["values"]["n"] for _, record in first] == [0, 1, 2]
    journal.acknowledge(first[-1][0])
    again = Journal(tmp_path, "r")  # another process, later
    assert [record["values"]["n"] for _, record in again.pending(10)] == [3, 4]


def test_half_a_line_of_a_killed_process_is_passed_over(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "r")
    journal.append({"op": "tags", "values": {"n": 1}})
    with journal.lines.open("ab") as file:
        file.write(b'{"op":"tags","values":{"n"')
    later = Journal(tmp_path, "r")
    assert len(later.pending(10)) == 1
    later.append({"op": "tags", "values": {"n": 2}})
    assert [record["values"]["n"] for _, record in later.pending(10)] == [1, 2]


def test_a_later_attempt_records_no_step_twice(tmp_path: Path) -> None:
    killed = Journal(tmp_path, "r")  # no page of steps is written: the process was killed
    for step in (20, 40, 60):
        killed.append_metrics({"loss": 1.0, "only/late": 2.0} if step > 20 else {"loss": 1.0}, step)
    later = Journal(tmp_path, "r")
    for step in (40, 60, 80):
        later.append_metrics({"loss": 1.0, "new": 3.0}, step)
    points = [(name, r["step"]) for _, r in later.pending(100) for name in r["values"]]
    assert sorted(p[1] for p in points if p[0] == "loss") == [20, 40, 60, 80]
    assert sorted(p[1] for p in points if p[0] == "new") == [40, 60, 80]
    later.clear()
    later.release()
    third = Journal(tmp_path, "r")
    third.append_metrics({"loss": 1.0}, 80)
    assert third.pending(10) == []


def test_one_attempt_may_record_a_step_of_a_metric_more_than_once(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "r")
    journal.append_metrics({"a": 1.0}, 5)
    journal.append_metrics({"a": 2.0}, 5)
    assert len(journal.pending(10)) == 2


def test_only_one_at_a_time_sends(tmp_path: Path) -> None:
    one, two = Journal(tmp_path, "r"), Journal(tmp_path, "r")
    one.append({"op": "tags", "values": {}})
    assert one.hold()
    assert not two.hold()
    assert waiting(tmp_path) == 0  # somebody is at it
    one.release()
    assert two.hold()
    two.release()
    assert waiting(tmp_path) == 1
    assert [journal.run_id for journal in journals(tmp_path)] == ["r"]


class Server:
    """Takes records, except while it is away."""

    def __init__(self) -> None:
        self.got: list[dict[str, Any]] = []
        self.away = threading.Event()

    def write(self, records: list[dict[str, Any]]) -> None:
        if self.away.is_set():
            raise ConnectionError("away")
        if any(math.isnan(r["values"].get("bad", 0.0)) for r in records):
            raise Refused("no such number")
        self.got += records


def test_an_outage_loses_and_doubles_nothing(tmp_path: Path) -> None:
    server, journal = Server(), Journal(tmp_path, "r")
    sender = Sender(journal, server.write, beat=lambda: None)
    for step in range(50):
        if step == 10:
            assert sender.drain(20)
            server.away.set()
        if step == 40:
            assert not sender.drain(0.2)
            assert "away" in sender.trouble
            server.away.clear()
        journal.append_metrics({"a": float(step)}, step)
    assert sender.close(30)
    assert [record["step"] for record in server.got] == list(range(50))
    assert journal.pending(10) == []


def test_what_the_server_never_takes_is_kept_aside_and_the_rest_goes_on(tmp_path: Path) -> None:
    server, journal = Server(), Journal(tmp_path, "r")
    for step in range(5):
        journal.append_metrics({"bad": math.nan} if step == 2 else {"a": 1.0}, step)
    assert Sender(journal, server.write, beat=lambda: None).close(20)
    assert [record["step"] for record in server.got] == [0, 1, 3, 4]
    (kept,) = (tmp_path / "r.refused.jsonl").read_text().splitlines()
    assert json.loads(kept)["step"] == 2
    assert "no such number" in json.loads(kept)["reason"]
    assert journals(tmp_path) == [] or journals(tmp_path)[0].run_id == "r"


def test_a_log_handler_that_fails_does_not_end_the_sending(tmp_path: Path) -> None:
    class Failing(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise RuntimeError("no flow run here")

    server, journal, handler = Server(), Journal(tmp_path, "r"), Failing()
    logger = logging.getLogger("dphybrid.tracking.sender")
    logger.addHandler(handler)
    try:
        server.away.set()
        journal.append_metrics({"a": 1.0}, 1)
        sender = Sender(journal, server.write, beat=lambda: None)
        assert not sender.drain(0.3)
        server.away.clear()
        assert sender.close(20)
    finally:
        logger.removeHandler(handler)
    assert [record["step"] for record in server.got] == [1]


def test_what_the_sender_tells_is_told_in_the_callers_context(tmp_path: Path) -> None:
    where: contextvars.ContextVar[str] = contextvars.ContextVar("where", default="nowhere")
    told: list[str] = []

    class Telling(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(where.get())

    handler, server = Telling(), Server()
    logger = logging.getLogger("dphybrid.tracking.sender")
    logger.addHandler(handler)
    token = where.set("flow run 7")
    try:
        server.away.set()
        journal = Journal(tmp_path, "r")
        journal.append_metrics({"a": 1.0}, 1)
        sender = Sender(journal, server.write, beat=lambda: None)
        assert not sender.close(0.5)
    finally:
        where.reset(token)
        logger.removeHandler(handler)
    assert told == ["flow run 7"]


def test_closing_without_a_server_is_quick_and_leaves_the_records(tmp_path: Path) -> None:
    server, journal = Server(), Journal(tmp_path, "r")
    server.away.set()
    journal.append_metrics({"a": 1.0}, 1)
    sender = Sender(journal, server.write, beat=lambda: None)
    start = time.monotonic()
    assert not sender.close(0.3)
    assert time.monotonic() - start < 30
    server.away.clear()
    assert Sender(Journal(tmp_path, "r"), server.write, beat=lambda: None).close(20)
    assert [record["step"] for record in server.got] == [1]


def test_appending_does_not_wait_for_a_server_that_hangs(tmp_path: Path) -> None:
    release = threading.Event()
    journal = Journal(tmp_path, "r")
    sender = Sender(journal, lambda records: release.wait(60) and None, beat=lambda: None)
    for step in range(1000):
        journal.append_metrics({"a": 1.0}, step)
    assert len(journal.pending(2000)) == 1000  # all on disk although nothing was taken
    release.set()
    assert sender.close(30)


@pytest.mark.parametrize(
    "name",
    [
        "loss(a)",
        "x//y",
        "/lead",
        "a/../b",
        "p@1",
        "naïve/größe",
        "a,b|c",
        "x" * 400,
        "",
        "%",
        "a=b",
        "..",
        "tab\tname",
    ],
)
def test_odd_names_become_names_that_mlflow_takes(name: str) -> None:
    from mlflow.utils.validation import _validate_metric_name

    _validate_metric_name(safe_name(name))


def test_good_names_stay_and_different_ones_stay_different() -> None:
    for name in ("train/loss", "timing/row_update_ms", "größe", "a b.c-d:e"):
        assert safe_name(name) == name
    odd = ["loss(a)", "loss[a]", "loss_a_", "x" * 300, "x" * 301]
    assert len({safe_name(name) for name in odd}) == len(odd)
