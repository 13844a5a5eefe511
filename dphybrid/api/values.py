"""Values of an experiment as Python names them: keywords, sections, or dotted names."""

from collections.abc import Mapping
from pathlib import Path

from dphybrid.config import ExperimentConfig, flatten, merge
from dphybrid.recipes.configs import Values, build_config, field_types, given_values, read_config_file
from dphybrid.recipes.registry import infer_recipe
from dphybrid.util.errors import UserError, suggestion


def experiment(
    config: ExperimentConfig | Mapping[str, object] | str | Path | None,
    given: Mapping[str, object],
    values: Mapping[str, object],
) -> ExperimentConfig:
    """Return the config of the values given by keyword over those of `config`.

    given: by full name (`recipe`, `data.path`); None: not given. values: as `nested` takes them. Without a
    recipe the data says which one is meant. Raises UserError that names the keyword.
    """
    base = _values_of(config)
    top: Values = {}
    for name, value in given.items():
        if value is not None:
            top = merge(top, _placed(name, value))
    known = merge(base, top)
    recipe = known.get("recipe") or infer_recipe(known)[0]
    places: dict[str, str] = {}
    chosen = merge(known, nested(values, recipe, places))
    return build_config({**chosen, "recipe": recipe}, places)


def _values_of(config: ExperimentConfig | Mapping[str, object] | str | Path | None) -> Values:
    if config is None:
        return {}
    if isinstance(config, ExperimentConfig):
        return given_values(config)
    if isinstance(config, str | Path):
        return read_config_file(Path(config).expanduser())
    return dict(config)


def nested(values: Mapping[str, object], recipe: str, places: dict[str, str] | None = None) -> Values:
    """Return keywords as nested values of a recipe's config.

    A keyword is a field's own name where only one section has it (`epochs`), a section with its values
    (`train={"lr": 0.01}`), or sections and name joined by two underscores or dots (`train__lr`). places: gets
    for each dotted name the keyword it came by. Raises UserError for other keywords.
    """
    fields = field_types(recipe)
    sections = {name.partition(".")[0] for name in fields if "." in name}
    out: Values = {}
    for keyword, value in values.items():
        name = keyword.replace("__", ".").replace("-", "_")
        if name in sections:
            if not isinstance(value, Mapping):
                raise UserError(
                    f"{keyword}={value!r}: is a section; give its values as {keyword}={{'name': value}}"
                )
            found = {f"{name}.{key}": inner for key, inner in flatten(dict(value)).items()}
        else:
            found = {_full_name(keyword, name, fields, recipe): value}
        for full, inner in found.items():
            if places is not None:
                places[full] = f"{keyword}="
            out = merge(out, _placed(full, _plain(inner)))
    return out


def _full_name(keyword: str, name: str, fields: Mapping[str, object], recipe: str) -> str:
    if name in fields or "." in name:
        return name  # an unknown dotted name is explained where all values are checked
    same = [full for full in fields if full.rpartition(".")[2] == name]
    if len(same) == 1:
        return same[0]
    if same:
        ways = ", ".join(full.replace(".", "__") for full in same)
        raise UserError(f"{keyword}: could be {' or '.join(same)}; say which: {ways}")
    hint = suggestion(name, sorted({full.rpartition(".")[2] for full in fields}))
    hint = hint if "did you mean" in hint else "; `dphybrid train --help --recipe " + recipe + "` lists them"
    raise UserError(f"{keyword}: recipe {recipe} has no value of that name{hint}")


def _placed(name: str, value: object) -> Values:
    *sections, leaf = name.split(".")
    out: Values = {leaf: value}
    for section in reversed(sections):
        out = {section: out}
    return out


def _plain(value: object) -> object:
    """Lists of names as fields take them, paths as texts."""
    if isinstance(value, Path):
        return str(value)
    return tuple(value) if isinstance(value, list) else value
