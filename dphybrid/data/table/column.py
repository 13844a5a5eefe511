"""The base class of the kinds of columns, the values that a column is inferred and fitted from, and the
dictionary of its texts. Letters: B rows."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import Lock
from typing import Any, ClassVar, Self, cast

import numpy as np
import polars as pl
from pydantic import ConfigDict

from dphybrid.config import Section
from dphybrid.config.tables import RowFiles, TableDataConfig
from dphybrid.util.errors import UserError

Array = np.ndarray


@dataclass(frozen=True, eq=False)
class Sample:
    """The cells of a column in the first rows, from which its kind is inferred.

    Attributes:
        cells: Only those with a value, as texts (`as_texts`), whatever the file stores, or as lists.
        num_rows: Number of these rows.
        whole: The table has no other rows.
        more: The cells of more rows, if any.
        typed: The file stores numbers.
        floats: Of a type that has fractions.
        declared: The file says that the values are categories.
        comma_file: Other columns write decimals with a comma.
        separator: Between items.
    """

    name: str
    cells: pl.Series
    num_rows: int
    whole: bool
    data: RowFiles
    typed: bool = False
    floats: bool = False
    declared: bool = False
    comma_file: bool = False
    separator: str = "auto"
    more: pl.Series | None = None


@dataclass(frozen=True)
class TrainingValues:
    """The values of a column in the training rows, from which it is fitted. numbers: returns those of a
    sample of the rows, every: of all rows. texts: returns the distinct texts, and the number of training rows
    with each."""

    # Functions, as a kind calls only one of them and each reads the whole column from disk.
    data: TableDataConfig
    numbers: Callable[[], pl.Series]
    every: Callable[[], pl.Series]
    texts: Callable[[], tuple[pl.Series, Array]]


class Column(Section):
    """A column of a table. All its fields except `name` and `learned` are keys of its section in schema.toml.

    Attributes:
        role: The kind's name.
        flag: The field of the data section that lists such columns.
        flag_help: Its description.
        noun: What a cell must hold; None: any cell can be read.
        lists: Whether cells may be lists.
        coded: Values are texts, stored as codes of a dictionary; otherwise numbers or times, stored as they
            are.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    role: ClassVar[str] = ""
    flag: ClassVar[str] = ""
    flag_help: ClassVar[str] = ""
    noun: ClassVar[str | None] = None
    lists: ClassVar[bool] = False
    coded: ClassVar[bool] = False

    name: str
    learned: Any = None

    @classmethod
    def options(cls) -> dict[str, Any]:
        """Return the fields that a section of schema.toml may have."""
        return {name: field for name, field in cls.model_fields.items() if name not in Column.model_fields}

    @classmethod
    def claims(cls, sample: Sample) -> str | None:
        """Return why this kind claims a column, judged by its first cells (empty if there is nothing to
        report); None if it does not claim it."""
        return None

    @classmethod
    def inferred(cls, sample: Sample) -> dict[str, Any]:
        """Return the schema keys, with their values, that can be inferred from the first cells; also called
        if the user chose the kind."""
        return {}

    @classmethod
    def check(cls, name: str, cells: pl.Series) -> None:
        """Raise UserError for lists in a column of single values."""
        if cells.dtype == pl.List and not cls.lists:
            raise UserError(
                f"column {name!r} holds lists, but {cls.role} columns need single values; name it in "
                "data.bags or data.ignore, or write single values"
            )

    def values(self, cells: pl.Series) -> pl.Series:
        """Check cells, then return `read` of them."""
        self.check(self.name, cells)
        return self.read(cells)

    def read(self, cells: pl.Series) -> pl.Series:
        """Return the values of stripped cells; None for cells with no value or that cannot be read."""
        return cells

    def wrong(self, cells: pl.Series, values: pl.Series) -> pl.Series:
        """Return a mask (B,) of the cells whose rows are to be rejected. values: `read` of the cells."""
        return cells.is_not_null() & values.is_null() & (self.noun is not None)

    def doubt(self, cells: pl.Series) -> str:
        """Return what is to say of cells that may mean something else than in training; empty if nothing."""
        return ""

    def written(self, data: RowFiles) -> Self:
        """Return the column for files in the notation that `data` sets, such as another decimal mark."""
        return self.model_copy(update={k: v for k, v in data.reading.items() if k in self.options()})

    def fitted(self, training: TrainingValues) -> Self:
        """Return the column fitted to the training rows, with its vocabulary or statistics in `learned`."""
        return self

    def extended(self, newer: "Column") -> Self:
        """Return the column with the values that only `newer` has added; its ids and statistics stay."""
        return self

    def covers(self, earlier: Self) -> bool:
        """Return whether this column tells apart all that `earlier` does."""
        return bool(self.learned == earlier.learned)

    @property
    def vocabulary(self) -> pl.Series | None:
        """The learned values that have an id each, as texts; None for a column without."""
        return None

    @classmethod
    def restored(cls, values: dict[str, Any], vocabularies: Iterator[pl.Series]) -> Self:
        """Return the column that was saved as `values`, with the next one of the saved vocabularies if it has
        one."""
        return cls(**values)

    @property
    def form(self) -> str:
        """Describes what must stay the same for a model to be retrained on newer data."""
        return self.role

    @property
    def tables(self) -> list[tuple[str, str, int]]:
        """Name, role and number of ids of each embedding table that the column needs."""
        return []


class Dictionary:
    """Assigns numbers to texts in the order of their arrival; threads may use it at once."""

    def __init__(self) -> None:
        # A mapping inside polars that only this object uses. Which text gets which number may depend on
        # threads, so that whatever lasts must not depend on the numbers.
        self.dtype = pl.Categorical(pl.Categories.random())
        self._keep = pl.Series([], dtype=self.dtype)  # polars drops a mapping that no series uses
        self._size, self._lock = 0, Lock()

    def codes(self, texts: pl.Series) -> pl.Series:
        """Return the uint32 code of each text: 0 for no value, else 1 + its position in `values`. Lists of
        texts give lists of codes."""
        if texts.dtype == pl.List:
            lists = texts.list.eval(pl.element().cast(self.dtype).to_physical() + 1)
            self._note_largest(lists.list.max())
            return lists
        codes = texts.cast(self.dtype).to_physical() + 1
        self._note_largest(codes)
        return codes.fill_null(0)

    def _note_largest(self, codes: pl.Series) -> None:
        # Several threads add texts; the largest code of any of them is the number of texts.
        with self._lock:
            self._size = max(self._size, int(cast(int, codes.max() or 0)))

    def values(self) -> pl.Series:
        """Return the texts in the order of their numbers."""
        return pl.Series("value", np.arange(self._size, dtype=np.uint32)).cat.to(self.dtype).cast(pl.String)
