"""Commands as pydantic classes: `Command`, its flags on an argparse parser made by pydantic-settings, and how
a command reports mistakes and interruptions."""

import argparse
import atexit
import errno
import gc
import os
import re
import signal
import textwrap
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from tempfile import gettempdir
from types import ModuleType
from typing import Any, ClassVar, NoReturn, cast

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import PydanticUndefined
from pydantic_settings import BaseSettings, CliSettingsSource

from dphybrid.config import nest
from dphybrid.config.settings import load_settings, notes_on_settings
from dphybrid.recipes.registry import find_recipe, recipe_names
from dphybrid.util.errors import UserError, plain_words, suggestion
from dphybrid.util.files import clear_scratch, disk_text
from dphybrid.util.importing import missing_extra
from dphybrid.util.terminal import guarded_output, tell
from dphybrid.util.text import as_flags, masked, printable

_MANY_FLAGS = 30
"""With more flags than this the usage line does not list them: it would take forty lines."""
_METAVARS = {
    "int": "N",
    "float": "X",
    "bool": "true|false",
    "str": "TEXT",
    "Path": "FILE",
    "tuple[str,...]": "A,B",
    "list[str]": "TEXT",
}
"""pydantic-settings' placeholder of a value -> the one that is shown."""


class Command(BaseModel):
    """The flags of a command: each field is one (`at_once` is `--at-once`), its docstring is the flag's help.

    A command of `dphybrid` also has `run`, which does the work and returns the exit code; it makes the slow
    imports, too, which `--help` and wrong flags must not wait for.
    """

    # defer_build: only the class of the command that runs needs a validator.
    model_config = ConfigDict(use_attribute_docstrings=True, defer_build=True)
    shown_as: ClassVar[dict[str, str]] = {}
    """Field -> placeholder of its value in the help."""

    @classmethod
    def add_to(cls, parser: "Parser", argv: Sequence[str]) -> None:
        """Add the flags to a parser. argv: what it is going to parse."""
        parser.add_fields(cls, cli_implicit_flags="toggle", cli_enforce_required=True)

    @classmethod
    def given(cls, values: dict[str, Any]) -> "Command":
        """Return the command with the values of its flags, by name. Raises ValidationError."""
        return cls.model_validate(nest(values))

    @classmethod
    def unknown(cls, flag: str, known: Sequence[str]) -> str:
        """Return the message for a flag that the command does not have."""
        return f"{flag}: there is no such flag{suggestion(flag, known)}"


