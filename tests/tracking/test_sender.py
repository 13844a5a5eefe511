"""The sender of a record: in order, exactly once, whatever the server does; names that MLflow accepts."""

import contextvars
import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from dphybrid.tracking.record import Losses, RecordFile, metrics_of, of_metrics
from dphybrid.tracking.sender import Refused, Sender
from dphybrid.tracking.tracker import safe_name
from tests.waiting import wait_until


class Server:
    """Takes records, except while it is away, and none of the name `bad`."""

    def __init__(self, error: Exception | None = None) -> None:
        self.got: list[dict[str, Any]] = []
        self.away, self.error = threading.Event(), error or Refused("no such number")

    def write(self, records: list[dict[str, Any]]) -> None:
        if self.away.is_set():
            raise ConnectionError("away")
        if any("bad" in metrics_of(record) for record in records):
            raise self.error
        self.got += records


def test_an_outage_is_told_in_the_callers_context_though_the_log_handler_fails(tmp_path: Path) -> None:
    where: contextvars.ContextVar[str] = contextvars.ContextVar("where", default="nowhere")
    told: list[str] = []

    class Failing(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(where.get())
            raise RuntimeError("no flow run here")

    handler, server = Failing(), Server()
    logger = logging.getLogger("dphybrid.tracking.sender")
    logger.addHandler(handler)
    token = where.set("flow run 7")
    try:
        server.away.set()
        record = RecordFile(tmp_path)
        record.append(of_metrics({"a": 1.0}, 1))
        sender = Sender(record, server.write)
        wait_until(lambda: told, "the sender tells of the outage", every_s=0.02)
        server.away.clear()
        assert sender.close(20)
    finally:
        where.reset(token)
        logger.removeHandler(handler)
    assert told[0] == "flow run 7"
    assert [record["step"] for record in server.got] == [1]


def test_appending_does_not_wait_for_a_server_that_hangs(tmp_path: Path) -> None:
    release = threading.Event()
    record = RecordFile(tmp_path)
    sender = Sender(record, lambda records: release.wait(60) and None)
    for step in range(1000):
        record.append(of_metrics({"a": 1.0}, step))
    assert len(record.read(0, 2000)) == 1000  # all on disk although nothing was taken
    release.set()
    assert sender.close(30)


def test_a_refusal_that_passes_is_tried_again_at_once(tmp_path: Path) -> None:
    record, server, refusals = RecordFile(tmp_path), Server(), iter([True, True])

    def write(records: list[dict[str, Any]]) -> None:
        if next(refusals, False):
            raise Refused("UNIQUE constraint failed", again=True)
        server.write(records)

    record.append({"op": "dataset"})
    assert Sender(record, write).deliver(20) == (True, Losses())
    assert [record["op"] for record in server.got] == ["dataset", "whole"]


ERRORS = [Refused("no such number"), KeyError("uid"), FileNotFoundError("gone"), TypeError("no number")]


@pytest.mark.parametrize("error", ERRORS)
def test_a_record_that_cannot_be_written_is_kept_aside_and_the_rest_goes_on(
    tmp_path: Path, error: Exception
) -> None:
    server, record = Server(error), RecordFile(tmp_path)
    for step in range(5):
        record.append(of_metrics({"bad" if step == 2 else "a": 1.0}, step))
    assert Sender(record, server.write).close(20)
    assert [record["step"] for record in server.got] == [0, 1, 3, 4]
    sent = record.sent()
    assert sent.losses() == Losses(refused=1)
    assert sent.offset == record.size
    # a later `dphybrid sync` offers it again, and first
    taken = list[dict[str, Any]]()
    assert Sender(record, taken.extend, again=["metrics"]).deliver(20) == (True, Losses())
    assert [record.get("step", record["op"]) for record in taken] == [2, "whole"]


ODD = ["loss(a)", "x//y", "/lead", "a/../b", "p@1", "naïve/größe", "a,b|c", "x" * 400, "", "%", "a=b", ".."]


@pytest.mark.parametrize("name", [*ODD, "tab\tname"])
def test_odd_names_become_names_that_mlflow_takes(name: str) -> None:
    from mlflow.utils.validation import _validate_metric_name

    _validate_metric_name(safe_name(name))


def test_good_names_stay_and_different_ones_stay_different() -> None:
    for name in ("train/loss", "timing/row_update_ms", "größe", "a b.c-d:e"):
        assert safe_name(name) == name
    odd = ["loss(a)", "loss[a]", "loss_a_", "x" * 300, "x" * 301]
    assert len({safe_name(name) for name in odd}) == len(odd)
