"""`UserError`, which commands print without a traceback before they exit with code 2, and helpers for its
text."""

import difflib
import re
from collections.abc import Mapping, Sequence
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
