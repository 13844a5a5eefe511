"""What the columns of a table are used as: inferred from the first rows, printed, kept as `schema.toml`, and
overridden by flags or a file.

- numeric: every value present is a number. A code with few values stays numeric on purpose: its buckets give
  each frequent value its own row;
- categorical: some value is no number; or numbers that are names: written with a leading zero (007), beyond
  2^53, or whole numbers in a column whose name ends in id, code, zip, ... (user_id, itemId);
- time: dates and times, whose hour, weekday and day become numeric columns: every value present is one in
  the order year, month, day (2024-12-31, 2024/12/31 18:30); other orders are told, not inferred;
- bag, text: several values in a cell, the words of a free text; never inferred, but a column that looks like
  bags is told;
- ignore: a row number (whole numbers that grow by one from row to row, hardly any left out), as data frames
  write it; or no value at all.
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import polars as pl
from pydantic import Field, ValidationError

from dphybrid.config import Section
from dphybrid.config.tables import Role, TableDataConfig
from dphybrid.data.table.bags import SEPARATOR
from dphybrid.data.table.rows import as_numbers, plain_notation
from dphybrid.data.table.times import YEAR_FIRST, seconds
from dphybrid.util.errors import UserError
from dphybrid.util.files import read_small_text
from dphybrid.util.text import toml_text

FEW_OTHERS = 0.05
"""Share of values that are no numbers up to which a person is told which one made the column categorical."""
_FEW_LOOKED_AT = 20
ROW_NUMBERS = 20
"""Rows from which on a column that counts them is taken for a row number."""
ROW_GAPS = 0.05
"""Share of numbers that may be left out between row numbers: rows that were filtered out or rejected."""

INFERRED_TIME = "dates or times; --data.categorical would look each of them up"

_NAMES_AN_ID = re.compile(r"(?:^|[\W_])(?:ids?|uid|uuid|guid|code|zip|zipcode|postcode)$", re.IGNORECASE)
_CAMEL_ID = re.compile(r"[a-z0-9](?:Id|ID|Code)$")


class ColumnOptions(Section):
    """A column's section `[columns.NAME]` in a schema file; what is left out is inferred, or taken from the
    data section of the config."""

    role: Role | None = None
    """numeric, categorical, bag, text, time or ignore."""
    min_count: int | None = Field(default=None, ge=1)
    """Values seen fewer times in the training part become the unknown one (categorical, bag, text)."""
    top: int | None = Field(default=None, ge=1)
    """At most so many values get a row of their own, the most frequent ones (categorical, bag, text)."""
    hash_buckets: int = Field(default=0, ge=0)
    """Values without a row of their own share so many by a hash instead of the unknown one (categorical, bag,
    text)."""
    separator: str | None = Field(default=None, min_length=1)
    """Text between the items of a cell, | where nothing is said (bag)."""
    max_items: int | None = Field(default=None, ge=1, le=1024)
    """Items of a cell that are looked up, the first ones; 16 where nothing is said (bag, text)."""
    scale: Literal["auto", "log", "standard", "none"] = "auto"
    """log and standardize, standardize, neither, or by the look of the training part (numeric)."""
    buckets: int | None = Field(default=None, ge=0, le=4096)
    """Quantile buckets that get an embedding each; 0: none (numeric)."""


_ITEMS = ("categorical", "bag", "text")
EXAMPLES = {
    "min_count": ("2  # values seen fewer times in the training part are the unknown one", _ITEMS),
    "top": ("10000  # so many values, the most frequent ones, get a row of their own", _ITEMS),
    "hash_buckets": ("1000  # rows that the other values share by a hash", _ITEMS),
    "separator": ('"|"  # between the items of a cell', ("bag",)),
    "max_items": ("16  # items of a cell that are looked up", ("bag", "text")),
    "scale": ('"auto"  # or "log", "standard", "none"', ("numeric",)),
    "buckets": ("32  # quantile buckets that get an embedding each; 0: none", ("numeric",)),
}
"""By option: what a schema file shows of it where it is not in use, and the roles that have it."""


class SchemaFile(Section):
    """A schema file: the label, and a section a column."""

    label: str | None = None
    columns: Mapping[str, ColumnOptions] = Field(default_factory=dict)


def read_schema(path: Path) -> SchemaFile:
    """Read a schema file. Raises UserError that names the file and each wrong value."""
    try:
        return SchemaFile.model_validate(tomllib.loads(read_small_text(path)))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise UserError(
            f"data.schema_file={path}: cannot be read: {error}; give a file like a prepared folder's "
            "schema.toml"
        ) from error
    except ValidationError as error:
        wrong = "; ".join(
            f"{'.'.join(map(str, item['loc']))} = {item['input']!r}: {item['msg']}" for item in error.errors()
        )
        raise UserError(f"data.schema_file={path}: {wrong}") from error


def schema_text(label: str, columns: Sequence[tuple[str, ColumnOptions]]) -> str:
    """Return a schema as a TOML file."""
    lines = [
        "# Roles and encodings of a table's columns; --data.schema-file reads this file.",
        f"# role: {', '.join(get_args(Role))}. A line after # is an option that is not in use; remove the #",
        "# to use it.",
        f"label = {toml_text(label)}",
    ]
    for name, options in columns:
        lines += ["", f"[columns.{toml_text(name)}]"]
        values: dict[str, Any] = options.model_dump(exclude_defaults=True, exclude_none=True)
        lines += [
            f"{key} = {toml_text(value) if isinstance(value, str) else value}"
            for key, value in values.items()
        ]
        lines += [
            f"# {key} = {example}"
            for key, (example, roles) in EXAMPLES.items()
            if key not in values and options.role in roles
        ]
    return "\n".join(lines) + "\n"


def inferred_role(name: str, present: pl.Series, num_rows: int, data: TableDataConfig) -> tuple[Role, str]:
    """Return (role, reason where it is not plain) of a column with the given values present, by the rules at
    the top of this file."""
    if not len(present):
        return "ignore", "no values"
    others = present.filter(~as_numbers(present, data).is_finite().fill_null(False))
    if len(others):
        if len(others) <= FEW_OTHERS * len(present):
            return "categorical", f"{others[0]!r} is no number; data.missing can name it"
        # Most texts are no dates, which the first character tells, or the first few values.
        digit, few = str(others[0]).lstrip()[:1].isdigit(), others.head(_FEW_LOOKED_AT)
        if digit and all(seconds(some, data.dayfirst).is_not_null().all() for some in (few, others)):
            if others.str.contains(YEAR_FIRST).all():
                return "time", INFERRED_TIME
            order = "" if data.dayfirst else ", --data.dayfirst true where the day comes first"
            return "categorical", f"dates or times; --data.times would read hour, weekday and day{order}"
        several = 2 * int(others.str.contains(SEPARATOR, literal=True).sum()) > len(present)
        return (
            "categorical",
            f"most cells hold {SEPARATOR!r}; --data.bags would read their items" if several else "",
        )
    present = plain_notation(present, data)
    if present.str.contains(r"^-?0\d").any():
        return "categorical", "leading zeros"
    whole = present.cast(pl.Int64, strict=False)
    if whole.is_null().any():
        large = present.str.contains(r"^-?\d{17,}$").any()
        return ("categorical", "whole numbers beyond 2^53") if large else ("numeric", "")
    grows = len(present) == num_rows >= ROW_NUMBERS and (whole.diff().drop_nulls() > 0).all()
    if grows and int(whole[-1]) - int(whole[0]) < (1 + ROW_GAPS) * num_rows:
        return "ignore", "a row number"
    if whole.abs().max() > 2**53:  # type: ignore[operator]
        return "categorical", "whole numbers beyond 2^53"
    if _NAMES_AN_ID.search(name) or _CAMEL_ID.search(name):
        return "categorical", "named like an id"
    return "numeric", ""
