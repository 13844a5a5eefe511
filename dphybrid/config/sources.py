"""Config from files, flags and override texts, with errors that name value, place and remedy.

`train.batch_size=512` in a flow's `overrides` and `--train.batch-size 512` on a command line go through the same code.
"""

import argparse
import difflib
import json
import tomllib
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError

from dphybrid.config import ExperimentConfig, Section, flatten, given_values, merge
from dphybrid.util.errors import UserError


def field_types() -> dict[str, tuple[Any, str, Any]]:
    """Return every field of the config: dotted name -> (annotation, sentence, default)."""

    def walk(model: type[BaseModel], prefix: str) -> dict[str, tuple[Any, str, Any]]:
        found: dict[str, tuple[Any, str, Any]] = {}
        for name, field in model.model_fields.items():
            kind = field.annotation
            if isinstance(kind, type) and issubclass(kind, Section):
                found |= walk(kind, f"{prefix}{name}.")
            else:
                found[f"{prefix}{name}"] = (kind, field.description or "", field.default)
        return found

    return walk(ExperimentConfig, "")


def add_config_flags(parser: argparse.ArgumentParser) -> None:
    """Add one flag a field (`--train.batch-size N`), grouped by section, and `--config FILE`."""
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="TOML (or JSON) file with the values to set; flags go over it"
    )
    groups: dict[str, Any] = {}
    for name, (kind, sentence, default) in field_types().items():
        section = name.split(".")[0] if "." in name else "experiment"
        if section not in groups:
            groups[section] = parser.add_argument_group(section)
        shown = ",".join(default) if isinstance(default, tuple) else default
        choices = f" [{', '.join(map(str, get_args(kind)))}]" if get_origin(kind) is Literal else ""
        note = "" if shown in (None, "") else f" (text: {shown})"
        groups[section].add_argument(
            f"--{name.replace('_', '-')}",
            dest=f"config.{name}",
            default=argparse.SUPPRESS,
            metavar=_metavar(kind),
            help=f"{sentence}{choices}{note}".replace("%", "%%"),
        )


def _metavar(kind: Any) -> str:
    known = {int: "N", float: "X", bool: "true|false"}
    return known.get(kind, "TEXT")


def overrides_from_args(args: argparse.Namespace) -> list[str]:
    """Return the flags that were given as override texts."""
    return [f"{key.removeprefix('config.')}={value}" for key, value in vars(args).items() if key.startswith("config.")]


def parse_overrides(overrides: list[str]) -> dict[str, Any]:
    """Turn `["train.lr=0.1"]` into nested values. Raises UserError for a text without `=` or an unknown name."""
    nested: dict[str, Any] = {}
    known = field_types()
    for text in overrides:
        name, equals, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if not equals:
            raise UserError(f"override {text!r}: expected name=value, as in train.batch_size=512")
        if name not in known:
            raise UserError(f"override {text!r}: there is no field {name!r}{_suggest(name, list(known))}")
        *sections, leaf = name.split(".")
        place = nested
        for section in sections:
            place = place.setdefault(section, {})
        optional = type(None) in get_args(known[name][0])
        place[leaf] = None if optional and value.strip().lower() in ("", "none") else value.strip()
    return nested


def read_config_file(path: Path) -> dict[str, Any]:
    """Return the nested values of a TOML or JSON file. Raises UserError with file and line."""
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise UserError(f"--config {path}: {error.strerror or error}; give the path of a TOML file") from error
    except UnicodeDecodeError as error:
        raise UserError(f"--config {path}: not a text file ({error.reason} at byte {error.start}); give a TOML file") from error
    except ValueError as error:  # tomllib and json errors both say where
        raise UserError(f"--config {path}: cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise UserError(f"--config {path}: expected sections like [train], found a {type(values).__name__}")
    return values


def build_config(values: dict[str, Any], places: dict[str, str] | None = None) -> ExperimentConfig:
    """Validate nested values. Raises UserError that lists every wrong value with its place and remedy.

    places: dotted name -> where the value came from, for the message.
    """
    try:
        return ExperimentConfig.model_validate(values)
    except ValidationError as error:
        raise UserError("\n".join(_explain(item, places or {}) for item in error.errors())) from error


def load_config(file: Path | None, overrides: list[str]) -> ExperimentConfig:
    """Compose a config: the recipe, the file over it, the overrides over both. Raises UserError."""
    from_file = read_config_file(file) if file else {}
    from_flags = parse_overrides(overrides)
    places = dict.fromkeys(flatten(from_file), str(file)) | {name: f"--{name.replace('_', '-')}" for name in flatten(from_flags)}
    return build_config(merge(from_file, from_flags), places)


def apply_overrides(config: ExperimentConfig, overrides: list[str]) -> ExperimentConfig:
    """Return `config` with override texts over it; a new recipe keeps only what differed from the old recipe."""
    if not overrides:
        return config
    changes = parse_overrides(overrides)
    return build_config(merge(given_values(config), changes), dict.fromkeys(flatten(changes), "overrides"))


def _suggest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]!r}?"
    section = name.rpartition(".")[0]
    siblings = [k for k in known if k.rpartition(".")[0] == section] or known
    return f"; known: {', '.join(siblings)}"


def _explain(item: Any, places: dict[str, str]) -> str:
    name = ".".join(str(part) for part in item["loc"])
    place = places.get(name)
    where = f" (from {place})" if place else ""
    if item["type"] == "extra_forbidden":
        return f"{name}{where}: there is no such field{_suggest(name, list(field_types()))}"
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] in ("model_type", "dict_type", "model_attributes_type"):
        message = f"is a section: write [{name}] and its values below"
    if not name:
        return message
    if isinstance(item.get("input"), dict):
        return f"{name}{where}: {message}"
    return f"{name} = {item['input']!r}{where}: {message}"
