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

from typing import ClassVar

from pydantic import Field
from pydantic_settings import CliPositionalArg

from dphybrid.cli.parser import Command
from dphybrid.config.settings import load_settings


class Flags(Command):
    """The flags of `export`."""

    shown_as: ClassVar[dict[str, str]] = {"out": "FOLDER"}
    model: CliPositionalArg[str] = Field(alias="RUN_OR_MODEL")
    """A run (name or MLflow id), a checkpoint folder, or models:/NAME@champion."""
    out: str
    """New folder for the exported model."""

    def run(self) -> int:
        """Write a trained model as a folder that predicts without dphybrid."""
        from dphybrid.serving.export import export
        from dphybrid.serving.load import find_checkpoint

        folder = export(find_checkpoint(self.model, load_settings()), self.out)
        print(f"{folder}: {folder / 'README.md'} says how to use it")
        return 0
