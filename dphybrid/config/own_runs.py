"""The runs that this data folder has made or adopted, in a list of the data folder. Only they act: continue,
send their record, are removed, and run code of the working folder. Any other run folder is only read."""

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from dphybrid.util.errors import UserError
from dphybrid.util.files import read_json, sync

if TYPE_CHECKING:
    from dphybrid.config.settings import Settings

LIST = ".own-runs"
"""Name of the list in the data folder: a line `UID NAME` for each run."""


def enter(folder: Path) -> str:
    """Enter a run folder of the data folder into the list; return its new uid, which its `run.json` holds."""
    uid = os.urandom(8).hex()
    file = folder.absolute().parents[1] / LIST
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.write(handle, f"{uid} {folder.name}\n".encode())
        os.fsync(handle)
    finally:
        os.close(handle)
    sync(file.parent)
    return uid


def is_own(folder: Path, settings: "Settings") -> bool:
    """Return whether the data folder made or adopted the run in `folder`, which may have been renamed since.
    A copy of a run that still exists is not its own."""
    if folder.resolve().parent != settings.runs_dir.resolve():
        return False
    uid = _uid_of(folder)
    name = entered(settings).get(uid) if uid else None
    return name is not None and (name == folder.name or _uid_of(settings.runs_dir / name) != uid)


def own_folders(settings: "Settings") -> list[Path]:
    """Return the folders of the data folder's own runs."""
    return [page.parent for page in settings.runs_dir.glob("*/run.json") if is_own(page.parent, settings)]


def wrote(page: Path, settings: "Settings") -> bool:
    """Return whether a run of this data folder wrote a page of a run, a checkpoint or a model."""
    # Links first: one in the user's own folder may lead to somebody else's page.
    path, runs = page.resolve(), settings.runs_dir.resolve()
    if path.is_relative_to(runs):
        return is_own(runs / path.relative_to(runs).parts[0], settings)
    return path.is_relative_to(settings.mlflow_dir.resolve())


def check_own(folder: Path, settings: "Settings", deed: str) -> None:
    """Raise UserError unless the run is the data folder's own. deed: what to do instead."""
    if not is_own(folder, settings):
        raise UserError(f"{folder.name}: {why_foreign(folder.name)}, or {deed}")


def why_foreign(name: str) -> str:
    """Return why a run does not act, and the remedy."""
    return (
        f"it was not made in this data folder; if you trust it, `dphybrid runs adopt {name}` makes it yours"
    )


def entered(settings: "Settings") -> dict[str, str]:
    """Return uid -> name of all runs in the list, oldest first; none of a list of another account."""
    with suppress(FileNotFoundError, PermissionError):
        lines = (settings.data_dir / LIST).read_text(encoding="utf-8").split("\n")
        return {line.partition(" ")[0]: line.partition(" ")[2] for line in lines}
    return {}


def _uid_of(folder: Path) -> str:
    with suppress(UserError):  # no page, or a damaged one
        page = read_json(folder / "run.json")
        return str(page.get("uid", "")) if isinstance(page, dict) else ""
    return ""
