"""The quick start's commands that need a server and a worker, as the page has them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest
from sklearn.metrics import roc_auc_score

from tests.flows.servers import Team
from tests.test_pages import commands, write_visits
from tests.waiting import patience


@pytest.mark.slow
def test_the_page_is_deployed_retrained_and_scored(team: Team, tmp_path: Path) -> None:
    rows = write_visits(tmp_path / "visits.csv", 1000, 0)
    answers = write_visits(tmp_path / "new.csv", 300, 1)
    worker = team.start_worker("quarter")

    def run(*lines: str) -> str:
        text = "\n".join(["set -e", *lines]).replace("http://127.0.0.1:4200/api", team.api)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-c", text],
            capture_output=True,
            text=True,
            check=False,
            env=team.env(PATH=path),
            cwd=tmp_path,
            timeout=400,
        )
        assert done.returncode == 0, done.stdout + done.stderr + team.logs()
        return done.stdout

    *first, predict = commands(deployed=True)
    assert "Deployments: the package's own" in run(*first)
    (decision,) = team.post("/artifacts/latest/filter", {"artifacts": {"key": {"any_": ["decision"]}}})
    assert decision["data"].startswith("Promoted: the challenger of visits is ")
    run(predict)
    scored = pl.read_csv(tmp_path / "scored.csv")
    assert len(scored) == len(answers) == 300 < len(rows)
    assert roc_auc_score(answers, scored["probability"]) > 0.8
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(patience(30)) == 0
