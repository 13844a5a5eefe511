"""The interface of a tracker: a handful of verbs, most of which make a record. Here records are dropped, so
the base is also the null object. And the names that MLflow takes."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from dphybrid.util.text import masked

Record = dict[str, Any]
"""op: its kind; values of its kind. In an outbox also n: its number; t: when it was written (ms); content:
bytes of a file."""

Detail = Literal["brief", "full"]
Status = Literal["FINISHED", "FAILED", "KILLED"]

LEFT_OUT = "left_out.json"
"""Page in a model's folder that names the files that were too large to upload: path, bytes, sha256."""
CHANGED_TAG = "dphybrid.changed."
"""Begins the tag of a value that a resumed run changed, `0.1 -> 0.2`: MLflow keeps params as they were."""
SWEEP_TAG = "dphybrid.sweep"
_MAX = 250
_STRANGE = re.compile(r"[^\w\-./: ]")


class Tracker:
    """The record of one run. This one records nothing; `MlflowTracker` is the real one.

    After `start` or `attach` no verb waits for a server, and none raises because one is away.
    """

    run_id = ""
    tracking_uri = ""

    @property
    def run_url(self) -> str:
        """Where a person finds the run."""
        return ""

    @property
    def views(self) -> dict[str, str]:
        """Name -> address of the views of all runs."""
        return {}

    @property
    def ui_command(self) -> str:
        """What to type, or open, to get there."""
        return ""

    def start(
        self, run_name: str, params: Mapping[str, str], tags: Mapping[str, str], description: str
    ) -> str:
        """Create the run; return its id."""
        return ""

    def resume(self, run_id: str, tags: Mapping[str, str]) -> None:
        """Go on with a run that ended: it counts as running again, and steps recorded before are not recorded
        twice."""

    def attach(self, run_id: str) -> None:
        """Go on recording a run that is open."""

    def record(self, record: Record, *, content: bytes | None = None, sync: bool = False) -> None:
        """Take what the verbs below make, free of passwords.

        content: of a file. sync: it outlives a loss of power.
        """

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Record numbers at a step."""

    def log_summary(self, metrics: Mapping[str, float]) -> None:
        """Record numbers that describe the run as a whole; those of a later attempt replace them."""

    def log_text(self, name: str, text: str) -> None:
        """Record a text file."""
        self._log_content("file", name, masked(text).encode())

    def log_table(self, name: str, rows: Sequence[Mapping[str, object]]) -> None:
        """Record rows with equal keys; the first one tells them apart when runs are compared."""
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
        """Record a file under `folder` ("" for the top). It must stay where it is."""
        self.record({"op": "file", "path": str(path.absolute()), "folder": folder})

    def log_dataset(
        self, name: str, digest: str, source: str, num_rows: int, columns: Sequence[str], context: str
    ) -> None:
        """Record what the run was trained on."""
        values = {"num_rows": num_rows, "columns": list(columns), "context": context}
        self.record({"op": "dataset", "name": name, "digest": digest, "source": masked(source), **values})

    def keep(self) -> None:
        """Have what was recorded so far outlive a loss of power: before a checkpoint does, from which a run
        would go on."""

    def log_checkpoints(self, kept: Sequence[Mapping[str, Any]], dataset: tuple[str, str] | None) -> None:
        """Record which checkpoints the run keeps now, each as a model that can be loaded back; others are
        removed from the record.

        kept: uid (differs when its content does), name, step, folder, role (best, latest, best+latest or
        kept) and metrics (of the evaluation before it, as they were logged) of each. dataset: name and digest
        of the data they were made from.
        """
        cards = [
            {**card, "folder": str(card["folder"].absolute()), "metrics": as_floats(card["metrics"])}
            for card in kept
        ]
        self.record({"op": "checkpoints", "kept": cards, "dataset": dataset}, sync=True)

    def register(self, name: str, uid: str, alias: str) -> str:
        """Make the recorded checkpoint `uid` a new version of the registered model `name`, with an alias that
        points to it.

        Waits for the server's answer, half a minute at most. Return why it is not registered (yet), "" when
        it is.
        """
        return "nothing is recorded"

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set short facts to filter and group runs by."""
        self.record({"op": "tags", "values": as_shown(tags)})

    def set_description(self, markdown: str) -> None:
        """Set the page that stands first on the run."""
        # MLflow shows this tag as the run's description.
        self.set_tags({"mlflow.note.content": markdown})

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Wait until everything so far has arrived, at most `timeout_s` seconds; return whether it has."""
        return True

    def close(self) -> None:
        """Stop recording in this process; the run stays open."""

    def finish(self, status: Status) -> None:
        """End the run, and stop recording."""


def as_floats(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return metrics as plain numbers: a record is written as JSON."""
    return {name: float(value) for name, value in metrics.items()}


def as_shown(values: Mapping[str, str]) -> dict[str, str]:
    """Return params or tags without the passwords in them."""
    return {name: masked(str(value)) for name, value in values.items()}


@lru_cache(maxsize=4096)
def safe_name(name: str) -> str:
    """Return `name`, or, where MLflow would refuse it, a readable substitute that no other name gets. MLflow
    takes letters, digits and `_-./: `, at most 250, and no empty part between slashes."""
    parts = [part for part in _STRANGE.sub("_", name).split("/") if part not in ("", ".", "..")]
    safe = "/".join(parts).strip() or "_"
    if safe == name and len(name) <= _MAX:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:6]
    # The digest keeps apart what looks the same by now: `loss(a)` and `loss[a]`.
    return f"{safe[: _MAX - 7]}-{digest}"
