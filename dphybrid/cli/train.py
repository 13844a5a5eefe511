"""Train a model, without Prefect (the same job as the flow).

examples:
  %(prog)s --data.path clicks.csv --data.label clicked
  %(prog)s                                    the word language model, on Python's own reference manual
  %(prog)s --recipe toy --devices 'cpu*3'     the tutorials' toy model, split over three virtual devices
  %(prog)s --data.path my_texts/ --train.epochs 3 --train.batch-size 64
  %(prog)s --resume                           continue the newest run of the recipe
  %(prog)s --config experiment.toml --report result.html

Without --recipe, a label selects ctr, anything else text. A TOML file uses the same names as the flags:
`recipe = "ctr"`, then sections like [train] with `batch_size = 512`.
Data, checkpoints and the MLflow store are in DPHYBRID_DATA_DIR (~/.dphybrid).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import AfterValidator, Field

from dphybrid.cli.flags import RunCommand
from dphybrid.cli.parser import Command
from dphybrid.config.settings import load_settings
from dphybrid.run.folder import read_run
from dphybrid.util.files import write_text
from dphybrid.util.importing import kept_from_gc
from dphybrid.util.text import masked

if TYPE_CHECKING:
    from dphybrid.run.pages import Report


def flow_command(name: str, summary: str, command: type[Command], words: Sequence[str]) -> Any:
    """Return the command that `python -m dphybrid.flows.NAME` and words give. Its help has the examples of
    `dphybrid train`."""
    page = (__doc__ or "").partition("\n\n")[2]
    return command.parse(f"python -m dphybrid.flows.{name}", f"{summary}\n\n{page}", words)


def keep_report(report: "Report", file: Path | None) -> None:
    """Write a run's report where --report says: as a page if the file's name ends in .html, else as JSON."""
    if file is not None and file.suffix == ".html":
        from dphybrid.run.experiment import Experiment
        from dphybrid.run.report import report_page

        settings = load_settings()
        run = read_run(settings.runs_dir / report.run_name, settings)
        write_text(file, report_page(Experiment.of(run), report))
    elif file is not None:
        report.write(file)


def _tag(text: str) -> str:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ValueError("write NAME=VALUE")
    # A tag may be an address with a password in it.
    return f"{name}={masked(value)}"


class Flags(RunCommand):
    """The flags of `train`."""

    shown_as: ClassVar[dict[str, str]] = {**RunCommand.shown_as, "tag": "NAME=VALUE"}
    tag: list[Annotated[str, AfterValidator(_tag)]] = Field(default=[])
    """Tag for the MLflow run; may be repeated."""

    def run(self) -> int:
        """Train."""
        tags = dict(tag.split("=", 1) for tag in self.tag)
        config, settings = self.experiment()
        with kept_from_gc():
            from dphybrid.run.job import run_job
        report = run_job(config, settings, run_name=self.run_name, resume=self.resume, tags=tags)
        print(report.text)
        keep_report(report, self.report)
        return 0
