"""Checksums of files and values, and the check of files against their checksums."""

import hashlib
import json
import stat
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePath

from dphybrid.util.errors import UserError

_PIECE_BYTES = 2**20


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


def file_crc(path: Path) -> str:
    """Return the CRC-32 of a file in hex. It detects damage, not forgery, in a fifth of sha256's time."""
    crc, piece = 0, memoryview(bytearray(_PIECE_BYTES))
    # readinto reuses one buffer; read() would allocate one for each piece.
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(piece):
            crc = zlib.crc32(piece[:count], crc)
    return f"{crc:08x}"


def _file_block_sums(path: Path) -> str:
    """Return the CRC-32 of each 256 KiB of a file in hex, as earlier checkpoints have them."""
    with path.open("rb", buffering=0) as file:
        return "".join(f"{zlib.crc32(block):08x}" for block in iter(lambda: file.read(2**18), b""))


SUMS = {"sha256": file_digest, "crc32": file_crc, "block_sums": _file_block_sums}
"""Kinds of file checksums, by the names of the page fields that hold them."""

_LINKED: set[Path] = set()


def allow_links(folder: Path) -> None:
    """Let files of `folder`, which this process has put together, be links to files elsewhere."""
    _LINKED.add(folder.resolve())


def refuse_foreign_files(folder: Path, remedy: str) -> None:
    """Raise UserError unless everything in `folder` is a regular file or a folder of its own: opening a pipe
    or a device may wait forever, and a link may lead to somebody's file. Opens nothing."""
    links = folder.resolve() in _LINKED
    try:
        for entry in sorted(folder.rglob("*")):
            mode = (entry.stat() if links else entry.lstat()).st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                kind = "a link" if stat.S_ISLNK(mode) else "neither a file nor a folder"
                raise UserError(f"{entry}: is {kind}, which this folder must not have; {remedy}")
    except OSError as error:
        raise UserError(f"{error.filename or folder}: cannot be read ({error.strerror}); {remedy}") from error


def verify_files(folder: Path, sums: Mapping[str, Mapping[str, str]], remedy: str) -> None:
    """Check files of `folder` against their checksums, in parallel. sums: kind (a key of `SUMS`) -> name in
    the folder -> checksum. Raises UserError that names the first file that differs, and for a name that leads
    out of the folder."""
    for name in (name for files in sums.values() for name in files):
        if PurePath(name).is_absolute() or ".." in PurePath(name).parts:
            raise UserError(f"{folder}: names the file {name!r}, which is outside of this folder; {remedy}")
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
