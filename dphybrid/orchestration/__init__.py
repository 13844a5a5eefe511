"""Everything that uses Prefect: worker, deployments, states of flow runs. Only this package and `flows/`
import prefect."""

import os

# Set before prefect is imported, which reads them. The first start of a temporary server creates its
# database: about 17 s of Prefect's default timeout of 20 s. The other two switch telemetry off.
os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "120")
os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
os.environ.setdefault("DO_NOT_TRACK", "1")
