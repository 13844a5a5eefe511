"""An MkDocs hook that generates tables of config fields and settings from the classes that declare them.

A line `{fields PREFIX package.module:Class}` of a page becomes a table of the class's fields, with PREFIX in
front of their names.
"""

import importlib
import re
from typing import Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from dphybrid.cli.parser import sentence
from dphybrid.config import fields_of

_BOUNDS = {
    Ge: ("ge", "at least {}"),
    Gt: ("gt", "above {}"),
    Le: ("le", "at most {}"),
    Lt: ("lt", "below {}"),
}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the `{fields ...}` lines of a page by tables."""
    return re.sub(r"^\{fields (\S+) (\S+)\}$", lambda line: _table(line[1], line[2]), markdown, flags=re.M)


def _table(prefix: str, name: str) -> str:
    module, _, attribute = name.partition(":")
    model = getattr(importlib.import_module(module), attribute)
    rows = [_row(prefix, key, field, sentence(model, key)) for key, field in fields_of(model).items()]
    return "\n".join(["| name | default | what it is |", "| --- | --- | --- |", *rows])


def _row(prefix: str, key: str, field: FieldInfo, words: str) -> str:
    name = f"{prefix}{key.upper() if prefix.isupper() else key}"
    text = _text(field.get_default(call_default_factory=True))
    # Bounds of 2**53 and more only keep a number within its type, and would not help readers.
    bounds = [
        shown.format(f"{getattr(bound, side):g}")
        for bound in field.metadata
        for kind, (side, shown) in _BOUNDS.items()
        if isinstance(bound, kind) and getattr(bound, side) < 2**53
    ]
    choices = [f"`{choice}`" for choice in get_args(field.annotation)]
    given = choices if get_origin(field.annotation) is Literal else bounds
    words += f" [{', '.join(given)}]" if given else ""
    # A bar or a line end would end the cell.
    cells = f'<code class="field">{name}</code>', text and f"`{text}`", words
    return f"| {' | '.join(cell.replace('|', '&#124;').replace(chr(10), ' ') for cell in cells)} |"


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return "" if value is None else str(value)
