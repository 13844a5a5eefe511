"""The data section of recipes whose samples are rows of a table: CSV, TSV or Parquet files."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from dphybrid.config import DataConfig, Names

NO_VALUE = (
    *("?", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>"),
    *("N/A", "NA", "NULL", "NaN", "None", "n/a", "nan", "null"),
)
"""Texts that mean "no value" in every table: those of pandas, and the question mark."""

PACKED = ("", ".gz")
"""Endings that packed text files have after their own; the first is that of files that are not packed."""
COLUMN_FIELDS = ("label", "weight", "split_column")
"""Fields that name a single column."""
ROLE_FIELDS = {
    "numeric": "numeric",
    "times": "time",
    "categorical": "categorical",
    "bags": "bag",
    "ignore": "ignore",
}
"""Fields that list columns of a kind, each with the kind's role."""
_NAMED_SIGNS = {"comma": ",", "blank": " ", "tab": "\t"}
"""Separators that flags and shells can hardly write."""


def _one_sign(quote: str) -> str:
    if quote not in ("auto", "none") and (len(quote) != 1 or quote.isalnum() or quote.isspace()):
        raise ValueError(f"quote={quote!r}: give one sign, none, or auto")
    return quote


def _separator(sign: str) -> str:
    sign = _NAMED_SIGNS.get(sign, sign)
    if sign != "auto" and (not 1 <= len(sign.encode()) <= 4 or sign.isalnum() or set(sign) & {*'"\n\r'}):
        raise ValueError(f"delimiter={sign!r}: give a separator of 1 to 4 signs, tab, blank, comma, or auto")
    return sign


class TextFiles(DataConfig):
    """How the user's text files are written."""

    shared = True

    path: str | None = None
    """Your files."""
    encoding: Literal["auto", "utf-8", "utf-16", "latin-1"] = "auto"
    """Encoding of text files; auto: UTF-8, or UTF-16 if a file begins with its mark. Convert others."""


class DelimitedFiles(TextFiles):
    """How lines are split into cells, and how many lines may be unreadable."""

    shared = True

    delimiter: Annotated[str, AfterValidator(_separator)] = "auto"
    """Text between columns, such as ;, tab, blank or ::; auto: inferred from the file."""
    quote: Annotated[str, AfterValidator(_one_sign)] = "auto"
    """Character around cells that hold separators or line ends; none: quotes are plain text; auto: inferred
    from the file."""
    max_rejected: float = Field(default=0.001, ge=0.0, le=1.0)
    """Largest share of unreadable rows; with more, preparation stops. A column becomes a category if more of
    its cells than this do not fit the type that the first rows have."""


class RowFiles(DelimitedFiles):
    """How rows with named columns are written, and what their cells mean."""

    shared = True

    header: Literal["auto", "yes", "no"] = "auto"
    """Whether the first line names the columns; auto: inferred from the file."""
    missing: Annotated[Names | None, BeforeValidator(lambda given: None if given == "" else given)] = ()
    """Further texts that mean "no value", separated by commas, besides the empty text, ?, NA, NaN, None,
    null and the like. --data.missing '' reads all but the empty text as values. Write --data.missing=-1 for a
    text that begins with a minus."""
    decimal: Literal["auto", ".", ","] = "auto"
    """Decimal mark of numbers; auto: a comma if commas do not separate the columns and it makes more columns
    numbers, else a point."""
    dateformat: str = ""
    """How dates and times are written, such as %d/%m/%Y or %m/%d/%Y %H:%M. Empty: ISO 8601."""

    @property
    def no_value(self) -> tuple[str, ...]:
        """All texts that mean "no value", except the empty text."""
        return () if self.missing is None else tuple(dict.fromkeys((*NO_VALUE, *self.missing)))


READING_FIELDS = tuple(n for n in RowFiles.model_fields if n not in ("path", "decimal", "dateformat"))
"""Fields that say how files are written and how many rows may be unreadable. `predict` accepts them too, as
new files may be written differently; numbers and dates in them are written as in training."""


class TableDataConfig(RowFiles):
    """Which files to read, which column is the label, and how to read the others."""

    used_with: ClassVar[Mapping[str, str]] = {"valid_fraction": "data.valid_path="}

    path: str | None = None
    """Your table: CSV, TSV or Parquet; a file, a folder, or a pattern such as day-*.csv.gz."""
    label: str | None = None
    """Column to predict: its name, or its position 0, 1, ... in a file without a header."""
    task: Literal["auto", "binary", "multiclass", "regression"] = "auto"
    """Type of the label. auto: binary with two values; multiclass with texts, or with up to 20 whole numbers
    below 100; regression with other numbers."""
    weight: str | None = None
    """Column with each row's weight in loss and metrics, a number above 0; it is not a feature."""
    base: str | None = None
    """Prepared folder of an earlier run to extend: known values keep their ids and numbers their statistics,
    so that training can continue from its model."""
    numeric: Names = ()
    """Columns to read as numbers, separated by commas; roles of unlisted columns are inferred."""
    times: Names = ()
    """Columns to read as dates or times, separated by commas: hour, weekday and day become numbers. Also
    whole numbers of seconds, milliseconds, microseconds or nanoseconds since 1970."""
    categorical: Names = ()
    """Columns to read as categories, separated by commas."""
    bags: Names = ()
    """Columns with several values in a cell, separated by commas: COLUMN:SEPARATOR, such as genres:| or
    tags:comma; without a separator: lists, as Parquet and JSON have them, or items between |."""
    max_items: int = Field(default=16, ge=1, le=1024)
    """Number of items of a cell of a bag that are looked up, from the first one on."""
    ignore: Names = ()
    """Columns to leave out, separated by commas; a table may lack them."""
    min_count: int = Field(default=2, ge=1)
    """Categories seen fewer times than this in the training split count as the unknown value."""
    valid_fraction: float = Field(default=0.2, gt=0.0, lt=1.0)
    """Share of the rows in the validation split."""
    split: Literal["random", "time", "key"] = "random"
    """Validation split: random rows; time, the latest rows by data.split_column; or key, all rows of some
    values of data.split_column, so that, say, no user is in both splits."""
    split_column: str | None = None
    """Column for data.split=time or key."""
    valid_path: str | None = None
    """Separate files with the validation rows, instead of data.valid_fraction and data.split."""
    test_path: str | None = None
    """Files with test rows, which decide nothing: the best checkpoint is measured on them once, at the
    end."""

    @property
    def named_columns(self) -> list[tuple[str, str]]:
        """The columns that this section names, as pairs of field and column."""
        given = [(name, getattr(self, name)) for name in COLUMN_FIELDS]
        return [(field, name) for field, name in given if name is not None] + [
            (field, bag_of(name)[0] if field == "bags" else name)
            for field in ROLE_FIELDS
            for name in getattr(self, field)
        ]

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
                f"valid_path={self.valid_path} with split={self.split}: both choose the validation rows; "
                "give one of the two"
            )
        return self


def bag_of(given: str) -> tuple[str, str]:
    """Return the column and the separator that a name in data.bags gives; an empty separator: not given."""
    name, colon, sign = given.rpartition(":")
    return (name, _NAMED_SIGNS.get(sign, sign)) if name and colon and sign else (given, "")
