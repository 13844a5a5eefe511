"""Import functions and classes that a config names as `package.module:NAME`; speed up large imports."""

import gc
import importlib
import importlib.util
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


def check_installed(path: str, field: str) -> None:
    """Raise UserError unless `path`, which somebody else wrote, is in an installed package: not in Python's
    own library, and not in the working folder. field: its name, for messages."""
    package, files = path.partition(":")[0].partition(".")[0], list[str | None]()
    allowed = bool(package) and package not in sys.stdlib_module_names
    if allowed and package not in sys.modules:  # else it has run its code already
        spec = importlib.util.find_spec(package)
        files = [spec.origin, *(spec.submodule_search_locations or ())] if spec else []
        allowed = bool(files) and not any(
            file and Path(file).absolute().parent == Path.cwd() for file in files
        )
    if not allowed:
        raise UserError(
            f"{field} = {path!r} is code of no installed package; install {package or 'it'} first"
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
