"""Set up or update a Prefect server: work pool, queues, deployments, automation.

examples:
  PREFECT_API_URL=http://server:4200/api %(prog)s
  %(prog)s --write                            copy the package's prefect.yaml and prefect.toml here, to edit
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
    file = "file with the deployments (default: prefect.yaml of this folder, else the package's)"
    add("--file", type=Path, help=file)
    write = "only copy the package's prefect.yaml and prefect.toml into this folder, to edit them"
    add("--write", action="store_true", help=write)


def run(args: argparse.Namespace) -> int:
    """Set up the server, or write the files that describe its setup."""
    setup = prefect_part("setup")
    if args.write:
        setup.write(args.file or Path("prefect.yaml"))
    else:
        setup.deploy(args.pool, args.host, args.file)
    return 0
