"""What the metadata of Parquet and Arrow files say that polars drops: which columns are dictionaries. It is
in Arrow's schema, a flatbuffer."""

import base64
import struct
from os import SEEK_END
from pathlib import Path

import polars as pl

_FIELDS, _NAME, _DICTIONARY = 1, 0, 4
"""Slots: of a Schema, and of its fields."""


def dictionaries_of(file: Path, kind: str) -> list[str]:
    """Return the columns that are dictionaries. kind: parquet or arrow. None for files of other writers."""
    try:
        if kind == "parquet":  # a Message, which holds the schema
            page = base64.b64decode(pl.read_parquet_metadata(file)["ARROW:schema"])
            page = page.removeprefix(b"\xff\xff\xff\xff")[4:]
        else:  # the footer, which does
            with file.open("rb") as stream:
                stream.seek(-10, SEEK_END)
                size = int.from_bytes(stream.read(4), "little")
                stream.seek(-10 - size, SEEK_END)
                page = stream.read(size)
        schema = _place(page, _number("<I", page, 0), 2 if kind == "parquet" else 1)
        found, fields = list[str](), _place(page, schema, _FIELDS)
        for start in range(fields + 4, fields + 4 + 4 * _number("<I", page, fields), 4):
            field = start + _number("<I", page, start)
            if _place(page, field, _DICTIONARY):
                name = _place(page, field, _NAME)
                found.append(page[name + 4 :][: _number("<I", page, name)].decode("utf-8", "replace"))
        return found
    except (LookupError, ValueError, struct.error):  # no schema, or one of another form
        return []


def _number(form: str, page: bytes, place: int) -> int:
    return int(struct.unpack_from(form, page, place)[0])


def _place(page: bytes, table: int, slot: int) -> int:
    """Return where the content of a table's field begins; 0 if the table lacks it."""
    slots = table - _number("<i", page, table)
    known = 4 + 2 * slot < _number("<H", page, slots)
    offset = _number("<H", page, slots + 4 + 2 * slot) if known else 0
    return table + offset + _number("<I", page, table + offset) if offset else 0
