"""GPUs of a shared workstation: inventory, policy for free GPUs, and leases that end with their process.
Needs neither torch nor Prefect."""

from dphybrid.gpus.inventory import Gpu, Inventory, Policy, Process, busy_reason, visible
from dphybrid.gpus.leases import Holder, Lease, ask_for, asked_by, find_holder, lease_folder, try_lease
from dphybrid.gpus.waiting import LeaseTimeoutError, Wanted, acquire

__all__ = [
    "Gpu",
    "Holder",
    "Inventory",
    "Lease",
    "LeaseTimeoutError",
    "Policy",
    "Process",
    "Wanted",
    "acquire",
    "ask_for",
    "asked_by",
    "busy_reason",
    "find_holder",
    "lease_folder",
    "try_lease",
    "visible",
]
