"""Kill small runs on this disk, resume them, and check that they end with the same weights.

examples:
  %(prog)s                    five trials of each kind of fault, about a minute
  %(prog)s --minutes 30       more trials, for half an hour

Small runs are killed, lose power (simulated) or find the disk full (simulated), in a temporary folder below
DPHYBRID_DATA_DIR. Each is resumed and compared bit by bit with an undisturbed run. The exit code is 1 when
one differs.
"""

import argparse
from functools import partial

from dphybrid.cli.parser import Parser, at_least_one
from dphybrid.config.settings import load_settings
from dphybrid.util.errors import UserError


def flags(parser: Parser) -> None:
    """Add the command's flags."""
    add = parser.add_argument
    add("--trials", type=at_least_one, default=5, metavar="N", help="trials per kind of fault (default: 5)")
    add("--minutes", type=float, default=0.0, metavar="X", help="add trials for X minutes (default: 0)")
    add("--seed", type=int, metavar="N", help="seed that chooses the faults (default: random)")


def run(args: argparse.Namespace) -> int:
    """Run the trials and print their table; return 1 when one failed, else 0."""
    if not 0 <= args.minutes < 10_000:
        raise UserError(f"--minutes {args.minutes}: give how many minutes it may take, 0 to 10,000")
    from dphybrid.selftest import trials

    settings = load_settings()
    # Flushed, so that a redirected log shows each trial at once.
    report = partial(print, flush=True)
    kinds = trials.run(settings, args.trials, args.minutes, args.seed, report)
    print(f"\n{trials.table(kinds)}")
    return 1 if any(kind.broken for kind in kinds) else 0
