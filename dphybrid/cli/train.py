"""Train a model, without Prefect (the same job as the flow).

examples:
  %(prog)s --data.path clicks.csv --data.label clicked
  %(prog)s                                    the word language model, on Python's own reference manual
  %(prog)s --recipe toy --devices 'cpu*3'     the tutorials' toy model, split over three virtual devices
  %(prog)s --data.path my_texts/ --train.epochs 3 --train.batch-size 64
  %(prog)s --resume                           continue the newest run of the recipe
  %(prog)s --config experiment.toml

Without --recipe, a label selects ctr, anything else text. A TOML file uses the same names as the flags:
`recipe = "ctr"`, then sections like [train] with `batch_size = 512`.
Data, runs (checkpoints, report.json) and the MLflow store are in DPHYBRID_DATA_DIR (~/.dphybrid).
"""

from typing import Annotated

from pydantic import AfterValidator, Field

from dphybrid.cli.flags import RunCommand
from dphybrid.util.importing import kept_from_gc
from dphybrid.util.text import masked


def _tag(text: str) -> str:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ValueError("write NAME=VALUE")
    # A tag may be an address with a password in it.
    return f"{name}={masked(value)}"


class Flags(RunCommand):
    """The flags of `train`."""

    tag: list[Annotated[str, AfterValidator(_tag)]] = Field(default=[])
    """Tag for the MLflow run, NAME=VALUE; may be repeated."""

    def run(self) -> int:
        """Train."""
        tags = dict(tag.split("=", 1) for tag in self.tag)
        config, settings = self.experiment()
        with kept_from_gc():
            from dphybrid.run.job import run_job
        report = run_job(config, settings, run_name=self.run_name, resume=self.resume, tags=tags)
        print(report.text)
        return 0
