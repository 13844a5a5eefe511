"""Predictions of a trained model for new rows of a table. Rows pass through the preprocessing of training;
values that training has not seen get the unknown row.

Files are read, scored and written chunk by chunk. The embedding table stays in the checkpoint's file, of
which only looked-up rows are read.
"""

import shutil
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import polars as pl
import torch
from polars.selectors import by_name
from torch import nn

from dphybrid.config.settings import Settings, load_settings
from dphybrid.config.tables import COLUMN_FIELDS, ROLE_FIELDS, TableDataConfig
from dphybrid.data.foreign import misread
from dphybrid.data.table.encoder import Encoder, Unknown
from dphybrid.data.table.files import find_files
from dphybrid.data.table.frames import (
    Written,
    as_frame,
    new_rows,
    table_target,
    write_predictions,
)
from dphybrid.recipes.configs import build_config, stored_config
from dphybrid.recipes.context import FixedForPredictions
from dphybrid.recipes.registry import OF_TABLES, find_recipe
from dphybrid.serving.load import find_checkpoint, model_from_checkpoint
from dphybrid.training.checkpoint import read_state
from dphybrid.training.label_tasks import label_task
from dphybrid.util.errors import UserError, counted
from dphybrid.util.threads import use_num_threads

PLACE = {"file": pl.String, "line": pl.Int64}
"""The first columns of a file of predictions: where each row comes from. `Label.columns` follow."""
_TYPES = {"str": pl.String, "float32": pl.Float32, "float64": pl.Float64}
_CLASS = "prediction"
"""Column of the predicted class of a binary label, if a threshold is given."""
_PIECE_ROWS = 2**16
"""How many rows of a lazy frame are in memory at a time."""


@dataclass
class Predicted(Written):
    """Counts of a file's predictions. unknown: of values that training does not know."""

    unknown: Unknown = field(default_factory=Unknown)


