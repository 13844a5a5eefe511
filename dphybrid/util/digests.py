"""Checksums of files and values, and the check that files still have theirs."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from isal.isal_zlib import crc32

from dphybrid.util.errors import UserError

_PIECE_BYTES = 2**20
BLOCK = 2**18
"""Bytes of a file that have a sum of their own: a lookup reads and checks so many."""


def file_digest(path: Path) -> str:
    """Return the sha256 of a file in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def combined_digest(parts: Iterable[bytes]) -> str:
    """Return the sha256 of parts in hex; their borders count."""
    total = hashlib.sha256()
    for part in parts:
        total.update(len(part).to_bytes(8, "little"))  # else "ab", "c" and "a", "bc" would be one
        total.update(part)
    return total.hexdigest()


def value_digest(value: object) -> str:
    """Return the sha256 in hex of a value that is fit for JSON; the order of names does not count."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def copy_files(source: Path, target: Path) -> dict[str, str]:
    """Copy the files of a folder into a new one; return the sha256 in hex of what was read, by name."""
    target.mkdir()
    sums = {}
    for file in sorted(source.iterdir()):
        digest = hashlib.sha256()
        # unbuffered: pieces of a mebibyte would only be copied once more
        with file.open("rb", buffering=0) as read, (target / file.name).open("wb") as written:
            while piece := read.read(_PIECE_BYTES):
                digest.update(piece)
                written.write(piece)
        sums[file.name] = digest.hexdigest()
    return sums


def block_sum(block: bytes | memoryview, before: int = 0) -> int:
    """Return the CRC-32 of a part of a file. before: that of the bytes before it."""
    return crc32(block, before)


class BlockSums:
    """The CRC-32 of each `BLOCK` bytes of a file, so that a reader can check the parts that it reads. It
    detects damage, not forgery, in a fifth of a sha256's time."""

    def __init__(self) -> None:
        self._crcs: list[int] = []
        self._room = 0

    def update(self, piece: bytes | memoryview) -> None:
        """Take the file's next bytes."""
        rest = memoryview(piece)
        while len(rest):
            if not self._room:
                self._crcs.append(0)
                self._room = BLOCK
            part, rest = rest[: self._room], rest[self._room :]
            self._crcs[-1] = block_sum(part, self._crcs[-1])
            self._room -= len(part)

    def hexdigest(self) -> str:
        """Return the sums, eight digits a block."""
        return "".join(f"{crc:08x}" for crc in self._crcs)


def file_block_sums(path: Path) -> str:
    """Return the `BlockSums` of a file in hex."""
    sums, piece = BlockSums(), memoryview(bytearray(_PIECE_BYTES))
    # Into one buffer, instead of a new one for each piece.
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(piece):
            sums.update(piece[:count])
    return sums.hexdigest()


SUMS = {"sha256": file_digest, "block_sums": file_block_sums}
"""Kinds of a file's checksum, by the names under which pages have them."""


def verify_files(folder: Path, sums: Mapping[str, Mapping[str, str]], remedy: str) -> None:
    """Check, side by side, that the files of `folder` have these sums: a kind of `SUMS` -> name below the
    folder -> sum. Raises UserError that names the first one that has not."""
    # hashing leaves the interpreter's lock, so threads read and hash on all cores
    with ThreadPoolExecutor() as pool:
        for done in [
            pool.submit(_check_file, folder / name, kind, wanted, remedy)
            for kind, files in sums.items()
            for name, wanted in files.items()
        ]:
            done.result()


def _check_file(file: Path, kind: str, wanted: str, remedy: str) -> None:
    try:
        found = SUMS[kind](file)
    except FileNotFoundError as error:
        raise UserError(f"{file}: is missing; {remedy}") from error
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror}); {remedy}") from error
    if found != wanted:
        raise UserError(f"{file}: is damaged (its checksum differs); {remedy}")
