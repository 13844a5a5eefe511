"""Escape text for terminals, Markdown, shells and TOML, and mask user names and passwords in addresses."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from urllib.parse import unquote, urlsplit, urlunsplit

# C0 and C1 but tab and line feed; delete; line separators; what sets the direction of letters; lone
# surrogates.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_MARKDOWN = re.compile(r"([\\`*_{}\[\]()#+!|<>~$&])")

# The characters of an address by RFC 3986, and those of them that may follow an address in a sentence.
_RUN = re.compile(r"[\w\-.~:/?#\[\]@!$&'()*+,;=%]*", re.ASCII)
_AFTER = "'\"`),.;:!?]}"
# With a single slash if an address was taken for a path, whose slashes `pathlib` joins.
_SCHEMES = (
    r"(?:[a-z][a-z0-9+.-]*://|(?:https?|ftps?|s3|postgres(?:ql)?|mysql|mariadb|mssql|oracle|mongodb|redis)"
    r"(?:\+[a-z0-9]+)?:/(?!/))"
)
_SCHEME = re.compile(f"(?i){_SCHEMES}")
_NEXT = re.compile(rf"(?i)(?<=[\s'\"(]){_SCHEMES}")
_HOST = re.compile(r"[\w.-]+|\[[0-9a-fA-F:.]+\]", re.ASCII)
_PAGE = re.compile(r"/(?:experiments|models|compare-\w+|metric|prompts)?(?:/[\w/.-]*)?", re.ASCII)
"""The fragments of MLflow's pages."""
_ALIAS = re.compile(r"models:/[^\s@]*@")
_SHOWN_VALUES = (
    "workflowType",
    "viewStateShareKey",
    "compareRunsMode",
    "sslmode",
    "charset",
    "connect_timeout",
)
"""Names in the query of an address whose values are shown: those of MLflow's pages and harmless options."""
# Secrets outside of an address: ...?token=..., and password=... as in PostgreSQL's connection strings.
_VALUE = re.compile(
    r"(?i)((?:[?&;][\w.-]*(?:password|passwd|pwd|secret|token|api_?key|access_?key|signature|auth)[\w.-]*"
    r"|\b(?:password|passwd|pwd|secret|api_?key|access_?token))=)(?!\*\*\*)[^&\s;]+"
)

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


def toml_text(value: object) -> str:
    """Return a text, number, bool or list as TOML."""
    if isinstance(value, float):
        return repr(value)  # inf and nan, which JSON writes as Infinity and NaN
    # JSON writes these as TOML does, except that TOML does not allow a raw delete character.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def masked(text: str) -> str:
    """Return a text whose addresses are shown as `shown_address` shows them, so without secrets.

    In a sentence an address ends at a blank. But everything between `://` and the last @ of the line counts
    as user and password, as passwords may contain any character."""
    if ":/" in text:
        text = "\n".join(map(_masked_line, text.split("\n")))
    return _VALUE.sub(r"\1***", text)


def shown_address(address: str) -> str:
    """Return an address with `***` for user, password, query and fragment, unless they are harmless, and
    for everything that urllib does not understand as host, port and path."""
    found = _SCHEME.match(address)
    if found is None:
        return address if "@" not in address else "***"
    scheme, rest = found[0], address[found.end() :]
    if _is_local(address):
        path, asks, query = rest.partition("?")
        return f"{scheme}{path}{asks}{_shown_query(query)}"
    userinfo, at, location = rest.rpartition("@")
    if "?" in userinfo or "#" in userinfo:  # of a password, or in front of a query whose value has an @
        return f"{scheme}***"
    return f"{scheme}{'***@' if at else ''}{_shown_location(location)}"


def _masked_line(line: str) -> str:
    shown, start = "", _SCHEME.search(line)
    while start is not None:
        # `scheme://` within a password begins no other address.
        following = _NEXT.search(line, start.end())
        stop = following.start() if following else len(line)
        address = line[start.start() : stop]
        end = _end_of_address(address, len(start[0]))
        shown += line[: start.start()] + shown_address(address[:end]) + address[end:]
        line = line[stop:]
        start = _SCHEME.match(line)
    return shown + line


