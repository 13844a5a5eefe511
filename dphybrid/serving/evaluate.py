"""Evaluates a trained model on rows with known answers: the recipe's metrics with their intervals; for a
table also the predicted class at each threshold, each class, and figures. Trainings do not import
scikit-learn, which takes a second.

Letters: B rows, R bootstrap samples, C classes.
"""

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from sklearn.calibration import calibration_curve
from sklearn.metrics import confusion_matrix, precision_recall_curve, precision_recall_fscore_support
from torch import Tensor, nn

from dphybrid.config.settings import load_settings
from dphybrid.data.batches import Array, ArrayDataset, evenly_spaced
from dphybrid.data.table.encoder import Unknown
from dphybrid.data.table.frames import as_frame, rows_of
from dphybrid.recipes.configs import stored_config
from dphybrid.recipes.registry import find_recipe
from dphybrid.run.report import chart_figure
from dphybrid.serving.predict import Predictor
from dphybrid.tracking.html import html_of, table
from dphybrid.training.bootstrap import interval, resampled
from dphybrid.training.checkpoint import read_state
from dphybrid.training.label_tasks import LabelTask
from dphybrid.training.loop import validation_outputs
from dphybrid.training.metrics import Task
from dphybrid.training.results import Chart, Confusion
from dphybrid.util.errors import UserError, counted, suggestion
from dphybrid.util.text import aligned, metric_text

SAMPLES = 200
"""How often rows are drawn again for an interval."""
THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
_BINS = 10
_SHOWN_POINTS = 200
_SHOWN_CLASSES = 12
"""Most classes of a confusion matrix: the most frequent ones."""

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, repr=False)
class Evaluation:
    """What `evaluate` found.

    Attributes:
        intervals: Of each metric, the 2.5 and 97.5 percentiles over rows drawn again with replacement (the
            percentile bootstrap of Efron and Tibshirani 1993).
        thresholds: For a binary label, a row for each threshold.
        classes: For several classes, a row for each.
        notes: What was left out.
        charts: ROC, precision and recall, calibration, confusion matrix, or residuals.
        sample: What `num_rows` counts, such as users.
    """

    num_rows: int
    left_out: int
    metric: str
    metrics: dict[str, float]
    intervals: dict[str, tuple[float, float]]
    thresholds: pl.DataFrame | None = None
    classes: pl.DataFrame | None = None
    notes: list[str] = field(default_factory=list)
    charts: list[Chart | Confusion] = field(default_factory=list)
    sample: str = "row"

    @property
    def tables(self) -> dict[str, list[list[str]]]:
        """The tables as texts, by title: names of columns, then rows."""
        measured = [
            [name + " (decides)" * (name == self.metric), *map(metric_text, (value, *self.intervals[name]))]
            for name, value in self.metrics.items()
        ]
        shown = {"Metrics": [["metric", "value", "95% from", "to"], *measured]}
        for title, frame in (("By threshold", self.thresholds), ("Classes", self.classes)):
            if frame is not None:
                shown[title] = [frame.columns, *([_cell(cell) for cell in row] for row in frame.iter_rows())]
        return shown

    def text(self) -> str:
        """Return the result as lines for the console."""
        lines = [self._head]
        for title, rows in self.tables.items():
            lines += [f"{title}:", *(f"  {line}" for line in aligned(rows))]
        return "\n".join(lines)

    __repr__ = text

    @property
    def _head(self) -> str:
        left_out = [f"Left out: {counted(self.left_out, 'row')} without a label"] * (self.left_out > 0)
        return "\n".join([f"Evaluated on {counted(self.num_rows, self.sample)}", *self.notes, *left_out])

    def _repr_html_(self) -> str:
        parts = [f"<p>{html.escape(title)}</p>{table(rows)}" for title, rows in self.tables.items()]
        return f"<p>{html.escape(self._head)}</p>{''.join(parts)}"

    def page(self, title: str) -> str:
        """Return the result as an HTML page: the same tables, and figures."""
        figures = {name: [table(rows)] for name, rows in self.tables.items()}
        figures["What it predicts"] = [chart_figure(chart) for chart in self.charts]
        return html_of(title, {"Evaluation": self._head}, figures)


