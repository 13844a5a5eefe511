"""Write a trained model as a folder that predicts without dphybrid.

examples:
  %(prog)s ctr-cpu-1121-044553 --out clicks/
  %(prog)s models:/clicks@champion --out clicks/

For a model that scores rows of a table, the folder holds the embedding tables (memory-mapped when read), the
other layers as traced by torch.export, the encoder, an example request, and predict.py, which needs torch,
safetensors, numpy and polars. It predicts the same bits as `dphybrid.load` on the CPU. For recipe retrieval,
the folder holds the vectors of all users and items, and recommend.py.
The folder appears under its name when it is complete. Its README.md says how to use it.
"""

import argparse

from dphybrid.cli.parser import Parser
from dphybrid.config.settings import load_settings


def flags(parser: Parser) -> None:
    """Add the command's flags."""
    model = "a run (name or MLflow id), a checkpoint folder, or models:/NAME@champion"
    parser.add_argument("model", metavar="RUN_OR_MODEL", help=model)
    parser.add_argument("--out", required=True, metavar="FOLDER", help="new folder for the exported model")


def run(args: argparse.Namespace) -> int:
    """Write a trained model as a folder that predicts without dphybrid."""
    from dphybrid.serving.export import export
    from dphybrid.serving.load import find_checkpoint

    folder = export(find_checkpoint(args.model, load_settings()), args.out)
    print(f"{folder}: {folder / 'README.md'} says how to use it")
    return 0
