"""The form that Prefect's pages show for a deployment: first the few values that everybody sets, then the
recipe's other values as `config`, last what is rarely used.

Each deployment has its own JSON schema on the server. Fields have no defaults: Prefect sends what a field
shows, and an empty field keeps the recipe's value.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

from prefect import Flow
from prefect.utilities.callables import ParameterSchema
from pydantic import BaseModel

from dphybrid.config import ExperimentConfig, Section, fields_of
from dphybrid.recipes.configs import apply_overrides, as_config, field_types
from dphybrid.recipes.registry import DEFAULT, find_recipe

FEW = {
    "data_path": "data.path",
    "label": "data.label",
    "register_as": "checkpoint.register_as",
    "devices": "devices",
    "epochs": "train.epochs",
    "batch_size": "train.batch_size",
    "lr": "train.lr",
}
"""The values that everybody sets: parameter of a flow -> field of the config."""

_WITH_ASTERISK = re.compile(r"[^\s,;()]*\*[^\s,;()]*[^\s,;:().]")


def experiment(parameters: Mapping[str, Any]) -> ExperimentConfig:
    """Return the experiment that a flow's parameters describe: `config`, the few values of `FEW` over it,
    `overrides` over both.

    Of the few, None or "" is as the config says. Raises UserError for values that the recipe does not use, or
    that are wrong.
    """
    few = [
        f"{field}={parameters[name]}" for name, field in FEW.items() if parameters.get(name) not in (None, "")
    ]
    return apply_overrides(
        as_config(parameters.get("config") or {}), [*few, *(parameters.get("overrides") or [])]
    )


def form_of(flow: Flow[..., object], recipe: str) -> ParameterSchema:
    """Return the schema of a flow's parameters for a deployment of one recipe."""
    fields, form = field_types(recipe), flow.parameters.model_copy(deep=True)
    there, shown = form.properties, {}
    few = {name: FEW[name] for name in there if FEW.get(name) in fields}
    for name in (name for name in there if name in few or name not in FEW):
        own = (there[name].get("description", ""), there[name].get("default"))
        shown[name] = _leaf(there[name]) | {
            "description": _sentence(*(fields[few[name]][1:] if name in few else own))
        }
    shown["config"] = _section(find_recipe(recipe).config_class, few.values())
    shown["config"] |= {"title": "config", "description": there["config"].get("description", "")}
    if recipe != DEFAULT:  # a config without a recipe would be the default one's
        shown["config"]["required"] = ["recipe"]
    shown["config"]["properties"]["recipe"] |= {"enum": [recipe], "description": find_recipe(recipe).summary}
    for position, field in enumerate(shown.values()):
        field["position"] = position
    # Sections stand where they are used: nothing refers to a definition.
    form.properties, form.definitions = shown, {}
    return form


def _section(model: type[BaseModel], elsewhere: Collection[str], prefix: str = "") -> dict[str, object]:
    """Return a section as a group of fields, none of which has a value.

    elsewhere: dotted names of fields that the form shows outside of `config`. The server takes them here,
    too, as patterns, which Prefect's pages do not show.
    """
    schema = model.model_json_schema()
    shown: dict[str, object] = {}
    taken: dict[str, object] = {}
    for name, field in fields_of(model).items():
        kind = type(field.default) if isinstance(field.default, Section) else field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            group = _section(kind, elsewhere, f"{prefix}{name}.")
            text = (kind.__doc__ or "").partition("\n")[0]
        else:
            group = _leaf(schema["properties"][name])
            text = _sentence(field.description or "", field.default)
        if f"{prefix}{name}" in elsewhere:
            taken[f"^{name}$"] = group
        else:
            shown[name] = group | {"title": name, "description": text, "position": len(shown)}
    return {"type": "object", "properties": shown, "patternProperties": taken, "additionalProperties": False}


def _leaf(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a value's schema without its default; "or nothing" goes without saying, as every field may be
    left empty."""
    leaf = {name: value for name, value in schema.items() if name not in ("default", "anyOf")}
    kinds = [kind for kind in schema.get("anyOf", []) if kind != {"type": "null"}]
    if len(kinds) == 1:
        return leaf | kinds[0]
    return leaf | ({"anyOf": kinds} if kinds else {})


def _sentence(text: str, default: object) -> str:
    """Return a field's description with its default. Prefect's pages read it as Markdown, so values with an
    asterisk, such as cpu*8, become code."""
    shown = ", ".join(map(str, default)) if isinstance(default, tuple | list) else default
    if shown not in (None, ""):
        text = f"{text} Empty: {shown}."
    parts = re.split("(`[^`]*`)", text)
    parts[::2] = [_WITH_ASTERISK.sub(r"`\g<0>`", part) for part in parts[::2]]
    return "".join(parts)
