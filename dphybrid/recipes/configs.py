"""Builds configs from files, flags, forms and override texts. Each is validated by its recipe's class; errors
name value, place and remedy.

`train.batch_size=512` in a flow's `overrides` and `--train.batch-size 512` on a command line take the same
path.
"""

import difflib
import json
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache, reduce
from operator import getitem
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from dphybrid.config import ExperimentConfig, Section, flatten, leaves, merge, nest
from dphybrid.config.own_runs import wrote
from dphybrid.recipes.registry import BUILT_IN, DEFAULT, OF_TABLES, choose_recipe, find_recipe, recipe_names
from dphybrid.util.errors import UserError, plain_words, type_text
from dphybrid.util.files import given_path, no_such_file
from dphybrid.util.importing import check_installed
from dphybrid.util.text import split_items

if TYPE_CHECKING:
    from dphybrid.config.settings import Settings

Values = dict[str, Any]
"""Values of a config by name; sections are nested mappings."""
_GRID = """'{"train.lr": [0.01, 0.1], "train.batch_size": [256, 512]}'"""
_CODE_FIELDS = ("recipe", "model.factory", "train.callbacks")
"""Fields of a config that name code as package.module:NAME."""


@cache
def field_types(recipe: str = DEFAULT) -> dict[str, FieldInfo]:
    """Return every field of a recipe's config by its dotted name. Raises UserError for an unknown recipe."""
    return dict(leaves(find_recipe(recipe).config_class))


def explain_unknown(name: str, recipe: str, flags: Sequence[str] = ()) -> str:
    """Return the message for a field that a recipe's config does not have, with the field that was probably
    meant. flags: all flags of the command, where `name` is an unknown flag."""
    (section, _, leaf), known = _parts(name), flags or list(field_types(recipe))
    bare = f"{section}.{leaf}"
    # Only for names with a section: looking through all recipes imports polars, for ctr's kinds of columns.
    others = [other for other in BUILT_IN if section and bare in field_types(other)]
    if others and recipe not in others:  # if it has this value, only `-` and `_` are mixed up
        return f"recipe {recipe} does not use it; it is a value of {', '.join(others)}"
    inside = [full for full in known if not section and _parts(full)[0] == leaf]  # a section alone
    meant = inside or _nearest(leaf, known)
    meant = [full for full in meant if _parts(full)[0] == section] or meant
    if not meant and not section:  # such as --label, where nothing else says that the data is a table
        meant = _nearest(leaf, list(field_types(OF_TABLES)))
        meant = [f"--{full.replace('_', '-')}" for full in meant] if flags else meant
    told = f"there is no such {'flag' if flags else 'field'}"
    if meant:
        return f"{told}; did you mean {' or '.join(map(repr, meant[:4]))}?"
    return f"{told}; known: {', '.join([full for full in known if _parts(full)[0] == section] or known)}"


def _nearest(leaf: str, known: Sequence[str]) -> list[str]:
    """Return the fields or flags with this last part, in any section, or else with the nearest one."""
    leaves = [_parts(full)[2] for full in known]
    near = [leaf] if leaf in leaves else difflib.get_close_matches(leaf, leaves, n=1)
    return [full for full, own in zip(known, leaves, strict=True) if own in near]


def _parts(name: str) -> tuple[str, str, str]:
    """Return the section of a field or flag, a dot, and the field's own name."""
    return name.lstrip("-").replace("-", "_").rpartition(".")


def parse_overrides(overrides: list[str]) -> Values:
    """Turn `["train.lr=0.1"]` into nested values, still texts. Raises UserError for a text without `=`, and
    for a section given as a value."""
    given: dict[str, str] = {}
    for text in overrides:
        name, equals, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not name:
            raise UserError(f"override {text!r}: expected name=value, as in train.batch_size=512")
        given[name] = value.strip()
    # `train=x` next to `train.lr=0.1` could not be nested.
    if sections := [name for name in given if any(other.startswith(f"{name}.") for other in given)]:
        name = sections[0]
        raise UserError(
            f"override {name}={given[name]}: {name} is a section, and others set its fields; leave it out"
        )
    return nest(given)


def read_config_file(file: str | Path) -> Values:
    """Return the nested values of a TOML or JSON file. Raises UserError with file and line."""
    path = given_path(str(file), "--config")
    try:
        text = path.read_text("utf-8")
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError, RecursionError) as error:  # a path with a NUL byte is a ValueError
        raise UserError(f"--config {path}: cannot be read ({error}); give a TOML file") from error
    if not isinstance(values, dict):
        raise UserError(f"--config {path}: expected sections like [train], found {type_text(values)}")
    return values


