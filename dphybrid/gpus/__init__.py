"""GPUs of a shared workstation: the inventory, the rule for which GPUs are free, and leases that end with
their process. Imports neither torch nor Prefect."""
