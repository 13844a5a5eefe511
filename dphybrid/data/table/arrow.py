"""What the metadata of Parquet and Arrow files say that polars drops: columns that are dictionaries, and the
index of a frame that pandas wrote. Both are a page of Arrow's schema, which is a flatbuffer."""

import base64
import json
import struct
from os import SEEK_END
from pathlib import Path

import polars as pl

_FIELDS, _METADATA = 1, 2
"""Slots of Arrow's table Schema."""
_NAME, _DICTIONARY = 0, 4
"""Slots of Arrow's table Field."""
_KEY, _VALUE = 0, 1


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


def facts_of(file: Path, kind: str) -> tuple[list[str], list[str]]:
    """Return the columns that are dictionaries, and those that are the index of a pandas frame. kind:
    parquet, arrow or arrow stream. Both are empty for files of other writers."""
    try:
        schema = _schema(file, kind)
        declared = [field.text(_NAME) for field in schema.tables(_FIELDS) if field.place(_DICTIONARY)]
        pages = {each.text(_KEY): each.text(_VALUE) for each in schema.tables(_METADATA)}
        page = json.loads(pages.get("pandas", "{}"))
        return declared, [name for name in page.get("index_columns", ()) if isinstance(name, str)]
    except (LookupError, ValueError, AttributeError, struct.error):  # none, or metadata of another form
        return [], []


def _schema(file: Path, kind: str) -> _Table:
    """Return the schema: that of a footer, or of a Message that follows a mark and its length."""
    if kind == "parquet":
        page = base64.b64decode(pl.read_parquet_metadata(file)["ARROW:schema"])
        page = page.removeprefix(b"\xff\xff\xff\xff")[4:]
    else:
        with file.open("rb") as stream:
            if kind == "arrow stream":
                page = stream.read(int.from_bytes(stream.read(8)[4:], "little"))
            else:
                stream.seek(-10, SEEK_END)
                size = int.from_bytes(stream.read(4), "little")
                stream.seek(-10 - size, SEEK_END)
                page = stream.read(size)
    root = _Table(page, struct.unpack_from("<I", page)[0])
    return _Table(page, root.place(1 if kind == "arrow" else 2))
