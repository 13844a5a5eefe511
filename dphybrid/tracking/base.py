"""What the rest of the library asks of a tracker: a handful of verbs, and a null object that takes them all and does nothing."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

Status = Literal["FINISHED", "FAILED", "KILLED"]


class Tracker(Protocol):
    """The record of one run."""

    run_id: str
    tracking_uri: str

    @property
    def run_url(self) -> str:
        """Where a person finds the run."""
        ...

    @property
    def ui_command(self) -> str:
        """What to type, or open, to get there."""
        ...

    def start(
        self,
        run_name: str,
        params: Mapping[str, str],
        tags: Mapping[str, str],
        description: str,
        resume_run_id: str | None = None,
    ) -> str:
        """Create the run, or open it again; return its id."""
        ...

    def attach(self, run_id: str) -> None:
        """Go on recording a run that exists."""
        ...

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None: ...

    def log_text(self, name: str, text: str) -> None: ...

    def log_table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Record rows with equal keys; the first one tells them apart when runs are compared."""
        ...

    def log_figure(self, name: str, png: bytes) -> None: ...

    def log_file(self, path: Path, folder: str) -> None: ...

    def log_dataset(
        self, name: str, digest: str, source: str, num_rows: int, schema: Mapping[str, Any], context: str
    ) -> None: ...

    def log_checkpoint(
        self,
        folder: Path,
        *,
        name: str,
        step: int,
        metrics: Mapping[str, float],
        dataset: tuple[str, str] | None,
        params: Mapping[str, str],
    ) -> str:
        """Record a checkpoint folder as a model that can be loaded back; return the model's id."""
        ...

    def set_tags(self, tags: Mapping[str, str]) -> None: ...

    def set_description(self, markdown: str) -> None: ...

    def finish(self, status: Status) -> None:
        """Send what is waiting and end the run."""
        ...

    def flush(self) -> None:
        """Send what is waiting."""
        ...


class NullTracker:
    """Takes every verb and records nothing."""

    run_id = ""
    tracking_uri = ""
    run_url = ""
    ui_command = ""

    def start(
        self,
        run_name: str,
        params: Mapping[str, str],
        tags: Mapping[str, str],
        description: str,
        resume_run_id: str | None = None,
    ) -> str:
        return resume_run_id or ""

    def attach(self, run_id: str) -> None: ...

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None: ...

    def log_text(self, name: str, text: str) -> None: ...

    def log_table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None: ...

    def log_figure(self, name: str, png: bytes) -> None: ...

    def log_file(self, path: Path, folder: str) -> None: ...

    def log_dataset(
        self, name: str, digest: str, source: str, num_rows: int, schema: Mapping[str, Any], context: str
    ) -> None: ...

    def log_checkpoint(
        self,
        folder: Path,
        *,
        name: str,
        step: int,
        metrics: Mapping[str, float],
        dataset: tuple[str, str] | None,
        params: Mapping[str, str],
    ) -> str:
        return ""

    def set_tags(self, tags: Mapping[str, str]) -> None: ...

    def set_description(self, markdown: str) -> None: ...

    def finish(self, status: Status) -> None: ...

    def flush(self) -> None: ...
