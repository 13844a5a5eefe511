"""Show the GPUs: memory, load, the processes on them, the run that leases them."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dphybrid.cli.parser import Command
from dphybrid.config.settings import Settings, load_settings
from dphybrid.gpus.inventory import GIB, Gpu, Inventory, busy_reason, describe_process, visible, why_cpu
from dphybrid.gpus.leases import ask_for, find_holder, lease_folder
from dphybrid.util.errors import UserError
from dphybrid.util.text import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


class Flags(Command):
    """The flags of `devices`."""

    ask: int | None = None
    """Ask the run on cuda:N to free its GPUs."""

    def run(self) -> int:
        """Show the GPUs, or ask a run to give way."""
        settings = load_settings()
        inventory = Inventory(settings.nvml)
        units = inventory.read()
        if not units and self.ask is None:
            print(f"no GPU ({inventory.reason}); devices=auto means cpu")
            return 0
        if why := why_cpu(inventory, visible(units), settings):
            print(f"Note: torch cannot use the GPUs, devices=auto means cpu: {why}", flush=True)
        folder = lease_folder(settings.lease_dir)
        if self.ask is not None:
            # cuda:N counts the visible GPUs only, as torch does.
            chosen = visible(units)
            if not 0 <= self.ask < len(chosen):
                raise UserError(
                    f"--ask {self.ask}: there is no cuda:{self.ask}; {len(chosen)} GPUs are visible"
                )
            print(ask_for(folder, chosen[self.ask]))
            return 0
        _plain_console().print(_table(units, folder, settings))
        return 0


def _plain_console() -> "Console":
    """Return a console that prints names of runs and programs as they are: rich would take `[v2]` for a
    style, and end with an error at `[/]`."""
    from rich.console import Console

    return Console(markup=False, emoji=False)


def _table(units: Sequence[Gpu], folder: Path, settings: Settings) -> "Table":
    """Return the table of all GPUs. Those that CUDA_VISIBLE_DEVICES hides are dim and called hidden."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("device", "GPU", "name", "free", "load", "state"):
        table.add_column(title, justify="right" if title in ("free", "load") else "left")
    numbers = {unit.uuid: number for number, unit in enumerate(visible(units))}
    for unit in units:
        number = numbers.get(unit.uuid)
        holder = find_holder(folder, unit.uuid)
        busy = busy_reason(unit, settings)
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
            printable("\n".join(state) or "free"),
            style="dim" if number is None else "green" if not holder and not busy else "yellow",
        )
    return table
