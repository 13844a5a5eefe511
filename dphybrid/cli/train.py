"""Train without Prefect (the same job as the flow).

examples:
  %(prog)s                                    the word language model, on Python's own reference manual
  %(prog)s --recipe toy --devices 'cpu*3'     the tutorials' toy model, split over three virtual devices
  %(prog)s --recipe ctr --data.path clicks.csv --data.label clicked
  %(prog)s --data.path my_texts/ --train.epochs 3 --train.batch-size 64
  %(prog)s --resume                           go on with the newest run of the recipe
  %(prog)s --config experiment.toml --report result.json

The flags above are those of one recipe, with its values in brackets: `--help --recipe ctr` shows ctr's.
Without --recipe the data says which one is meant: a label or a table means ctr, a folder of triples kge,
anything else text. A recipe of your own is named as --recipe package.module:NAME. A TOML file has the same
names: `recipe = "ctr"`, then sections like [train] with `batch_size = 512`.
Data, checkpoints and the MLflow store lie under DPHYBRID_DATA_DIR (~/.dphybrid).
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from dphybrid.cli.flags import add_train_flags, config_from_args, tags_from_args
from dphybrid.cli.parser import Parser
from dphybrid.util.importing import kept_from_gc

if TYPE_CHECKING:
    from dphybrid.run.pages import Report


def flow_parser(name: str, description: str) -> Parser:
    """Return the parser of `python -m dphybrid.flows.NAME`, whose help ends as that of `dphybrid train`."""
    return Parser(
        prog=f"python -m dphybrid.flows.{name}",
        description=description,
        epilog=(__doc__ or "").partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def flags(parser: Parser) -> None:
    """Add the command's flags."""
    add_train_flags(parser)
    tag = "a tag for the MLflow run; may be repeated"
    parser.add_argument("--tag", action="append", default=[], metavar="NAME=VALUE", help=tag)


def run(args: argparse.Namespace) -> int:
    """Train; a run that gives its GPUs back takes its place in the queue again."""
    config, settings, resume, report_path = config_from_args(args)
    with kept_from_gc():
        from dphybrid.run.leasing import go_on_later
        from dphybrid.run.train import run_job
        from dphybrid.util.stop import Interrupted

    try:
        report = run_job(config, settings, run_name=args.run_name, resume=resume, tags=tags_from_args(args))
    except Interrupted as interruption:
        if interruption.requeue:
            go_on_later(interruption, settings)
        raise
    _show(report, report_path)
    return 0


def _show(report: "Report", path: Path | None) -> None:
    print(report.text)
    if path:
        report.write(path)
