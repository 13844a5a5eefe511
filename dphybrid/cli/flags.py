"""What every command of the project shares: its parser, the flags of an experiment, and how mistakes and interruptions are told."""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from dphybrid.config import ExperimentConfig
from dphybrid.config.settings import Settings, load_settings
from dphybrid.config.sources import add_config_flags, load_config, overrides_from_args
from dphybrid.util.errors import UserError
from dphybrid.util.masking import masked

TRAIN_HELP = """\
examples:
  %(prog)s                                    the word language model, on the Python reference that ships with Python
  %(prog)s --recipe toy --devices 'cpu*3'     the tutorials' toy model, split over three virtual devices
  %(prog)s --recipe ctr --data.path clicks.csv --data.label clicked
  %(prog)s --data.path my_texts/ --train.epochs 3 --train.batch-size 64
  %(prog)s --resume                           go on with the newest run of the recipe
  %(prog)s --config experiment.toml --report result.json

A TOML file has the same names: `recipe = "ctr"`, then sections like [train] with `batch_size = 512`.
Values in brackets of a flag are the text recipe's; other recipes set their own. Data, checkpoints and the MLflow store
lie under DPHYBRID_DATA_DIR (~/.dphybrid).
"""


class Parser(argparse.ArgumentParser):
    """argparse, but wrong flags end in one message with a remedy."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\nSee `{self.prog} --help`.\n")


def add_train_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a training command: the config's, and those of the run."""
    parser.add_argument(
        "--resume",
        nargs="?",
        const="latest",
        metavar="RUN",
        help="go on with a run (name or MLflow id); alone: the newest of this recipe",
    )
    parser.add_argument("--run-name", metavar="NAME", help="name of the run and its folder (default: recipe, devices, time)")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write what the run came to as JSON")
    parser.add_argument(
        "--profile", metavar="FIRST-LAST", help="steps to record with torch's profiler, such as 20-24 (opens in Perfetto)"
    )
    add_experiment_flags(parser)


def add_experiment_flags(parser: argparse.ArgumentParser) -> None:
    """Add the config's flags, and where it is recorded: all that a command needs which makes several runs, or names them itself."""
    parser.set_defaults(**{name: parser.get_default(name) for name in ("resume", "report", "profile")})
    parser.add_argument(
        "--tracking", metavar="URI", help="MLflow server or database; none: record nothing (default: DPHYBRID_TRACKING_URI)"
    )
    add_config_flags(parser)


def config_from_args(args: argparse.Namespace) -> tuple[ExperimentConfig, Settings, str | None, Path | None]:
    """Return (config, settings, resume, report path). Raises UserError."""
    report: Path | None = args.report
    if report is not None and (report.is_dir() or not report.absolute().parent.is_dir()):
        raise UserError(f"--report {report}: cannot be written there; name a file in a folder that exists")
    for name, value in (("DPHYBRID_TRACKING_URI", args.tracking), ("DPHYBRID_PROFILE", args.profile)):
        if value is not None:
            os.environ[name] = value  # a setting: the flow's tasks read it, too
    return load_config(args.config, overrides_from_args(args)), load_settings(), args.resume, report


def tags_from_args(args: argparse.Namespace) -> dict[str, str]:
    """Return the tags that were given. Raises UserError for one without a value."""
    tags = {}
    for text in args.tag:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UserError(f"--tag {text}: write NAME=VALUE")
        tags[name] = masked(value)
    return tags


def run_cli(function: Callable[[], int | None]) -> int:
    """Call `function`; tell a UserError in one message with exit code 2, an interruption with 130 (128 + the signal that asked for it)."""
    try:
        return function() or 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interruption:
        print(f"\n{interruption}" if str(interruption) else "\ninterrupted", file=sys.stderr)
        # Only `Interrupted` carries a signal's number; shells report 128 + that number, and Ctrl-C is 2.
        return 128 + (vars(interruption).get("signal_number") or 2)
    except BrokenPipeError:
        sys.stderr.close()
        return 141
