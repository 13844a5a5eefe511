"""Where experiments run: folders, devices, threads, servers. Read from DPHYBRID_* variables and a `.env` file; never part of a result."""

import os
from functools import cached_property
from pathlib import Path

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from dphybrid.device_spec import parse_device_spec
from dphybrid.errors import UserError


class Settings(BaseSettings):
    """Settings of this machine and user."""

    model_config = SettingsConfigDict(
        env_prefix="DPHYBRID_", env_file=".env", extra="ignore", frozen=True, use_attribute_docstrings=True
    )

    data_dir: Path = Path("~/.dphybrid")
    """Folder for prepared data, checkpoints and the default MLflow store."""
    devices: str = "auto"
    """Devices for experiments that say devices=auto."""
    threads: int = Field(default=0, ge=0)
    """CPU threads for torch; 0: torch's own choice. A fixed number makes CPU results repeat bit for bit on another machine."""
    tracking_uri: str | None = None
    """MLflow server or database; empty: MLFLOW_TRACKING_URI, else a SQLite database in data_dir; none: nothing is recorded."""
    upload_limit_mb: int = Field(default=900, ge=1)
    """Files of a checkpoint above this many MiB are not uploaded to an MLflow server but recorded by path and digest."""
    profile: str | None = None
    """Steps to record with torch's profiler, FIRST-LAST, such as 20-24; the trace opens in Perfetto."""
    experiment: str = Field(default="dphybrid", min_length=1)
    """MLflow experiment that runs are put into."""

    @field_validator("data_dir")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        return value.expanduser().absolute()

    @field_validator("devices")
    @classmethod
    def _parse(cls, value: str) -> str:
        return parse_device_spec(value).text

    @field_validator("profile")
    @classmethod
    def _steps(cls, value: str | None) -> str | None:
        first, dash, last = (value or "1-1").partition("-")
        if not (first.isdigit() and (last.isdigit() or not dash) and 1 <= int(first) <= int(last or first)):
            raise ValueError("name steps as FIRST-LAST, counted from 1, such as 20-24")
        return value

    @property
    def profile_steps(self) -> range:
        """Steps to profile, none by default."""
        if self.profile is None:
            return range(0)
        first, _, last = self.profile.partition("-")
        return range(int(first), int(last or first) + 1)

    @cached_property
    def mlflow_uri(self) -> str | None:
        """The tracking URI in force, or None for the embedded store."""
        return self.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or None

    @property
    def prepared_dir(self) -> Path:
        return self.data_dir / "prepared"

    @property
    def runs_dir(self) -> Path:
        return self.data_dir / "runs"

    @property
    def mlflow_dir(self) -> Path:
        return self.data_dir / "mlflow"


def load_settings() -> Settings:
    """Read the settings. Raises UserError that names the variable."""
    try:
        settings = Settings()
    except ValidationError as error:
        lines = [
            f"DPHYBRID_{str(e['loc'][0]).upper()} = {e['input']!r}: {e['msg'].removeprefix('Value error, ')}"
            for e in error.errors()
        ]
        raise UserError("\n".join(lines)) from error
    if settings.data_dir.exists() and not settings.data_dir.is_dir():
        raise UserError(f"DPHYBRID_DATA_DIR = {str(settings.data_dir)!r}: is a file; name a folder")
    return settings
