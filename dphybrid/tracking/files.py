"""A run's record as plain files in its folder, if MLflow is not installed or not wanted."""

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from dphybrid.tracking.base import Record, Status, Tracker, as_floats, as_shown
from dphybrid.tracking.report import REPORT_PAGE
from dphybrid.util.files import write_bytes, write_json, write_text

FILES = "files"
"""The tracking URI that selects plain files."""


class FileTracker(Tracker):
    """Writes `record/` in the run's folder below `runs`; a run's id is its folder's name.

    `run.json` holds the run's params, tags, summary and status; `metrics.jsonl` one line for each call of
    `log_metrics`: {"step": 10, "train/loss": 0.3}. Texts, figures and tables are files of their own.
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
        self._page = {"params": as_shown(params), "tags": as_shown(tags), "summary": {}, "status": "RUNNING"}
        self._write()
        return run_name

    def resume(self, run_id: str, tags: Mapping[str, str]) -> None:
        self.attach(run_id)
        self._page["status"] = "RUNNING"
        self.set_tags(tags)

    def attach(self, run_id: str) -> None:
        self.run_id = run_id
        # If the run's first attempt recorded nothing, or recorded in MLflow, this one records nothing.
        if not run_id or not (self._folder / "run.json").is_file():
            self.run_id = ""
            return
        self._page = json.loads((self._folder / "run.json").read_text(encoding="utf-8"))
        metrics = self._folder / "metrics.jsonl"
        whole = metrics.read_text(encoding="utf-8").splitlines(True) if metrics.is_file() else []
        # A crash in mid write leaves half a line; the next line would be appended to it.
        if whole and not whole[-1].endswith("\n"):
            write_text(metrics, "".join(whole := whole[:-1]))
        # A resumed run repeats the steps after its checkpoint, whose metrics are in the file already.
        for line in whole:
            # A damaged line must not end the training; the repeated steps are recorded again.
            with suppress(ValueError, TypeError, KeyError):
                row = json.loads(line)
                self._recorded |= {(row["step"], name) for name in row}

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        values = as_floats(metrics)
        fresh = {name: value for name, value in values.items() if (step, name) not in self._recorded}
        if self.run_id and fresh:
            self._recorded |= {(step, name) for name in fresh}
            with (self._folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, **fresh}) + "\n")

    def log_summary(self, metrics: Mapping[str, float]) -> None:
        self._page.get("summary", {}).update(as_floats(metrics))
        self._write()

    def record(self, record: Record, *, content: bytes | None = None, sync: bool = False) -> None:
        if not self.run_id:
            return
        op, own = record["op"], self._folder.parent.absolute()
        if op == "tags":
            self._page["tags"].update(record["values"])
            self._write()
        elif op == "dataset":
            facts = {name: record[name] for name in ("name", "digest", "source")}
            self._page["dataset"] = facts | {"rows": record["num_rows"]}
            self._write()
        elif content is not None:
            write_bytes(self._place(record["folder"], record["name"]), content)
        # Files in the run's own folder need no copy: the record is in the same folder.
        elif op == "file" and not (path := Path(record["path"])).is_relative_to(own):
            shutil.copy(path, self._place(record["folder"], path.name))

    def set_description(self, markdown: str) -> None:
        """Do nothing: the report is a page of its own here."""

    def keep(self) -> None:
        if self.run_id and (metrics := self._folder / "metrics.jsonl").is_file():
            with metrics.open("rb") as file:
                os.fsync(file.fileno())

    def register(self, name: str, uid: str, alias: str) -> str:
        return "runs are recorded in files; registering needs MLflow: pip install 'dphybrid[mlflow]'"

    def finish(self, status: Status) -> None:
        self._page["status"] = status
        self._write()

    def _place(self, folder: str, name: str) -> Path:
        place = self._folder / folder
        place.mkdir(parents=True, exist_ok=True)
        return place / name

    def _write(self) -> None:
        if self.run_id:
            write_json(self._folder / "run.json", self._page)