def _cell(value: object) -> str:
    return "-" if value is None else metric_text(value) if isinstance(value, float) else str(value)


def evaluate(predictor: Predictor, rows: object, on_progress: Progress | None = None) -> Evaluation:
    """Evaluate a model on rows that have its label.

    Raises UserError if the label's column or another one is missing, for a label that is no number or class
    of the model, and if no row is left.

    Args:
        rows: What `Predictor.predict` takes. Rows without a label are left out.
    """
    frame = _frame_of(predictor, rows)
    label = predictor.encoder.label
    if label.name not in frame.columns:
        hint = suggestion(label.name, frame.columns)
        raise UserError(
            f"the rows have no column {label.name!r}, the label{hint}; dphybrid predict needs none"
        )
    answers_B = predictor.answers(frame[label.name])
    known_B = ~np.isnan(answers_B)
    if not known_B.any():
        raise UserError(f"the rows have no label: {label.name!r} is empty in all of them")
    frame, unknown = frame.filter(pl.Series(known_B)), Unknown()
    labels_B = torch.from_numpy(label.encoded(answers_B[known_B]))
    encoded = {**predictor.encoded(frame, unknown), "labels_B": labels_B}
    arrays = {name: tensor.numpy() for name, tensor in encoded.items()}
    data = ArrayDataset(arrays, np.arange(len(labels_B)))
    outputs = validation_outputs(predictor.model, data, predictor.batch_size, predictor.task)
    metrics, intervals = _measured(predictor.task, outputs, on_progress)
    probabilities = predictor.task.link(outputs["logits"]).numpy()
    return Evaluation(
        num_rows=len(frame),
        left_out=int((~known_B).sum()),
        metric=predictor.task.metric,
        metrics=metrics,
        intervals=intervals,
        thresholds=_thresholds(labels_B.numpy(), probabilities) if label.task == "binary" else None,
        classes=_classes(predictor, labels_B.numpy(), probabilities) if predictor.classes else None,
        notes=unknown.lines(predictor.encoder.columns),
        charts=_figures(predictor.task, outputs),
    )


def evaluate_checkpoint(
    checkpoint: Path,
    rows: object,
    predictor: Callable[[], Any],
    model: Callable[[], nn.Module],
    *,
    batch_size: int | None = None,
    on_progress: Progress | None = None,
) -> Evaluation:
    """Evaluate a checkpoint of any recipe on rows whose answers are known. Raises UserError.

    Args:
        rows: What `evaluate` takes for a table, else what the recipe's `samples` takes.
        predictor, model: Return the checkpoint's; one is called.
        batch_size: Samples of a batch, for all recipes but tables; None: as in training.
    """
    state = read_state(checkpoint)
    config = stored_config(state.config, checkpoint / "state.json", load_settings())
    recipe = find_recipe(config.recipe)
    if recipe.tabular:
        return evaluate(predictor(), rows, on_progress=on_progress)
    loaded, task = model(), recipe.task_of(config, state.info)
    data, notes = recipe.samples(checkpoint, config, loaded, rows)
    outputs = validation_outputs(loaded, data, batch_size or config.train.batch_size, task)
    metrics, intervals = _measured(task, outputs, on_progress)
    return Evaluation(
        num_rows=len(data),
        left_out=0,
        metric=task.metric,
        metrics=metrics,
        intervals=intervals,
        notes=notes,
        charts=list(task.charts(outputs)) if task.charts else [],
        sample=recipe.sample,
    )


def _measured(
    task: Task, outputs: dict[str, Tensor], on_progress: Progress | None
) -> tuple[dict[str, float], dict[str, tuple[float, float]]]:
    """Return the metrics and their intervals."""
    metrics, drawn = task.compute(outputs), resampled(task, [outputs], SAMPLES, 0, on_progress)
    return metrics, {
        name: interval([found[name] for (found,) in drawn] or [value]) for name, value in metrics.items()
    }


def _frame_of(predictor: Predictor, rows: object) -> pl.DataFrame:
    """Return the rows in memory, with the columns that the model reads, and the label."""
    if not isinstance(rows, str | Path):
        frame = as_frame(rows, "the rows").lazy().collect()
        predictor.check_columns(frame.columns, "the rows")
        return frame
    wanted = [*predictor.encoder.names, predictor.encoder.label.name]
    with rows_of(str(rows), predictor.reading(str(rows), {}), wanted) as found:
        predictor.check_columns(found.names, str(rows))
        return found.table([name for name in wanted if name in found.names])


