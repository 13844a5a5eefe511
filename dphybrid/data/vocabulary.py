"""From texts or ids of any kind to rows of a table: a vocabulary that a reader fits, and that prepared data
and checkpoints keep for predictions."""

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
"""The row of "no value": None, an empty text, and the padding of short lists."""
_SUFFIX = ".vocabulary.json"


class Vocabulary:
    """Values and their rows: row 0 for no value, `unknown_rows` for values without a row of their own, each
    chosen by the value's hash, then a row a value.

    With many unknown rows and no values it hashes all: `Vocabulary([], unknown_rows=2**20)`. Values are
    compared as texts: 7 and "7" are the same one.
    """

    def __init__(self, values: Iterable[object] = (), *, unknown_rows: int = 1) -> None:
        """values: in the order of their rows, each once. Raises UserError without a row for unknown ones."""
        if unknown_rows < 1:
            raise UserError(f"vocabulary: unknown_rows={unknown_rows}; reserve at least 1")
        self.unknown_rows = unknown_rows
        self.values = list(dict.fromkeys(map(str, values)))
        self._rows = {value: row for row, value in enumerate(self.values, start=self.first)}

    @classmethod
    def fit(cls, values: object, *, least: int = 1, unknown_rows: int = 1) -> Self:
        """Return the vocabulary of training values, the most frequent first.

        values: an array, a Series or a list, of any shape. least: times that a value must occur to have a row
        of its own.
        """
        counts = Counter(text for text in _texts(values) if text)
        # Ties by text, so that the same values give the same rows in any order.
        ranked = sorted(counts, key=lambda text: (-counts[text], text))
        return cls((text for text in ranked if counts[text] >= least), unknown_rows=unknown_rows)

    def extended(self, values: object, *, least: int = 1) -> Self:
        """Return this vocabulary grown by new values: known ones keep their rows, the others follow."""
        newer = self.fit(values, least=least).values
        return type(self)([*self.values, *newer], unknown_rows=self.unknown_rows)

    @property
    def first(self) -> int:
        """The row of the first value; those before are of no value, and of unknown ones."""
        return 1 + self.unknown_rows

    def __len__(self) -> int:
        """Rows that a table needs."""
        return self.first + len(self.values)

    def ids(self, values: Any) -> Array:
        """Return the rows of values as int64, in the shape of `values`."""
        shape = np.shape(values)
        return np.array([self._row(text) for text in _texts(values)], np.int64).reshape(shape)

    def value(self, row: int) -> str | None:
        """Return the value of a row; None for a row that values share."""
        place = row - self.first
        return self.values[place] if 0 <= place < len(self.values) else None

    def _row(self, text: str) -> int:
        found = self._rows.get(text)
        if found is not None:
            return found
        # Not hash(): Python salts that of texts anew in each process.
        return 1 + zlib.crc32(text.encode()) % self.unknown_rows if text else NO_VALUE

    def page(self) -> dict[str, object]:
        """Return what its file holds."""
        return {"unknown_rows": self.unknown_rows, "values": self.values}


def _texts(values: object) -> list[str]:
    flat = np.asarray(values, object).ravel().tolist()
    return ["" if value is None else str(value) for value in flat]


def write_vocabularies(vocabularies: Mapping[str, Vocabulary], folder: Path) -> None:
    """Write vocabularies by name below the `encoder` folder of prepared data, which checkpoints copy."""
    if vocabularies:
        (folder / "encoder").mkdir(exist_ok=True)
    for name, vocabulary in vocabularies.items():
        write_json(folder / "encoder" / f"{name}{_SUFFIX}", vocabulary.page())


def read_vocabularies(folder: Path) -> dict[str, Vocabulary]:
    """Return the vocabularies, by name, of prepared data or of a checkpoint."""
    files = sorted((folder / "encoder").glob(f"*{_SUFFIX}"))
    pages = {file.name.removesuffix(_SUFFIX): read_json(file) for file in files}
    return {
        name: Vocabulary(page["values"], unknown_rows=page["unknown_rows"]) for name, page in pages.items()
    }
