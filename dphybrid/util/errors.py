"""`UserError`, which programs print without a traceback and exit with code 2, and helpers for its words."""

import difflib
import re
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dphybrid.util.text import masked


class UserError(ValueError):
    """Wrong input, told so that it can be mended: the value, where it was found, and the remedy.

    Raised before work starts, or after what was begun has been put away. Its text shows no passwords of
    addresses.
    """

    def __str__(self) -> str:
        return masked(super().__str__())


def suggestion(word: str, known: Sequence[str]) -> str:
    """Return `; did you mean 'x'?` for the nearest known word, else `; known: ...`."""
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known) or 'none'}"


def failure_text(error: Exception) -> str:
    """Return what an error of somebody's own code says, with the line of theirs that it comes from."""
    # The last frame is often torch's or ours; people look for the last line of their own.
    frames, package = traceback.extract_tb(error.__traceback__), str(Path(__file__).parent.parent)
    own = [f for f in frames if not f.filename.startswith(package) and "site-packages" not in f.filename]
    place = (own or frames)[-1]
    return f"{type(error).__name__}: {error} ({Path(place.filename).name}, line {place.lineno})"


def plain_words(item: Mapping[str, Any]) -> str:
    """Return what one of pydantic's errors says, without Python's names of types."""
    # "Input should be greater than 0", but the name of the field stands before it here.
    text = re.sub(r"^\w+ should ", "must ", item["msg"].removeprefix("Value error, "))
    text = re.sub(r"(be a valid \w+)(,| or) .*", r"\1", text)
    return text.replace("a valid boolean", "true or false").replace("Field required", "is missing")


def type_text(value: object) -> str:
    """Return `an int`, `a list`: the type of a value with its article."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}"


def counted(number: int, one: str, more: str = "") -> str:
    """Return `1 row`, `2,000 rows`. more: the words for several, if not those for one and an s."""
    return f"{number:,} {one if number == 1 else more or one + 's'}"
