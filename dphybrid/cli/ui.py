"""Open MLflow's pages on a run, or on all runs.

examples:
  %(prog)s                                    all runs, the best first
  %(prog)s text-cpu-1121-044553               one run: its report, curves, splits, timings, checkpoints

Where no server is set (DPHYBRID_TRACKING_URI, MLFLOW_TRACKING_URI), MLflow's own is started for you alone:
its address carries a token, and it runs until Ctrl-C.
"""

import argparse
import atexit
import html
import shutil
import signal
import socket
import sys
import tempfile
import time
import webbrowser
from pathlib import Path

from dphybrid.cli.parser import Parser, at_least_one
from dphybrid.config.settings import load_settings
from dphybrid.util.errors import UserError
from dphybrid.util.text import masked

_FIRST_PORT, _LAST_PORT = 5000, 5049


def flags(parser: Parser) -> None:
    """Add the command's flags."""
    add = parser.add_argument
    add("run_name", nargs="?", metavar="RUN", help="name or MLflow id of a run (all runs)")
    add("--port", type=at_least_one, metavar="N", help="port of a server started here (from 5000 on)")
    add("--no-browser", action="store_true", help="print the address only")


def run(args: argparse.Namespace) -> int:
    """Open MLflow's pages on a run; a server that was started for it runs until Ctrl-C."""
    from dphybrid.tracking.opening import store_to_read

    settings = load_settings()
    uri = store_to_read(settings.mlflow_uri, settings.mlflow_dir)
    port = None if uri.startswith("http") else _free_port(args.port)

    from dphybrid.tracking.compare import page_path
    from dphybrid.tracking.ui_server import serving

    page = page_path(uri, settings.experiment, args.run_name)
    if port is None:
        _show(f"{masked(uri).rstrip('/')}/#{page}", not args.no_browser)
        return 0
    print("Starting MLflow's server, which takes a while; Ctrl-C ends it", flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the server ends with this process
    try:
        with serving(uri, port) as (server, token):
            _show(f"http://127.0.0.1:{port}/?token={token}#{page}", not args.no_browser)
            while server.poll() is None:  # a plain wait goes on where the signal reaches another thread first
                time.sleep(0.2)
            return server.returncode
    except KeyboardInterrupt:
        return 0


def _free_port(wanted: int | None) -> int:
    """Return the port to listen on: `wanted`, or the first free one of 5000 to 5049. Raises UserError when it
    is taken."""
    for port in [wanted] if wanted is not None else range(_FIRST_PORT, _LAST_PORT + 1):
        with socket.socket() as probe:
            # as the server does: a port whose last connection ended a moment ago is free
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except (OSError, OverflowError) as error:
                if wanted is not None:
                    raise UserError(
                        f"--port {port}: cannot be listened on ({error}); name another, or none for the "
                        f"first free one from {_FIRST_PORT} on"
                    ) from error
                continue
            return port
    raise UserError(f"ports {_FIRST_PORT} to {_LAST_PORT} are taken; name a free one with --port")


def _show(address: str, browser: bool) -> None:
    """Print an address, and open it by a page of this user's own: a browser's command line, which everybody
    sees, names the page and not the token."""
    print(address, flush=True)
    if not browser:
        return
    folder = Path(tempfile.mkdtemp(prefix="dphybrid-ui-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    page = folder / "open.html"
    page.write_text(f'<meta http-equiv="refresh" content="0; url={html.escape(address)}">', encoding="utf-8")
    try:
        webbrowser.open(page.as_uri())
    except webbrowser.Error:
        print("No browser was found here; open the address in one.", file=sys.stderr)