def _end_of_address(text: str, begin: int) -> int:
    """Return where the address ends that begins the text; begin: the end of its `scheme://`."""
    if _is_local(text):
        return len(text)
    # The @ of models:/NAME@ALIAS belongs to another word.
    at = re.sub(_ALIAS, lambda found: "_" * len(found[0]), text).rfind("@")
    run = _RUN.match(text, max(begin, at + 1))
    end = run.end() if run else begin
    # A secret may go on behind a character that no address has: hide all of the word.
    if end < len(text) and (text[end] not in ' \t"`<>\\' or re.search("[?#]", text[begin:end])):
        return len(text[:end]) + len(re.split(r"\s", text[end:], maxsplit=1)[0])
    return max(begin, at + 1) + len(text[max(begin, at + 1) : end].rstrip(_AFTER))


def _is_local(address: str) -> bool:
    """Return whether an address is that of a file: its path has no user, and may contain any character."""
    scheme, _, rest = address.partition("://")
    return scheme.lower().split("+")[0] in ("sqlite", "file") and rest.startswith("/")


def _shown_location(location: str) -> str:
    """Return host, port, path and query of an address without secrets; `***` if they are not understood."""
    if not location:
        return ""
    try:
        parts = urlsplit(f"any://{location}")
        host, port = parts.netloc, parts.port
    except ValueError:
        return "***"
    host = host.removesuffix(f":{port}") if port is not None else host
    path, semicolon, _ = parts.path.partition(";")
    is_known = _HOST.fullmatch(host) or (not host and path.startswith("/"))
    if not is_known or _RUN.fullmatch(path) is None:
        return "***"
    shown = parts.netloc + path + (f"{semicolon}***" if semicolon else "")
    if "?" in location.partition("#")[0]:
        query = _shown_query(parts.query)
        if query == "***":  # what follows may be a part of the secret
            return f"{shown}?***"
        shown += f"?{query}"
    if not parts.fragment:
        return shown + ("#" if location.endswith("#") else "")
    fragment, asks, asked = parts.fragment.partition("?")
    if not _PAGE.fullmatch(fragment):
        return f"{shown}#***"
    return f"{shown}#{fragment}{asks}{_shown_query(asked)}"


def _shown_query(query: str) -> str:
    """Return a query; `***` if one of its values may be a secret."""
    for item in re.split("[&;]", query) if query else ():
        name, _, value = item.partition("=")
        if name not in _SHOWN_VALUES or not re.fullmatch(r"[\w.-]*", value, re.ASCII):
            return "***"
    return query


def without_secrets_of(address: str, text: str) -> str:
    """Return an error's text about an address without the secrets in it, which a driver may have read in
    another way and show in pieces."""
    text = masked(text.replace(address, shown_address(address)))
    rest = address.partition(":/")[2].lstrip("/")
    userinfo = rest.rpartition("@")[0]
    hidden = [userinfo, userinfo.partition(":")[2], *re.split(r"[:/@?#&=;\[\]\\]", userinfo)]
    # Parts of the query and the fragment, which may have been cut at any of these characters.
    asked = "".join(re.split("([?#])", rest, maxsplit=1)[1:])
    begins = [found.end() for found in re.finditer("[?#&;=]", asked)]
    ends = [found.start() for found in re.finditer("[?#&;]|$", asked)]
    hidden += [asked[begin:end] for begin in begins for end in ends if begin < end]
    forms = {form for piece in hidden for form in (piece, unquote(piece), repr(piece)[1:-1])}
    for form in sorted(forms, key=len, reverse=True):
        if len(form) > 2:  # a shorter one would also be found in words
            text = text.replace(form, "***")
    return text


def without_credentials(url: str) -> tuple[str, str | None]:
    """Split an http address into the address without credentials, and the decoded `user:password` or None."""
    try:
        parts = urlsplit(url)
    except ValueError:  # such as a bracket that is not closed
        return url, None
    userinfo, at, host = parts.netloc.rpartition("@")
    return (urlunsplit(parts._replace(netloc=host)), unquote(userinfo)) if at else (url, None)
