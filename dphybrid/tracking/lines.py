"""Lines and pages with a checksum (CRC-32), so that damage on a disk is noticed: what does not fit its sum is
not read at all."""

import json
import os
import zlib
from pathlib import Path
from typing import Any

from dphybrid.util import files
from dphybrid.util.system import NOT_INHERITED

_ENCODER = json.JSONEncoder(separators=(",", ":"))  # made once: a line is written at each step
PRIVATE = 0o600
"""Mode of every file here: records and addresses concern their owner alone."""


def encode(number: int, record: dict[str, Any]) -> bytes:
    """Return a record as a line: checksum, number, JSON."""
    body = b"%d %s" % (number, _ENCODER.encode(record).encode())
    return b"%08x %s\n" % (zlib.crc32(body), body)


def decode(line: bytes) -> dict[str, Any] | None:
    """Return the record of a line with its number as `n`, or None for a line that is not as it was
    written."""
    body = _unsealed(line.rstrip(b"\n"))
    if body is None:
        return None
    number, _, text = body.partition(b" ")
    try:
        record = json.loads(text)
        return {"n": int(number), **record}
    except ValueError:
        return None


def number_of(line: bytes) -> int | None:
    """Return the number of a line's record, or None for a line that is not as it was written."""
    body = _unsealed(line)
    return None if body is None else int(body.partition(b" ")[0])


def count_page(number: int) -> bytes:
    """Return a page for a number that is written in place: always of the same length."""
    body = b"%020d" % number
    return b"%08x %s\n" % (zlib.crc32(body), body)


def write_page(path: Path, value: Any, *, sync: bool = False) -> None:
    """Write a small page so that a reader sees the old one or the new one, never half of it; with `sync` also
    after a loss of power."""
    body = json.dumps(value).encode()
    write_whole(path, b"%08x %s\n" % (zlib.crc32(body), body), sync=sync)


def read_page(path: Path) -> tuple[Any, bool]:
    """Return (what a page holds, True), or (None, False) for a damaged one and (None, True) where there is
    none."""
    try:
        body = _unsealed(path.read_bytes().rstrip(b"\n"))
    except FileNotFoundError:
        return None, True
    try:
        return (None, False) if body is None else (int(body) if body.isdigit() else json.loads(body), True)
    except ValueError:
        return None, False


def write_whole(path: Path, content: bytes, *, sync: bool = False) -> None:
    """Put a file in the place of another at once. sync: it is on the disk, with its name, when this
    returns."""
    with files.replacing(path, opener=private, synced=sync) as file:
        file.write(content)


def private(path: str, flags: int) -> int:
    """Open a file that, where it is new, only its owner can read."""
    return os.open(path, flags | NOT_INHERITED, PRIVATE)


def _unsealed(sealed: bytes) -> bytes | None:
    digits, space, body = sealed.partition(b" ")
    try:
        fits = len(digits) == 8 and bool(space) and int(digits, 16) == zlib.crc32(body)
    except ValueError:
        return None
    return body if fits else None
