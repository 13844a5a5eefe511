"""Evaluate a trained model on rows whose answer is known.

examples:
  %(prog)s ctr-cpu-1121-044553 --data.path held.csv
  %(prog)s models:/clicks@champion --data.path 'march/*.csv.gz'

Prints the recipe's metrics with a 95%% interval, and precision and recall of each class. Give rows with the
label's column, later interactions to a model of recipe retrieval, or later text to one of recipe text. For
curves, give the labels and dphybrid.load(MODEL).predict(rows) to scikit-learn.
"""

from pathlib import Path

from pydantic import BaseModel, Field

from dphybrid.cli.parser import Command, Positional
from dphybrid.config.settings import load_settings
from dphybrid.recipes.configs import check_data_path


class _Rows(BaseModel):
    """The rows to evaluate on."""

    path: str = Field(description="CSV, TSV or Parquet (file, folder or pattern), or text.")


class Flags(Command):
    """The flags of `evaluate`."""

    model: Positional[str] = Field(alias="RUN_OR_MODEL")
    """A run, a checkpoint folder, or models:/NAME@champion."""
    data: _Rows
    devices: str = "cpu"
    """Devices on which the model runs."""

    def run(self) -> int:
        """Print the evaluation."""
        # A missing file is reported before the imports below, which take seconds.
        check_data_path(self.data.path)
        from dphybrid.serving.evaluate import evaluate_checkpoint
        from dphybrid.serving.load import find_checkpoint, model_from_checkpoint
        from dphybrid.serving.predict import open_predictor
        from dphybrid.training.display import preparation_progress

        checkpoint = find_checkpoint(self.model, load_settings())
        found = evaluate_checkpoint(
            checkpoint,
            Path(self.data.path),
            lambda: open_predictor(checkpoint, self.devices, 1024),
            lambda: model_from_checkpoint(checkpoint, self.devices),
            on_progress=preparation_progress(),
        )
        print(found.text())
        return 0
