"""The sender of an outbox: in order, exactly once, whatever the server does; names that MLflow accepts."""

import contextvars
import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from dphybrid.tracking.base import safe_name
from dphybrid.tracking.outbox import Losses, Outbox
from dphybrid.tracking.sender import Refused, Sender
from tests.waiting import wait_until


class Server:
    """Takes records, except while it is away, and none of the name `bad`."""

    def __init__(self, error: Exception | None = None) -> None:
        self.got: list[dict[str, Any]] = []
        self.away, self.error = threading.Event(), error or Refused("no such number")

    def write(self, records: list[dict[str, Any]]) -> None:
        if self.away.is_set():
            raise ConnectionError("away")
        if any("bad" in record.get("values", {}) for record in records):
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
        outbox = Outbox(tmp_path, "r")
        outbox.append_metrics({"a": 1.0}, 1)
        sender = Sender(outbox, server.write)
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
    outbox = Outbox(tmp_path, "r")
    sender = Sender(outbox, lambda records: release.wait(60) and None)
    for step in range(1000):
        outbox.append_metrics({"a": 1.0}, step)
    assert len(outbox.pending(2000)) == 1000  # all on disk although nothing was taken
    release.set()
    assert sender.close(30)


def test_a_refusal_that_passes_is_tried_again_at_once(tmp_path: Path) -> None:
    outbox, server, refusals = Outbox(tmp_path, "r"), Server(), iter([True, True])

    def write(records: list[dict[str, Any]]) -> None:
        if next(refusals, False):
            raise Refused("UNIQUE constraint failed", again=True)
        server.write(records)

    outbox.append({"op": "dataset", "values": {"a": 1.0}})
    assert Sender(outbox, write).deliver(20) == (True, Losses())
    assert [record["op"] for record in server.got] == ["dataset"]


ERRORS = [Refused("no such number"), KeyError("uid"), FileNotFoundError("gone"), TypeError("no number")]


@pytest.mark.parametrize("error", ERRORS)
def test_a_record_that_cannot_be_written_is_kept_aside_and_the_rest_goes_on(
    tmp_path: Path, error: Exception
) -> None:
    server, outbox = Server(error), Outbox(tmp_path, "r")
    for step in range(5):
        outbox.append_metrics({"bad" if step == 2 else "a": 1.0}, step)
    assert Sender(outbox, server.write).close(20)
    assert [record["step"] for record in server.got] == [0, 1, 3, 4]
    assert outbox.losses() == Losses(refused=1)
    assert outbox.counts() == (0, 1)


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
