"""Make the pictures of runs that the pages show: a report, a comparison, MLflow's list and a run in it.

    python docs/make_pictures.py            # into docs/pictures; needs playwright, pillow and Chromium
    python docs/make_pictures.py /tmp/look --width 390

It trains three small runs, on one, two and eight virtual devices, in a temporary folder.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

COLOURS = 256
"""Of a picture: enough for text and charts, a third of the bytes; with 64 stages share colours."""
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"]
ROWS = [(("books", "music", "tea")[i % 3], i * 37 % 200 / 10, i % 13 < 2) for i in range(1500)]
VISITS = "shop,price,clicked\n" + "".join(
    f"{shop},{price},{int((shop == 'books' and price < 12) != noise)}\n" for shop, price, noise in ROWS
)


def dphybrid(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a command of dphybrid."""
    return subprocess.run(
        [sys.executable, "-m", "dphybrid", *words], check=True, capture_output=True, text=True
    )


def train(folder: Path) -> None:
    """Train three runs and write the comparison and a report."""
    (folder / "visits.csv").write_text(VISITS)
    for devices in ("cpu", "cpu*2", "cpu*8"):
        values = ["--data.path", "visits.csv", "--data.label", "clicked", "--train.epochs", "2"]
        dphybrid("train", *values, "--devices", devices, "--run-name", f"visits-{devices.replace('*', 'x')}")
    dphybrid("compare", "visits-cpu", "visits-cpux2", "visits-cpux8")
    reports = (folder / "data/mlflow/artifacts").glob("*/artifacts/Report.html")
    shutil.copy(max(reports, key=lambda file: file.stat().st_mtime), folder / "report.html")


def keep(page: Any, file: Path, full: bool) -> None:
    """Save a page as a picture of few colours."""
    from PIL import Image

    page.screenshot(path=file, full_page=full)
    Image.open(file).convert("RGB").quantize(COLOURS).save(file, optimize=True)
    print(file, f"{file.stat().st_size / 1000:.0f} kB")


def main() -> None:
    """Train, open the pages, keep the pictures."""
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", nargs="?", type=Path, default=Path(__file__).with_name("pictures"))
    parser.add_argument("--width", type=int, default=1440)
    asked = parser.parse_args()
    out, chromium = asked.out.resolve(), shutil.which("chromium")
    out.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        folder = Path(name)
        os.environ["DPHYBRID_DATA_DIR"] = str(folder / "data")
        os.chdir(folder)
        train(folder)
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        page = browser.new_page(viewport={"width": asked.width, "height": 900})
        for picture, path in (("report", "report.html"), ("compare", "comparison/index.html")):
            page.goto((folder / path).as_uri())
            page.wait_for_timeout(1500)
            keep(page, out / f"{picture}.png", full=picture == "compare")
        command = [sys.executable, "-u", "-m", "dphybrid", "ui", "--no-browser", "visits-cpux8"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            address = next(line.strip() for line in server.stdout if line.startswith("http"))
            runs = f"{address.partition('/runs/')[0]}/runs?viewStateShareKey=Result"
            for picture, at in (("mlflow-run", address), ("mlflow-result", runs)):
                page.goto("about:blank")  # a change of the fragment alone loads nothing
                page.goto(at)
                page.wait_for_timeout(8000)
                keep(page, out / f"{picture}.png", full=False)
            server.terminate()
        browser.close()


if __name__ == "__main__":
    main()
