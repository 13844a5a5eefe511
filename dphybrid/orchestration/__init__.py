"""Everything that uses Prefect: worker, deployments, validation, states of flow runs. Only this package and
`flows/` import prefect."""

import os
import sys
from pathlib import Path

from dphybrid.util.errors import UserError
from dphybrid.util.files import fault_of

# Set before prefect is imported, which reads them. The first start of a temporary server creates its
# database: about 17 s of Prefect's default timeout of 20 s. The other two switch telemetry off.
os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "120")
os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
os.environ.setdefault("DO_NOT_TRACK", "1")

for _name in () if "prefect" in sys.modules else (".env", "prefect.toml", "pyproject.toml"):
    # Prefect obeys these files of the working folder, and they can name code to import. Another account may
    # be able to write there.
    _file = Path(_name)
    if _file.is_file() and (_fault := fault_of(_file.lstat()) or fault_of(_file.stat())):
        raise UserError(f"{_file.absolute()}: Prefect would obey this file, but {_fault}")
