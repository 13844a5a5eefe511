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

from dphybrid.config import described, leaves, nest
from dphybrid.config.settings import load_settings
from dphybrid.util.errors import UserError, plain_words, suggestion
from dphybrid.util.files import clear_leftovers, disk_text
from dphybrid.util.importing import missing_extra
from dphybrid.util.stop import drop_output
from dphybrid.util.text import flag_text, masked, printable

T = TypeVar("T")
Positional = Annotated[T, "positional"]
"""Type of a field that is given by its position. A list takes all remaining words."""
Given = Mapping[str, list[str | None]]
"""Field -> the texts that its flags were given; None where a value is missing."""
_HELP = ("help", "-h")
_PLACEHOLDERS = {int: "N", float: "X", bool: "true|false", Path: "FILE", tuple: "A,B", dict: "JSON"}


class Command(BaseModel):
    """The flags of a command: each field is one (`at_once` is `--at-once`), its docstring is the flag's help.
    A field of a section is `--section.field`.

    A command of `dphybrid` also has `run`, which does the work and returns the exit code. It makes the slow
    imports, too, which `--help` and wrong flags must not wait for.
    """

    # defer_build: only the class of the command that runs needs a validator.
    model_config = ConfigDict(defer_build=True, populate_by_name=True)
    shown_as: ClassVar[Mapping[str, str]] = {}
    """Field -> placeholder of its value in the help."""
    alone: ClassVar[Mapping[str, str]] = {}
    """Field whose flag may stand without a value -> the value that it then has."""
    first: ClassVar[Sequence[str]] = ()
    """The fields that people set most, which the help lists first."""

    @classmethod
    def fields(cls, given: Given) -> Mapping[str, FieldInfo]:
        """Return all fields by their dotted names. given: may choose further ones."""
        return dict(leaves(cls))

    @classmethod
    def unknown(cls, name: str, given: Given) -> str:
        """Return why there is no field of this name."""
        fields = cls.fields(given).items()
        known = [_shown_name(other, field) for other, field in fields if not _is_positional(field)]
        return f"there is no such flag{suggestion(as_flag(name), known)}"

    @classmethod
    def unexpected(cls, word: str, after: str, given: Given) -> str:
        """Return the message for a word that is neither flag nor value. after: the field of the flag before
        it, or ""."""
        return f"unexpected {word!r}"

    @classmethod
    def intro(cls, given: Given) -> str:
        """Return what the help says before the flags."""
        return ""

    @classmethod
    def parse(cls, program: str, doc: str, words: Sequence[str]) -> Self:
        """Return the command that the words after a program's name give.

        Raises UserError, and SystemExit after a help page. doc: the page's summary and, below it, what is
        printed after the flags.
        """
        given, loose = cls._split(words)
        if asks_help(given):
            print(cls._help_page(program, doc, given))
            raise SystemExit(0)
        try:
            return cls._checked(given, loose)
        except UserError as error:
            raise UserError(f"{error}\nSee `{program} --help`.") from error

    @classmethod
    def _split(cls, words: Sequence[str]) -> tuple[Given, list[tuple[str, str]]]:
        """Return what each flag was given, and all other words, each with the field of the flag before it."""
        own, waiting, name = dict(leaves(cls)), [*words], ""
        given, loose = dict[str, list[str | None]](), list[tuple[str, str]]()
        while waiting:
            word = waiting.pop(0)
            # A single dash begins a negative number, or a mistake.
            if not word.startswith("--") and not (word.startswith("-") and word[1:2].isalpha()):
                loose.append((name, word))
                continue
            flag, equals, text = word.partition("=")
            name = flag.removeprefix("--").replace("-", "_") if flag.startswith("--") else flag
            following = waiting[0] if waiting else "--"
            value: str | None = text
            if equals:
                pass
            elif name in _HELP or (name in own and bool in kinds_of(own[name])):
                value = "true"
            elif name in cls.alone and following.startswith("-"):
                value = cls.alone[name]
            else:
                value = None if following.startswith("--") else waiting.pop(0)
            given.setdefault(name, []).append(value)
        return given, loose

    @classmethod
    def _checked(cls, given: Given, loose: list[tuple[str, str]]) -> Self:
        fields, own, values = cls.fields(given), dict(leaves(cls)), dict[str, object]()
        for name, texts in given.items():
            if name not in fields:
                raise UserError(f"{as_flag(name)}: {cls.unknown(name, given)}")
            if None in texts:
                raise UserError(f"{as_flag(name)}: needs a value, as in {as_flag(name)} VALUE")
            kinds, is_own = kinds_of(fields[name]), name in own
            # A list of the config may be given in several flags.
            joined = not is_own and len(texts) > 1 and not kinds.isdisjoint((list, tuple))
            last = ",".join(filter(None, texts)) if joined else texts[-1]
            values[name] = texts if is_own and list in kinds else last
        for name in [name for name, field in fields.items() if _is_positional(field)]:
            number = len(loose) if list in kinds_of(fields[name]) else 1
            taken, loose = [word for _, word in loose[:number]], loose[number:]
            if taken:
                values[name] = taken if list in kinds_of(fields[name]) else taken[0]
        if loose:
            after, word = loose[0]
            raise UserError(cls.unexpected(word, after, given))
        try:
            return cls.model_validate(nest(values))
        except ValidationError as error:
            raise UserError(_mistakes(error, fields)) from error

    @classmethod
    def _help_page(cls, program: str, doc: str, given: Given) -> str:
        described(cls)
        fields, own = cls.fields(given), dict(leaves(cls))
        groups = {"most used": [name for name in cls.first if name in fields], "options": []}
        for name in fields:
            if name not in cls.first:
                section = "" if name in own else name.rpartition(".")[0]
                groups.setdefault(section or "options", []).append(name)
        summary, _, page = doc.strip().partition("\n\n")
        parts = [f"usage: {program} ...", " ".join(summary.split()), cls.intro(given)]
        for group, names in groups.items():
            rows = [_help_row(name, fields[name], cls) for name in names]
            parts.append("\n".join([f"{group}:", *rows]) if rows else "")
        return "\n\n".join(filter(None, [*parts, page.replace("%(prog)s", program).replace("%%", "%")]))


