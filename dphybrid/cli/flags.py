"""Commands that take an experiment: a flag for each field of the recipe's config, and those of a run."""

import os
import textwrap
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from pydantic import ConfigDict
from pydantic.fields import FieldInfo

from dphybrid.cli.parser import Command, Given, as_flag, asks_help, kinds_of
from dphybrid.config import ExperimentConfig, described, leaves, merge, nest
from dphybrid.config.settings import Settings, load_settings
from dphybrid.recipes.configs import Values, explain_unknown, field_types, load_config, read_config_file
from dphybrid.recipes.registry import BUILT_IN, DEFAULT, OF_TABLES, choose_recipe, find_recipe, recipe_names
from dphybrid.run.folder import named_run
from dphybrid.util.errors import UserError
from dphybrid.util.files import check_target, given_path, no_such_file
from dphybrid.util.text import as_flags


def recipes_text() -> str:
    """Return the list of recipes for the help page, each with its summary."""
    rows = []
    for name in recipe_names():
        try:
            summary = find_recipe(name).summary
        except UserError as error:  # announced by an installed package that cannot be imported
            summary = f"cannot be used: {error}"
        rows.append(textwrap.fill(f"  {name:<10} {summary}", 100, subsequent_indent=" " * 13))
    title = "recipes (`dphybrid train --recipe NAME`, `--help --recipe NAME` for its values):"
    return "\n".join([title, *rows])


def recipe_of(given: Given) -> str:
    """Return the recipe that a command line selects. Ignores mistakes: `load_config` reports them."""
    texts = {name: text for name, (*_, text) in given.items() if text is not None}
    try:
        values = read_config_file(texts["config"]) if "config" in texts else {}
        values = merge(
            values, nest({n: texts[n] for n in ("recipe", "data.path", "data.label") if n in texts})
        )
        if values.get("recipe") is None and texts.get("resume"):
            with suppress(UserError):  # told when the run is continued
                values["recipe"] = named_run(load_settings(), texts["resume"], "").config.recipe
        if values.get("recipe") is None and asks_help(given):  # most readers of the help have a table
            return OF_TABLES
        return find_recipe(choose_recipe(values)).key
    # TypeError: a file may set `recipe` to a list, which `find_recipe`'s cache cannot hash.
    except (UserError, OSError, TypeError):
        return DEFAULT


class ConfigCommand(Command):
    """A command that takes an experiment: `--config FILE`, and a flag for each field of the config."""

    # Whatever is no field here is a value of the experiment, in the text form of a flow's overrides.
    model_config = ConfigDict(extra="allow", defer_build=True)
    shown_as: ClassVar = {"recipe": "NAME"}
    first: ClassVar = (
        *("recipe", "data.path", "data.label", "devices", "train.epochs", "train.batch_size", "train.lr"),
        *("run_name", "resume", "config"),
    )
    config: Path | None = None
    """TOML (or JSON) file with the values to set; flags override it."""

    @classmethod
    def fields(cls, given: Given) -> Mapping[str, FieldInfo]:
        of_recipe = "One of these recipes, or your own as package.module:NAME (default: by the data)."
        recipe = FieldInfo(annotation=str, default=None, description=of_recipe)
        return dict(leaves(cls)) | field_types(recipe_of(given)) | {"recipe": recipe}

    @classmethod
    def unknown(cls, name: str, given: Given) -> str:
        return explain_unknown(as_flag(name), recipe_of(given), [*map(as_flag, cls.fields(given))])

    @classmethod
    def unexpected(cls, word: str, after: str, given: Given) -> str:
        if after and tuple in kinds_of(cls.fields(given)[after]):
            items = [given[after][-1], word]
            several, one = as_flags({after: items}), as_flags({after: " ".join(map(str, items))})
            return f"unexpected {word!r}; write {several}, or {one} if it is one name"
        meant = "recipe" if word in recipe_names() else "config" if word.endswith(".toml") else "data.path"
        return f"unexpected {word!r}; write {as_flags({meant: word})}"

    @classmethod
    def _help_page(cls, program: str, doc: str, given: Given) -> str:
        described(find_recipe(recipe_of(given)).config_class)
        return super()._help_page(program, doc, given)

    @classmethod
    def intro(cls, given: Given) -> str:
        return f"{recipes_text()}\n\nThe flags below are {recipe_of(given)}'s."

    @property
    def values(self) -> Values:
        """The values of the experiment that flags give, nested."""
        return dict(self.model_extra or {})

    def given_config(self, base: ExperimentConfig | None = None) -> ExperimentConfig:
        """Return the config that the command line gives; `base` as in `load_config`. Raises UserError."""
        return load_config(self.config, self.values, base)

    def data_config(self, base: ExperimentConfig | None = None) -> ExperimentConfig:
        """Return `given_config`, checked by `check_data`. Raises UserError."""
        config = self.given_config(base)
        check_data(config)
        return config


def check_data(config: ExperimentConfig) -> None:
    """Raise UserError when a built-in recipe's data does not exist or its table cannot be opened, before the
    seconds that importing torch takes."""
    if config.recipe in BUILT_IN:
        if path := config.data.model_dump().get("path"):
            check_data_path(str(path))
        recipe = find_recipe(config.recipe)
        if recipe.tabular:
            recipe.source(config.data, config.train.seed)


class ExperimentCommand(ConfigCommand):
    """A command that trains, perhaps several runs."""

    shown_as: ClassVar = {**ConfigCommand.shown_as, "tracking": "URI"}
    tracking: str | None = None
    """MLflow server or database; none: record nothing (default: DPHYBRID_TRACKING_URI)."""

    def experiment(self) -> tuple[ExperimentConfig, Settings]:
        """Return config and settings. Raises UserError."""
        if self.tracking is not None:
            # Not passed on as an argument: a flow's tasks read settings themselves.
            os.environ["DPHYBRID_TRACKING_URI"] = self.tracking
        return self.data_config(), load_settings()


class RunCommand(ExperimentCommand):
    """A command that trains one run."""

    shown_as: ClassVar = {
        **ExperimentCommand.shown_as,
        "resume": "RUN",
        "run_name": "NAME",
    }
    alone: ClassVar = {"resume": "latest"}
    resume: str | None = None
    """Continue a run (name or MLflow id) with its values; without RUN: the recipe's newest."""
    run_name: str | None = None
    """Name of the run and its folder (default: made of recipe, devices and time)."""
    report: Path | None = None
    """Write the run's report: as a page if FILE ends in .html, else as JSON."""

    def experiment(self) -> tuple[ExperimentConfig, Settings]:
        """Return config and settings; replace `resume` by the name of its run. Raises UserError."""
        if self.report is not None:
            self.report = check_target(self.report, f"--report {self.report}")
        if self.resume is None:
            return super().experiment()
        if self.tracking is not None:
            os.environ["DPHYBRID_TRACKING_URI"] = self.tracking
        settings = load_settings()
        values = merge(read_config_file(self.config) if self.config else {}, self.values)
        run = named_run(settings, self.resume, choose_recipe(values))
        self.resume = run.folder.name
        return self.data_config(run.config), settings


def check_data_path(path: str) -> None:
    """Raise UserError when `path` does not exist. The readers check as well, but seconds later: they import
    polars."""
    plain = not any(sign in path for sign in "*?[")
    if plain and not given_path(path, "data.path").exists():
        raise no_such_file(path, "data.path")
