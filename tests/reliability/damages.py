"""Damage files as a failing disk would, with unchanged modification times."""

import os
from collections.abc import Callable
from pathlib import Path


def _flipped(content: bytes, place: float) -> bytes:
    at = int(place * (len(content) - 1))
    return content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :] if content else b"\x01"


DAMAGES: dict[str, Callable[[bytes, float], bytes | None]] = {
    "a flipped bit": _flipped,
    "cut off": lambda content, place: content[: int(place * len(content))],
    "zeros": lambda content, _: bytes(len(content)),
    "removed": lambda *_: None,
}
"""Kind of damage -> the new content of a file; None: the file is removed."""


def damage(file: Path, content: bytes | None) -> None:
    """Overwrite a file in place and keep its times, or remove it (None)."""
    before = file.stat()
    if content is None:
        file.unlink()
    else:
        with file.open("r+b") as stream:
            stream.write(content)
            stream.truncate()
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
