"""The experiment that the parameters of a flow describe. All deployments share one form: data, label, recipe,
devices, and every other value in `overrides` or `config`."""

from collections.abc import Mapping
from typing import Any

from dphybrid.config import ExperimentConfig, flatten, merge, nest
from dphybrid.recipes.configs import as_config, build_config, parse_overrides

_FIELDS = {
    "data_path": "data.path",
    "label": "data.label",
    "register_as": "checkpoint.register_as",
    "recipe": "recipe",
    "devices": "devices",
}
"""Parameter of a flow -> field of the config."""


def experiment(parameters: Mapping[str, Any]) -> ExperimentConfig:
    """Return the experiment that a flow's parameters describe: `config`, overridden by the single parameters,
    overridden by `overrides`. Without a recipe it is that of `choose_recipe`.

    A single parameter that is None or "" leaves the config's. Raises UserError for values that are wrong, or
    that the recipe does not use.
    """
    single = {field: parameters.get(name) for name, field in _FIELDS.items()}
    single = {field: value for field, value in single.items() if value not in (None, "")}
    overrides = parse_overrides(parameters.get("overrides") or [])
    values = as_config(parameters.get("config") or {}).model_dump(exclude_unset=True)
    values = merge(merge(values, nest(single)), overrides)
    return build_config(values, dict.fromkeys([*single, *flatten(overrides)], "overrides"))
