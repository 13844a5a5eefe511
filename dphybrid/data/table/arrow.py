"""What the metadata of Parquet and Arrow files say that polars drops: columns that are dictionaries. It is a
page of Arrow's schema, which is a flatbuffer."""

import base64
import struct
from collections.abc import Mapping
from os import SEEK_END
from pathlib import Path

import polars as pl

_FIELDS = 1
"""Slot of Arrow's table Schema."""
_NAME, _DICTIONARY = 0, 4
"""Slots of Arrow's table Field."""


class _Table:
    """A table of a flatbuffer: fields by slot."""

    def __init__(self, buffer: bytes, start: int) -> None:
        self.buffer, self.start = buffer, start
        self.slots = start - self._number("<i", start)

    def _number(self, form: str, place: int) -> int:
        return int(struct.unpack_from(form, self.buffer, place)[0])

    def place(self, slot: int) -> int:
        """Return where a field's content begins; 0 if the table lacks it."""
        if 4 + 2 * slot >= self._number("<H", self.slots):
            return 0
        offset = self._number("<H", self.slots + 4 + 2 * slot)
        return self.start + offset + self._number("<I", self.start + offset) if offset else 0

    def text(self, slot: int) -> str:
        if not (place := self.place(slot)):
            return ""
        return self.buffer[place + 4 :][: self._number("<I", place)].decode("utf-8", "replace")

    def tables(self, slot: int) -> list["_Table"]:
        if not (place := self.place(slot)):
            return []
        places = (place + 4 + 4 * number for number in range(self._number("<I", place)))
        return [_Table(self.buffer, each + self._number("<I", each)) for each in places]


def dictionaries_of(file: Path, kind: str) -> list[str]:
    """Return the columns that are dictionaries. kind: parquet or arrow. None for files of other writers."""
    try:
        pages = pl.read_parquet_metadata(file) if kind == "parquet" else {}
        fields = _schema(file, pages).tables(_FIELDS)
        return [field.text(_NAME) for field in fields if field.place(_DICTIONARY)]
    except (LookupError, ValueError, struct.error):  # none, or metadata of another form
        return []


def _schema(file: Path, pages: Mapping[str, str]) -> _Table:
    """Return the schema: of a Parquet file that of a Message in its metadata, else that of the footer."""
    if pages:
        page = base64.b64decode(pages["ARROW:schema"]).removeprefix(b"\xff\xff\xff\xff")[4:]
    else:
        with file.open("rb") as stream:
            stream.seek(-10, SEEK_END)
            size = int.from_bytes(stream.read(4), "little")
            stream.seek(-10 - size, SEEK_END)
            page = stream.read(size)
    root = _Table(page, struct.unpack_from("<I", page)[0])
    return _Table(page, root.place(2 if pages else 1))
