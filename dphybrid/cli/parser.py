"""Commands as pydantic classes, whose fields are their flags, and how a command reports mistakes and
interruptions."""

import ast
import atexit
import errno
import gc
import inspect
import io
import os
import signal
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import ModuleType, UnionType
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from dphybrid.config import leaves, nest
from dphybrid.util.errors import UserError, plain_words, suggestion
from dphybrid.util.files import disk_text
from dphybrid.util.importing import missing_extra
from dphybrid.util.stop import drop_output
from dphybrid.util.text import flag_text, masked, printable

T = TypeVar("T")
Positional = Annotated[T, "positional"]
"""Type of a field that is given by its position. A list takes all remaining words."""
Given = Mapping[str, Sequence[str]]
"""Field -> the texts that its flags were given."""
Fields = Mapping[str, FieldInfo]
"""Fields by their dotted names."""
_PLACEHOLDERS = {int: "N", float: "X", bool: "true|false", Path: "FILE", tuple: "A,B", dict: "JSON"}


class Command(BaseModel):
    """The flags of a command: each field is one (`at_once` is `--at-once`), its docstring is the flag's help.
    A field of a section is `--section.field`.

    A command of `dphybrid` also has `run`, which does the work and returns the exit code. It makes the slow
    imports, too, which `--help` and wrong flags must not wait for.
    """

    # defer_build: only the class of the command that runs needs a validator.
    model_config = ConfigDict(defer_build=True, populate_by_name=True)
    alone: ClassVar[Mapping[str, str]] = {}
    """Field whose flag may stand without a value -> the value that it then has."""

    @classmethod
    def help_of(cls, given: Given) -> tuple[str, list[type[BaseModel]]]:
        """Return what the help says before the flags, and the classes whose fields it shows."""
        return "", [cls]

    @classmethod
    def check_name(cls, name: str, given: Given) -> None:
        """Raise UserError if a flag can be no field."""
        own = dict(leaves(cls))
        if name not in own:
            shown = [as_flag(other) for other, field in own.items() if not _is_positional(field)]
            raise UserError(f"{as_flag(name)}: there is no such flag{suggestion(as_flag(name), shown)}")

    @classmethod
    def parse(cls, program: str, doc: str, words: Sequence[str]) -> Self:
        """Return the command that the words after a program's name give.

        Raises UserError, and SystemExit after a help page. doc: the page's summary and, below it, what is
        printed after the flags.
        """
        own = dict(leaves(cls))
        try:
            given, loose = cls._split(words, own)
            if "help" in given:
                print(cls._help_page(program, doc, given, own))
                raise SystemExit(0)
            values = dict[str, object]()
            for name, texts in given.items():
                cls.check_name(name, given)
                is_list = name in own and list in _kinds(own[name])
                if len(texts) > 1 and not is_list:
                    raise UserError(f"{as_flag(name)}: is given {len(texts)} times; give it once")
                values[name] = texts if is_list else texts[0]
            for name, field in own.items():
                if loose and _is_positional(field):
                    is_list = list in _kinds(field)
                    values[name], loose = (loose, []) if is_list else (loose[0], loose[1:])
            if loose:
                raise UserError(f"unexpected {loose[0]!r}; write its flag before it, or a list as a,b")
            return cls.model_validate(nest(values))
        except (ValidationError, UserError) as error:
            wrong = _mistakes(error, own) if isinstance(error, ValidationError) else error
            raise UserError(f"{wrong}\nSee `{program} --help`.") from error

    @classmethod
    def _split(cls, words: Sequence[str], own: Fields) -> tuple[Given, list[str]]:
        """Return what each flag was given, and all other words."""
        waiting, given, loose = [*words], dict[str, list[str]](), list[str]()
        while waiting:
            word = waiting.pop(0)
            if not word.startswith("-"):
                loose.append(word)
                continue
            flag, equals, text = word.partition("=")
            name = "help" if flag == "-h" else flag.lstrip("-").replace("-", "_")
            following = waiting[0] if waiting else "--"
            if not equals and (name == "help" or (name in own and bool in _kinds(own[name]))):
                text = "true"
            elif not equals and name in cls.alone and following.startswith("-"):
                text = cls.alone[name]
            elif not equals and following.startswith("--"):
                cls.check_name(name, given)
                raise UserError(f"{flag}: needs a value, as in {flag} VALUE")
            elif not equals:
                text = waiting.pop(0)
            given.setdefault(name, []).append(text)
        return given, loose

    @classmethod
    def _help_page(cls, program: str, doc: str, given: Given, own: Fields) -> str:
        groups: dict[str, list[str]] = {}
        intro, models = cls.help_of(given)
        for model in models:
            for name, field in leaves(model):
                if model is cls or name not in own:
                    section = "" if name in own else name.rpartition(".")[0]
                    row = _help_row(name, field, sentence(model, name), cls)
                    groups.setdefault(section or "options", []).append(row)
        summary, _, page = doc.strip().partition("\n\n")
        parts = [f"usage: {program} ...", " ".join(summary.split()), intro]
        parts += ["\n".join([f"{group}:", *rows]) for group, rows in groups.items()]
        return "\n\n".join(filter(None, [*parts, page.replace("%(prog)s", program).replace("%%", "%")]))


