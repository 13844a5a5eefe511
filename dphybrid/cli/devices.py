"""Show the GPUs: memory, load, who uses them, which run has leased them."""

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dphybrid.cli.parser import Parser
from dphybrid.config.settings import load_settings
from dphybrid.gpus import Gpu, Inventory, Policy, ask_for, busy_reason, find_holder, lease_folder, visible
from dphybrid.gpus.inventory import GIB, describe_process
from dphybrid.util.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table


def flags(parser: Parser) -> None:
    """Add the command's flags."""
    parser.add_argument("--live", action="store_true", help="go on showing them until Ctrl-C")
    parser.add_argument("--ask", type=int, metavar="N", help="ask the run on cuda:N to give its GPUs back")


def run(args: argparse.Namespace) -> int:
    """Show the GPUs, or ask a run to give way."""
    from rich.console import Console

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
        _show_live(inventory, names, folder, Policy.of(settings))
    Console().print(_table(units, names, folder, Policy.of(settings)))
    return 0


def _table(units: Sequence[Gpu], names: str | None, folder: Path, policy: Policy) -> "Table":
    """Return the table of all units; those that CUDA_VISIBLE_DEVICES=`names` hides are dim and have no device
    name."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("device", "GPU", "name", "free", "load", "state"):
        table.add_column(title, justify="right" if title in ("free", "load") else "left")
    numbers = {unit.uuid: number for number, unit in enumerate(visible(units, names))}
    for unit in units:
        number = numbers.get(unit.uuid)
        holder = find_holder(folder, unit.uuid)
        busy = busy_reason(unit, policy)
        state = [holder.text()] if holder else []
        if unit.processes:
            state += [describe_process(process) for process in unit.processes]
        elif busy and not holder:
            state.append(busy.removeprefix(f"{unit.label}: "))
        table.add_row(
            "hidden" if number is None else f"cuda:{number}",
            unit.label.removeprefix("GPU "),
            unit.name,
            f"{unit.free_bytes / GIB:.1f} of {unit.total_bytes / GIB:.1f} GiB",
            "" if unit.utilisation is None else f"{unit.utilisation} %",
            "\n".join(state) or "free",
            style="dim" if number is None else "green" if not holder and not busy else "yellow",
        )
    return table


def _show_live(
    inventory: Inventory, names: str | None, folder: Path, policy: Policy, every_s: float = 1.0
) -> None:
    """Show the table until Ctrl-C."""
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(), auto_refresh=False, screen=False) as live:
        while True:
            live.update(_table(inventory.read(), names, folder, policy), refresh=True)
            time.sleep(every_s)