class Parser(argparse.ArgumentParser):
    """An ArgumentParser for a `Command`, whose errors are one message that suggests what was meant.

    load: returns the command's class. Flags are added while a command line is parsed, because `--recipe`
    decides which flags exist. The parsed namespace holds the command under `command`.
    """

    def __init__(self, load: Callable[[], type[Command]] | None = None, **options: Any) -> None:
        # No abbreviated flags: the next new field could make one ambiguous, or change what it means.
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **options)
        self.command: type[Command] | None = None
        self._load = load

    def fill(self, argv: Sequence[str] = ()) -> None:
        """Add the command's flags, unless that was done."""
        if self._load is not None and self.command is None:
            self.command = self._load()
            self.command.add_to(self, argv)

    def add_fields(self, model: type[BaseModel], **options: Any) -> None:
        """Add a flag for each field of a class, as pydantic-settings makes them; fields of a section are
        `--section.field`."""
        before = len(self._actions)
        CliSettingsSource(
            cast("type[BaseSettings]", model),  # pydantic-settings reads any model's fields
            root_parser=self,
            cli_avoid_json=True,
            cli_kebab_case=True,
            cli_hide_none_type=True,
            cli_parse_none_str="none",
            **options,
        )
        shown_as = model.shown_as if issubclass(model, Command) else {}
        for action in self._actions[before:]:
            if action.const == "{}":  # `--train JSON` for a whole section; only its fields are flags
                vars(action)["container"]._remove_action(action)
                for flag in action.option_strings:
                    del self._option_string_actions[flag]
                continue
            metavar = str(action.metavar)
            action.metavar = shown_as.get(action.dest, _METAVARS.get(metavar, metavar))
            # Only values that somebody would write.
            action.help = re.sub(r" \(default: (none|None|False|\[\]|\(\))\)$", "", str(action.help))

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        argv = list(args or ())
        self.fill(argv)
        found, unknown = super().parse_known_args(argv, namespace)
        if unknown:
            self._refuse(unknown, argv)
        if self.command is not None:
            values = {n: v for n, v in vars(found).items() if v is not PydanticUndefined and n != "command"}
            try:
                found.command = self.command.given(values)
            except ValidationError as error:
                self.error("\n".join(map(self._explain, error.errors())))
        return found, []

    @property
    def actions(self) -> list[argparse.Action]:
        """All flags and positional arguments of this command."""
        return list(self._actions)

    @property
    def flags(self) -> dict[str, argparse.Action]:
        """The flags, by name: `--train.lr`."""
        return dict(self._option_string_actions)

    def move(self, action: argparse.Action, group: Any) -> None:
        """List an action in another group of the help. argparse has no way to do so."""
        vars(action)["container"]._group_actions.remove(action)
        vars(action)["container"] = group
        group._group_actions.append(action)

    def put_first(self, group: Any) -> None:
        """List a group of the help before all others."""
        self._action_groups.remove(group)
        self._action_groups.insert(0, group)

    def parse(self, argv: Sequence[str]) -> Any:
        """Return the command that a command line gives. Exits with a message for a wrong one."""
        return self.parse_args(argv).command

    def _explain(self, item: Any) -> str:
        name = ".".join(str(part) for part in item["loc"] if not isinstance(part, int))
        known = {action.dest: action for action in self._actions}
        action = known.get(name)
        flag = action.option_strings[-1] if action and action.option_strings else name.upper()
        return f"{flag} {item['input']!r}: {plain_words(item)}"

    def format_help(self) -> str:
        if self.usage is None and len(self._option_string_actions) > _MANY_FLAGS:
            positional = "".join(f" [{one.metavar or one.dest}]" for one in self._get_positional_actions())
            self.usage = f"%(prog)s [--NAME VALUE ...]{positional}"
        return super().format_help()

    def _refuse(self, unknown: Sequence[str], argv: Sequence[str]) -> NoReturn:
        """Exit with an error about arguments that this command does not have."""
        flags, known = [text for text in unknown if text.startswith("-")], list(self._option_string_actions)
        if flags and self.command is not None:
            self.error(self.command.unknown(flags[0].partition("=")[0], known))
        if flags:
            self.error(f"{flags[0]}: there is no such flag{suggestion(flags[0], known)}")
        # A value without its flag: one more item of a list, or guess the flag.
        before = argv[: argv.index(unknown[0])]
        named = [number for number, word in enumerate(before) if word.startswith("--")]
        flag, *items = before[named[-1] :] if named else [""]
        action = self._option_string_actions.get(flag)
        if action is not None and action.metavar == _METAVARS["tuple[str,...]"]:
            self.error(f"unexpected {unknown[0]!r}; write {as_flags({flag[2:]: [*items, *unknown]})}")
        file = "--config" if unknown[0].endswith(".toml") else "--data.path"
        meant = ["--recipe"] * (unknown[0] in recipe_names()) + [file, "--run-name"]
        hint = next((f"; write {as_flags({name[2:]: unknown[0]})}" for name in meant if name in known), "")
        self.error(f"unexpected {' '.join(unknown)!r}{hint}")

    def _check_value(self, action: argparse.Action, value: str) -> None:
        """Replaces argparse's check of choices, whose message suggests nothing."""
        known = None if action.choices is None else [str(choice) for choice in action.choices]
        if known is None or value in known:
            return
        if action.option_strings:
            self.error(f"{action.option_strings[0]} {value!r}: use {' or '.join(known)}")
        self.error(f"{value!r}: there is no such command{suggestion(value, known)}")

    def error(self, message: str) -> NoReturn:
        message = re.sub(r"^argument (\S+): ", r"\1: ", message)
        # No usage, unlike argparse: it lists all flags, and the error would scroll off the screen.
        self.exit(2, f"error: {printable(message)}\nSee `{self.prog} --help`.\n")


