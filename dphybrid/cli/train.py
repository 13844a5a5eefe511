"""Train a model, without Prefect (the same job as the flow).

examples:
  %(prog)s                                    the word language model, on Python's own reference manual
  %(prog)s --recipe toy --devices 'cpu*3'     the tutorials' toy model, split over three virtual devices
  %(prog)s --recipe ctr --data.path clicks.csv --data.label clicked
  %(prog)s --data.path my_texts/ --train.epochs 3 --train.batch-size 64
  %(prog)s --resume                           continue the newest run of the recipe
  %(prog)s --config experiment.toml --report result.json

The flags above are those of one recipe, with its defaults in brackets: `--help --recipe ctr` shows ctr's.
Without --recipe the data decides: a label or a table selects ctr, a folder of triples kge, anything else
text. Your own recipe is --recipe package.module:NAME. A TOML file uses the same names: `recipe = "ctr"`,
then sections like [train] with `batch_size = 512`.
Data, checkpoints and the MLflow store are in DPHYBRID_DATA_DIR (~/.dphybrid).
"""

import argparse
from collections.abc import Sequence

from dphybrid.cli.flags import add_train_flags, config_from_args, recipe_of
from dphybrid.cli.parser import Parser
from dphybrid.util.importing import kept_from_gc
from dphybrid.util.text import masked


def flow_parser(name: str, description: str, argv: Sequence[str]) -> Parser:
    """Return the parser of `python -m dphybrid.flows.NAME`, with the examples and notes of `dphybrid train`.
    argv: the command line, which selects the recipe."""
    parser = Parser(
        prog=f"python -m dphybrid.flows.{name}",
        description=description,
        epilog=(__doc__ or "").partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.recipe = recipe_of(argv)
    return parser


def flags(parser: Parser) -> None:
    """Add the command's flags."""
    add_train_flags(parser)
    tag = "tag for the MLflow run; may be repeated"
    parser.add_argument("--tag", action="append", type=_tag, default=[], metavar="NAME=VALUE", help=tag)


def run(args: argparse.Namespace) -> int:
    """Train. A run that gave way waits and then runs this command again."""
    config, settings = config_from_args(args)
    with kept_from_gc():
        from dphybrid.run.leasing import go_on_later
        from dphybrid.run.train import run_job
        from dphybrid.util.stop import Interrupted

    try:
        report = run_job(config, settings, run_name=args.run_name, resume=args.resume, tags=dict(args.tag))
    except Interrupted as interruption:
        # Does not return: it replaces this process, so that nothing is left on the GPUs.
        if interruption.requeue:
            go_on_later(interruption, settings)
        raise
    print(report.text)
    if args.report:
        report.write(args.report)
    return 0


def _tag(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"{text}: write NAME=VALUE")
    # A tag may be an address with a password in it.
    return name, masked(value)
