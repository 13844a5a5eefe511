"""Make the pictures on the pages: a report, splits, pages of MLflow and of Prefect.

    python docs/make_pictures.py            # into docs/pictures; needs playwright, pillow and Chromium
    python docs/make_pictures.py /tmp/look --width 390

The runs in the pictures are trained in a temporary folder, on one, two and eight virtual devices.
"""

import argparse
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

COLOURS = 256
"""Colours of a picture. 256 are enough for text and charts and save two thirds of the bytes; with 64, stages
in a chart would share colours."""
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"]
ROWS = [(("books", "music", "tea")[i % 3], i * 37 % 200 / 10, i % 13 < 2) for i in range(1500)]
VISITS = "shop,price,clicked\n" + "".join(
    f"{shop},{price},{int((shop == 'books' and price < 12) != noise)}\n" for shop, price, noise in ROWS
)
VALUES = ["--data.path", "visits.csv", "--data.label", "clicked", "--train.epochs", "2"]


def run(module: str, *words: str) -> None:
    """Run a module with command-line arguments."""
    subprocess.run([sys.executable, "-m", module, *words], check=True, stdout=subprocess.DEVNULL)


def picture_files(page: Any, out: Path, folder: Path) -> None:
    """Train three runs; save a picture of the last run's report."""
    (folder / "visits.csv").write_text(VISITS)
    for devices in ("cpu", "cpu*2", "cpu*8"):
        name = f"visits-{devices.replace('*', 'x')}"
        run("dphybrid", "train", *VALUES, "--devices", devices, "--run-name", name)
    reports = (folder / "data/mlflow/artifacts").glob("*/artifacts/Report.html")
    report = max(reports, key=lambda file: file.stat().st_mtime)
    keep(page, report.as_uri(), out / "report.png")


def picture_mlflow(page: Any, out: Path) -> None:
    """Save pictures of the last run in MLflow, and of the list of runs."""
    command = [sys.executable, "-u", "-m", "dphybrid", "ui", "visits-cpux8"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address = next(line.strip() for line in server.stdout if line.startswith("http"))
        keep(page, address, out / "mlflow-run.png", wait_s=8)
        runs = f"{address.partition('/runs/')[0]}/runs?workflowType=machine_learning"
        keep(page, runs, out / "mlflow-result.png", wait_s=8)
        server.terminate()


@contextmanager
def prefect_server(folder: Path) -> Iterator[str]:
    """Run a Prefect server on a free port; yield its address, which flows use from now on."""
    # Port 0: the kernel chooses a free port, which the server takes once this socket is closed.
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    os.environ |= {"PREFECT_HOME": str(folder / "prefect"), "PREFECT_SERVER_API_PORT": port}
    os.environ |= {"PREFECT_API_URL": f"http://127.0.0.1:{port}/api", "DO_NOT_TRACK": "1"}
    os.environ["PREFECT_SERVER_ANALYTICS_ENABLED"] = "false"
    command = [sys.executable, "-m", "prefect", "server", "start"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        for _ in range(120):  # the server takes some seconds to start
            time.sleep(1)
            with suppress(OSError), socket.create_connection(("127.0.0.1", int(port)), timeout=5):
                break
        yield f"http://127.0.0.1:{port}"
        server.terminate()


def picture_prefect(page: Any, out: Path, address: str) -> None:
    """Retrain a model; save a picture of the run."""
    run("dphybrid.flows.retrain_hybrid", "--recipe", "ctr", *VALUES, "--checkpoint.register-as", "visits")
    (flow_run,) = page.request.post(f"{address}/api/flow_runs/filter", data={}).json()
    shown = f"{address}/runs/flow-run/{flow_run['id']}"
    keep(page, shown, out / "prefect-run.png", wait_s=8, tab="Artifacts")


def keep(page: Any, address: str, file: Path, wait_s: float = 1.5, tab: str = "") -> None:
    """Save a page as a picture with few colours. tab: text of the tab to click first."""
    from PIL import Image

    page.goto("about:blank")  # an address that differs only in its fragment would not be loaded anew
    page.goto(address)
    page.wait_for_timeout(wait_s * 1000)
    if tab:
        page.get_by_text(tab, exact=True).click()
        page.wait_for_timeout(wait_s * 1000)
    page.screenshot(path=file)
    Image.open(file).convert("RGB").quantize(COLOURS).save(file, optimize=True)
    print(file, f"{file.stat().st_size / 1000:.0f} kB")


def main() -> None:
    """Make all pictures."""
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
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        page = browser.new_page(viewport={"width": asked.width, "height": 900})
        picture_files(page, out, folder)
        picture_mlflow(page, out)
        with prefect_server(folder) as address:
            picture_prefect(page, out, address)
        browser.close()


if __name__ == "__main__":
    main()
