"""Where experiments run: folders, devices, threads, servers. Read from DPHYBRID_* variables. Settings are not
part of an experiment. Devices and threads change a result by rounding, and another number of GPUs also by
other dropout masks; the other settings do not change it."""

import os
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from dphybrid.config import DeviceText
from dphybrid.util.errors import UserError, plain_words
from dphybrid.util.files import PRIVATE, given_path
from dphybrid.util.hours import parse_training_hours

_PREFIX = "DPHYBRID_"
EXPERIMENT = "dphybrid"
"""What the names of the recipes' experiments in MLflow begin with."""
_CENTURY_S = 100 * 365 * 86_400.0
"""The longest time that a setting may give: the system's calls refuse some that are longer."""


class Settings(BaseSettings):
    """Settings of this machine and user."""

    model_config = SettingsConfigDict(
        env_prefix=_PREFIX,
        env_ignore_empty=True,  # an empty variable counts as unset
        frozen=True,
        defer_build=True,
    )

    data_dir: Path = Path("~/.dphybrid")
    """Folder for prepared data, checkpoints and the default MLflow store."""
    devices: DeviceText = "auto"
    """Devices of experiments with devices=auto."""
    threads: int = Field(default=0, ge=0, le=4096)
    """CPU threads for torch. 0: torch's own number; the LSTM of recipe text takes one. With a fixed number,
    CPU results repeat bit for bit on another machine."""
    table_storage: Literal["memory", "mmap"] = "memory"
    """Where tables and their optimizer states are stored during a run: memory; or mmap, for tables larger
    than memory: temporary files in data_dir/tables, slower, with the same results."""
    tracking_uri: str | None = None
    """MLflow server or database. Empty: MLFLOW_TRACKING_URI, else a SQLite database in data_dir, or files if
    MLflow is not installed. files: only runs/NAME/record.jsonl. none: nothing is recorded."""
    cluster_timeout_s: float = Field(default=300.0, gt=0, le=_CENTURY_S)
    """Seconds that a rank waits for the other ranks in a joint operation. A rank that has died is noticed at
    once."""
    experiment: str = Field(default=EXPERIMENT, min_length=1)
    """MLflow experiment that holds the runs. dphybrid: an experiment for each recipe, dphybrid/RECIPE."""
    lease_dir: Path = Path("/var/lock/dphybrid")
    """Folder of the lock files that record which run holds which GPU; the same for all users of the
    machine."""
    max_gpus: int = Field(default=0, ge=0)
    """Maximum number of GPUs that devices=auto takes. 0: all free ones."""
    gpu_wait_s: float = Field(default=86400.0, ge=0, le=_CENTURY_S)
    """Seconds that a run waits for GPUs before it fails and gives the reason. Hours outside of training_hours
    do not count."""
    gpu_ignore: str = "Xorg,Xwayland,gnome-shell"
    """Commands whose processes on a GPU are ignored, separated by commas."""
    training_hours: str = ""
    """When training may use GPUs, in this machine's local time: `20:00-08:00`, `mon-fri 19:00-07:30, sat,
    sun`. Empty: always. A run gives its GPUs back at their end, and when someone runs `dphybrid devices --ask
    N`."""
    nvml: str = "pynvml"
    """Module with NVML's functions. The GPUs of any module other than pynvml are simulated: virtual devices
    on the CPU."""

    @field_validator("data_dir")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        path = given_path(str(value), "data_dir").absolute()
        PRIVATE.add(path)
        return path

    @field_validator("tracking_uri")
    @classmethod
    def _address(cls, value: str | None) -> str | None:
        if value and not value.isprintable():
            raise ValueError("has a character that no address has; correct it")
        return value

    @field_validator("training_hours")
    @classmethod
    def _hours(cls, value: str) -> str:
        # Parsed only to check it; a Settings object keeps the text.
        parse_training_hours(value)
        return value

    @property
    def mlflow_uri(self) -> str | None:
        """The tracking URI to use; None: the embedded store."""
        return self.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or None

    @property
    def prepared_dir(self) -> Path:
        return self.data_dir / "prepared"

    @property
    def table_folder(self) -> Path | None:
        """Folder of the tables' files; None: tables are in memory."""
        return self.data_dir / "tables" if self.table_storage == "mmap" else None

    @property
    def runs_dir(self) -> Path:
        return self.data_dir / "runs"

    @property
    def frames_dir(self) -> Path:
        """Folder of the frames that were trained on, each in a folder named by its digest."""
        return self.data_dir / "frames"

    @property
    def mlflow_dir(self) -> Path:
        return self.data_dir / "mlflow"


def load_settings(**given: Any) -> Settings:
    """Read the settings: what is given, then the environment. Raises UserError that names the wrong
    variable."""
    # Not cached: a command may set variables between two calls.
    try:
        settings = Settings(**given)
    except ValidationError as error:
        lines = [
            f"{_PREFIX}{str(e['loc'][0]).upper()} = {e['input']!r}: {plain_words(e)}" for e in error.errors()
        ]
        raise UserError("\n".join(lines)) from error
    # A missing folder is fine, as runs make it; a file in its place would only fail deep inside a run.
    if settings.data_dir.exists() and not settings.data_dir.is_dir():
        raise UserError(f"DPHYBRID_DATA_DIR = {str(settings.data_dir)!r}: is a file; name a folder")
    return settings
