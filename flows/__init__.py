"""Prefect flows: thin combinations of the parts of `dphybrid`. Installed as `dphybrid.flows`."""

import signal
import sys

from dphybrid.util.errors import UserError
from dphybrid.util.importing import kept_from_gc, missing_extra

try:
    # Before prefect: sets environment variables that prefect reads on import.
    import dphybrid.orchestration  # noqa: F401
except UserError as error:
    if sys.argv[:1] != ["-m"]:
        raise
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)

# `python -m dphybrid.flows...`: let Ctrl-C end the process during the imports, which take seconds, instead of
# printing a traceback. `run_cli` installs its own handler later.
if sys.argv[:1] == ["-m"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
try:
    with kept_from_gc():
        import prefect.main  # noqa: F401
except ModuleNotFoundError as error:
    raise missing_extra(error) from error
