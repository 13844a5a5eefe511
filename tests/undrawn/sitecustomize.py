"""Read by every Python program that a test starts: reports of its runs hold no pictures, which take three
seconds to draw. Tests that look at pictures draw them in their own process."""

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

DRAWS = "dphybrid.tracking.html"


class Undrawn:
    """Finds the module that draws, and replaces its function when it is loaded."""

    @staticmethod
    def find_spec(name: str, path: Any = None, _target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name == DRAWS else None
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def loaded(module: ModuleType) -> None:
            load(module)
            module.figure = lambda *_, **__: "<!-- a figure -->"  # type: ignore[attr-defined]

        spec.loader.exec_module = loaded  # type: ignore[method-assign]
        return spec


# Not in pytest's own workers, which read this file before they are named.
if "PYTEST_XDIST_WORKER" in os.environ:
    sys.meta_path.insert(0, Undrawn)
