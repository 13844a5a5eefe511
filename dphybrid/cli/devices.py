"""Show the GPUs: memory, load, the processes on them, the run that leases them."""

from collections.abc import Sequence
from pathlib import Path

from dphybrid.cli.parser import Command
from dphybrid.config.settings import Settings, load_settings
from dphybrid.gpus.inventory import GIB, Gpu, Inventory, busy_reason, describe_process, visible, why_cpu
from dphybrid.gpus.leases import ask_for, find_holder, lease_folder
from dphybrid.util.errors import UserError
from dphybrid.util.text import aligned, printable


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
        print("\n".join(aligned(_rows(units, folder, settings))))
        return 0


def _rows(units: Sequence[Gpu], folder: Path, settings: Settings) -> list[list[str]]:
    """Return the table of all GPUs; those that CUDA_VISIBLE_DEVICES hides are called hidden."""
    rows = [["device", "GPU", "name", "free", "load", "state"]]
    numbers = {unit.uuid: number for number, unit in enumerate(visible(units))}
    for unit in units:
        holder, busy = find_holder(folder, unit.uuid), busy_reason(unit, settings)
        state = [holder.text()] if holder else []
        if unit.processes:
            state += [describe_process(process) for process in unit.processes]
        elif busy and not holder:
            state.append(busy.removeprefix(f"{unit.label}: "))
        rows.append(
            [
                f"cuda:{numbers[unit.uuid]}" if unit.uuid in numbers else "hidden",
                unit.label.removeprefix("GPU "),
                unit.name,
                f"{unit.free_bytes / GIB:.1f} of {unit.total_bytes / GIB:.1f} GiB",
                "-" if unit.utilisation is None else f"{unit.utilisation} %",
                printable("; ".join(state) or "free").replace("\n", " "),
            ]
        )
    return rows
