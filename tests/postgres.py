"""PostgreSQL servers for tests, each with its own port and folder."""

import glob
import os
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path

import pytest


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as stream:
        stream.bind(("127.0.0.1", 0))
        return int(stream.getsockname()[1])


class Postgres:
    """A running server for user dphybrid without a password, in a folder that other users can enter."""

    def __init__(self) -> None:
        programs = sorted(glob.glob("/usr/lib/postgresql/*/bin"))
        programs += [str(Path(program).parent) for program in [shutil.which("initdb")] if program]
        if not programs:
            pytest.skip("PostgreSQL is not installed (Debian's package postgresql)")
        self.binaries, self.port = Path(programs[0]), free_port()
        self.folder = Path(tempfile.mkdtemp(prefix="dphybrid-postgres-", dir="/tmp"))
        self._as_user: list[str] = []
        if os.geteuid() == 0:  # PostgreSQL refuses to run as root
            shutil.chown(self.folder, "postgres")
            self._as_user = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"]
        initdb = [
            str(self.binaries / "initdb"),
            "-D",
            str(self.folder / "data"),
            "-U",
            "dphybrid",
            "--auth=trust",
            "--no-sync",
        ]
        subprocess.run([*self._as_user, *initdb], check=True, capture_output=True, cwd=self.folder)
        self.control("start")

    @property
    def address(self) -> str:
        """The address without its scheme: for `postgresql://` or `postgresql+asyncpg://`."""
        return f"dphybrid@127.0.0.1:{self.port}/postgres"

    def control(self, *what: str) -> None:
        """Call pg_ctl: start, restart, stop."""
        options = f"-p {self.port} -c listen_addresses=127.0.0.1 -k {self.folder} -c fsync=off"
        command = [str(self.binaries / "pg_ctl"), "-D", str(self.folder / "data"), "-w", "-o", options]
        subprocess.run(
            [*self._as_user, *command, "-l", str(self.folder / "log"), *what],
            check=True,
            capture_output=True,
            cwd=self.folder,
        )

    def end(self) -> None:
        """Stop the server and remove its folder."""
        self.control("-m", "immediate", "stop")
        shutil.rmtree(self.folder)
