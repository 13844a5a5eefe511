"""The JSON pages of a run folder: training results, metrics and report."""

from pathlib import Path
from typing import ClassVar, Self

from pydantic import Field

from dphybrid.training.results import Chart, Confusion, SavingCosts, SplitRow
from dphybrid.util.errors import UserError
from dphybrid.util.pages import Page


class ResultPage(Page):
    """`result.json`: the results of training.

    Attributes:
        checkpoint: The latest one.
        step_ms: Times of the steps with a full batch; there are steps_timed of them.
        stages: Seconds.
        saving: What the checkpoints cost.
        splits: The rows that each replica received.
        split_lines: The same as printed.
    """

    DEPTH: ClassVar[int] = 2

    checkpoint: str
    best_checkpoint: str
    steps: int
    epochs: int
    devices: str
    system: dict[str, float]
    history: list[dict[str, float]]
    best_value: float | None
    step_ms: dict[str, float]
    steps_timed: int
    stages: dict[str, float]
    steps_per_epoch: int
    saving: SavingCosts = SavingCosts()
    splits: list[SplitRow]
    split_lines: list[str]

    @classmethod
    def before(cls, run_folder: Path) -> Self | None:
        """Return the page of the process that trained the run before; None without one, or a damaged one."""
        try:
            return cls.read(run_folder / "result.json")
        except UserError:
            return None


class MetricsPage(Page):
    """`metrics.json`: the best checkpoint's metrics on the validation rows and on the test rows, if there are
    any, the metrics of the baseline, and the charts of its predictions for the test rows (without any, the
    validation rows), if its task has any."""

    metrics: dict[str, float]
    test: dict[str, float] = Field(default_factory=dict)
    baselines: dict[str, dict[str, float]] = Field(default_factory=dict)
    charts: list[Chart | Confusion] = Field(default_factory=list)


class Report(Page):
    """The report of a run; `--report FILE` writes it as JSON.

    Attributes:
        stages: Seconds.
        stages_ms: Milliseconds of an average step.
        saving: What the checkpoints cost.
        beside: The comparison with the baseline, as text.
        page: Its file.
        registered_as: "" if the model is not in the registry; not_registered then says why.
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
    best_checkpoint: str
    latest_checkpoint: str
    page: str = ""
    registered_as: str
    not_registered: str = ""
    splits: list[SplitRow]
    split_lines: list[str]
    stages: dict[str, float]
    stages_ms: dict[str, float] = Field(default_factory=dict)
    saving: SavingCosts = SavingCosts()
    step_ms: dict[str, float]
    warnings: list[str]
    digests: dict[str, str]
    text: str
