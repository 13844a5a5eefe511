"""Make the former champion of a registered model the champion again."""

from typing import ClassVar

from pydantic_settings import CliPositionalArg

from dphybrid.cli.parser import Command
from dphybrid.config.settings import load_settings


class Flags(Command):
    """The flags of `rollback`."""

    shown_as: ClassVar[dict[str, str]] = {"to": "VERSION"}
    model: CliPositionalArg[str]
    """Name in MLflow's model registry."""
    to: str | None = None
    """Version to use (default: the former champion)."""

    def run(self) -> int:
        """Make the former champion of a registered model the champion again."""
        from dphybrid.tracking.opening import store_to_read

        settings = load_settings()
        store = store_to_read(settings.mlflow_uri, settings.mlflow_dir)
        # After `store_to_read`, which finds a wrong setting before the seconds that importing MLflow takes.
        from dphybrid.tracking.models import Registry

        registry = Registry(store, settings.champions_dir)
        before, now = registry.roll_back(self.model, self.to)
        print(f"{self.model}: champion is version {now.number} again; it was version {before.number}")
        return 0
