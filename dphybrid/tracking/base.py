"""What the rest of the library asks of a tracker: a handful of verbs. Here each does nothing, so the base is also the null object."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

Status = Literal["FINISHED", "FAILED", "KILLED"]


class Tracker:
    """The record of one run. This one records nothing; `MlflowTracker` is the real one."""

    run_id = ""
    tracking_uri = ""

    @property
    def run_url(self) -> str:
        """Where a person finds the run."""
        return ""

    @property
    def ui_command(self) -> str:
        """What to type, or open, to get there."""
        return ""

    def start(
        self,
        run_name: str,
        params: Mapping[str, str],
        tags: Mapping[str, str],
        description: str,
        resume_run_id: str | None = None,
    ) -> str:
        """Create the run, or open it again; return its id."""
        return resume_run_id or ""

    def attach(self, run_id: str) -> None:
        """Go on recording a run that exists."""

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Record numbers at a step. Returns at once; sending happens elsewhere."""

    def log_text(self, name: str, text: str) -> None:
        """Record a text file."""

    def log_table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Record rows with equal keys; the first one tells them apart when runs are compared."""

    def log_figure(self, name: str, png: bytes) -> None:
        """Record a picture."""

    def log_file(self, path: Path, folder: str) -> None:
        """Record a file under `folder` ("" for the top)."""

    def log_dataset(self, name: str, digest: str, source: str, num_rows: int, schema: Mapping[str, Any], context: str) -> None:
        """Record what the run was trained on."""

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
        return ""

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set short facts to filter and group runs by."""

    def set_description(self, markdown: str) -> None:
        """Set the page that stands first on the run."""

    def flush(self) -> None:
        """Send what is waiting."""

    def finish(self, status: Status) -> None:
        """Send what is waiting and end the run."""
