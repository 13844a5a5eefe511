"""Everything that uses Prefect: worker, deployments, states of flow runs. Only this package and `flows/`
import prefect."""

import os
import sys
from pathlib import Path

from pydantic import ValidationError

from dphybrid.util.errors import UserError, plain_words
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


def _wrong_setting(error: ValidationError) -> str:
    """Return what is wrong with Prefect's settings, with the variable or the files that set it."""
    lines = []
    for wrong in error.errors():
        field, value = str(wrong["loc"][-1] if wrong["loc"] else "").lower(), wrong["input"]
        named = [
            name
            for name, given in os.environ.items()
            if name.upper().startswith("PREFECT_") and name.lower().endswith(field) and given == str(value)
        ]
        files = [name for name in ("prefect.toml", "pyproject.toml", ".env") if Path(name).is_file()]
        where = named[0] if named else f"{field} in {' or '.join([*files, 'the profile'])}"
        lines.append(f"{where} = {str(value)!r}: {plain_words(wrong)}")
    return "Prefect's settings: " + "; ".join(lines)


try:
    # Prefect checks its settings when it is imported.
    import prefect.settings

    prefect.settings.get_current_settings()
except ValidationError as error:
    raise UserError(_wrong_setting(error)) from error
