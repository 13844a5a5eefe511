"""Commands that take an experiment: a flag for each field of the recipe's config, and those of a run."""

import os
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pydantic import BaseModel, ConfigDict

from dphybrid.cli.parser import Command, Given, as_flag
from dphybrid.config import ExperimentConfig, merge, nest
from dphybrid.recipes.configs import (
    Values,
    check_data,
    explain_unknown,
    field_types,
    load_config,
    read_config_file,
)
from dphybrid.recipes.registry import OF_TABLES, choose_recipe, find_recipe, recipe_names
from dphybrid.util.errors import UserError

if TYPE_CHECKING:
    from dphybrid.config.settings import Settings


def recipes_text() -> str:
    """Return the list of recipes for the help page, each with its summary."""
    rows = [f"  {name:<10} {find_recipe(name).summary}" for name in recipe_names()]
    title = "recipes (`--help --recipe NAME` shows its values):"
    return "\n".join([title, *(textwrap.fill(row, 100, subsequent_indent=" " * 13) for row in rows)])


def recipe_of(given: Given) -> str:
    """Return the recipe whose fields a help page or a message shows. Raises UserError."""
    texts = {name: given[name][-1] for name in ("recipe", "data.label") if name in given}
    values = merge(read_config_file(given["config"][-1]) if "config" in given else {}, nest(texts))
    # Most readers of the help have a table.
    recipe = values.get("recipe") or (OF_TABLES if "help" in given else choose_recipe(values))
    return find_recipe(str(recipe)).key


class ConfigCommand(Command):
    """A command that takes an experiment: `--config FILE`, and a flag for each field of the config."""

    # Whatever is no field here is a value of the experiment, in the text form of a flow's overrides.
    model_config = ConfigDict(extra="allow")
    config: Path | None = None
    """TOML (or JSON) file with the values to set; flags override it."""
    recipe: str | None = None
    """One of these, or your own as package.module:NAME (default: ctr with a label, else text)."""

    @classmethod
    def help_of(cls, given: Given) -> tuple[str, list[type[BaseModel]]]:
        recipe = recipe_of(given)
        intro = f"{recipes_text()}\n\nThe flags below are {recipe}'s."
        return intro, [cls, find_recipe(recipe).config_class]

    @classmethod
    def check_name(cls, name: str, given: Given) -> None:
        # `build_config` checks the fields of sections.
        if name not in (*cls.model_fields, "devices") and "." not in name:
            recipe = recipe_of(given)
            flags = [*map(as_flag, {**cls.model_fields, **field_types(recipe)})]
            raise UserError(f"{as_flag(name)}: {explain_unknown(as_flag(name), recipe, flags)}")

    @property
    def values(self) -> Values:
        """The values of the experiment that flags give, nested."""
        chosen = {} if self.recipe is None else {"recipe": self.recipe}
        return chosen | (self.model_extra or {})

    def given_config(self, base: ExperimentConfig | None = None) -> ExperimentConfig:
        """Return the config that the command line gives; `base` as in `load_config`. Raises UserError."""
        return load_config(self.config, self.values, base)


class ExperimentCommand(ConfigCommand):
    """A command that trains, perhaps several runs."""

    tracking: str | None = None
    """MLflow server or database; none: record nothing (default: DPHYBRID_TRACKING_URI)."""

    def base(self) -> ExperimentConfig | None:
        """Return the config that has the values which are not given."""
        return None

    def experiment(self) -> "tuple[ExperimentConfig, Settings]":
        """Return config and settings. Raises UserError."""
        if self.tracking is not None:
            # Not passed on as an argument: a flow's tasks read settings themselves.
            os.environ["DPHYBRID_TRACKING_URI"] = self.tracking
        from dphybrid.config.settings import load_settings  # here, as `--help` needs no settings

        config = self.given_config(self.base())
        check_data(config)
        return config, load_settings()


class RunCommand(ExperimentCommand):
    """A command that trains one run."""

    alone: ClassVar = {"resume": "latest"}
    resume: str | None = None
    """Continue a run with its values; without RESUME: the recipe's newest."""
    run_name: str | None = None
    """Name of the run and its folder (default: made of recipe, devices and time)."""

    def base(self) -> ExperimentConfig | None:
        """Return the config of the run to resume, whose name replaces `resume`."""
        if self.resume is None:
            return None
        from dphybrid.config.settings import load_settings
        from dphybrid.run.folder import named_run  # here, as `--help` needs no records

        values = merge(read_config_file(self.config) if self.config else {}, self.values)
        run = named_run(load_settings(), self.resume, choose_recipe(values))
        self.resume = run.folder.name
        return run.config
