"""The data section of recipes whose samples are rows of a table: CSV, TSV or Parquet files."""

import codecs
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from dphybrid.config import DataConfig, Names

NO_VALUE = (
    *("?", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>"),
    *("N/A", "NA", "NULL", "NaN", "None", "n/a", "nan", "null"),
)
"""Texts that mean "no value" in every table: those of pandas, and the question mark."""

PACKED = ("", ".gz", ".zst", ".bz2", ".xz")
"""Endings that packed text files have after their own; the first is that of files that are not packed."""
COLUMN_FIELDS = ("label", "weight", "split_column")
"""Fields that name a single column; those that list columns of a kind are in `role_fields`."""


def _known_encoding(encoding: str) -> str:
    try:
        known = encoding == "auto" or codecs.lookup(encoding)._is_text_encoding
    except LookupError:
        known = False
    if not known:
        raise ValueError(f"encoding={encoding!r}: is unknown; give a name such as latin-1 or utf-16")
    return encoding


def _one_sign(quote: str) -> str:
    if quote not in ("auto", "none") and (len(quote) != 1 or quote.isalnum() or quote.isspace()):
        raise ValueError(f"quote={quote!r}: give one sign, none, or auto")
    return quote


class TextFiles(DataConfig):
    """How the user's text files are written."""

    shared = True

    path: str | None = None
    """Your files."""
    encoding: Annotated[str, AfterValidator(_known_encoding)] = "auto"
    """Encoding of text files, such as latin-1, utf-16 or shift_jis; auto: UTF-8 or UTF-16, else Latin-1."""


class DelimitedFiles(TextFiles):
    """How lines are split into cells, and how many lines may be unreadable."""

    shared = True

    delimiter: str = "auto"
    """Text between columns, such as ;, tab or ::, or blank for any number of blanks; auto: inferred from
    the file."""
    quote: Annotated[str, AfterValidator(_one_sign)] = "auto"
    """Character around cells that hold separators or line ends; none: quotes are plain text; auto: the double
    quote, unless the file's lines rule it out."""
    max_rejected: float = Field(default=0.001, ge=0.0, le=1.0)
    """Largest share of unreadable rows; with more, preparation stops."""


class RowFiles(DelimitedFiles):
    """How rows with named columns are written, and what their cells mean."""

    shared = True

    header: Literal["auto", "yes", "no"] = "auto"
    """Whether the first line names the columns; auto: inferred from the file."""
    missing: Names = ()
    """Further texts that mean "no value", separated by commas. The empty text, ?, NA, NaN, None, null and the
    like always do."""
    decimal: Literal["auto", ".", ","] = "auto"
    """Decimal mark of numbers; auto: inferred for each column."""
    thousands: Literal["auto", "", ",", ".", " ", "'", "_"] = "auto"
    """Thousands separator, as in 1,206.73. Empty: none; auto: inferred for each column."""
    dayfirst: bool | None = None
    """true reads 3/12/2024 as 3 December, false as 12 March. Empty: inferred for each column."""

    @property
    def no_value(self) -> tuple[str, ...]:
        """All texts that mean "no value", except the empty text."""
        return tuple(dict.fromkeys((*NO_VALUE, *self.missing)))

    @property
    def reading(self) -> dict[str, str | bool]:
        """The notations that are set, by their keys in schema.toml; they override the columns' own."""
        given = self.model_dump(include={"decimal", "thousands", "dayfirst", "separator"})
        # An empty thousands separator is a value: no separator.
        return {key: value for key, value in given.items() if value not in ("auto", None)}

    @model_validator(mode="after")
    def _signs_differ(self) -> Self:
        # Equal, but not both auto.
        if self.decimal == self.thousands != "auto":
            raise ValueError(
                f"decimal={self.decimal!r} and thousands={self.thousands!r}: give two different signs"
            )
        return self


READING_FIELDS = tuple(name for name in RowFiles.model_fields if name != "path")
"""Fields that say how files are written and how many rows may be unreadable. `predict` accepts them too, as
new files may be written differently."""


class TableDataConfig(RowFiles):
    """Which files to read, which column is the label, and how to read the others.

    `dphybrid.data.table.kinds.table_config` adds a field for each kind of column: the names of the columns to
    read as that kind.
    """

    used_with: ClassVar[Mapping[str, str]] = {"valid_fraction": "data.valid_path="}
    required: ClassVar[frozenset[str]] = frozenset({"path", "label"})

    path: str | None = None
    """Your table: CSV, TSV or Parquet; a file, a folder, or a pattern such as day-*.csv.gz."""
    label: str | None = None
    """Column to predict: its name, or its position 0, 1, ... in a file without a header."""
    task: Literal["auto", "binary", "multiclass", "regression"] = "auto"
    """Type of the label. auto: binary with two values; multiclass with texts, or with up to 20 whole numbers
    below 100; regression with other numbers."""
    weight: str | None = None
    """Column with each row's weight in loss and metrics, a number of 0 or more; it is not a feature."""
    schema_file: str | None = None
    """File with the columns' roles and encodings, such as an edited schema.toml of a prepared folder."""
    base: str | None = None
    """Prepared folder of an earlier run to extend: known values keep their ids and numbers their statistics,
    so that training can continue from its model."""
    separator: str = Field(default="auto", min_length=1)
    """Text between the items of a cell of data.bags, such as | or ; ([] for ["a", "b"]); auto: inferred for
    each column."""
    min_count: int = Field(default=2, ge=1)
    """Categories seen fewer times than this in the training split count as the unknown value."""
    buckets: int = Field(default=32, ge=0, le=4096)
    """Quantile buckets per numeric column, each with its own embedding; at most one for each 4,096 training
    rows. 0: none."""
    valid_fraction: float = Field(default=0.2, gt=0.0, lt=1.0)
    """Share of the rows in the validation split."""
    split: Literal["random", "time", "key", "named"] = "random"
    """Validation split: random rows; time, the latest rows by data.split_column; key, all rows of some
    values of data.split_column, so that, say, no user is in both splits; or named, as data.split_column says:
    train, valid, test."""
    split_column: str | None = None
    """Column for data.split=time, key or named."""
    valid_path: str | None = None
    """Separate files with the validation rows, instead of data.valid_fraction and data.split."""
    test_path: str | None = None
    """Files with test rows, which decide nothing: the best checkpoint is measured on them once, at the
    end."""

    @classmethod
    def role_fields(cls) -> dict[str, str]:
        """Return the fields that list columns of a kind, each with the kind's role."""
        # Read from the fields' extras: config may not import `kinds`, which builds on it.
        extras = ((name, field.json_schema_extra) for name, field in cls.model_fields.items())
        return {name: str(extra["role"]) for name, extra in extras if isinstance(extra, dict)}

    @property
    def named_columns(self) -> list[tuple[str, str]]:
        """The columns that this section names, as pairs of field and column."""
        given = [(name, getattr(self, name)) for name in COLUMN_FIELDS]
        listed = [(field, name) for field in self.role_fields() for name in getattr(self, field)]
        return [(field, name) for field, name in given if name is not None] + listed

    def left_out(self, columns: Sequence[str]) -> Sequence[str]:
        """Return the columns in data.ignore. Unlike other recipes, a table also reads columns that no field
        names: their roles are inferred."""
        return [name for field, name in self.named_columns if self.role_fields().get(field) == "ignore"]

    @model_validator(mode="after")
    def _split_has_its_column(self) -> Self:
        if (self.split == "random") != (self.split_column is None):
            raise ValueError(
                f"split={self.split} needs a column: set data.split_column"
                if self.split_column is None
                else f"split=random takes no split_column={self.split_column}; set data.split to time, key "
                "or named"
            )
        if self.valid_path is not None and self.split != "random":
            raise ValueError(
                f"valid_path={self.valid_path} with split={self.split}: both choose the validation rows; "
                "give one of the two"
            )
        return self