class Predictor:
    """A trained model of a recipe that reads tables, with its preprocessing. classes: the label's values, of
    a binary label the positive one last; empty for a numeric label. task: how the label is learned.
    no_value: texts that mean "no value", besides the empty one."""

    def __init__(
        self,
        folder: str | Path,
        devices: str = "cpu",
        batch_size: int = 1024,
        settings: Settings | None = None,
    ) -> None:
        """Read a checkpoint folder. settings: None for the current ones. Raises UserError when it is not a
        checkpoint or cannot predict from rows of a table."""
        self.folder = Path(folder)
        state = read_state(self.folder)
        settings = settings or load_settings()
        config = stored_config(state.config, self.folder / "state.json", settings)
        if not (self.folder / "encoder").is_dir():
            raise UserError(
                f"{folder}: a checkpoint of recipe {config.recipe} without an encoder; predictions need one "
                f"of a recipe that reads tables ({OF_TABLES})"
            )
        # Before the encoder is read: this also compares the checksums of the encoder's files.
        self.model = _model(self.folder, devices, settings)
        self.encoder = Encoder.load(self.folder / "encoder")
        with misread(self.folder / "encoder"):
            reads = self.encoder.id_columns, len(self.encoder.dense)
        if reads != (state.info.get("columns"), state.info.get("num_dense")):
            raise UserError(
                f"{folder}: its encoder lacks columns that its model reads; use another checkpoint"
            )
        self.classes, self.batch_size = self.encoder.label.classes, batch_size
        self.task = label_task(state.info)
        assert isinstance(config.data, TableDataConfig)  # as every config of a recipe with an encoder
        self._recipe, self._data, self.no_value = config.recipe, config.data, config.data.no_value

    def __repr__(self) -> str:
        columns = self.encoder.names
        shown = ", ".join(columns[:6]) + (f", ... ({len(columns)})" if len(columns) > 6 else "")
        return (
            f"<Predictor of {self.predicts} by recipe {self._recipe}, "
            f"{self.folder.parent.parent.name or '.'}/{self.folder.name}; columns: {shown}>"
        )

    @property
    def predicts(self) -> str:
        """The predicted quantity, in words."""
        return self.encoder.label.text()

    def predict(self, rows: object) -> np.ndarray:
        """Return the predictions for rows. Columns are found by name; others are ignored.

        The result depends on the label: the probability (B,) float32 of the positive class, the probabilities
        (B, C) float32 of `classes`, or the number (B,) float64 in the label's own units.

        rows: a polars DataFrame or LazyFrame (scored piece by piece), a pandas DataFrame, an Arrow table, a
        dict of columns, a list of records, or the path of files as `predict_file` takes it. Texts in
        `data.missing` and None mean "no value"; so do values of numeric columns that are not numbers, with a
        warning. Another warning names columns with many values that training does not know. Raises UserError
        when a column is missing, also in a single record, or when a file has rows that cannot be read.
        """
        if isinstance(rows, str | Path):
            return self._predict_path(str(rows))
        frame = as_frame(rows, "the rows")
        self.check_columns(frame.collect_schema().names(), "the rows")
        if isinstance(rows, Sequence):  # of records: one may lack what others have
            for number, row in enumerate(rows, start=1):
                self.check_columns(row, f"row {number}, in which None means no value")
        # by_name, because a plain select would read a column named `*` or `^...$` as a pattern.
        wanted = frame.select(by_name(*self.encoder.names))
        pieces: Iterable[pl.DataFrame] = [wanted] if isinstance(wanted, pl.DataFrame) else []
        if isinstance(wanted, pl.LazyFrame):
            pieces = wanted.collect_batches(chunk_size=_PIECE_ROWS, maintain_order=True)
        # A frame without rows still gets a result of the right type and width: `nothing`.
        scores, unknown = [self.task.nothing], Unknown()
        scores += [self._scores(piece, unknown, self.no_value) for piece in pieces]
        _warn(unknown.lines(self.encoder.columns))
        return np.concatenate(scores)

    def predict_classes(self, rows: object) -> np.ndarray:
        """Return the most probable class (B,) of each row, as text. rows: as for `predict`. Raises UserError
        for a label that is a number."""
        if not self.classes:
            raise UserError(f"label {self.task.label.name!r} is a number and has no classes; use predict")
        return self.task.classes(self.predict(rows))

    def encoded(self, rows: pl.DataFrame, unknown: Unknown | None = None) -> dict[str, torch.Tensor]:
        """Return the model's batch for rows, with zeros as labels. unknown: gets the counts of values that
        training does not know."""
        return tensors_of(self.encoder.encode(rows, self.no_value, unknown))

    def answers(self, cells: pl.Series) -> np.ndarray:
        """Return the label's numbers, or the numbers of its classes (B,), of cells; nan for no value. Raises
        UserError for other cells."""
        return self.encoder.label.read(cells, self.no_value)

    def _predict_path(self, path: str) -> np.ndarray:
        data, unknown, scores = self.reading(path, {}), Unknown(), [self.task.nothing]
        with new_rows(find_files(path, "data.path"), data, self.encoder.names, whole=True) as rows:
            self.check_columns(rows.names, path)
            scores += [self._scores(chunk, unknown, None) for chunk in rows.chunks()]
        _warn(unknown.lines(self.encoder.columns))
        return np.concatenate(scores)

    def predict_file(
        self,
        path: str | Path,
        out: str | Path,
        on_progress: Callable[[str, int, int], None] | None = None,
        keep: Sequence[str] = (),
        threshold: float | None = None,
        **values: object,
    ) -> Predicted:
        """Write the predictions for the rows of `path` (file, folder or pattern) to a .parquet or .csv file,
        chunk by chunk.

        Columns: `file`, `line`, then `probability` for a binary label; `prediction` and a `probability_CLASS`
        for each class, for several classes; or `prediction` for a numeric label. Rows that cannot be read are
        left out, and OUT.rejected.jsonl lists them with the reasons.

        keep: columns of the input to write as well, as text. threshold: for a binary label, the probability
        from which on a row's `prediction` is the positive class; None: the one that the model was trained
        with, and without one write only probabilities. values: of the config's data section, if the new files
        have another format (header, delimiter, max_rejected, ...).

        Raises UserError for files that do not fit, or when more than data.max_rejected of the rows cannot be
        read; nothing is left at `out` then.
        """
        path = str(path)
        files = find_files(path, "data.path")
        target = table_target(out, files)
        label = self.task.label
        if threshold is not None and label.task != "binary":
            raise UserError(
                f"--threshold {threshold}: is for a label of two values, and {label.name!r} is "
                f"{label.task}; leave it out: the file has a column prediction anyway"
            )
        if threshold is not None and not 0 <= threshold <= 1:
            raise UserError(f"--threshold {threshold}: is not a probability; give a number from 0 to 1")
        columns = PLACE | {name: _TYPES[kind] for name, kind in label.columns.items()}
        columns |= {} if threshold is None else {_CLASS: pl.String}
        data = self.reading(path, values)
        done = Predicted(target)

        def predicted(chunk: pl.DataFrame, of_file: pl.Series, lines: pl.Series) -> pl.DataFrame:
            self.check_columns(chunk.columns, path)
            scores = self._scores(chunk, done.unknown, None)
            found = {"file": of_file, "line": lines, **self.task.table(scores)}
            if threshold is not None:
                found[_CLASS] = self.task.classes(scores, threshold)
            return pl.DataFrame(found, schema=columns)

        write_predictions(files, data, done, predicted, keep, on_progress, self.encoder.names)
        return done

    def summary(self, done: Predicted) -> list[str]:
        """Return lines to print about a file's predictions and rejected rows."""
        lines = [f"{counted(done.num_rows, 'prediction')} of {self.predicts}: {done.out}"]
        lines += done.summary()
        return lines + done.unknown.lines(self.encoder.columns)

    def reading(self, path: str, values: Mapping[str, object]) -> TableDataConfig:
        """Return the config for reading new files: in the format of the training files, changed by
        `values`."""
        if fixed := values.keys() & {"decimal", "dateformat"}:
            raise UserError(f"{min(fixed)}: new files have numbers and dates as in training; write them so")
        named = {*COLUMN_FIELDS, *ROLE_FIELDS}
        kept = self._data.model_dump(exclude={"valid_path", "test_path", "split", "base", *named})
        read = build_config({"recipe": self._recipe, "data": {**kept, "path": path, **values}}).data
        assert isinstance(read, TableDataConfig)
        return read

    def check_columns(self, names: Collection[str], where: str) -> None:
        """Raise UserError if a column that the model reads is missing."""
        if missing := [name for name in self.encoder.names if name not in names]:
            raise UserError(
                f"{where}: column {missing[0]!r}, which the model was trained on, is missing; columns: "
                f"{', '.join(map(str, names))}"
            )

    def _scores(self, rows: pl.DataFrame, unknown: Unknown, no_value: Collection[str] | None) -> np.ndarray:
        arrays = self.encoder.encode(rows, no_value, unknown)
        scores = [self.task.nothing]
        use_num_threads()
        with torch.no_grad():  # not inference_mode: a region would copy inference tensors in each call
            for start in range(0, len(rows), self.batch_size):
                part = slice(start, start + self.batch_size)
                outputs = self.model(tensors_of({name: array[part] for name, array in arrays.items()}))
                scores.append(self.task.link(outputs["logits"]).cpu().numpy())
        return np.concatenate(scores)


