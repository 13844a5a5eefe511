"""Checksums of files and values, and the check of files against their checksums."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from isal.isal_zlib import crc32

from dphybrid.util.errors import UserError

_PIECE_BYTES = 2**20
BLOCK = 2**18
"""Bytes of a file for which there is one checksum: the smallest piece that a lookup reads and checks."""


def file_digest(path: Path) -> str:
    """Return the sha256 of a file in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def combined_digest(parts: Iterable[bytes]) -> str:
    """Return the sha256 of a sequence of parts in hex. It depends on where one part ends."""
    total = hashlib.sha256()
    for part in parts:
        # The length first: otherwise ("ab", "c") and ("a", "bc") would have the same digest.
        total.update(len(part).to_bytes(8, "little"))
        total.update(part)
    return total.hexdigest()


def value_digest(value: object) -> str:
    """Return the sha256 in hex of a value that JSON can represent. The order of keys does not matter."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def copy_files(source: Path, target: Path) -> dict[str, str]:
    """Copy the files of a folder into a new one; return the sha256 in hex of the content read, by name."""
    target.mkdir()
    sums = {}
    for file in sorted(source.iterdir()):
        digest = hashlib.sha256()
        # Unbuffered: a buffer would only add a copy of these large pieces.
        with file.open("rb", buffering=0) as read, (target / file.name).open("wb") as written:
            while piece := read.read(_PIECE_BYTES):
                digest.update(piece)
                written.write(piece)
        sums[file.name] = digest.hexdigest()
    return sums


def block_sum(block: bytes | memoryview, before: int = 0) -> int:
    """Return the CRC-32 of a part of a block. before: the CRC-32 of the block's earlier bytes."""
    return crc32(block, before)


class BlockSums:
    """Computes one CRC-32 for every `BLOCK` bytes of a file, so that a reader can check only the parts it
    reads. CRC-32 detects damage, not forgery, in a fifth of the time of sha256."""

    def __init__(self) -> None:
        self._crcs: list[int] = []
        self._room = 0

    def update(self, piece: bytes | memoryview) -> None:
        """Add the next bytes of the file."""
        rest = memoryview(piece)
        while len(rest):
            if not self._room:
                self._crcs.append(0)
                self._room = BLOCK
            part, rest = rest[: self._room], rest[self._room :]
            self._crcs[-1] = block_sum(part, self._crcs[-1])
            self._room -= len(part)

    def hexdigest(self) -> str:
        """Return the checksums in hex, eight digits for each block."""
        return "".join(f"{crc:08x}" for crc in self._crcs)


def file_block_sums(path: Path) -> str:
    """Return the `BlockSums` of a file in hex."""
    sums, piece = BlockSums(), memoryview(bytearray(_PIECE_BYTES))
    # readinto reuses one buffer; read() would allocate one for each piece.
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(piece):
            sums.update(piece[:count])
    return sums.hexdigest()


SUMS = {"sha256": file_digest, "block_sums": file_block_sums}
"""Kinds of file checksums, by the names of the page fields that hold them."""


def verify_files(folder: Path, sums: Mapping[str, Mapping[str, str]], remedy: str) -> None:
    """Check files of `folder` against their checksums, in parallel. sums: kind (a key of `SUMS`) -> name in
    the folder -> checksum. Raises UserError that names the first file that differs."""
    # Threads use all cores, because hashing releases the interpreter lock.
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
