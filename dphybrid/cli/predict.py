"""Predict the label for the rows of new files, recommend items to users, or continue a text.

examples:
  %(prog)s ctr-cpu-1121-044553 --data.path new.csv --out predictions.parquet
  %(prog)s retrieval-cpu-1121-044553 --data.path users.csv --out top.parquet --top 20
  %(prog)s text-cpu-1121-044553 --prompt 'import os' --length 50
  %(prog)s models:/clicks@champion --data.path 'today/*.csv.gz' --out predictions.csv --devices cuda:0

Each row read gives one prediction: its file, its line, and the probability of the label's positive value; for
several classes, the likeliest class and the probability of each; for a number, the number. --threshold adds
the predicted class of two. --keep adds columns of the input. A model of recipe retrieval gives user, rank,
item and score instead: --top items for each user. Without --out, predictions are printed as CSV. Files are
read as in training, unless a flag of --data says otherwise. A model of recipe text continues the text of
--prompt.
"""

from pathlib import Path
from typing import Any

from pydantic import Field

from dphybrid.cli.parser import Command, Positional
from dphybrid.config.settings import load_settings
from dphybrid.config.tables import RowFiles
from dphybrid.recipes.configs import check_data_path
from dphybrid.util.errors import UserError


class Flags(Command):
    """The flags of `predict`."""

    model: Positional[str] = Field(alias="RUN_OR_MODEL")
    """A run, a checkpoint folder, or models:/NAME@champion."""
    data: RowFiles = RowFiles()
    out: Path | None = None
    """File for the predictions, .parquet or .csv (default: printed as CSV)."""
    devices: str = "cpu"
    """Devices on which the model runs."""
    batch_size: int = Field(default=1024, ge=1)
    """Rows of a batch, over all devices."""
    keep: list[str] = Field(default=[])
    """Also write this column of the input; may be repeated."""
    threshold: float | None = None
    """Also write the predicted one of two classes: the positive one if its probability is at least X."""
    top: int | None = None
    """Number of items for each user, if the model recommends (default: 10)."""
    prompt: str | None = None
    """Beginning of a text that a model of recipe text continues; then no --data.path is needed."""
    length: int = Field(default=100, ge=1)
    """With --prompt: at most this many tokens."""
    temperature: float = Field(default=0.8, ge=0.0)
    """With --prompt: below 1, likelier tokens are preferred; 0: always the likeliest."""
    seed: int = 0
    """With --prompt: seed of the random choice of tokens."""

    def run(self) -> int:
        """Write or print predictions for new files, or continue a text."""
        path = self.data.path
        given: dict[str, Any] = self.data.model_dump(exclude={"path"}, exclude_unset=True)
        if (path is None) == (self.prompt is None) or (path is None and given):
            raise UserError("predict: give either --data.path, or --prompt for a model of recipe text")
        if path is None:
            return self._continue_text()
        # A missing file is reported before the imports below, which take seconds.
        check_data_path(path)
        from dphybrid.serving.load import find_checkpoint
        from dphybrid.serving.predict import Predictor, open_predictor, print_predictions
        from dphybrid.training.display import preparation_progress

        checkpoint = find_checkpoint(self.model, load_settings())
        predictor = open_predictor(checkpoint, self.devices, self.batch_size)
        if self.top is not None:
            if isinstance(predictor, Predictor):
                raise UserError(
                    f"--top {self.top}: this model scores rows and recommends nothing; leave it out"
                )
            given["top"] = self.top
        given |= {"keep": self.keep, "threshold": self.threshold}
        if self.out is None:
            print_predictions(predictor, path, **given)
            return 0
        done = predictor.predict_file(path, self.out, preparation_progress(), **given)
        print("\n".join(predictor.summary(done)))
        return 0

    def _continue_text(self) -> int:
        from dphybrid.serving.load import find_checkpoint, model_from_checkpoint

        assert self.prompt is not None
        checkpoint = find_checkpoint(self.model, load_settings())
        model: Any = model_from_checkpoint(checkpoint, self.devices)
        if not hasattr(model, "continued"):
            raise UserError(f"{self.model}: its model writes no text; --prompt is for recipe text")
        pieces = model.continued(checkpoint, self.prompt, self.length, self.temperature, self.seed)
        for piece in (self.prompt, *pieces):
            print(piece, end="", flush=True)
        print()
        return 0
