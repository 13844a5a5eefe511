"""Finds recipes: the built-in ones, those of installed packages, and a user's own by import path.

No other module lists the built-in recipes.
"""

from collections.abc import Mapping
from copy import copy
from functools import cache
from importlib.metadata import entry_points
from typing import Any, TypeGuard

from dphybrid.recipes.recipe import Recipe
from dphybrid.util.errors import UserError, suggestion
from dphybrid.util.importing import import_module_of

BUILT_IN = {
    "ctr": "dphybrid.recipes.ctr:Ctr",
    "retrieval": "dphybrid.recipes.retrieval:Retrieval",
    "kge": "dphybrid.recipes.kge:Kge",
    "text": "dphybrid.recipes.text:Text",
    "digits": "dphybrid.tutorials:Digits",
    "hybrid": "dphybrid.tutorials:Hybrid",
    "blocks": "dphybrid.tutorials:Blocks",
    "convnet": "dphybrid.tutorials:Convnet",
    "toy": "dphybrid.tutorials:Toy",
}
DEFAULT = "text"
OF_TABLES = "ctr"
"""The recipe for tables: the default for frames, and the one that messages recommend."""
GROUP = "dphybrid.recipes"
"""Entry-point group by which an installed package announces recipes: NAME = "package.module:CLASS"."""


@cache
def announced() -> dict[str, str]:
    """Return the recipes that installed packages announce: name -> import path."""
    # A package cannot replace a built-in recipe: configs and runs would change their meaning.
    return {point.name: point.value for point in entry_points(group=GROUP) if point.name not in BUILT_IN}


def recipe_names() -> list[str]:
    """Return the names that `recipe` may have, besides import paths."""
    return [*BUILT_IN, *announced()]


@cache
def find_recipe(name: str) -> Recipe:
    """Return the recipe with this name or import path `package.module:NAME` (of a `Recipe` class or object).

    Raises UserError that says which part of the path does not exist.
    """
    path = BUILT_IN.get(name) or announced().get(name, name)  # looking for announced ones takes a while
    if ":" not in path:
        near = suggestion(name, recipe_names()).partition("; known")[0].rstrip("?")
        raise UserError(
            f"recipe = {name!r}: unknown recipe{near}; known are "
            f"{', '.join(map(repr, recipe_names()))}, and your own as package.module:NAME"
        )
    module, attribute = import_module_of(path, "recipe")
    found = vars(module).get(attribute)
    if _is_recipe(found):
        found = found()
    if not isinstance(found, Recipe):
        there = [key for key, value in vars(module).items() if isinstance(value, Recipe) or _is_recipe(value)]
        it_has = f"it has {', '.join(there) or 'none'}"
        raise UserError(f"recipe = {name!r}: {module.__name__} has no recipe {attribute!r}; {it_has}")
    if not found.name.strip() or any(sign in found.name for sign in "/: "):
        raise UserError(f"recipe = {name!r}: is named {found.name!r}; leave out blanks, slashes and colons")
    # A copy, because several names may lead to one object and each needs its own key.
    recipe = copy(found)
    recipe.key = name
    return recipe


def _is_recipe(value: object) -> TypeGuard[type[Recipe]]:
    return isinstance(value, type) and issubclass(value, Recipe) and value is not Recipe


def choose_recipe(values: Mapping[str, Any]) -> Any:
    """Return the recipe that nested values name; without one, that for tables if they name a label, else the
    default one."""
    if "recipe" in values:
        return values["recipe"]
    data = values.get("data")
    return OF_TABLES if isinstance(data, Mapping) and data.get("label") not in (None, "") else DEFAULT
