"""Make the former champion of a registered model the champion again."""

import argparse

from dphybrid.cli.parser import Parser
from dphybrid.config.settings import load_settings


def flags(parser: Parser) -> None:
    """Add the command's flags."""
    parser.add_argument("model", metavar="MODEL", help="name in MLflow's model registry")
    parser.add_argument("--to", metavar="VERSION", help="version to use (default: the former champion)")


def run(args: argparse.Namespace) -> int:
    """Make the former champion of a registered model the champion again."""
    from dphybrid.tracking.opening import store_to_read

    settings = load_settings()
    store = store_to_read(settings.mlflow_uri, settings.mlflow_dir)
    # After `store_to_read`, which finds a wrong setting before the seconds that importing MLflow takes.
    from dphybrid.tracking.models import Registry

    registry = Registry(store, settings.champions_dir)
    before, now = registry.roll_back(args.model, args.to)
    print(f"{args.model}: champion is version {now.number} again; it was version {before.number}")
    return 0
