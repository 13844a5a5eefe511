"""Which packages may be imported from, where somebody else's values name the code."""

import os

from dphybrid.util.errors import UserError

ONLY = "DPHYBRID_IMPORT_ONLY"
"""Variable that a worker sets for the runs it starts: the packages, separated by commas, beside dphybrid. Not
set: any, for the values are the user's own."""


def is_allowed(path: str, packages: str) -> bool:
    """Is `package.module:NAME` of dphybrid, or of one of `packages` (separated by commas)?"""
    module = path.partition(":")[0]
    names = ["dphybrid", *filter(None, (name.strip() for name in packages.split(",")))]
    return any(module == name or module.startswith(f"{name}.") for name in names)


def check_import(path: str, place: str) -> None:
    """Raise UserError where this process may not import `path`, which was given in `place`."""
    packages = os.environ.get(ONLY)
    if packages is None or is_allowed(path, packages):
        return
    package = path.partition(":")[0].partition(".")[0]
    raise UserError(
        f"{place} = {path!r}: this worker runs code of {packages and f'{packages} and '}dphybrid alone, for "
        f"whoever reaches Prefect's server names it; set DPHYBRID_FACTORY_PACKAGES={package} for the worker "
        "where that package is trusted"
    )
