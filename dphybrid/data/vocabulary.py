"""Vocabularies map texts or ids of any kind to rows of a table. A recipe's reader fits them; prepared data
and checkpoints keep them, so that predictions use the same rows."""

import zlib
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np

from dphybrid.data.batches import Array
from dphybrid.util.errors import UserError
from dphybrid.util.files import read_json, write_json

NO_VALUE = 0
"""The row of "no value": None, nan, pandas' NA and NaT, an empty text, and the padding of short lists."""
_SUFFIX = ".vocabulary.json"


class Vocabulary:
    """Maps values to rows: row 0 is "no value", the next `unknown_rows` are shared by unknown values (the
    value's hash chooses one), and each known value has its own row after them.

    Without known values, every value is hashed: `Vocabulary([], unknown_rows=2**20)`. Values are compared as
    texts: 7 and "7" are the same value.
    """

    def __init__(self, values: Iterable[object] = (), *, unknown_rows: int = 1) -> None:
        """values: the known values in the order of their rows; repeated ones count once. Raises UserError if
        no row is left for unknown values."""
        if unknown_rows < 1:
            raise UserError(f"vocabulary: unknown_rows={unknown_rows}; reserve at least 1")
        self.unknown_rows = unknown_rows
        self.values = list(dict.fromkeys(map(str, values)))
        self._rows = {value: row for row, value in enumerate(self.values, start=self.first)}

    @classmethod
    def fit(cls, values: object, *, least: int = 1, unknown_rows: int = 1) -> Self:
        """Return the vocabulary of training values, the most frequent first.

        values: an array, a Series or a list, of any shape. least: how often a value must occur to get its own
        row.
        """
        counts = Counter(text for text in _texts(values) if text)
        # Ties are broken by the text, so that the rows do not depend on the order of the values.
        ranked = sorted(counts, key=lambda text: (-counts[text], text))
        return cls((text for text in ranked if counts[text] >= least), unknown_rows=unknown_rows)

    @property
    def first(self) -> int:
        """The row of the first known value; the rows before it are for no value and for unknown values."""
        return 1 + self.unknown_rows

    def __len__(self) -> int:
        """Return the number of rows that the table needs."""
        return self.first + len(self.values)

    def ids(self, values: Any) -> Array:
        """Return the rows of values as int64, in the shape of `values`."""
        shape = np.shape(values)
        return np.array([self._row(text) for text in _texts(values)], np.int64).reshape(shape)

    def value(self, row: int) -> str | None:
        """Return the value of a row; None for the row of no value and the rows of unknown values."""
        index = row - self.first
        return self.values[index] if 0 <= index < len(self.values) else None

    def _row(self, text: str) -> int:
        found = self._rows.get(text)
        if found is not None:
            return found
        # Not hash(): Python salts it differently in each process.
        return 1 + zlib.crc32(text.encode()) % self.unknown_rows if text else NO_VALUE

    def page(self) -> dict[str, object]:
        """Return the content of its JSON file."""
        return {"unknown_rows": self.unknown_rows, "values": self.values}


def _texts(values: object) -> list[str]:
    # As objects: numpy would make floats of [7, 7.5], and the text of 7 would be "7.0".
    flat = np.asarray(values, object).ravel().tolist()
    return ["" if is_nothing(value) else str(value) for value in flat]


def is_nothing(value: object) -> bool:
    """Return whether an object means "no value": None, nan, or pandas' NA and NaT."""
    missing = value is None or type(value).__name__ in ("NAType", "NaTType")
    return missing or (isinstance(value, float) and value != value)


def write_vocabularies(vocabularies: Mapping[str, Vocabulary], folder: Path) -> None:
    """Write each vocabulary under its name into the `encoder` folder of prepared data; checkpoints copy that
    folder."""
    if vocabularies:
        (folder / "encoder").mkdir(exist_ok=True)
    for name, vocabulary in vocabularies.items():
        write_json(folder / "encoder" / f"{name}{_SUFFIX}", vocabulary.page())


def read_vocabularies(folder: Path) -> dict[str, Vocabulary]:
    """Return the vocabularies of prepared data or of a checkpoint by name."""
    files = sorted((folder / "encoder").glob(f"*{_SUFFIX}"))
    pages = {file.name.removesuffix(_SUFFIX): read_json(file) for file in files}
    return {
        name: Vocabulary(page["values"], unknown_rows=page["unknown_rows"]) for name, page in pages.items()
    }
