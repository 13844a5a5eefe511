"""The one error meant for people: programs turn it into a message and exit code 2; and what helps people to
the right word and number."""

import difflib
from collections.abc import Sequence

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
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}"


def counted(number: int, one: str, more: str = "") -> str:
    """Return `1 row`, `2,000 rows`. more: the words for several, if not those for one and an s."""
    return f"{number:,} {one if number == 1 else more or one + 's'}"
