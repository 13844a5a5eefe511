"""Evaluates a trained model on rows with known answers: the recipe's metrics with their intervals; for a
table's classes also precision and recall of each. Trainings do not import scikit-learn, which takes a second.

Letters: B rows, C classes.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from sklearn.metrics import precision_recall_fscore_support
from torch import Tensor, nn

from dphybrid.config.settings import load_settings
from dphybrid.data.batches import Array, ArrayDataset
from dphybrid.data.table.encoder import Unknown
from dphybrid.data.table.files import find_files
from dphybrid.data.table.frames import as_frame, new_rows
from dphybrid.recipes.configs import stored_config
from dphybrid.recipes.registry import find_recipe
from dphybrid.serving.predict import Predictor
from dphybrid.training.bootstrap import interval, resampled
from dphybrid.training.checkpoint import read_state
from dphybrid.training.loop import validation_outputs
from dphybrid.training.metrics import Task
from dphybrid.util.errors import UserError, counted, suggestion
from dphybrid.util.text import aligned, metric_text

SAMPLES = 200
"""How often rows are drawn again for an interval."""
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, repr=False)
class Evaluation:
    """What `evaluate` found.

    Attributes:
        intervals: Of each metric, the 2.5 and 97.5 percentiles over rows drawn again with replacement (the
            percentile bootstrap of Efron and Tibshirani 1993).
        classes: For classes, a row for each.
        notes: What was left out.
        sample: What `num_rows` counts, such as users.
    """

    num_rows: int
    metric: str
    metrics: dict[str, float]
    intervals: dict[str, tuple[float, float]]
    classes: pl.DataFrame | None = None
    notes: list[str] = field(default_factory=list)
    sample: str = "row"

    def text(self) -> str:
        """Return the result as lines for the console."""
        measured = [
            [name + " (decides)" * (name == self.metric), *map(metric_text, (value, *self.intervals[name]))]
            for name, value in self.metrics.items()
        ]
        lines = [f"Evaluated on {counted(self.num_rows, self.sample)}", *self.notes]
        lines += aligned([["metric", "value", "95% from", "to"], *measured])
        if self.classes is not None:
            rows = [[_cell(cell) for cell in row] for row in self.classes.iter_rows()]
            lines += ["", *aligned([self.classes.columns, *rows])]
        return "\n".join(lines)

    __repr__ = text


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
    notes, without = unknown.lines(predictor.encoder.columns), int((~known_B).sum())
    if without:
        notes.append(f"Left out: {counted(without, 'row')} without a label")
    probabilities = predictor.task.link(outputs["logits"]).numpy()
    return Evaluation(
        num_rows=len(frame),
        metric=predictor.task.metric,
        metrics=metrics,
        intervals=intervals,
        classes=_classes(predictor, labels_B.numpy(), probabilities) if predictor.classes else None,
        notes=notes,
    )


def evaluate_checkpoint(
    checkpoint: Path,
    rows: object,
    predictor: Callable[[], Any],
    model: Callable[[], nn.Module],
    *,
    on_progress: Progress | None = None,
) -> Evaluation:
    """Evaluate a checkpoint of any recipe on rows whose answers are known. Raises UserError.

    Args:
        rows: What `evaluate` takes for a table, else what the recipe's `samples` takes.
        predictor, model: Return the checkpoint's; one is called.
    """
    state = read_state(checkpoint)
    config = stored_config(state.config, checkpoint / "state.json", load_settings())
    recipe = find_recipe(config.recipe)
    if recipe.tabular:
        return evaluate(predictor(), rows, on_progress=on_progress)
    loaded, task = model(), recipe.task_of(config, state.info)
    data, notes = recipe.samples(checkpoint, config, loaded, rows)
    outputs = validation_outputs(loaded, data, config.train.batch_size, task)
    metrics, intervals = _measured(task, outputs, on_progress)
    return Evaluation(
        num_rows=len(data),
        metric=task.metric,
        metrics=metrics,
        intervals=intervals,
        notes=notes,
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
    files, data = find_files(str(rows), "data.path"), predictor.reading(str(rows), {})
    with new_rows(files, data, wanted, whole=True) as found:
        predictor.check_columns(found.names, str(rows))
        return found.table([name for name in wanted if name in found.names])


def _classes(predictor: Predictor, labels_B: Array, probabilities: Array) -> pl.DataFrame:
    """Return rows, precision, recall and F1 of each class."""
    predicted_B = probabilities.argmax(1) if probabilities.ndim == 2 else probabilities >= 0.5
    numbers = np.arange(len(predictor.classes))
    precision_C, recall_C, f1_C, rows_C = precision_recall_fscore_support(
        labels_B, predicted_B, labels=numbers, zero_division=np.nan
    )
    columns = {"class": predictor.classes, "rows": rows_C, "precision": precision_C, "recall": recall_C}
    return pl.DataFrame({**columns, "f1": f1_C}).fill_nan(None)
