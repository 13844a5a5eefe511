"""Set up or update a Prefect server: work pool, queues, automation, and the deployments of a prefect.yaml.

The file's deployments replace those of the server, as with `prefect deploy`. Without a prefect.yaml in this
folder, it is the package's own file: copy it from the path that is printed, and edit the copy.

examples:
  PREFECT_API_URL=http://server:4200/api %(prog)s
  %(prog)s --check                            check the file; needs no server
"""

from pathlib import Path

from pydantic import Field

from dphybrid.cli.parser import Command, prefect_part
from dphybrid.util.files import given_path


class Flags(Command):
    """The flags of `deploy`."""

    host: list[str] = Field(default=[])
    """Workstation that gets its own queue; may be repeated."""
    file: Path | None = None
    """File with the deployments (default: prefect.yaml of this folder, or the package's)."""
    check: bool = False
    """Only check the deployments: values, rules between them, schedules."""

    def run(self) -> int:
        """Set up the server, or check the file."""
        setup, file = prefect_part("setup"), self.file and given_path(str(self.file), "--file")
        if self.check:
            setup.check(file)
        else:
            setup.deploy(self.host, file)
        return 0
