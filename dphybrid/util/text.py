"""Escape text for terminals, Markdown, shells and TOML, and mask user names and passwords in addresses."""

import json
import re
import shlex
from collections.abc import Mapping
from urllib.parse import unquote

_MARKDOWN = re.compile(r"([\\`*_{}\[\]()#+!|<>~$&])")

# What stands between :// and an @ before the path is user and password. People write passwords with slashes,
# too; only in http addresses is what looks like a port one, as paths there may hold an @ of their own.
_OF_HTTP = re.compile(r"(?i)\b(https?://)(?:[^\s/:<>]*:(?!\d+(?:/|$))[^\s<>]*|[^\s/<>]*)@")
_OF_OTHERS = re.compile(r"(?i)\b((?!https?:)[a-z][\w+.-]*://)(?!/)[^\s<>]*@")
_VALUE = re.compile(
    r"(?i)([?&;][\w.-]*(?:password|passwd|pwd|secret|token|api_?key|access_?key|signature|auth)[\w.-]*=)[^&\s;<>]+"
)


def printable(text: str) -> str:
    """Return a text for a terminal: lines stay lines, and what would move its cursor or change its colours is
    shown as a question mark."""
    return "".join(character if character.isprintable() or character == "\n" else "?" for character in text)


def as_markdown(text: str) -> str:
    """Return a text that Markdown shows as it is, on one line, in a cell of a table, too."""
    return _MARKDOWN.sub(r"\\\1", " ".join(printable(text).split()))


def as_flags(values: Mapping[str, object]) -> str:
    """Return values by their full names as flags for a shell; the items of a list are separated by commas."""
    texts = {
        name.replace("_", "-"): ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
        for name, value in values.items()
    }
    return " ".join(f"--{name} {shlex.quote(text)}" for name, text in texts.items())


def toml_text(value: object) -> str:
    """Return a text, number, truth value or list as TOML has it: as JSON, but for the delete character."""
    # JSON's texts, numbers and lists are TOML's, too.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def masked(text: str) -> str:
    """Return a text with the user names, passwords and tokens of the addresses in it replaced by `***`."""
    for pattern in (_OF_HTTP, _OF_OTHERS):
        text = pattern.sub(r"\1***@", text)
    return _VALUE.sub(r"\1***", text)


def without_credentials(url: str) -> tuple[str, str | None]:
    """Return an http address without its user and password, and these as `user:password`, or None."""
    found = _OF_HTTP.match(url)
    if found is None:
        return url, None
    return found[1] + url[found.end() :], unquote(url[len(found[1]) : found.end() - 1])
