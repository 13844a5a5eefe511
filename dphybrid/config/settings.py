"""Where experiments run: folders, devices, threads, servers. Read from DPHYBRID_* variables and a `.env`
file; never part of a result."""

import os
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from dotenv import dotenv_values
from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from dphybrid.util.device_spec import parse_device_spec
from dphybrid.util.errors import UserError, plain_words
from dphybrid.util.files import given_path
from dphybrid.util.hours import parse_training_hours

_PREFIX, _ALMOST = "DPHYBRID_", 0.85


class Settings(BaseSettings):
    """Settings of this machine and user."""

    # extra: a .env file may hold other programs' values, too.
    model_config = SettingsConfigDict(
        env_prefix=_PREFIX, env_file=".env", extra="ignore", frozen=True, use_attribute_docstrings=True
    )

    data_dir: Path = Path("~/.dphybrid")
    """Folder for prepared data, checkpoints and the default MLflow store."""
    devices: str = "auto"
    """Devices for experiments that say devices=auto."""
    threads: int = Field(default=0, ge=0)
    """CPU threads for torch; 0: torch's own choice. A fixed number makes CPU results repeat bit for bit on
    another machine."""
    table_storage: Literal["memory", "mmap"] = "memory"
    """Where tables and their optimizers' states lie: memory, or mmap, files in data_dir/tables as long as the
    run lasts, for tables larger than the memory: slower, but exact all the same."""
    tracking_uri: str | None = None
    """MLflow server or database; empty: MLFLOW_TRACKING_URI, else a SQLite database in data_dir, or files
    where MLflow is not installed; files: plain files in runs/NAME/record; none: nothing is recorded."""
    tracking_detail: Literal["brief", "full"] = "brief"
    """brief: about 20 metrics a run, and the finer ones in a table among its artifacts (details/); full: all
    of them as metrics."""
    upload_limit_mib: int = Field(default=900, ge=1)
    """Files of a checkpoint above this many MiB are not uploaded to an MLflow server but recorded by path and
    digest."""
    factory_packages: str = ""
    """Packages, separated by commas, whose code others' values may name: model.factory of checkpoints that
    come from elsewhere; for a worker also model.factory and recipe of the runs it takes. Your own commands,
    and runs in your data_dir, may name any."""
    cluster_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds that a process of a cluster's run waits for the others in anything that they do together; one
    that is gone is noticed at once."""
    cluster_restarts: int = Field(default=3, ge=0)
    """How often the processes of a cluster's run are started again, from its newest checkpoint, after one
    died."""
    cluster_wait_s: float = Field(default=600.0, gt=0)
    """Seconds that a run over several machines waits for all of them to begin, with their GPUs free."""
    cluster_address: str = ""
    """Address under which the other machines of a run reach this one; empty: that from which it reaches
    Prefect's server, unless that is a public one."""
    profile: str | None = None
    """Steps to record with torch's profiler, FIRST-LAST, such as 20-24; the trace opens in Perfetto."""
    experiment: str = Field(default="dphybrid", min_length=1)
    """MLflow experiment that runs are put into."""
    lease_dir: Path = Path("/var/lock/dphybrid")
    """Folder of the locks that say which GPU belongs to which run; the same for all users of the machine."""
    max_gpus: int = Field(default=0, ge=0)
    """GPUs that devices=auto takes at most; 0: all that are free."""
    gpu_wait_s: float = Field(default=86400.0, ge=0)
    """Seconds to wait for GPUs before a run fails with the reason."""
    gpu_free_share: float = Field(default=0.9, gt=0, le=1)
    """Share of a GPU's memory that must be free for it to count as free."""
    gpu_max_load: int = Field(default=10, ge=0, le=100)
    """Load in per cent up to which a GPU counts as free."""
    gpu_window_s: float = Field(default=2.0, ge=0)
    """Seconds over which a GPU must have been free."""
    gpu_poll_s: float = Field(default=1.0, gt=0)
    """Seconds between two looks at the GPUs, while waiting for them and while training on them."""
    gpu_ignore: str = "Xorg,Xwayland,gnome-shell"
    """Commands whose processes on a GPU do not count, separated by commas."""
    yield_to_others: Literal["never", "ask", "always"] = "ask"
    """When training gives its GPUs back to others: never; ask: when someone types `dphybrid devices --ask N`,
    or memory runs out; always: also when another process appears on them."""
    training_hours: str = ""
    """When training may use GPUs, in this machine's time: `20:00-08:00`, `mon-fri 19:00-07:30, sat, sun`;
    empty: always."""
    worker_allows: str = ""
    """What a worker takes from Prefect besides parameters, separated by commas: command, env, working_dir,
    pull_steps. With it, anyone who reaches Prefect's server can run commands as the worker's user."""
    requeue_after_s: float = Field(default=60.0, ge=0)
    """Seconds after which a run that gave its GPUs back asks for them again."""
    nvml: str = "pynvml"
    """Module with NVML's functions. Another one than pynvml stands in for it; its GPUs are virtual devices on
    the CPU."""

    @field_validator("data_dir")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        return given_path(str(value), "data_dir").absolute()

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

    @field_validator("training_hours")
    @classmethod
    def _hours(cls, value: str) -> str:
        parse_training_hours(value)
        return value

    @field_validator("worker_allows")
    @classmethod
    def _job_variables(cls, value: str) -> str:
        names = [name.strip() for name in value.split(",") if name.strip()]
        if unknown := [name for name in names if name not in ("command", "env", "working_dir", "pull_steps")]:
            raise ValueError(f"{unknown[0]} is none of command, env, working_dir, pull_steps")
        return ",".join(names)

    @property
    def worker_may(self) -> frozenset[str]:
        """The names in `worker_allows`."""
        return frozenset(filter(None, self.worker_allows.split(",")))

    @property
    def mlflow_uri(self) -> str | None:
        """The tracking URI in force, or None for the embedded store."""
        return self.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or None

    @property
    def prepared_dir(self) -> Path:
        return self.data_dir / "prepared"

    @property
    def table_folder(self) -> Path | None:
        """Folder of the tables' files, or None where they lie in memory."""
        return self.data_dir / "tables" if self.table_storage == "mmap" else None

    @property
    def runs_dir(self) -> Path:
        return self.data_dir / "runs"

    @property
    def mlflow_dir(self) -> Path:
        return self.data_dir / "mlflow"


