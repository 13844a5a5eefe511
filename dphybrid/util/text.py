"""Texts from files and people, made safe for where they are shown."""

import json
import re

_MARKDOWN = re.compile(r"([\\`*_{}\[\]()#+!|<>~$&])")


def printable(text: str) -> str:
    """Return a text for a terminal: lines stay lines, and what would move its cursor or change its colours is
    shown as a question mark."""
    return "".join(character if character.isprintable() or character == "\n" else "?" for character in text)


def as_markdown(text: str) -> str:
    """Return a text that Markdown shows as it is, on one line, in a cell of a table, too."""
    return _MARKDOWN.sub(r"\\\1", " ".join(printable(text).split()))


def toml_text(text: str) -> str:
    """Return a TOML basic string; JSON's escapes are among TOML's, but for the delete character."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
