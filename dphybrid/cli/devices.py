"""Show the GPUs: memory, load, who uses them, which run has leased them."""

import argparse
import os

from dphybrid.cli.parser import Parser
from dphybrid.config.settings import load_settings
from dphybrid.util.errors import UserError


def flags(parser: Parser) -> None:
    """Add the command's flags."""
    parser.add_argument("--live", action="store_true", help="go on showing them until Ctrl-C")
    parser.add_argument("--ask", type=int, metavar="N", help="ask the run on cuda:N to give its GPUs back")


def run(args: argparse.Namespace) -> int:
    """Show the GPUs, or ask a run to give way."""
    from rich.console import Console

    from dphybrid.gpus import Inventory, Policy, ask_for, lease_folder, visible
    from dphybrid.gpus.table import gpu_table, show_live

    settings, names = load_settings(), os.environ.get("CUDA_VISIBLE_DEVICES")
    inventory = Inventory(settings.nvml)
    units = inventory.read()
    if not units and args.ask is None:
        print(f"no GPU ({inventory.reason}); devices=auto means cpu")
        return 0
    folder = lease_folder(settings.lease_dir)
    if args.ask is not None:
        chosen = visible(units, names)
        if not 0 <= args.ask < len(chosen):
            raise UserError(f"--ask {args.ask}: there is no cuda:{args.ask}; {len(chosen)} GPUs are visible")
        print(ask_for(folder, chosen[args.ask]))
        return 0
    if args.live:
        show_live(inventory, names, folder, Policy.of(settings))
    Console().print(gpu_table(units, names, folder, Policy.of(settings)))
    return 0
