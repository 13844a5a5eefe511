"""Prefect flows: thin combinations of the parts in `dphybrid`. Installed as `dphybrid.flows`."""

import signal
import sys

import dphybrid.orchestration  # noqa: F401 - sets what Prefect reads when it is imported, which a flow's file does first
from dphybrid.util.importing import kept_from_gc, missing_extra

if sys.argv[:1] == ["-m"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the imports of a flow; `run_cli` takes it over
try:
    with kept_from_gc():
        import prefect.main  # noqa: F401
except ModuleNotFoundError as error:
    raise missing_extra(error) from error
