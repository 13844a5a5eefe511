"""The argument parser of all commands, and how a command reports mistakes and interruptions."""

import argparse
import atexit
import errno
import gc
import os
import re
import signal
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from dphybrid.config.settings import load_settings, notes_on_settings
from dphybrid.recipes.configs import explain_unknown
from dphybrid.recipes.registry import DEFAULT, recipe_names
from dphybrid.util.errors import UserError, suggestion
from dphybrid.util.files import disk_text
from dphybrid.util.importing import missing_extra
from dphybrid.util.terminal import guarded_output, tell
from dphybrid.util.text import masked, printable

_MANY_FLAGS = 30
"""With more flags than this the usage line does not list them: it would take forty lines."""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one message that suggests what was meant.

    recipe: its config fields are the flags. commands: name -> parser of a subcommand, or None.
    """

    recipe: str = DEFAULT
    commands: "dict[str, Parser] | None" = None

    def __init__(self, **options: Any) -> None:
        # No abbreviated flags: the next new field could make one ambiguous, or change what it means.
        super().__init__(allow_abbrev=False, **options)

    @property
    def actions(self) -> list[argparse.Action]:
        """All flags and positional arguments of this command."""
        return list(self._actions)

    def parse_args(self, args: Any = None, namespace: object = None) -> Any:
        # argparse reports a subcommand's unknown flags on the main parser, which cannot suggest similar ones:
        # it does not have the subcommand's flags.
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            (self.commands or {}).get(vars(found).get("command", ""), self).refuse(unknown)
        return found

    def format_help(self) -> str:
        if self.usage is None and len(self._option_string_actions) > _MANY_FLAGS:
            places = "".join(f" [{one.metavar or one.dest}]" for one in self._get_positional_actions())
            self.usage = f"%(prog)s [--NAME VALUE ...]{places}"
        return super().format_help()

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """Exit with an error about arguments that this command does not have."""
        flags, known = [text for text in unknown if text.startswith("-")], list(self._option_string_actions)
        if not flags:  # a value without its flag: guess the flag
            name = "--data.path" if "--data.path" in known else "--name"
            name = "--recipe" if "--recipe" in known and unknown[0] in recipe_names() else name
            self.error(f"unexpected {' '.join(unknown)!r}; write {name} {unknown[0]}")
        flag = flags[0].partition("=")[0]
        if "--config" in known:  # most of its flags are fields
            self.error(f"{flag}: {explain_unknown(flag, self.recipe, known)}")
        self.error(f"{flag}: there is no such flag{suggestion(flag, known)}")

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
        # argparse names a wrong value's type as Python does.
        for kind, noun in {"int": "an integer", "float": "a number"}.items():
            message = message.replace(f"invalid {kind} value:", f"give {noun}, not")
        # No usage, unlike argparse: it lists all flags, and the error would scroll off the screen.
        self.exit(2, f"error: {printable(message)}\nSee `{self.prog} --help`.\n")


def field_of(flag: str) -> str:
    """Return the field that a flag sets: `--train.batch-size` sets `train.batch_size`."""
    return flag.lstrip("-").replace("-", "_")


def at_least_one(text: str) -> int:
    """Return the text as an integer. Raises ArgumentTypeError unless it is at least 1."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give an integer, 1 or more")
    return int(text)


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

    A UserError is printed as one message: code 2. An interruption is 128 + the number of its signal: 130 for
    Ctrl-C.
    """
    # Python searches all imported modules for garbage at its end, for two seconds, unless they are frozen.
    atexit.register(gc.freeze)
    # `dphybrid.flows` sets SIG_DFL so that Ctrl-C ends its imports without a traceback.
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with guarded_output():
            try:
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
