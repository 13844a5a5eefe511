"""Read prepared folders and checkpoints in full and name damaged files.

Every file is read and compared with the sums that were written with it. Each place gives a line; the exit
code is 1 when one is damaged. Training, prediction and registration check what they use by themselves; this
is for the rest: after a power failure, or on an old disk.
"""

import argparse

from dphybrid.cli.parser import Parser
from dphybrid.config.settings import load_settings


def flags(parser: Parser) -> None:
    """Add the command's flags."""
    places = "a run's name, a prepared folder or a checkpoint folder (all of DPHYBRID_DATA_DIR)"
    parser.add_argument("places", nargs="*", metavar="PLACE", help=places)


def run(args: argparse.Namespace) -> int:
    """Read prepared folders and checkpoints whole; 1 when one is damaged."""
    from dphybrid.run.verify import verify_places

    damaged = 0
    for line, good in verify_places(args.places, load_settings()):
        damaged += not good
        print(f"{'ok ' if good else 'BAD'} {line}", flush=True)
    return 1 if damaged else 0
