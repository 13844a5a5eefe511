"""Everything about Prefect: worker, deployments, checks, states of flow runs. Only this package and `flows/`
import prefect."""

import os

# Prefect reads these when it is imported. A first embedded start migrates a database for about 17 of the 20
# seconds it is given; nothing here is reported to anyone.
os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "120")
os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
os.environ.setdefault("DO_NOT_TRACK", "1")
