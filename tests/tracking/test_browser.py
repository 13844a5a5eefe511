"""What people see: MLflow's pages of runs in a real browser, and the page of `dphybrid compare`.

With DPHYBRID_SCREENSHOTS set to a folder, the pages are kept there as pictures to look at.
"""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from mlflow.tracking import MlflowClient

from dphybrid.config.settings import load_settings
from dphybrid.jobs.train import Report, run_job
from dphybrid.recipes.configs import load_config
from dphybrid.tracking.compare import compare_runs
from tests.tracking.conftest import MlflowServer

pytestmark = [pytest.mark.browser, pytest.mark.slow]

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

    def open(self, address: str, name: str, wait_for: str) -> Any:
        page = self.browser.new_page(viewport={"width": 1500, "height": 1100})
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
            patch.setenv("DPHYBRID_DATA_DIR", str(folder / "data"))
            patch.setenv("MLFLOW_TRACKING_URI", server.uri)
            patch.chdir(folder)
            overrides = ["recipe=hybrid", "train.epochs=2", "train.batch_size=60", "checkpoint.register_as=hybrid-model"]
            reports = [
                run_job(load_config(None, [*overrides, f"devices={devices}"]), load_settings())
                for devices in ("cpu", "cpu*2", "cpu*8")
            ]
        experiment_id = MlflowClient(server.uri).get_run(reports[0].run_id).info.experiment_id
        with sync_api.sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
            yield Seen(server, reports, experiment_id, browser)
            browser.close()
    finally:
        server.kill()


def test_the_page_of_a_run_explains_it(seen: Seen) -> None:
    report = seen.reports[2]
    page = seen.open(report.run_url, "run", "How batches were split")
    text = page.inner_text("body")
    for words in (
        "hybrid on cpu*8, batch 60, seed 0: mse",
        "random ids below 1000",  # the data
        "split 1 / replica 7 / network.region",
        "[8, 10] -> [8, 10]",
        "Where time went",
        "backward",
        "Load the best checkpoint",
        'dphybrid.load_model("models:/hybrid-model@challenger")',
        "dphybrid train --recipe 'hybrid' --devices 'cpu*8'",
        "summary/samples_per_s_median",
        "hybrid-model",
    ):
        assert words in text, words
    assert page.locator("table").filter(has_text="replica 7").count() >= 1


def test_splits_and_figures_open_as_table_and_pictures(seen: Seen) -> None:
    report = seen.reports[2]
    base = report.run_url.partition("?")[0]
    page = seen.open(f"{base}/artifacts/split_shapes.json?workflowType=machine_learning", "split_table", "first_step")
    assert page.get_by_text("split 1 / replica 3 / network.region").first.is_visible()
    page = seen.open(f"{base}/artifacts/figures?workflowType=machine_learning", "figures", "rows_per_replica.png")
    page.get_by_text("rows_per_replica.png").first.click()
    picture = page.locator("img[src^='blob:'], img[src^='data:'], img[src*='artifact']").first
    picture.wait_for(timeout=WAIT_MS)
    page.wait_for_timeout(1000)
    seen.keep(page, "figure")
    assert picture.evaluate("image => image.naturalWidth") > 300


def test_charts_of_three_runs_are_grouped(seen: Seen) -> None:
    address = f"{seen.server.uri}/#/experiments/{seen.experiment_id}/runs?workflowType=machine_learning&compareRunsMode=CHART"
    page = seen.open(address, "charts", "timing_mean")
    text = page.inner_text("body")
    for report in seen.reports:
        assert report.run_name in text
    for section in ("perf", "summary", "timing", "timing_mean", "train", "valid"):
        assert page.get_by_text(section, exact=True).count() >= 1, section
    page.get_by_text("timing_mean", exact=True).first.scroll_into_view_if_needed()
    page.wait_for_timeout(1500)
    seen.keep(page, "charts_timing")


def test_the_compare_view_of_three_runs_shows_what_differs(seen: Seen) -> None:
    ids = quote(json.dumps([report.run_id for report in seen.reports]))
    experiments = quote(json.dumps([seen.experiment_id]))
    address = f"{seen.server.uri}/#/compare-runs?runs={ids}&experiments={experiments}"
    page = seen.open(address, "compare_runs", "devices.resolved")
    text = page.inner_text("body")
    for words in ("cpu*2", "cpu*8", *(report.run_name for report in seen.reports)):
        assert words in text, words


def test_the_page_of_a_comparison_shows_its_pictures(seen: Seen, tmp_path: Path) -> None:
    page_file = compare_runs(seen.server.uri, [report.run_id for report in seen.reports], tmp_path)
    page = seen.open(page_file.as_uri(), "comparison", "Where a step")
    widths = page.locator("img").evaluate_all("images => images.map(image => image.naturalWidth)")
    assert len(widths) == 4
    assert min(widths) > 300
    assert page.locator("table").first.locator("tr").count() == 4
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth + 1")
