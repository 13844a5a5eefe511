"""The roles of a table's columns: inferred from the first rows, kept as `schema.toml`, and overridden by
flags or such a file."""

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from dphybrid.config import Section
from dphybrid.config.tables import TableDataConfig
from dphybrid.data.table.column import Column, Sample
from dphybrid.data.table.kinds import KINDS, Time, kind_of, roles
from dphybrid.data.table.rows import Rows
from dphybrid.util.errors import UserError, plain_words
from dphybrid.util.files import read_small_text
from dphybrid.util.text import toml_text

LOOKED_AT = 20_000
"""Rows that tell what the columns are."""


class SchemaFile(Section):
    """A schema file: the label, and a section a column."""

    label: str | None = None
    columns: Mapping[str, Mapping[str, object]] = Field(default_factory=dict)


@dataclass(frozen=True)
class Look:
    """A column, why it is of its kind (empty: plain), and a few values for people."""

    column: Column
    reason: str
    samples: tuple[str, ...]

    @property
    def facts(self) -> dict[str, object]:
        """What the manifest says of the column."""
        return {
            "name": self.column.name,
            "role": self.column.role,
            "reason": self.reason,
            "samples": self.samples,
        }


def read_schema(path: Path) -> SchemaFile:
    """Read a schema file. Raises UserError that names the file and each wrong value."""
    try:
        schema = SchemaFile.model_validate(tomllib.loads(read_small_text(path)))
        known = {key for kind in KINDS for key in kind.options()} | {"role"}
        for name, section in schema.columns.items():
            for key, value in section.items():
                if key not in known:
                    raise UserError(f"columns.{name}.{key} = {value!r}: no kind of column has such a key")
            if section.get("role", "ignore") not in roles():
                raise UserError(f"columns.{name}.role = {section['role']!r}: use {', '.join(roles())}")
            # Without a role any kind may claim the column, so each checks the keys that it would get.
            for kind in KINDS:
                kind(name=name, **_keys_of(kind, section))
        return schema
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise UserError(
            f"data.schema_file={path}: cannot be read: {error}; give a file like a prepared folder's "
            "schema.toml"
        ) from error
    except ValidationError as error:
        wrong = "; ".join(
            f"{'.'.join(map(str, item['loc']))} = {item['input']!r}: {plain_words(item)}"
            for item in error.errors()
        )
        raise UserError(f"data.schema_file={path}: {wrong}") from error
    except UserError as error:
        raise UserError(f"data.schema_file={path}: {error}") from None


def _keys_of(kind: type[Column], section: Mapping[str, object]) -> dict[str, object]:
    return {key: value for key, value in section.items() if key in kind.options()}


def schema_text(label: str, columns: Sequence[Column]) -> str:
    """Return a schema as a TOML file."""
    lines = [
        "# Roles and encodings of a table's columns; --data.schema-file reads this file.",
        f"# role: {', '.join(roles())}. A line after # is an option that is not in use; remove the #",
        "# to use it.",
        f"label = {toml_text(label)}",
    ]
    for column in columns:
        lines += ["", f"[columns.{toml_text(column.name)}]", f'role = "{column.role}"']
        for key, field in column.options().items():
            value = getattr(column, key)
            used = value is not None and value != field.get_default(call_default_factory=True)
            shown = value if used else field.examples[0]
            text = toml_text(shown) if isinstance(shown, str) else str(shown).lower()
            sentence = "" if used else f"  # {field.description}".replace("\n", " ")
            lines.append(f"{'' if used else '# '}{key} = {text}{sentence}")
    return "\n".join(lines) + "\n"


def find_column(rows: Rows, name: str, place: str) -> str:
    """Return the column of a name or a position. place: the field that gives it. Raises UserError."""
    columns = rows.names
    if name in columns:
        return name
    # A position, unless a column has these digits as its name.
    if name.isascii() and name.isdigit() and int(name) < len(columns):
        return columns[int(name)]
    listed = ", ".join(columns)
    if not name:
        raise UserError(f"{place} is not set; name the column with the answer, one of: {listed}")
    close = difflib.get_close_matches(name, columns, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    if not rows.header:
        hint += "its first line was read as values (data.header=yes reads it as names), so "
    raise UserError(f"{place}={name!r}: {rows.file} has no such column; {hint}columns: {listed}")


def sample_of(rows: Rows, name: str, data: TableDataConfig) -> Sample:
    """Return what the first rows hold of a column."""
    cells = rows.cells[name].head(LOOKED_AT)
    return Sample(name, cells.drop_nulls(), len(cells), len(rows) == len(cells), data)


def look(rows: Rows, data: TableDataConfig, schema: SchemaFile, taken: Mapping[str, str]) -> list[Look]:
    """Return the columns, by what was said or by what the first rows hold. taken: columns that are no
    features, with the field that names each. Raises UserError."""
    given: dict[str, str] = {}
    for field, name in data.named_columns:
        if (role := data.role_fields().get(field)) is None:
            continue
        found = find_column(rows, name, f"data.{field}")
        if other := taken.get(found) or given.get(found):
            raise UserError(f"data.{field}={name!r}: this column is already named as {other}; name it once")
        given[found] = role
    place = "data.schema_file: columns" if data.schema_file else f"data.base={data.base}: its column"
    sections = {find_column(rows, name, place): section for name, section in schema.columns.items()}
    return [
        _look(rows, sample_of(rows, name, data), given.get(name), sections.get(name, {}))
        for name in rows.names
        if name not in taken
    ]


def _look(rows: Rows, sample: Sample, role: str | None, section: Mapping[str, Any]) -> Look:
    role = role or section.get("role")
    if role:
        kind, reason = kind_of(role), "as given"
    else:  # the last of KINDS claims every column
        claims = ((kind, kind.claims(sample)) for kind in KINDS)
        kind, reason = next((kind, reason) for kind, reason in claims if reason is not None)
    kind.check(sample.name, sample.cells)
    column = kind(name=sample.name, **{**kind.told(sample), **_keys_of(kind, section)})
    if isinstance(column, Time) and (both := {*column.part_names} & {*rows.names}):
        raise UserError(
            f"{rows.file}: has a column {min(both)!r}, which {sample.name!r} as dates or times would make; "
            f"rename it, or name {sample.name!r} in data.categorical"
        )
    # In the order of the file, so that a person finds them again.
    samples = sample.cells.unique(maintain_order=True).head(3).to_list()
    return Look(column, reason, tuple(map(str, samples)))
