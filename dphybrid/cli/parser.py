"""Commands as pydantic classes, whose fields are their flags, and how a command reports mistakes and
interruptions."""

import atexit
import errno
import gc
import io
import os
import signal
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from tempfile import gettempdir
from types import ModuleType, UnionType
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from dphybrid.config import leaves, nest
from dphybrid.config.settings import load_settings
from dphybrid.util.errors import UserError, plain_words, suggestion
from dphybrid.util.files import clear_scratch, disk_text
from dphybrid.util.importing import missing_extra
from dphybrid.util.text import flag_text, masked, printable

T = TypeVar("T")
Positional = Annotated[T, "positional"]
"""Type of a field that is given by its position. A list takes all remaining words."""
Fields = Mapping[str, FieldInfo]
_PLACEHOLDERS = {int: "N", float: "X", bool: "true|false", Path: "FILE", tuple: "A,B", dict: "JSON"}


class Command(BaseModel):
    """The flags of a command: each field is one (`at_once` is `--at-once`), its docstring is the flag's help.
    A field of a section is `--section.field`.

    A command of `dphybrid` also has `run`, which does the work and returns the exit code. It makes the slow
    imports, too, which `--help` and wrong flags must not wait for.
    """

    # defer_build: only the class of the command that runs needs a validator.
    model_config = ConfigDict(use_attribute_docstrings=True, defer_build=True, populate_by_name=True)
    shown_as: ClassVar[Mapping[str, str]] = {}
    """Field -> placeholder of its value in the help."""
    alone: ClassVar[Mapping[str, str]] = {}
    """Field whose flag may stand without a value -> the value that it then has."""

    @classmethod
    def parse(cls, words: Sequence[str]) -> Self:
        """Return the command that the words after its name give. Raises UserError."""
        fields, waiting = dict(leaves(cls)), [*words]
        texts, loose = dict[str, list[str]](), list[str]()
        while waiting:
            word = waiting.pop(0)
            # A single dash begins a negative number, or a mistake.
            if (not word.startswith("--") and not word[1:2].isalpha()) or word[:1] != "-":
                loose.append(word)
                continue
            flag, equals, text = word.partition("=")
            name = flag.removeprefix("--").replace("-", "_")
            if name not in fields:
                cls.check_other(flag, words)
            following = waiting[0] if waiting else "--"
            if equals:
                pass
            elif name in fields and bool in kinds_of(fields[name]):
                text = "true"
            elif name in cls.alone and following.startswith("-"):
                text = cls.alone[name]
            elif following.startswith("--"):
                raise UserError(f"{flag}: needs a value, as in {flag} VALUE")
            else:
                text = waiting.pop(0)
            texts.setdefault(name, []).append(text)
        values: dict[str, object] = {}
        for name, given in texts.items():
            is_list = name in fields and list in kinds_of(fields[name])
            values[name] = given if is_list else cls.one_text(name, given, words)
        for name in [name for name, field in fields.items() if _is_positional(field)] if loose else ():
            takes_all = list in kinds_of(fields[name])
            values[name], loose = (loose, []) if takes_all else (loose[0], loose[1:])
            if not loose:
                break
        if loose:
            raise UserError(cls.unexpected(loose, words))
        return cls._checked(values, fields)

    @classmethod
    def _checked(cls, values: dict[str, object], fields: Fields) -> Self:
        try:
            return cls.model_validate(nest(values))
        except ValidationError as error:
            lines, lacking = list[str](), list[str]()
            for item in error.errors():
                name = ".".join(str(part) for part in item["loc"] if not isinstance(part, int))
                name = next((own for own, field in fields.items() if name in (own, field.alias)), name)
                shown = name.upper() if name not in fields else _shown_name(name, fields[name])
                if item["type"] == "missing":
                    within = [_shown_name(own, fields[own]) for own in fields if own.startswith(f"{name}.")]
                    lacking += within or [shown]
                else:
                    lines.append(f"{shown} {item['input']!r}: {plain_words(item)}")
            lines += [f"required: {', '.join(lacking)}"] if lacking else []
            raise UserError("\n".join(lines)) from error

    @classmethod
    def one_text(cls, name: str, texts: Sequence[str], words: Sequence[str]) -> str:
        """Return the value of a flag that was given by these texts: the last one."""
        return texts[-1]

    @classmethod
    def check_other(cls, flag: str, words: Sequence[str]) -> None:
        """Raise UserError for a flag that is no field of the command, unless it can be used all the same."""
        known = [_shown_name(name, field) for name, field in leaves(cls) if not _is_positional(field)]
        raise UserError(f"{flag}: there is no such flag{suggestion(flag, known)}")

    @classmethod
    def unexpected(cls, loose: Sequence[str], words: Sequence[str]) -> str:
        """Return the message for words that are neither flags nor values. words: all of the command."""
        return f"unexpected {' '.join(loose)!r}"

    @classmethod
    def help_page(cls, program: str, doc: str, words: Sequence[str]) -> str:
        """Return the help page. doc: the summary and, below it, what is printed after the flags."""
        return cls.page_of_flags(program, doc, {"options": dict(leaves(cls))})

    @classmethod
    def page_of_flags(cls, program: str, doc: str, groups: Mapping[str, Fields], intro: str = "") -> str:
        """Return a help page that lists groups of fields. intro: text before them."""
        summary, _, page = doc.strip().partition("\n\n")
        parts = [f"usage: {program} ...", " ".join(summary.split()), intro]
        for group, fields in groups.items():
            rows = [_help_row(name, field, cls) for name, field in fields.items()]
            parts.append("\n".join([f"{group}:", *rows]) if rows else "")
        return "\n\n".join(filter(None, [*parts, page.replace("%(prog)s", program).replace("%%", "%")]))


