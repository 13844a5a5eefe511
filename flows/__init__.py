"""Prefect flows: thin combinations of the parts of `dphybrid`. Installed as `dphybrid.flows`."""

import importlib
import signal
import sys

from dphybrid.util.importing import kept_from_gc, missing_extra

# `python -m dphybrid.flows...`: let Ctrl-C end the process during the imports, which take seconds, instead of
# printing a traceback. `run_cli` installs its own handler later.
if sys.argv[:1] == ["-m"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
try:
    with kept_from_gc():
        for name in ("dphybrid.orchestration", "prefect.main"):  # the first sets what the second one reads
            importlib.import_module(name)
except ModuleNotFoundError as error:
    raise missing_extra(error) from error
