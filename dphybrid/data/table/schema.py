"""The roles of a table's columns: inferred from the training rows, saved as `schema.toml`, and overridden by
flags or by an edited schema file."""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import Field, ValidationError

from dphybrid.config import Section
from dphybrid.config.tables import ROLE_FIELDS, TableDataConfig, bag_of
from dphybrid.data.table.kinds import Column, Options, Role
from dphybrid.util.errors import UserError, plain_words, suggestion
from dphybrid.util.files import read_small_text
from dphybrid.util.text import toml_text


class SchemaFile(Section):
    """A schema file: a section for each column."""

    columns: Mapping[str, Options] = Field(default_factory=dict)


def read_schema(path: Path) -> SchemaFile:
    """Read a schema file. Raises UserError that names the file and the wrong values."""
    try:
        return SchemaFile.model_validate(tomllib.loads(read_small_text(path)))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise UserError(
            f"data.schema_file={path}: cannot be read: {error}; give a file like the schema.toml of a "
            "prepared folder"
        ) from error
    except ValidationError as error:
        wrong = "; ".join(
            f"{'.'.join(map(str, item['loc']))} = {item['input']!r}: {plain_words(item)}"
            for item in error.errors()
        )
        raise UserError(f"data.schema_file={path}: {wrong}") from error


def schema_text(columns: Sequence[Column]) -> str:
    """Return a schema as the text of a TOML file."""
    lines = [
        "# Roles of a table's columns; --data.schema-file reads this file.",
        f"# role: {', '.join(get_args(Role))}",
    ]
    for column in columns:
        lines += ["", f"[columns.{toml_text(column.name)}]", f'role = "{column.role}"']
        if column.role == "bag":
            lines += [f"separator = {toml_text(column.separator)}", f"max_items = {column.max_items}"]
    return "\n".join(lines) + "\n"


def check_column(names: Sequence[str], name: str, field: str, path: object) -> None:
    """Raise UserError if there is no column of a name. field: the field that gives it, for messages."""
    if not name:
        raise UserError(f"{field} is not set; name the column to predict, one of: {', '.join(names)}")
    if name not in names:
        header = any(not each.isdigit() for each in names)
        hint = "" if header else "; its first line was read as values: data.header=yes reads it as names"
        raise UserError(f"{field}={name!r}: {path} has no such column{suggestion(name, names)}{hint}")


def roles_given(
    names: Sequence[str], data: TableDataConfig, schema: SchemaFile, taken: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """Return what flags, else the schema, say of each column of `names`: its role, if it is given, and its
    options. taken: label and weight, each with the field that names it. Raises UserError for a column that is
    missing or is named twice."""
    named_by, by_flag = dict(taken), dict[str, dict[str, Any]]()
    for field, role in ROLE_FIELDS.items():
        for given in getattr(data, field):
            name, separator = (given, "") if field != "bags" or given in names else bag_of(given)
            if field == "ignore" and name not in names:
                continue  # left out already
            check_column(names, name, f"data.{field}", data.path)
            if name in named_by:
                raise UserError(
                    f"data.{field}={name!r}: this column is already named as {named_by[name]}; name it once"
                )
            named_by[name] = role
            by_flag[name] = {"role": role} | ({"separator": separator} if separator else {})
    sections = dict[str, dict[str, Any]]()
    for name, section in schema.columns.items():
        check_column(names, name, "data.schema_file: columns", data.path)
        sections[name] = section.model_dump(exclude_unset=True)
    return {name: {**sections.get(name, {}), **by_flag.get(name, {})} for name in names}
