"""`UserError`, which commands print without a traceback before they exit with code 2, and helpers for its
text."""

import difflib
import re
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dphybrid.util.text import masked, printable

_SHOWN = 24
"""How many known words a message lists at most."""


class UserError(ValueError):
    """Wrong input. The message names the value, where it was found, and the remedy.

    Raised before work starts, or after partial work was cleaned up. Its text masks passwords in addresses
    and escapes control characters.
    """

    # A ValueError, so that pydantic's validators may raise it.

    def __str__(self) -> str:
        return printable(masked(super().__str__()))


def suggestion(word: str, known: Sequence[str]) -> str:
    """Return `; did you mean 'x'?` for the nearest known word, else `; known: ...` with the last ones."""
    if close := difflib.get_close_matches(word, known, n=1):
        return f"; did you mean {close[0]!r}?"
    more = f" and {len(known) - _SHOWN} more" if len(known) > _SHOWN else ""
    return f"; known: {', '.join(known[-_SHOWN:]) or 'none'}{more}"


def failure_text(error: Exception) -> str:
    """Return type and message of an error in user code, with the line of that code."""
    # The last frame is often in torch or in this package; users look for the last line of their own.
    frames, package = traceback.extract_tb(error.__traceback__), str(Path(__file__).parent.parent)
    own = [f for f in frames if not f.filename.startswith(package) and "site-packages" not in f.filename]
    frame = (own or frames)[-1]
    return f"{type(error).__name__}: {error} ({Path(frame.filename).name}, line {frame.lineno})"


def plain_words(item: Mapping[str, Any]) -> str:
    """Return the message of one of pydantic's errors, without Python's type names."""
    # "Input should be greater than 0" -> "must be greater than 0": callers put the field's name in front.
    text = re.sub(r"^\w+ should ", "must ", item["msg"].removeprefix("Value error, "))
    text = re.sub(r"(be a valid \w+)(,| or) .*", r"\1", text)
    return text.replace("a valid boolean", "true or false").replace("Field required", "is missing")


def type_text(value: object) -> str:
    """Return the type of a value with its article: `an int`, `a list`."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}"


def counted(number: int, one: str, more: str = "") -> str:
    """Return a number with its noun: `1 row`, `2,000 rows`. more: the plural, if it is not `one` + s."""
    return f"{number:,} {one if number == 1 else more or one + 's'}"
