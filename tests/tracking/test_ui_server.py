"""`dphybrid ui`: pages for whoever has the token, and a server that does not outlive its command."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.cookiejar import CookieJar
from pathlib import Path

import psutil
import pytest

from tests.commands import command
from tests.gpus.test_shared_folder import as_nobody
from tests.waiting import patience, wait_until

pytestmark = pytest.mark.slow


@contextmanager
def shown_run() -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """A running `dphybrid ui` and the address that it printed."""
    process = subprocess.Popen(
        [sys.executable, "-m", "dphybrid", "ui", "shown"], stdout=subprocess.PIPE, text=True
    )
    try:
        told = [process.stdout.readline() for _ in range(2)]
        yield process, told[1].strip()
    finally:
        process.kill()
        process.wait()


def status(url: str, **headers: str) -> int:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def gone(url: str) -> bool:
    try:
        status(url)
    except OSError:
        return True
    return False


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.nightly)])
def test_pages_need_the_token_and_the_server_ends_with_its_command(
    number: int, data_dir: Path, tmp_path: Path
) -> None:
    command("train", "--recipe", "toy", "--run-name", "shown")
    with shown_run() as (process, shown):
        see_pages(process, shown, data_dir, tmp_path)
        root, server = shown.partition("?")[0], psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        assert process.wait(patience(30)) == (0 if number == signal.SIGINT else -number)
        wait_until(lambda: gone(root), "the server ends with its parent", 20)
        wait_until(lambda: not any(p.is_running() for p in server), "no process of it is left", 20)


def see_pages(process: "subprocess.Popen[str]", shown: str, data_dir: Path, tmp_path: Path) -> None:
    run_id = json.loads((data_dir / "runs/shown/run.json").read_text())["run_id"]
    found = re.fullmatch(
        rf"(http://127\.0\.0\.1:(\d+)/)\?token=([\w-]+)#/experiments/1/runs/{run_id}\?workflowType=.*", shown
    )
    assert found is not None, shown
    root, port, token = found.groups()

    browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
    with browser.open(shown, timeout=30) as page:
        assert "location.replace(location.pathname + location.hash)" in page.read().decode()
    with browser.open(root, timeout=30) as page:
        assert "<title>MLflow</title>" in page.read().decode()
    asked = f"{root}api/2.0/mlflow/experiments/get?experiment_id=1"
    assert browser.open(asked, timeout=30).status == 200
    assert status(asked, Authorization=f"Bearer {token}") == 200
    for url in (root, asked, f"{root}health", f"{root}?token={token[:-1]}"):
        assert status(url) == 403
    assert status(asked, Cookie=f"dphybrid-{port}=x", Authorization="Bearer x") == 403

    server = psutil.Process(process.pid).children(recursive=True)
    listening = [c for p in server for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert {c.laddr.ip for c in listening} == {"127.0.0.1"}
    assert not any(token in " ".join(p.cmdline()) for p in server)

    if os.geteuid() == 0:  # else there is no other user to be
        page = json.dumps({"name": "x", "artifact_location": str(tmp_path)}).encode()
        wanted = urllib.request.Request(
            f"{root}api/2.0/mlflow/experiments/create", page, {"Content-Type": "application/json"}
        )
        told = as_nobody(lambda: str(urllib.request.urlopen(wanted, timeout=30).status))
        assert told.startswith("HTTPError: HTTP Error 4"), "another user made a folder into artifacts"
