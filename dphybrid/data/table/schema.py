"""The roles of a table's columns: inferred from the first rows, saved as `schema.toml`, and overridden by
flags or by an edited schema file."""

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import polars as pl
from polars.selectors import by_name  # takes names literally; select() reads `*` as a pattern
from pydantic import Field, ValidationError

from dphybrid.config import Section
from dphybrid.config.tables import RowFiles, TableDataConfig
from dphybrid.data.table.cells import as_texts
from dphybrid.data.table.column import Column, Sample
from dphybrid.data.table.kinds import KINDS, Bag, Category, Ignore, Time, kind_of, roles
from dphybrid.data.table.numbers import writes_commas
from dphybrid.data.table.rows import Rows
from dphybrid.util.errors import UserError, counted, plain_words
from dphybrid.util.files import read_small_text
from dphybrid.util.text import toml_text

LOOKED_AT = 8_192
"""Number of first rows from which the kinds of columns are inferred."""


class SchemaFile(Section):
    """A schema file: the label, and a section for each column."""

    label: str | None = None
    columns: Mapping[str, Mapping[str, object]] = Field(default_factory=dict)


GIVEN = "as given"
"""The reason for a kind that a flag or the schema names."""


@dataclass(frozen=True)
class DescribedColumn:
    """A column, the reason for its kind (empty if there is nothing to report), and a few values for the
    summary."""

    column: Column
    reason: str
    samples: tuple[str, ...]

    @property
    def facts(self) -> dict[str, object]:
        """What the manifest records of the column."""
        return {
            "name": self.column.name,
            "role": self.column.role,
            "reason": self.reason,
            "samples": self.samples,
        }


def read_schema(path: Path) -> SchemaFile:
    """Read a schema file. Raises UserError that names the file and the wrong values."""
    try:
        schema = SchemaFile.model_validate(tomllib.loads(read_small_text(path)))
        known = {key for kind in KINDS for key in kind.options()} | {"role"}
        for name, section in schema.columns.items():
            for key, value in section.items():
                if key not in known:
                    raise UserError(f"columns.{name}.{key} = {value!r}: no kind of column has this key")
            if section.get("role", "ignore") not in roles():
                raise UserError(
                    f"columns.{name}.role = {section['role']!r}: unknown; use {', '.join(roles())}"
                )
            # Without a role any kind may claim the column, so every kind checks the keys that it knows.
            for kind in KINDS:
                kind(name=name, **_keys_of(kind, section))
        return schema
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
    except UserError as error:
        raise UserError(f"data.schema_file={path}: {error}") from None


def _keys_of(kind: type[Column], section: Mapping[str, object]) -> dict[str, object]:
    return {key: value for key, value in section.items() if key in kind.options()}