def load_settings() -> Settings:
    """Read the settings. Raises UserError that names the variable."""
    # Anew at each call: commands set variables for what they call.
    try:
        settings = Settings()
    except ValidationError as error:
        lines = [
            f"{_PREFIX}{str(e['loc'][0]).upper()} = {e['input']!r}: {plain_words(e)}" for e in error.errors()
        ]
        raise UserError("\n".join(lines)) from error
    except UnicodeDecodeError as error:
        raise UserError(f"{Path('.env').absolute()}: is not UTF-8 text ({error})") from error
    if settings.data_dir.exists() and not settings.data_dir.is_dir():
        raise UserError(f"DPHYBRID_DATA_DIR = {str(settings.data_dir)!r}: is a file; name a folder")
    return settings


def misspelt_settings() -> list[str]:
    """Return, for each variable of the environment or `.env` that is almost a setting, which one may be
    meant."""
    known, names = [name.upper() for name in Settings.model_fields], list(os.environ)
    with suppress(UnicodeDecodeError):  # `load_settings` says it
        names += dotenv_values(".env")
    given = {name.upper().removeprefix(_PREFIX) for name in names if name.upper().startswith(_PREFIX)}
    # Others of the prefix belong to infra/ and to dphybrid's own processes.
    near = ((name, get_close_matches(name, known, 1, _ALMOST)) for name in sorted(given.difference(known)))
    told = "{0}{1}: there is no such setting; did you mean {0}{2}?"
    return [told.format(_PREFIX, name, close) for name, found in near for close in found]
