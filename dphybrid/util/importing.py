"""Import what a value names as `package.module:NAME`, from allowed packages; speed up large imports."""

import gc
import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from dphybrid.util.errors import UserError, suggestion

ONLY = "DPHYBRID_IMPORT_ONLY"
"""Variable that a worker sets for its runs: the packages, separated by commas, that values may name besides
dphybrid. Unset: any package, since the values are the user's own."""


@contextmanager
def kept_from_gc() -> Iterator[None]:
    """Pause the garbage collector, and exempt all objects that exist after the block from later searches
    (`gc.freeze`): imported modules stay, and searching them takes a third of the time of importing them."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


_EXTRAS = {"mlflow": "mlflow", "prefect": "flows", "fastapi": "flows", "yaml": "flows", "optuna": "sweep"}
"""Optional packages, and the extra of dphybrid that installs each."""


def missing_extra(error: ModuleNotFoundError) -> UserError:
    """Return the error that says which extra installs a missing package. Raises `error` where none does."""
    package = (error.name or "").partition(".")[0]
    if package not in _EXTRAS:
        raise error
    return UserError(f"needs {package}, which is missing: pip install 'dphybrid[{_EXTRAS[package]}]'")


@contextmanager
def importing_only(packages: str) -> Iterator[None]:
    """Within the block this process imports named code as a run of a worker does: from dphybrid and these
    packages alone (names separated by commas)."""
    before = os.environ.get(ONLY)
    os.environ[ONLY] = packages
    try:
        yield
    finally:
        os.environ.pop(ONLY)
        if before is not None:
            os.environ[ONLY] = before


def check_import(path: str, place: str, packages: str | None = None) -> None:
    """Raise UserError when `path`, given in `place`, is of neither dphybrid nor an allowed package.

    packages: names separated by commas, for a file that somebody else wrote. None: this process's rule, which
    allows any package unless a worker started it.
    """
    # From the environment: a run's own processes (ranks, cells of a sweep) inherit the worker's rule.
    packages = os.environ.get(ONLY) if packages is None else packages
    module = path.partition(":")[0]
    if packages is None:
        return
    allowed = ["dphybrid", *filter(None, map(str.strip, packages.split(",")))]
    if any(module == name or module.startswith(f"{name}.") for name in allowed):
        return
    package = module.partition(".")[0]
    raise UserError(
        f"{place} = {path!r} would run code of package {package!r}; if you trust it, set "
        f"DPHYBRID_FACTORY_PACKAGES={package} (for a worker, where it starts)"
    )


def import_module_of(path: str, place: str) -> tuple[ModuleType, str]:
    """Import the module of `package.module:NAME`, whatever package it is of; return it and NAME. place: the
    field, for messages. Raises UserError that says which part is missing."""
    # A relative name would depend on who imports.
    module_name, _, attribute = path.partition(":")
    if not module_name or module_name.startswith(".") or not attribute:
        raise UserError(f"{place} = {path!r}: write package.module:NAME")
    try:
        return importlib.import_module(module_name), attribute
    except ModuleNotFoundError as error:
        raise UserError(
            f"{place} = {path!r}: no module named {error.name!r}; is its folder on PYTHONPATH?"
        ) from error


def import_callable(path: str, place: str) -> Any:
    """Import the function or class that `package.module:NAME` names. place: the field, for messages.

    Raises UserError that says which part is missing, or that this process may not import it.
    """
    check_import(path, place)
    module, attribute = import_module_of(path, place)
    found = vars(module).get(attribute)
    if not callable(found):
        names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        near = suggestion(attribute, names)
        raise UserError(f"{place} = {path!r}: {module.__name__} has no function {attribute!r}{near}")
    return found
