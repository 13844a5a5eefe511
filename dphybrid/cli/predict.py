"""Predict the label for the rows of new files, or recommend items to users.

examples:
  %(prog)s ctr-cpu-1121-044553 --data.path new.csv --out predictions.parquet
  %(prog)s retrieval-cpu-1121-044553 --data.path users.csv --out top.parquet --top 20
  %(prog)s models:/clicks@champion --data.path 'today/*.csv.gz' --out predictions.csv --devices cuda:0

Each row read gives one prediction: its file, its line, and the probability of the label's positive value; for
several classes, the likeliest class and the probability of each; for a number, the number. --threshold adds
the predicted class of two, --keep adds columns of the input. A model of recipe retrieval gives user, rank,
item and score instead: --top items for each user of the files. Without --out, predictions are printed as CSV.
"""

import argparse
from pathlib import Path
from typing import Any

from dphybrid.cli.flags import add_flag, check_data_path
from dphybrid.cli.parser import Parser, at_least_one
from dphybrid.config.settings import load_settings
from dphybrid.config.tables import READING_FIELDS, TableDataConfig
from dphybrid.util.errors import UserError


def flags(parser: Parser) -> None:
    """Add the command's flags."""
    add = parser.add_argument
    model = "a run (name or MLflow id), a checkpoint folder, or models:/NAME@champion"
    add("model", metavar="RUN_OR_MODEL", help=model)
    path = "CSV, TSV or Parquet: a file, folder or pattern"
    add("--data.path", dest="path", required=True, metavar="PATH", help=path)
    out = "file for the predictions, .parquet or .csv (default: printed as CSV)"
    add("--out", type=Path, metavar="FILE", help=out)
    add("--devices", default="cpu", help="devices on which the model runs (default: cpu)")
    rows = "rows of a batch, over all devices (default: 1024)"
    add("--batch-size", type=at_least_one, default=1024, metavar="N", help=rows)
    keep = "also write this column of the input; may be repeated"
    add("--keep", action="append", default=[], metavar="COLUMN", help=keep)
    threshold = "of two classes, also write the predicted one: positive if its probability is P or more"
    add("--threshold", type=float, metavar="P", help=threshold)
    add("--top", type=int, metavar="K", help="items for each user, of a model that recommends (default: 10)")
    # How new files are written may differ from the training data; all else comes from the checkpoint.
    for name in READING_FIELDS:
        field = TableDataConfig.model_fields[name]
        add_flag(parser, f"data.{name}", field.annotation, f"{field.description} Default: as in training.")


def run(args: argparse.Namespace) -> int:
    """Write or print predictions for new files."""
    prefix = "config.data."
    given: dict[str, Any] = {k.removeprefix(prefix): v for k, v in vars(args).items() if k.startswith(prefix)}
    # A missing file is reported before the imports below, which take seconds.
    check_data_path(args.path)
    from dphybrid.serving.load import find_checkpoint
    from dphybrid.serving.predict import Predictor, open_predictor, print_predictions
    from dphybrid.training.display import preparation_progress

    predictor = open_predictor(find_checkpoint(args.model, load_settings()), args.devices, args.batch_size)
    if args.top is not None:
        if isinstance(predictor, Predictor):
            raise UserError(f"--top {args.top}: this model scores rows and recommends nothing; leave it out")
        given["top"] = args.top
    given |= {"keep": args.keep, "threshold": args.threshold}
    if args.out is None:
        print_predictions(predictor, args.path, **given)
        return 0
    with preparation_progress() as progress:
        done = predictor.predict_file(args.path, args.out, progress, **given)
    print("\n".join(predictor.told(done)))
    return 0