def build_config(values: Values, origins: dict[str, str] | None = None) -> ExperimentConfig:
    """Validate nested values by the class of their recipe. Raises UserError that lists every wrong value with
    its place and remedy.

    Without `recipe`, `choose_recipe` does. origins: dotted name -> where the value came from.
    """
    origins = origins or {}
    given = {field: value for field, value in values.items() if field != "recipe" or value is not None}
    name = choose_recipe(given)
    if not isinstance(name, str):
        raise UserError(f"recipe = {name!r}: expected a name such as {', '.join(recipe_names())}")
    config = _validated(given, name, origins)
    idle = _idle(config)
    if wrong := [
        f"{field} = {value!r}{_from(origins.get(field))}: does nothing with {found}; {needs}"
        for field, (value, found, needs) in idle.items()
    ]:
        raise UserError("\n".join(wrong))
    return config


def _validated(given: Values, name: str, origins: Mapping[str, str]) -> ExperimentConfig:
    recipe = find_recipe(name)
    kinds = {name: field.annotation for name, field in field_types(name).items()}
    try:
        return recipe.config_class.model_validate(_parsed(given, kinds))
    except ValidationError as error:
        raise UserError("\n".join(_explain(item, origins, name) for item in error.errors())) from error


def _idle(config: ExperimentConfig) -> dict[str, tuple[object, str, str]]:
    """Return by dotted name the values, other than their defaults, that another value makes useless
    (`Section.used_with`): each with that other value and with what it needs."""
    given = given_flags(config)
    values = flatten(config.model_dump())
    idle: dict[str, tuple[object, str, str]] = {}
    for section, fields in config:
        for field, condition in fields.used_with.items() if isinstance(fields, Section) else ():
            name, (other, _, useful) = f"{section}.{field}", condition.partition("=")
            found = "" if values[other] is None else str(values[other])
            if name in given and found not in useful.split(","):
                needs = f"it needs {other}={' or '.join(useful.split(','))}" if useful else "leave one out"
                idle[name] = given[name], f"{other}={found}", needs
    return idle


def _parsed(values: Values, kinds: Mapping[str, object], prefix: str = "") -> Values:
    """Return the values with texts as their fields take them: flags and overrides are texts, and TOML has no
    null. "" and "none" are None in the fields that may be None; a list is `a,b`, a mapping JSON."""
    out: Values = {}
    for key, value in values.items():
        if isinstance(value, Section):
            value = value.model_dump(exclude_unset=True)
        kind = kinds.get(name := f"{prefix}{key}")
        forms = get_args(kind) if isinstance(kind, UnionType) or get_origin(kind) is Union else (kind,)
        containers = {get_origin(form) for form in forms}
        if kind is None and isinstance(value, dict):
            value = _parsed(value, kinds, f"{name}.")
        elif isinstance(value, str) and NoneType in forms and value.strip().lower() in ("", "none"):
            value = None
        elif isinstance(value, str) and containers & {list, tuple}:
            value = split_items(value)
        elif isinstance(value, str) and dict in containers:
            with suppress(ValueError, RecursionError):  # pydantic says what is wrong with the text
                value = json.loads(value)
        out[key] = value
    return out


def as_config(value: object) -> Any:
    """Return the config that a mapping describes; return anything else unchanged."""
    return build_config(value) if isinstance(value, dict) else value


def stored_config(
    values: Values, page: Path, settings: "Settings", given: ExperimentConfig | None = None
) -> ExperimentConfig:
    """Return the config stored in the page of a run or checkpoint.

    given: a config by the user; code that it names may be imported. Raises UserError for invalid values, and
    for a page that somebody else wrote and that names code outside of installed packages.
    """
    if not wrote(page, settings):
        _check_code(values, page, given.model_dump() if given else {})
    try:
        return _validated(values, str(values.get("recipe", DEFAULT)), {})
    except UserError as error:
        raise UserError(f"{page}: {error}; if the recipe's fields have changed since, train again") from error


def _check_code(config: Mapping[str, object], page: Path, known: Mapping[str, object]) -> None:
    """Raise UserError when a page that this data folder's runs did not write names code outside of installed
    packages. known: values of a config that the user gave, who chose the code that it names."""
    chosen = {path for field in _CODE_FIELDS for path in _named(known, field)}
    for field in _CODE_FIELDS:
        for path in _named(config, field):
            if path not in chosen:
                check_installed(path, f"{page}: none of your own runs wrote it; {field}")


