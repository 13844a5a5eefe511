"""Prefect flows: thin combinations of the parts in `dphybrid`. Installed as `dphybrid.flows`."""

import dphybrid.orchestration  # noqa: F401 - sets what Prefect reads when it is imported, which a flow's file does first
