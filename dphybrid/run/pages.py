"""The JSON pages of a run folder: training results, metrics and report."""

from pathlib import Path
from typing import ClassVar, Self

from pydantic import Field

from dphybrid.training.results import Chart, SplitRow
from dphybrid.util.errors import UserError
from dphybrid.util.pages import Page


class TrainedPage(Page):
    """What results and report share.

    Attributes:
        step_ms: Times of the steps with a full batch.
        stages: Seconds.
        splits: The rows that each replica received.
        split_lines: The same as printed.
    """

    DEPTH: ClassVar[int] = 2

    best_checkpoint: str
    step_ms: dict[str, float]
    stages: dict[str, float]
    splits: list[SplitRow]
    split_lines: list[str]


class ResultPage(TrainedPage):
    """`result.json`: the results of training. checkpoint: the latest one."""

    checkpoint: str
    steps: int
    devices: str
    history: list[dict[str, float]]

    @classmethod
    def before(cls, run_folder: Path) -> Self | None:
        """Return the page of the process that trained the run before; None without one, or a damaged one."""
        try:
            return cls.read(run_folder / "result.json")
        except UserError:
            return None


class MetricsPage(Page):
    """`metrics.json`: the best checkpoint's metrics on the validation rows and on the test rows, if there are
    any, the metrics of the task's floor, and the charts of its predictions for the test rows (without any,
    the validation rows), if its task has any."""

    metrics: dict[str, float]
    test: dict[str, float] = Field(default_factory=dict)
    floor: dict[str, float] = Field(default_factory=dict)
    charts: list[Chart] = Field(default_factory=list)


class Report(TrainedPage):
    """`report.json`: the report of a run.

    Attributes:
        beside: The comparison with the baseline, as text.
        page: Its file.
        registered_as: "" if the model is not in the registry; not_registered then says why.
        text: The lines that a training prints at its end.
    """

    run_name: str
    devices: str
    run_id: str
    run_url: str
    tracking_uri: str
    ui_command: str
    metrics: dict[str, float]
    test: dict[str, float] = Field(default_factory=dict)
    beside: str = ""
    latest_checkpoint: str
    page: str = ""
    registered_as: str
    not_registered: str = ""
    digests: dict[str, str]
    text: str = ""
