"""GPUs of a shared workstation: inventory, policy for free GPUs, and leases that end with their process.
Needs neither torch nor Prefect."""
