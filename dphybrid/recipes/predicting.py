"""Predictions of a recipe's own `predict`, of frames and of files."""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import polars as pl
import torch
from torch import nn

from dphybrid.config.tables import READING_FIELDS, TableDataConfig
from dphybrid.data.table.files import find_files, read_files
from dphybrid.data.table.frames import Written, as_frame, table_target, write_frames
from dphybrid.data.table.rows import Rejected, Rows
from dphybrid.data.vocabulary import read_vocabularies
from dphybrid.util.errors import UserError, counted, type_text


class RowsPredictor:
    """A trained model of an own recipe, with its vocabularies. recipe: its name; ask: its `predict`."""

    def __init__(
        self, recipe: str, ask: Callable[..., object], checkpoint: Path, model: nn.Module, batch_size: int
    ) -> None:
        self._recipe, self._ask, self.checkpoint, self.batch_size = recipe, ask, checkpoint, batch_size
        self.vocabularies = read_vocabularies(checkpoint)
        self._model = model.eval()

    def __repr__(self) -> str:
        place = f"{self.checkpoint.parent.parent.name or '.'}/{self.checkpoint.name}"
        return f"<Predictor of recipe {self._recipe}, {place}>"

    def predict(self, rows: object) -> pl.DataFrame:
        """Return what the recipe's `predict` does, for `batch_size` rows at a time. rows: a frame (polars,
        pandas, Arrow), a dict of columns or a list of records. Raises UserError as `predict` does."""
        frame = as_frame(rows, "the rows").lazy().collect()
        # An empty frame has no slices, and its answer's columns are wanted all the same.
        return pl.concat(map(self._predicted, frame.iter_slices(self.batch_size) if len(frame) else [frame]))

    @torch.inference_mode()
    def _predicted(self, rows: pl.DataFrame) -> pl.DataFrame:
        found = self._ask(self._model, rows, self.vocabularies)
        if not isinstance(found, pl.DataFrame):
            what = f"recipe {self._recipe}: predict returned {type_text(found)}"
            raise UserError(f"{what}; return a polars DataFrame")
        return found

    def predict_file(
        self,
        path: str | Path,
        out: str | Path,
        on_progress: Callable[[str, int, int], None] | None = None,
        keep: Sequence[str] = (),
        threshold: float | None = None,
        **reading: Any,
    ) -> Written:
        """Write what `predict` returns for the rows of `path` (file, folder or pattern), piece by piece, to a
        .parquet or .csv file.

        keep: columns of the input to write, too, where a prediction is made for each row. reading: how files
        are written (header, delimiter, missing, ...). Raises UserError; nothing is left at `out` then.
        OUT.rejected.jsonl says which rows cannot be read, and why.
        """
        if threshold is not None:
            raise UserError("--threshold: is of recipes that read tables; this recipe's predict decides")
        # Before any work: a target that cannot be written ends here.
        done, rejected = Written(table_target(out)), list[Rejected]()
        named = {name: value for name, value in reading.items() if name in READING_FIELDS}
        if odd := reading.keys() - named.keys():
            raise UserError(f"{min(odd)}: is not an option of recipe {self._recipe}'s predictions")
        data = TableDataConfig(path=str(path), **named)

        def frames() -> Iterator[pl.DataFrame]:
            files = find_files(str(path), "data.path")
            for chunk in read_files(files, data, rejected, "predict rows", on_progress):
                done.num_rows += len(chunk)
                yield self._with(keep, chunk)

        pieces = frames()
        # Its columns are those of all pieces: what `predict` returns is not known before.
        first = next(pieces)
        write_frames(chain([first], pieces), dict(first.schema), done.out, rejected)
        done.num_rejected = len(rejected)
        return done

    def _with(self, keep: Sequence[str], chunk: Rows) -> pl.DataFrame:
        rows = pl.DataFrame({name: chunk.texts(name) for name in chunk.names})
        predicted = self.predict(rows)
        if odd := [name for name in keep if name not in chunk.names or len(predicted) != len(rows)]:
            raise UserError(
                f"--keep {odd[0]}: {chunk.file} has no such column, or recipe {self._recipe} does "
                f"not give one prediction a row; columns: {', '.join(chunk.names)}"
            )
        return predicted.with_columns(rows[name] for name in keep)

    def told(self, done: Written) -> list[str]:
        """Return what became of a file's rows, in lines for people."""
        lines = [f"Predictions of {counted(done.num_rows, 'row')}: {done.out}"]
        return lines + done.told()
