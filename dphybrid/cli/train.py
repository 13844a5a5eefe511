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

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import AfterValidator, Field

from dphybrid.cli.flags import RunCommand
from dphybrid.cli.parser import Command, Parser, page_of
from dphybrid.config import ExperimentConfig
from dphybrid.config.settings import Settings, load_settings
from dphybrid.run.folder import read_run
from dphybrid.util.errors import UserError
from dphybrid.util.files import remove_folder, write_text
from dphybrid.util.importing import kept_from_gc
from dphybrid.util.text import masked

if TYPE_CHECKING:
    from dphybrid.run.pages import Report


def flow_parser(name: str, description: str, command: type[Command]) -> Parser:
    """Return the parser of `python -m dphybrid.flows.NAME`, with the examples of `dphybrid train`."""
    _, page = page_of(__doc__ or "")
    program = f"python -m dphybrid.flows.{name}"
    return Parser(lambda: command, prog=program, description=description, epilog=page)


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

    fast_dev_run: bool = False
    """Try everything out: train one batch, validate and report; record nothing, keep only the data."""

    def experiment(self) -> tuple[ExperimentConfig, Settings]:
        """Return config and settings. Raises UserError."""
        if not self.fast_dev_run:
            return super().experiment()
        if self.resume is not None:
            raise UserError(f"--fast-dev-run: keeps nothing, so it takes no --resume {self.resume}")
        self.tracking = "none"
        config, settings = super().experiment()
        tried = {"epochs": 1, "overfit_batches": 1, "patience": 0}
        return config.model_copy(update={"train": config.train.model_copy(update=tried)}), settings

    def run(self) -> int:
        """Train."""
        tags = dict(tag.split("=", 1) for tag in self.tag)
        config, settings = self.experiment()
        with kept_from_gc():
            from dphybrid.run.train import run_job

        if self.fast_dev_run:
            return self._try_everything(lambda name: run_job(config, settings, run_name=name), settings)
        report = run_job(config, settings, run_name=self.run_name, resume=self.resume, tags=tags)
        print(report.text)
        keep_report(report, self.report)
        return 0

    @staticmethod
    def _try_everything(train: Callable[[str], object], settings: Settings) -> int:
        name = f"fast-dev-run-{secrets.token_hex(4)}"
        try:
            train(name)
        finally:
            if (settings.runs_dir / name).exists():
                remove_folder(settings.runs_dir / name)
        print(
            "Everything works: a batch was trained, validation and report done. Only prepared data was kept"
        )
        return 0
