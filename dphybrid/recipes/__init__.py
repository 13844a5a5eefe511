"""Recipes: one object for each kind of experiment, and the configs of their experiments.

Your own recipe is a subclass of `Recipe` in your own package:

    from dphybrid.recipes import DataConfig, ModelConfig, ModelContext, Recipe, Task

`dphybrid train --recipe my_package.my_module:Mine` runs it.
"""

import importlib
from typing import TYPE_CHECKING, Any

from dphybrid.config import DataConfig, ModelConfig
from dphybrid.recipes.recipe import Recipe
from dphybrid.recipes.registry import find_recipe, recipe_names

if TYPE_CHECKING:
    from dphybrid.recipes.context import ModelContext
    from dphybrid.training.metrics import Task, mean_of
    from dphybrid.training.step import Step

_NEED_TORCH = {
    "ModelContext": "dphybrid.recipes.context",
    "Step": "dphybrid.training.step",
    "Task": "dphybrid.training.metrics",
    "mean_of": "dphybrid.training.metrics",
}


def __getattr__(name: str) -> Any:
    """Import the names that need torch on first use: the command line and the forms read recipes without
    it."""
    if name not in _NEED_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_NEED_TORCH[name]), name)


__all__ = [
    "DataConfig",
    "ModelConfig",
    "ModelContext",
    "Recipe",
    "Step",
    "Task",
    "find_recipe",
    "mean_of",
    "recipe_names",
]
