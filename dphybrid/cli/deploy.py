"""Set up or update a Prefect server: work pool, queues, deployments, automation.

A new deployment is made as prefect.yaml has it. Of one that exists, code, form and version are renewed;
its parameters, schedules and pause stay, and differences are listed: --reset sets them as in the file.

examples:
  PREFECT_API_URL=http://server:4200/api %(prog)s
  %(prog)s --write                            write a prefect.local.yaml here, for your changes
  %(prog)s --check                            check it; needs no server
"""

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from dphybrid.cli.parser import Command, prefect_part
from dphybrid.util.files import given_path


class Flags(Command):
    """The flags of `deploy`."""

    shown_as: ClassVar[dict[str, str]] = {"pool": "NAME", "host": "NAME"}
    pool: str = "gpu"
    """Work pool."""
    host: list[str] = Field(default=[])
    """Workstation that gets its own queue; may be repeated."""
    file: Path | None = None
    """File with all deployments (default: the package's, or prefect.yaml of this folder, with the changes of
    prefect.local.yaml)."""
    write: bool = False
    """Only write a prefect.local.yaml to edit, and a prefect.toml with Prefect's settings."""
    check: bool = False
    """Only check the deployments: values, rules between them, schedules."""
    reset: bool = False
    """Set parameters, schedules and pauses as in the file, also of deployments that exist."""

    def run(self) -> int:
        """Set up the server, or write the files that describe its setup."""
        setup, file = prefect_part("setup"), self.file and given_path(str(self.file), "--file")
        if self.write:
            setup.write(file)
        elif self.check:
            setup.check(file)
        else:
            setup.deploy(self.pool, self.host, file, self.reset)
        return 0