def _mistakes(error: ValidationError, fields: Fields) -> str:
    """Return a line for each wrong or missing value."""
    lines = list[str]()
    for item in error.errors():
        place = ".".join(str(part) for part in item["loc"] if not isinstance(part, int))
        names = [n for n, field in fields.items() if place in (n, field.alias) or n.startswith(f"{place}.")]
        shown = ", ".join(_shown_name(name, fields[name]) for name in names)
        value = "" if item["type"] == "missing" else f" {item['input']!r}"
        lines.append(f"{shown}{value}: {plain_words(item)}")
    return "\n".join(lines)


def _kinds(field: FieldInfo) -> set[Any]:
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


def sentence(model: type[BaseModel], name: str) -> str:
    """Return the description of a field, by its dotted name: what it declares, or the docstring below it."""
    first, dot, rest = name.partition(".")
    field: Any = model.model_fields[first]
    if dot:
        return sentence(field.annotation, rest)
    declared = (_docstrings(base.__module__).get((base.__name__, first)) for base in model.__mro__)
    return field.description or next(filter(None, declared), "")


# Not by pydantic (use_attribute_docstrings), which reads the source of each class in each process.
@cache
def _docstrings(module: str) -> dict[tuple[str, str], str]:
    """Return the docstrings of the fields of a module's classes, by class and field."""
    found = dict[tuple[str, str], str]()
    with suppress(OSError, TypeError, KeyError):  # no source: a class of a notebook, say
        tree = ast.parse(inspect.getsource(sys.modules[module]))
        for node in (node for node in tree.body if isinstance(node, ast.ClassDef)):
            for pair in pairwise(node.body):
                match pair:
                    case ast.AnnAssign(target=ast.Name(id=field)), ast.Expr(ast.Constant(str(text))):
                        found[node.name, field] = inspect.cleandoc(text)
    return found


def _help_row(name: str, field: FieldInfo, text: str, cls: type[Command]) -> str:
    """Return the lines of a field in the help: flag, placeholder, sentence, default."""
    choices = [f for f in (field.annotation, *get_args(field.annotation)) if get_origin(f) is Literal]
    words = "|".join(map(str, get_args(choices[0]))) if choices else name.rpartition(".")[2].upper()
    value = next((_PLACEHOLDERS[kind] for kind in _kinds(field) & {*_PLACEHOLDERS}), words)
    head = f"  {_shown_name(name, field)}"
    is_switch = name in cls.model_fields and bool in _kinds(field)
    if not _is_positional(field) and not is_switch:
        head += f" [{value}]" if name in cls.alone else f" {value}"
    is_plain = field.is_required() or field.get_default() in (None, False, (), [], "")
    text += "" if is_plain else f" (default: {flag_text(field.get_default())})"
    body = textwrap.fill(" ".join(text.split()), 100, initial_indent=" " * 28, subsequent_indent=" " * 28)
    return f"{head:<27} {body.lstrip()}" if len(head) < 28 else f"{head}\n{body}"


def prefect_part(name: str) -> ModuleType:
    """Return the module `name` of `dphybrid.orchestration`. Imported by the commands that need Prefect when
    they run, so that the others work without it; where it is not installed, `run_cli` names its extra."""
    return import_module(f"dphybrid.orchestration.{name}")


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
        os.getcwd()
        code = function() or 0
        sys.stdout.flush()
        return code
    except ModuleNotFoundError as error:
        _tell(f"error: {missing_extra(error)}")
    except UserError as error:
        _tell(f"error: {error}")
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
        if isinstance(error, FileNotFoundError) and error.filename is None:  # os.getcwd's
            _tell("error: the working folder was removed; change to one that exists (cd)")
            return 2
        if error.filename is None:  # not the user's mistake; its traceback is needed
            raise
        folder = import_module("dphybrid.config.settings").load_settings().data_dir
        path, text = Path(str(error.filename)), disk_text(error)
        # Also a folder above the data folder: it may be the one that could not be made.
        own = path.is_relative_to(folder) or folder.is_relative_to(path)
        if own and error.errno in (errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR):
            text = f"{path}: {error.strerror}; DPHYBRID_DATA_DIR={folder} must be a folder that you can write"
        _tell(masked(f"error: {text}"))
    return 2


def _tell(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)
