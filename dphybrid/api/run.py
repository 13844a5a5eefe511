"""Runs for Python and notebooks: metrics, splits, model, predictions and report."""

import html
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from dphybrid.config import ExperimentConfig
from dphybrid.config.settings import Settings, load_settings
from dphybrid.run.folder import Run, all_runs, read_run
from dphybrid.run.pages import MetricsPage, Report, ResultPage
from dphybrid.util.errors import UserError, suggestion
from dphybrid.util.text import metric_text

if TYPE_CHECKING:  # a list of runs needs no torch
    from torch import nn

    from dphybrid.serving.evaluate import Evaluation

_REPORT_HEIGHT = 640
"""Height in pixels of a report in a notebook's cell, where it scrolls."""


class TrainedRun:
    """A run, as `dphybrid.train` returns it and `dphybrid.runs()` lists it. folder: of the run.

    Properties read the run's folder when they are used, so values are current and a pickle is small. Model
    and predictor are loaded once.
    """

    def __init__(self, folder: str | Path, settings: Settings | None = None) -> None:
        """Raises UserError for a folder without a run."""
        self.folder = Path(folder)
        # Kept, because the settings also decide from which packages a run's page may name code.
        self._settings = settings or load_settings()
        self._run: Run = read_run(self.folder, self._settings)

    @property
    def name(self) -> str:
        """The run's name, which commands take, too."""
        return self.folder.name

    @property
    def run_id(self) -> str:
        """The run's id in MLflow; empty if it is not recorded there."""
        return self._run.page.run_id

    @property
    def config(self) -> ExperimentConfig:
        """Every value of the experiment."""
        return self._run.config

    @property
    def status(self) -> str:
        """finished, running or stopped. `dphybrid.train(..., resume=run.name)` continues a stopped run."""
        return self._run.status

    @property
    def metrics(self) -> dict[str, float]:
        """The best checkpoint's metrics on the validation split; empty before the run has ended."""
        return self._measured("metrics")

    @property
    def test_metrics(self) -> dict[str, float]:
        """The best checkpoint's metrics on the test rows; empty without any, and before the run has ended."""
        return self._measured("test")

    def _measured(self, rows: str) -> dict[str, float]:
        page = self.folder / "metrics.json"
        return getattr(MetricsPage.read(page), rows) if page.is_file() else {}

    @property
    def splits(self) -> pl.DataFrame:
        """How batches were split: one row for each split and replica. Raises UserError before the training
        has ended."""
        # infer_schema_length=None, here and below: types by all rows, as the first ones may lack a value.
        splits = ResultPage.read(self._trained("result.json")).splits
        return pl.DataFrame([row.table_row() for row in splits], infer_schema_length=None)

    @property
    def history(self) -> pl.DataFrame:
        """Epoch, step, training loss and validation metrics, one row per epoch. Raises UserError before the
        training has ended."""
        rows = ResultPage.read(self._trained("result.json")).history
        return pl.DataFrame(rows, infer_schema_length=None).with_row_index("epoch", offset=1)

    @property
    def checkpoint(self) -> Path:
        """Folder of the best checkpoint. Raises UserError if the run has no checkpoint yet."""
        from dphybrid.serving.load import find_checkpoint

        return find_checkpoint(str(self.folder), self._settings)

    @cached_property
    def model(self) -> "nn.Module":
        """The best checkpoint's module, on the CPU. `dphybrid.load_model(run.name, devices)` loads it for
        other devices."""
        # Cached, as loading reads the whole checkpoint.
        from dphybrid.serving.load import model_from_checkpoint

        return model_from_checkpoint(self.checkpoint, settings=self._settings)

    @cached_property
    def predictor(self) -> Any:
        """The object that `dphybrid.load(run.name)` returns. Raises UserError if the recipe does not
        predict."""
        from dphybrid.serving.predict import open_predictor

        return open_predictor(self.checkpoint, settings=self._settings)

    def predict(self, rows: object) -> Any:
        """Return the predictor's answer for new rows; see `Predictor.predict`."""
        return self.predictor.predict(rows)

    def evaluate(self, rows: object) -> "Evaluation":
        """Evaluate the best checkpoint on rows with known answers: metrics with intervals, and each class.
        rows: of a table, later interactions, triples, texts, or a split as a recipe's `rows` returns it; also
        a path. Raises UserError for rows that the recipe does not evaluate."""
        from dphybrid.serving.evaluate import evaluate_checkpoint

        return evaluate_checkpoint(self.checkpoint, rows, lambda: self.predictor, lambda: self.model)

    def recommend(self, users: object = None, k: int = 10, *, history: object = None) -> pl.DataFrame:
        """Return user, rank, item and score of the k best items for each user; see `Recommender.recommend`.
        history: the items that a user has met, for users who were not in training.
        Raises UserError for recipes that do not recommend."""
        # By the method, not the class: a user's recipe may have its own kind of predictor.
        if not hasattr(self.predictor, "recommend"):
            raise UserError(
                f"run {self.name}: recipe {self._run.page.recipe} scores rows, with predict(rows); recipe "
                "retrieval recommends items"
            )
        return self.predictor.recommend(users, k, history=history)

    def report(self) -> "RunReport":
        """Return the report: results as text, as values and as a page. Raises UserError before the run has
        ended."""
        return RunReport(self._run, self._trained("report.json"))

    def _trained(self, page: str) -> Path:
        file = self.folder / page
        if not file.is_file():
            raise UserError(
                f"run {self.name}: is {self.status} and has no {page} yet; "
                f"dphybrid.train(..., resume={self.name!r}) continues it"
            )
        return file

    def __getstate__(self) -> dict[str, object]:
        """Return the state for a pickle: the run's place, without its model and MLflow's address."""
        # Model and predictor are read again from the folder; a pickled table could be larger than memory.
        # The address may hold a password, and a run that is read does not need it.
        settings = self._settings.model_copy(update={"tracking_uri": None})
        return {"folder": self.folder, "_settings": settings, "_run": replace(self._run, settings=settings)}

    def __repr__(self) -> str:
        shown = ", ".join(f"{name} {metric_text(value)}" for name, value in self.metrics.items())
        return f"<run {self.name}: {shown or self.status}>"


