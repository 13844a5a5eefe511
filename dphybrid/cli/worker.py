"""Start a worker that takes runs from a Prefect work pool, and can be stopped without losing a training.

On Ctrl-C or SIGTERM it takes no more runs; those that it has write checkpoints and return to the queue. A
third signal kills them.
"""

import socket

from pydantic import Field

from dphybrid.cli.parser import Command, prefect_part


class Flags(Command):
    """The flags of `worker`."""

    pool: str = "gpu"
    """Work pool."""
    name: str = socket.gethostname().split(".")[0]
    """Name of this worker and of its own queue (default: the host's)."""
    limit: int | None = Field(default=None, ge=1)
    """Runs at once (default: one for each GPU that answers, at least one)."""
    queue: list[str] | None = None
    """Queue to take runs from; may be repeated (default: its own, urgent, any, night)."""

    def run(self) -> int:
        """Run the worker until signals stop it."""
        code: int = prefect_part("worker").run(self.pool, self.name, self.limit, self.queue)
        return code
