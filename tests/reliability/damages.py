"""What happens to files on failing disks."""

from collections.abc import Callable


def _flipped(content: bytes, place: float) -> bytes:
    at = int(place * (len(content) - 1))
    return content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :] if content else b"\x01"


DAMAGES: dict[str, Callable[[bytes, float], bytes | None]] = {
    "a flipped bit": _flipped,
    "cut off": lambda content, place: content[: int(place * len(content))],
    "zeros": lambda content, _: bytes(len(content)),
    "removed": lambda *_: None,
}
"""Kind -> what becomes of a file's content; None: the file is gone."""
