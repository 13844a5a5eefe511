"""Commands that take an experiment: a flag for each field of the recipe's config, and those of a run."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ConfigDict, PrivateAttr

from dphybrid.cli.parser import Command, Parser, recipes_text
from dphybrid.config import ExperimentConfig, merge, nest
from dphybrid.config.settings import Settings, load_settings
from dphybrid.recipes.configs import Values, explain_unknown, load_config, read_config_file
from dphybrid.recipes.registry import BUILT_IN, DEFAULT, OF_TABLES, choose_recipe, find_recipe
from dphybrid.run.folder import named_run
from dphybrid.util.errors import UserError
from dphybrid.util.files import check_target, given_path, no_such_file
from dphybrid.util.text import split_items

_FIRST = (
    *("--recipe", "--data.path", "--data.label", "--devices", "--train.epochs", "--train.batch-size"),
    *("--train.lr", "--run-name", "--resume", "--config"),
)
"""The flags that people set, which the help lists first."""


def recipe_of(argv: Sequence[str]) -> str:
    """Return the recipe that a command line selects, which decides the flags to offer. Mistakes are ignored
    here: `load_config` reports them."""
    # The flags on which the recipe depends are parsed first, without all others.
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for flag in ("--recipe", "--config", "--data.path", "--data.label"):
        first.add_argument(flag, default=argparse.SUPPRESS)
    first.add_argument("--resume", nargs="?", default=None)
    first.add_argument("words", nargs="*")
    try:
        given = vars(first.parse_known_args(list(argv))[0])
        file, resume, words = given.pop("config", None), given.pop("resume"), given.pop("words")
        if words[:1] == ["recipe"]:  # dphybrid check recipe NAME
            given["recipe"] = "".join(words[1:2])
        values = merge(read_config_file(file) if file else {}, nest(given))
        if "recipe" not in values and (resumed := _recipe_of_run(resume)):
            values["recipe"] = resumed
        if "recipe" not in values and _asks_help(argv):  # most readers of the help have a table
            values["recipe"] = OF_TABLES
        return find_recipe(choose_recipe(values)).key
    # TypeError: a file may set `recipe` to a list, which `find_recipe`'s cache cannot hash.
    except (argparse.ArgumentError, UserError, OSError, TypeError):
        return DEFAULT


def _asks_help(argv: Sequence[str]) -> bool:
    return "-h" in argv or "--help" in argv


def _recipe_of_run(name: str | None) -> str | None:
    """Return the recipe of the run to resume, or None when `name` is no run."""
    try:
        return named_run(load_settings(), name, "").config.recipe if name else None
    except UserError:
        return None


class ConfigCommand(Command):
    """A command that takes an experiment: `--config FILE`, and a flag for each field of the config."""

    # Whatever is no field here is a value of the experiment.
    model_config = ConfigDict(extra="allow", defer_build=True)
    config: Path | None = None
    """TOML (or JSON) file with the values to set; flags override it."""
    _recipe: str = PrivateAttr(DEFAULT)

    @classmethod
    def add_to(cls, parser: Parser, argv: Sequence[str]) -> None:
        recipe = recipe_of(argv)
        first = parser.add_argument_group("most used")
        super().add_to(parser, argv)
        parser.add_fields(find_recipe(recipe).config_class, cli_implicit_flags=False)
        parser.set_defaults(recipe_of_flags=recipe)
        flags = parser.flags
        for name in _FIRST:
            if name in flags:
                parser.move(flags[name], first)
        parser.put_first(first)
        if _asks_help(argv):
            parser.description = (
                f"{parser.description}\n\n{recipes_text()}\n\nThe flags below are {recipe}'s."
            )
        flags["--recipe"].metavar = "NAME"
        flags[
            "--recipe"
        ].help = "One of these recipes, or your own as package.module:NAME (default: by the data)."

    @classmethod
    def given(cls, values: dict[str, Any]) -> "ConfigCommand":
        recipe = values.pop("recipe_of_flags")
        # A flag that was given several times is a list of its texts.
        texts = {n: _items(v) if isinstance(v, list) and "." in n else v for n, v in values.items()}
        command = cls.model_validate(nest(texts))
        command._recipe = recipe
        return command

    @classmethod
    def unknown(cls, flag: str, known: Sequence[str]) -> str:
        return f"{flag}: {explain_unknown(flag, DEFAULT, known)}"

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


def _items(texts: Sequence[str]) -> list[str] | str:
    """Return the items of a list's flag. One text is left to the field, which splits it."""
    return texts[0] if len(texts) == 1 else [item for text in texts for item in split_items(text)]


class ExperimentCommand(ConfigCommand):
    """A command that trains, perhaps several runs."""

    shown_as: ClassVar[dict[str, str]] = {"tracking": "URI"}
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

    shown_as: ClassVar[dict[str, str]] = {
        **ExperimentCommand.shown_as,
        "resume": "RUN",
        "run_name": "NAME",
    }
    resume: str | None = None
    """Continue a run (name or MLflow id) with its values; without RUN: the recipe's newest."""
    run_name: str | None = None
    """Name of the run and its folder (default: made of recipe, devices and time)."""
    report: Path | None = None
    """Write the run's report: as a page if FILE ends in .html, else as JSON."""

    @classmethod
    def add_to(cls, parser: Parser, argv: Sequence[str]) -> None:
        super().add_to(parser, argv)
        (resume,) = (action for action in parser.actions if action.dest == "resume")
        resume.nargs, resume.const = "?", "latest"

    def experiment(self) -> tuple[ExperimentConfig, Settings]:
        """Return config and settings; replace `resume` by the name of its run. Raises UserError."""
        if self.report is not None:
            self.report = check_target(self.report, f"--report {self.report}")
        if self.resume is None:
            return super().experiment()
        if self.tracking is not None:
            os.environ["DPHYBRID_TRACKING_URI"] = self.tracking
        settings = load_settings()
        run = named_run(settings, self.resume, self._recipe)
        self.resume = run.folder.name
        return self.data_config(run.config), settings


def check_data_path(path: str) -> None:
    """Raise UserError when `path` does not exist. The readers check as well, but seconds later: they import
    polars."""
    plain = not any(sign in path for sign in "*?[")
    if plain and not given_path(path, "data.path").exists():
        raise no_such_file(path, "data.path")
