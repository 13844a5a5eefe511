"""Calls a recipe's `predict` for frames and for files, and evaluates its splits."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import nn

from dphybrid.config.tables import READING_FIELDS, TableDataConfig
from dphybrid.data.batches import ArrayDataset, Dataset
from dphybrid.data.table.files import find_files
from dphybrid.data.table.frames import Written, as_frame, table_target, write_predictions
from dphybrid.data.table.values import with_gaps
from dphybrid.data.vocabulary import read_vocabularies
from dphybrid.recipes.given import Given, as_arrays
from dphybrid.training.checkpoint import read_state
from dphybrid.util.errors import UserError, counted, type_text
from dphybrid.util.threads import use_num_threads


def samples_of(recipe: str, checkpoint: Path, split: Given) -> Dataset:
    """Return a split, as a recipe's `rows` returns it, as samples. Raises UserError for anything else."""
    arrays = as_arrays(split, f"recipe {recipe}, the rows")
    if missing := read_state(checkpoint).info["shapes"].keys() - arrays.keys():
        raise UserError(f"recipe {recipe}: the rows have no {min(missing)!r}, which its training split has")
    return ArrayDataset(arrays, np.arange(len(next(iter(arrays.values())))))


class RowsPredictor:
    """A trained model of a recipe that defines `predict`, with its vocabularies. recipe: its name."""

    def __init__(
        self, recipe: str, predict: Callable[..., object], checkpoint: Path, model: nn.Module, batch_size: int
    ) -> None:
        self._recipe, self._predict, self.batch_size = recipe, predict, batch_size
        self.vocabularies = read_vocabularies(checkpoint)
        self._model = model.eval()

    def predict(self, rows: object) -> pl.DataFrame:
        """Return the recipe's predictions, computed for `batch_size` rows at a time. rows: a frame (polars,
        pandas, Arrow), a dict of columns or a list of records. Raises UserError as `predict` does."""
        frame = as_frame(rows, "the rows").lazy().collect()
        # An empty frame has no slices; predict it as it is, so that the result has the right columns.
        return pl.concat(map(self._predicted, frame.iter_slices(self.batch_size) if len(frame) else [frame]))

    @torch.inference_mode()
    def _predicted(self, rows: pl.DataFrame) -> pl.DataFrame:
        use_num_threads()
        predicted = self._predict(self._model, rows, self.vocabularies)
        if not isinstance(predicted, pl.DataFrame):
            what = f"recipe {self._recipe}: predict returned {type_text(predicted)}"
            raise UserError(f"{what}; return a polars DataFrame")
        return predicted

    def predict_file(
        self,
        path: str | Path,
        out: str | Path,
        on_progress: Callable[[str, int, int], None] | None = None,
        keep: Sequence[str] = (),
        threshold: float | None = None,
        **reading: Any,
    ) -> Written:
        """Write the predictions for the rows of `path` (file, folder or pattern), piece by piece, to a
        .parquet or .csv file.

        keep: columns of the input to write as well, if there is one prediction per row. reading: the format
        of the files (header, delimiter, missing, ...). Raises UserError and then leaves no file at `out`.
        OUT.rejected.jsonl lists the rows that cannot be read, with the reason.
        """
        if threshold is not None:
            raise UserError("--threshold: only for recipes that read tables; leave it out")
        # First of all, so that a target that cannot be written costs no work.
        files = find_files(str(path), "data.path")
        done = Written(table_target(out, files))
        named = {name: value for name, value in reading.items() if name in READING_FIELDS}
        if odd := reading.keys() - named.keys():
            raise UserError(f"{min(odd)}: is not an option of recipe {self._recipe}'s predictions")
        data = TableDataConfig(path=str(path), **named)

        def predicted(chunk: pl.DataFrame, _file: pl.Series, _lines: pl.Series) -> pl.DataFrame:
            # As texts, None for no value; lists stay lists.
            columns = (with_gaps(column, None) for column in chunk)
            return self.predict(
                pl.DataFrame([c if c.dtype.is_nested() else c.cast(pl.String) for c in columns])
            )

        write_predictions(files, data, done, predicted, keep, on_progress)
        return done

    def summary(self, done: Written) -> list[str]:
        """Return lines for the console: how many rows were predicted, and how many were rejected."""
        lines = [f"Predictions of {counted(done.num_rows, 'row')}: {done.out}"]
        return lines + done.summary()
