"""Escape text for terminals, Markdown, shells and TOML, and mask user names and passwords in addresses."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from urllib.parse import unquote

# C0 and C1 but tab and line feed; delete; line separators; what sets the direction of letters; lone
# surrogates.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_MARKDOWN = re.compile(r"([\\`*_{}\[\]()#+!|<>~$&])")

# Begins where a word begins, so that a long word is read once, not from each of its letters.
_ADDRESS = re.compile(r"(?i)(?<![a-z0-9+.-])[a-z0-9+.-]++://[^\s\"'`<>]+")
_LOCATION = re.compile(r"[^?#]*(#/[\w/.-]*(\?workflowType=\w+)?)?")
"""Host, port and path of an address, and the fragment of a page of MLflow's."""

_NUMBER = re.compile(r"-?[\d,.]+|-")
"""A number as it is shown, or no value."""


def printable(text: str) -> str:
    """Return a text that is safe to print: line breaks and tabs stay; other control characters, which could
    move the cursor, change colours or reverse the order of letters, are escaped (`\\x1b`)."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def metric_text(value: float) -> str:
    """Return a metric as text: four decimals, or four digits of a number that is tiny or large."""
    return f"{value:.4f}" if value == 0 or 0.01 <= abs(value) < 1e4 else f"{value:.4g}"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table as lines. rows: the titles, then the cells; columns of numbers stand to the right."""
    columns = []
    for title, *cells in zip(*rows, strict=True):
        width = max(map(len, (title, *cells)))
        side = ">" if all(_NUMBER.fullmatch(cell) for cell in cells) else "<"
        columns.append([f"{cell:{side}{width}}" for cell in (title, *cells)])
    return ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]


def as_markdown(text: str) -> str:
    """Escape a text so that Markdown shows it literally, on one line; also valid in a table cell."""
    return _MARKDOWN.sub(r"\\\1", " ".join(printable(text).split()))


def as_flags(values: Mapping[str, object]) -> str:
    """Return values as command-line flags, quoted for a shell. values: by full name (`train.lr`)."""
    texts = {name.replace("_", "-"): flag_text(value) for name, value in values.items()}
    # With a sign of equality where the value would be taken for a flag.
    return " ".join(
        f"--{name}{'=' if text.startswith('-') else ' '}{shlex.quote(text)}" for name, text in texts.items()
    )


def flag_text(value: object) -> str:
    """Return a value as its flag takes it: None as an empty text, a list as `a,b`, or as JSON if it would be
    read as other items, a mapping as JSON."""
    if isinstance(value, Mapping):
        return json.dumps(value, ensure_ascii=False)
    if not isinstance(value, list | tuple):
        return "" if value is None else str(value)
    items = [str(item) for item in value]
    joined = ",".join(items)
    return joined if split_items(joined) == items else json.dumps(items, ensure_ascii=False)


def split_items(text: str) -> list[str]:
    """Return the items of a list that is separated by commas, or written as a JSON list of texts."""
    if text.startswith("["):
        with suppress(ValueError, RecursionError):  # not JSON, or brackets by the thousand
            items = json.loads(text)
            if all(isinstance(item, str) for item in items):
                return [*items]
    return [part.strip() for part in text.split(",") if part.strip()]


def masked(text: str) -> str:
    """Return a text whose addresses are shown as `shown_address` shows them. One ends at a blank, a quote or
    an angle bracket."""
    return _ADDRESS.sub(lambda found: shown_address(found[0]), text)


def shown_address(address: str) -> str:
    """Return scheme, host, port and path of an address, with `***` for user and password and for a query. The
    path of a file, which has no user, stays as it is."""
    scheme, sign, rest = address.partition("://")
    is_path = scheme.lower().split("+")[0] in ("sqlite", "file") and rest.startswith("/")
    if is_path or ("@" not in address and not sign):
        return address
    user, at, location = rest.rpartition("@")
    if not sign or "?" in user or "#" in user:  # a password, or a query with an @
        return f"{scheme}://***" if sign else "***"
    found = _LOCATION.match(location)
    shown = found[0] if found else ""
    return f"{scheme}://{'***@' if at else ''}{shown}{'***' if shown != location else ''}"


def without_secrets_of(address: str, text: str) -> str:
    """Return an error's text about an address without its user and password, which a driver may have taken
    apart."""
    user = address.partition("://")[2].rpartition("@")[0]
    text = text.replace(address, shown_address(address))
    for piece in (user, user.partition(":")[2], unquote(user.partition(":")[2])):
        text = text.replace(piece, "***") if len(piece) > 2 else text
    return masked(text)
