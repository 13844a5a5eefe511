"""Databases of MLflow and Prefect with all their tables. Making one takes seconds, so tests copy it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from dphybrid.tracking import opening
from dphybrid.util.files import make_folder
from dphybrid.util.locks import locked

PROGRAMS = {
    "mlflow": "from mlflow.tracking import MlflowClient\n"
    "MlflowClient('sqlite:///made.db').get_experiment_by_name('Default')",
    "prefect": "import asyncio\nfrom prefect.server.database import provide_database_interface\n"
    "asyncio.run(provide_database_interface().create_db())",
}
_make_database = opening.make_database
_folder = Path()


def keep_in(folder: Path) -> None:
    """Set the folder of the finished databases, which all processes of this session share."""
    global _folder
    _folder = folder


def put_database(kind: str, file: Path) -> None:
    """Copy a database of `kind` to `file`, unless the file exists."""
    if file.exists():
        return
    made = _folder / kind / "made.db"
    # The first process makes it; the others wait for the lock and find it finished.
    with locked(_folder / f"{kind}.lock"):
        if not made.exists():
            work = _folder / f"{kind}.begun"
            work.mkdir()
            environment = {name: value for name, value in os.environ.items() if "PREFECT" not in name}
            environment |= {
                "PREFECT_HOME": str(work),
                "PREFECT_API_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{work}/made.db",
            }
            subprocess.run(
                [sys.executable, "-c", PROGRAMS[kind]],
                check=True,
                capture_output=True,
                cwd=work,
                env=environment,
            )
            work.rename(made.parent)
    make_folder(file.parent)
    shutil.copyfile(made, file)


def make_database(uri: str, store: Path) -> None:
    """Replaces `opening.make_database` in this process: first copies a finished database for it to find."""
    if uri == opening.embedded_uri(store):
        put_database("mlflow", store / "mlflow.db")
    _make_database(uri, store)