def kinds_of(field: FieldInfo) -> set[Any]:
    """Return the types that a field may have, without their parameters."""
    kind = field.annotation
    forms = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    return {get_origin(form) or form for form in forms}


def as_flag(name: str) -> str:
    """Return the flag of a field: `--train.batch-size`."""
    return f"--{name.replace('_', '-')}"


def _is_positional(field: FieldInfo) -> bool:
    return "positional" in field.metadata


def _shown_name(name: str, field: FieldInfo) -> str:
    return field.alias or name.upper() if _is_positional(field) else as_flag(name)


def _help_row(name: str, field: FieldInfo, cls: type[Command]) -> str:
    """Return the lines of a field in the help: flag, placeholder, sentence, default."""
    choices = [f for f in (field.annotation, *get_args(field.annotation)) if get_origin(f) is Literal]
    words = "|".join(map(str, get_args(choices[0]))) if choices else "TEXT"
    value = next((_PLACEHOLDERS[kind] for kind in kinds_of(field) & {*_PLACEHOLDERS}), words)
    value = cls.shown_as.get(name, value)
    head = f"  {_shown_name(name, field)}"
    is_switch = name in cls.model_fields and bool in kinds_of(field)
    if not _is_positional(field) and not is_switch:
        head += f" [{value}]" if name in cls.alone else f" {value}"
    is_plain = field.is_required() or field.get_default() in (None, False, (), [], "")
    text = f"{field.description}" + ("" if is_plain else f" (default: {flag_text(field.get_default())})")
    body = textwrap.fill(" ".join(text.split()), 100, initial_indent=" " * 28, subsequent_indent=" " * 28)
    return f"{head:<27} {body.lstrip()}" if len(head) < 28 else f"{head}\n{body}"


def parsed(command: type[Command], program: str, doc: str, words: Sequence[str]) -> Any:
    """Return the command that the words after a program's name give. Raises UserError, and SystemExit after a
    help page."""
    if {"-h", "--help"} & {*words}:
        print(command.help_page(program, doc, words))
        raise SystemExit(0)
    try:
        return command.parse(words)
    except UserError as error:
        raise UserError(f"{error}\nSee `{program} --help`.") from error


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
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # for letters that the locale does not have
    try:
        clear_scratch(Path(gettempdir()))
        _check_working_folder()
        code = function() or 0
        sys.stdout.flush()
        return code
    except ModuleNotFoundError as error:
        _tell(f"error: {missing_extra(error)}")
        return 2
    except UserError as error:
        _tell(f"error: {error}")
        return 2
    except KeyboardInterrupt as interruption:
        _tell(f"\n{interruption}" if str(interruption) else "\ninterrupted")
        if vars(interruption).get("requeue"):
            if run := vars(interruption).get("run"):
                _tell(f"Continue with `dphybrid train --resume {run}`")
            return os.EX_TEMPFAIL
        # Only `Interrupted` carries a signal's number; shells report 128 + that number, and Ctrl-C is 2.
        return 128 + (vars(interruption).get("signal_number") or 2)
    except BrokenPipeError:
        # The reader of a pipe has ended, as in `dphybrid ... | head`; 141 is 128 + SIGPIPE. Python would
        # write what is left once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
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
        _tell(masked(f"error: {text}"))
        return 2


def _tell(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)


def _check_working_folder() -> None:
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise UserError("the working folder was removed; change to one that exists (cd)") from error
