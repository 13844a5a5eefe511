"""The table of `dphybrid devices`: each GPU's memory, load, processes and lease."""

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from dphybrid.gpus.inventory import GIB, Gpu, Inventory, Policy, busy_reason, describe_process, visible
from dphybrid.gpus.leases import find_holder


def gpu_table(units: Sequence[Gpu], names: str | None, folder: Path, policy: Policy) -> Table:
    """Return the table of all units; those that CUDA_VISIBLE_DEVICES=`names` hides are dim and have no device
    name."""
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


def show_live(
    inventory: Inventory, names: str | None, folder: Path, policy: Policy, every_s: float = 1.0
) -> None:
    """Show the table until Ctrl-C."""
    with Live(console=Console(), auto_refresh=False, screen=False) as live:
        while True:
            live.update(gpu_table(inventory.read(), names, folder, policy), refresh=True)
            time.sleep(every_s)
