"""The copier of a record: in order and whole, whatever the server does; names that MLflow accepts."""

import contextvars
import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from dphybrid.tracking.copier import Copier, Refused
from dphybrid.tracking.record import RecordFile, Sent, metrics_of, of_metrics, read
from dphybrid.tracking.tracker import safe_name
from tests.waiting import wait_until


class Server:
    """Takes lines, except while it is away, and none of the name `bad`."""

    def __init__(self, error: Exception | None = None) -> None:
        self.got: list[dict[str, Any]] = []
        self.away, self.error = threading.Event(), error or Refused("no such number")

    def write(self, lines: list[dict[str, Any]]) -> None:
        if self.away.is_set():
            raise ConnectionError("away")
        if any("bad" in metrics_of(line) for line in lines):
            raise self.error
        self.got += lines


@pytest.fixture(autouse=True)
def _refused_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dphybrid.tracking.copier._REFUSED_RETRIES_S", (0.01, 0.02))


def written(folder: Path, steps: int) -> RecordFile:
    record = RecordFile(folder)
    record.append({"op": "run", "run_id": "7", "experiment_id": "1", "tracking_uri": "sqlite://"})
    for step in range(steps):
        record.append(of_metrics({"a": 1.0}, step))
    return record


def test_an_outage_is_told_in_the_callers_context(tmp_path: Path) -> None:
    where: contextvars.ContextVar[str] = contextvars.ContextVar("where", default="nowhere")
    told: list[str] = []

    class Telling(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(where.get())

    handler, server = Telling(), Server()
    logger = logging.getLogger("dphybrid.tracking.copier")
    logger.addHandler(handler)
    token = where.set("flow run 7")
    try:
        server.away.set()
        written(tmp_path, 1)
        copier = Copier(tmp_path, server.write)
        wait_until(lambda: told, "the copier tells of the outage", every_s=0.02)
        server.away.clear()
        assert copier.finish(20) == ""
    finally:
        where.reset(token)
        logger.removeHandler(handler)
    assert told[0] == "flow run 7"
    assert [line.get("step") for line in server.got] == [None, 0]


def test_appending_never_waits_for_the_server_and_the_end_a_while(tmp_path: Path) -> None:
    release = threading.Event()
    record = written(tmp_path, 0)
    copier = Copier(tmp_path, lambda lines: release.wait(60) and None)
    for step in range(1000):
        record.append(of_metrics({"a": 1.0}, step))
    assert len(list(read(tmp_path))) == 1001  # all on disk although nothing was taken
    assert (
        copier.finish(0.2)
        == "MLflow lacks the rest of the record (not finished within 0.2 s); `dphybrid sync` copies it"
    )
    release.set()
    assert Sent.read(tmp_path).offset == 0, "a late thread notes nothing"


def test_a_second_copier_waits_for_the_first(tmp_path: Path) -> None:
    release, server = threading.Event(), Server()
    written(tmp_path, 3)
    first = Copier(tmp_path, lambda lines: release.wait(60) and None)
    second = Copier(tmp_path, server.write)
    wait_until(lambda: second.trouble, "the second copier finds the record locked", every_s=0.02)
    assert server.got == []
    release.set()
    assert first.finish(20) == ""
    assert second.finish(20) == ""
    assert server.got == []


def test_a_refusal_that_passes_is_tried_again_at_once(tmp_path: Path) -> None:
    server, refusals = Server(), iter([True, True])

    def write(lines: list[dict[str, Any]]) -> None:
        if next(refusals, False):
            raise Refused("UNIQUE constraint failed")
        server.write(lines)

    written(tmp_path, 0)
    assert Copier(tmp_path, write).finish(20) == ""
    assert [line["op"] for line in server.got] == ["run"]


def test_a_line_that_mlflow_refuses_is_skipped_and_told(tmp_path: Path) -> None:
    server, record = Server(), written(tmp_path, 0)
    for step in range(5):
        end = record.append(of_metrics({"bad" if step == 2 else "a": 1.0}, step))
    assert Copier(tmp_path, server.write).finish(20) == "MLflow lacks 1 line of the record (no such number)"
    assert [line.get("step") for line in server.got] == [None, 0, 1, 3, 4]
    sent = Sent.read(tmp_path)
    assert (sent.offset, list(sent.skipped.values())) == (end, ["no such number"])
    assert Copier(tmp_path, server.write).finish(20) == ""  # told once


def test_calls_have_at_most_a_thousand_points(tmp_path: Path) -> None:
    record, calls = written(tmp_path, 0), list[int]()
    for step in range(30):
        record.append(of_metrics({f"m{n}": 1.0 for n in range(90)}, step))
    assert Copier(tmp_path, lambda lines: calls.append(len(lines))).finish(20) == ""
    assert calls == [1, 11, 11, 8]


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
