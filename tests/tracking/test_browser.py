"""What people see: MLflow's pages of runs in a real browser. test_mlflow.py has what they are made of.

With DPHYBRID_SCREENSHOTS set to a folder, the pages are kept there as pictures to look at.
"""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient

from dphybrid.run.pages import Report
from tests.commands import run_with
from tests.conftest import own_settings
from tests.tracking.conftest import MlflowServer

pytestmark = [pytest.mark.browser, pytest.mark.nightly]

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
WAIT_MS = 60_000


@dataclass
class Seen:
    """A served sweep on 1, 2 and 8 devices, and a browser."""

    server: MlflowServer
    reports: list[Report]
    experiment_id: str
    browser: Any

    def open(self, address: str, name: str, wait_for: str, width: int = 1500) -> Any:
        page = self.browser.new_page(viewport={"width": width, "height": 1100})
        page.goto(address)
        page.get_by_text(wait_for, exact=False).first.wait_for(timeout=WAIT_MS)
        page.wait_for_timeout(1500)  # charts are drawn after their titles
        self.keep(page, name)
        return page

    def keep(self, page: Any, name: str) -> None:
        if folder := os.environ.get("DPHYBRID_SCREENSHOTS"):
            page.screenshot(path=str(Path(folder) / f"{name}.png"))


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed (Debian's package chromium)")
    sync_api = pytest.importorskip("playwright.sync_api")
    folder = tmp_path_factory.mktemp("seen")
    server = MlflowServer(folder, f"sqlite:///{folder}/mlflow.db")
    server.start()
    try:
        with pytest.MonkeyPatch.context() as patch:
            own_settings(patch, folder / "data", TRACKING_URI=server.uri)
            patch.chdir(folder)
            overrides = [
                "recipe=hybrid",
                "train.epochs=2",
                "train.batch_size=60",
                "checkpoint.register_as=hybrid-model",
            ]
            reports = [run_with(*overrides, f"devices={devices}") for devices in ("cpu", "cpu*2", "cpu*8")]
        experiment_id = MlflowClient(server.uri).get_run(reports[0].run_id).info.experiment_id
        with sync_api.sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
            yield Seen(server, reports, experiment_id, browser)
            browser.close()
    finally:
        server.kill()


def test_the_page_of_a_run_explains_it(seen: Seen) -> None:
    report = seen.reports[2]
    page = seen.open(report.run_url, "run", "Report.html and splits.txt")
    text = page.inner_text("body")
    for words in (
        "hybrid on cpu*8, batch 60, seed 0",
        "60 rows on 8 devices",
        "models:/hybrid-model@challenger",
        "perf/samples_per_s",
        "hybrid-model",
    ):
        assert words in text, words


def test_the_report_opens_among_the_artifacts(seen: Seen) -> None:
    base = seen.reports[2].run_url.partition("?")[0]
    page = seen.open(f"{base}/artifacts/Report.html?workflowType=machine_learning", "report", "Report.html")
    frame = page.frame_locator("iframe").first
    frame.get_by_text("Where time went").first.wait_for(timeout=WAIT_MS)
    assert frame.locator("svg").count() == 2  # the loss and the metric
    assert frame.locator("pre").filter(has_text="torch.Size([8, 10]) output size").count() == 1
    for drawing in frame.locator("svg").all():
        left = drawing.bounding_box()["x"]
        assert all(text.bounding_box()["x"] >= left for text in drawing.locator("text").all())  # none is cut
