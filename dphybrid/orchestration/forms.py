"""The form that Prefect's pages show for a deployment: first the few values that most users set, then the
recipe's other values as `config`, and last the flow's rarely used parameters.

Each deployment has its own JSON schema on the server. Fields have no defaults, because Prefect submits
whatever a field shows; an empty field keeps the recipe's value. A switch shows on or off, never empty, so
only values that are off by default are switches; other Booleans are selections of true and false.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

from prefect import Flow
from prefect.utilities.callables import ParameterSchema
from pydantic import BaseModel

from dphybrid.config import ExperimentConfig, Section, fields_of, flatten, merge, nest
from dphybrid.recipes.configs import as_config, build_config, field_types, parse_overrides
from dphybrid.recipes.registry import DEFAULT, find_recipe, infer_recipe, recipe_names

FEW = {
    "data_path": "data.path",
    "label": "data.label",
    "register_as": "checkpoint.register_as",
    "devices": "devices",
    "epochs": "train.epochs",
    "batch_size": "train.batch_size",
    "lr": "train.lr",
}
"""The values that most users set: parameter of a flow -> field of the config."""

# A word with an asterisk, such as cpu*8, without brackets and punctuation around it.
_WITH_ASTERISK = re.compile(r"[^\s,;()]*\*[^\s,;()]*[^\s,;:().]")


def experiment(parameters: Mapping[str, Any]) -> ExperimentConfig:
    """Return the experiment that a flow's parameters describe: `config`, overridden by the values of `FEW`,
    overridden by `overrides`. Without a recipe the data decides, as on the command line.

    A value of `FEW` that is None or "" leaves the config's. Raises UserError for values that are wrong, or
    that the recipe does not use.
    """
    few = {field: parameters.get(name) for name, field in {**FEW, "recipe": "recipe"}.items()}
    given = {field: value for field, value in few.items() if value not in (None, "")}
    overrides = parse_overrides(parameters.get("overrides") or [])
    values = as_config(parameters.get("config") or {}).model_dump(exclude_unset=True)
    values = merge(merge(values, nest(given)), overrides)
    if "recipe" not in values:
        values["recipe"], reason = infer_recipe(values)
        if reason:
            print(f"Recipe {values['recipe']}: {reason}", flush=True)
    return build_config(values, dict.fromkeys([*given, *flatten(overrides)], "overrides"))


def form_of(flow: Flow[..., object], recipe: str | None) -> ParameterSchema:
    """Return the schema of a flow's parameters for a deployment of one recipe; None: of any recipe, which is
    then one of the values."""
    form = flow.parameters.model_copy(deep=True)
    parameters = form.properties
    if recipe is None:
        for position, (name, field) in enumerate(parameters.items()):
            text = _sentence(field.get("description", ""), field.get("default") if name != "config" else None)
            parameters[name] = _leaf(field) | {"description": text, "position": position}
        parameters["recipe"]["enum"] = recipe_names()
        return form
    shown: dict[str, Any] = {}
    parameters.pop("recipe", None)
    fields = field_types(recipe)
    few = {name: FEW[name] for name in parameters if FEW.get(name) in fields}
    # A recipe without a label, say, has no field for that parameter: leave it out of the form.
    for name in (name for name in parameters if name in few or name not in FEW):
        text, default = parameters[name].get("description", ""), parameters[name].get("default")
        if name in few:
            text, default = fields[few[name]].description or "", fields[few[name]].default
        shown[name] = _leaf(parameters[name]) | {"description": _sentence(text, default)}
    shown["config"] = _section(find_recipe(recipe).config_class, few.values())
    shown["config"] |= {"title": "config", "description": parameters["config"].get("description", "")}
    if recipe != DEFAULT:  # a config without a recipe means the default recipe
        shown["config"]["required"] = ["recipe"]
    shown["config"]["properties"]["recipe"] |= {"enum": [recipe], "description": find_recipe(recipe).summary}
    for position, field in enumerate(shown.values()):
        field["position"] = position
    # Sections are written out where they are used, so the schema needs no definitions.
    form.properties, form.definitions = shown, {}
    # Prefect's pages mark the other fields as optional.
    required = {f"data.{name}" for name in find_recipe(recipe).data.required}
    form.required = [name for name, field in few.items() if field in required]
    return form


def _section(model: type[BaseModel], elsewhere: Collection[str], prefix: str = "") -> dict[str, object]:
    """Return the schema of a config section: a group of fields without values.

    elsewhere: dotted names of fields that the form shows outside of `config`. Here they become
    `patternProperties`: the server accepts them, and Prefect's pages do not show them.
    """
    schema = model.model_json_schema()
    shown: dict[str, object] = {}
    hidden: dict[str, object] = {}
    for name, field in fields_of(model).items():
        kind = type(field.default) if isinstance(field.default, Section) else field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            group = _section(kind, elsewhere, f"{prefix}{name}.")
            text = (kind.__doc__ or "").partition("\n")[0]
        else:
            group = _leaf(schema["properties"][name])
            text = _sentence(field.description or "", field.default)
        if f"{prefix}{name}" in elsewhere:
            hidden[f"^{name}$"] = group
        else:
            shown[name] = group | {"title": name, "description": text, "position": len(shown)}
    return {"type": "object", "properties": shown, "patternProperties": hidden, "additionalProperties": False}


def _leaf(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a value's schema without its default and without "or null": every field may be left empty."""
    leaf = {name: value for name, value in schema.items() if name not in ("default", "anyOf")}
    kinds = [kind for kind in schema.get("anyOf", []) if kind != {"type": "null"}]
    if len(kinds) == 1:
        leaf |= kinds[0]
    elif kinds:
        leaf["anyOf"] = kinds
    if leaf.get("type") == "boolean" and schema.get("default") is not False:
        del leaf["type"]  # Prefect's pages show a switch for it, whatever else the schema says
        leaf["enum"] = [True, False]
    return leaf


def _sentence(text: str, default: object) -> str:
    """Return a field's description with its default. Values with an asterisk, such as cpu*8, become code,
    because Prefect's pages render the text as Markdown."""
    shown = ", ".join(map(str, default)) if isinstance(default, tuple | list) else default
    if shown not in (None, ""):
        text = f"{text} Empty: {shown}."
    parts = re.split("(`[^`]*`)", text)
    # Every second part is code already.
    parts[::2] = [_WITH_ASTERISK.sub(r"`\g<0>`", part) for part in parts[::2]]
    return "".join(parts)
