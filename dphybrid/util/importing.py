"""Import functions and classes that a config names as `package.module:NAME`, from allowed packages; speed up
large imports."""

import gc
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from dphybrid.util.errors import UserError, suggestion


@contextmanager
def kept_from_gc() -> Iterator[None]:
    """Pause the garbage collector during the block, then exempt all existing objects from it (`gc.freeze`).

    Imported modules are never freed, and searching them takes a third of the time of importing them.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()  # before enabling it: otherwise a collection may start first
        if enabled:
            gc.enable()


_EXTRAS = {"mlflow": "mlflow", "prefect": "flows", "fastapi": "flows", "yaml": "flows", "optuna": "sweep"}
"""Optional packages, and the extra of dphybrid that installs them."""


def missing_extra(error: ModuleNotFoundError) -> UserError:
    """Return a UserError that names the extra with the missing package. Raises `error` if there is none."""
    package = (error.name or "").partition(".")[0]
    if package not in _EXTRAS:
        raise error
    return UserError(f"needs {package}, which is missing: pip install 'dphybrid[{_EXTRAS[package]}]'")


def check_import(path: str, field: str, packages: str) -> None:
    """Raise UserError unless `path`, which somebody else wrote, is in dphybrid or in an allowed package.
    field: its name, for messages. packages: the allowed ones, separated by commas."""
    module = path.partition(":")[0]
    allowed = ["dphybrid", *filter(None, map(str.strip, packages.split(",")))]
    if any(module == name or module.startswith(f"{name}.") for name in allowed):
        return
    package = module.partition(".")[0]
    raise UserError(
        f"{field} = {path!r} would run code of package {package!r}; if you trust it, set "
        f"DPHYBRID_FACTORY_PACKAGES={package}"
    )


def import_named(name: str) -> ModuleType:
    """Import a module that the user named. One in the working folder is found last, and only then does that
    folder join the folders from which Python imports."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        top, here = name.partition(".")[0], str(Path.cwd())
        # Not at the start of a command: others may be able to write into this folder, and a file `chardet.py`
        # there would be imported by whatever library looks for an optional package of that name.
        there = any(Path(here, file).exists() for file in (top, f"{top}.py"))
        if error.name != top or here in sys.path or not there:
            raise
    sys.path.append(here)
    importlib.invalidate_caches()
    return importlib.import_module(name)


def import_module_of(path: str, field: str) -> tuple[ModuleType, str]:
    """Import the module of `package.module:NAME`; return it and NAME. field: the
    field, for messages. Raises UserError that says which part is missing."""
    # A relative name is refused, as there is no package that it could be relative to.
    module_name, _, attribute = path.partition(":")
    if not module_name or module_name.startswith(".") or not attribute:
        raise UserError(f"{field} = {path!r}: write package.module:NAME")
    try:
        return import_named(module_name), attribute
    except ModuleNotFoundError as error:
        raise UserError(
            f"{field} = {path!r}: no module named {error.name!r}; is its folder on PYTHONPATH?"
        ) from error


def import_callable(path: str, field: str) -> Any:
    """Import the function or class that `package.module:NAME` names. field: its name, for messages.

    Raises UserError that says which part is missing.
    """
    module, attribute = import_module_of(path, field)
    found = vars(module).get(attribute)
    if not callable(found):
        names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        near = suggestion(attribute, names)
        raise UserError(f"{field} = {path!r}: {module.__name__} has no function {attribute!r}{near}")
    return found
