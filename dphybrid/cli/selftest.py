"""Kill small runs on this disk, resume them, and check that they end with the same bits.

examples:
  %(prog)s                    five trials of each kind of fault, about a minute
  %(prog)s --minutes 30       more trials, for half an hour

Small runs are killed, lose power or meet a full disk, in a folder of their own below DPHYBRID_DATA_DIR that
is removed afterwards. Each is resumed and compared with an undisturbed run. The exit code is 1 when one
differs.
"""

import argparse
from functools import partial

from dphybrid.cli.parser import Parser, at_least_one
from dphybrid.config.settings import load_settings
from dphybrid.util.errors import UserError


def flags(parser: Parser) -> None:
    """Add the command's flags."""
    add = parser.add_argument
    add("--trials", type=at_least_one, default=5, metavar="N", help="trials a kind of fault (5)")
    add("--minutes", type=float, default=0.0, metavar="X", help="go on for at least so many minutes (0)")
    add("--seed", type=int, metavar="N", help="which faults (at random)")


def run(args: argparse.Namespace) -> int:
    """Break small runs on the user's own disk; 1 when a trial failed."""
    if not 0 <= args.minutes < 10_000:
        raise UserError(f"--minutes {args.minutes}: give how many minutes it may take, such as 5")
    from dphybrid.selftest import trials

    settings = load_settings()
    tell = partial(print, flush=True)
    kinds = trials.run(settings, args.trials, args.minutes, args.seed, tell)
    print(f"\n{trials.table(kinds)}")
    return 1 if any(kind.broken for kind in kinds) else 0
