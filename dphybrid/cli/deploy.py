"""Set a Prefect server up: pool, queues, deployments, automation; or bring it up to date.

examples:
  PREFECT_API_URL=http://server:4200/api %(prog)s
  %(prog)s --write                            the package's prefect.yaml and prefect.toml, to be changed
"""

import argparse
from pathlib import Path

from dphybrid.cli.parser import Parser, prefect_part


def flags(parser: Parser) -> None:
    """Add the command's flags."""
    add = parser.add_argument
    add("--pool", default="gpu", help="work pool (gpu)")
    host = "a workstation that gets a queue of its own; repeat"
    add("--host", action="append", default=[], metavar="NAME", help=host)
    file = "deployments (the prefect.yaml of this folder, or else the package's own)"
    add("--file", type=Path, help=file)
    write = "write the package's prefect.yaml and prefect.toml here, to be changed, and stop"
    add("--write", action="store_true", help=write)


def run(args: argparse.Namespace) -> int:
    """Set the server up, or write the files that it is set up from."""
    setup = prefect_part("setup")
    if args.write:
        setup.write(args.file or Path("prefect.yaml"))
    else:
        setup.deploy(args.pool, args.host, args.file)
    return 0