def asks_help(given: Given) -> bool:
    """Return whether a command line asks for the help page."""
    return not given.keys().isdisjoint(_HELP)


def _mistakes(error: ValidationError, fields: Mapping[str, FieldInfo]) -> str:
    """Return a line for each wrong value, and one for all that is lacking."""
    lines, lacking = list[str](), list[str]()
    for item in error.errors():
        name = ".".join(str(part) for part in item["loc"] if not isinstance(part, int))
        name = next((own for own, field in fields.items() if name in (own, field.alias)), name)
        shown = _shown_name(name, fields[name]) if name in fields else name.upper()
        if item["type"] == "missing":
            within = [_shown_name(own, fields[own]) for own in fields if own.startswith(f"{name}.")]
            lacking += within or [shown]
        else:
            lines.append(f"{shown} {item['input']!r}: {plain_words(item)}")
    return "\n".join([*lines, *([f"required: {', '.join(lacking)}"] if lacking else [])])


def kinds_of(field: FieldInfo) -> set[Any]:
    """Return the types that a field may have, without their parameters."""
    kind = field.annotation
    forms = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    return {get_origin(form) or form for form in forms}


def as_flag(name: str) -> str:
    """Return the flag of a field: `--train.batch-size`; of a single dash, as it was written."""
    return name if name.startswith("-") else f"--{name.replace('_', '-')}"


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
        clear_leftovers(Path(gettempdir()), alone=False)
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
        drop_output(sys.stdout.fileno())  # the reader of a pipe has ended, as in `dphybrid ... | head`
        return 128 + signal.SIGPIPE
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
