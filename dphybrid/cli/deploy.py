"""Set up or update a Prefect server: work pool, queues, deployments, automation.

What changed in prefect.yaml since the last time is applied. What was changed on Prefect's pages stays: a
schedule that was switched on, parameters, a paused deployment. Differences are listed.

examples:
  PREFECT_API_URL=http://server:4200/api %(prog)s
  %(prog)s --write                            write a prefect.local.yaml here, for your changes
  %(prog)s --check                            check it; needs no server
"""

import argparse
from pathlib import Path

from dphybrid.cli.parser import Parser, prefect_part


def flags(parser: Parser) -> None:
    """Add the command's flags."""
    add = parser.add_argument
    add("--pool", default="gpu", help="work pool (default: gpu)")
    host = "workstation that gets its own queue; may be repeated"
    add("--host", action="append", default=[], metavar="NAME", help=host)
    file = (
        "file with all deployments (default: the package's, or prefect.yaml of this folder, with the changes \
of prefect.local.yaml)"
    )
    add("--file", type=Path, help=file)
    write = "only write a prefect.local.yaml to edit, and a prefect.toml with Prefect's settings"
    add("--write", action="store_true", help=write)
    check = "only check the deployments: values, rules between them, schedules"
    add("--check", action="store_true", help=check)
    reset = "undo what was changed on Prefect's pages: parameters, schedules, pauses"
    add("--reset", action="store_true", help=reset)


def run(args: argparse.Namespace) -> int:
    """Set up the server, or write the files that describe its setup."""
    setup = prefect_part("setup")
    if args.write:
        setup.write(args.file)
    elif args.check:
        setup.check(args.file)
    else:
        setup.deploy(args.pool, args.host, args.file, args.reset)
    return 0
