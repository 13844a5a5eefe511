"""What people see first: the page of a run in MLflow, in a real browser."""

import shutil
from pathlib import Path

import pytest

from tests.commands import run_with
from tests.conftest import own_settings
from tests.tracking.conftest import MlflowServer

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
WIDTH, WAIT_MS = 1280, 60_000


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (Debian's package chromium)")
def test_values_of_metrics_stand_on_the_first_screen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync_api = pytest.importorskip("playwright.sync_api")
    names = [f"a column with a long name {n}" for n in range(40)]
    rows = [",".join([str(n % 2), *(f"value {n * k % 5} of it" for k in range(40))]) for n in range(200)]
    (tmp_path / "wide.csv").write_text("\n".join([",".join(["y", *names]), *rows]))
    server = MlflowServer(tmp_path, f"sqlite:///{tmp_path}/mlflow.db")
    server.start()
    try:
        own_settings(monkeypatch, tmp_path / "data", TRACKING_URI=server.uri)
        short = ("devices=cpu", "train.epochs=1")
        wide = run_with("recipe=ctr", f"data.path={tmp_path}/wide.csv", "data.label=y", *short)
        with sync_api.sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
            for report in (wide, run_with("recipe=toy", *short)):
                page = browser.new_page(viewport={"width": WIDTH, "height": 1100})
                page.goto(report.run_url)
                title = page.get_by_text("Value", exact=True).first
                title.wait_for(timeout=WAIT_MS)
                box = title.bounding_box()
                assert 0 < box["x"] + box["width"] <= WIDTH, report.run_name
            browser.close()
    finally:
        server.kill()
