"""Texts from files and people, made safe for where they are shown."""

import json
import re
import shlex
from collections.abc import Mapping

_MARKDOWN = re.compile(r"([\\`*_{}\[\]()#+!|<>~$&])")


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


def toml_text(text: str) -> str:
    """Return a TOML basic string; JSON's escapes are among TOML's, but for the delete character."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
