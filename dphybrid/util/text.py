"""Escape text for terminals, Markdown, shells and TOML, and mask user names and passwords in addresses."""

import json
import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from urllib.parse import unquote

# C0 and C1 but tab and line feed; delete; line separators; what sets the direction of letters; lone
# surrogates.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_MARKDOWN = re.compile(r"([\\`*_{}\[\]()#+!|<>~$&])")

# User and password are between :// and @. Passwords may contain slashes. In an http address, however, the
# path may contain an @, so digits that look like a port (host:8080/...) are not taken for a password.
_OF_HTTP = re.compile(r"(?i)\b(https?://)(?:[^\s/:<>]*:(?!\d+(?:/|$))[^\s<>]*|[^\s/<>]*)@")
_OF_OTHERS = re.compile(r"(?i)\b((?!https?:)[a-z][\w+.-]*://)(?!/)[^\s<>]*@")
# Secrets in the query of an address: ?token=..., &api_key=...
_VALUE = re.compile(
    r"(?i)([?&;][\w.-]*(?:password|passwd|pwd|secret|token|api_?key|access_?key|signature|auth)[\w.-]*=)[^&\s;<>]+"
)


def printable(text: str) -> str:
    """Return a text that is safe to print: line breaks and tabs stay; other control characters, which could
    move the cursor, change colours or reverse the order of letters, are escaped (`\\x1b`)."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


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
    read as other items."""
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


def toml_text(value: object) -> str:
    """Return a text, number, bool or list as TOML."""
    if isinstance(value, float):
        return repr(value)  # inf and nan, which JSON writes as Infinity and NaN
    # JSON writes these as TOML does, except that TOML does not allow a raw delete character.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def masked(text: str) -> str:
    """Replace user names, passwords and tokens in the addresses of a text by `***`."""
    for pattern in (_OF_HTTP, _OF_OTHERS):
        text = pattern.sub(r"\1***@", text)
    return _VALUE.sub(r"\1***", text)


def without_credentials(url: str) -> tuple[str, str | None]:
    """Split an http address into the address without credentials, and the decoded `user:password` or None."""
    found = _OF_HTTP.match(url)
    if found is None:
        return url, None
    return found[1] + url[found.end() :], unquote(url[len(found[1]) : found.end() - 1])
