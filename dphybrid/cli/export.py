"""Write a trained model as a folder that predicts without dphybrid.

examples:
  %(prog)s ctr-cpu-1121-044553 --out clicks/
  %(prog)s models:/clicks@champion --out clicks/

Of a model that scores rows of a table, the folder has the embedding tables (mapped into memory when they are
read), the rest as torch.export traced it, the encoder, an example request, and predict.py, which needs torch,
safetensors, numpy and polars. It predicts the same bits as `dphybrid.load` does on the CPU. Of recipe
retrieval, it has the vectors of all users and items, and recommend.py.
It is written under another name, and renamed when it is complete. README.md in it says how to use it.
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
