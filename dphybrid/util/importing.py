"""Code that values name as `package.module:NAME`, which packages it may come from, and large imports."""

import gc
import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dphybrid.util.errors import UserError

ONLY = "DPHYBRID_IMPORT_ONLY"
"""Variable that a worker sets for the runs it starts: the packages, separated by commas, beside dphybrid. Not
set: any, for the values are the user's own."""


@contextmanager
def importing_much() -> Iterator[None]:
    """Collect no garbage while the block imports: what it makes stays, and looking through it again and again
    takes a third of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


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


def import_callable(path: str, place: str) -> Any:
    """Import the function or class that `package.module:NAME` names. place: the field, for messages.

    Raises UserError that says which part is missing, or that this process may not import it.
    """
    module_name, colon, attribute = path.partition(":")
    if not colon or not module_name or not attribute:
        raise UserError(f"{place}={path!r}: write package.module:function")
    check_import(path, place)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise UserError(
            f"{place}={path!r}: no module named {error.name!r}; is its folder on PYTHONPATH?"
        ) from error
    found = vars(module).get(attribute)
    if not callable(found):
        names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise UserError(
            f"{place}={path!r}: {module_name} has no function {attribute!r}; it has "
            f"{', '.join(names) or 'none'}"
        )
    return found
