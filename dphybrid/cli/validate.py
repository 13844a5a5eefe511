"""Check the deployments of a prefect.yaml, more strictly than Prefect's server does."""

import argparse
from pathlib import Path

from dphybrid.cli.parser import Parser, prefect_part


def flags(parser: Parser) -> None:
    """Add the command's flags."""
    file = "file with the deployments (default: prefect.yaml of this folder, else the package's)"
    parser.add_argument("file", nargs="?", type=Path, help=file)


def run(args: argparse.Namespace) -> int:
    """Print what the checks found."""
    checks = prefect_part("validate")
    for line in checks.check_prefect_yaml(checks.deployments_file(args.file)):
        print(line)
    return 0