def _model(folder: Path, devices: str, settings: Settings) -> nn.Module:
    model = model_from_checkpoint(folder, devices, mapped=True, settings=settings)
    for module in model.modules():
        if isinstance(module, FixedForPredictions):
            module.fix_for_predictions()
    return model


def tensors_of(arrays: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Return encoded rows as the model's batch."""
    batch = {name: torch.from_numpy(array) for name, array in arrays.items()}
    batch |= {name: ids.long() for name, ids in batch.items() if ids.dtype == torch.int32}
    # The batch needs labels, which only the loss reads.
    return batch | {"labels_B": torch.zeros(len(batch["ids_BF"]))}


def _warn(lines: Iterable[str]) -> None:
    for told in lines:
        warnings.warn(told, stacklevel=3)


def open_predictor(
    folder: Path, devices: str = "cpu", batch_size: int = 1024, settings: Settings | None = None
) -> Any:
    """Return the predictor of a checkpoint: a `Predictor`, or the recipe's own. settings: None for the
    current ones. Raises UserError if its recipe has no predictor."""
    settings = settings or load_settings()
    config = stored_config(read_state(folder).config, folder / "state.json", settings)
    build = partial(_model, folder, devices, settings)
    own = find_recipe(config.recipe).predictor(folder, config, build, batch_size)
    return Predictor(folder, devices, batch_size, settings) if own is None else own


def print_predictions(predictor: Any, path: str, **options: Any) -> None:
    """Print the predictions for the rows of files as CSV, and the number of rejected rows on standard error.

    options: of `predict_file`. Raises UserError as `predict_file` does.
    """
    # A file or pipe gets what --out would write: the same bytes, whatever the locale.
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")
    with TemporaryDirectory(prefix="dphybrid-predict-") as folder:
        out = Path(folder) / "predictions.csv"
        done = predictor.predict_file(path, out, **options)
        with out.open(encoding="utf-8") as file:
            shutil.copyfileobj(file, sys.stdout)
    # Both may go to one terminal, where the note must follow the predictions.
    sys.stdout.flush()
    if done.num_rejected:
        rows = counted(done.num_rejected, "row")
        print(f"{rows} cannot be read; --out FILE says which and why", file=sys.stderr)


def load(which: str | Path, devices: str = "cpu", batch_size: int = 1024) -> Any:
    """Return the predictor of a trained model: a `Predictor` for recipes that read tables, a `Recommender`
    for recipe retrieval.

    which: a run (by name), a checkpoint folder, or a registered model such as `models:/clicks@champion`.
    Raises UserError if there is no such model, or if its recipe has no predictor.
    """
    return open_predictor(find_checkpoint(str(which), load_settings()), devices, batch_size)