class RunReport:
    """The report of a run. `text`: the lines that the command line prints; `values`: the numbers; `page()`:
    the report as HTML, which notebooks show."""

    def __init__(self, run: Run, file: Path) -> None:
        self._run = run
        self.values: Report = Report.read(file)

    @property
    def text(self) -> str:
        """The last lines that the training prints."""
        return self.values.text.strip("\n")

    def page(self) -> str:
        """Return the report as one self-contained HTML page."""
        return (self._run.folder / "Report.html").read_text(encoding="utf-8")

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        # In an iframe, the styles of page and notebook do not mix; sandbox="" forbids scripts.
        return (
            f'<iframe srcdoc="{html.escape(self.page())}" sandbox="" '
            f'style="width:100%;height:{_REPORT_HEIGHT}px;border:1px solid #d8dee6"></iframe>'
        )


class Runs(list[TrainedRun]):
    """A list of runs, newest first, also indexed by name: `runs["NAME"]`."""

    def __getitem__(self, which: Any) -> Any:
        if not isinstance(which, str):
            return super().__getitem__(which)
        for run in self:
            if run.name == which:
                return run
        known = [run.name for run in self] or ["none"]
        raise UserError(f"{which}: there is no run of that name{suggestion(which, known)}")

    def frame(self) -> pl.DataFrame:
        """Return name, recipe, devices, status, start and metrics, one row per run."""
        rows = []
        for run in self:
            page = run._run.page
            facts = {"run": run.name, "recipe": page.recipe, "devices": page.devices, "status": run.status}
            rows.append({**facts, "started": page.created[:19].replace("T", " "), **run.metrics})
        # None: infer the columns from all rows, as recipes differ in metrics and an unfinished run has none.
        return pl.DataFrame(rows, infer_schema_length=None)

    def __repr__(self) -> str:
        return "\n".join(map(repr, self)) or "no runs"

    def _repr_html_(self) -> str:
        with pl.Config(
            tbl_rows=-1, tbl_cols=-1, fmt_str_lengths=200, float_precision=4, tbl_hide_dataframe_shape=True
        ):
            return self.frame()._repr_html_()


def runs(recipe: str | None = None) -> Runs:
    """Return the runs of the data folder, newest first. recipe: only those of this recipe."""
    settings = load_settings()
    found = [run for run in all_runs(settings) if recipe is None or run.page.recipe == recipe]
    return Runs([TrainedRun(run.folder, settings) for run in reversed(found)])


def tracking_uri() -> str:
    """Return MLflow's address of the runs and models, for `mlflow.set_tracking_uri` and
    `MLFLOW_TRACKING_URI`: the server in the settings, else the database in the data folder. Raises UserError
    if nothing is recorded there yet or the server does not answer."""
    from dphybrid.tracking.opening import store_to_read

    settings = load_settings()
    return store_to_read(settings.mlflow_uri, settings.mlflow_dir)
