"""Prefect flows: thin combinations of the parts in `dphybrid`. Installed as `dphybrid.flows`."""

import dphybrid.orchestration  # noqa: F401 - sets what Prefect reads when it is imported, which a flow's file does first
from dphybrid.util.importing import importing_much, missing_extra

try:
    with importing_much():
        import prefect.main  # noqa: F401
except ModuleNotFoundError as error:
    raise missing_extra(error) from error