def recipes_text() -> str:
    """Return the list of recipes for the help page, each with its summary."""
    names = recipe_names()
    wide = max(map(len, names)) + 2
    lines = []
    for name in names:
        try:
            summary = find_recipe(name).summary
        except UserError as error:  # announced by an installed package that cannot be imported
            summary = f"cannot be used: {error}"
        first, *rest = textwrap.wrap(summary, 100 - wide - 2) or [""]
        lines += [f"  {name:<{wide}}{first}", *(" " * (wide + 2) + line for line in rest)]
    title = "recipes (`dphybrid train --recipe NAME`, `--help --recipe NAME` for its values):"
    return "\n".join([title, *lines])


def page_of(doc: str) -> tuple[str, str]:
    """Return a command's summary and the rest of its help page, from its module's docstring."""
    sentence, _, page = doc.partition("\n\n")
    return " ".join(sentence.split()).rstrip("."), page


def prefect_part(name: str) -> ModuleType:
    """Return the module `name` of `dphybrid.orchestration`. Imported by the commands that need Prefect when
    they run, so that the others work without it. Raises UserError when Prefect cannot be imported."""
    try:
        return import_module(f"dphybrid.orchestration.{name}")
    except ModuleNotFoundError:  # not installed: `run_cli` names the extra that installs it
        raise
    except ImportError as error:
        raise UserError(f"Prefect cannot be imported ({error}); see `dphybrid doctor`") from error


def run_cli(function: Callable[[], int | None]) -> int:
    """Call `function` and return the exit code of the process.

    A UserError is printed as one message: code 2. An interruption is 128 + the number of its signal, 130 for
    Ctrl-C; or 75 (try again later) for a run that gave way.
    """
    # Python searches all imported modules for garbage at its end, for two seconds, unless they are frozen.
    atexit.register(gc.freeze)
    # `dphybrid.flows` sets SIG_DFL so that Ctrl-C ends its imports without a traceback.
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with guarded_output():
            try:
                clear_scratch(Path(gettempdir()))
                _check_working_folder()
                for note in notes_on_settings():
                    tell(f"Note: {note}")
                return function() or 0
            except ModuleNotFoundError as error:
                raise missing_extra(error) from error
    except UserError as error:
        tell(f"error: {error}")
        return 2
    except KeyboardInterrupt as interruption:
        tell(f"\n{interruption}" if str(interruption) else "\ninterrupted")
        if vars(interruption).get("requeue"):
            if run := vars(interruption).get("run"):
                tell(f"Continue with `dphybrid train --resume {run}`")
            return os.EX_TEMPFAIL
        # Only `Interrupted` carries a signal's number; shells report 128 + that number, and Ctrl-C is 2.
        return 128 + (vars(interruption).get("signal_number") or 2)
    except BrokenPipeError:
        # The reader of a pipe has ended, as in `dphybrid ... | head`; 141 is 128 + SIGPIPE.
        return 141
    except OSError as error:
        # An OSError without a file is not the user's mistake; its traceback is needed.
        if error.filename is None:
            raise
        path, folder, text = Path(str(error.filename)), load_settings().data_dir, disk_text(error)
        # Also a folder above the data folder: it may be the one that could not be made.
        own = path.is_relative_to(folder) or folder.is_relative_to(path)
        if own and error.errno in (errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR):
            text = f"{path}: {error.strerror}; DPHYBRID_DATA_DIR={folder} must be a folder that you can write"
        tell(masked(f"error: {text}"))
        return 2


def _check_working_folder() -> None:
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise UserError("the working folder was removed; change to one that exists (cd)") from error
