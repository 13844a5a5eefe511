"""The form that Prefect shows for a deployment: the few values that everybody sets first, then the rest, each
as its recipe sets it.

A deployment's form is its own: the server takes a schema for each. Values that are left empty are not sent,
so that the recipe sets them; a default shown in a field would be sent, and so would another recipe's.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from prefect import Flow
from prefect.utilities.callables import ParameterSchema
from pydantic import BaseModel

from dphybrid.config import ExperimentConfig, Section
from dphybrid.recipes.configs import apply_overrides, as_config, field_types
from dphybrid.recipes.registry import DEFAULT, find_recipe

FEW = {
    "data_path": "data.path",
    "label": "data.label",
    "register_as": "checkpoint.register_as",
    "devices": "devices",
    "epochs": "train.epochs",
}
"""The values that everybody sets first: parameter of a flow -> field of the config."""


def experiment(config: Any, overrides: Sequence[str] = (), **few: Any) -> ExperimentConfig:
    """Return the experiment that a flow's parameters describe: the config, the few values over it, the
    overrides over both.

    few: by the names in `FEW`; None or "": as the config says. Raises UserError for values that the recipe
    does not use, or that are wrong.
    """
    given = [f"{FEW[name]}={value}" for name, value in few.items() if value not in (None, "")]
    return apply_overrides(as_config(config or {}), [*given, *overrides])


def form_of(flow: Flow[..., Any], recipe: str) -> ParameterSchema:
    """Return the schema of a flow's parameters for a deployment of one recipe."""
    fields, form = field_types(recipe), flow.parameters.model_copy(deep=True)
    there, shown = form.properties, {}
    few = [name for name, field in FEW.items() if name in there and field in fields]
    first = [*form.required, *few, "overrides"]
    for name in [*first, *(name for name in there if name not in (*first, *FEW, "config"))]:
        own = (there[name].get("description", ""), there[name].get("default"))
        shown[name] = _leaf(there[name]) | {
            "description": _sentence(*(fields[FEW[name]][1:] if name in few else own))
        }
    shown["config"] = _section(find_recipe(recipe).config_class)
    shown["config"] |= {"title": "config", "description": there["config"].get("description", "")}
    if recipe != DEFAULT:  # a config without a recipe would be the default one's
        shown["config"]["required"] = ["recipe"]
    shown["config"]["properties"]["recipe"] |= {"enum": [recipe], "description": find_recipe(recipe).summary}
    for position, field in enumerate(shown.values()):
        field["position"] = position
    form.properties, form.definitions = shown, {}
    return form


def _section(model: type[BaseModel]) -> dict[str, Any]:
    """Return a section as a group of fields, none of which has a value."""
    schema = model.model_json_schema()
    shown: dict[str, Any] = {}
    for position, (name, field) in enumerate(model.model_fields.items()):
        kind = type(field.default) if isinstance(field.default, Section) else field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            shown[name] = _section(kind) | {
                "title": name,
                "description": (kind.__doc__ or "").partition("\n")[0],
            }
        else:
            leaf = _leaf(schema["properties"][name])
            shown[name] = leaf | {
                "title": name,
                "description": _sentence(field.description or "", field.default),
            }
        shown[name]["position"] = position
    return {"type": "object", "properties": shown, "additionalProperties": False}


def _leaf(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a value's schema without its default; "or nothing" goes without saying, as every field may be
    left empty."""
    leaf = {name: value for name, value in schema.items() if name not in ("default", "anyOf")}
    kinds = [kind for kind in schema.get("anyOf", []) if kind != {"type": "null"}]
    if len(kinds) == 1:
        return leaf | kinds[0]
    return leaf | ({"anyOf": kinds} if kinds else {})


def _sentence(text: str, default: Any) -> str:
    """Return a field's description with its default; Prefect's pages read it as Markdown."""
    shown = ", ".join(map(str, default)) if isinstance(default, tuple | list) else default
    if shown not in (None, ""):
        text = f"{text} Empty: {shown}."
    return "".join(
        part if place % 2 else part.replace("*", r"\*")
        for place, part in enumerate(re.split("(`[^`]*`)", text))
    )
