"""Secrets of addresses, masked wherever an address is shown: on the terminal, in errors, logs, pages and
records."""

import re
from urllib.parse import unquote

# What stands between :// and an @ before the path is user and password. People write passwords with slashes,
# too; only in http addresses is what looks like a port one, as paths there may hold an @ of their own.
_OF_HTTP = re.compile(r"(?i)\b(https?://)(?:[^\s/:<>]*:(?!\d+(?:/|$))[^\s<>]*|[^\s/<>]*)@")
_OF_OTHERS = re.compile(r"(?i)\b((?!https?:)[a-z][\w+.-]*://)(?!/)[^\s<>]*@")
_VALUE = re.compile(
    r"(?i)([?&;][\w.-]*(?:password|passwd|pwd|secret|token|api_?key|access_?key|signature|auth)[\w.-]*=)[^&\s;<>]+"
)


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
