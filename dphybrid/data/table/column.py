"""What a kind of column is, and what one learns from. Letters: B rows."""

from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import Any, ClassVar, Self, cast

import numpy as np
import polars as pl
from pydantic import ConfigDict

from dphybrid.config import Section
from dphybrid.config.tables import TableDataConfig
from dphybrid.util.errors import UserError

Array = np.ndarray


@dataclass(frozen=True, eq=False)
class Sample:
    """What the first rows hold of a column. cells: those with a value; num_rows: of all; whole: the table has
    no other rows."""

    name: str
    cells: pl.Series
    num_rows: int
    whole: bool
    data: TableDataConfig


@dataclass(frozen=True)
class Found:
    """What was read of a column. numbers: of a sample of the training rows; texts: the different ones, with
    the training rows of each."""

    data: TableDataConfig
    numbers: Callable[[], pl.Series]
    texts: Callable[[], tuple[pl.Series, Array]]


class Column(Section):
    """A column of a table. Its fields but `name` and `learned` are keys of its section in schema.toml.

    role: the kind's name. flag: the field of the data section that lists such columns, `flag_help` its
    sentence. noun: what a cell must hold; None: any cell can be read. lists: cells may be lists. coded: its
    values are texts, kept as codes of a dictionary; else numbers or times, kept as they are.
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
        """Return why this kind takes a column by its first cells (empty: plain), None where it does not."""
        return None

    @classmethod
    def told(cls, sample: Sample) -> dict[str, Any]:
        """Return the keys of its section that the first cells tell, also where a person gave the kind."""
        return {}

    @classmethod
    def check(cls, name: str, cells: pl.Series) -> None:
        """Raise UserError for lists in a column of single values."""
        if cells.dtype == pl.List and not cls.lists:
            raise UserError(
                f"column {name!r} holds lists, and {cls.role} columns single values; name it in data.bags or "
                "data.ignore, or write single values"
            )

    def values(self, cells: pl.Series) -> pl.Series:
        """Return what `read` does of cells that were checked."""
        self.check(self.name, cells)
        return self.read(cells)

    def read(self, cells: pl.Series) -> pl.Series:
        """Return the values of stripped cells (None: no value), None also for what cannot be read."""
        return cells

    def wrong(self, cells: pl.Series, values: pl.Series) -> pl.Series:
        """Return which cells (B,) make their rows bad ones. values: what `read` gave."""
        return cells.is_not_null() & values.is_null()

    def fitted(self, found: Found) -> Self:
        """Return the column with what training rows tell."""
        return self

    def extended(self, newer: "Column") -> Self:
        """Return the column with the values that `newer` has besides; ids and statistics stay."""
        return self

    @property
    def form(self) -> str:
        """What must not change between a model and its retraining, in words."""
        return self.role

    @property
    def tables(self) -> list[tuple[str, str, int]]:
        """Name, role and number of ids of each embedding table that it needs."""
        return []


class Dictionary:
    """Numbers texts as they come, in any thread and as many as memory holds."""

    def __init__(self) -> None:
        # A mapping of its own inside polars. Which text gets which number may depend on threads.
        self.dtype = pl.Categorical(pl.Categories.random())
        self._keep = pl.Series([], dtype=self.dtype)  # polars forgets a mapping that no series uses
        self._size, self._lock = 0, Lock()

    def codes(self, texts: pl.Series) -> pl.Series:
        """Return uint32 of texts: 0 for no value, else 1 + the place in `values`; of lists, lists."""
        if texts.dtype == pl.List:
            lists = texts.list.eval(pl.element().cast(self.dtype).to_physical() + 1)
            self._met(lists.list.max())
            return lists
        codes = texts.cast(self.dtype).to_physical() + 1
        self._met(codes)
        return codes.fill_null(0)

    def _met(self, codes: pl.Series) -> None:
        # Threads number texts at once; the largest code that any of them met is what there is.
        with self._lock:
            self._size = max(self._size, int(cast(int, codes.max() or 0)))

    def values(self) -> pl.Series:
        """Return the texts by number."""
        return pl.Series("value", np.arange(self._size, dtype=np.uint32)).cat.to(self.dtype).cast(pl.String)
