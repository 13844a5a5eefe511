"""`dphybrid ui`: MLflow's pages on a run, from the server in force or from one started here for the embedded
store."""

import atexit
import html
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import webbrowser
from pathlib import Path

from dphybrid.util.errors import UserError

FIRST_PORT, LAST_PORT = 5000, 5049


def free_port(wanted: int | None) -> int:
    """Return the port to listen on: `wanted`, or the first free one of 5000 to 5049. Raises UserError when it
    is taken."""
    for port in [wanted] if wanted is not None else range(FIRST_PORT, LAST_PORT + 1):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except (OSError, OverflowError) as error:
                if wanted is not None:
                    raise UserError(
                        f"--port {port}: cannot be listened on ({error}); name another, or none for the "
                        f"first free one from {FIRST_PORT} on"
                    ) from error
                continue
            return port
    raise UserError(f"ports {FIRST_PORT} to {LAST_PORT} are taken; name a free one with --port")


def ended(server: subprocess.Popen[bytes]) -> int:
    """Wait until the server has ended; return its exit code. Ctrl-C raises KeyboardInterrupt."""
    while server.poll() is None:  # a plain wait goes on where the signal reaches another thread first
        time.sleep(0.2)
    return server.returncode


def show(address: str, browser: bool) -> None:
    """Print an address, and open it where a browser is wanted and there is one."""
    print(address, flush=True)
    if browser:
        _open(address)


def _open(address: str) -> None:
    """Open an address by a page of this user's own: a browser's command line, which everybody sees, names the
    page and not the token."""
    folder = Path(tempfile.mkdtemp(prefix="dphybrid-ui-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    page = folder / "open.html"
    page.write_text(f'<meta http-equiv="refresh" content="0; url={html.escape(address)}">', encoding="utf-8")
    try:
        webbrowser.open(page.as_uri())
    except webbrowser.Error:
        print("No browser was found here; open the address in one.", file=sys.stderr)