def _named(config: Mapping[str, object], field: str) -> list[str]:
    """Return the import paths in a field. The name of an installed recipe is not an import path."""
    value: object = config
    for part in field.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    values = value if isinstance(value, list | tuple) else [value]
    return [text for text in values if isinstance(text, str) and ":" in text]


def given_flags(config: ExperimentConfig) -> Values:
    """Return the values in which `config` differs from its recipe, by dotted name, as flags set them."""

    def by_field(values: Values) -> Values:
        return {name: reduce(getitem, name.split("."), values) for name in field_types(config.recipe)}

    own = by_field(type(config)().model_dump())
    differing = {name: value for name, value in by_field(config.model_dump()).items() if value != own[name]}
    return {"recipe": config.recipe} | differing


def given_values(config: ExperimentConfig) -> Values:
    """Return the nested values in which `config` differs from its recipe."""
    return nest(given_flags(config))


def load_config(
    file: Path | None, given: Values | list[str], base: ExperimentConfig | None = None
) -> ExperimentConfig:
    """Compose a config: the recipe's defaults, then the file, then what is given: nested values of flags, or
    override texts. Raises UserError.

    If neither names a recipe, `choose_recipe` does. base: the config of a run that is
    resumed; it supplies the values that are not given, except for `cluster`: another number of ranks may
    resume a run.
    """
    from_file = read_config_file(file) if file else {}
    from_flags = given if isinstance(given, dict) else parse_overrides(given)
    origins = dict.fromkeys(flatten(from_file), str(file))
    origins |= {name: f"--{name.replace('_', '-')}" for name in flatten(from_flags)}
    values = merge(from_file, from_flags)
    if base and values.get("recipe", base.recipe) == base.recipe:
        values = merge({name: v for name, v in given_values(base).items() if name != "cluster"}, values)
    return build_config(values, origins)


def apply_overrides(config: ExperimentConfig, overrides: list[str]) -> ExperimentConfig:
    """Return `config` with override texts applied. If they name another recipe, only the values that differ
    from the old recipe's defaults are kept; values that the overrides make useless have their defaults again.
    Raises UserError."""
    if not overrides:
        return config
    changes = parse_overrides(overrides)
    values = merge(given_values(config), changes)
    origins = dict.fromkeys(flatten(changes), "overrides")
    made = _validated(values, str(values["recipe"]), origins)
    idle = _idle(made)
    kept = {name: value for name, value in given_flags(made).items() if name not in idle}
    return build_config(nest(kept), origins)


def _from(origin: str | None) -> str:
    return f" (from {origin})" if origin else ""


def _explain(item: Any, origins: Mapping[str, str], recipe: str) -> str:
    name = ".".join(str(part) for part in item["loc"])
    where = _from(origins.get(name))
    if item["type"] == "extra_forbidden":
        return f"{name}{where}: {explain_unknown(name, recipe)}"
    message = plain_words(item)
    if item["type"] in ("model_type", "dict_type", "model_attributes_type"):
        message = f"is a section: write [{name}] and its values below"
    if not name:
        return message
    # A section's input is a dict of all its values: too long for a message.
    if isinstance(item.get("input"), dict):
        return f"{name}{where}: {message}"
    shown = repr(item["input"])
    return f"{name} = {shown if len(shown) <= 300 else f'{shown[:300]}...'}{where}: {message}"


def check_data(config: ExperimentConfig) -> None:
    """Raise UserError when a built-in recipe's data does not exist or its table cannot be opened, before the
    seconds that importing torch takes."""
    if config.recipe in BUILT_IN:
        if path := config.data.model_dump().get("path"):
            check_data_path(str(path))
        recipe = find_recipe(config.recipe)
        if recipe.tabular:
            recipe.source(config.data, config.train.seed)


def check_data_path(path: str) -> None:
    """Raise UserError when `path` does not exist. The readers check as well, but seconds later: they import
    polars."""
    if not any(sign in path for sign in "*?[") and not given_path(path, "data.path").exists():
        raise no_such_file(path, "data.path")


def read_grid(text: str) -> dict[str, Any]:
    """Return a grid that is written as JSON. Raises UserError."""
    try:
        grid = json.loads(text, object_pairs_hook=_each_once)
    except (ValueError, RecursionError) as error:  # brackets by the thousand
        raise UserError(f"--grid {text[:200]}: not valid JSON ({error}); write {_GRID}") from error
    if not isinstance(grid, dict):
        raise UserError(f"--grid {text}: not a JSON object; write {_GRID}")
    return grid


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON, of which Python would keep only the last value of a repeated name."""
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError(f"a name is repeated: {', '.join(name for name, _ in pairs)}")
    return values
