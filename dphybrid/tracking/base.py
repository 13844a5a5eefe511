"""The interface of a tracker. Most of its verbs make a record; the base class drops it, and so is also the
null object. Also here: the names that MLflow accepts."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from dphybrid.util.text import masked

Record = dict[str, Any]
"""op: the kind of record; the other keys depend on it. In an outbox also n: its number; t: when it was
written (ms); content: bytes of a file."""

Detail = Literal["brief", "full"]
Status = Literal["FINISHED", "FAILED", "KILLED"]

LEFT_OUT = "left_out.json"
"""Page in a model's folder that lists the files that were too large to upload: path, bytes, sha256."""
CHANGED_TAG = "dphybrid.changed."
"""Prefix of the tag for a value that a resumed run changed, `0.1 -> 0.2`: MLflow never changes a param."""
SWEEP_TAG = "dphybrid.sweep"
_MAX = 250
_STRANGE = re.compile(r"[^\w\-./: ]")


class Tracker:
    """The record of one run. This one records nothing; `MlflowTracker` is the real one.

    After `start` or `attach`, no verb raises because a server is unreachable. Only `register`, `flush`,
    `close` and `finish` wait for the server, each for a limited time.
    """

    run_id = ""
    tracking_uri = ""

    @property
    def run_url(self) -> str:
        """The address of the run's page."""
        return ""

    @property
    def views(self) -> dict[str, str]:
        """Name -> address of the experiment's saved views."""
        return {}

    @property
    def ui_command(self) -> str:
        """The command to type, or the page to open, to see the run."""
        return ""

    def start(
        self, run_name: str, params: Mapping[str, str], tags: Mapping[str, str], description: str
    ) -> str:
        """Create the run; return its id."""
        return ""

    def resume(self, run_id: str, tags: Mapping[str, str]) -> None:
        """Continue a run that ended: mark it as running, and do not record again the steps that it
        recorded."""

    def attach(self, run_id: str) -> None:
        """Continue to record a run that is still open."""

    def record(self, record: Record, *, content: bytes | None = None, sync: bool = False) -> None:
        """Store a record that one of the verbs below made; passwords are masked already.

        content: bytes of its file. sync: the record must survive a power loss.
        """

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Record metrics at a step."""

    def log_summary(self, metrics: Mapping[str, float]) -> None:
        """Record metrics of the run as a whole; a later attempt replaces them."""

    def log_text(self, name: str, text: str) -> None:
        """Record a text file."""
        self._log_content("file", name, masked(text).encode())

    def log_table(self, name: str, rows: Sequence[Mapping[str, object]]) -> None:
        """Record rows with equal keys. MLflow matches rows by the first key when it compares runs."""
        if rows:
            columns = list(rows[0])
            table = {"columns": columns, "data": [[row[column] for column in columns] for row in rows]}
            self._log_content("table", name, masked(json.dumps(table)).encode())

    def log_figure(self, name: str, png: bytes) -> None:
        """Record a picture."""
        self._log_content("file", name, png)

    def _log_content(self, op: str, name: str, content: bytes) -> None:
        folder, _, file = name.rpartition("/")
        self.record({"op": op, "name": file, "folder": folder}, content=content)

    def log_file(self, path: Path, folder: str) -> None:
        """Record a file under `folder` ("" for the top). Do not move the file: it is read when it is sent."""
        self.record({"op": "file", "path": str(path.absolute()), "folder": folder})

    def log_dataset(
        self, name: str, digest: str, source: str, num_rows: int, columns: Sequence[str], context: str
    ) -> None:
        """Record the data that the run was trained on."""
        values = {"num_rows": num_rows, "columns": list(columns), "context": context}
        self.record({"op": "dataset", "name": name, "digest": digest, "source": masked(source), **values})

    def keep(self) -> None:
        """Make all records so far survive a power loss. Called before a checkpoint is saved: a run resumed
        from it does not record the earlier steps again."""

    def log_checkpoints(self, kept: Sequence[Mapping[str, Any]], dataset: tuple[str, str] | None) -> None:
        """Record which checkpoints the run keeps now, each as a model that can be loaded back; remove the
        others from the record.

        kept: for each checkpoint its uid (differs when its content does), name, step, folder, role (best,
        latest, best+latest or kept) and metrics (of the evaluation before it, as they were logged). dataset:
        name and digest of the training data.
        """
        cards = [
            {**card, "folder": str(card["folder"].absolute()), "metrics": as_floats(card["metrics"])}
            for card in kept
        ]
        self.record({"op": "checkpoints", "kept": cards, "dataset": dataset}, sync=True)

    def register(self, name: str, uid: str, alias: str) -> str:
        """Make the recorded checkpoint `uid` a new version of the registered model `name`, with an alias that
        points to it.

        Wait for the server's answer, half a minute at most. Return why it is not registered (yet), or "".
        """
        return "nothing is recorded"

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set short facts to filter and group runs by."""
        self.record({"op": "tags", "values": as_shown(tags)})

    def set_description(self, markdown: str) -> None:
        """Set the description of the run, which its page begins with."""
        # MLflow shows this tag as the run's description.
        self.set_tags({"mlflow.note.content": markdown})

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Wait at most `timeout_s` seconds until all records so far have arrived; return whether they did."""
        return True

    def close(self) -> None:
        """Stop recording in this process; the run stays open."""

    def finish(self, status: Status) -> None:
        """End the run, and stop recording."""


def as_floats(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return metrics as Python floats, with names in valid Unicode: JSON takes no numpy or torch scalars, and
    SQLite no lone surrogates, which Python makes of bytes that are not UTF-8."""
    return {_unicode(name): float(value) for name, value in metrics.items()}


@lru_cache(maxsize=4096)
def _unicode(name: str) -> str:
    return name.encode(errors="replace").decode()


def as_shown(values: Mapping[str, str]) -> dict[str, str]:
    """Return params or tags without the passwords in them."""
    return {name: masked(str(value)) for name, value in values.items()}


@lru_cache(maxsize=4096)
def safe_name(name: str) -> str:
    """Return `name`, or, if MLflow would refuse it, a readable substitute that no other name gets. MLflow
    accepts at most 250 letters, digits and `_-./: `, and no empty part between slashes."""
    parts = [part for part in _STRANGE.sub("_", name).split("/") if part not in ("", ".", "..")]
    safe = "/".join(parts).strip() or "_"
    if safe == name and len(name) <= _MAX:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:6]
    # The digest separates names that are equal by now: both `loss(a)` and `loss[a]` became `loss_a_`.
    return f"{safe[: _MAX - 7]}-{digest}"
