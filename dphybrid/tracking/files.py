"""A run's record as plain files in its folder, where MLflow is not installed or not wanted."""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dphybrid.tracking.base import Status, Tracker
from dphybrid.tracking.report import REPORT_PAGE
from dphybrid.util.files import write_json, write_text

FILES = "files"
"""The tracking URI that asks for it."""


class FileTracker(Tracker):
    """Writes `record/` in the run's folder below `runs`; a run's id is its folder's name.

    `run.json` has the run's params, tags, summary and status, `metrics.jsonl` a line for each call of
    `log_metrics`: {"step": 10, "train/loss": 0.3}. Texts, figures and tables are files by their names.
    Checkpoints stay where they are, and nothing is registered.
    """

    tracking_uri = FILES

    def __init__(self, runs: Path) -> None:
        self._runs = runs
        self._page: dict[str, Any] = {}
        self._recorded: set[tuple[int, str]] = set()

    @property
    def _folder(self) -> Path:
        return self._runs / self.run_id / "record"

    @property
    def run_url(self) -> str:
        return str(self._folder / REPORT_PAGE)

    @property
    def ui_command(self) -> str:
        return self.run_url

    def start(
        self, run_name: str, params: Mapping[str, str], tags: Mapping[str, str], description: str
    ) -> str:
        self.run_id = run_name
        self._folder.mkdir(parents=True, exist_ok=True)
        self._page = {"params": dict(params), "tags": dict(tags), "summary": {}, "status": "RUNNING"}
        self._write()
        return run_name

    def resume(self, run_id: str, tags: Mapping[str, str]) -> None:
        self.attach(run_id)
        self._page["status"] = "RUNNING"
        self.set_tags(tags)

    def attach(self, run_id: str) -> None:
        self.run_id = run_id
        if (
            not run_id or not (self._folder / "run.json").is_file()
        ):  # a run that recorded nothing, or elsewhere
            self.run_id = ""
            return
        self._page = json.loads((self._folder / "run.json").read_text(encoding="utf-8"))
        metrics = self._folder / "metrics.jsonl"
        whole = metrics.read_text(encoding="utf-8").splitlines(True) if metrics.is_file() else []
        if whole and not whole[-1].endswith("\n"):  # cut off by a crash
            write_text(metrics, "".join(whole := whole[:-1]))
        rows = [json.loads(line) for line in whole]
        self._recorded = {(row["step"], name) for row in rows for name in row}

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        fresh = {name: value for name, value in metrics.items() if (step, name) not in self._recorded}
        if self.run_id and fresh:
            self._recorded |= {(step, name) for name in fresh}
            with (self._folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, **fresh}) + "\n")

    def log_summary(self, metrics: Mapping[str, float]) -> None:
        self._page.get("summary", {}).update(metrics)
        self._write()

    def log_text(self, name: str, text: str) -> None:
        if self.run_id:
            write_text(self._place(name), text)

    def log_table(self, name: str, rows: Sequence[Mapping[str, object]]) -> None:
        if self.run_id:
            write_json(self._place(name), list(rows))

    def log_figure(self, name: str, png: bytes) -> None:
        if self.run_id:
            self._place(name).write_bytes(png)

    def log_file(self, path: Path, folder: str) -> None:
        if self.run_id and not path.is_relative_to(self._runs / self.run_id):
            shutil.copy(path, self._place(f"{folder}/{path.name}" if folder else path.name))

    def log_dataset(
        self, name: str, digest: str, source: str, num_rows: int, columns: Sequence[str], context: str
    ) -> None:
        self._page["dataset"] = {"name": name, "digest": digest, "source": source, "rows": num_rows}
        self._write()

    def keep(self) -> None:
        if self.run_id and (metrics := self._folder / "metrics.jsonl").is_file():
            with metrics.open("rb") as file:
                os.fsync(file.fileno())

    def register(self, name: str, uid: str, alias: str) -> str:
        return "runs are recorded in files; registering needs MLflow: pip install 'dphybrid[mlflow]'"

    def set_tags(self, tags: Mapping[str, str]) -> None:
        self._page.get("tags", {}).update(tags)
        self._write()

    def finish(self, status: Status) -> None:
        self._page["status"] = status
        self._write()

    def _place(self, name: str) -> Path:
        place = self._folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        return place

    def _write(self) -> None:
        if self.run_id:
            write_json(self._folder / "run.json", self._page)
