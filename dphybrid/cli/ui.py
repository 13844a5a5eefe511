"""Print the address of MLflow's pages: of all experiments, or of a run.

examples:
  %(prog)s                                    a list of runs for each recipe
  %(prog)s text-cpu-1121-044553               one run: its report, curves, splits, timings, checkpoints

Without a server (DPHYBRID_TRACKING_URI, MLFLOW_TRACKING_URI), this starts MLflow's own on this machine until
Ctrl-C. It serves you alone: its address contains a token.
"""

import signal
import socket
import time

from pydantic import Field

from dphybrid.cli.parser import Command, Positional
from dphybrid.config.own_runs import is_own
from dphybrid.config.settings import Settings, load_settings
from dphybrid.util.errors import UserError


class Flags(Command):
    """The flags of `ui`."""

    run_name: Positional[str | None] = Field(default=None, alias="RUN")
    """Name of a run (default: all experiments)."""
    port: int | None = Field(default=None, ge=1)
    """Port of the server that is started (default: a free one)."""

    def run(self) -> int:
        """Print the address of MLflow's pages. A server that is started for them runs until Ctrl-C."""
        from dphybrid.tracking.opening import store_to_read
        from dphybrid.tracking.tracker import page_address

        settings = load_settings()
        uri = store_to_read(settings.mlflow_uri, settings.mlflow_dir)
        # Before MLflow is imported, which takes seconds: a taken --port is reported at once.
        port = None if uri.startswith("http") else _free_port(self.port)

        from dphybrid.tracking.ui_server import serving

        page = page_path(settings, self.run_name)
        if port is None:
            print(page_address(uri, page))
            return 0
        print("Starting MLflow's server, which takes a while; Ctrl-C ends it", flush=True)
        # SIGTERM then raises KeyboardInterrupt, so that `serving` ends the server together with this process.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            with serving(uri, port) as (server, token):
                print(f"http://127.0.0.1:{port}/?token={token}#{page}", flush=True)
                # Not server.wait(): that does not return when another thread receives the signal first.
                while server.poll() is None:
                    time.sleep(0.2)
                return server.returncode
        except KeyboardInterrupt:
            return 0


def page_path(settings: Settings, name: str | None) -> str:
    """Return the part after `#` in the address of a run of the data folder, or of the list of experiments.
    Raises UserError if there is no such run in MLflow."""
    from dphybrid.run.folder import find_run
    from dphybrid.tracking.record import destination
    from dphybrid.tracking.tracker import run_path

    if name is None:
        return "/experiments?workflowType=machine_learning"
    run = find_run(settings, name)
    if run and is_own(run.folder, settings) and (there := destination(run.folder)):
        return run_path(str(there["experiment_id"]), str(there["run_id"]))
    what = "is not recorded in MLflow" if run else "there is no such run"
    raise UserError(f"{name}: {what}; `dphybrid runs` lists the runs, MLflow's pages those of others")


def _free_port(wanted: int | None) -> int:
    """Return the port to listen on: `wanted`, or a free one. Raises UserError if it cannot be used."""
    with socket.socket() as probe:
        # Set as the server sets it: a port whose last connection ended a moment ago counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted or 0))
        except (OSError, OverflowError) as error:
            remedy = "give another, or leave it out for a free one"
            raise UserError(f"--port {wanted}: cannot be used ({error}); {remedy}") from error
        port: int = probe.getsockname()[1]
        return port
