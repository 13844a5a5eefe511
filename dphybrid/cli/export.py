"""Copy a trained model into a new folder, from which dphybrid.load predicts on any machine.

examples:
  %(prog)s ctr-cpu-1121-044553 clicks/
  %(prog)s models:/clicks@champion clicks/

The folder is the run's best checkpoint: weights, encoder and pages. It needs neither the run nor its prepared
data. To use it, install dphybrid without extras: Prefect and MLflow are not needed.
"""

import shlex
import shutil

from pydantic import Field

from dphybrid.cli.parser import Command, Positional
from dphybrid.config.settings import load_settings
from dphybrid.util.errors import UserError
from dphybrid.util.files import check_target, given_path, making


class Flags(Command):
    """The flags of `export`."""

    model: Positional[str] = Field(alias="RUN_OR_MODEL")
    """A run, a checkpoint folder, or models:/NAME@champion."""
    folder: Positional[str] = Field(alias="FOLDER")
    """New folder for the model."""

    def run(self) -> int:
        """Copy a model's checkpoint into a new folder."""
        from dphybrid.serving.load import find_checkpoint
        from dphybrid.training.checkpoint import verify_checkpoint

        checkpoint = find_checkpoint(self.model, load_settings())
        target = given_path(self.folder, "FOLDER")
        if target.exists():
            raise UserError(f"{self.folder}: exists already; give a new folder, or remove it first")
        check_target(target, self.folder)
        with making(target) as partial:
            shutil.copytree(checkpoint, partial, dirs_exist_ok=True)
            verify_checkpoint(partial)
        print(f"{target}: dphybrid.load({shlex.quote(str(target))!r}) predicts from it")
        return 0