def _thresholds(labels_B: Array, probabilities_B: Array) -> pl.DataFrame:
    """Return precision, recall, F1 and the share predicted positive, by threshold."""
    rows = []
    for threshold in THRESHOLDS:
        chosen_B = probabilities_B >= threshold
        scores = precision_recall_fscore_support(labels_B, chosen_B, average="binary", zero_division=np.nan)
        rows.append((threshold, *scores[:3], float(chosen_B.mean())))
    names = ["threshold", "precision", "recall", "f1", "predicted_positive"]
    return pl.DataFrame(rows, names, orient="row").fill_nan(None)


def _classes(predictor: Predictor, labels_B: Array, probabilities: Array) -> pl.DataFrame:
    """Return rows, precision, recall and F1 of each class."""
    predicted_B = probabilities.argmax(1) if probabilities.ndim == 2 else probabilities >= 0.5
    numbers = np.arange(len(predictor.classes))
    precision_C, recall_C, f1_C, rows_C = precision_recall_fscore_support(
        labels_B, predicted_B, labels=numbers, zero_division=np.nan
    )
    columns = {"class": predictor.classes, "rows": rows_C, "precision": precision_C, "recall": recall_C}
    return pl.DataFrame({**columns, "f1": f1_C}).fill_nan(None)


def _figures(task: LabelTask, outputs: dict[str, Tensor]) -> list[Chart | Confusion]:
    """Return the figures of a model's outputs for rows with a label: those of a run's report, and for classes
    calibration (of several: of the predicted one) and the confusion matrix, for two also precision and
    recall; for numbers the residuals."""
    shown: list[Chart | Confusion] = [*(task.charts(outputs) if task.charts else [])]
    predicted, labels_B = task.link(outputs["logits"]).numpy(), outputs["labels_B"].numpy()
    if task.label.task == "regression":
        rows = evenly_spaced(len(labels_B), _SHOWN_POINTS)
        left_B = task.link(outputs["labels_B"]).numpy() - predicted
        axes = ("predicted", "observed - predicted")
        return [*shown, Chart.of("residuals", "Residuals", axes, predicted[rows], left_B[rows], line="zero")]
    numbers_B = labels_B.astype(np.int64)
    if task.label.task == "binary":
        precision_T, recall_T, _ = precision_recall_curve(numbers_B, predicted)
        rows, axes = evenly_spaced(len(recall_T), _SHOWN_POINTS), ("recall", "precision")
        curve = recall_T[rows], precision_T[rows]
        title = "Precision and recall"
        shown.append(Chart.of("precision_recall", title, axes, *curve, line="none", drawn="line"))
        found_B, right_B, certain_B = (predicted >= 0.5).astype(np.int64), numbers_B, predicted
        axes = ("mean probability", f"share of rows that are {task.label.classes[1]}")
    else:
        found_B, certain_B = predicted.argmax(1), predicted.max(1)
        right_B = (found_B == numbers_B).astype(np.int64)
        axes = ("mean probability of the predicted class", "share of rows predicted correctly")
    share_T, mean_T = calibration_curve(right_B, certain_B, n_bins=_BINS, strategy="quantile")
    calibration = Chart.of("calibration", "Calibration", axes, mean_T, share_T)
    return [*shown, calibration, _confusion(task.label.classes, numbers_B, found_B)]


def _confusion(classes: Sequence[str], labels_B: Array, found_B: Array) -> Confusion:
    frequent = np.argsort(-np.bincount(labels_B, minlength=len(classes)), kind="stable")[:_SHOWN_CLASSES]
    numbers = np.sort(frequent)
    title = "Rows of each class by predicted class (shares)"
    if len(classes) > len(numbers):
        title = f"{title}; the {len(numbers)} most frequent of {len(classes)} classes"
    counts_CC = confusion_matrix(labels_B, found_B, labels=numbers)
    names = [classes[number] for number in numbers]
    return Confusion(name="confusion", title=title, classes=names, counts=counts_CC.tolist())