def schema_text(label: str, columns: Sequence[Column]) -> str:
    """Return a schema as the text of a TOML file."""
    lines = [
        "# Roles and encodings of a table's columns; --data.schema-file reads this file.",
        f"# role: {', '.join(roles())}. Options that are not set are commented out: remove",
        "# the # to set an option.",
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


def find_column(rows: Rows, name: str, field: str) -> str:
    """Return the column with a name or at a position. field: the field that gives it, for messages. Raises
    UserError if there is no such column."""
    columns = rows.names
    if name in columns:
        return name
    # A position, unless a column has these digits as its name.
    if name.isascii() and name.isdigit() and int(name) < len(columns):
        return columns[int(name)]
    listed = ", ".join(columns)
    if not name:
        raise UserError(f"{field} is not set; name the column to predict, one of: {listed}")
    close = difflib.get_close_matches(name, columns, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    if not rows.header:
        hint += "its first line was read as values (data.header=yes reads it as names); "
    raise UserError(f"{field}={name!r}: {rows.file} has no such column; {hint}columns: {listed}")


def samples_of(rows: Rows, data: TableDataConfig) -> dict[str, Sample]:
    """Return the sample of each column from the first rows."""
    cleaned = rows.cells.of(rows.names)
    found = {name: _sample_of(rows, name, cells, data) for name, cells in cleaned.items()}
    commas = any(map(writes_commas, found.values()))
    return {name: replace(sample, comma_file=commas) for name, sample in found.items()}


def _sample_of(rows: Rows, name: str, cells: pl.Series, data: TableDataConfig) -> Sample:
    known = cells.head(LOOKED_AT).drop_nulls()
    given = rows.cells.given[name].dtype
    return Sample(
        name,
        known if known.dtype == pl.List else as_texts(known),
        min(len(rows), LOOKED_AT),
        len(rows) <= LOOKED_AT,
        data,
        typed=cells.dtype.is_numeric(),
        floats=cells.dtype.is_float(),
        declared=given in (pl.Categorical, pl.Enum),
        separator=data.separator,
        more=cells if len(cells) > len(known) else None,
    )


def names_column(name: str, texts: pl.Series, data: RowFiles) -> Category:
    """Return how a column of names is read: users, items, their features, or entities. texts: of all rows."""
    known = texts.drop_nulls()
    return Category(name=name, **Category.inferred(Sample(name, known, len(texts), True, data)))


def in_form(
    rows: pl.DataFrame, forms: Mapping[str, Category], needed: Sequence[str], notes: dict[str, None]
) -> pl.DataFrame:
    """Return rows with each name in the form of its column, see `names_column`, without those whose cell of a
    column in `needed` is no name in it, such as a dash among numbers. notes: gets how many these are."""
    columns = (forms[c.name].read(c).alias(c.name) if c.name in forms else c for c in rows.get_columns())
    found = pl.DataFrame(columns)
    named = found.drop_nulls(by_name(*needed))
    if left := len(found) - len(named):
        notes[f"{counted(left, 'row')} left out, with a dash or an infinite number for a name"] = None
    return named


def describe_columns(
    rows: Rows,
    samples: Mapping[str, Sample],
    data: TableDataConfig,
    schema: SchemaFile,
    taken: Mapping[str, str],
) -> list[DescribedColumn]:
    """Return all columns except `taken` with their kinds: from flags, else from the schema, else inferred
    from the first rows. samples: of all columns. taken: label and weight, each with the field that names it.
    Raises UserError for a column that is missing, is named twice or cannot be read as its kind."""
    given: dict[str, str] = {}
    for field, name in data.named_columns:
        if (role := data.role_fields().get(field)) is None:
            continue
        found = find_column(rows, name, f"data.{field}")
        if other := taken.get(found) or given.get(found):
            raise UserError(f"data.{field}={name!r}: this column is already named as {other}; name it once")
        given[found] = role
    where = "data.schema_file: columns" if data.schema_file else f"data.base={data.base}: its column"
    sections = {find_column(rows, name, where): section for name, section in schema.columns.items()}
    return [
        _described(rows, sample, given.get(name), sections.get(name, {}))
        for name, sample in samples.items()
        if name not in taken
    ]


def _described(rows: Rows, sample: Sample, role: str | None, section: Mapping[str, Any]) -> DescribedColumn:
    """Return a column of the given role, else of the first kind that claims it. section: of the schema."""
    role = role or section.get("role")
    kind: type[Column]
    if not role and sample.name in rows.index:
        kind, reason = Ignore, "the index of the rows"
    elif role:
        kind, reason = kind_of(role), GIVEN
    else:  # always finds one, as the last of KINDS claims every column
        able = (kind for kind in KINDS if kind.lists or sample.cells.dtype != pl.List)
        claims = ((kind, kind.claims(sample)) for kind in able)
        kind, reason = next((kind, reason) for kind, reason in claims if reason is not None)
    kind.check(sample.name, sample.cells)
    column = kind(name=sample.name, **{**kind.inferred(sample), **_keys_of(kind, section)})
    if type(column) is Bag and sample.cells.dtype != pl.List and "separator" not in section:
        reason = f"items between {column.separator!r}; --data.separator overrides this"
    if isinstance(column, Time) and (both := {*column.part_names} & {*rows.names}):
        raise UserError(
            f"{rows.file}: its column {min(both)!r} has the name of a part of {sample.name!r}, which is read "
            f"as dates or times; rename it, or name {sample.name!r} in data.categorical"
        )
    # In the order of the file, so that users find the values there.
    samples = sample.cells.unique(maintain_order=True).head(3).to_list()
    return DescribedColumn(column, reason, tuple(map(str, samples)))
