"""The data section of recipes whose samples are rows of a table: CSV, TSV or Parquet files."""

from collections.abc import Sequence
from typing import Literal, Self

from pydantic import Field, model_validator

from dphybrid.config import DataConfig, Names

NO_VALUE = (
    *("?", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>"),
    *("N/A", "NA", "NULL", "NaN", "None", "n/a", "nan", "null"),
)
"""Texts that mean "no value" in any table: those of pandas, and the question mark."""

COLUMN_FIELDS = ("label", "weight", "split_column")
"""Fields that name a column, besides those that list columns of a kind."""
READING_FIELDS = ("header", "delimiter", "missing", "decimal", "thousands", "dayfirst", "max_rejected")
"""How files are written, and how many of their rows may be unreadable: new rows may come otherwise."""


class TableDataConfig(DataConfig):
    """Which files, which column is the label, and what the others are read as.

    `dphybrid.data.table.kinds.table_config` adds a field for each kind of column: names of columns to read as
    that kind.
    """

    path: str | None = None
    """Your table (required): CSV, TSV or Parquet; a file, a folder, or a pattern such as day-*.csv.gz."""
    label: str | None = None
    """Column with the answer: its name, or its position 0, 1, ... in a file without a header."""
    task: Literal["auto", "binary", "multiclass", "regression", "counts"] = "auto"
    """What the label is. auto: binary with two values; multiclass with texts, or with up to 20 whole numbers
    below 100; regression with other numbers. Counts are never inferred."""
    weight: str | None = None
    """Column with each row's weight in loss and metrics, a number from 0 on; it is not a feature."""
    schema_file: str | None = None
    """Roles and encodings of the columns, as a prepared folder's schema.toml has them."""
    base: str | None = None
    """Prepared folder of an earlier run: its ids and statistics are kept and grown, so that its model can be
    trained on."""
    header: Literal["auto", "yes", "no"] = "auto"
    """Does the first line name the columns? auto looks at the file."""
    delimiter: str = "auto"
    """Character between columns; auto looks at the file."""
    missing: Names = ()
    """More texts that mean "no value", separated by commas; the empty one, ?, NA, NaN, None, null and the
    like always do."""
    decimal: Literal["auto", ".", ","] = "auto"
    """Sign before the decimals of numbers; auto looks at each column."""
    thousands: Literal["auto", "", ",", ".", " ", "'", "_"] = "auto"
    """Sign between groups of three digits, as in 1,206.73; empty: none; auto looks at each column."""
    dayfirst: bool | None = None
    """true reads 3/12/2024 as 3 December, false as 12 March. Empty: looks at each column."""
    min_count: int = Field(default=2, ge=1)
    """Categories seen fewer times in the training split become the unknown one."""
    buckets: int = Field(default=32, ge=0, le=4096)
    """Quantile buckets that each numeric column also gets an embedding for, at most one for each 128 training
    rows; 0: none."""
    valid_fraction: float = Field(default=0.2, gt=0.0, lt=1.0)
    """Share of the rows in the validation split."""
    split: Literal["random", "time", "key"] = "random"
    """Validation split: random rows, the latest by data.split_column (time), or whole values of it, so that
    no user is in both splits (key)."""
    split_column: str | None = None
    """Column that data.split goes by."""
    valid_path: str | None = None
    """Validation rows from files of their own; data.valid_fraction and data.split say nothing then."""
    max_rejected: float = Field(default=0.001, ge=0.0, le=1.0)
    """Share of unreadable rows above which preparation stops."""

    @classmethod
    def role_fields(cls) -> dict[str, str]:
        """Return the fields that list columns of a kind, each with the kind's role."""
        # By what the kinds of columns, in a room above, leave on their fields.
        extras = ((name, field.json_schema_extra) for name, field in cls.model_fields.items())
        return {name: str(extra["role"]) for name, extra in extras if isinstance(extra, dict)}

    @property
    def named_columns(self) -> list[tuple[str, str]]:
        """The columns that are named, each with the field that names it."""
        given = [(name, getattr(self, name)) for name in COLUMN_FIELDS]
        listed = [(field, name) for field in self.role_fields() for name in getattr(self, field)]
        return [(field, name) for field, name in given if name is not None] + listed

    def left_out(self, columns: Sequence[str]) -> Sequence[str]:
        """Return the columns to leave out: of the others, those that nothing names have a role by what they
        hold."""
        return [name for field, name in self.named_columns if self.role_fields().get(field) == "ignore"]

    @property
    def no_value(self) -> tuple[str, ...]:
        """All texts that mean "no value", but for the empty one."""
        return tuple(dict.fromkeys((*NO_VALUE, *self.missing)))

    @property
    def reading(self) -> dict[str, str | bool]:
        """The notations that are given, by the key of a column's section: they overrule what columns have."""
        given = {"decimal": self.decimal, "thousands": self.thousands, "dayfirst": self.dayfirst}
        return {key: value for key, value in given.items() if value not in ("auto", None)}

    @model_validator(mode="after")
    def _signs_differ(self) -> Self:
        if self.decimal == self.thousands != "auto":
            raise ValueError(f"decimal={self.decimal!r} and thousands={self.thousands!r}: give two signs")
        return self

    @model_validator(mode="after")
    def _split_has_its_column(self) -> Self:
        if (self.split == "random") != (self.split_column is None):
            raise ValueError(
                f"split={self.split} needs a column: set data.split_column"
                if self.split_column is None
                else f"split=random takes no split_column={self.split_column}; set data.split to time or key"
            )
        if self.valid_path is not None and self.split != "random":
            raise ValueError(
                f"valid_path={self.valid_path} with split={self.split}: the files are the split; give one "
                "of the two"
            )
        return self
